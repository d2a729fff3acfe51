//! `launcher explain-config`: what each key of a configuration file does.

use super::given::Given;
use super::report::{Choice, Outcome, Report, Row};
use super::{Part, deepspeed, default_lines, fill, go_through, line, read};
use crate::cli::{ExplainConfigArgs, resolve, train_args};
use crate::config::RunConfig;
use crate::error::Failure;
use crate::error::output::print;
use crate::lang::{Both, Lang, Text, both, text};
use crate::rank_env::Env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Prints the effect of every key of the file, given the flags that follow it on the command line.
///
/// # Errors
/// The file cannot be read or honored (exit 2). Effects that are known are printed first.
pub(crate) fn run(
    args: &ExplainConfigArgs,
    typed: &[String],
    env: &Env,
) -> Result<ExitCode, Failure> {
    let (text, verdict) = page(&args.file, typed, env)?;
    print(text.get(Lang::chosen()))?;
    verdict.map(|()| ExitCode::SUCCESS)
}

/// The printed page, and whether the file can be used.
pub(super) fn page(
    path: &Path,
    typed: &[String],
    env: &Env,
) -> Result<(Text, Result<(), Failure>), Failure> {
    let mut given = Given::of_line(typed);
    let strict = given.is_on("strict-config");
    let is_deepspeed = deepspeed::is_deepspeed(&read::read(path)?);
    let flag = if is_deepspeed { "deepspeed" } else { "config" };
    given.remove(flag);
    given.add(flag, &path.display().to_string(), "");
    let config = given.get("config").map(|word| PathBuf::from(&word.value));
    let parts = go_through(config.as_deref(), &mut given)?;
    let filled = fill(&parts, &mut given);
    let config = configuration(&line(&given), env);
    let mut verdict = Ok(());
    let mut text = Text::default();
    for part in &parts {
        text += Text::each(|| table(part, config.as_ref().ok()));
        verdict = verdict.and_then(|()| part.verdict(strict));
    }
    match filled {
        Ok(Some((trainer, rows))) => {
            for line in default_lines(trainer, &rows) {
                text += text!("  {line}\n", "  {line}\n");
            }
            text += Text::literal("\n");
        }
        Ok(None) => {}
        Err(failure) => verdict = verdict.and(Err(failure)),
    }
    Ok((text, verdict.and_then(|()| config.map(drop))))
}

/// The configuration that the flags `words` give. A flag for a model that is missing gets the defaults of models.
fn configuration(words: &[String], env: &Env) -> Result<RunConfig, Failure> {
    let mut args = train_args(words)?;
    if args.model.is_none() && args.data.is_none() {
        (args.model, args.data) = (Some("model".into()), Some("data".into()));
    }
    args.data = args.data.or_else(|| Some("data".into()));
    args.model = args.model.or_else(|| Some("model".into()));
    args.output = args.output.or_else(|| Some("output".into()));
    resolve(&args, env).map(|resolved| resolved.config)
}

fn table(part: &Part, config: Option<&RunConfig>) -> String {
    let Part {
        path,
        is_deepspeed,
        report,
        ..
    } = part;
    let kind = if *is_deepspeed {
        both("DeepSpeed configuration", "DeepSpeed 配置")
    } else {
        both("training flags", "训练参数")
    };
    let mut text = format!("{} · {kind}\n\n", path.display());
    let width = |of: fn(&Row) -> &str| {
        let widths = report.rows.iter().map(|row| of(row).chars().count());
        widths.max().unwrap_or(0).min(64)
    };
    let (keys, values) = (width(|row| &row.path), width(|row| &row.value));
    for row in &report.rows {
        let effect = effect(row, report, config);
        text += &format!("  {:<keys$}  {:<values$}  {effect}\n", row.path, row.value);
    }
    let list = |label: Both, choices: Vec<&Choice>| {
        let typed: Vec<String> = choices.into_iter().map(Choice::typed).collect();
        match typed.is_empty() {
            true => String::new(),
            false => format!("  {label:<9} {}\n", typed.join(" ")),
        }
    };
    let (written, implied): (Vec<&Choice>, Vec<&Choice>) = report
        .choices
        .iter()
        .partition(|choice| choice.is_written());
    text += "\n";
    text += &list(both("gives", "给出"), written);
    text += &list(both("defaults", "默认"), implied);
    for warning in &report.warnings {
        let label = both("warning", "警告");
        text += &format!("  {label:<9} {}\n", warning.sentence(path));
    }
    text + "\n"
}

/// The effect of a key, in a few words.
fn effect(row: &Row, report: &Report, config: Option<&RunConfig>) -> Text {
    match &row.outcome {
        Outcome::Flag(_) => {
            let own = |choice: &&Choice| choice.keys.contains(&row.path);
            let choices = report.choices.iter().filter(own);
            Text::literal(choices.map(Choice::typed).collect::<Vec<_>>().join(" "))
        }
        Outcome::Auto(flag) => match config.and_then(|config| effective(flag, config)) {
            Some(typed) => text!("auto: {typed}", "auto：{typed}"),
            None => text!("auto: --{flag}", "auto：--{flag}"),
        },
        Outcome::Unused(reason) => match config.and_then(|config| from_hidden_size(row, config)) {
            Some(value) => text!(
                "no effect (auto is {value}): {reason}",
                "没有效果（auto 为 {value}）：{reason}"
            ),
            None => text!("no effect: {reason}", "没有效果：{reason}"),
        },
        Outcome::Default("") => both("not set", "未设置").into(),
        Outcome::Default(value) => text!("the default: {value}", "默认值：{value}"),
        Outcome::Here(reason) => text!("same here: {reason}", "此处相同：{reason}"),
        Outcome::Overridden(word) => text!("not used: {word}", "未使用：{word}"),
        Outcome::Comment => both("a comment", "注释").into(),
        Outcome::Warning(why) => text!("WARNING no effect: {why}", "警告 没有效果：{why}"),
        Outcome::Refused(why) => text!("REFUSED {why}", "拒绝 {why}"),
    }
}

/// Value of `auto` for sizes that the trainers derive from the model's hidden size.
fn from_hidden_size(row: &Row, config: &RunConfig) -> Option<u64> {
    let name = row.path.strip_prefix("zero_optimization.")?;
    if row.value != "auto" {
        return None;
    }
    let hidden = || hidden_size(&config.model_dir().join("config.json"));
    match name {
        "reduce_bucket_size" => hidden().map(|h| h * h),
        "stage3_prefetch_bucket_size" => hidden().map(|h| h * h * 9 / 10),
        "stage3_param_persistence_threshold" => hidden().map(|h| 10 * h),
        _ => None,
    }
}

/// The hidden size, as the trainers find it: `hidden_size`, the largest of `hidden_sizes`, or either of the text
/// model.
fn hidden_size(config: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(config).ok()?;
    let config: serde_json::Value = serde_json::from_str(&text).ok()?;
    let of = |config: &serde_json::Value| {
        let sizes = config["hidden_sizes"].as_array();
        let largest = || sizes?.iter().filter_map(serde_json::Value::as_u64).max();
        config["hidden_size"].as_u64().or_else(largest)
    };
    let size = of(&config).or_else(|| of(&config["text_config"]))?;
    // No model has a larger size, and its square would overflow.
    (size <= 1 << 20).then_some(size)
}

/// The value of `flag` in a resolved configuration.
fn effective(flag: &str, config: &RunConfig) -> Option<String> {
    if flag == "global-batch-size" {
        return Some(format!("--global-batch-size {}", config.global_batch()));
    }
    let flags = config.to_flags();
    let named = |name: &str| flags.iter().find(|(flag, _)| *flag == name);
    let other = match flag {
        "warmup-steps" => "warmup-ratio",
        "max-steps" => "num-train-epochs",
        _ => flag,
    };
    let typed = |(flag, value): &(&str, String)| format!("--{flag} {value}");
    let own = named(flag).or_else(|| named(other)).map(typed)?;
    match flag {
        "adam-beta1" => named("adam-beta2").map(|second| format!("{own} {}", typed(second))),
        _ => Some(own),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_bucket_sizes_are_those_of_hugging_face() {
        let directory = tempfile::tempdir().expect("temp dir");
        let file = directory.path().join("config.json");
        let args = train_args(&[
            format!("--model={}", directory.path().display()),
            "--data=d".to_owned(),
        ]);
        let env = Env::from_lookup(&|_| None).expect("an environment");
        let config = resolve(&args.expect("parses"), &env)
            .expect("resolves")
            .config;
        let sizes = || {
            let names = [
                "reduce_bucket_size",
                "stage3_prefetch_bucket_size",
                "stage3_param_persistence_threshold",
            ];
            names.map(|name| {
                let row = Row {
                    path: format!("zero_optimization.{name}"),
                    line: 1,
                    value: "auto".to_owned(),
                    outcome: Outcome::Unused(both("", "")),
                };
                from_hidden_size(&row, &config)
            })
        };
        assert_eq!(sizes(), [None; 3]);
        for (text, expected) in [
            ("{\"hidden_size\": 3584}", [12_845_056, 11_560_550, 35_840]),
            (
                "{\"text_config\": {\"hidden_size\": 4096}}",
                [16_777_216, 15_099_494, 40_960],
            ),
            ("{\"hidden_sizes\": [64, 128]}", [16_384, 14_745, 1280]),
        ] {
            std::fs::write(&file, text).expect("written");
            assert_eq!(sizes(), expected.map(Some), "{text}");
        }
        std::fs::write(&file, "{\"hidden_size\": 18446744073709551615}").expect("written");
        assert_eq!(sizes(), [None; 3]);
    }
}
