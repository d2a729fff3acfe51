//! Vision-language models written forward-only on a tape of replayed segments, with their image and text processing.
#![forbid(unsafe_code)]

pub mod autograd;
mod error;
pub mod image;
pub mod lora;
pub mod minicpm;
pub mod nn;
pub mod ops;
pub mod params;
pub mod text;
pub mod weights;

pub use error::{ModelError, Result};
pub use weights::WeightError;
