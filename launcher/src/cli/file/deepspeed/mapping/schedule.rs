//! Mapping of the optimizer and the learning-rate schedule.

use super::Mapper;
use crate::cli::file::report::{Outcome, Problem};
use crate::cli::file::value::Value;
use crate::config::SchedulerKwargs;
use crate::lang::{both, text};

const LR: &str = "optimizer.params.lr";
const BETAS: &str = "optimizer.params.betas";
const TYPE: &str = "scheduler.type";
const MIN_LR: &str = "scheduler.params.warmup_min_lr";
const MAX_LR: &str = "scheduler.params.warmup_max_lr";
const WARMUP: &str = "scheduler.params.warmup_num_steps";
const TOTAL: &str = "scheduler.params.total_num_steps";
const SHAPE: &str = "scheduler.params.warmup_type";
const MIN_RATIO: &str = "scheduler.params.warmup_min_ratio";
const END_RATIO: &str = "scheduler.params.cos_min_ratio";

/// Schedules of DeepSpeed: name, value of the flag here, and the arguments it takes.
const SCHEDULES: [(&str, &str, &[&str]); 3] = [
    ("warmuplr", "warmup_lr", &[MIN_LR, MAX_LR, WARMUP, SHAPE]),
    (
        "warmupdecaylr",
        "warmup_decay_lr",
        &[MIN_LR, MAX_LR, WARMUP, SHAPE, TOTAL],
    ),
    (
        "warmupcosinelr",
        "warmup_cosine_lr",
        &[MIN_RATIO, WARMUP, END_RATIO, SHAPE, TOTAL],
    ),
];

/// Arguments that become `--lr-scheduler-kwargs`.
const KWARGS: [(&str, &str); 5] = [
    (SHAPE, "warmup_type"),
    (MIN_LR, "warmup_min_lr"),
    (MIN_RATIO, "warmup_min_ratio"),
    (END_RATIO, "cos_min_ratio"),
    (TOTAL, "total_num_steps"),
];

impl Mapper<'_> {
    pub(super) fn optimizer(&mut self) {
        if self.raw("optimizer").and_then(Value::entries).is_none() {
            return;
        }
        if self.raw("optimizer.type").is_none() {
            self.without_type("optimizer.");
            return;
        }
        self.take_or(LR, "learning-rate", "0.001");
        self.take_or("optimizer.params.eps", "adam-epsilon", "1e-8");
        self.take_or("optimizer.params.weight_decay", "weight-decay", "0");
        let mut betas = ["0.9".to_owned(), "0.999".to_owned()];
        match self.value(BETAS) {
            Some(Value::List(items)) => {
                for (beta, item) in betas.iter_mut().zip(items) {
                    *beta = item.to_string();
                }
                self.written("adam-beta1", &betas[0], BETAS);
                self.written("adam-beta2", &betas[1], BETAS);
            }
            _ if self.is_auto(BETAS) => {}
            _ => {
                self.implied("adam-beta1", &betas[0]);
                self.implied("adam-beta2", &betas[1]);
            }
        }
    }

    pub(super) fn scheduler(&mut self) {
        if self.raw("scheduler").and_then(Value::entries).is_none() {
            return;
        }
        let Some(name) = self.value(TYPE).and_then(Value::as_text) else {
            self.without_type("scheduler.");
            return;
        };
        let lower = name.to_ascii_lowercase();
        let Some((_, word, arguments)) = SCHEDULES.into_iter().find(|s| s.0 == lower) else {
            return;
        };
        self.refuse_other_arguments(name, arguments);
        self.choose("lr-scheduler-type", word, &[TYPE]);
        // If both are given, DeepSpeed silently uses the file.
        let typed = self.given.get("lr-scheduler-type");
        if let Some(typed) = typed.filter(|typed| typed.value.replace('-', "_") != word) {
            let line = self.line(TYPE);
            self.report.warnings.push(Problem {
                line,
                what: text!("{typed} has no effect", "{typed} 不起作用"),
                why: text!(
                    "the scheduler {name} of {} sets it",
                    "{} 的调度 {name} 已经设定了它",
                    self.name
                ),
                next: Some(
                    both(
                        "remove the section \"scheduler\" to use the flag",
                        "请删除 \"scheduler\" 一节以使用该参数",
                    )
                    .into(),
                ),
            });
        }
        if arguments.contains(&MAX_LR) {
            self.peak(word);
        }
        if self.is_auto(MIN_LR) {
            self.set(MIN_LR, Outcome::Default("0"));
        }
        self.warmup();
        self.total(arguments.contains(&TOTAL), name);
        let mut kwargs = Vec::new();
        let mut keys = Vec::new();
        for (path, key) in KWARGS {
            if let Some(value) = self.value(path).filter(|_| arguments.contains(&path)) {
                let whole = value.as_u64().map(|whole| whole.to_string());
                let value = whole.unwrap_or_else(|| value.to_string().to_ascii_lowercase());
                kwargs.push(format!("{key}={value}"));
                keys.push(path);
            }
        }
        if let Some(first) = keys.first() {
            let kwargs = kwargs.join(",");
            if let Some(word) = self.given.get("lr-scheduler-kwargs")
                && word.value.parse::<SchedulerKwargs>() != kwargs.parse()
            {
                self.contradict(first, word);
            }
            self.choose("lr-scheduler-kwargs", &kwargs, &keys);
        }
    }

    fn refuse_other_arguments(&mut self, name: &str, arguments: &[&str]) {
        for path in [MIN_LR, MAX_LR, WARMUP, TOTAL, SHAPE, MIN_RATIO, END_RATIO] {
            if self.raw(path).is_some() && !arguments.contains(&path) {
                let what = text!(
                    "{name} has no argument {}",
                    "{name} 没有参数 {}",
                    path.rsplit('.').next().unwrap_or(path)
                );
                self.error(
                    path,
                    what,
                    both(
                        "each schedule has its own arguments",
                        "每种调度有自己的参数",
                    ),
                    both("remove it", "请删除它"),
                );
            }
        }
    }

    /// Maps the peak learning rate: the scheduler's, not the optimizer's.
    fn peak(&mut self, word: &str) {
        let takes = self.value(MAX_LR).is_some();
        if !takes && (self.raw(MAX_LR).is_some() || word == "warmup_lr") {
            return;
        }
        let own = self.value(LR).and_then(Value::as_f64);
        let peak = self.value(MAX_LR).and_then(Value::as_f64).unwrap_or(0.001);
        self.report
            .choices
            .retain(|choice| choice.flag != "learning-rate");
        self.report
            .contradictions
            .retain(|text| !text.starts_with(LR));
        if own.is_some() {
            self.set(
                LR,
                match own == Some(peak) {
                    true => Outcome::Here(both(
                        "the scheduler's warmup_max_lr has the same value",
                        "调度的 warmup_max_lr 与它的值相同",
                    )),
                    false => Outcome::Unused(both(
                        "the scheduler's warmup_max_lr is the peak",
                        "峰值由调度的 warmup_max_lr 决定",
                    )),
                },
            );
        }
        if !self.take(MAX_LR, "learning-rate") {
            self.implied("learning-rate", "0.001");
        }
    }

    fn warmup(&mut self) {
        let Some(steps) = self.value(WARMUP).and_then(Value::as_u64) else {
            if !self.is_auto(WARMUP) {
                self.implied("warmup-steps", "1000");
            }
            return;
        };
        let ratio: Option<f64> = self.given.parsed("warmup-ratio");
        let updates: Option<f64> = self.given.parsed("max-steps");
        let agrees = match (ratio, updates) {
            (Some(ratio), Some(updates)) => (ratio * updates).ceil() == steps as f64,
            (ratio, _) => ratio.is_none(),
        };
        if let Some(word) = self.given.get("warmup-ratio")
            && self.given.get("warmup-steps").is_none()
            && !agrees
        {
            self.contradict(WARMUP, word);
        }
        self.written("warmup-steps", &steps.to_string(), WARMUP);
    }

    /// Maps the length of the schedule, if it has one.
    fn total(&mut self, has_length: bool, name: &str) {
        if !has_length {
            return;
        }
        if self.raw(TOTAL).is_none() {
            let what = text!(
                "{name} needs total_num_steps",
                "{name} 需要 total_num_steps"
            );
            self.error(
                TYPE,
                what,
                both(
                    "the schedule decays until that step",
                    "调度在该步之前一直衰减",
                ),
                both(
                    "\"total_num_steps\": \"auto\" takes the length of the run",
                    "\"total_num_steps\": \"auto\" 表示采用运行的长度",
                ),
            );
            return;
        }
        let Some(total) = self.value(TOTAL).and_then(Value::as_f64) else {
            return;
        };
        if let Some(word) = self.given.get("max-steps")
            && word
                .value
                .parse::<f64>()
                .is_ok_and(|steps| steps > 0.0 && steps != total)
        {
            self.contradict(TOTAL, word);
        }
    }

    /// Marks the keys of a section without `type` as unused, since DeepSpeed ignores such a section.
    fn without_type(&mut self, section: &str) {
        let rows = self.report.rows.iter_mut();
        for row in rows.filter(|row| row.path.starts_with(section)) {
            if matches!(row.outcome, Outcome::Flag(_) | Outcome::Auto(_)) {
                row.outcome =
                    Outcome::Unused(both("the section names no type", "该节没有给出 type"));
            }
        }
    }
}
