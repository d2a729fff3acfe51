//! CogVLM, CogAgent and CogVLM2: a Llama-like decoder whose layers hold two sets of weights, one for text and one for
//! pictures.
//!
//! | module | part |
//! |---|---|
//! | [`config`] | `config.json` |
//! | `projector` | from the EVA tower to the decoder |
//! | `experts`, `attention`, `layer`, `language` | the decoder |
//! | `cross_vision`, `cross_attention` | CogAgent's second tower and what reads it |
//! | [`positions`], `rope` | positions and their angles |
//! | [`prompt`], [`processor`], `sample` | samples to tokens and pixels |

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
pub use cross_vision::CrossPictures;
pub use model::CogVlm;
pub use processor::CogProcessor;
pub use rope::rotary;
pub use tables::CogAgentTables;
