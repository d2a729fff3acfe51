//! `launcher doctor`: reports what this machine offers for training and which problems it has.
//!
//! The report has the facts and findings of [`crate::device::survey`], as text or JSON. A value that cannot
//! be read is absent from the report, or a finding in it.

mod text;

use std::io;
use std::process::ExitCode;

use serde::Serialize;

use crate::device::survey::facts::Facts;
use crate::device::survey::findings::{self, Finding, Verdict};
use crate::device::survey::gather;
use crate::error::output::print;
use crate::error::{ErrorCode, Failure};
use crate::lang::{Lang, Text, both};
use crate::rank_env::Variables;

/// Version of the JSON keys. It increases when a key changes its meaning or is removed.
const SCHEMA: u32 = 1;

/// Report of `launcher doctor` about this machine. In JSON, the fields of `facts` are at the top level.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Version of the keys of the JSON report. It increases when a key is removed or changes its meaning.
    pub schema: u32,
    /// Facts about the machine: operating system, processor, memory, GPUs, environment variables and more.
    #[serde(flatten)]
    pub facts: Facts,
    /// Whether all usable GPUs are the same model with the same amount of memory. `None` if the machine has
    /// fewer than two usable GPUs.
    pub gpus_are_equal: Option<bool>,
    /// Device that a run with `--device auto` would use on this machine.
    pub verdict: Verdict,
    /// Findings with next steps, the most severe first.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Report on `facts`, with the verdict and the findings that follow from them.
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

/// Runs `launcher doctor`: prints the report on standard output, as JSON if `as_json`, otherwise as text. The
/// exit code is success, whatever the findings.
///
/// # Errors
/// When the output cannot be written. A closed pipe is not an error.
pub fn run(variables: &Variables, as_json: bool) -> Result<ExitCode, Failure> {
    let report = Report::new(gather(variables));
    let failed = |error: &io::Error| {
        let title = both(
            "cannot write the report to standard output",
            "无法把报告写到标准输出",
        );
        Failure::new(ErrorCode::Disk, title, Text::literal(error)).next(both(
            "check the target of standard output: its disk may be full",
            "请检查标准输出的目标：所在磁盘可能已满",
        ))
    };
    let text = if as_json {
        let json = serde_json::to_string_pretty(&report);
        json.map_err(|error| failed(&error.into()))? + "\n"
    } else {
        Lang::chosen().speak(|| report.to_text())
    };
    print(&text)
}

#[cfg(test)]
mod tests;
