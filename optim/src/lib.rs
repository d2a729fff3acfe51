//! Update rules on flat slices of a tensor, learning-rate schedules and parameter groups. The crate knows nothing of
//! ranks.
//!
//! A rule ([`Optimizer`]) declares the state it needs per element, such as Adam's moments. Its step updates a
//! *chunk*: consecutive elements of one tensor, with their gradients and state. The rule itself stores nothing
//! between steps. An element's result depends on its own inputs and global index only. So any division of a model
//! into chunks (over ranks, tiers, threads) gives the same bits; chunks of moments in 8 bits end at block borders.
//!
//! ```
//! use optim::clip::{GradientScale, sum_of_squares};
//! use optim::{AdamW, GradChunk, Optimizer, OptimError, Schedule, ScheduleKind, StateChunk, StepArgs, WeightChunk};
//!
//! # fn main() -> Result<(), OptimError> {
//! let rule = AdamW::new(0.9, 0.95, 1e-8)?;
//! let schedule = Schedule { kind: ScheduleKind::Cosine, warmup_steps: 10, total_steps: 200, base_lr: 0.05 };
//! // Two weights in f32 with a first and a second moment each; they should become 1 and -2.
//! let (target, mut weight) = ([1.0_f32, -2.0], [0.0_f32; 2]);
//! let (mut first, mut second) = ([0.0; 2], [0.0; 2]);
//! for step in 0..schedule.total_steps {
//!     let grad: Vec<f32> = weight.iter().zip(&target).map(|(w, t)| w - t).collect();
//!     let scale = GradientScale::new(sum_of_squares(&grad), 1.0, Some(1.0)); // clipped to norm 1
//!     rule.step(StepArgs {
//!         step: step + 1,
//!         lr: schedule.lr(step) as f32,
//!         weight_decay: 0.0,
//!         grad_scale: scale.factor,
//!         seed: 0,
//!         first_element: 0,
//!         grad: GradChunk::F32(&grad),
//!         weight: WeightChunk::F32(&mut weight),
//!         state: vec![StateChunk::F32(&mut first), StateChunk::F32(&mut second)],
//!     })?;
//! }
//! assert!(weight.iter().zip(&target).all(|(w, t)| (w - t).abs() < 0.05), "{weight:?}");
//! # Ok(())
//! # }
//! ```
//!
//! The variants of the chunk types select the precision: [`WeightChunk::Mixed`] is an `f32` master copy plus `bf16`
//! weights, [`WeightChunk::PureBf16`] is `bf16` alone.
//!
//! | module | concept |
//! |---|---|
//! | [`optimizer`] | the trait of an update rule: declared state slots, one step over a chunk |
//! | [`adamw`] | `AdamW` in `f32`, with 16-bit weights and an `f32` master, or in pure `bf16` |
//! | [`accumulate`] | sums of gradients in `bf16` with stochastic rounding |
//! | [`clip`] | the gradient norm as a sum of fixed order, and the factor that clips it |
//! | [`loss_scale`] | the dynamic loss scale of fp16 training as a state machine |
//! | [`schedule`] | the learning rate as a pure function of the step |
//! | [`groups`] | weight decay and learning-rate scale by parameter name |
//! | [`rng`] | counter-based random numbers (Philox) and stochastic rounding |
//! | [`rounding`] | cheaper random bits for stochastic rounding |
#![deny(unsafe_code)]

pub mod accumulate;
pub mod adamw;
pub mod clip;
mod error;
pub mod groups;
mod lanes;
pub mod loss_scale;
pub mod optimizer;
pub mod rng;
pub mod rounding;
pub mod schedule;
mod squares;
mod warmup;

pub use adamw::{AdamW, Bf16Storage, MomentDtype, PureBf16};
pub use error::OptimError;
pub use groups::{GroupOptions, ParameterGroups};
pub use loss_scale::{LossScale, LossScaler};
pub use optimizer::{
    Coverage, GradChunk, Optimizer, Precision, StateChunk, StateSlot, StepArgs, WeightChunk,
};
pub use schedule::{CurveOptions, Schedule, ScheduleKind};
pub use warmup::{WarmupOptions, WarmupShape};
