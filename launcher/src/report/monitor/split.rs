//! Parts of a step's time, and the rank that is slower than the others.

use crate::lang::{Text, text};
use engine::DeviceTimes;
use serde::{Deserialize, Serialize};

/// Share by which a rank's own time must exceed the mean of all ranks to be reported.
const NOTICEABLE: f64 = 0.2;
/// Minimum logged rows between two reports of a slow rank.
const QUIET_ROWS: u64 = 10;

/// Seconds that one rank spends in each part of a training step (all its micro-batches and the optimizer
/// update), or their sums over several steps. The parts do not overlap.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct StepSplit {
    /// Seconds of waiting for samples from the data loader.
    pub data: f64,
    /// Seconds of the forward pass, without communication and copies between tiers.
    pub forward: f64,
    /// Seconds inside collectives: waiting for other ranks and reading their data.
    pub communication: f64,
    /// Seconds of the backward pass, without communication and copies between tiers.
    pub backward: f64,
    /// Seconds of the optimizer step, without communication and copies between tiers.
    pub step: f64,
    /// Seconds of copies between this rank's memory tiers (device, host, NVMe), and of waiting for them.
    pub offload: f64,
}

impl StepSplit {
    /// Number of parts of a step: the fields of [`StepSplit`].
    pub const PARTS: usize = 6;
    /// Names of the parts of a step, in the order of [`StepSplit::values`].
    pub const NAMES: [&'static str; Self::PARTS] = [
        "data",
        "forward",
        "communication",
        "backward",
        "step",
        "offload",
    ];

    /// Seconds of every part, in the order of [`StepSplit::NAMES`].
    pub fn values(&self) -> [f64; Self::PARTS] {
        [
            self.data,
            self.forward,
            self.communication,
            self.backward,
            self.step,
            self.offload,
        ]
    }

    /// Inverse of [`StepSplit::values`]: a split with these seconds, in the order of [`StepSplit::NAMES`].
    /// Missing values are zero.
    pub fn from_slice(values: &[f64]) -> Self {
        let at = |part: usize| values.get(part).copied().unwrap_or(0.0);
        Self {
            data: at(0),
            forward: at(1),
            communication: at(2),
            backward: at(3),
            step: at(4),
            offload: at(5),
        }
    }

    /// Seconds of all parts of the step together, communication included.
    pub fn total(&self) -> f64 {
        self.values().iter().sum()
    }

    /// Seconds of the rank's own time: all parts except communication, where it waits for other ranks.
    pub fn own(&self) -> f64 {
        self.total() - self.communication
    }

    /// Copy of this split with the seconds of every part multiplied by `factor`.
    #[must_use]
    pub fn scaled(&self, factor: f64) -> Self {
        Self::from_slice(&self.values().map(|part| part * factor))
    }

    /// Mean seconds of each part over `ranks`, which has one split per rank. All parts are zero if it is
    /// empty.
    pub fn mean(ranks: &[Self]) -> Self {
        let mut sums = [0.0; Self::PARTS];
        for rank in ranks {
            for (sum, part) in sums.iter_mut().zip(rank.values()) {
                *sum += part;
            }
        }
        Self::from_slice(&sums).scaled(1.0 / ranks.len().max(1) as f64)
    }
}

/// Work of one rank's discrete device (a GPU with its own memory) over one or several training steps: seconds
/// of each kind of work, and bytes copied.
///
/// The device's clock measures the seconds, because the host only queues the work. Copies overlap with
/// computation, so the seconds may add up to more than the step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct DeviceSplit {
    /// Seconds of computation in forward and backward passes, without waits.
    pub compute: f64,
    /// Seconds that the device's computation waited for data that was being copied to the device.
    pub waits: f64,
    /// Seconds of host-to-device copies.
    pub inward: f64,
    /// Seconds of device-to-host copies.
    pub outward: f64,
    /// Seconds of transfers to this rank's device from the devices of other ranks.
    #[serde(default)]
    pub communication: f64,
    /// Seconds of optimizer updates on the CPU during forward and backward passes, by the CPU's clock.
    pub updates: f64,
    /// Bytes of host-to-device copies.
    #[serde(default)]
    pub inward_bytes: f64,
    /// Bytes of device-to-host copies.
    #[serde(default)]
    pub outward_bytes: f64,
}

impl DeviceSplit {
    /// Names of the six fields that are in seconds, in the order of [`DeviceSplit::values`].
    pub const NAMES: [&str; 6] = [
        "compute",
        "waits",
        "inward",
        "outward",
        "communication",
        "updates",
    ];
    /// Number of fields of [`DeviceSplit`]: six in seconds, then two in bytes.
    pub const PARTS: usize = 8;

    /// Values of all fields in their order: six in seconds, named in [`DeviceSplit::NAMES`], then two in
    /// bytes.
    pub fn values(&self) -> [f64; Self::PARTS] {
        [
            self.compute,
            self.waits,
            self.inward,
            self.outward,
            self.communication,
            self.updates,
            self.inward_bytes,
            self.outward_bytes,
        ]
    }

    /// Inverse of [`DeviceSplit::values`]: a split with these seconds and bytes. Missing values are zero.
    pub fn from_slice(values: &[f64]) -> Self {
        let at = |part: usize| values.get(part).copied().unwrap_or(0.0);
        Self {
            compute: at(0),
            waits: at(1),
            inward: at(2),
            outward: at(3),
            communication: at(4),
            updates: at(5),
            inward_bytes: at(6),
            outward_bytes: at(7),
        }
    }

    /// Mean of every field per rank and training step. `ranks` has each rank's sums over `updates` steps;
    /// less than 1 step counts as 1. `None` if no discrete device was active.
    pub fn mean(ranks: &[Self], updates: f64) -> Option<Self> {
        let count = ranks.len() as f64 * updates.max(1.0);
        let part = |part: usize| ranks.iter().map(|rank| rank.values()[part]).sum::<f64>() / count;
        let mean: Vec<f64> = (0..Self::PARTS).map(part).collect();
        let any = mean.iter().any(|seconds| *seconds > 0.0);
        any.then(|| Self::from_slice(&mean))
    }
}

impl From<DeviceTimes> for DeviceSplit {
    fn from(times: DeviceTimes) -> Self {
        Self {
            compute: times.compute.as_secs_f64(),
            waits: times.waits.as_secs_f64(),
            inward: times.inward.as_secs_f64(),
            outward: times.outward.as_secs_f64(),
            communication: times.communication.as_secs_f64(),
            updates: times.updates.as_secs_f64(),
            inward_bytes: times.inward_bytes as f64,
            outward_bytes: times.outward_bytes as f64,
        }
    }
}

/// Times of one training step in seconds, averaged over the steps since the last row of the training log.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepTimes {
    /// Seconds of each part of the step, averaged over ranks.
    pub mean: StepSplit,
    /// Own time of each rank in seconds per step: time outside collectives, so without waiting for other
    /// ranks; indexed by rank.
    pub own: Vec<f64>,
    /// The slowest rank and how much slower it is than the mean. `None` with one rank, or if all times are
    /// zero.
    pub imbalance: Option<Imbalance>,
    /// Seconds and bytes per step of a discrete device, averaged over ranks. `None` if no rank's discrete
    /// device was active.
    pub device: Option<DeviceSplit>,
}

impl StepTimes {
    /// Average times of one training step, without device times. `ranks` has the seconds of each rank, summed
    /// over `updates` steps; less than 1 step counts as 1.
    pub fn of(ranks: &[StepSplit], updates: f64) -> Self {
        let per_step = 1.0 / updates.max(1.0);
        Self {
            mean: StepSplit::mean(ranks).scaled(per_step),
            own: ranks.iter().map(|rank| rank.own() * per_step).collect(),
            imbalance: Imbalance::of(ranks),
            device: None,
        }
    }

    /// These times with the average device times of one step. `ranks` has the times of each rank's device,
    /// summed over `updates` steps; less than 1 step counts as 1.
    #[must_use]
    pub fn with_devices(mut self, ranks: &[DeviceSplit], updates: f64) -> Self {
        self.device = DeviceSplit::mean(ranks, updates);
        self
    }

    /// Seconds of one step: the sum of all parts, averaged over ranks.
    pub fn step_seconds(&self) -> f64 {
        self.mean.total()
    }

    /// Share of a step's seconds that ranks spend waiting for samples from the data loader, averaged over
    /// ranks, 0 to 1.
    pub fn data_wait(&self) -> f64 {
        self.mean.data / self.step_seconds().max(1e-9)
    }
}

/// The slowest rank, and how much slower it is than the mean of all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Imbalance {
    /// Number of the slowest rank: the one with the longest own time (time without waiting for other ranks).
    pub rank: usize,
    /// Excess of the slowest rank's own time over the mean of all ranks, as a fraction of the mean.
    pub share: f64,
    /// Name of the part of the step in which the slowest rank exceeds the mean of all ranks by the most
    /// seconds.
    pub part: &'static str,
    /// Excess of the slowest rank's time in `part` over the mean of all ranks, as a fraction of the mean.
    pub part_share: f64,
}

impl Imbalance {
    /// Finds the rank with the longest own time; of equals, that with the lowest number. `ranks` has one
    /// split per rank, indexed by rank. `None` with fewer than two ranks, or if all their own times are zero.
    pub fn of(ranks: &[StepSplit]) -> Option<Self> {
        if ranks.len() < 2 {
            return None;
        }
        let mean = StepSplit::mean(ranks);
        let own = |rank: &usize| ranks[*rank].own();
        let rank = (0..ranks.len()).max_by(|a, b| own(a).total_cmp(&own(b)).then(b.cmp(a)))?;
        let excess = |part: &usize| ranks[rank].values()[*part] - mean.values()[*part];
        let part = (0..StepSplit::PARTS)
            .filter(|part| StepSplit::NAMES[*part] != "communication" && mean.values()[*part] > 0.0)
            .max_by(|a, b| excess(a).total_cmp(&excess(b)))?;
        Some(Self {
            rank,
            share: ranks[rank].own() / mean.own() - 1.0,
            part: StepSplit::NAMES[part],
            part_share: excess(&part) / mean.values()[part],
        })
    }
}

/// Rate limiter for the screen message about a slow rank.
#[derive(Debug, Default)]
pub struct SlowRankNotice {
    rows: u64,
    last: Option<u64>,
}

impl SlowRankNotice {
    /// Message about the slowest rank for one row of the training log; called once per row. `None` if that
    /// rank is at most 20 % slower than the mean, or if `imbalance` is `None`.
    ///
    /// Also `None` for the first row, because caches are cold, and for the nine rows after another message.
    pub fn line(&mut self, imbalance: Option<Imbalance>) -> Option<Text> {
        let row = self.rows;
        self.rows += 1;
        let found = imbalance.filter(|found| found.share > NOTICEABLE)?;
        if row == 0 || self.last.is_some_and(|last| row < last + QUIET_ROWS) {
            return None;
        }
        self.last = Some(row);
        let Imbalance {
            rank,
            share,
            part,
            part_share,
        } = found;
        Some(text!(
            "rank {rank}: {part} {:+.0} % · own time {:+.0} % of the mean of all ranks",
            "rank {rank}：{part} {:+.0} % · 自身时间比所有 rank 的平均值多 {:+.0} %",
            100.0 * part_share,
            100.0 * share
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(data: f64, backward: f64) -> StepSplit {
        StepSplit {
            data,
            forward: 1.0,
            communication: 3.0 - data - backward,
            backward,
            step: 0.5,
            offload: 0.0,
        }
    }

    #[test]
    fn the_slowest_rank_and_its_slowest_part_are_found() {
        let ranks = [rank(0.0, 1.0), rank(0.0, 3.0), rank(0.1, 1.0)];
        let found = Imbalance::of(&ranks).expect("three ranks");
        assert_eq!((found.rank, found.part), (1, "backward"));
        // Backward: 3 against a mean of 5/3. Own time: 4.5 against a mean of 9.6 / 3.
        assert!((found.part_share - 0.8).abs() < 1e-9, "{found:?}");
        assert!((found.share - (4.5 / 3.2 - 1.0)).abs() < 1e-9, "{found:?}");
        // Waiting for others does not count: rank 0 waits longest here.
        let found = Imbalance::of(&[rank(0.0, 0.1), rank(1.0, 0.1)]).expect("two ranks");
        assert_eq!((found.rank, found.part), (1, "data"));
        assert_eq!(Imbalance::of(&ranks[..1]), None);
        assert_eq!(Imbalance::of(&[StepSplit::default(); 2]), None);
    }

    #[test]
    fn device_times_are_averaged_over_active_devices() {
        let ranks = [
            [4.0, 1.0, 2.0, 0.0, 1.0, 0.0, 8.0, 2.0],
            [2.0, 1.0, 0.0, 2.0, 3.0, 0.0, 0.0, 2.0],
        ]
        .map(|r| DeviceSplit::from_slice(&r));
        let times = StepTimes::of(&[rank(0.0, 1.0); 2], 2.0).with_devices(&ranks, 2.0);
        let want = DeviceSplit::from_slice(&[1.5, 0.5, 0.5, 0.5, 1.0, 0.0, 2.0, 1.0]);
        assert_eq!(times.device, Some(want));
        assert_eq!(DeviceSplit::mean(&[DeviceSplit::default(); 2], 1.0), None);
    }

    #[test]
    fn equal_ranks_are_balanced_and_the_first_is_named() {
        let found = Imbalance::of(&[rank(0.0, 1.0); 4]).expect("four ranks");
        assert_eq!((found.rank, found.share), (0, 0.0));
    }

    #[test]
    fn a_slow_rank_is_reported_at_intervals() {
        let slow = Imbalance::of(&[rank(0.0, 1.0), rank(0.0, 3.0)]);
        let mut notice = SlowRankNotice::default();
        assert_eq!(notice.line(slow), None, "the first row is warm-up");
        let line = notice.line(slow).expect("named");
        assert!(line.starts_with("rank 1: backward +50 %"), "{line}");
        let named = (0..30).filter(|_| notice.line(slow).is_some()).count();
        assert_eq!(named, 3);
        let even = Imbalance::of(&[rank(0.0, 1.0), rank(0.0, 1.2)]);
        assert!((0..30).all(|_| notice.line(even).is_none()));
    }
}
