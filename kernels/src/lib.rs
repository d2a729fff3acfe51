//! Tensors, an accounted memory pool and the operations of vision-language models on one device.
//!
//! A [`Backend`] is a device. Its operations are coarse, and each comes with its backward: matrix product with bias,
//! norm, attention over packed sequences, loss over a vocabulary. Every byte they return is counted in the device's
//! [`Pool`], under a [`Tag`] and against a limit. The [`MetaBackend`] is the meta device: it takes the same calls,
//! checks shapes and counts bytes without computing. So a program's memory need is known before it runs.
//!
//! ```
//! use kernels::{Backend, CpuBackend, DType, MatmulArgs, MetaBackend, Pool, Shape, Tag, Tensor, Transpose};
//!
//! /// `x W^T` for rows `x` and a weight `[outputs, inputs]`.
//! fn project(device: &dyn Backend, x: &[f32], w: &[f32]) -> kernels::Result<Tensor> {
//!     let upload = |values: &[f32], shape: [usize; 2], tag| {
//!         device.upload(bytemuck::cast_slice(values), Shape::new(&shape), DType::F32, tag)
//!     };
//!     device.matmul(MatmulArgs {
//!         a: &upload(x, [2, 3], Tag::Activations)?,
//!         transpose_a: Transpose::No,
//!         b: &upload(w, [1, 3], Tag::Parameters)?,
//!         transpose_b: Transpose::Yes,
//!         bias: None,
//!         out: DType::F32,
//!     })
//! }
//!
//! # fn main() -> kernels::Result<()> {
//! let (x, w) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, -1.0]);
//! let cpu = CpuBackend::unlimited();
//! assert_eq!(project(&cpu, &x, &w)?.to_f32_vec()?, [-2.0, -2.0]);
//!
//! // The same program on the meta device takes the same bytes.
//! let meta = MetaBackend::unlimited();
//! assert_eq!(project(&meta, &x, &w)?.shape(), Shape::new(&[2, 1]));
//! assert_eq!(meta.pool().stats().peak, cpu.pool().stats().peak);
//!
//! // Exceeding the limit is an error that names the request and the bytes in use by tag. Nothing is lost.
//! let tight = CpuBackend::new(Pool::new("device", Some(32)));
//! assert!(project(&tight, &x, &w).is_err());
//! # Ok(())
//! # }
//! ```
//!
//! | concept | type |
//! |---|---|
//! | element type | [`DType`], [`Element`], [`Float`] |
//! | memory with counters and a limit | [`Pool`], [`Tag`] |
//! | counter-based random numbers | [`random`] |
//! | immutable value | [`Tensor`], built through [`TensorMut`] |
//! | operations of a device | [`Backend`]: [`CpuBackend`], [`MetaBackend`]; GPUs with the feature `cuda` |
//!
//! Results depend on neither the number of threads nor their timing.
#![deny(unsafe_code)]

mod adapted;
mod backend;
mod check;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dtype;
pub mod dynamic_map;
mod error;
pub mod footprint;
mod grouped;
mod meta;
mod peers;
mod pool;
pub mod quantized;
pub mod random;
mod registered;
mod reserved_upload;
mod resident;
mod shape;
mod tensor;
mod timeline;
#[cfg(feature = "cuda")]
pub mod verify;

pub use adapted::{
    AdaptedLayer, AdaptedLinear, AdaptedLinearArgs, AdaptedLinearGradArgs, AdaptedLinearGrads,
    AdapterArgs, AdapterDropout, AdapterGrads, AdapterSums,
};
pub use backend::{
    AttentionArgs, AttentionGrads, AttentionOut, Backend, Device, Direction, DropoutArgs, Gelu,
    IGNORED_LABEL, KernelList, LossGrads, LossNeeds, MatmulArgs, NormGrads, RopeLayout,
    STRETCH_ROWS, SumPart, Transpose,
};
pub use cpu::{CpuBackend, CpuMath};
pub use dtype::{DType, Element, Float};
pub use error::{KernelError, Result};
pub use grouped::{GroupedMatmulArgs, MatmulGroup};
pub use meta::MetaBackend;
pub use peers::{GroupAccess, Lane, PeerAccess};
pub use pool::{Block, MemoryPlan, Pool, PoolEvent, PoolStats, Reservation, Tag, TagBytes};
pub use quantized::{Codebook, Quantization};
pub use registered::HostRegistration;
pub use reserved_upload::ReservedUpload;
pub use resident::{AdamWArgs, Form, Part, Resident, ResidentAccess, RoundingCounter, Scalars};
pub use shape::{MAX_RANK, Shape};
pub use tensor::{Fetch, ForeignBytes, Tensor, TensorMut};
pub use timeline::{DeviceLane, DeviceSpan};
