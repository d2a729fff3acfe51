//! EVA2-CLIP-E, the vision tower of CogVLM, CogAgent, CogVLM2 and GLM-4V, with parts of their projectors: a convolution
//! that folds 2 x 2 patches, a gated projector, and learned rows around each image.
//!
//! Shapes: `N` images, `p` patches of an image, `c` width of the tower, `d` width of the language model.

mod config;
mod projector;
mod tables;
mod tower;

pub use config::EvaConfig;
pub(crate) use projector::{Fold, Frame, GluProjector};
pub use tables::EvaTables;
pub(crate) use tables::{EvaImages, eva_images, images};
pub(crate) use tower::EvaTower;
