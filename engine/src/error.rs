//! What can go wrong in the engine.

use crate::spec::{ParamId, UnitId};

/// Engine failures.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The device refused.
    #[error(transparent)]
    Kernel(#[from] kernels::KernelError),
    /// A parameter was asked of a unit that does not hold it.
    #[error("parameter {param:?} is not part of the leased unit {unit:?}")]
    NotInUnit {
        /// The parameter.
        param: ParamId,
        /// The leased unit.
        unit: UnitId,
    },
}
