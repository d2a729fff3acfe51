//! Training data: samples of a file, their order over steps, and threads that prepare batches.

pub(crate) mod answers;
mod budget;
pub(crate) mod check;
pub(crate) mod files;
pub(crate) mod images;
mod loader;
pub(crate) mod losses;
mod mix;
pub(crate) mod problems;
mod sampler;
mod samples;
pub(crate) mod stream;
mod unreadable;
mod verdict_cache;

pub use budget::Until;
pub use loader::{Loader, LoaderOptions, Prepared};
pub use mix::Mix;
pub use sampler::{Sampler, SamplerSizes};
pub(crate) use samples::{
    ReadSamples, Reading, SampleSet, Taken, encode_in_order, missed, read, verdicts,
};
