//! Table of flags for the documentation, generated from clap and the defaults.

use std::collections::BTreeMap;
use std::fmt::Write;

use clap::CommandFactory;

use super::normalise::Subcommand;
use super::trainers::TABLES;
use super::{ALIASES, Args, IGNORED, RESTRICTED};
use crate::cli::resolve;
use crate::config::DEVICE;
use crate::config::words::value_name;
use crate::error::Failure;
use crate::rank_env::Env;

/// Markdown page about the flags of this program, for the documentation. A table has every flag with its
/// meaning, its default for a model, and its default in the demo. Other names of flags and the flags of other
/// trainers follow.
///
/// # Errors
/// The default configuration cannot be resolved. A test checks that it can.
pub fn flag_table() -> Result<String, Failure> {
    let (model, demo) = (defaults(true)?, defaults(false)?);
    let mut text = String::from(
        "# Flags\n\n\
         For users who look for a flag. This page is generated (`cargo run -p launcher --example docs -- write`) and lists all of them;\n\
         `launcher --help` lists the thirty that most runs use.\n\n\
         `cargo run --release -p launcher -- [FLAGS]`. Flags are accepted in kebab-case and in snake_case, as\n\
         `--flag value` and `--flag=value`. Booleans take an optional `true` or `false`, also as\n\
         `yes`, `no`, `on`, `off`, `1`, `0` and with capitals. A flag overrides a `--config` file and\n\
         replaces `auto` in a `--deepspeed` file, where another difference is refused. Ranges are half-open as in Rust: `0..16` is 0 to 15.\n\
         The demo's defaults apply without `--model`; each is overridden by its flag.\n\
         Bytes: `K M G T KiB MiB …` are powers of 1024, `KB MB GB TB` powers of 1000, a bare number is bytes.\n",
    );
    let mut heading = String::new();
    for arg in Args::command().get_arguments() {
        let Some(long) = arg
            .get_long()
            .filter(|long| !matches!(*long, "help" | "version"))
        else {
            continue;
        };
        let group = arg.get_help_heading().unwrap_or_default();
        if group != heading {
            heading = group.to_string();
            push(
                &mut text,
                format_args!(
                    "\n## {heading}\n\n| flag | default | demo | meaning |\n|---|---|---|---|\n"
                ),
            );
        }
        let help = description(arg);
        let cell = |defaults: &BTreeMap<&str, String>| {
            let set = defaults
                .get(long)
                .map(|value| format!("`{}`", value.replace('|', "\\|")));
            set.unwrap_or_else(|| unset(long).to_string())
        };
        let values = value_names(arg).map_or_else(String::new, |names| format!(" ({names})"));
        push(
            &mut text,
            format_args!(
                "| `--{long}` | {} | {} | {help}{values} |\n",
                cell(&model),
                cell(&demo)
            ),
        );
    }
    for (subcommand, name) in Subcommand::ALL.into_iter().skip(1) {
        subcommand_section(&mut text, name, &subcommand.own_command());
    }
    push(
        &mut text,
        format_args!("\n## Other spellings\n\n| spelling | flag |\n|---|---|\n"),
    );
    for (alias, flag) in ALIASES {
        push(&mut text, format_args!("| `--{alias}` | `--{flag}` |\n"));
    }
    push(
        &mut text,
        format_args!(
            "\n## Flags of other trainers\n\nAccepted and listed once as having no effect:\n\n| flag | reason |\n|---|---|\n"
        ),
    );
    for (name, reason) in IGNORED {
        push(&mut text, format_args!("| `--{name}` | {reason} |\n"));
    }
    push(
        &mut text,
        format_args!(
            "\nRefused unless the value is the only one implemented:\n\n| flag | accepted | reason |\n|---|---|---|\n"
        ),
    );
    for rule in RESTRICTED {
        let accepted: Vec<_> = rule
            .neutral
            .iter()
            .filter(|value| !value.is_empty())
            .map(|value| format!("`{value}`"))
            .collect();
        push(
            &mut text,
            format_args!(
                "| `--{}` | {} | {} |\n",
                rule.name,
                accepted.join(" "),
                rule.reason
            ),
        );
    }
    for (trainer, keys) in TABLES {
        push(
            &mut text,
            format_args!(
                "\n### Keys of {trainer}\n\nOn the line and in `--config` files.\n\n| key | here |\n|---|---|\n"
            ),
        );
        for (names, meaning) in keys {
            let names: Vec<String> = names.split(' ').map(|name| format!("`{name}`")).collect();
            push(
                &mut text,
                format_args!("| {} | {} |\n", names.join(", "), meaning.describe()),
            );
        }
    }
    Ok(text)
}

/// Section of a subcommand's flags; defaults are part of the meaning.
fn subcommand_section(text: &mut String, subcommand: &str, command: &clap::Command) {
    let about = command.get_about().map(ToString::to_string);
    let words: String = command
        .get_positionals()
        .map(|arg| format!(" {}", arg.get_id().as_str().to_uppercase()))
        .collect();
    push(
        text,
        format_args!(
            "\n## `launcher {subcommand}{words}`\n\n{}.\n\n| flag | meaning |\n|---|---|\n",
            about.unwrap_or_default()
        ),
    );
    for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
        let help = description(arg);
        let values = value_names(arg).map_or_else(String::new, |names| format!(" ({names})"));
        match arg.get_long() {
            Some("help" | "version") => {}
            Some(long) => push(text, format_args!("| `--{long}` | {help}{values} |\n")),
            None => {
                let word = arg.get_id().as_str().to_uppercase();
                push(text, format_args!("| `{word}` | {help}{values} |\n"));
            }
        }
    }
}

/// Default values of all flags that have one.
pub(super) fn defaults(of_a_model: bool) -> Result<BTreeMap<&'static str, String>, Failure> {
    let env = Env::from_lookup(&|_| None)?;
    let mut args = Args {
        output: Some("runs".into()),
        ..Args::default()
    };
    if of_a_model {
        (args.model, args.data, args.eval_data) =
            (Some("m".into()), Some("d".into()), Some("e".into()));
    }
    let mut flags: BTreeMap<_, _> = resolve(&args, &env)?
        .config
        .to_flags()
        .into_iter()
        .collect();
    args.use_lora = Some(true);
    let with_adapters: BTreeMap<_, _> = resolve(&args, &env)?
        .config
        .to_flags()
        .into_iter()
        .collect();
    for flag in [
        "lora-rank",
        "lora-alpha",
        "lora-dropout",
        "lora-per-projection",
    ] {
        flags.extend(
            with_adapters
                .get_key_value(flag)
                .map(|(name, value)| (*name, value.clone())),
        );
    }
    for path in ["model", "data", "eval-data", "output"] {
        flags.remove(path);
    }
    // A run resolves it.
    flags.insert("device", value_name(DEVICE));
    Ok(flags)
}

/// Text for a flag without a default value.
fn unset(flag: &str) -> &'static str {
    match flag {
        "model" | "data" => "the demo's",
        "eval-data" => "none",
        "output" => "`runs/<name>-<time>`",
        "host-memory-limit" | "device-memory-limit" => "what is free",
        "host-reserve" => "a twentieth of the memory, 256 MiB to 8 GiB",
        "max-steps" => "from the epochs",
        "num-train-epochs" => "not used",
        "save-steps" | "eval-steps" => "at the end",
        "load-best-model-at-end" => "`false`",
        "metric-for-best-model" => "`loss`",
        "greater-is-better" => "by the metric",
        "early-stopping-patience" => "all steps",
        "save-strategy" | "eval-strategy" => "`steps` where steps are given",
        "logging-strategy" => "`steps`",
        "trace-steps" => "none",
        "save-total-limit" => "keep all",
        "warmup-steps" => "from the ratio",
        "warmup-ratio" => "not used",
        "resume" => "start anew",
        "error-format" => "`human`",
        "lora-target-modules" | "modules-to-save" => "those of the model's family",
        "preset" | "config" | "deepspeed" | "inject" | "adapter" => "none",
        "strict-config" => "`false`",
        "lr-scheduler-kwargs" => "those of its source",
        "no-decay" => "norm weights and biases",
        "train" => "the switches below",
        "freeze" => "nothing more",
        "lr" => "`--learning-rate`",
        "rank-is" => "from the environment",
        "hostfile" => "this machine",
        "include" | "exclude" => "all of the hostfile",
        "lora-layers" | "limit" => "all",
        "global-batch-size" => "what the two give",
        "find-batch" => "`false`",
        "bind-cores" => "within a scheduler's mask; NUMA nodes",
        "cpu-math" => "`native`; of a resumed run, its own",
        "mp-size" => "`1`",
        "mp-split" => "balanced",
        _ => "–",
    }
}

/// Full description of a flag: clap separates the first paragraph from the rest.
fn description(arg: &clap::Arg) -> String {
    let text = arg.get_long_help().or(arg.get_help());
    let text = text.map(ToString::to_string).unwrap_or_default();
    text.replace("\n\n", ". ").trim_end_matches('.').to_string()
}

fn value_names(arg: &clap::Arg) -> Option<String> {
    let values = arg.get_possible_values();
    let names: Vec<&str> = values.iter().map(|value| value.get_name()).collect();
    // Values of Booleans are clear from the heading.
    (names.len() > 1 && names != ["true", "false"]).then(|| names.join(", "))
}

fn push(text: &mut String, part: std::fmt::Arguments<'_>) {
    text.write_fmt(part)
        .expect("writing into a string cannot fail");
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_documented_flag_table_is_current() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/flags.md");
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            text == flag_table().expect("defaults resolve"),
            "docs/flags.md is stale: cargo run -p launcher --example docs -- write"
        );
    }

    #[test]
    fn every_flag_is_in_the_table() {
        let table = flag_table().expect("defaults resolve");
        for arg in Args::command().get_arguments() {
            let Some(long) = arg
                .get_long()
                .filter(|long| !matches!(*long, "help" | "version"))
            else {
                continue;
            };
            assert!(table.contains(&format!("| `--{long}` |")), "{long}");
        }
        assert!(
            table.contains("| `--learning-rate` | `1e-6` | `1e-3` |"),
            "{table}"
        );
    }
}
