//! GLM-4V-9B: one square image per conversation.
//!
//! | module | part |
//! |---|---|
//! | [`config`] | `config.json` |
//! | `model` | parameters and forward pass |
//! | `collate` | samples to a batch |
//! | [`crate::eva`] | images to patch features |
//! | `projector` | patch features to rows of the decoder |
//! | `language` | the decoder |
//! | [`positions`] | positions of tokens |
//! | [`processor`], `sample` | raw samples to model inputs |

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
