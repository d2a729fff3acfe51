//! `launcher doctor`: reports what this machine offers for training and which problems it has.
//!
//! The facts and findings of [`crate::device::survey`], as text or JSON. What cannot be read is absent from the report, or a
//! finding in it.

mod text;

use std::io;
use std::process::ExitCode;

use serde::Serialize;

use crate::device::survey::facts::Facts;
use crate::device::survey::findings::{self, Finding, Verdict};
use crate::device::survey::gather;
use crate::error::output::print;
use crate::error::{ErrorCode, Failure};
use crate::rank_env::Variables;

/// Version of the JSON keys. It increases when a key changes its meaning or is removed.
const SCHEMA: u32 = 1;

/// The whole report. In JSON the facts are at the top level.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Version of the keys of the JSON report, see `SCHEMA`.
    pub schema: u32,
    /// Facts about the machine: operating system, processor, memory, GPUs, environment variables and more.
    #[serde(flatten)]
    pub facts: Facts,
    /// Whether all usable GPUs are of one kind. `None` if the machine has fewer than two usable GPUs.
    pub gpus_are_equal: Option<bool>,
    /// Device that a run would use.
    pub verdict: Verdict,
    /// Findings with next steps, the most severe first.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Derives the verdict and the findings from `facts`.
    pub fn new(facts: Facts) -> Self {
        let (verdict, findings) = findings::judge(&facts);
        Self {
            schema: SCHEMA,
            gpus_are_equal: findings::are_equal(&facts),
            facts,
            verdict,
            findings,
        }
    }

    /// The report as aligned plain text.
    pub fn to_text(&self) -> String {
        text::render(self)
    }
}

/// Prints the report on standard output.
///
/// # Errors
/// When the output cannot be written. A closed pipe is not an error.
pub fn run(variables: &Variables, as_json: bool) -> Result<ExitCode, Failure> {
    let report = Report::new(gather(variables));
    let failed = |error: &io::Error| {
        let title = "cannot write the report to standard output";
        Failure::new(ErrorCode::Disk, title, error.to_string())
            .next("check the target of standard output: its disk may be full")
    };
    let text = if as_json {
        let json = serde_json::to_string_pretty(&report);
        json.map_err(|error| failed(&error.into()))? + "\n"
    } else {
        report.to_text()
    };
    print(&text)
}

#[cfg(test)]
mod tests;
