//! `--resume RUN`: the settings of the continued run, from its `config.resolved.json`.
//!
//! They become flags that the line and its files do not have: flag > file > saved run.

use super::given::Given;
use super::line;
use crate::cli::{presets, resume_word};
use crate::config::{CONFIG_FILE, RunPlan};
use crate::error::{ErrorCode, Failure, failures, quoted};
use crate::lang::{Text, both, text};
use engine::checkpoint;
use std::path::{Path, PathBuf};

/// Pairs of flags that set the same thing in a run.
const PAIRS: [(&str, &str); 5] = [
    ("data", "dataset"),
    ("eval-data", "eval-dataset"),
    ("save-strategy", "save-steps"),
    ("eval-strategy", "eval-steps"),
    ("logging-strategy", "logging-steps"),
];

/// Settings of one number format.
const OF_PRECISION: [&str; 8] = [
    "grad-dtype",
    "pure-bf16-weights",
    "pure-bf16-moments",
    "loss-scale",
    "initial-scale-power",
    "loss-scale-window",
    "hysteresis",
    "min-loss-scale",
];

/// Settings that leave results as they are and are chosen anew with another layout.
const OF_LAYOUT: [&str; 10] = [
    "mp-size",
    "mp-split",
    "shard-group",
    "optimizer-in-backward",
    "optimizer-in-forward",
    "prefetch-weights",
    "collectives",
    "bind-cores",
    "cuda-graph",
    "verify-gpu",
];
/// Flags that change the layout.
const LAYOUT: [&str; 6] = ["zero", "offload", "device", "nproc", "mp-size", "precision"];

/// The line with the settings of the run that it continues, and the file that has them. `None` if the line is complete
/// without them.
///
/// # Errors
/// The line names a directory without settings, or one without a checkpoint (exit 2 or 9).
pub(super) fn continued(words: &[String]) -> Result<Option<(Vec<String>, PathBuf)>, Failure> {
    let mut given = Given::of_line(words);
    let value = |given: &Given, flag: &str| given.get(flag).map(|word| word.value.clone());
    let resume = match value(&given, "resume") {
        None => return Ok(None),
        Some(word) => resume_word(&word).unwrap_or(word),
    };
    if resume == "false" {
        return Ok(None);
    }
    let output = value(&given, "output").map(PathBuf::from);
    let has_config = |run: &Path| run.join(CONFIG_FILE).is_file();
    let has = |flag: &str, other: &str| given.get(flag).or_else(|| given.get(other)).is_some();
    let is_complete = has("model", "model") && has("data", "dataset");
    let directory = PathBuf::from(&resume);
    let run = if resume == "auto" {
        output.clone().filter(|run| has_config(run))
    } else if has_config(&directory) {
        point_at_latest(&mut given, &directory, output.as_deref())?;
        return with_saved(given, &directory).map(Some);
    } else {
        let parent = directory.parent().map(Path::to_owned);
        let parent = parent.map(|run| {
            if run.as_os_str().is_empty() {
                ".".into()
            } else {
                run
            }
        });
        parent.filter(|run| has_config(run))
    };
    match run {
        _ if is_complete => Ok(None),
        Some(run) => with_saved(given, &run).map(Some),
        None if resume != "auto" && directory.is_dir() && given.get("model").is_none() => {
            Err(unknown(&directory))
        }
        None => Ok(None),
    }
}

fn unknown(directory: &Path) -> Failure {
    Failure::usage(
        text!(
            "the settings of {} are not known",
            "{} 的设置未知",
            directory.display()
        ),
        text!(
            "neither it nor the directory above has {CONFIG_FILE}",
            "它和它的上级目录中都没有 {CONFIG_FILE}"
        ),
    )
    .next(both(
        "add --model DIR and --data FILE, or give a run directory to --resume",
        "请加上 --model DIR 和 --data FILE，或把运行目录交给 --resume",
    ))
}

/// Replaces the run directory after `--resume` by what it stands for: the latest checkpoint in it.
fn point_at_latest(given: &mut Given, run: &Path, output: Option<&Path>) -> Result<(), Failure> {
    given.remove("resume");
    let Some(output) = output else {
        given.add("resume", "auto", "");
        given.add("output", &run.display().to_string(), "");
        return Ok(());
    };
    let same = |path: &Path| path.canonicalize().ok();
    if same(output).is_some() && same(output) == same(run) {
        given.add("resume", "auto", "");
        return Ok(());
    }
    let doing = text!("resume {}", "从 {} 继续", run.display());
    let latest = checkpoint::find_latest(run).map_err(|e| failures::checkpoint(&doing, &e))?;
    let Some(latest) = latest else {
        let title = text!(
            "cannot {doing}: it has no checkpoint",
            "无法{doing}：其中没有检查点"
        );
        let cause = both(
            "--output names another directory, so the run cannot start again in its own",
            "--output 指定了另一个目录，因此运行无法在自己的目录中重新开始",
        );
        return Err(
            Failure::new(ErrorCode::Resume, title, cause).next(Text::literal(format_args!(
                "launcher --resume {}",
                quoted(&run.display().to_string())
            ))),
        );
    };
    given.add("resume", &latest.display().to_string(), "");
    Ok(())
}

fn with_saved(mut given: Given, run: &Path) -> Result<(Vec<String>, PathBuf), Failure> {
    let path = run.join(CONFIG_FILE);
    let mut words = line(&given);
    presets::expand(&mut words);
    let own = Given::of_line(&words);
    let saved = RunPlan::load_from(&path)?.to_flags();
    let kept = saved
        .iter()
        .filter(|(flag, _)| !is_replaced(flag, &own, &saved));
    let moved = run.display().to_string();
    for (flag, value) in kept {
        // A run may have moved since it was saved.
        let value = if *flag == "output" { &moved } else { value };
        given.add(flag, value, "");
    }
    Ok((line(&given), path))
}

/// Whether the flags of the line leave no place for a saved one.
fn is_replaced(flag: &str, own: &Given, saved: &[(&'static str, String)]) -> bool {
    let has = |flag: &str| own.get(flag).is_some();
    let paired = PAIRS
        .iter()
        .any(|(one, other)| flag == *one && has(other) || flag == *other && has(one));
    let off = |flag: &str| own.get(flag).is_some_and(|word| word.value == "false");
    let of_adapters = |flag: &str| flag.starts_with("lora-") || flag == "modules-to-save";
    // Settings of adapters imply adapters.
    let adapts = || own.words().iter().any(|word| of_adapters(&word.flag));
    let another_precision = || {
        let value = saved.iter().find(|(flag, _)| *flag == "precision");
        own.set_by("precision")
            .is_some_and(|word| value.is_none_or(|(_, value)| word.value != *value))
    };
    // Two of micro-batch, accumulation and global batch give the third.
    let of_batch = || {
        let global = "global-batch-size";
        let (accumulation, micro) = ("gradient-accumulation-steps", "per-device-train-batch-size");
        let is_saved = saved.iter().any(|(flag, _)| *flag == global);
        (is_saved || has(global))
            && (flag == accumulation
                || flag == micro && has(accumulation)
                || flag == global && has(accumulation) && has(micro))
    };
    matches!(flag, "resume" | "resume-anyway" | "inject")
        || own.set_by(flag).is_some()
        || paired
        || of_adapters(flag) && off("use-lora")
        || flag == "use-lora" && adapts()
        || OF_PRECISION.contains(&flag) && another_precision()
        || OF_LAYOUT.contains(&flag)
            && LAYOUT
                .into_iter()
                .any(|own_flag| own.set_by(own_flag).is_some())
        || of_batch()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Args, Command, parse, resolve, train_args};
    use crate::config::{Length, Resume, RunConfig};
    use crate::rank_env::Env;
    use std::fs;

    fn typed(line: &str) -> (Args, Vec<String>) {
        let argv: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        match parse(&argv) {
            Ok(Command::Train { args, typed, .. }) => (*args, typed),
            other => panic!("{line}: {other:?}"),
        }
    }

    fn config(args: &Args) -> RunConfig {
        let env = Env::from_lookup(&|_| None).expect("reads");
        resolve(args, &env).expect("resolves").config
    }

    /// A run saved with the settings of `line`.
    fn saved(line: &str) -> (tempfile::TempDir, RunConfig) {
        let site = tempfile::tempdir().expect("temp dir");
        let run = site.path().join("run");
        fs::create_dir_all(run.join("checkpoint-2")).expect("made");
        let (args, _) = typed(&format!("{line} --output {}", run.display()));
        let config = config(&args);
        config
            .draft()
            .save_to(&run.join(CONFIG_FILE))
            .expect("saved");
        (site, config)
    }

    fn continue_with(site: &tempfile::TempDir, line: &str) -> RunConfig {
        let (_, typed) =
            typed(&line.replace("RUN", &site.path().join("run").display().to_string()));
        let (words, _) = continued(&typed).expect("reads").expect("continues");
        config(&train_args(&words).expect("parses"))
    }

    #[test]
    fn a_run_directory_alone_gives_every_setting() {
        for line in [
            "--model m --data d",
            "",
            "--model m --data d --precision fp16 --loss-scale 128 --nproc 4 --shard-group 2 --zero 3 --num-train-epochs 2",
            "--model m --data d --use-lora true --lora-rank 8 --eval-data e --eval-strategy no --save-strategy epoch",
            "--model m --data d --precision pure-bf16 --global-batch-size 8 --nproc 2 --warmup-steps 3 --inject kill:rank=1,step=3",
        ] {
            let (site, saved) = saved(line);
            for again in [
                "--resume RUN",
                "--resume auto --output RUN",
                "--resume RUN --output RUN",
            ] {
                let config = continue_with(&site, again);
                assert_eq!(config.resume, Resume::Latest);
                let saved = RunConfig {
                    resume: Resume::Latest,
                    inject: Vec::new(),
                    source: match &saved.source {
                        demo @ crate::config::Source::Demo { .. } => demo.clone(),
                        files => files.clone(),
                    },
                    ..saved.clone()
                };
                assert_eq!(config, saved, "{line} {again}");
            }
            let config = continue_with(&site, "--resume RUN/checkpoint-2");
            assert_eq!(config.output, saved.output);
            assert_eq!(
                config.resume,
                Resume::From(saved.output.join("checkpoint-2"))
            );
        }
    }

    #[test]
    fn flags_override_saved_settings_and_those_that_depend_on_them() {
        let (site, _) = saved(
            "--model m --data d --precision fp16 --loss-scale 128 --nproc 4 --shard-group 2 --zero 3 --global-batch-size 8 --num-train-epochs 2 --use-lora true --lora-rank 8 --save-strategy epoch",
        );
        let config = continue_with(
            &site,
            "--resume RUN --zero 0 --nproc 2 --precision bf16 --max-steps 9 --use-lora false --save-steps 3 --dataset e",
        );
        assert_eq!(
            (config.zero, config.world_size, config.shard_group),
            (0, 2, None)
        );
        assert_eq!((config.batch.micro_batch, config.global_batch()), (1, 8));
        assert_eq!(config.length, Length::Steps(9));
        assert!(config.trainable.lora.is_none());
        let elsewhere = site.path().join("other");
        let line = format!("--resume RUN --output {}", elsewhere.display());
        let line = line.replace("RUN", &site.path().join("run").display().to_string());
        let failure = continued(&typed(&line).1).expect_err("it has no checkpoint");
        assert!(failure.title.contains("has no checkpoint"), "{failure}");
    }

    #[test]
    fn a_complete_line_stays_and_a_directory_without_settings_is_refused() {
        let site = tempfile::tempdir().expect("temp dir");
        let directory = site.path().display();
        let of = |line: &str| continued(&typed(line).1);
        assert!(
            of(&format!("--model m --data d --resume {directory}"))
                .expect("reads")
                .is_none()
        );
        assert!(of("--zero 3").expect("reads").is_none());
        let failure = of(&format!("--resume {directory}")).expect_err("unknown");
        assert!(failure.title.contains("not known"), "{failure}");
    }
}
