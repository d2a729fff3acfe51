//! A define-by-run tape of checkpointed segments, which backward recomputes.
//!
//! Authors write forward code only. A *segment* is the forward code of one unit of parameters. [`Tape::segment`]
//! leases the unit, runs the body on a [`Scope`] and stores only the segment's inputs. [`Tape::backward`] visits the
//! segments in reverse. It leases each unit again, runs the body a second time while it records, sweeps that record,
//! and hands the parameter gradients to the engine. `README.md` beside this file lists the invariants.

mod dropout;
mod resident;
mod scope;
mod sweep;
mod tape;
mod var;

pub use dropout::{Dropout, Rows};
pub use resident::{AccessEvent, ResidentParams};
pub use scope::Scope;
pub use tape::{Gradients, Loss, LossFetch, Observer, OpObserver, Tape};
pub use var::Var;

pub(crate) use sweep::{Grad, Sweep};

#[cfg(test)]
pub(crate) mod gradcheck;
#[cfg(test)]
mod tests;
