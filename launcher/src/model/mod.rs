//! Model of a run, with its plan, its optimizer and the contents of its checkpoints.

pub(crate) mod adapter;
pub(crate) mod contents;
pub(crate) mod files;
pub(crate) mod not_finite;
pub(crate) mod optimizer;
pub(crate) mod quantize;
pub(crate) mod setup;
pub(crate) mod split;
pub(crate) mod stages;
pub(crate) mod stored;
