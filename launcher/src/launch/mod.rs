//! Launch of a run: how ranks start, find each other, are watched and restart.

pub mod hostfile;
pub mod logging;
pub mod rank;
pub(crate) mod rendezvous;
pub(crate) mod restart;
mod signals;
pub mod supervisor;
