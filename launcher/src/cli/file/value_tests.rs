//! Values of keys of published trainers: each is honored as that trainer means it, or named with the reason.

use super::tests::{read_with_notes, write_file};
use super::*;
use crate::cli::{Args, Command, parse};

/// What becomes of a key with a value.
#[derive(Clone, Copy)]
enum Becomes {
    /// These flags of this program.
    Flags(&'static str),
    /// No flag: this program always does what the value asks for.
    Here,
    /// No flag and no effect; the run says so.
    Named,
    /// It is refused with these words.
    Refused(&'static str),
}

impl Becomes {
    fn read(text: &'static str) -> Self {
        match text.split_once(": ") {
            Some(("refused", why)) => Refused(why),
            _ if text == "here" => Here,
            _ if text == "named" => Named,
            _ => Flags(text),
        }
    }
}

use Becomes::{Flags, Here, Named, Refused};

/// Rows: trainer, keys, values, and what becomes of each of them.
const ROWS: &str = include_str!("values.txt");

/// Keys that make a line or file one of the trainer's.
fn own(trainer: &str) -> &'static [(&'static str, &'static str)] {
    match trainer {
        "llama-factory" => &[("cutoff_len", "64")],
        "ms-swift" => &[("target_modules", "q_proj")],
        "sat" => &[("experiment_name", "x")],
        "peft" => &[("max_input_length", "64")],
        "cogvlm2" => &[("max_input_len", "64")],
        _ => &[("model_name_or_path", "m")],
    }
}

/// Arguments of a line, the notes on it, and what its files name as without effect.
fn outcome(line: &str) -> Result<(Args, usize), String> {
    let argv: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    match parse(&argv) {
        Ok(Command::Train { typed, .. }) => {
            load(&typed).map_err(|failure| failure.to_string())?;
        }
        Ok(_) => panic!("{line}"),
        Err(failure) => return Err(failure.to_string()),
    }
    let (mut args, loaded, notes) = read_with_notes(line);
    args.config = None;
    Ok((args, loaded.notes.len() + notes.len()))
}

#[test]
fn values_of_published_keys_are_honored_or_named() {
    let mut wrong = Vec::new();
    let mut count = 0;
    let rows = ROWS
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty());
    for row in rows {
        let fields: Vec<&str> = row.split(" ; ").collect();
        let [trainer, keys, values, becomes] = fields[..] else {
            panic!("{row}");
        };
        let becomes = Becomes::read(becomes);
        for key in keys.split('|') {
            let others = own(trainer).iter().filter(|(name, _)| *name != key);
            let others: Vec<_> = others.collect();
            let flags: Vec<String> = others.iter().map(|(k, v)| format!("--{k} {v}")).collect();
            let base = format!("--defaults ours {}", flags.join(" "));
            let lines: String = others.iter().map(|(k, v)| format!("{k}: {v}\n")).collect();
            // peft has no line, and its settings are a section of GLM-4's files.
            let section = if trainer == "peft" {
                "peft_config:\n  "
            } else {
                ""
            };
            for value in values.split('|') {
                count += 1;
                let (_directory, path) = write_file(&format!("{lines}{section}{key}: {value}\n"));
                let in_file = format!("--defaults ours --config {}", path.display());
                let (_directory, path) = write_file(&lines);
                let bare = format!("--defaults ours --config {}", path.display());
                let word = value.trim_matches('"');
                let on_line = match word {
                    "" => format!("{base} --{key}="),
                    word => format!("{base} --{key} {word}"),
                };
                for (got, plain) in [(on_line, base.clone()), (in_file, bare)] {
                    if !section.is_empty() && !got.contains("--config") {
                        continue;
                    }
                    let is_file = got.contains("--config");
                    let found = outcome(&got);
                    let without = |more: &str| outcome(&format!("{plain} {more}"));
                    let is_right = match (&becomes, &found) {
                        (Flags(flags), Ok((args, _))) => {
                            without(flags).is_ok_and(|(expected, _)| expected == *args)
                        }
                        (Here | Named, Ok((args, notes))) => {
                            without("").is_ok_and(|(expected, before)| {
                                let named = matches!(becomes, Named) || !is_file;
                                let is_null = value == "null" && is_file;
                                expected == *args && (*notes > before || !named || is_null)
                            })
                        }
                        (Refused(why), Err(failure)) => {
                            failure.contains(why)
                                && failure.replace('-', "_").contains(key)
                                && failure.contains("\n  next ")
                        }
                        _ => false,
                    };
                    if !is_right {
                        let said = found.map(|(_, notes)| format!("{notes} notes"));
                        wrong.push(format!("{trainer} {key}={value} file {is_file}: {said:?}"));
                    }
                }
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {count}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(count > 300, "{count}");
}

#[test]
fn lists_and_sections_of_a_file_are_honored_or_named() {
    let of = |text: &str| {
        let (_directory, path) = write_file(&format!("model_name_or_path: m\n{text}\n"));
        outcome(&format!("--defaults ours --config {}", path.display()))
    };
    let (plain, none) = of("").expect("reads");
    for (text, flags, notes) in [
        (
            "report_to: [wandb, tensorboard]",
            "--report-to tensorboard",
            1,
        ),
        ("report_to: [wandb, mlflow]", "", 1),
        ("report_to: [tensorboard]", "--report-to tensorboard", 0),
        (
            "lora_target_modules: [q_proj, v_proj]",
            "--lora-target-modules q_proj,v_proj",
            0,
        ),
        (
            "modules_to_save: [embed_tokens]",
            "--modules-to-save embed_tokens",
            0,
        ),
        ("fsdp: []", "", 0),
        ("fsdp_config: {}", "", 0),
        ("accelerator_config: null", "", 0),
        (
            "gradient_checkpointing_kwargs: {use_reentrant: false}",
            "",
            1,
        ),
        ("lr_scheduler_kwargs: {}", "--lr-scheduler-kwargs=", 0),
        (
            "lr_scheduler_kwargs: {warmup_type: linear, cos_min_ratio: 0.1}",
            "--lr-scheduler-kwargs warmup_type=linear,cos_min_ratio=0.1",
            0,
        ),
        ("max_steps: \"3e2\"", "--max-steps 300", 0),
        ("max_steps: 3_000", "--max-steps 3000", 0),
    ] {
        let (args, named) = of(text).expect(text);
        let (expected, _) = outcome(&format!("--model m --defaults ours {flags}")).expect(flags);
        assert_eq!((args, named), (expected, none + notes), "{text}");
    }
    assert_eq!(plain.model, Some("m".into()));
    for (text, why) in [
        ("accelerator_config: {split_batches: true}", "ZeRO stage"),
        ("fsdp_config: {min_num_params: 1}", "ZeRO stage"),
        (
            "lr_scheduler_kwargs: {num_stable_steps: 2}",
            "'num_stable_steps' is not one of",
        ),
        ("lr_scheduler_type: greedy", "linear, cosine"),
        ("learning_rate: {vision: 1e-5}", "one value"),
    ] {
        let failure = of(text).expect_err(text);
        assert!(failure.contains(why), "{text}: {failure}");
    }
    // On the line a list follows the flag.
    let line = "--model_name_or_path m --defaults ours --report_to";
    let (args, notes) = outcome(&format!("{line} wandb tensorboard")).expect("reads");
    assert_eq!(args.report_to, Some(crate::config::ReportTo::Tensorboard));
    assert_eq!(
        notes,
        outcome(&format!("{line} tensorboard")).expect("reads").1 + 1
    );
    // A preset gives several flags; those of the line override them one by one.
    let (_directory, path) = write_file("target_modules: q_proj\ndeepspeed: zero3_offload\n");
    let line = format!("--defaults ours --config {}", path.display());
    let (args, _) = outcome(&format!("{line} --offload none")).expect("reads");
    assert_eq!(args.zero, Some(crate::config::ZeroChoice::Stage(3)));
    assert_eq!(args.offload, Some(crate::config::Offload::default()));
    let env = crate::rank_env::Env::from_lookup(&|_| None).expect("an environment");
    let given = ["--model=m", "--zero=1"].map(str::to_owned);
    let (page, _) = explain::page(&path, &given, &env).expect("is read");
    assert!(page.contains("zero3_offload  --offload cpu"), "{page}");
    let swift = "--target_modules q_proj --defaults ours --deepspeed zero2_offload";
    let failure = outcome(&format!("{swift} --zero 1")).expect_err("contradicts");
    assert!(failure.contains("--zero 1"), "{failure}");
}
