//! Which samples a step takes, and threads that prepare them ahead of time.

mod loader;
mod sampler;

pub use loader::{Loader, LoaderOptions, Prepared};
pub use sampler::{Sampler, SamplerSizes};
