//! Log subscribers: readable lines on rank 0's standard error, JSON lines per rank in the run directory.

use crate::lang::{Text, both, text};
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::Mutex;

use tracing_subscriber::filter::{Directive, EnvFilter, LevelFilter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

use crate::error::{ErrorCode, Failure};

/// Sets the process-wide log subscriber of a rank. It writes JSON lines to the rank's file in `logs`, and on
/// rank 0 also text to standard error.
///
/// `filter` is the value of `RUST_LOG`. Without it, the file takes records from level info, standard error
/// from level warn. A second call in a process sets no other subscriber.
///
/// # Errors
/// The log file cannot be opened, or the filter is invalid (exit 2).
pub fn init(logs: &Path, rank: usize, filter: Option<&str>) -> Result<(), Failure> {
    let file = open(logs, rank)?;
    let json = fmt::layer()
        .json()
        .with_writer(Mutex::new(file))
        .with_filter(filter_or(filter, LevelFilter::INFO)?);
    let human = (rank == 0)
        .then(|| -> Result<_, Failure> {
            Ok(fmt::layer()
                .without_time()
                .with_ansi(false)
                .with_writer(io::stderr)
                .with_filter(filter_or(filter, LevelFilter::WARN)?.add_directive(reports_off())))
        })
        .transpose()?;
    // Fails only if a subscriber is already set, as in tests.
    drop(
        tracing_subscriber::registry()
            .with(json)
            .with(human)
            .try_init(),
    );
    Ok(())
}

/// Sets the process-wide log subscriber of the supervisor: text lines on standard error. `filter` is the
/// value of `RUST_LOG`; without it, records from level warn are written.
///
/// # Errors
/// The filter is invalid (exit 2).
pub fn init_supervisor(filter: Option<&str>) -> Result<(), Failure> {
    let human = fmt::layer()
        .without_time()
        .with_ansi(false)
        .with_writer(io::stderr)
        .with_filter(filter_or(filter, LevelFilter::WARN)?);
    // Fails only if a subscriber is already set, as in tests.
    drop(tracing_subscriber::registry().with(human).try_init());
    Ok(())
}

/// Filter without the final report of a rank. The report is printed separately; only the log file repeats it.
fn reports_off() -> Directive {
    format!("{}=off", crate::error::RECORD_TARGET)
        .parse()
        .expect("a target and a level")
}

fn open(logs: &Path, rank: usize) -> Result<File, Failure> {
    let path = logs.join(format!("rank-{rank:04}.jsonl"));
    std::fs::create_dir_all(logs)
        .and_then(|()| OpenOptions::new().create(true).append(true).open(&path))
        .map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), &path, &error))
}

fn filter_or(filter: Option<&str>, default: LevelFilter) -> Result<EnvFilter, Failure> {
    match filter {
        None => Ok(EnvFilter::default().add_directive(default.into())),
        Some(text) => EnvFilter::try_new(text).map_err(|error| {
            Failure::usage(
                text!("RUST_LOG={text} cannot be read", "无法解析 RUST_LOG={text}"),
                Text::literal(&error),
            )
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_reach_the_ranks_file_and_bad_filters_are_refused() {
        let directory = tempfile::tempdir().expect("temp dir");
        assert_eq!(
            init(directory.path(), 1, Some("a=b=c"))
                .expect_err("refused")
                .code
                .status(),
            2
        );
        init(directory.path(), 1, None).expect("set");
        tracing::info!(step = 3, "hello");
        let text =
            std::fs::read_to_string(directory.path().join("rank-0001.jsonl")).expect("written");
        let record: serde_json::Value =
            serde_json::from_str(text.lines().next().expect("a line")).expect("JSON");
        assert_eq!(record["fields"]["step"], 3);
    }
}
