//! `launcher doctor`: reports what this machine offers for training and which problems it has.
//!
//! [`gather`] collects facts, `findings` judges them, and the report is shown as text or JSON. Nothing fails here: a
//! value that cannot be read is absent from the report, or a finding in it.

mod cuda;
pub mod environment;
pub mod facts;
pub mod findings;
mod host;
mod python;
mod text;

use std::io::{self, Write};
use std::process::ExitCode;

use serde::Serialize;

use crate::exit::{ErrorCode, Failure};
use crate::rank_env::{CudaPlaces, Variables};
use facts::Facts;
use findings::{Finding, Verdict};

pub(crate) use host::{instruction_sets, libc};

/// Version of the JSON keys. It increases when a key changes its meaning or is removed.
const SCHEMA: u32 = 1;

/// The whole report. In JSON the facts are at the top level.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Version of the keys.
    pub schema: u32,
    /// The facts.
    #[serde(flatten)]
    pub facts: Facts,
    /// Whether all usable GPUs are of one kind. `None` with fewer than two.
    pub gpus_are_equal: Option<bool>,
    /// Device that a run would use.
    pub verdict: Verdict,
    /// Findings with next steps, the most severe first.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Report on these facts.
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

/// Gathers all facts about this machine and this environment.
pub fn gather(variables: &Variables) -> Facts {
    let (cuda, gpus) = survey_gpus(variables);
    facts(variables, cuda, gpus)
}

/// Gathers facts about driver, libraries and GPUs only.
pub(crate) fn survey_gpus(variables: &Variables) -> (facts::Cuda, Vec<facts::Gpu>) {
    cuda::gather(&places(variables))
}

/// Search path for CUDA's libraries.
#[cfg(feature = "cuda")]
pub(crate) fn search(variables: &Variables) -> kernels::cuda::library::Search {
    cuda::search(&places(variables))
}

fn places(variables: &Variables) -> CudaPlaces {
    let lookup = |name: &str| variables.get(name).map(ToOwned::to_owned);
    CudaPlaces::from_lookup(&lookup)
}

/// Findings about these GPUs and this driver, the most severe first.
pub(crate) fn gpu_findings(
    cuda: &facts::Cuda,
    gpus: &[facts::Gpu],
    variables: &Variables,
) -> Vec<Finding> {
    findings::of_gpus(&facts(variables, cuda.clone(), gpus.to_vec()))
}

fn facts(variables: &Variables, cuda: facts::Cuda, gpus: Vec<facts::Gpu>) -> Facts {
    Facts {
        program: host::program(),
        system: host::system(),
        cpu: host::cpu(),
        memory: host::memory(),
        limits: host::limits(),
        storage: host::storage(variables),
        launch: host::launch(variables),
        cuda,
        gpus,
        environment: environment::table(variables),
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
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(failed(&error)),
        _ => Ok(ExitCode::SUCCESS),
    }
}

#[cfg(test)]
mod tests;
