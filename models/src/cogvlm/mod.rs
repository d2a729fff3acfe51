//! CogVLM, CogAgent and CogVLM2: a Llama-like decoder whose layers have two sets of weights, for text and for images.
//!
//! | module | part |
//! |---|---|
//! | [`config`] | `config.json` |
//! | `projector` | EVA's features to the width of the decoder |
//! | `experts`, `attention`, `layer`, `language` | the decoder |
//! | `cross_vision`, `cross_attention` | CogAgent's second tower, and the attention that reads it |
//! | [`positions`], `rope` | positions and their rotary angles |
//! | [`prompt`], [`processor`] | samples to tokens and pixels |

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
mod tables;

#[cfg(test)]
mod behaviour_tests;
#[cfg(test)]
mod tests;

pub use config::CogConfig;
pub use cross_vision::CrossPictures;
pub use model::CogVlm;
pub use processor::CogProcessor;
pub use rope::rotary;
pub use tables::CogAgentTables;
