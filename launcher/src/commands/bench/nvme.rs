//! Measures the disk of a directory: the engine's two I/O paths, and fio at a queue depth of 16, in the same rounds.

use crate::lang::{Lang, both, text};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use engine::spill::{IoPath, SpillDirectory, SpillIo, measure};
use kernels::Pool;
use serde_json::{Value, json};

use super::fio;
use crate::cli::BenchNvmeArgs;
use crate::error::output::print;
use crate::error::{ErrorCode, Failure, failures};
use crate::memory::disk_free_bytes;
use crate::units::bytes;

const SIZE_BYTES: u64 = 1 << 30;
const ROUNDS: usize = 3;
const BUFFER_BYTES: u64 = 64 << 20;
const FIO: &str = "fio";

/// Rates of one I/O path over all rounds, in bytes per second.
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

/// Runs `launcher bench nvme`: measures how fast the disk of a directory reads and writes, and prints the
/// rates.
///
/// # Errors
/// When the directory cannot be written to, or its disk is too small.
pub fn run(args: &BenchNvmeArgs) -> Result<ExitCode, Failure> {
    let size = args.size.unwrap_or(SIZE_BYTES).max(1 << 20);
    let rounds = args.rounds.unwrap_or(ROUNDS).max(1);
    if !args.directory.is_dir() {
        return Err(Failure::usage(
            text!(
                "{} is not a directory",
                "{} 不是目录",
                args.directory.display()
            ),
            both(
                "the measurement is of the disk of an existing directory",
                "测量的是已有目录所在的磁盘",
            ),
        )
        .next(both(
            "give a directory on the disk to measure",
            "请指定位于待测磁盘上的目录",
        )));
    }
    check_disk_space(&args.directory, size)?;
    let rates = rounds_of(&args.directory, size, rounds)?;
    let text = if args.json == Some(true) {
        format!("{}\n", as_json(&args.directory, size, &rates))
    } else {
        Lang::chosen().speak(|| as_text(&args.directory, size, &rates))
    };
    print(&text)
}

fn check_disk_space(directory: &Path, size: u64) -> Result<(), Failure> {
    let free = disk_free_bytes(directory).map_err(|e| {
        Failure::io(
            ErrorCode::Disk,
            both("query the file system of", "查询文件系统："),
            directory,
            &e,
        )
    })?;
    if free >= size {
        return Ok(());
    }
    Err(Failure::new(
        ErrorCode::Disk,
        text!(
            "{} has too little free space for the measurement",
            "{} 的空闲空间不足以进行测量",
            directory.display()
        ),
        text!(
            "{} are needed, {} are free",
            "需要 {}，空闲 {}",
            bytes(size),
            bytes(free)
        ),
    )
    .next(both("a smaller --size", "请使用更小的 --size")))
}

/// Measures every path in every round, so that other activity on the machine affects all of them.
fn rounds_of(directory: &Path, size: u64, rounds: usize) -> Result<Vec<Rates>, Failure> {
    let failed =
        |e: &engine::EngineError| failures::engine(both("measure the disk", "测量磁盘"), e);
    let job = format!("bench-{}", std::process::id());
    let held = SpillDirectory::join(directory, &job).map_err(|e| failed(&e.into()))?;
    let held = Arc::new(held);
    let host = Pool::new("host", None);
    let queue = SpillIo::new(BUFFER_BYTES, &host).map_err(|e| failed(&e))?;
    let mut ways = vec![
        (Some(IoPath::Direct), Rates::new("direct")),
        (Some(IoPath::Mapped), Rates::new("mapped")),
    ];
    if fio::is_installed() {
        ways.push((None, Rates::new(FIO)));
    }
    for round in 0..rounds {
        for turn in 0..ways.len() {
            // The order rotates, so every path is first and last about equally often.
            let at = (round + turn) % ways.len();
            let (way, rates) = &mut ways[at];
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

fn best(values: &[f64]) -> Option<f64> {
    values.iter().copied().max_by(f64::total_cmp)
}

/// Median rates of one path as a share of fio's, for reading and writing.
fn shares(rates: &[Rates], way: &Rates) -> Option<(f64, f64)> {
    let fio = rates.iter().find(|r| r.name == FIO)?;
    Some((
        median(&way.read)? / median(&fio.read)?,
        median(&way.write)? / median(&fio.write)?,
    ))
}

fn as_json(directory: &Path, size: u64, rates: &[Rates]) -> Value {
    let ways = rates.iter().map(|r| {
        let shares = shares(rates, r);
        json!({
            "way": r.name,
            "read_bytes_per_second": median(&r.read),
            "best_read_bytes_per_second": best(&r.read),
            "write_bytes_per_second": median(&r.write),
            "best_write_bytes_per_second": best(&r.write),
            "share_of_fio_read": shares.map(|s| s.0),
            "share_of_fio_write": shares.map(|s| s.1),
        })
    });
    json!({
        "folder": directory,
        "bytes": size,
        "ways": ways.collect::<Vec<_>>(),
    })
}

fn as_text(directory: &Path, size: u64, rates: &[Rates]) -> String {
    let mut text = text!(
        "{} · {} per round",
        "{} · 每轮 {}",
        directory.display(),
        bytes(size)
    )
    .to_string();
    let (read, write, best_rate) = (
        both("read", "读"),
        both("write", "写"),
        both("best", "最好"),
    );
    let share_read = both("of fio: read", "相对 fio：读");
    text += &format!(
        "\n\nGB/s  {read:>8}{best_rate:>8}{write:>8}{best_rate:>8}{share_read:>15}{write:>8}\n"
    );
    let cell = |rate: Option<f64>| rate.map_or("-".to_owned(), |r| format!("{:.2}", r / 1e9));
    let share =
        |share: Option<f64>| share.map_or("-".to_owned(), |s| format!("{:.0} %", 100.0 * s));
    for r in rates {
        let shares = shares(rates, r);
        text += &format!(
            "{:<6}{:>8}{:>8}{:>8}{:>8}{:>15}{:>8}\n",
            r.name,
            cell(median(&r.read)),
            cell(best(&r.read)),
            cell(median(&r.write)),
            cell(best(&r.write)),
            share(shares.map(|s| s.0)),
            share(shares.map(|s| s.1)),
        );
    }
    let note = if rates.iter().any(|r| r.name == FIO) {
        both(
            "\nmedians and best of the rounds; fio: 1 MiB, direct, queue depth 16\n",
            "\n各轮的中位数和最好值；fio：1 MiB，direct，队列深度 16\n",
        )
    } else {
        both(
            "\nfio is not installed, so there is no comparison\n",
            "\n没有安装 fio，因此没有对比\n",
        )
    };
    text + &note.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_median_rates_of_each_io_path() {
        let rates = |name, read: [f64; 3], write: [f64; 3]| Rates {
            name,
            read: read.to_vec(),
            write: write.to_vec(),
        };
        let mut all = vec![
            rates("direct", [1e9, 9e9, 2e9], [3e9, 3e9, 3e9]),
            rates("mapped", [1e9, 1e9, 1e9], [4e9, 4e9, 4e9]),
        ];
        assert_eq!(shares(&all, &all[0]), None);
        assert!(as_text(Path::new("/d"), 1, &all).contains("fio is not installed"));
        all.push(rates(FIO, [4e9, 4e9, 4e9], [5e9, 5e9, 5e9]));
        assert_eq!(shares(&all, &all[0]), Some((0.5, 0.6)));
        assert_eq!(shares(&all, &all[1]), Some((0.25, 0.8)));
        let text = as_text(Path::new("/d"), 1, &all);
        let cells = |i: usize| text.lines().nth(i).map(|l| l.split_whitespace().collect());
        let direct: Vec<&str> = cells(3).expect("a row");
        let wanted = [
            "direct", "2.00", "9.00", "3.00", "3.00", "50", "%", "60", "%",
        ];
        assert_eq!(direct, wanted);
        let json = as_json(Path::new("/d"), 1, &all);
        assert_eq!(json["ways"][1]["share_of_fio_write"], 0.8);
        let none = Rates::new("direct");
        assert!(as_text(Path::new("/d"), 1, &[none]).contains('-'));
    }

    #[test]
    fn a_directory_is_measured_and_left_as_it_was() {
        let directory = tempfile::tempdir().expect("temp dir");
        let rates = rounds_of(directory.path(), 2 << 20, 1).expect("measured");
        let mapped = &rates[1];
        assert!(mapped.read[0] > 0.0 && mapped.write[0] > 0.0);
        assert_eq!(
            std::fs::read_dir(directory.path()).expect("read").count(),
            0
        );
        let failure = check_disk_space(directory.path(), 1 << 60).expect_err("too large");
        assert_eq!(failure.code, ErrorCode::Disk);
    }
}
