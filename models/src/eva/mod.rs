//! EVA2-CLIP-E, the vision tower of CogVLM, CogAgent, CogVLM2 and GLM-4V, with its connection to the language model:
//! a convolution that folds 2 x 2 patches, a gated projector, and learned rows around each image.
//!
//! Shapes: `N` images, `p` patches per image, `c` width of the tower, `d` width of the language model.

mod config;
mod projector;
mod tables;
mod tower;

pub use config::EvaConfig;
pub(crate) use config::RawEva;
pub(crate) use projector::{Fold, Frame, GluProjector};
pub use tables::EvaTables;
pub(crate) use tables::{EvaPictures, eva_pictures, pictures};
pub(crate) use tower::EvaTower;
