//! Memory of a run as the operating system counts it, beside its plan.
//!
//! The run itself is not asked. High-water marks come from `/proc/PID/status`, the size of the shared window from the
//! maps of its ranks, spill files from their directory.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Time between two looks at the processes.
const LOOK: Duration = Duration::from_millis(5);
/// Name of the window's file in the maps of a rank.
const WINDOW: &str = "tessera-window-";

/// Measured and planned bytes of one run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Measured {
    /// High-water mark of every rank that trained, in the order of their start.
    pub resident: Vec<u64>,
    /// The communicator's window; 0 without one.
    pub window: u64,
    /// Spill files of all ranks at their largest.
    pub spilled: u64,
    /// Planned high-water mark of every rank.
    pub planned_resident: Vec<u64>,
    /// Planned spill files of all ranks.
    pub planned_spilled: u64,
    /// Planned host memory of all ranks.
    pub planned_host: u64,
}

/// Writes the model directory of `pack` with other sizes, and the samples of `pack` beside it.
///
/// # Errors
/// A file cannot be read or written.
pub fn model_directory(pack: &Path, directory: &Path, sizes: &Value) -> Result<()> {
    fs::create_dir_all(directory)?;
    for name in [
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        fs::copy(pack.join(name), directory.join(name)).with_context(|| name.to_owned())?;
    }
    let mut config: Value = serde_json::from_slice(&fs::read(pack.join("config.json"))?)?;
    merge(&mut config, sizes);
    fs::write(directory.join("config.json"), config.to_string())?;
    Ok(())
}

/// Sets the fields of `changes` in `value`, merging objects recursively.
fn merge(value: &mut Value, changes: &Value) {
    match (value, changes) {
        (Value::Object(fields), Value::Object(changes)) => {
            for (name, change) in changes {
                merge(fields.entry(name).or_insert(Value::Null), change);
            }
        }
        (value, changes) => *value = changes.clone(),
    }
}

/// Sizes of a MiniCPM of about 68 million parameters: 260 MiB of f32 weights.
#[must_use]
pub fn middle_sizes() -> Value {
    json!({
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4,
        "vision_config": {
            "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4,
            "num_hidden_layers": 4,
        },
    })
}

/// Sizes of a MiniCPM of about 7 million parameters.
#[must_use]
pub fn small_sizes() -> Value {
    json!({
        "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    })
}

/// Runs `launcher` with `args` and watches its ranks. `output` is the run's directory, `spill` the directory of its
/// spill files.
///
/// # Errors
/// The run fails or leaves no plan.
pub fn measure(
    launcher: &Path,
    args: &[String],
    output: &Path,
    spill: Option<&Path>,
) -> Result<Measured> {
    let mut child = Command::new(launcher)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| launcher.display().to_string())?;
    let stream = child.stderr.take().context("standard error is piped")?;
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    let mut screen = String::new();
    let mut ranks: BTreeMap<u32, u64> = BTreeMap::new();
    let mut measured = Measured::default();
    loop {
        match lines.recv_timeout(LOOK) {
            Ok(line) => screen = screen + &line + "\n",
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        for rank in children(child.id()) {
            if let Some(resident) = high_water_mark(rank) {
                let most = ranks.entry(rank).or_default();
                *most = resident.max(*most);
            }
            measured.window = measured.window.max(window_bytes(rank));
        }
        if let Some(directory) = spill {
            measured.spilled = measured.spilled.max(spill_bytes(directory));
        }
    }
    let status = child.wait()?;
    ensure!(status.success(), "{args:?}\n{screen}");
    let plan: Value = serde_json::from_slice(&fs::read(output.join("plan.json"))?)?;
    let (plan, peak) = (&plan["plan"], &plan["plan"]["memory"]["peak"]);
    let of = |value: &Value| value.as_u64().context("the plan has its bytes");
    let count = of(&plan["ranks"])?;
    measured.resident = ranks.into_values().collect();
    let by_rank = plan["memory"]["resident_by_rank"].as_array();
    let by_rank = by_rank.context("the plan has its bytes")?;
    measured.planned_resident = by_rank.iter().map(of).collect::<Result<_>>()?;
    ensure!(
        measured.resident.len() == measured.planned_resident.len(),
        "as many processes as ranks"
    );
    measured.planned_spilled = of(&peak["nvme"])? * count;
    measured.planned_host = of(&plan["host_need_bytes"])?;
    Ok(measured)
}

/// Child processes of `pid`.
fn children(pid: u32) -> Vec<u32> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect()
}

/// `VmHWM` of a process.
#[must_use]
pub fn high_water_mark(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib * 1024)
}

fn window_bytes(pid: u32) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let own = maps.lines().filter(|line| line.contains(WINDOW));
    let size = |line: &str| -> Option<u64> {
        let (start, end) = line.split_whitespace().next()?.split_once('-')?;
        Some(u64::from_str_radix(end, 16).ok()? - u64::from_str_radix(start, 16).ok()?)
    };
    own.filter_map(size).sum()
}

/// Bytes of the spill files of ranks below `directory`.
fn spill_bytes(directory: &Path) -> u64 {
    let mut bytes = 0;
    let mut directories: Vec<PathBuf> = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let Ok(metadata) = entry.metadata() else {
                continue;
            };
            if metadata.is_dir() {
                directories.push(entry.path());
            } else if entry.file_name().to_string_lossy().starts_with("rank-") {
                bytes += metadata.len();
            }
        }
    }
    bytes
}
