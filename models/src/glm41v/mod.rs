//! GLM-4.1V-9B-Thinking, GLM-4.6V-Flash and GLM-OCR: images of any size, several per sample.
//!
//! | module | part |
//! |---|---|
//! | [`config`] | `config.json` |
//! | `model` | parameters and forward pass |
//! | `collate`, `tables` | samples to a batch |
//! | `vision` | images to patch features |
//! | `projector` | patch features to rows of the decoder |
//! | `language` | the decoder |
//! | [`positions`] | positions of tokens |
//! | [`processor`], `sample`, `images`, `videos`, `thinking`, [`resize`] | raw samples to model inputs |

mod collate;
pub mod config;
mod images;
mod language;
mod model;
pub mod positions;
pub mod processor;
mod projector;
pub mod resize;
mod sample;
mod tables;
mod thinking;
pub mod videos;
mod vision;

#[cfg(test)]
mod tests;

pub use model::Glm41v;
pub use processor::Glm41vProcessor;
pub use tables::Glm41vTables;
