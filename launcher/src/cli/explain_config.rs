//! The arguments of `launcher explain-config`: a file, and every flag of training beside it.

use std::path::PathBuf;

use clap::{CommandFactory, FromArgMatches, Parser};

use super::Args;

/// What the user typed after `launcher explain-config`.
#[derive(Debug, Clone, Default, PartialEq, Parser)]
#[command(name = "launcher explain-config", version, max_term_width = 100)]
pub struct ExplainConfigArgs {
    /// A file for --deepspeed or --config
    pub file: PathBuf,
    /// Flags beside it.
    #[command(flatten)]
    pub run: Args,
}

/// What the subcommand is for.
const ABOUT: &str = "Shows what becomes of every key of a configuration file; exit 2 if one cannot be honored. \
Takes every flag of training";

impl ExplainConfigArgs {
    pub(super) fn described() -> clap::Command {
        Self::command().about(ABOUT).long_about(ABOUT)
    }

    pub(super) fn parse_words(words: &[String]) -> Result<Self, clap::Error> {
        let matches = Self::described().try_get_matches_from(words)?;
        Self::from_arg_matches(&matches)
    }

    /// The arguments of this subcommand without the training flags, for the table of flags.
    pub(super) fn own_flags() -> clap::Command {
        let command = Self::command();
        let own = command.get_positionals().cloned();
        clap::Command::new("launcher explain-config")
            .about(ABOUT)
            .args(own)
    }
}
