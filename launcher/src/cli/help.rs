//! Help texts, shell completions and the man page.
//!
//! All are generated from the clap definitions of the subcommands, so each flag is described once.

use std::collections::BTreeMap;

use clap::{CommandFactory, Parser};
use clap_complete::Shell;

use super::normalise::Subcommand;
use super::table::defaults;
use super::{
    Args, BenchNvmeArgs, CkptConsolidateArgs, CkptLsArgs, CkptReshardArgs, CkptVerifyArgs,
    DataCheckArgs, DoctorArgs, EvalArgs, ExplainArgs, ExplainConfigArgs, ExportArgs, GenerateArgs,
    ImportArgs, PlanArgs, SynthArgs, WatchArgs,
};
use crate::error::Failure;
use crate::lang::{Both, Lang, both};

/// What the user typed after `launcher completions`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parser)]
#[command(
    name = "launcher completions",
    version,
    about = "Prints a completion script for a shell",
    max_term_width = 100
)]
pub struct CompletionsArgs {
    /// The shell that will source the script
    #[arg(value_enum)]
    pub shell: Shell,
}

/// What the user typed after `launcher man`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parser)]
#[command(
    name = "launcher man",
    version,
    about = "Prints the man page, in roff",
    max_term_width = 100
)]
pub struct ManArgs {}

/// Flags that `--help` lists, by group: those that most runs use.
const OVERVIEW: [(Both, &[&str]); 5] = [
    (
        both("Model and data", "模型与数据"),
        &[
            "model",
            "data",
            "eval-data",
            "output",
            "preset",
            "data-format",
            "model-max-length",
        ],
    ),
    (
        both("Memory and ranks", "内存与 rank"),
        &[
            "zero",
            "offload",
            "nproc",
            "mp-size",
            "device",
            "precision",
            "checkpoint-activations",
            "deepspeed",
        ],
    ),
    (
        both("What is trained", "训练的部分"),
        &[
            "lora-rank",
            "lora-alpha",
            "lora-target-modules",
            "modules-to-save",
            "train",
            "freeze",
        ],
    ),
    (
        both("Training", "训练"),
        &[
            "learning-rate",
            "num-train-epochs",
            "max-steps",
            "per-device-train-batch-size",
            "gradient-accumulation-steps",
            "warmup-ratio",
        ],
    ),
    (
        both("Saving and evaluation", "保存与评估"),
        &["save-steps", "eval-steps", "resume", "max-restarts"],
    ),
];

/// Section titles that only `--help-all` and the subcommands have.
const TITLES: [Both; 4] = [
    both("Saving, evaluation, logs", "保存、评估、日志"),
    both("What to plan for", "计划的对象"),
    both("Arguments", "位置参数"),
    both("Options", "选项"),
];

/// Frame of clap's help in Chinese: clap's own words are English.
const FRAME: &str = "{before-help}{about-with-newline}\n用法：{usage}\n\n{all-args}{after-help}";

/// Example command lines.
const EXAMPLES: Both = both(
    "\
Examples
  launcher --zero 3 --offload cpu                                the demo: no model, no data
  launcher plan --no-weights --model config.json --hw 2x24GiB    will it fit?
  launcher --model DIR --data train.json --lora-rank 64          LoRA
  launcher --resume runs/x                                       continue a run
",
    "\
示例
  launcher --zero 3 --offload cpu                                演示：无需模型和数据
  launcher plan --no-weights --model config.json --hw 2x24GiB    放得下吗？
  launcher --model DIR --data train.json --lora-rank 64          LoRA
  launcher --resume runs/x                                       续训
",
);

impl Subcommand {
    /// The clap definition of this subcommand.
    pub(super) fn command(self) -> clap::Command {
        match self {
            Self::Train => Args::command(),
            Self::Plan => PlanArgs::described(),
            Self::Doctor => DoctorArgs::command(),
            Self::Explain => ExplainArgs::command(),
            Self::DataCheck => DataCheckArgs::command(),
            Self::Generate => GenerateArgs::command(),
            Self::Eval => EvalArgs::command(),
            Self::Export => ExportArgs::command(),
            Self::Import => ImportArgs::command(),
            Self::Watch => WatchArgs::command(),
            Self::Synth => SynthArgs::command(),
            Self::BenchNvme => BenchNvmeArgs::command(),
            Self::ExplainConfig => ExplainConfigArgs::described(),
            Self::CkptLs => CkptLsArgs::command(),
            Self::CkptVerify => CkptVerifyArgs::command(),
            Self::CkptReshard => CkptReshardArgs::command(),
            Self::CkptConsolidate => CkptConsolidateArgs::command(),
            Self::Completions => CompletionsArgs::command(),
            Self::Man => ManArgs::command(),
        }
    }

    /// This subcommand without the training flags that it shares.
    pub(super) fn own_command(self) -> clap::Command {
        match self {
            Self::Plan => PlanArgs::own_flags(),
            Self::ExplainConfig => ExplainConfigArgs::own_flags(),
            _ => self.command(),
        }
    }
}

/// The help text that the words after the subcommand `subcommand` ask for, if they do.
pub(super) fn asked_for(
    subcommand: Subcommand,
    words: &[String],
) -> Result<Option<String>, Failure> {
    let asked = |names: &[&str]| words.iter().any(|word| names.contains(&word.as_str()));
    if asked(&["--help-all"]) {
        let mut command = titled(subcommand.command(), Lang::chosen());
        return Ok(Some(command.render_long_help().to_string()));
    }
    if !asked(&["-h", "--help"]) {
        return Ok(None);
    }
    match subcommand {
        Subcommand::Train => overview(Lang::chosen()).map(Some),
        _ => {
            let shared = matches!(subcommand, Subcommand::Plan | Subcommand::ExplainConfig);
            let lang = Lang::chosen();
            let training = both(
                "Flags of training: `launcher --help-all`\n",
                "训练的参数：`launcher --help-all`\n",
            );
            let training = if shared { training.get(lang) } else { "" };
            let common = both(
                "Every subcommand takes --error-format human or json, and --lang en or zh",
                "每个子命令都接受 --error-format human 或 json，以及 --lang en 或 zh",
            );
            let command = subcommand
                .own_command()
                .after_help(format!("{training}{}", common.get(lang)));
            Ok(Some(titled(command, lang).render_help().to_string()))
        }
    }
}

/// `command` with section titles in `lang`. The descriptions of the flags are English.
fn titled(mut command: clap::Command, lang: Lang) -> clap::Command {
    if lang == Lang::En {
        return command;
    }
    command.build();
    let known = || OVERVIEW.iter().map(|(title, _)| title).chain(&TITLES);
    let translated = |title: &str| known().find(|known| known.en == title);
    command.help_template(FRAME).mut_args(|arg| {
        let title = match (arg.get_help_heading(), arg.is_positional()) {
            (Some(title), _) => title,
            (None, true) => "Arguments",
            (None, false) => "Options",
        };
        match translated(title) {
            Some(title) => arg.help_heading(title.get(lang)),
            None => arg,
        }
    })
}

/// Text of `launcher --help`: usage, the most used flags with their defaults, examples, subcommands.
fn overview(lang: Lang) -> Result<String, Failure> {
    let command = Args::command();
    let defaults = defaults(true)?;
    let mut text = format!(
        "{}\n\n{}",
        command
            .get_about()
            .map(ToString::to_string)
            .unwrap_or_default(),
        both(
            "Usage: launcher [FLAGS]                train; without --model, the built-in demo\n       launcher SUBCOMMAND [FLAGS]\n",
            "用法：launcher [FLAGS]                 训练；不带 --model 时为内置演示\n      launcher SUBCOMMAND [FLAGS]\n",
        )
        .get(lang),
    );
    for (group, flags) in OVERVIEW {
        text.push_str(&format!("\n{}\n", group.get(lang)));
        for flag in flags {
            text.push_str(&line(&command, flag, &defaults));
        }
    }
    let all = both(
        "\nAll flags: launcher --help-all, or docs/flags.md. snake_case spellings work too.\n\n",
        "\n全部参数：launcher --help-all 或 docs/flags.md。snake_case 写法同样可用。\n\n",
    );
    let subcommands = both(
        "\nSubcommands, each with its own --help\n",
        "\n子命令，每个都有自己的 --help\n",
    );
    for part in [all, EXAMPLES, subcommands] {
        text.push_str(part.get(lang));
    }
    for (subcommand, name) in Subcommand::ALL.into_iter().skip(1) {
        let about = subcommand.command().get_about().map(ToString::to_string);
        let about = about.unwrap_or_default();
        let short = about.split([':', ',', ';']).next().unwrap_or_default();
        text.push_str(&format!("  {name:<18}{short}\n"));
    }
    Ok(text)
}

/// One flag of the overview: name, value, description, default.
fn line(command: &clap::Command, flag: &str, defaults: &BTreeMap<&str, String>) -> String {
    let arg = command
        .get_arguments()
        .find(|arg| arg.get_long() == Some(flag))
        .expect("the overview names flags that exist; a test lists it");
    let values = arg.get_possible_values();
    let names: Vec<&str> = values.iter().map(|value| value.get_name()).collect();
    let value = match (&names[..], arg.get_value_names()) {
        (names, _) if (2..4).contains(&names.len()) => names.join("|"),
        (_, Some([value, ..])) => value.to_string(),
        _ => String::new(),
    };
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let default = defaults.get(flag).filter(|value| !value.is_empty());
    let default = default.map_or_else(String::new, |value| format!(" [{value}]"));
    format!("  {:<36}{help}{default}\n", format!("--{flag} {value}"))
}

/// The program as one clap command with all subcommands.
fn program() -> clap::Command {
    let mut program = Args::command()
        .name("launcher")
        .disable_help_subcommand(true);
    let mut nouns: BTreeMap<&str, clap::Command> = BTreeMap::new();
    for (subcommand, name) in Subcommand::ALL.into_iter().skip(1) {
        match name.split_once(' ') {
            None => program = program.subcommand(subcommand.command().name(name)),
            Some((noun, action)) => {
                let parent = nouns
                    .remove(noun)
                    .unwrap_or_else(|| clap::Command::new(noun));
                nouns.insert(noun, parent.subcommand(subcommand.command().name(action)));
            }
        }
    }
    program.subcommands(nouns.into_values())
}

/// The completion script for `shell`.
pub(super) fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut program(), "launcher", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// The man page in roff: training first, then each subcommand with its own flags.
pub(super) fn man_page() -> String {
    let mut page = Vec::new();
    clap_mangen::Man::new(Args::command().name("launcher"))
        .render(&mut page)
        .expect("writing into a vector cannot fail");
    let mut page = String::from_utf8_lossy(&page).into_owned();
    page.push_str(".SH SUBCOMMANDS\n");
    for (subcommand, name) in Subcommand::ALL.into_iter().skip(1) {
        let help = subcommand.own_command().render_help().to_string();
        let lines = help.replace('\\', "\\\\").replace('-', "\\-");
        page.push_str(&format!(".SS launcher {name}\n.nf\n"));
        // roff would read a period or an apostrophe at the start of a line as a request.
        for line in lines.lines() {
            page.push_str(&format!("\\&{line}\n"));
        }
        page.push_str(".fi\n");
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(line: &str) -> String {
        let argv: Vec<String> = line.split_whitespace().map(str::to_string).collect();
        match crate::cli::parse(&argv).expect(line) {
            crate::cli::Command::Print(text) => text,
            other => panic!("{line} is parsed as {other:?}"),
        }
    }

    #[test]
    fn the_overview_has_31_flags_and_fits_one_screen_and_a_half() {
        let text = printed("--help");
        let flags: usize = OVERVIEW.iter().map(|(_, flags)| flags.len()).sum();
        assert_eq!(flags, 31);
        assert!(text.lines().count() <= 75, "{} lines", text.lines().count());
        for line in text.lines() {
            assert!(line.chars().count() <= 100, "{line}");
        }
        assert!(text.contains("--learning-rate X"), "{text}");
        assert!(text.contains("[1e-6]"), "{text}");
        assert_eq!(text, printed("-h"));
        assert_eq!(text, printed("--zero 3 --help"));
    }

    #[test]
    fn section_titles_are_in_the_language_that_is_asked_for() {
        for (subcommand, name) in Subcommand::ALL {
            let text = titled(subcommand.command(), Lang::Zh)
                .render_long_help()
                .to_string();
            assert!(text.contains("用法：launcher"), "{name}: {text}");
            for line in text.lines().filter(|line| line.ends_with(':')) {
                let is_title = !line.starts_with(' ') && line.is_ascii();
                assert!(!is_title, "{name}: {line}");
            }
        }
        let text = overview(Lang::Zh).expect("defaults");
        assert!(
            text.contains("\n训练的部分\n") && text.contains("\n示例\n"),
            "{text}"
        );
    }

    #[test]
    fn every_flag_is_in_help_all() {
        let text = printed("--help-all");
        for arg in Args::command().get_arguments() {
            let Some(long) = arg.get_long() else { continue };
            assert!(text.contains(&format!("--{long}")), "{long}");
        }
    }

    #[test]
    fn every_subcommand_has_help_of_its_own() {
        for (_, name) in Subcommand::ALL.into_iter().skip(1) {
            let text = printed(&format!("{name} --help"));
            assert!(text.contains("Usage"), "{name}: {text}");
            assert!(
                printed("--help").contains(&format!("\n  {name} ")),
                "{name}"
            );
        }
        assert!(printed("plan --help").contains("--hw"));
        assert!(!printed("plan --help").contains("--adam-beta1"));
    }

    #[test]
    fn completions_and_the_man_page_know_flags_and_subcommands() {
        for shell in ["bash", "zsh", "fish"] {
            let script = printed(&format!("completions {shell}"));
            for word in ["optimizer-in-backward", "consolidate", "max-shard-size"] {
                assert!(script.contains(word), "{shell} lacks {word}");
            }
        }
        let page = printed("man");
        for words in [
            "gradient\\-accumulation\\-steps",
            ".SS launcher ckpt consolidate",
            "max\\-shard\\-size",
            "\\-\\-hw",
        ] {
            assert!(page.contains(words), "no {words} in {page}");
        }
    }
}
