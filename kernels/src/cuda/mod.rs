//! NVIDIA GPUs: kernels in header-free CUDA C++, compiled at run time.
//!
//! | layer | module |
//! |---|---|
//! | what is compiled | [`module`]: families, defines, source text |
//! | what is executed | [`launch`]: a grid with its arguments, as a value |
//! | operations as launches | [`ops`] |
//! | libraries of the machine | [`library`] |
//! | what the driver tells of the machine | [`probe`] through CUDA, [`nvml`] through the management library |

pub mod launch;
pub mod library;
pub mod module;
pub mod nvml;
pub mod ops;
pub mod probe;
