//! Update rules on flat windows, learning-rate schedules and parameter groups. Knows nothing of ranks.
//!
//! | module | concept |
//! |---|---|
//! | [`optimizer`] | what an update rule is: declared state slots, one step over a window |
//! | [`adamw`] | `AdamW` in `f32`, with 16-bit weights and an `f32` master, or in pure `bf16` |
//! | [`accumulate`] | sums of gradients in `bf16` with stochastic rounding |
//! | [`clip`] | the gradient norm as a sum of fixed order, and the factor that clips it |
//! | [`loss_scale`] | the dynamic loss scale of fp16 training as a state machine |
//! | [`schedule`] | the learning rate as a pure function of the step |
//! | [`groups`] | weight decay and learning-rate scale by parameter name |
//! | [`rng`] | counter-based random numbers and stochastic rounding |
//! | [`rounding`] | the cheaper random bits that rounding draws |
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

pub use adamw::{AdamW, Bf16Storage, MomentDtype, PureBf16};
pub use error::OptimError;
pub use groups::{GroupOptions, ParameterGroups};
pub use loss_scale::{LossScale, LossScaler};
pub use optimizer::{
    GradWindow, Optimizer, Precision, StateSlot, StateWindow, StepArgs, WeightWindow,
};
pub use schedule::{Schedule, ScheduleKind};
