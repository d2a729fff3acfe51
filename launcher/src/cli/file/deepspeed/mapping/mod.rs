//! Mapping of DeepSpeed keys to flags.

use crate::cli::file::given::{Given, Word};
use crate::cli::file::report::{Choice, Outcome, Problem, Report};
use crate::cli::file::value::Value;
use crate::config::{Tier, ZeroChoice};
use crate::lang::{Both, Text, both, text};
use std::path::{Path, PathBuf};

mod numbers;
mod schedule;

/// Adds to `report` the flags that the keys give together, in view of the flags that are already `given`.
pub(super) fn map(file: &Value, name: &Path, given: &Given, report: &mut Report) {
    let name = name.display().to_string();
    let mut mapper = Mapper {
        file,
        name,
        given,
        report,
    };
    let stage = mapper.stage();
    mapper.offload(stage);
    mapper.precision();
    mapper.batch();
    mapper.take_or("gradient_clipping", "max-grad-norm", "0");
    mapper.optimizer();
    mapper.scheduler();
    mapper.others();
}

/// State of the mapping: the file, the given flags, and the report.
struct Mapper<'a> {
    file: &'a Value,
    name: String,
    given: &'a Given,
    report: &'a mut Report,
}

/// Value of a switch in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Switch {
    On,
    Off,
    Auto,
    Absent,
}

impl<'a> Mapper<'a> {
    /// The value at `path`, even if it is `auto` or `null`.
    fn raw(&self, path: &str) -> Option<&'a Value> {
        path.split('.')
            .try_fold(self.file, |value, key| value.get(key))
    }

    /// The value at `path`, unless it is `auto` or `null`.
    fn value(&self, path: &str) -> Option<&'a Value> {
        self.raw(path)
            .filter(|value| **value != Value::Null && !value.is_auto())
    }

    fn is_auto(&self, path: &str) -> bool {
        self.raw(path).is_some_and(Value::is_auto)
    }

    fn switch(&self, path: &str) -> Switch {
        match self.value(path).and_then(Value::as_bool) {
            Some(true) => Switch::On,
            Some(false) => Switch::Off,
            None if self.is_auto(path) => Switch::Auto,
            None => Switch::Absent,
        }
    }

    fn line(&self, path: &str) -> usize {
        let row = self.report.rows.iter().find(|row| row.path == path);
        row.map_or(1, |row| row.line)
    }

    fn set(&mut self, path: &str, outcome: Outcome) {
        if let Some(row) = self.report.rows.iter_mut().find(|row| row.path == path)
            && !matches!(row.outcome, Outcome::Refused(_))
        {
            row.outcome = outcome;
        }
    }

    fn error(&mut self, path: &str, what: Text, why: Both, next: impl Into<Text>) {
        let next = next.into();
        let line = self.line(path);
        self.set(path, Outcome::Refused(why.into()));
        self.report.errors.push(Problem {
            line,
            what,
            why: why.into(),
            next: (!next.is_empty()).then_some(next),
        });
    }

    /// Reports a key without effect as a warning.
    fn warn(&mut self, path: &str, why: &Text, next: Text) {
        let line = self.line(path);
        self.set(path, Outcome::Warning(why.clone()));
        self.report.warnings.push(Problem {
            line,
            what: text!("{path} has no effect", "{path} 不起作用"),
            why: why.clone(),
            next: Some(next),
        });
    }

    /// Chooses a flag that follows from DeepSpeed's default, not from a key.
    fn implied(&mut self, flag: &'static str, value: &str) {
        self.choose(flag, value, &[]);
    }

    fn choose(&mut self, flag: &'static str, value: &str, keys: &[&'static str]) {
        self.report.choices.push(Choice {
            flag: flag.to_owned(),
            value: value.to_owned(),
            keys: keys.iter().map(|key| (*key).to_owned()).collect(),
        });
    }

    /// Chooses a flag that a key gives. A different flag on the command line is a contradiction.
    fn written(&mut self, flag: &'static str, value: &str, key: &'static str) {
        let other = self.given.get(flag);
        if let Some(word) = other.filter(|word| !same(&word.value, value)) {
            self.contradict(key, word);
        }
        self.choose(flag, value, &[key]);
    }

    fn contradict(&mut self, path: &str, word: &Word) {
        let (name, line) = (&self.name, self.line(path));
        let value = self.raw(path).map(ToString::to_string).unwrap_or_default();
        let sentence = text!(
            "{path} {value} ({name} line {line}), but {word}",
            "{path} {value}（{name} 第 {line} 行），而命令行为 {word}"
        );
        self.set(
            path,
            Outcome::Refused(text!("contradicts {word}", "与 {word} 矛盾")),
        );
        self.report.contradictions.push(sentence);
    }

    /// Maps a key to a flag with the same value. Returns whether the file has the key.
    fn take(&mut self, path: &'static str, flag: &'static str) -> bool {
        match self.value(path) {
            Some(value) => {
                let text = match (value.as_u64(), value) {
                    (Some(whole), _) => whole.to_string(),
                    (None, value) => value.to_string(),
                };
                self.written(flag, &text, path);
                true
            }
            None => false,
        }
    }

    /// As [`Mapper::take`]; an absent key, unlike `auto`, means `default`.
    fn take_or(&mut self, path: &'static str, flag: &'static str, default: &str) {
        if !self.take(path, flag) && !self.is_auto(path) {
            self.implied(flag, default);
        }
    }

    fn stage(&mut self) -> u64 {
        let path = "zero_optimization.stage";
        if let Some(switch) = self.value("zero_optimization").and_then(Value::as_bool) {
            let stage = u64::from(switch);
            self.written("zero", &stage.to_string(), "zero_optimization");
            return stage;
        }
        match self.value(path).and_then(Value::as_u64) {
            Some(stage @ 0..=3) => {
                self.written("zero", &stage.to_string(), path);
                stage
            }
            Some(stage) => {
                let what = text!("{path} cannot be {stage}", "{path} 不能是 {stage}");
                self.error(
                    path,
                    what,
                    both("stages are 0, 1, 2 and 3", "阶段为 0、1、2 和 3"),
                    Text::default(),
                );
                0
            }
            None => {
                let default = match self.is_auto(path) {
                    true => ZeroChoice::Auto,
                    false => ZeroChoice::Stage(0),
                };
                self.implied("zero", &default.to_string());
                match self.given.parsed("zero").unwrap_or(default) {
                    ZeroChoice::Auto => 3,
                    ZeroChoice::Stage(stage) => u64::from(stage),
                }
            }
        }
    }

    /// Maps offloading in ZeRO `stage` to tiers.
    fn offload(&mut self, stage: u64) {
        let optimizer = self.tier(&OPTIMIZER, stage);
        let param = self.tier(&PARAM, stage);
        let checkpointing = "activation_checkpointing.cpu_checkpointing";
        let activation = match self.switch(checkpointing) {
            Switch::On => Some((Tier::Cpu, checkpointing)),
            Switch::Off => {
                self.set(
                    checkpointing,
                    Outcome::Here(both("nothing is offloaded", "没有卸载任何内容")),
                );
                None
            }
            _ => None,
        };
        let given = self.given.offload();
        let mut offload = given.clone().unwrap_or_default();
        let mut keys = Vec::new();
        let word = self.given.get("offload").cloned();
        for (kind, told) in [optimizer, param, activation].into_iter().enumerate() {
            let Some((tier, key)) = told else { continue };
            let own = match kind {
                0 => &mut offload.optimizer,
                1 => &mut offload.param,
                _ => &mut offload.activation,
            };
            match (&given, &word) {
                (Some(_), Some(word)) if *own != tier => self.contradict(key, word),
                _ => *own = tier,
            }
            keys.push(key);
        }
        if !keys.is_empty() {
            self.choose("offload", &offload.to_string(), &keys);
        }
    }

    /// The tier that a section asks for, and the key that says so.
    fn tier(&mut self, part: &Offloaded, stage: u64) -> Option<(Tier, &'static str)> {
        let device = self.value(part.device).and_then(Value::as_text);
        let device = device.map(str::to_ascii_lowercase);
        if let Some(old) = self.value(part.old).and_then(Value::as_bool) {
            // Both keys together were already refused.
            if self.raw(part.section).is_some() {
                return None;
            }
            self.set(
                part.old,
                Outcome::Here(both("nothing is offloaded", "没有卸载任何内容")),
            );
            return match old {
                true => self.in_stage(part, part.old, Tier::Cpu, stage),
                false => None,
            };
        }
        let path = self.value(part.path).and_then(Value::as_text);
        let tier = match device.as_deref() {
            Some("cpu") => Tier::Cpu,
            Some("nvme") => match path {
                Some(path) => Tier::Nvme(PathBuf::from(path)),
                None => {
                    let what = text!(
                        "{} nvme needs {}",
                        "{} nvme 需要 {}",
                        part.device,
                        part.path
                    );
                    self.error(
                        part.device,
                        what,
                        both(
                            "it is the directory of the spill files",
                            "它是溢出文件的目录",
                        ),
                        Text::default(),
                    );
                    return None;
                }
            },
            Some("none") => Tier::None,
            _ => return None,
        };
        if path.is_some() {
            let outcome = match tier {
                Tier::Nvme(_) => {
                    Outcome::Here(both("it is part of --offload", "它已包含在 --offload 中"))
                }
                _ => Outcome::Unused(both("the device is not nvme", "设备不是 nvme")),
            };
            self.set(part.path, outcome);
        }
        match tier {
            Tier::None => Some((Tier::None, part.device)),
            tier => self.in_stage(part, part.device, tier, stage),
        }
    }

    /// Warns of offloading in a stage in which DeepSpeed ignores it.
    fn in_stage(
        &mut self,
        part: &Offloaded,
        key: &'static str,
        tier: Tier,
        stage: u64,
    ) -> Option<(Tier, &'static str)> {
        if stage >= part.from_stage {
            self.set(key, Outcome::Flag("offload".to_owned()));
            return Some((tier, key));
        }
        let why = text!(
            "DeepSpeed reads it only from stage {} on",
            "DeepSpeed 只从阶段 {} 起读取它",
            part.from_stage
        );
        let next = text!(
            "--offload {}={tier} works in every stage",
            "--offload {}={tier} 在每个阶段都有效",
            part.kind
        );
        self.warn(key, &why, next);
        None
    }

    fn batch(&mut self) {
        const TRAIN: &str = "train_batch_size";
        const MICRO: &str = "train_micro_batch_size_per_gpu";
        const STEPS: &str = "gradient_accumulation_steps";
        let train = self.take(TRAIN, "global-batch-size");
        let micro = self.take(MICRO, "per-device-train-batch-size");
        let steps = self.take(STEPS, "gradient-accumulation-steps");
        let given = |flag: &str| self.given.set_by(flag).is_some();
        let micro_given = given("per-device-train-batch-size");
        let absent = |path: &str| self.raw(path).is_none();
        if steps && absent(TRAIN) && absent(MICRO) && !micro_given && !given("global-batch-size") {
            let what = text!(
                "{STEPS} alone does not determine the batch",
                "仅有 {STEPS} 无法确定批大小"
            );
            self.error(
                STEPS,
                what,
                both(
                    "two of the three sizes determine the third",
                    "三个大小中给出两个，才能确定第三个",
                ),
                text!("add \"{MICRO}\"", "请加上 \"{MICRO}\""),
            );
        } else if train && !micro && absent(MICRO) && absent(STEPS) && !micro_given {
            self.implied("gradient-accumulation-steps", "1");
        }
    }

    fn others(&mut self) {
        let sums = "data_types.grad_accum_dtype";
        if let Some(word) = self.value(sums).and_then(Value::as_text) {
            let dtype = word.to_ascii_lowercase().replace("fp", "f");
            self.written("grad-dtype", &dtype, sums);
        }
        let group = "zero_optimization.mics_shard_size";
        match self.value(group) {
            None => {}
            Some(value) if value.to_string() == "-1" => {
                self.set(
                    group,
                    Outcome::Here(both(
                        "all ranks form one shard group",
                        "所有 rank 组成一个分片组",
                    )),
                );
            }
            Some(value) if value.as_u64().is_some() => {
                self.take(group, "shard-group");
            }
            Some(value) => {
                let what = text!("{group} cannot be {value}", "{group} 不能是 {value}");
                self.error(
                    group,
                    what,
                    both(
                        "it must be a number of ranks, or -1 for all",
                        "它必须是 rank 数，或用 -1 表示全部",
                    ),
                    Text::default(),
                );
            }
        }
        let board = "tensorboard.enabled";
        match self.switch(board) {
            Switch::On => self.choose("report-to", "tensorboard", &[board]),
            Switch::Off => self.set(board, Outcome::Here(both("it is off", "它是关闭的"))),
            _ => {}
        }
        for old in [
            "zero_optimization.cpu_offload_use_pin_memory",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        ] {
            if self.value(old).is_some() {
                self.set(
                    old,
                    Outcome::Unused(both(
                        "its new name has no effect either",
                        "它的新名称也不起作用",
                    )),
                );
            }
        }
    }
}

/// A kind of state that DeepSpeed can offload.
struct Offloaded {
    kind: &'static str,
    section: &'static str,
    device: &'static str,
    path: &'static str,
    old: &'static str,
    from_stage: u64,
}

const OPTIMIZER: Offloaded = Offloaded {
    kind: "optimizer",
    section: "zero_optimization.offload_optimizer",
    device: "zero_optimization.offload_optimizer.device",
    path: "zero_optimization.offload_optimizer.nvme_path",
    old: "zero_optimization.cpu_offload",
    from_stage: 1,
};

const PARAM: Offloaded = Offloaded {
    kind: "param",
    section: "zero_optimization.offload_param",
    device: "zero_optimization.offload_param.device",
    path: "zero_optimization.offload_param.nvme_path",
    old: "zero_optimization.cpu_offload_param",
    from_stage: 3,
};

/// Whether two spellings have the same value.
fn same(one: &str, other: &str) -> bool {
    match (one.parse::<f64>(), other.parse::<f64>()) {
        (Ok(one), Ok(other)) => one == other,
        _ => one
            .replace("fp", "f")
            .eq_ignore_ascii_case(&other.replace("fp", "f")),
    }
}
