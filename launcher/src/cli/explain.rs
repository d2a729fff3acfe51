//! The arguments of `launcher explain`.

use clap::Parser;

use crate::lang::Lang;

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
    #[arg(long, value_enum, ignore_case = true, value_name = "LANG")]
    pub lang: Option<Lang>,
}
