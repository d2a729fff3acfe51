//! How ranks start, find each other, are watched and start again.

pub mod hostfile;
pub mod logging;
pub mod rank;
pub(crate) mod rendezvous;
pub(crate) mod restart;
pub mod supervisor;
