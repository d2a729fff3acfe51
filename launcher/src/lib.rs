//! Launcher of training runs: command line, rank supervisor, data loading, training loop and reports.
//!
//! Data flows one way: `argv` → [`cli::Args`] → [`config::RunConfig`] → ranks → reports. The same executable runs as
//! supervisor or as rank, depending on the environment ([`rank_env`]). The supervisor resolves the configuration,
//! starts the ranks and owns the terminal. A rank trains.
#![forbid(unsafe_code)]

pub mod cli;
pub mod commands;
pub mod config;
pub mod data;
pub mod device;
pub mod error;
#[doc(hidden)]
pub mod fuzzing;
pub mod lang;
pub mod launch;
pub mod memory;
mod model;
pub mod plan;
pub mod rank_env;
pub mod report;
mod train;
pub mod ui;
pub mod units;

pub use commands::{Hooks, PrepareHook, RankMain, run_hooks, run_with};
pub use plan::Suggestions;

/// Entry point of the executable: runs what the command line and the environment ask for (a command, the
/// supervisor or one rank) on this machine's GPUs or CPU. Returns the exit code of the process.
pub fn run() -> std::process::ExitCode {
    run_hooks(Hooks {
        prepare: plan::prepare,
        rank_main: train::rank_main,
        devices: &device::Nvidia,
    })
}
