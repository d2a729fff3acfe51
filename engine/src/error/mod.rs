//! What can go wrong in the engine.

mod spill;

pub use spill::SpillError;

use crate::plan::Phase;
use crate::spec::{ParamId, UnitId};

/// Engine failures.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The device refused.
    #[error(transparent)]
    Kernel(#[from] kernels::KernelError),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] crate::comm::CommError),
    /// The model cannot be planned.
    #[error(transparent)]
    Plan(#[from] crate::plan::PlanError),
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] crate::checkpoint::CheckpointError),
    /// The optimizer refused.
    #[error(transparent)]
    Optim(#[from] optim::OptimError),
    /// A spill file failed.
    #[error(transparent)]
    Spill(#[from] SpillError),
    /// State belongs on a disk and no directory was given.
    #[error("state is planned on the nvme tier, and this rank has no spill directory for {kind}")]
    NoSpillDirectory {
        /// The kind of state.
        kind: &'static str,
    },
    /// The system refused host memory.
    #[error("cannot map {bytes} bytes of host memory")]
    Map {
        /// Bytes asked for.
        bytes: usize,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A parameter was asked of a unit that does not hold it.
    #[error("parameter {param:?} is not part of the leased unit {unit:?}")]
    NotInUnit {
        /// The parameter.
        param: ParamId,
        /// The leased unit.
        unit: UnitId,
    },
    /// A unit was leased against the order of the plan, or outside a pass.
    #[error("unit {unit} cannot be leased for {phase:?} at position {position} of the pass")]
    LeaseOrder {
        /// Name of the unit.
        unit: String,
        /// The half of the pass.
        phase: Phase,
        /// Entries already behind.
        position: usize,
    },
    /// A gradient came twice, for a frozen parameter, outside its unit's backward lease, or with
    /// the wrong shape.
    #[error("unexpected gradient for {param}: {reason}")]
    UnexpectedGradient {
        /// Name of the parameter.
        param: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// Gradients that are kept nowhere came where they could not be used, or the update is not the one announced.
    #[error("the gradients of unit {unit} are consumed as they come, and {reason}")]
    Consumed {
        /// Name of the unit.
        unit: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// A copy within a tier was asked for between two.
    #[error("a state and its spare are on different tiers")]
    TiersDiffer,
    /// A device was to compute with a state that it does not keep.
    #[error("a state is not stored on the device that computes with it")]
    NotResident,
    /// A thread that updates beside a pass ended early.
    #[error("the thread of updates ended before its work")]
    BackwardThread,
    /// Gradients came to a unit whose sums an update still has.
    #[error("the gradient sums of unit {unit} are missing")]
    SumsAway {
        /// Name of the unit.
        unit: String,
    },
    /// A tensor of a lease is still alive while weights are to be written.
    #[error("weights of unit {unit} are still borrowed")]
    WeightsBorrowed {
        /// Name of the unit.
        unit: String,
    },
    /// The caller could not provide a weight.
    #[error("cannot load {param}")]
    Load {
        /// Name of the parameter.
        param: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The library that owns a foreign tensor failed.
    #[error("cannot {action} the tensor {tensor}")]
    Bridge {
        /// What was tried.
        action: &'static str,
        /// Name of the tensor.
        tensor: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A checkpoint lacks what this run trains, or holds what it does not.
    #[error(
        "the checkpoint does not fit this run: {} trained tensors are missing from it (first: {}), {} of its tensors are not trained here (first: {})",
        missing.len(), first(missing), extra.len(), first(extra)
    )]
    CheckpointMismatch {
        /// Names of what is trained here and absent there, sorted.
        missing: Vec<String>,
        /// Names of what is there and not trained here, sorted.
        extra: Vec<String>,
    },
    /// Ranks have different versions of the library that runs their collectives.
    #[error("rank {rank} has NCCL {theirs}, this rank has {ours}")]
    LibraryDiffers {
        /// The other rank.
        rank: usize,
        /// Its version.
        theirs: String,
        /// Ours.
        ours: String,
    },
    /// Devices of ranks do not read each other's memory. The same on every rank.
    #[error(
        "the devices of the ranks do not read each other's memory: {}",
        refused(refusals)
    )]
    NoPeerAccess {
        /// Ranks and what each could not do, in rank order.
        refusals: Vec<(usize, String)>,
    },
    /// Ranks run different plans.
    #[error("rank {rank} has plan {theirs}, this rank has {ours}")]
    PlanDiffers {
        /// The other rank.
        rank: usize,
        /// Its plan's hash.
        theirs: String,
        /// Ours.
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
