//! Mapping of number formats and the loss scale.

use super::{Mapper, Switch};
use crate::cli::file::report::Outcome;
use crate::config::PrecisionChoice as Precision;
use crate::config::words::value_name;
use crate::lang::{both, text};

const FP16: &str = "fp16.enabled";
const BF16: &str = "bf16.enabled";
const PURE: &str = "bf16.bf16_master_weights_and_grads";
const STATES: &str = "bf16.bf16_optimizer_states";

/// Keys of the loss scale, with their flags.
const SCALE: [(&str, &str); 5] = [
    ("fp16.loss_scale", "loss-scale"),
    ("fp16.initial_scale_power", "initial-scale-power"),
    ("fp16.loss_scale_window", "loss-scale-window"),
    ("fp16.hysteresis", "hysteresis"),
    ("fp16.min_loss_scale", "min-loss-scale"),
];

impl Mapper<'_> {
    pub(super) fn precision(&mut self) {
        let (fp16, bf16) = (self.switch(FP16), self.switch(BF16));
        if (fp16, bf16) == (Switch::On, Switch::On) {
            let what = both("fp16 and bf16 are both enabled", "fp16 和 bf16 同时启用").into();
            self.error(
                FP16,
                what,
                both("a run has one number format", "一次运行只有一种数值格式"),
                both("switch one of them off", "请关闭其中一个"),
            );
            return;
        }
        let given = self.given.precision().map(|(p, word)| (p, word.clone()));
        let asked = given.as_ref().map(|(precision, _)| *precision);
        let is_bf16 = matches!(asked, Some(Precision::Bf16 | Precision::PureBf16));
        let is_fp16 = asked == Some(Precision::Fp16);
        for (path, switch, is_it) in [(BF16, bf16, is_bf16), (FP16, fp16, is_fp16)] {
            let disagree = (switch == Switch::On && !is_it) || (switch == Switch::Off && is_it);
            if let Some((_, word)) = given.as_ref().filter(|_| disagree) {
                self.contradict(path, word);
            }
        }
        match (fp16, bf16) {
            (Switch::On, _) => {
                self.choose("precision", "fp16", &[FP16]);
                self.set(
                    BF16,
                    Outcome::Here(both("the number format is fp16", "数值格式是 fp16")),
                );
            }
            (_, Switch::On) => {
                let precision = self.kind_of_bf16(asked);
                self.choose("precision", &value_name(precision), &[BF16]);
                self.set(
                    FP16,
                    Outcome::Here(both("the number format is bf16", "数值格式是 bf16")),
                );
            }
            // `auto` without fp16 can still mean bf16.
            (_, Switch::Auto) | (Switch::Auto, Switch::Absent) => {
                if bf16 == Switch::Auto {
                    self.auto_bf16(asked);
                }
                if fp16 == Switch::Off {
                    self.set(FP16, Outcome::Here(both("it is off", "它是关闭的")));
                }
            }
            (_, Switch::Off | Switch::Absent) => {
                self.implied("precision", "f32");
                for (path, switch) in [(FP16, fp16), (BF16, bf16)] {
                    if switch == Switch::Off {
                        self.set(path, Outcome::Here(both("it is off", "它是关闭的")));
                    }
                }
            }
        }
        let is_auto = bf16 == Switch::Auto && fp16 != Switch::On;
        if bf16 != Switch::On && !(is_auto && (is_bf16 || asked.is_none())) {
            for path in [PURE, STATES] {
                self.set(
                    path,
                    Outcome::Unused(both("bf16 is not enabled", "没有启用 bf16")),
                );
            }
        }
        self.loss_scale(fp16 == Switch::On || is_fp16);
    }

    /// Pure bf16 where `auto` means bf16: a flag says so. Without a flag of a number format nothing does.
    fn auto_bf16(&mut self, asked: Option<Precision>) {
        let keys = [PURE, STATES].map(|path| (path, self.switch(path)));
        let on = keys.iter().find(|(_, switch)| *switch == Switch::On);
        match (asked, on) {
            (Some(Precision::Bf16 | Precision::PureBf16), _) | (None, None) => {
                let kind = self.kind_of_bf16(asked);
                if on.is_some() && kind == Precision::PureBf16 {
                    self.choose("precision", "pure-bf16", &[PURE]);
                }
            }
            (None, Some((path, _))) => {
                let what = text!("{path} needs a number format", "{path} 需要数值格式");
                self.error(
                    path,
                    what,
                    both(
                        "bf16.enabled is auto, and no flag names the number format",
                        "bf16.enabled 是 auto，而没有参数指定数值格式",
                    ),
                    both("add --bf16 true", "请加上 --bf16 true"),
                );
            }
            _ => {}
        }
    }

    /// Mixed bf16, or pure bf16 if the file or the command line says so.
    fn kind_of_bf16(&mut self, asked: Option<Precision>) -> Precision {
        let (pure, states) = (self.switch(PURE), self.switch(STATES));
        match (pure, states) {
            (Switch::On, _) => {
                let given = self.given.get("precision").cloned();
                if let Some(word) = given.filter(|_| asked == Some(Precision::Bf16)) {
                    self.contradict(PURE, &word);
                }
                let moments = if states == Switch::On { "bf16" } else { "f32" };
                let key = if states == Switch::Absent {
                    PURE
                } else {
                    STATES
                };
                self.written("pure-bf16-moments", moments, key);
                self.set(
                    PURE,
                    Outcome::Here(both(
                        "it is --precision pure-bf16",
                        "它就是 --precision pure-bf16",
                    )),
                );
                Precision::PureBf16
            }
            (_, Switch::On) => {
                let what = text!("{STATES} needs {PURE}", "{STATES} 需要 {PURE}");
                self.error(
                    STATES,
                    what,
                    both(
                        "bf16 moments need bf16 weights without f32 master weights",
                        "bf16 动量需要没有 f32 主权重的 bf16 权重",
                    ),
                    text!("set \"{PURE}\": true", "请设置 \"{PURE}\": true"),
                );
                Precision::Bf16
            }
            _ => {
                for path in [PURE, STATES] {
                    self.set(
                        path,
                        Outcome::Here(both(
                            "master weights and moments are f32",
                            "主权重和动量为 f32",
                        )),
                    );
                }
                match asked {
                    Some(Precision::PureBf16) => Precision::PureBf16,
                    _ => Precision::Bf16,
                }
            }
        }
    }

    /// Maps the loss scale, which only fp16 has.
    fn loss_scale(&mut self, is_fp16: bool) {
        for (path, flag) in SCALE {
            if is_fp16 {
                self.take(path, flag);
            } else if self.raw(path).is_some() {
                self.set(
                    path,
                    Outcome::Unused(both("only fp16 has a loss scale", "只有 fp16 有损失缩放")),
                );
            }
        }
    }
}
