//! MiniCPM-V 2.6, and the vision and text path of MiniCPM-o 2.6.

mod collate;
pub mod config;
mod labels;
mod language;
mod model;
pub mod placeholder;
pub mod positions;
pub mod processor;
mod projector;
mod sample;
pub mod slicing;
mod tables;
mod vision;

#[cfg(test)]
mod tests;

pub use model::MiniCpm;
pub use processor::MiniCpmProcessor;
pub use tables::MiniCpmTables;
