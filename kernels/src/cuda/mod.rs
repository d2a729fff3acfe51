//! NVIDIA GPUs: kernels in header-free CUDA C++, compiled at run time.
//!
//! | layer | module |
//! |---|---|
//! | what is compiled | [`module`]: families, defines, source text |
//! | what is executed | [`launch`]: a grid with its arguments, as a value |
//! | operations as launches | [`ops`] |

pub mod launch;
pub mod module;
pub mod ops;
