//! GLM-4V-9B: one square image per conversation, with the EVA tower.

mod collate;
pub mod config;
mod language;
mod model;
pub mod positions;
pub mod processor;
mod projector;
mod sample;

#[cfg(test)]
mod tests;

pub use model::Glm4v;
pub use processor::Glm4vProcessor;
