//! NVIDIA GPUs: kernels in header-free CUDA C++, compiled at run time.
//!
//! | layer | module |
//! |---|---|
//! | what this machine has | [`library`], [`probe`]; [`nvml`] through the management library |
//! | what is compiled | [`module`]: families, defines, source text; [`nvrtc`]: the compiler |
//! | machine code for a GPU | [`image`]: disk cache, compiler, built-in PTX |
//! | functions of the driver that was found | `driver.rs` |
//! | context, streams and events of a GPU | [`context`] |
//! | a GPU: memory, streams, launches | [`gpu`] |
//! | CUDA graphs of commands | [`graph`], [`backend::graphs`] |
//! | what the choice of kernels depends on | [`device_kind`] |
//! | one kernel launch as a value: grid and arguments | [`launch`] |
//! | pinned and shared memory, timing | [`transfer`] |
//! | copies that overlap with computation | `copies.rs` |
//! | timeline of a GPU | `timeline.rs` |
//! | NVIDIA's own products and collectives | [`matmul`], [`nccl`] |
//! | operations as launches | [`ops`] |
//! | all of it as a [`Backend`](crate::Backend) | [`backend`] |

pub mod backend;
pub mod context;
mod copies;
pub mod device_kind;
mod driver;
mod error;
pub mod gpu;
pub mod graph;
mod group;
pub mod image;
pub mod launch;
pub mod library;
pub mod matmul;
pub mod module;
pub mod nccl;
pub mod nvml;
pub mod nvrtc;
pub mod ops;
mod peers;
pub mod probe;
pub mod ptx;
mod timeline;
pub mod transfer;

pub use backend::CudaBackend;
pub use error::{CudaError, Result};
