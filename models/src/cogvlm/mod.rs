//! CogVLM, CogAgent and CogVLM2: a Llama-like decoder whose layers have two sets of weights, one for text rows and one
//! for image rows.
//!
//! | module | part |
//! |---|---|
//! | [`config`] | `config.json` |
//! | `model` | parameters and forward pass |
//! | `collate`, `tables` | samples to a batch |
//! | [`crate::eva`], `cross_vision` (CogAgent's second tower) | images to patch features |
//! | `projector` | patch features to rows of the decoder |
//! | `language`, `layer`, `attention`, `experts`, `cross_attention` | the decoder |
//! | [`positions`], `rope` | positions of tokens |
//! | [`processor`], `sample`, [`prompt`] | raw samples to model inputs |

mod attention;
mod collate;
pub mod config;
mod cross_attention;
mod cross_vision;
mod experts;
mod language;
mod layer;
mod model;
pub mod positions;
pub mod processor;
mod projector;
pub mod prompt;
mod rope;
mod sample;
mod tables;

#[cfg(test)]
mod behaviour_tests;
#[cfg(test)]
mod tests;

pub use config::CogConfig;
pub use cross_vision::CrossImages;
pub use model::CogVlm;
pub use processor::CogProcessor;
pub use rope::rotary;
pub use tables::CogAgentTables;
