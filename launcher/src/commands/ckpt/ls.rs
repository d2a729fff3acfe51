//! `launcher ckpt ls`: contents of a run's checkpoints, from their manifests.

use crate::lang::{Both, Lang, Text, both, columns, text};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use engine::checkpoint::{self, Checkpoint};
use serde_json::{Value, json};

use super::{missing, print};
use crate::cli::CkptLsArgs;
use crate::error::{ErrorCode, Failure, chain, file_name};
use crate::units::bytes;

const PREFIX: &str = "checkpoint-";
/// Weight files as (file name without extension, name in the output).
const HOLDS: [(&str, Both); 3] = [
    ("model", both("model", "模型")),
    ("adapter_model", both("adapters", "适配器")),
    ("trained", both("trained parts", "训练过的部分")),
];

/// One checkpoint in the output of `launcher ckpt ls`.
struct Row {
    name: String,
    latest: bool,
    bytes: u64,
    /// Contents of the manifest, or why it cannot be read.
    found: Result<Contents, Text>,
}

struct Contents {
    step: u64,
    world_size: u32,
    holds: Vec<Both>,
    /// For each kind of training state (such as `master`): number of tensors and their total bytes.
    kinds: BTreeMap<String, (usize, u64)>,
    state_bytes: u64,
    files: usize,
    meta: Value,
}

/// Runs `launcher ckpt ls`: prints one row per checkpoint of a run directory, or one row if given a single
/// checkpoint.
pub(super) fn run(args: &CkptLsArgs) -> Result<ExitCode, Failure> {
    let run = &args.run;
    let doing = text!("list {}", "列出 {}", run.display());
    if !run.is_dir() {
        return Err(missing(run, &doing));
    }
    let single = run.join("MANIFEST.json").is_file() || file_name(run).starts_with(PREFIX);
    let (rows, latest) = if single {
        (vec![Row::of(run, false)], None)
    } else {
        let latest = checkpoint::find_latest(run)
            .ok()
            .flatten()
            .map(|directory| file_name(&directory));
        let rows = names(run)
            .into_iter()
            .map(|name| Row::of(&run.join(&name), latest.as_ref() == Some(&name)));
        (rows.collect(), latest)
    };
    if rows.is_empty() {
        return Err(Failure::new(
            ErrorCode::Resume,
            text!(
                "{} contains no checkpoint",
                "{} 中没有检查点",
                run.display()
            ),
            both(
                "it has no directory named checkpoint-N",
                "其中没有名为 checkpoint-N 的目录",
            ),
        )
        .next(both(
            "give the directory of a run: the value of its --output, or a directory below runs/",
            "请指定某次运行的目录：其 --output 的值，或 runs/ 下的目录",
        )));
    }
    if args.json == Some(true) {
        let rows: Vec<Value> = rows.iter().map(Row::json).collect();
        let all = json!({"folder": run, "latest": latest, "checkpoints": rows});
        print(&format!("{all:#}\n"))?;
    } else {
        let table = || match &rows[0].found {
            Ok(contents) if single => table(&rows) + &kinds(contents),
            _ => table(&rows),
        };
        print(&Lang::chosen().speak(table))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Names of checkpoint directories by step, including unfinished ones.
fn names(run: &Path) -> Vec<String> {
    let entries = fs::read_dir(run).into_iter().flatten().flatten();
    let directories = entries.filter(|entry| entry.path().is_dir());
    let mut names: Vec<String> = directories
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with(PREFIX))
        .collect();
    names.sort_by_key(|name| {
        let digits = name[PREFIX.len()..].split('.').next().unwrap_or_default();
        (digits.parse::<u64>().unwrap_or(u64::MAX), name.clone())
    });
    names
}

impl Row {
    fn of(directory: &Path, latest: bool) -> Self {
        let found = match Checkpoint::open(directory) {
            Ok(checkpoint) => Ok(Contents::of(&checkpoint)),
            Err(_) if file_name(directory).contains('.') => {
                Err(both("left by an unfinished save", "未完成的保存留下的").into())
            }
            Err(error) => Err(chain(&error)),
        };
        Self {
            name: file_name(directory),
            latest,
            bytes: on_disk(directory),
            found,
        }
    }

    fn json(&self) -> Value {
        let Self {
            name,
            latest,
            bytes,
            found,
        } = self;
        let mut row = json!({
            "name": name, "latest": latest, "bytes": bytes,
            "whole": found.is_ok(), "problem": found.as_ref().err().map(|problem| problem.get(Lang::En)),
        });
        if let (Ok(contents), Some(row)) = (found, row.as_object_mut()) {
            let kinds = contents.kinds.iter().map(|(kind, (tensors, bytes))| {
                (kind.clone(), json!({"tensors": tensors, "bytes": bytes}))
            });
            row.insert("step".into(), contents.step.into());
            row.insert("world_size".into(), contents.world_size.into());
            row.insert("holds".into(), json!(contents.holds));
            row.insert("state".into(), Value::Object(kinds.collect()));
            row.insert("state_bytes".into(), contents.state_bytes.into());
            row.insert("files".into(), contents.files.into());
            for key in ["zero", "precision", "steps_done", "total_tokens", "seed"] {
                row.insert(key.into(), contents.meta[key].clone());
            }
        }
        row
    }
}

impl Contents {
    fn of(checkpoint: &Checkpoint) -> Self {
        let files = checkpoint.files();
        let is_of = |path: &str, stem: &str| {
            let rest = path.strip_prefix(stem);
            rest.is_some_and(|rest| {
                rest.ends_with(".safetensors") && (rest.starts_with('.') || rest.starts_with('-'))
            })
        };
        let mut holds: Vec<Both> = HOLDS
            .iter()
            .filter(|(stem, _)| files.iter().any(|file| is_of(&file.path, stem)))
            .map(|(_, name)| *name)
            .collect();
        let mut kinds = BTreeMap::new();
        for tensor in checkpoint.tensors() {
            let (tensors, bytes) = kinds.entry(tensor.kind.clone()).or_insert((0, 0));
            *tensors += 1;
            *bytes += tensor.elems().unwrap_or(0) * tensor.dtype.size_bytes() as u64;
        }
        if !kinds.is_empty() {
            holds.push(both("state", "状态"));
        }
        let state = files.iter().filter(|file| file.path.starts_with("state/"));
        Self {
            step: checkpoint.step(),
            world_size: checkpoint.world_size(),
            holds,
            kinds,
            state_bytes: state.map(|file| file.bytes).sum(),
            files: files.len(),
            meta: checkpoint.meta().clone(),
        }
    }
}

/// Total bytes of all files in a directory, without following links.
fn on_disk(directory: &Path) -> u64 {
    let mut bytes = 0;
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => directories.push(entry.path()),
                Ok(metadata) => bytes += metadata.len(),
                Err(_) => {}
            }
        }
    }
    bytes
}

fn table(rows: &[Row]) -> String {
    let name = both("checkpoint", "检查点");
    let widths = rows.iter().map(|row| row.name.len());
    let width = widths.max().unwrap_or(0).max(columns(&name.to_string()));
    let mut text = format!(
        " {:<width$}  {:>7}  {:>7}  {:>5}  {:>4}  {:<9}  {:<24}  {}\n",
        name,
        both("bytes", "字节"),
        both("state", "状态"),
        both("ranks", "rank"),
        "ZeRO",
        both("precision", "精度"),
        both("contains", "内容"),
        both("condition", "状况"),
    );
    for row in rows {
        let line = match &row.found {
            Ok(contents) => format!(
                " {:<width$}  {:>7}  {:>7}  {:>5}  {:>4}  {:<9}  {:<24}  {}",
                row.name,
                bytes(row.bytes),
                bytes(contents.state_bytes),
                contents.world_size,
                word(&contents.meta["zero"]),
                word(&contents.meta["precision"]),
                Text::join(&contents.holds, " + "),
                if row.latest {
                    both("intact, the latest", "完好，最新")
                } else {
                    both("intact", "完好")
                },
            ),
            Err(problem) => format!(
                " {:<width$}  {:>7}  {:>7}  {:>5}  {:>4}  {:<9}  {:<24}  {}",
                row.name,
                bytes(row.bytes),
                "",
                "",
                "",
                "",
                "",
                text!("damaged: {problem}", "已损坏：{problem}")
            ),
        };
        push(&mut text, format_args!("{line}\n"));
    }
    text + &both(
        " this list compares lengths and descriptions; `launcher ckpt verify` compares every byte\n",
        " 此列表只比较长度和描述；`launcher ckpt verify` 比较每个字节\n",
    )
    .to_string()
}

fn kinds(contents: &Contents) -> String {
    let mut text = String::new();
    for (kind, (tensors, size)) in &contents.kinds {
        push(
            &mut text,
            format_args!(
                "   {kind:<12} {}  {:>7}\n",
                text!("{tensors:>6} tensors", "{tensors:>6} 个张量"),
                bytes(*size)
            ),
        );
    }
    text
}

/// Formats a value of the manifest as text; a dash if it is absent.
fn word(value: &Value) -> String {
    match value {
        Value::Null => "–".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn push(text: &mut String, part: std::fmt::Arguments<'_>) {
    text.write_fmt(part)
        .expect("writing into a string cannot fail");
}
