//! Mapping of number formats and the loss scale.

use super::{Mapper, Switch};
use crate::cli::file::report::Outcome;
use crate::config::PrecisionChoice as Precision;
use crate::config::words::value_name;

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
            let what = "fp16 and bf16 are both enabled".to_owned();
            self.error(
                FP16,
                what,
                "a run has one number format",
                "switch one of them off",
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
                self.set(BF16, Outcome::Here("the number format is fp16"));
            }
            (_, Switch::On) => {
                let precision = self.kind_of_bf16(asked);
                self.choose("precision", &value_name(precision), &[BF16]);
                self.set(FP16, Outcome::Here("the number format is bf16"));
            }
            // `auto` without fp16 can still mean bf16.
            (_, Switch::Auto) | (Switch::Auto, Switch::Absent) => {
                if fp16 == Switch::Off {
                    self.set(FP16, Outcome::Here("it is off"));
                }
            }
            (_, Switch::Off | Switch::Absent) => {
                self.implied("precision", "f32");
                for (path, switch) in [(FP16, fp16), (BF16, bf16)] {
                    if switch == Switch::Off {
                        self.set(path, Outcome::Here("it is off"));
                    }
                }
            }
        }
        if bf16 != Switch::On {
            for path in [PURE, STATES] {
                self.set(path, Outcome::Unused("bf16 is not enabled"));
            }
        }
        self.loss_scale(fp16 == Switch::On || is_fp16);
    }

    /// Mixed bf16, or pure bf16 if the file or the command line says so.
    fn kind_of_bf16(&mut self, asked: Option<Precision>) -> Precision {
        let (pure, states) = (self.switch(PURE), self.switch(STATES));
        match (pure, states) {
            (Switch::On, _) => {
                let moments = if states == Switch::On { "bf16" } else { "f32" };
                let key = if states == Switch::Absent {
                    PURE
                } else {
                    STATES
                };
                self.written("pure-bf16-moments", moments, key);
                self.set(PURE, Outcome::Here("it is --precision pure-bf16"));
                Precision::PureBf16
            }
            (_, Switch::On) => {
                let what = format!("{STATES} needs {PURE}");
                self.error(
                    STATES,
                    what,
                    "bf16 moments need bf16 weights without f32 master weights",
                    "",
                );
                Precision::Bf16
            }
            _ => {
                for path in [PURE, STATES] {
                    self.set(path, Outcome::Here("master weights and moments are f32"));
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
                self.set(path, Outcome::Unused("only fp16 has a loss scale"));
            }
        }
    }
}
