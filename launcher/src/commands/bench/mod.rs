//! `launcher bench`: what the machine gives, measured the way a run uses it.

mod fio;
pub mod nvme;
