//! Define-by-run tape of checkpointed segments, which backward recomputes.
//!
//! An author writes forward code only. Work happens in *segments*, one per unit of parameters:
//! [`Tape::segment`] leases the unit, runs the body on a [`Scope`] and stores only the
//! segment's inputs. [`Tape::backward`] walks the segments in reverse, leases each unit again,
//! runs its body a second time with recording switched on, sweeps that inner record and hands the
//! parameter gradients to the engine. `README.md` beside this file lists the invariants.

mod boundary;
mod dropout;
mod resident;
mod scope;
mod sweep;
mod tape;
mod tiles;
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
#[cfg(test)]
mod tile_tests;
