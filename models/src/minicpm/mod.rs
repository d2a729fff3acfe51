//! MiniCPM-V 2.6 and the vision + text path of MiniCPM-o 2.6.

pub mod config;
pub mod data;
mod labels;
pub mod placeholder;
pub mod positions;
pub mod processor;
pub mod sample;
mod sample_error;
pub mod slicing;
