//! Command line, rank supervisor, data loading, training loop and reports.
//!
//! Data flows one way: `argv` → [`args::Args`] → [`config::RunConfig`] → ranks → reports. One
//! executable plays two parts, told apart by the environment ([`rank_env`]): the supervisor
//! resolves the configuration, starts the ranks and owns the terminal; a rank trains.
#![forbid(unsafe_code)]

pub mod args;
pub mod bench;
mod ckpt;
pub mod config;
pub mod data;
pub mod demo;
pub mod device;
pub mod doctor;
pub mod error_format;
pub mod exit;
pub mod explain;
#[doc(hidden)]
pub mod fuzzing;
mod generate;
pub mod hostfile;
pub mod identity;
mod job;
pub mod logging;
pub mod memory;
pub mod model_files;
pub mod monitor;
mod new_folder;
pub mod plan;
pub mod rank;
pub mod rank_env;
mod rendezvous;
pub mod report;
mod restart;
mod run;
pub mod run_folder;
pub mod supervisor;
mod synth;
pub mod ui;
pub mod units;
mod watch;

pub use job::{Advice, Hooks, PrepareHook, RankMain, run_hooks, run_with};

/// Runs the program: checks, trains, evaluates, saves.
pub fn run() -> std::process::ExitCode {
    run_on(&device::Nvidia)
}

/// Runs the program with these GPUs in the place of the machine's.
pub fn run_on(devices: &'static dyn device::Devices) -> std::process::ExitCode {
    run_hooks(Hooks {
        prepare: run::prepare,
        rank_main: run::rank_main,
        devices,
    })
}
