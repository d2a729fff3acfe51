//! Samples of a file, which of them a step takes, and threads that prepare them ahead of time.

pub(crate) mod answers;
pub(crate) mod check;
pub(crate) mod lines;
mod loader;
pub(crate) mod problems;
mod sampler;
mod samples;

pub use loader::{Loader, LoaderOptions, Prepared};
pub use sampler::{Sampler, SamplerSizes};
pub(crate) use samples::{Reading, SampleSet, encode_in_order, read, verdicts};
