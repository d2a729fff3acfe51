//! GLM-4.1V-9B-Thinking: images of any size, several per sample.

mod collate;
pub mod config;
mod language;
mod model;
mod pictures;
pub mod positions;
pub mod processor;
mod projector;
pub mod resize;
mod sample;
mod tables;
mod vision;

#[cfg(test)]
mod tests;

pub use model::Glm41v;
pub use processor::Glm41vProcessor;
pub use tables::Glm41vTables;
