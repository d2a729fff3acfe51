//! The command line of `launcher bench nvme`.

use std::path::PathBuf;

use clap::Parser;

/// What the user typed after `launcher bench nvme`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Parser)]
#[command(
    name = "launcher bench nvme",
    version,
    about = "Measures a disk, the way --offload nvme:DIR uses it; beside fio if that is installed",
    max_term_width = 100
)]
pub struct BenchNvmeArgs {
    /// Directory on the disk to measure
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
    /// Bytes written and read per round; 1 GiB by default
    #[arg(long, value_name = "BYTES", value_parser = crate::units::parse_bytes)]
    pub size: Option<u64>,
    /// Rounds; medians are printed; 3 by default
    #[arg(long, value_name = "N")]
    pub rounds: Option<usize>,
    /// Print the results as JSON
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub json: Option<bool>,
}
