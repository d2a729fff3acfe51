//! Tensors, an accounted memory pool and the coarse operations of vision-language models on one device.
//!
//! | concept | type |
//! |---|---|
//! | element type | [`DType`], [`Element`], [`Float`] |
//! | memory with counters and a limit | [`Pool`], [`Tag`] |
//! | counter-based random numbers | [`random`] |
//! | immutable value | [`Tensor`], built through [`TensorMut`] |
//! | operations of a device | [`Backend`]: [`CpuBackend`], [`NullBackend`] |
#![deny(unsafe_code)]

mod backend;
mod check;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dtype;
mod error;
mod null;
mod pool;
pub mod random;
mod shape;
mod tensor;

pub use backend::{
    AttentionArgs, AttentionGrads, AttentionOut, Backend, Device, Direction, DropoutArgs, Gelu,
    IGNORED_LABEL, LoraArgs, LoraGrads, LossGrads, LossNeeds, MatmulArgs, NormGrads, RopeLayout,
    Transpose,
};
pub use cpu::CpuBackend;
pub use dtype::{DType, Element, Float};
pub use error::{KernelError, Result};
pub use null::NullBackend;
pub use pool::{Block, Pool, PoolEvent, PoolStats, Reservation, Tag, TagBytes};
pub use shape::{MAX_RANK, Shape};
pub use tensor::{ForeignBytes, Tensor, TensorMut};
