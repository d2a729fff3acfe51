//! Rewriting of a command line to the frozen flags: subcommand, snake_case, aliases, foreign flags.

use crate::config::words::nearest;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use clap::{ArgAction, CommandFactory};

use super::foreign::{IGNORED, RESTRICTED};
use super::trainers::{self, Effect, Meaning, Trainer};
use super::{ALIASES, Args, OTHER_REPORT, split_reports};
use crate::error::Failure;
use crate::error::format::{self, ErrorFormat};
use crate::lang::{self, Both, Lang, Text, both, text};

/// Note for the user on a flag that is accepted but has no effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// The flag as typed.
    pub flag: String,
    /// Why the flag has no effect.
    pub reason: Text,
}

/// A subcommand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Subcommand {
    Train,
    Plan,
    Doctor,
    Explain,
    DataCheck,
    Generate,
    Eval,
    Export,
    Import,
    Watch,
    Synth,
    BenchNvme,
    ExplainConfig,
    CkptLs,
    CkptVerify,
    CkptReshard,
    CkptConsolidate,
    Completions,
    Man,
}

impl Subcommand {
    /// All subcommands as typed. A name of two words has an action as its second.
    pub(super) const ALL: [(Self, &'static str); 19] = [
        (Self::Train, "train"),
        (Self::Plan, "plan"),
        (Self::Doctor, "doctor"),
        (Self::Explain, "explain"),
        (Self::DataCheck, "data check"),
        (Self::Generate, "generate"),
        (Self::Eval, "eval"),
        (Self::Export, "export"),
        (Self::Import, "import"),
        (Self::Watch, "watch"),
        (Self::Synth, "synth"),
        (Self::BenchNvme, "bench nvme"),
        (Self::ExplainConfig, "explain-config"),
        (Self::CkptLs, "ckpt ls"),
        (Self::CkptVerify, "ckpt verify"),
        (Self::CkptReshard, "ckpt reshard"),
        (Self::CkptConsolidate, "ckpt consolidate"),
        (Self::Completions, "completions"),
        (Self::Man, "man"),
    ];

    pub(super) fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(subcommand, _)| *subcommand == self);
        found.map_or("train", |(_, name)| name)
    }

    /// What to do about the stray `word`: a subcommand comes first.
    fn help_on(self, word: &str) -> Text {
        if let Some(next) = file_of_flags(word).filter(|_| self == Self::Train) {
            return next;
        }
        let names_one = |name: &str| name.split(' ').next() == Some(word);
        if self != Self::Train || !Self::ALL.iter().any(|(_, name)| names_one(name)) {
            return self.help();
        }
        text!(
            "a subcommand comes before its flags: `launcher {word} …`",
            "子命令写在它的参数之前：`launcher {word} …`"
        )
    }

    /// Command line that shows the help of this subcommand.
    fn help(self) -> Text {
        match self {
            Self::Train => both(
                "`launcher --help-all` lists every flag",
                "`launcher --help-all` 会列出每个参数",
            )
            .into(),
            _ => text!(
                "`launcher {} --help` lists every flag",
                "`launcher {} --help` 会列出每个参数",
                self.name()
            ),
        }
    }
}

/// Flags whose one value is a list separated by commas.
const LISTS: [&str; 8] = [
    "--data",
    "--eval-data",
    "--dataset",
    "--eval-dataset",
    "--lora-target-modules",
    "--modules-to-save",
    "--train",
    "--freeze",
];

/// Next step for a stray word that names a config file.
fn file_of_flags(word: &str) -> Option<Text> {
    let endings = [".yaml", ".yml", ".json", ".toml"];
    let is_file = endings.iter().any(|ending| word.ends_with(ending));
    is_file.then(|| {
        text!(
            "a file of flags: --config {word}",
            "参数文件：--config {word}"
        )
    })
}

/// A rewritten line: every argument is `--kebab-name=value`.
pub(super) struct Line {
    pub(super) args: Vec<String>,
    pub(super) notes: Vec<Note>,
}

/// Splits the subcommand from the words that follow it.
pub(super) fn split_subcommand(argv: &[String]) -> Result<(Subcommand, &[String]), Failure> {
    match argv.split_first() {
        Some((first, rest)) if !first.starts_with('-') => subcommand_of(first, rest),
        _ => Ok((Subcommand::Train, argv)),
    }
}

/// Rewrites the flags after the subcommand `subcommand` to those of `command`.
pub(super) fn normalise(
    subcommand: Subcommand,
    argv: &[String],
    command: &clap::Command,
) -> Result<Line, Failure> {
    let mut rest = argv.iter().map(String::as_str).peekable();
    let known = Known::new(subcommand, command);
    let count = |argument: &clap::Arg| match argument.get_action() {
        ArgAction::Append => usize::MAX,
        _ => 1,
    };
    let counts = command.get_positionals().map(count);
    let mut positionals = counts.fold(0, usize::saturating_add);
    let mut line = Line {
        args: Vec::new(),
        notes: Vec::new(),
    };
    let mut strangers: Vec<(String, String)> = Vec::new();
    // A command line of another trainer can also be planned and explained as it is.
    let takes_recipes = matches!(
        subcommand,
        Subcommand::Train | Subcommand::Plan | Subcommand::ExplainConfig
    );
    let trainer = if takes_recipes {
        trainer_of(argv)
    } else {
        None
    };
    let mut seen: BTreeMap<String, String> = BTreeMap::new();
    while let Some(word) = rest.next() {
        // SwissArmyTransformer has a flag --version with a value.
        let has_value = rest.peek().is_some_and(|next| !next.starts_with('-'));
        let is_flag = takes_recipes && word == "--version" && has_value;
        if matches!(word, "-h" | "--help" | "-V" | "--version") && !is_flag {
            line.args.push(word.to_string());
            continue;
        }
        let Some(body) = word.strip_prefix("--") else {
            if positionals > 0 {
                positionals -= 1;
                line.args.push(word.to_string());
                continue;
            }
            if !strangers.is_empty() {
                continue;
            }
            let failure = Failure::usage(
                text!("unexpected argument '{word}'", "多余的参数 '{word}'"),
                both("only flags follow here", "这里只能有以 -- 开头的参数"),
            );
            let last = line.args.last().and_then(|word| word.split_once('='));
            return Err(match last.filter(|(flag, _)| LISTS.contains(flag)) {
                Some((flag, value)) => failure.next(text!(
                    "several values are separated by commas: {flag} {value},{word}",
                    "多个值用逗号分隔：{flag} {value},{word}"
                )),
                None => failure.next(subcommand.help_on(word)),
            });
        };
        let (name, inline) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (body, None),
        };
        let spelled = format!("--{name}");
        let key = name.replace('-', "_");
        let mut values = inline.map_or_else(Vec::new, |value| vec![value]);
        if let Some(meaning) = trainers::own_meaning(trainer, &key) {
            take_values(&mut rest, &mut values);
            recipe_key(&mut line, &mut seen, &known, (meaning, &spelled), &values)?;
            continue;
        }
        match known.kind(&key) {
            Some((flag, arity @ (Arity::Value | Arity::List))) => {
                if values.is_empty() {
                    values.extend(
                        rest.next_if(|word| !word.starts_with("--"))
                            .map(str::to_string),
                    );
                }
                if flag == "report-to" {
                    take_values(&mut rest, &mut values);
                    let words = values.join(",");
                    let (left, others) = split_reports(&words);
                    if left.is_some() && !others.is_empty() {
                        line.notes.push(Note {
                            flag: format!("{spelled} {}", others.join(",")),
                            reason: OTHER_REPORT.into(),
                        });
                    }
                    values = vec![left.unwrap_or(words)];
                }
                let Some(value) = values.pop() else {
                    return Err(Failure::usage(
                        text!("{spelled} needs a value", "{spelled} 缺少有效的值"),
                        both("none follows it", "后面没有值"),
                    )
                    .next(subcommand.help()));
                };
                // The rate of all parts, as most scripts call it.
                let flag = match flag {
                    "lr" if value.parse::<f64>().is_ok() => "learning-rate",
                    flag => flag,
                };
                match without_effect(flag, &value, trainer) {
                    Some(reason) => line.notes.push(Note {
                        flag: format!("{spelled} {value}"),
                        reason: reason.into(),
                    }),
                    None if arity == Arity::List => {
                        line.args.push(format!("--{flag}={value}"));
                    }
                    None => push(&mut line, &mut seen, flag, &spelled, value)?,
                }
            }
            Some((flag, Arity::Bool)) => {
                if values.is_empty() {
                    // If the subcommand takes positional words, only `true` or `false` is a value of this flag.
                    let literal = |word: &str| ["true", "false"].contains(&&*word.to_lowercase());
                    let next = rest.next_if(|word| {
                        !word.starts_with('-') && (positionals == 0 || literal(word))
                    });
                    values.extend(next.map(str::to_string));
                }
                let value = values.pop().unwrap_or_else(|| "true".to_string());
                let value = known.typed(flag, value.to_ascii_lowercase());
                push(&mut line, &mut seen, flag, &spelled, value)?;
            }
            // This flag is read from the raw line, so that mistakes on the line are printed in its format, too.
            None if key == format::FLAG => {
                let value = values.pop().or_else(|| rest.next().map(str::to_string));
                if value.as_deref().and_then(ErrorFormat::named).is_none() {
                    return Err(Failure::usage(
                        text!("{spelled} needs a value", "{spelled} 缺少有效的值"),
                        both(
                            "failures are printed for people or for programs",
                            "失败信息可以面向人或面向程序显示",
                        ),
                    )
                    .next(text!(
                        "{spelled} human, or {spelled} json",
                        "{spelled} human，或 {spelled} json"
                    )));
                }
            }
            None if key == lang::FLAG => {
                let value = values.pop().or_else(|| rest.next().map(str::to_string));
                if value.as_deref().and_then(Lang::named).is_none() {
                    return Err(Failure::usage(
                        text!("{spelled} needs a value", "{spelled} 缺少有效的值"),
                        both(
                            "messages are in English or in Chinese",
                            "消息可以用英文或中文显示",
                        ),
                    )
                    .next(text!(
                        "{spelled} en, or {spelled} zh",
                        "{spelled} en，或 {spelled} zh"
                    )));
                }
            }
            None if !takes_recipes => {
                if positionals == 0 {
                    while rest.next_if(|word| !word.starts_with("--")).is_some() {}
                }
                strangers.push((key, spelled));
            }
            None => {
                take_values(&mut rest, &mut values);
                match trainers::meaning(trainer, &key) {
                    Some(meaning) => {
                        recipe_key(&mut line, &mut seen, &known, (meaning, &spelled), &values)?;
                    }
                    None => match foreign(&key, &spelled, &values)? {
                        Some(note) => line.notes.push(note),
                        None => strangers.push((key, spelled)),
                    },
                }
            }
        }
    }
    if !strangers.is_empty() {
        return Err(unknown(&strangers, &known));
    }
    // SwissArmyTransformer's flag for adapters on weights of 4 bits.
    let in_4_bits = line.args.iter().any(|word| word == "--load-in-4bit=true");
    let by_qlora = seen
        .get("load-in-4bit")
        .is_some_and(|spelled| same(spelled, "--use_qlora"));
    if in_4_bits && by_qlora && !seen.contains_key("use-lora") {
        line.args.push("--use-lora=true".to_owned());
    }
    if let Some(trainer) = trainer.filter(|_| !seen.contains_key("defaults")) {
        line.args
            .push(format!("--defaults={}", trainer.flag_value()));
    }
    Ok(line)
}

/// The trainer whose command line this is, by the names of its flags. A file of flags decides where one is named.
fn trainer_of(argv: &[String]) -> Option<Trainer> {
    let flags = argv.iter().filter_map(|word| word.strip_prefix("--"));
    let names = flags.map(|body| body.split('=').next().unwrap_or(body).replace('-', "_"));
    let names: Vec<String> = names.collect();
    let has_file = names.iter().any(|name| name == "config");
    Trainer::of_keys(&names).filter(|_| !has_file)
}

fn take_values<'a>(
    rest: &mut std::iter::Peekable<impl Iterator<Item = &'a str>>,
    values: &mut Vec<String>,
) {
    while let Some(value) = rest.next_if(|word| !word.starts_with("--")) {
        values.push(value.to_string());
    }
}

/// Why a value of one of this program's flags has no effect: names of other trainers' templates and of programs that
/// this program does not report to.
fn without_effect(flag: &str, value: &str, trainer: Option<Trainer>) -> Option<Both> {
    match flag {
        "template" if trainer.is_some() && !is_value("template", value) => Some(both(
            "the chat template of the model directory is used",
            "使用模型目录中的对话模板",
        )),
        "report-to" if split_reports(value).0.is_none() => Some(OTHER_REPORT),
        _ => None,
    }
}

fn is_value(flag: &str, value: &str) -> bool {
    super::train_args(&[format!("--{flag}={value}")]).is_ok()
}

/// Handles a key of another trainer's recipe.
fn recipe_key(
    line: &mut Line,
    seen: &mut BTreeMap<String, String>,
    known: &Known,
    (meaning, spelled): (&Meaning, &str),
    values: &[String],
) -> Result<(), Failure> {
    let text = match values {
        [] => "true".to_owned(),
        values => values.join(","),
    };
    let note = |reason: Text| Note {
        flag: spelled.to_owned(),
        reason,
    };
    match meaning.effect(&text) {
        Effect::Flags(flags) => {
            for (flag, value) in flags {
                push(line, seen, flag, spelled, known.typed(flag, value))?;
            }
        }
        Effect::Here(reason) => line.notes.push(note(text!(
            "{text} is how it is done here: {reason}",
            "{text} 正是这里的做法：{reason}"
        ))),
        Effect::Unused(reason) => line.notes.push(note(reason.into())),
        Effect::Refused(why) => {
            return Err(Failure::usage(
                text!(
                    "{spelled} {text} is not available",
                    "{spelled} {text} 不可用"
                ),
                why,
            )
            .next(text!("omit {spelled}", "请去掉 {spelled}")));
        }
    }
    Ok(())
}

/// The first word of every subcommand.
fn first_words() -> impl Iterator<Item = &'static str> {
    Subcommand::ALL
        .iter()
        .map(|(_, name)| name.split(' ').next().unwrap_or(name))
}

fn subcommand_of<'a>(
    first: &str,
    rest: &'a [String],
) -> Result<(Subcommand, &'a [String]), Failure> {
    let mut actions = Vec::new();
    for (subcommand, name) in Subcommand::ALL {
        match name.split_once(' ') {
            None if name == first => return Ok((subcommand, rest)),
            Some((noun, action)) if noun == first => match rest.split_first() {
                Some((second, rest)) if second == action => return Ok((subcommand, rest)),
                _ => actions.push((subcommand, action)),
            },
            _ => {}
        }
    }
    if let Some((subcommand, _)) = actions.first() {
        let actions: Vec<String> = actions.iter().map(|(_, a)| format!("`{a}`")).collect();
        return Err(Failure::usage(
            text!(
                "`launcher {first}` needs to know what to do",
                "`launcher {first}` 需要知道要做什么"
            ),
            text!(
                "after `{first}` comes {}",
                "`{first}` 之后可以是 {}",
                actions.join(", ")
            ),
        )
        .next(subcommand.help()));
    }
    let nearest = nearest(first, first_words()).unwrap_or("train");
    let next = file_of_flags(first).unwrap_or_else(|| {
        text!(
            "did you mean `launcher {nearest}`?",
            "您是否想用 `launcher {nearest}`？"
        )
    });
    Err(Failure::usage(
        text!("unknown subcommand '{first}'", "未知的子命令 '{first}'"),
        both(
            "the first word names a subcommand; without one the program trains",
            "第一个词是子命令的名称；没有子命令时程序进行训练",
        ),
    )
    .next(next))
}

/// Adds a flag. A repeated flag takes its last value; another spelling of it must agree.
fn push(
    line: &mut Line,
    seen: &mut BTreeMap<String, String>,
    flag: &str,
    spelled: &str,
    value: String,
) -> Result<(), Failure> {
    let start = format!("--{flag}=");
    let known = line.args.iter().position(|word| word.starts_with(&start));
    let word = format!("{start}{value}");
    // `deepspeed` takes a switch and a list together.
    let is_switch = |value: &str| flag == "bind-cores" && ["auto", "true"].contains(&value);
    match (known, seen.get(flag)) {
        (Some(at), _) if is_switch(&value) && !line.args[at].ends_with("=none") => Ok(()),
        (Some(at), _) if is_switch(&line.args[at][start.len()..]) => {
            line.args[at] = word;
            Ok(())
        }
        (Some(at), Some(first)) if same(first, spelled) || line.args[at] == word => {
            line.args[at] = word;
            Ok(())
        }
        (Some(at), Some(first)) => {
            let known = &line.args[at][start.len()..];
            Err(Failure::usage(
                text!(
                    "{first} {known} and {spelled} {value} contradict each other",
                    "{first} {known} 与 {spelled} {value} 互相矛盾"
                ),
                both("both set the same thing", "两者设定的是同一项"),
            )
            .next(both("keep one of them", "请只保留其中一个")))
        }
        _ => {
            line.args.push(word);
            seen.insert(flag.to_string(), spelled.to_string());
            Ok(())
        }
    }
}

/// Whether two words are one flag: kebab-case and snake_case are.
fn same(one: &str, other: &str) -> bool {
    one.replace('-', "_") == other.replace('-', "_")
}

/// Handles a flag of other trainers: a note, or an error if ignoring it would change the result. `None` for an unknown
/// flag.
fn foreign(key: &str, spelled: &str, values: &[String]) -> Result<Option<Note>, Failure> {
    if let Some((_, reason)) = IGNORED.iter().find(|(name, _)| *name == key) {
        return Ok(Some(Note {
            flag: spelled.to_string(),
            reason: (*reason).into(),
        }));
    }
    if let Some(rule) = RESTRICTED.iter().find(|rule| rule.name == key) {
        let value = values.first().map_or("true", String::as_str);
        if rule
            .neutral
            .iter()
            .any(|neutral| trainers::is_word(neutral, value))
        {
            return Ok(Some(Note {
                flag: spelled.to_string(),
                reason: text!("{value} is how it is done here", "{value} 正是这里的做法"),
            }));
        }
        return Err(Failure::usage(
            text!(
                "{spelled} {value} is not available",
                "{spelled} {value} 不可用"
            ),
            rule.reason,
        )
        .next(rule.next));
    }
    Ok(None)
}

/// Meaning of a key in a trainer's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileKey {
    /// This flag, in kebab-case.
    Flag(String),
    /// A flag of other trainers without effect, with the reason.
    Unused(Both),
    /// A flag that is accepted with these values only; the texts are the reason and what to do instead.
    Only(&'static [&'static str], Both, Both),
    /// An unknown key, with the nearest name if there is one.
    Unknown(Option<String>),
}

/// The training flags.
static TRAINING: LazyLock<Known> =
    LazyLock::new(|| Known::new(Subcommand::Train, &Args::command()));

/// The value of a training flag in this program's spelling: a boolean as `true` or `false`.
pub(crate) fn typed_value(flag: &str, value: &str) -> String {
    TRAINING.typed(flag, value.to_owned())
}

/// Meaning of `key` (kebab-case or snake_case) in a file of training flags.
pub(crate) fn file_key(key: &str) -> FileKey {
    let (key, known) = (key.replace('-', "_"), &*TRAINING);
    if let Some((flag, _)) = known.kind(&key) {
        return FileKey::Flag(flag.to_owned());
    }
    if let Some((_, reason)) = IGNORED.iter().find(|(name, _)| *name == key) {
        return FileKey::Unused(*reason);
    }
    match RESTRICTED.iter().find(|rule| rule.name == key) {
        Some(rule) => FileKey::Only(rule.neutral, rule.reason, rule.next),
        None => FileKey::Unknown(nearest(&key, known.spellings()).map(str::to_owned)),
    }
}

/// Failure of all unknown flags of a line, as (key, spelling), each with the nearest flag.
fn unknown(flags: &[(String, String)], known: &Known) -> Failure {
    let spelled: Vec<&str> = flags.iter().map(|(_, spelled)| &**spelled).collect();
    let one = spelled.len() == 1;
    let mut failure = match one {
        true => Failure::usage(
            text!("unknown flag {}", "未知的参数 {}", spelled[0]),
            both("no flag has this name", "没有这个名称的参数"),
        ),
        false => Failure::usage(
            text!("unknown flags {}", "未知的参数 {}", spelled.join(", ")),
            text!(
                "no flags have these {} names",
                "这 {} 个名称都没有对应的参数",
                spelled.len()
            ),
        ),
    };
    let mut without = false;
    for (key, spelled) in flags {
        let Some(name) = nearest(key, known.spellings()) else {
            without = true;
            continue;
        };
        let name = match name.contains('_') && !spelled.contains('_') {
            true => name.replace('_', "-"),
            false => name.to_owned(),
        };
        let place = if one {
            String::new()
        } else {
            format!("{spelled}: ")
        };
        failure = failure.next(text!(
            "{place}did you mean --{name}?",
            "{place}您是否想用 --{name}？"
        ));
    }
    match without {
        true => failure.next(known.subcommand.help()),
        false => failure,
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Arity {
    Value,
    /// One value each time the flag is given.
    List,
    Bool,
}

/// Known flags by snake_case spelling, from the clap definitions.
struct Known {
    subcommand: Subcommand,
    flags: BTreeMap<String, (String, Arity)>,
    /// Flags whose values are `true` and `false`.
    switches: BTreeSet<String>,
}

impl Known {
    fn new(subcommand: Subcommand, command: &clap::Command) -> Self {
        let (mut flags, mut switches) = (BTreeMap::new(), BTreeSet::new());
        for arg in command.get_arguments() {
            let Some(long) = arg.get_long() else { continue };
            let values = arg.get_possible_values();
            if values.iter().any(|value| value.get_name() == "true") {
                switches.insert(long.to_owned());
            }
            let optional = arg
                .get_num_args()
                .is_some_and(|range| range.min_values() == 0);
            let arity = match arg.get_action() {
                ArgAction::Append => Arity::List,
                _ if optional => Arity::Bool,
                _ => Arity::Value,
            };
            flags.insert(long.replace('-', "_"), (long.to_string(), arity));
        }
        for (alias, flag) in ALIASES {
            if let Some(target) = flags.get(&flag.replace('-', "_")).cloned() {
                flags.insert(alias.to_string(), target);
            }
        }
        Self {
            subcommand,
            flags,
            switches,
        }
    }

    fn kind(&self, key: &str) -> Option<(&str, Arity)> {
        self.flags
            .get(key)
            .map(|(flag, arity)| (flag.as_str(), *arity))
    }

    /// The value of a flag in this program's spelling: a boolean as `true` or `false`.
    fn typed(&self, flag: &str, value: String) -> String {
        match trainers::boolean(&value).filter(|_| self.switches.contains(flag)) {
            Some(on) => on.to_string(),
            None => value,
        }
    }

    fn spellings(&self) -> impl Iterator<Item = &str> {
        self.flags.keys().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stray_words_are_files_of_flags_or_further_values() {
        for (line, next) in [
            ("lf.yaml", "--config lf.yaml"),
            ("train lf.yaml", "--config lf.yaml"),
            ("--data a b", "--data a,b"),
            ("--lora_target_modules q v", "--lora-target-modules q,v"),
            ("--zero 3 b", "--help-all"),
        ] {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let failure = super::super::parse(&words).expect_err(line);
            assert!(failure.to_string().contains(next), "{line}: {failure}");
        }
    }

    #[test]
    fn words_far_from_every_subcommand_get_no_suggestion() {
        assert_eq!(nearest("zzzzzz", first_words()), None);
        assert_eq!(nearest("plam", first_words()), Some("plan"));
    }
}
