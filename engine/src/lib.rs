//! ZeRO stages 0-3 as one code path: plan, communicators, sharded parameter store, offload tiers, checkpoints.
//!
//! A [`Plan`] is a pure function of the model ([`ModelSpec`]: units of parameters), the settings ([`ZeroConfig`]) and
//! the number of ranks. It says which rank owns which bytes and when each unit is gathered. [`Zero`] executes the plan
//! on one rank. A pass *leases* a unit to read its weights (FSDP: unshard … reshard) and *deposits* gradients (FSDP:
//! the gradient hook). [`Zero::step`] clips gradients and updates weights. The same program runs at every stage.
//!
//! ```
//! use engine::comm::threads;
//! use engine::{EngineError, ModelSpec, OptimizerConfig, ParamAccess, ParamId, ParamSpec, PassKind, Phase, Plan, Stage};
//! use engine::{Tiers, UnitId, UnitSpec, Zero, ZeroConfig};
//! use kernels::{MetaBackend, Pool, Shape, Tag, Tensor};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), EngineError> {
//! let (unit, weight) = (UnitId(0), ParamId(0));
//! let param = ParamSpec {
//!     name: "weight".into(), shape: Shape::new(&[4]), unit, trainable: true,
//!     quantization: None,
//! };
//! let spec = ModelSpec { units: vec![UnitSpec { name: "model".into() }], params: vec![param] };
//! let config = ZeroConfig { stage: Stage::Zero3, ..ZeroConfig::default() };
//! let plan = Arc::new(Plan::new(spec, config, 2)?);
//!
//! // Two ranks as threads of this process; `comm::shm` connects processes. Each rank sees one sample, 0 or 1.
//! let ranks = threads::world(2, 1 << 20)?.into_iter().map(|comm| {
//!     let plan = plan.clone();
//!     std::thread::spawn(move || -> Result<Vec<f32>, EngineError> {
//!         let sample = comm.world().rank as f32;
//!         let pool = Pool::new("device", None);
//!         let tiers = Tiers::new(pool.clone(), Pool::new("host", None));
//!         let group = optim::GroupOptions { weight_decay: 0.0, lr_scale: 1.0 };
//!         let optimizer = OptimizerConfig { rule: Arc::new(optim::AdamW::default()), groups: vec![group] };
//!         let backend = Arc::new(MetaBackend::new(pool.clone()));
//!         let mut zero = Zero::new(plan, comm, backend, tiers, optimizer)?; // allocates this rank's half
//!         for _ in 0..200 {
//!             zero.begin_pass(PassKind::Train);
//!             let lease = zero.lease(unit, Phase::Forward)?; // gathered from both ranks
//!             let errors = lease.param(weight)?.as_slice::<f32>().iter().map(|w| w - sample);
//!             let gradient: Vec<f32> = errors.collect();
//!             lease.end()?; // released again
//!             let lease = zero.lease(unit, Phase::Backward)?;
//!             zero.deposit(weight, &Tensor::from_slice(&pool, Tag::Workspace, [4], &gradient)?)?;
//!             lease.end()?;
//!             let loss = gradient.iter().map(|g| f64::from(0.5 * g * g)).sum();
//!             zero.end_micro_batch(loss, 1)?;
//!             zero.step(0.02)?;
//!         }
//!         let mut weights = Vec::new();
//!         zero.visit_weights(|_, w| { weights = w.to_f32_vec()?; Ok::<_, EngineError>(()) })?;
//!         Ok(weights)
//!     })
//! });
//! for rank in ranks.collect::<Vec<_>>() {
//!     let weights = rank.join().expect("no rank panics")?;
//!     assert!(weights.iter().all(|w| (w - 0.5).abs() < 0.02), "{weights:?}"); // the mean of both samples
//! }
//! # Ok(())
//! # }
//! ```
//!
//! | question | module |
//! |---|---|
//! | which rank owns which bytes | [`plan`] |
//! | how a model reads weights and hands over gradients | [`access`] |
//! | the optimizer for tensors of another library | [`sharded`], `examples/candle`, `examples/burn` |
//! | how ranks communicate | [`comm`] |
//! | how memory is allocated on device, host and disk | [`offload`], [`spill`] |
//! | how training state is saved, and loaded at any world size | [`checkpoint`] |
#![deny(unsafe_code)]

pub mod access;
pub mod checkpoint;
pub mod comm;
mod dry_run;
mod error;
#[doc(hidden)]
pub mod fuzzing;
pub mod offload;
pub mod plan;
pub mod sharded;
pub mod spec;
mod step;
mod store;
mod sync;
mod timing;
pub mod trace;
mod zero;

pub use access::{BoundaryTensor, Lease, LeaseOwner, ParamAccess, Phase, PipelineStage};
pub use dry_run::DryRun;
pub use error::EngineError;
pub use offload::{Activations, Region, Saved, Spill, Tiers, spill};
pub use optim::Precision;
pub use optim::clip::{NORM_BLOCK_ELEMS, sum_of_squares};
pub use plan::{
    DeviceTransport, GradDtype, Offload, OptimizerInBackward, PassKind, Plan, Slice, Stage,
    StateKind, Tier, ZeroConfig,
};
pub use spec::{ModelSpec, ParamId, ParamSpec, UnitId, UnitSpec};
pub use step::OptimizerConfig;
pub use store::registered::HostRegistered;
pub use timing::{DeviceTimes, Times};
pub use trace::Trace;
pub use zero::{StepReport, Zero, check_trained};
