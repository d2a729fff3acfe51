//! MiniCPM-V 2.6 and the vision + text path of MiniCPM-o 2.6.

pub mod config;
pub mod data;
mod init;
mod labels;
mod language;
mod model;
pub mod placeholder;
pub mod positions;
pub mod processor;
mod resampler;
pub mod sample;
mod sample_error;
pub mod slicing;
mod vision;

#[cfg(test)]
mod tests;

pub use model::{MiniCpm, MiniCpmOptions};
