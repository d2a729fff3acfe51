//! `--inject`: faults injected on purpose at a known point of a run, to test its reaction.
//!
//! The syntax is `KIND:KEY=VALUE,…`, for example `kill:rank=1,step=3`. Two things are random: the flipped bit, and
//! the call within a save if `call` is absent. Both are functions of `seed`, which defaults to the run's seed.

use crate::lang::{Both, Text, both, text};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::words::nearest;
use super::{Cadence, RunConfig};
use crate::error::Failure;

/// Kind of an injected fault (`--inject`): what happens to its rank on purpose, for tests of the run's
/// reaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// SIGKILL ends the rank.
    Kill,
    /// SIGSTOP suspends the rank.
    Stop,
    /// The rank panics.
    Panic,
    /// The rank's gradients become non-finite.
    Nan,
    /// The disk is full from one call of a save on, so the rank's part of the checkpoint cannot be written.
    DiskFull,
    /// One write takes only half of its bytes. POSIX allows that, so it is no error.
    ShortWrite,
    /// One bit of the rank's state file flips after the checkpoint was published.
    FlipBit,
    /// Each collective of the rank starts late.
    SlowLink,
    /// The rank's collectives reach no other rank.
    CutLink,
}

impl FaultKind {
    const ALL: [(Self, &'static str); 9] = [
        (Self::Kill, "kill"),
        (Self::Stop, "stop"),
        (Self::Panic, "panic"),
        (Self::Nan, "nan"),
        (Self::DiskFull, "disk-full"),
        (Self::ShortWrite, "short-write"),
        (Self::FlipBit, "flip-bit"),
        (Self::SlowLink, "slow-link"),
        (Self::CutLink, "cut-link"),
    ];

    /// Name of the kind of fault in the syntax of `--inject`, e.g. `disk-full`.
    pub fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(kind, _)| *kind == self);
        found.map_or("", |(_, name)| name)
    }

    /// Keys that `--inject` accepts for this kind of fault.
    const fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Kill => &["rank", "step", "times", "phase", "call", "seed", "lost"],
            Self::Stop | Self::Panic => &["rank", "step", "times", "phase", "call", "seed"],
            Self::Nan => &["rank", "step", "times", "value"],
            Self::DiskFull | Self::ShortWrite => &["rank", "step", "times", "call", "seed"],
            Self::FlipBit => &["rank", "step", "times", "seed"],
            Self::SlowLink => &["rank", "step", "times", "ms"],
            Self::CutLink => &["rank", "step", "times"],
        }
    }
}

/// Part of a training step in which an injected `kill`, `stop` or `panic` occurs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FaultPhase {
    /// At the start of the step's first forward pass.
    #[default]
    Forward,
    /// In the step's first collective, after it has started and before the rank reads a result.
    Collective,
    /// In a file-system call of the first save at or after the step.
    Save,
}

impl FaultPhase {
    const ALL: [(Self, &'static str); 3] = [
        (Self::Forward, "forward"),
        (Self::Collective, "collective"),
        (Self::Save, "save"),
    ];

    fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(phase, _)| *phase == self);
        found.map_or("", |(_, name)| name)
    }
}

/// Non-finite number by which an injected `nan` fault multiplies the rank's gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NotFinite {
    /// NaN.
    #[default]
    Nan,
    /// Positive infinity.
    Inf,
    /// Negative infinity.
    MinusInf,
}

impl NotFinite {
    const ALL: [(Self, &'static str); 3] = [
        (Self::Nan, "nan"),
        (Self::Inf, "inf"),
        (Self::MinusInf, "-inf"),
    ];

    fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(value, _)| *value == self);
        found.map_or("", |(_, name)| name)
    }

    /// The non-finite number itself, in f32.
    pub const fn value(self) -> f32 {
        match self {
            Self::Nan => f32::NAN,
            Self::Inf => f32::INFINITY,
            Self::MinusInf => f32::NEG_INFINITY,
        }
    }
}

/// One fault that a rank injects into itself at a given step (`--inject`). Fields that its kind does not use
/// keep their defaults.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Fault {
    /// Kind of the fault: what happens to the rank.
    pub kind: FaultKind,
    /// Rank in which the fault occurs.
    pub rank: usize,
    /// Training step (optimizer update) in which the fault occurs, counted from 1. A slow or cut link stays
    /// so in later steps. A fault of a save occurs in the first save at or after this step.
    pub step: u64,
    /// Number of attempts of the run (first start and restarts) in which the fault occurs, from the first one
    /// on. A restarted run meets the fault again only if this is above 1.
    pub times: u32,
    /// For `kill`, `stop` and `panic`: part of the step in which the fault occurs.
    pub phase: FaultPhase,
    /// For faults during a save: the file-system call in which it occurs, counted from 0. `None`: drawn from
    /// the seed.
    pub call: Option<u64>,
    /// Seed of the fault's random choices: the call within a save, and the bit to flip. `None`: the run's
    /// seed.
    pub seed: Option<u64>,
    /// For `slow-link`: delay of each collective in milliseconds.
    pub ms: u64,
    /// For `nan`: number by which the rank's gradients are multiplied.
    pub value: NotFinite,
    /// For `kill`: whether the rank is lost for good, as if its device had failed. Then only an elastic
    /// restart, with fewer ranks, is possible.
    pub lost: bool,
}

impl Fault {
    /// Whether the fault occurs while a checkpoint is saved or after it was published, so that it needs a
    /// save.
    pub fn needs_a_save(&self) -> bool {
        self.phase == FaultPhase::Save
            || matches!(
                self.kind,
                FaultKind::DiskFull | FaultKind::ShortWrite | FaultKind::FlipBit
            )
    }

    /// Pseudo-random number from 0 to `limit` - 1 for the fault's random choices, computed from seed, rank
    /// and step. `run_seed` applies if the fault has no seed of its own. 0 if `limit` is 0.
    pub fn draw(&self, run_seed: u64, limit: u64) -> u64 {
        let mut hasher = blake3::Hasher::new();
        for number in [self.seed.unwrap_or(run_seed), self.rank as u64, self.step] {
            hasher.update(&number.to_le_bytes());
        }
        let hash = hasher.finalize();
        let mut first = [0; 8];
        first.copy_from_slice(&hash.as_bytes()[..8]);
        u64::from_le_bytes(first) % limit.max(1)
    }
}

/// Writes the fault in the syntax that parses to the same fault.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}:rank={},step={}",
            self.kind.name(),
            self.rank,
            self.step
        )?;
        let keys = self.kind.keys();
        if keys.contains(&"phase") {
            write!(f, ",phase={}", self.phase.name())?;
        }
        if self.kind == FaultKind::SlowLink {
            write!(f, ",ms={}", self.ms)?;
        }
        if self.kind == FaultKind::Nan {
            write!(f, ",value={}", self.value.name())?;
        }
        if let Some(call) = self.call {
            write!(f, ",call={call}")?;
        }
        if let Some(seed) = self.seed {
            write!(f, ",seed={seed}")?;
        }
        if self.lost {
            write!(f, ",lost=true")?;
        }
        if self.times != 1 {
            write!(f, ",times={}", self.times)?;
        }
        Ok(())
    }
}

impl FromStr for Fault {
    type Err = Text;

    fn from_str(text: &str) -> Result<Self, Text> {
        let (word, rest) = text.split_once(':').unwrap_or((text, ""));
        let kind = named(&FaultKind::ALL, word.trim(), both("fault", "故障"))?;
        let mut fault = Self {
            kind,
            rank: 0,
            step: 1,
            times: 1,
            phase: FaultPhase::default(),
            call: None,
            seed: None,
            ms: 0,
            value: NotFinite::default(),
            lost: false,
        };
        let mut seen = Vec::new();
        for pair in rest.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(text!(
                    "`{pair}` is not KEY=VALUE",
                    "`{pair}` 不是 KEY=VALUE 的形式"
                ));
            };
            if !kind.keys().contains(&key) {
                let keys = kind.keys().join(", ");
                return Err(text!(
                    "{} takes {keys}, not `{key}`",
                    "{} 接受 {keys}，不接受 `{key}`",
                    kind.name()
                ));
            }
            if seen.contains(&key) {
                return Err(text!("`{key}` is given twice", "`{key}` 给出了两次"));
            }
            seen.push(key);
            match key {
                "rank" => fault.rank = number(key, value, 0)?,
                "step" => fault.step = number(key, value, 1)?,
                "times" => fault.times = number(key, value, 1)?,
                "call" => fault.call = Some(number(key, value, 0)?),
                "seed" => fault.seed = Some(number(key, value, 0)?),
                "ms" => fault.ms = number(key, value, 1)?,
                "phase" => fault.phase = named(&FaultPhase::ALL, value, both("phase", "阶段"))?,
                "value" => fault.value = named(&NotFinite::ALL, value, both("value", "值"))?,
                _ => {
                    fault.lost = value.parse().map_err(|_| {
                        text!(
                            "{key} must be true or false, not `{value}`",
                            "{key} 必须是 true 或 false，不能是 `{value}`"
                        )
                    })?;
                }
            }
        }
        if kind == FaultKind::SlowLink && fault.ms == 0 {
            return Err(both(
                "slow-link needs ms=MILLISECONDS",
                "slow-link 需要 ms=MILLISECONDS",
            )
            .into());
        }
        if fault.phase != FaultPhase::Save && kind.keys().contains(&"phase") {
            let mut of_saves = ["call", "seed"].into_iter();
            if let Some(key) = of_saves.rfind(|key| seen.contains(key)) {
                return Err(text!(
                    "`{key}` has a meaning only with phase=save",
                    "`{key}` 只在 phase=save 时有意义"
                ));
            }
        }
        Ok(fault)
    }
}

fn named<T: Copy>(all: &[(T, &'static str)], word: &str, what: Both) -> Result<T, Text> {
    if let Some((one, _)) = all.iter().find(|(_, name)| *name == word) {
        return Ok(*one);
    }
    let names: Vec<&str> = all.iter().map(|(_, name)| *name).collect();
    let meant = nearest(word, names.iter().copied());
    let meant = meant.map_or_else(Text::default, |name| {
        text!("; did you mean {name}?", "；您是否想用 {name}？")
    });
    Err(text!(
        "`{word}` is not a {what}; known: {}{meant}",
        "`{word}` 不是已知的{what}；已知的有：{}{meant}",
        names.join(", ")
    ))
}

fn number<T: FromStr + PartialOrd + From<u8>>(
    key: &str,
    value: &str,
    least: u8,
) -> Result<T, Text> {
    let parsed = value.parse().ok().filter(|n| *n >= T::from(least));
    parsed.ok_or_else(|| {
        text!(
            "{key} must be a whole number of at least {least}, not `{value}`",
            "{key} 必须是不小于 {least} 的整数，不能是 `{value}`"
        )
    })
}

impl TryFrom<String> for Fault {
    type Error = Text;

    fn try_from(text: String) -> Result<Self, Text> {
        text.parse()
    }
}

impl From<Fault> for String {
    fn from(fault: Fault) -> Self {
        fault.to_string()
    }
}

/// Refuses faults that cannot happen in a run of `total_steps` steps.
///
/// # Errors
/// A usage failure (exit 2) that names the fault.
pub(crate) fn check_faults(config: &RunConfig, total_steps: u64) -> Result<(), Failure> {
    let never = |fault: &Fault, cause: Text, next: Text| {
        Err(Failure::usage(
            text!(
                "--inject {fault} would never happen",
                "--inject {fault} 永远不会发生"
            ),
            cause,
        )
        .next(next))
    };
    for fault in &config.inject {
        if fault.rank >= config.world_size {
            let cause = text!(
                "the run has ranks 0 to {}",
                "本次运行的 rank 为 0 到 {}",
                config.world_size - 1
            );
            return never(
                fault,
                cause,
                both(
                    "choose one of them, or raise --nproc",
                    "请从中选择一个，或提高 --nproc",
                )
                .into(),
            );
        }
        let stages = config.mp_size;
        if fault.kind == FaultKind::Nan && fault.rank % stages + 1 < stages {
            let cause = text!(
                "only the last of {stages} pipeline stages has a loss",
                "{stages} 个流水线段中只有最后一段计算损失"
            );
            let last = fault.rank / stages * stages + stages - 1;
            return never(
                fault,
                cause,
                text!("choose rank {last}", "请选择 rank {last}"),
            );
        }
        if fault.step > total_steps {
            let cause = text!(
                "the run has {total_steps} steps",
                "本次运行共 {total_steps} 步"
            );
            return never(
                fault,
                cause,
                both(
                    "choose an earlier step, or raise --max-steps",
                    "请选择更早的步，或提高 --max-steps",
                )
                .into(),
            );
        }
        if fault.needs_a_save() && config.save == Cadence::Never {
            let cause = both(
                "nothing is saved with --save-strategy no",
                "使用 --save-strategy no 时不会保存任何内容",
            )
            .into();
            return never(fault, cause, Text::literal("--save-steps N"));
        }
    }
    Ok(())
}

/// Warnings about injected faults, shown before a run starts.
pub(crate) fn fault_lines(config: &RunConfig) -> impl Iterator<Item = Text> {
    config.inject.iter().map(|fault| {
        let seed = fault.seed.unwrap_or(config.seed);
        text!(
            "FAULT INJECTION: {fault} (seed {seed}) will happen on purpose; this run is a test",
            "故障注入：{fault}（种子 {seed}）将按要求发生；本次运行是一次测试"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printed_fault_parses_to_the_same_fault() {
        for text in [
            "kill:rank=1,step=3,phase=save,call=7,lost=true,times=2",
            "stop:rank=0,step=2,phase=collective",
            "panic:rank=0,step=1,phase=forward",
            "nan:rank=2,step=9,value=-inf",
            "disk-full:rank=1,step=4,seed=8",
            "short-write:rank=0,step=1,call=0",
            "flip-bit:rank=1,step=2,seed=3",
            "slow-link:rank=1,step=1,ms=20",
            "cut-link:rank=1,step=2",
        ] {
            let fault: Fault = text.parse().expect(text);
            assert_eq!(fault.to_string(), text);
        }
        let short: Fault = "kill".parse().expect("defaults");
        assert_eq!(short.to_string(), "kill:rank=0,step=1,phase=forward");
    }

    #[test]
    fn malformed_faults_are_refused_with_a_reason() {
        for (text, reason) in [
            ("kil:rank=1", "did you mean kill?"),
            ("", "`` is not a fault"),
            ("kill:rank", "`rank` is not KEY=VALUE"),
            ("kill:rank=-1", "rank must be a whole number of at least 0"),
            ("kill:step=0", "step must be a whole number of at least 1"),
            ("kill:rank=1,rank=2", "`rank` is given twice"),
            ("kill:ms=3", "kill takes rank, step"),
            ("kill:phase=sav", "did you mean save?"),
            ("kill:call=3", "only with phase=save"),
            ("nan:value=big", "known: nan, inf, -inf"),
            ("slow-link:rank=1", "needs ms"),
            ("stop:lost=true", "not `lost`"),
            ("kill:lost=perhaps", "true or false"),
        ] {
            let error = text.parse::<Fault>().expect_err(text);
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn random_draws_of_a_fault_follow_from_its_seed() {
        let fault: Fault = "flip-bit:rank=1,step=2".parse().expect("parses");
        assert_eq!(fault.draw(7, 1000), fault.draw(7, 1000));
        let drawn: Vec<u64> = (0..8).map(|seed| fault.draw(seed, 1 << 40)).collect();
        assert!(drawn.windows(2).all(|pair| pair[0] != pair[1]), "{drawn:?}");
        assert_eq!(fault.draw(7, 0), 0);
    }
}
