//! `launcher bench`: measures the machine in the way a run uses it.

mod fio;
pub mod nvme;
