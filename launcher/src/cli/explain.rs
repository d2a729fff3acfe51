//! The arguments of `launcher explain`.

use clap::{Parser, ValueEnum};

/// Language of the text that `launcher explain` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Lang {
    /// Language of the page
    #[default]
    En,
    /// Chinese.
    Zh,
}

/// What the user typed after `launcher explain`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Parser)]
#[command(
    name = "launcher explain",
    version,
    about = "Explains an error code: what it means, usual causes, what to look at, what to do",
    max_term_width = 100
)]
pub struct ExplainArgs {
    /// An error code such as E05; without it every code is listed
    pub code: Option<String>,
    /// Language of the page
    #[arg(long, value_enum, value_name = "LANG")]
    pub lang: Option<Lang>,
}
