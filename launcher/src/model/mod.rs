//! The model of a run: opened, divided into a plan, with its optimizer and the weights that its checkpoints have.

pub(crate) mod contents;
pub(crate) mod files;
pub(crate) mod optimizer;
pub(crate) mod setup;
pub(crate) mod split;
pub(crate) mod stored;
