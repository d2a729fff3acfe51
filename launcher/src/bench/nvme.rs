//! The disk under a folder: our two ways to it, and fio at a queue depth of 16 in the same rounds.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use engine::spill::{IoPath, SpillFolder, SpillIo, measure};
use kernels::Pool;
use serde_json::{Value, json};

use super::fio;
use crate::args::BenchNvmeArgs;
use crate::exit::{ErrorCode, Failure};
use crate::memory::disk_free_bytes;
use crate::run::failures;
use crate::units::bytes;

const SIZE_BYTES: u64 = 1 << 30;
const ROUNDS: usize = 3;
const BUFFER_BYTES: u64 = 64 << 20;

/// Rates of one way over all rounds, bytes per second.
#[derive(Debug, Clone, Default, PartialEq)]
struct Rates {
    name: &'static str,
    read: Vec<f64>,
    write: Vec<f64>,
}

impl Rates {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }

    fn push(&mut self, read: f64, write: f64) {
        self.read.push(read);
        self.write.push(write);
    }
}

/// Runs the verb.
///
/// # Errors
/// The folder cannot be written to, or is too small.
pub fn run(args: &BenchNvmeArgs) -> Result<ExitCode, Failure> {
    let size = args.size.unwrap_or(SIZE_BYTES).max(1 << 20);
    let rounds = args.rounds.unwrap_or(ROUNDS).max(1);
    check_room(&args.folder, size)?;
    let rates = rounds_of(&args.folder, size, rounds)?;
    let text = if args.json == Some(true) {
        format!("{}\n", as_json(&args.folder, size, &rates))
    } else {
        as_text(&args.folder, size, &rates)
    };
    drop(write!(std::io::stdout(), "{text}"));
    Ok(ExitCode::SUCCESS)
}

fn check_room(folder: &Path, size: u64) -> Result<(), Failure> {
    let free = disk_free_bytes(folder)
        .map_err(|e| Failure::io(ErrorCode::Disk, "ask the file system of", folder, &e))?;
    if free >= size {
        return Ok(());
    }
    Err(Failure::new(
        ErrorCode::Disk,
        format!("{} is too small for the measurement", folder.display()),
        format!("{} are needed, {} are free", bytes(size), bytes(free)),
    )
    .next("a smaller --size"))
}

/// Measures every way in every round, so that what else happens on the machine hits all of them.
fn rounds_of(folder: &Path, size: u64, rounds: usize) -> Result<Vec<Rates>, Failure> {
    let failed = |e: &engine::EngineError| failures::engine("measure the disk", e);
    let job = format!("bench-{}", std::process::id());
    let held = SpillFolder::join(folder, &job).map_err(|e| failed(&e.into()))?;
    let held = Arc::new(held);
    let host = Pool::new("host", None);
    let queue = SpillIo::new(BUFFER_BYTES, &host).map_err(|e| failed(&e))?;
    let mut ways = vec![
        (Some(IoPath::Direct), Rates::new("direct")),
        (Some(IoPath::Mapped), Rates::new("mapped")),
    ];
    if fio::is_installed() {
        ways.push((None, Rates::new("fio")));
    }
    for _ in 0..rounds {
        for (way, rates) in &mut ways {
            match way {
                Some(io) => {
                    if let Some(m) = measure(&held, *io, size, &queue).map_err(|e| failed(&e))? {
                        rates.push(m.read, m.write);
                    }
                }
                None => {
                    let (read, write) = fio::run(held.path(), size)?;
                    rates.push(read, write);
                }
            }
        }
    }
    Ok(ways.into_iter().map(|(_, rates)| rates).collect())
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

/// The better of our ways over fio, reading and writing.
fn shares(rates: &[Rates]) -> Option<(f64, f64)> {
    let of = |pick: fn(&Rates) -> &Vec<f64>| {
        let fio = rates.iter().find(|r| r.name == "fio")?;
        let ours = rates.iter().filter(|r| r.name != "fio");
        let best = ours
            .filter_map(|r| median(pick(r)))
            .max_by(f64::total_cmp)?;
        Some(best / median(pick(fio))?)
    };
    Some((of(|r| &r.read)?, of(|r| &r.write)?))
}

fn as_json(folder: &Path, size: u64, rates: &[Rates]) -> Value {
    let ways = rates.iter().map(|r| {
        json!({
            "way": r.name,
            "read_bytes_per_second": median(&r.read),
            "write_bytes_per_second": median(&r.write),
        })
    });
    let shares = shares(rates);
    json!({
        "folder": folder,
        "bytes": size,
        "ways": ways.collect::<Vec<_>>(),
        "share_of_fio_read": shares.map(|s| s.0),
        "share_of_fio_write": shares.map(|s| s.1),
    })
}

fn as_text(folder: &Path, size: u64, rates: &[Rates]) -> String {
    let mut text = format!(
        "{} · {} per round\n\nway      read GB/s  write GB/s\n",
        folder.display(),
        bytes(size)
    );
    let cell = |values: &[f64]| {
        median(values).map_or_else(|| "-".to_owned(), |rate| format!("{:.2}", rate / 1e9))
    };
    for r in rates {
        text += &format!("{:<9}{:>9}{:>12}\n", r.name, cell(&r.read), cell(&r.write));
    }
    text += &match shares(rates) {
        Some((read, write)) => format!(
            "\nthe better of ours over fio (1 MiB, direct, queue depth 16): read {:.0} %, write {:.0} %\n",
            100.0 * read,
            100.0 * write
        ),
        None => "\nfio is not installed: nothing to compare with\n".to_owned(),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_medians_and_of_the_better_way() {
        let rates = |name, read: [f64; 3], write: [f64; 3]| Rates {
            name,
            read: read.to_vec(),
            write: write.to_vec(),
        };
        let mut all = vec![
            rates("direct", [1.0, 9.0, 2.0], [3.0, 3.0, 3.0]),
            rates("mapped", [1.0, 1.0, 1.0], [4.0, 4.0, 4.0]),
        ];
        assert_eq!(shares(&all), None);
        assert!(as_text(Path::new("/d"), 1, &all).contains("fio is not installed"));
        all.push(rates("fio", [4.0, 4.0, 4.0], [5.0, 5.0, 5.0]));
        assert_eq!(shares(&all), Some((0.5, 0.8)));
        let none = Rates::new("direct");
        assert!(as_text(Path::new("/d"), 1, &[none]).contains('-'));
    }

    #[test]
    fn a_folder_is_measured_and_left_as_it_was() {
        let folder = tempfile::tempdir().expect("temp dir");
        let rates = rounds_of(folder.path(), 2 << 20, 1).expect("measured");
        let mapped = &rates[1];
        assert!(mapped.read[0] > 0.0 && mapped.write[0] > 0.0);
        assert_eq!(std::fs::read_dir(folder.path()).expect("read").count(), 0);
        let failure = check_room(folder.path(), 1 << 60).expect_err("too large");
        assert_eq!(failure.code, ErrorCode::Disk);
    }
}
