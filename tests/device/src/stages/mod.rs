//! The stages of `gpu_check` on a machine with a GPU, run one after another. A stage prints as it proceeds and leaves
//! rows for a table. It passes if none of its checks failed.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kernels::cuda::gpu::Gpu;
use kernels::cuda::image::{Cache, Code};
use kernels::cuda::library::Search;
use serde::{Deserialize, Serialize};

pub mod ceilings;
pub mod conformance;
pub mod copies;
pub mod footprint;
pub mod graphs;
pub mod processes;
mod queue;
pub mod survey;
pub mod table;

/// Paths and time limit of a stage.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Search paths of NVIDIA's libraries.
    pub search: Search,
    /// The machine code that runs.
    pub code: Code,
    /// Directory of the results.
    pub out: PathBuf,
    /// Directory of precompiled emulated kernels.
    pub emulated: Option<PathBuf>,
    /// The script that times the same work in PyTorch.
    pub peers: Option<PathBuf>,
    /// Whether sizes are those of an emulated device. Rates are then not judged, and kernels that need NVRTC may be
    /// missing.
    pub small: bool,
    /// The stage stops starting new work after this time.
    pub deadline: Instant,
}

impl Setting {
    /// The first GPU, with a cache of compiled kernels beside the results.
    ///
    /// # Errors
    /// When the machine has no GPU.
    pub fn gpu(&self) -> Result<Gpu> {
        let cache = Cache::new(self.out.join("kernel-cache"));
        let gpu = Gpu::open(0, &self.search, Some(cache)).context("opening the first GPU")?;
        Ok(gpu.with_code(self.code))
    }

    /// A size of model scale: `full`, or `full / divisor` on an emulated device.
    #[must_use]
    pub const fn size(&self, full: usize, divisor: usize) -> usize {
        match self.small {
            true => full / divisor,
            false => full,
        }
    }

    /// Whether `error` only says that this machine has no kernel of that kind. An emulated device has those of the
    /// built-in PTX alone.
    #[must_use]
    pub fn lacks_kernel(&self, error: &impl std::fmt::Display) -> bool {
        self.small && format!("{error:#}").contains("is not among the built-in PTX")
    }

    /// An empty report of the stage `name`.
    #[must_use]
    pub fn report(&self, name: &str) -> Report {
        Report {
            unjudged: self.small,
            ..Report::new(name)
        }
    }

    /// Whether the time is used up.
    #[must_use]
    pub fn expired(&self) -> bool {
        Instant::now() >= self.deadline
    }
}

/// One line of the table.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Row {
    /// The measured or checked property.
    pub what: String,
    /// The figure with its unit, or `passed`.
    pub figure: String,
    /// The comparison: share of a ceiling, or a peer's time.
    pub compared: String,
}

/// Results of a stage.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Name of the stage.
    pub stage: String,
    /// Its rows.
    pub rows: Vec<Row>,
    /// Its failures.
    pub failures: Vec<String>,
    /// Ceilings that later stages compare with: name and value in base units.
    pub ceilings: Vec<(String, f64)>,
    /// Whether rates are no measurements: the device is emulated.
    #[serde(default)]
    pub unjudged: bool,
}

/// A bound of a measured ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// Lower bound of a speed.
    AtLeast(f64),
    /// Upper bound of a time.
    AtMost(f64),
}

impl Target {
    /// Whether `ratio` meets the target. NaN does not.
    #[must_use]
    pub fn is_met(self, ratio: f64) -> bool {
        match self {
            Self::AtLeast(least) => ratio >= least,
            Self::AtMost(most) => ratio <= most,
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtLeast(least) => write!(f, "at least {least}x"),
            Self::AtMost(most) => write!(f, "at most {most}x"),
        }
    }
}

impl Report {
    /// An empty report.
    #[must_use]
    pub fn new(stage: &str) -> Self {
        Self {
            stage: stage.to_owned(),
            ..Self::default()
        }
    }

    /// Adds a row and prints it.
    pub fn row(
        &mut self,
        what: impl Into<String>,
        figure: impl Into<String>,
        compared: impl Into<String>,
    ) {
        let row = Row {
            what: what.into(),
            figure: figure.into(),
            compared: compared.into(),
        };
        show(&format!(
            "{:<58} {:>16}  {}",
            row.what, row.figure, row.compared
        ));
        self.rows.push(row);
    }

    /// Adds a failure and prints it.
    pub fn failure(&mut self, problem: impl Into<String>) {
        let problem = problem.into();
        show(&format!("FAILED {problem}"));
        self.failures.push(problem);
    }

    /// Judges a measured ratio of the row `what`. A missed target is a failure of the stage.
    pub fn target(&mut self, what: &str, ratio: f64, target: Target) {
        if !self.unjudged && !target.is_met(ratio) {
            self.failure(format!("{what}: {ratio:.2}x, the target is {target}"));
        }
    }

    /// Runs a part of the stage. Its error is a failure of the stage but does not end it.
    pub fn part(&mut self, name: &str, part: impl FnOnce(&mut Self) -> Result<()>) {
        if let Err(error) = part(self) {
            self.failure(format!("{name}: {error:#}"));
        }
    }

    /// Writes the report as JSON and as a Markdown table.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub fn save(&self, out: &Path) -> Result<()> {
        std::fs::create_dir_all(out)?;
        let json = serde_json::to_string_pretty(self)?;
        std::fs::write(out.join(format!("{}.json", self.stage)), json)?;
        std::fs::write(out.join(format!("{}.md", self.stage)), self.markdown())?;
        Ok(())
    }

    fn markdown(&self) -> String {
        let mut text = format!(
            "### {}\n\n| what | figure | compared |\n|---|---|---|\n",
            self.stage
        );
        for Row {
            what,
            figure,
            compared,
        } in &self.rows
        {
            // Writing to a string cannot fail.
            let _ok = writeln!(text, "| {what} | {figure} | {compared} |");
        }
        for failure in &self.failures {
            let _ok = writeln!(text, "\nFAILED: {failure}");
        }
        text
    }
}

/// A ceiling that an earlier stage of the same run measured.
#[must_use]
pub fn measured_ceiling(out: &Path, name: &str) -> Option<f64> {
    let text = std::fs::read_to_string(out.join("ceilings.json")).ok()?;
    let report: Report = serde_json::from_str(&text).ok()?;
    report
        .ceilings
        .into_iter()
        .find(|(known, _)| known == name)
        .map(|(_, value)| value)
}

/// Prints a line at once, so a stopped stage leaves its figures.
#[expect(clippy::print_stdout, reason = "the program's output")]
pub fn show(line: &str) {
    println!("{line}");
}

/// Median milliseconds of one run of `work`, timed on the device and repeated for about `budget`.
///
/// # Errors
/// An error of the work or of the driver.
pub fn median_milliseconds(
    gpu: &Gpu,
    budget: Duration,
    mut work: impl FnMut(usize) -> Result<()>,
) -> Result<f64> {
    for round in 0..3 {
        work(round)?;
    }
    gpu.synchronize()?;
    let begun = Instant::now();
    let mut times = Vec::new();
    while times.len() < 5 || (begun.elapsed() < budget && times.len() < 200) {
        let before = gpu.mark()?;
        work(times.len())?;
        let after = gpu.mark()?;
        times.push(before.milliseconds_to(&after)?);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_stores_figures_and_failures_of_its_parts() {
        let directory = tempfile::tempdir().unwrap();
        let mut report = Report::new("ceilings");
        report.part("good", |report| {
            report.row("copy", "4.3 TB/s", "");
            report.ceilings.push(("copy".into(), 4.3e12));
            Ok(())
        });
        report.part("bad", |_| anyhow::bail!("no such thing"));
        report.save(directory.path()).unwrap();
        assert_eq!(measured_ceiling(directory.path(), "copy"), Some(4.3e12));
        assert_eq!(measured_ceiling(directory.path(), "gemm"), None);
        let table = std::fs::read_to_string(directory.path().join("ceilings.md")).unwrap();
        assert!(
            table.contains("| copy | 4.3 TB/s |") && table.contains("FAILED: bad: no such thing")
        );
    }

    #[test]
    fn a_missed_target_is_a_failure() {
        let mut report = Report::new("products");
        report.target("fast", 0.8, Target::AtLeast(0.7));
        report.target("cheap", 1.1, Target::AtMost(1.15));
        assert!(report.failures.is_empty());
        report.target("slow", 0.6, Target::AtLeast(0.7));
        report.target("dear", 1.2, Target::AtMost(1.15));
        report.target("none", f64::NAN, Target::AtMost(1.15));
        let missed = [
            "slow: 0.60x, the target is at least 0.7x",
            "dear: 1.20x, the target is at most 1.15x",
        ];
        assert_eq!(report.failures[..2], missed);
        assert_eq!(report.failures.len(), 3);
    }
}
