//! Configuration files: `--config` (flags) and `--deepspeed`.
//!
//! A file becomes flags that the command line does not have: flag > file > default. Files are read before the
//! arguments are resolved, and later code does not know of them.

mod deepspeed;
mod explain;
mod given;
mod json;
mod read;
mod report;
mod saved;
#[cfg(test)]
mod tests;
mod toml;
mod trainer;
mod value;
#[cfg(test)]
mod value_tests;
mod yaml;

use crate::cli::trainers::{self, Absent, Trainer};
use crate::cli::{Note, train_args};
use crate::config::CONFIG_FILE;
use crate::error::{Failure, quoted};
use crate::lang::{Text, both, text};
use given::Given;
use report::Report;
use std::path::{Path, PathBuf};
use value::Value;

pub(crate) use explain::run as explain;
#[cfg(test)]
pub(crate) use read::read as read_file;
#[cfg(test)]
pub(crate) use value::Value as FileValue;

/// A command line with the flags of its files.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    /// The whole line as `--flag=value`, without the flags that name files.
    pub(crate) words: Vec<String>,
    /// Keys without effect.
    pub(crate) notes: Vec<Note>,
    /// Warnings, one sentence each.
    pub(crate) warnings: Vec<Text>,
    /// The flags from each file, one line per file.
    pub(crate) gives: Vec<Text>,
    /// The recipe's trainer, and the settings that took its defaults, one line each; empty for a recipe of this program.
    pub(crate) defaults: Vec<Text>,
}

impl Loaded {
    /// Adds to a failure of the resolution which of its flags came from a file.
    pub(crate) fn place(&self, failure: Failure) -> Failure {
        let named = |line: &&Text| {
            let text = failure.to_string();
            let mut flags = line.split(' ').filter(|word| word.starts_with("--"));
            flags.any(|flag| text.contains(flag))
        };
        let lines: Vec<Text> = self.gives.iter().filter(named).cloned().collect();
        failure.evidence_lines(lines)
    }
}

/// A file that was read, with its report.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    is_deepspeed: bool,
    /// Whose recipe it is; `None` for one of this program.
    trainer: Option<Trainer>,
    report: Report,
}

/// Merges the files that a command line names into it, and the settings of the run that it continues; `None` if it names
/// neither.
///
/// # Errors
/// A file cannot be read, has mistakes, or contradicts the command line (exit 2).
pub(crate) fn load(typed: &[String]) -> Result<Option<Loaded>, Failure> {
    let loaded = load_files(typed)?;
    let line = loaded.as_ref().map_or(typed, |loaded| &loaded.words);
    let Some((words, path)) = saved::continued(line)? else {
        return Ok(loaded);
    };
    let mut loaded = loaded.unwrap_or_default();
    loaded.words = words;
    let gives = text!(
        "{} gives what the line leaves out",
        "{} 给出了命令行没有给出的设置",
        path.display()
    );
    loaded.gives.push(gives);
    Ok(Some(loaded))
}

fn load_files(typed: &[String]) -> Result<Option<Loaded>, Failure> {
    let mut given = Given::of_line(typed);
    let path = |given: &Given, flag: &str| given.get(flag).map(|word| PathBuf::from(&word.value));
    let (config, deepspeed) = (path(&given, "config"), path(&given, "deepspeed"));
    if config.is_none() && deepspeed.is_none() && given.get("defaults").is_none() {
        return Ok(None);
    }
    let strict = given.is_on("strict-config");
    let parts = go_through(config.as_deref(), &mut given)?;
    let mut loaded = Loaded::default();
    for part in &parts {
        part.verdict(strict)?;
        loaded.add(part);
    }
    if let Some((trainer, rows)) = fill(&parts, &mut given)? {
        loaded.defaults = default_lines(trainer, &rows);
        let held_out = ["eval-data", "eval-dataset"].map(|flag| given.get(flag));
        if trainer == Trainer::LlamaFactory
            && given.get("limit").is_some()
            && held_out.iter().any(Option::is_some)
        {
            loaded.notes.push(Note {
                flag: "max_samples".to_owned(),
                reason: both(
                    "it cuts the training data only; all held-out samples are evaluated",
                    "它只截取训练数据；所有留出样本都会评估",
                )
                .into(),
            });
        }
    }
    loaded.words = line(&given);
    Ok(Some(loaded))
}

/// Adds to `given` what the recipe's trainer takes for absent keys, and returns it; `None` for a recipe of this program.
///
/// # Errors
/// `--defaults theirs` without a recipe of another trainer, or a recipe whose trainables differ here (exit 2).
fn fill(parts: &[Part], given: &mut Given) -> Result<Option<(Trainer, Vec<Absent>)>, Failure> {
    let asked = given.get("defaults").map(|word| word.value.clone());
    let asked = asked.as_deref();
    let of_file = parts.iter().find_map(|part| part.trainer);
    let trainer = match asked {
        Some("ours") => return Ok(None),
        None | Some("theirs") => of_file,
        Some(name) => Trainer::named(name),
    };
    let Some(trainer) = trainer else {
        if asked == Some("theirs") {
            return Err(Failure::usage(
                both(
                    "--defaults theirs needs a recipe of another trainer",
                    "--defaults theirs 需要另一个训练器的配方",
                ),
                both(
                    "neither the line nor a file has the keys of one",
                    "命令行和文件中都没有其他训练器的键",
                ),
            )
            .next(both(
                "name it: --defaults llama-factory",
                "请指明：--defaults llama-factory",
            )));
        }
        return Ok(None);
    };
    // A preset is complete.
    if given.get("preset").is_some() {
        return Ok(None);
    }
    let rows = {
        let value = |flag: &str| given.get(flag).map(|word| word.value.clone());
        trainers::refuse_adapted_tower(trainer, &value)?;
        trainers::absent(trainer, &value)
    };
    let replaced: &[&str] = match given.get("train").is_some() {
        true => &["tune-vision", "tune-llm", "modules-to-save"],
        false => &[],
    };
    let batch = given.get("global-batch-size").is_some();
    let sizes = ["per-device-train-batch-size", "gradient-accumulation-steps"];
    let rows: Vec<Absent> = rows
        .into_iter()
        .filter(|row| given.set_by(row.flag).is_none() && !replaced.contains(&row.flag))
        .filter(|row| !batch || !sizes.contains(&row.flag))
        .collect();
    for row in &rows {
        given.add(row.flag, &row.value, trainer.name());
    }
    Ok(Some((trainer, rows)))
}

/// What a run prints about the defaults of a trainer: a table of setting, value and whose it is.
fn default_lines(trainer: Trainer, rows: &[Absent]) -> Vec<Text> {
    let name = trainer.name();
    let mut lines = vec![text!(
        "a recipe of {name}: absent keys take its defaults; --defaults ours takes this program's",
        "{name} 的配方：未给出的键采用它的默认值；--defaults ours 采用本程序的默认值"
    )];
    let width = |of: fn(&Absent) -> usize| rows.iter().map(of).max().unwrap_or(0).min(32);
    let (flags, values) = (width(|row| row.flag.len()), width(|row| row.value.len()));
    let row = |row: &Absent| {
        Text::literal(format_args!(
            "{:<flags$}  {:<values$}  {name}",
            row.flag, row.value
        ))
    };
    lines.extend(rows.iter().map(row));
    if trainer == Trainer::MsSwift {
        lines.push(trainers::CUT.into());
    }
    lines.push(
        both(
            "all other settings take this program's defaults",
            "其他设置都采用本程序的默认值",
        )
        .into(),
    );
    lines
}

/// Reads the files of `--config` and `--deepspeed` and adds their flags to `given`.
fn go_through(config: Option<&Path>, given: &mut Given) -> Result<Vec<Part>, Failure> {
    let mut parts = Vec::new();
    if let Some(path) = config {
        if path.file_name().is_some_and(|name| name == CONFIG_FILE) {
            let run = path.parent().filter(|run| !run.as_os_str().is_empty());
            let run = run.unwrap_or(Path::new(".")).display().to_string();
            return Err(Failure::usage(
                text!(
                    "{} has the settings of a run",
                    "{} 是一次运行的设置",
                    path.display()
                ),
                both(
                    "--config reads a file of flags",
                    "--config 读取的是参数文件",
                ),
            )
            .next(Text::literal(format_args!("--resume {}", quoted(&run)))));
        }
        let file = read::read(path)?;
        if deepspeed::is_deepspeed(&file) {
            let title = text!(
                "{} is a DeepSpeed configuration",
                "{} 是 DeepSpeed 配置",
                path.display()
            );
            return Err(Failure::usage(
                title,
                both(
                    "--config reads a file of flags",
                    "--config 读取的是参数文件",
                ),
            )
            .next(text!("--deepspeed {}", "--deepspeed {}", path.display())));
        }
        if ["compute_environment", "distributed_type"]
            .iter()
            .any(|key| file.get(key).is_some())
        {
            return Err(Failure::usage(
                text!(
                    "{} is a configuration of accelerate",
                    "{} 是 accelerate 的配置",
                    path.display()
                ),
                both(
                    "--config reads a file of flags",
                    "--config 读取的是参数文件",
                ),
            )
            .next(both(
                "give what it says as flags: --nproc N (num_processes), --precision bf16 (mixed_precision), --deepspeed FILE or --zero N (deepspeed_config)",
                "请用参数给出其内容：--nproc N（num_processes）、--precision bf16（mixed_precision）、--deepspeed FILE 或 --zero N（deepspeed_config）",
            )));
        }
        let trainer = match given
            .get("defaults")
            .and_then(|word| Trainer::named(&word.value))
        {
            Some(named) => Some(named),
            None => trainer::trainer_of(&file),
        };
        let report = trainer::report(&file, trainer, given);
        let place = path.display().to_string();
        for choice in &report.choices {
            given.add(&choice.flag, &choice.value, &place);
        }
        parts.push(Part {
            path: path.to_owned(),
            is_deepspeed: false,
            trainer,
            report,
        });
    }
    if let Some(word) = given.get("deepspeed") {
        let named_by_file = config.filter(|_| !word.place.is_empty());
        let path = beside(Path::new(&word.value), named_by_file);
        parts.push(deepspeed_part(path, given)?);
    }
    Ok(parts)
}

/// Processes a file with this content and extension, as a command line without other flags would. For
/// [`crate::fuzzing`].
pub(crate) fn go_through_bytes(bytes: &[u8], ending: &str) -> Result<(), Failure> {
    let path = Path::new("config").with_extension(ending);
    let file = read::parse_named(bytes, &path)?;
    let given = Given::default();
    let report = match deepspeed::is_deepspeed(&file) {
        true => deepspeed::report(&file, &path, &given),
        false => trainer::report(&file, trainer::trainer_of(&file), &given),
    };
    report.verdict(&path, true)
}

/// A path in a file: as written, or relative to the file if only that path exists.
fn beside(path: &Path, config: Option<&Path>) -> PathBuf {
    let directory = config.and_then(Path::parent);
    let other = directory.map(|directory| directory.join(path));
    other
        .filter(|other| !path.exists() && other.exists())
        .unwrap_or_else(|| path.to_owned())
}

fn deepspeed_part(path: PathBuf, given: &mut Given) -> Result<Part, Failure> {
    let file = read::read(&path)?;
    check_is_deepspeed(&file, &path)?;
    let mut report = deepspeed::report(&file, &path, given);
    let place = path.display().to_string();
    for choice in &report.choices {
        // The only key that wins over its flag, as in DeepSpeed.
        if choice.flag == "lr-scheduler-type" {
            given.remove("lr-scheduler-type");
        }
        // --bf16 switches bf16 on, and the file says which kind.
        if (&*choice.flag, &*choice.value) == ("precision", "pure-bf16") && given.is_on("bf16") {
            given.remove("bf16");
        }
        if given.set_by(&choice.flag).is_some() {
            continue;
        }
        if let Err(failure) = train_args(&[format!("--{}={}", choice.flag, choice.value)]) {
            let row = |key: &String| report.rows.iter().find(|row| row.path == *key);
            let row = choice.keys.first().and_then(row);
            report.errors.push(report::Problem {
                line: row.map_or(1, |row| row.line),
                what: text!("{} cannot be used", "{} 无法使用", choice.keys.join(", ")),
                why: failure.title,
                next: None,
            });
        }
        given.add(&choice.flag, &choice.value, &place);
    }
    Ok(Part {
        path,
        is_deepspeed: true,
        trainer: None,
        report,
    })
}

fn check_is_deepspeed(file: &Value, path: &Path) -> Result<(), Failure> {
    if deepspeed::is_deepspeed(file) {
        return Ok(());
    }
    let title = text!(
        "{} is not a DeepSpeed configuration",
        "{} 不是 DeepSpeed 配置",
        path.display()
    );
    let failure = Failure::usage(
        title,
        both(
            "it has none of the keys that identify one",
            "其中没有能表明身份的键",
        ),
    );
    Err(failure.next(text!(
        "for a file of flags: --config {}",
        "参数文件请用：--config {}",
        path.display()
    )))
}

/// Command line of the `given` flags, without the files they came from.
fn line(given: &Given) -> Vec<String> {
    let files = ["config", "deepspeed", "strict-config"];
    let words = given.words().iter();
    words
        .filter(|word| !files.contains(&&*word.flag))
        .map(|word| format!("--{}={}", word.flag, word.value))
        .collect()
}

impl Part {
    /// An error if the file has mistakes; with `strict`, also if it has warnings.
    fn verdict(&self, strict: bool) -> Result<(), Failure> {
        self.report.verdict(&self.path, strict)
    }
}

impl Loaded {
    fn add(&mut self, part: &Part) {
        let Part {
            path,
            is_deepspeed,
            report,
            ..
        } = part;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        for (reason, names) in report.unused() {
            self.notes.push(Note {
                flag: format!("{name}: {}", names.join(", ")),
                reason: reason.into(),
            });
        }
        let warnings = report.warnings.iter();
        self.warnings
            .extend(warnings.map(|warning| warning.sentence(path)));
        let kind = if *is_deepspeed {
            both("DeepSpeed", "DeepSpeed")
        } else {
            both("flags", "参数")
        };
        let given = report.given();
        self.gives.push(text!(
            "{name} ({kind}) gives {given}",
            "{name}（{kind}）给出 {given}"
        ));
    }
}
