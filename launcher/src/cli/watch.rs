//! The flags of `launcher watch`.

use std::path::PathBuf;

use clap::Parser;

/// What the user typed after `launcher watch`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Parser)]
#[command(
    name = "launcher watch",
    version,
    about = "Shows a run from the files of its directory, while it runs or afterwards",
    max_term_width = 100
)]
pub struct WatchArgs {
    /// Directory of the run
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// Print the present state once, instead of following the run
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub once: Option<bool>,
    /// Print JSON with stable keys, one object per change
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub json: Option<bool>,
    /// Serve the report page of the run at this address, always up to date, until Ctrl-C. A number is a port of this
    /// machine; an address that other machines reach needs the token in the printed link
    #[arg(long, num_args = 0..=1, default_missing_value = "127.0.0.1:7007", value_name = "ADDR",
        conflicts_with_all = ["once", "json"])]
    pub serve: Option<String>,
}
