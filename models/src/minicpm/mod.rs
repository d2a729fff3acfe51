//! MiniCPM-V 2.6, 4.0 and 4.5, and the vision + text path of MiniCPM-o 2.6 and 4.5.
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
//! | [`processor`], `sample`, `labels`, [`placeholder`], [`slicing`], `frames` | raw samples to model inputs |

mod collate;
pub mod config;
pub(crate) mod frames;
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
