//! GLM-4V-9B and CogAgent-9B-20241220: one square image per conversation.
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
//! | [`agent`] | prompts of CogAgent-9B |
//! | [`processor`], `sample` | raw samples to model inputs |

pub mod agent;
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
