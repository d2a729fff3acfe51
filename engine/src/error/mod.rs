//! Errors of the engine.

mod spill;

pub use spill::SpillError;

use crate::plan::Phase;
use crate::spec::{ParamId, UnitId};

/// Error of the training engine, from any of its parts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// An operation on tensors or on the device failed.
    #[error(transparent)]
    Kernel(#[from] kernels::KernelError),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] crate::comm::CommError),
    /// The model or the settings cannot be planned.
    #[error(transparent)]
    Plan(#[from] crate::plan::PlanError),
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] crate::checkpoint::CheckpointError),
    /// The optimizer rejected its arguments.
    #[error(transparent)]
    Optim(#[from] optim::OptimError),
    /// An operation on spill files failed.
    #[error(transparent)]
    Spill(#[from] SpillError),
    /// A state is planned on disk, but this rank has no spill directory.
    #[error("state is planned on the nvme tier, and this rank has no spill directory for {kind}")]
    NoSpillDirectory {
        /// The kind of state that is planned on disk.
        kind: &'static str,
    },
    /// The operating system refused host memory.
    #[error("cannot map {bytes} bytes of host memory")]
    Map {
        /// Number of bytes requested.
        bytes: usize,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// A weight was requested from a lease of another unit.
    #[error("parameter {param:?} is not part of the leased unit {unit:?}")]
    NotInUnit {
        /// The requested parameter.
        param: ParamId,
        /// The leased unit.
        unit: UnitId,
    },
    /// A unit was leased outside a pass or against the order of the schedule.
    #[error("unit {unit} cannot be leased for {phase:?} at position {position} of the pass")]
    LeaseOrder {
        /// Name of the unit.
        unit: String,
        /// Phase of the pass in which the unit was leased.
        phase: Phase,
        /// Number of schedule entries that are done.
        position: usize,
    },
    /// A gradient was deposited twice, for a frozen parameter, outside its unit's backward lease, or with the wrong
    /// shape.
    #[error("unexpected gradient for {param}: {reason}")]
    UnexpectedGradient {
        /// Name of the parameter.
        param: String,
        /// Why the gradient is unexpected, in words.
        reason: &'static str,
    },
    /// Gradients that an update consumes came without an announced update, or the step has other numbers than
    /// announced.
    #[error("the gradients of unit {unit} are consumed as they come, and {reason}")]
    Consumed {
        /// Name of the unit.
        unit: String,
        /// What is wrong, in words.
        reason: &'static str,
    },
    /// A copy within one tier has its source and target on two tiers.
    #[error("a state and its spare are on different tiers")]
    TiersDiffer,
    /// A device should compute with a state that it does not store.
    #[error("a state is not stored on the device that computes with it")]
    NotResident,
    /// A thread for updates or gradients ended before its work was done.
    #[error("the thread of updates ended before its work")]
    BackwardThread,
    /// The system has no more threads for this process.
    #[error("a thread cannot start")]
    Thread(#[source] std::io::Error),
    /// A unit has no gradient sum, because an update still has it.
    #[error("the gradient sums of unit {unit} are missing")]
    SumsAway {
        /// Name of the unit.
        unit: String,
    },
    /// Weights cannot be written while a tensor of a lease exists, or while an update has them.
    #[error("weights of unit {unit} are still borrowed")]
    WeightsBorrowed {
        /// Name of the unit.
        unit: String,
    },
    /// The file of a weight that leases read in place was not mapped, or has another size.
    #[error("the weight {param} is not mapped from a file of its size")]
    NotMapped {
        /// Name of the parameter.
        param: String,
    },
    /// The caller of [`Zero::load`](crate::Zero::load) could not provide a weight.
    #[error("cannot load {param}")]
    Load {
        /// Name of the parameter.
        param: String,
        /// The caller's error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The library that owns a foreign tensor failed.
    #[error("cannot {action} the tensor {tensor}")]
    Bridge {
        /// The action that failed.
        action: &'static str,
        /// Name of the tensor.
        tensor: String,
        /// The library's error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The checkpoint and this run have different trainable tensors.
    #[error(
        "the checkpoint does not fit this run: {} trained tensors are missing from it (first: {}), {} of its tensors are not trained here (first: {})",
        missing.len(), first(missing), extra.len(), first(extra)
    )]
    CheckpointMismatch {
        /// Sorted names of tensors that are trained here and are not in the checkpoint.
        missing: Vec<String>,
        /// Sorted names of tensors in the checkpoint that are not trained here.
        extra: Vec<String>,
    },
    /// A tensor of the checkpoint differs from this run's: it is missing, or has another shape or dtype.
    #[error(
        "the checkpoint does not fit this run: {kind} of {name} is {found} there, {expected} here"
    )]
    CheckpointTensor {
        /// Kind of the tensor, such as `exp_avg`.
        kind: String,
        /// Name of the parameter.
        name: String,
        /// Dtype and shape in this run; `nothing` if the run has no such state.
        expected: String,
        /// Dtype and shape in the checkpoint; `nothing` if it has no such tensor.
        found: String,
    },
    /// Ranks opened different checkpoints.
    #[error("rank {rank} opened another checkpoint than this rank")]
    CheckpointsDiffer {
        /// The rank with another checkpoint.
        rank: usize,
    },
    /// A checkpoint was requested between a micro-batch and its step; gradients are not part of checkpoints.
    #[error(
        "gradients were accumulated since the last step, and a checkpoint does not contain gradients"
    )]
    GradientsPending,
    /// Another rank failed at a step that all ranks take together.
    #[error("rank {rank} failed: {cause}")]
    OtherRank {
        /// The first rank that failed.
        rank: usize,
        /// Its error, in words.
        cause: String,
    },
    /// Ranks have different versions of NCCL.
    #[error("rank {rank} has NCCL {theirs}, this rank has {ours}")]
    LibraryDiffers {
        /// The rank with another version.
        rank: usize,
        /// NCCL version of that rank.
        theirs: String,
        /// NCCL version of this rank.
        ours: String,
    },
    /// Devices of ranks cannot read each other's memory. Every rank returns this error.
    #[error(
        "the devices of the ranks do not read each other's memory: {}",
        refused(refusals)
    )]
    NoPeerAccess {
        /// Failed ranks with their reasons, in rank order.
        refusals: Vec<(usize, String)>,
    },
    /// Ranks have different plans.
    #[error("rank {rank} has plan {theirs}, this rank has {ours}")]
    PlanDiffers {
        /// The rank with another plan.
        rank: usize,
        /// Hash of that rank's plan.
        theirs: String,
        /// Hash of this rank's plan.
        ours: String,
    },
}

fn refused(refusals: &[(usize, String)]) -> String {
    let each = refusals
        .iter()
        .map(|(rank, what)| format!("rank {rank} {what}"));
    each.collect::<Vec<_>>().join("; ")
}

fn first(names: &[String]) -> &str {
    names.first().map_or("-", String::as_str)
}
