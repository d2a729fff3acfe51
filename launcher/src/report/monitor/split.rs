//! Parts of a step's time, and the rank that is slower than the others.

use engine::DeviceTimes;
use serde::{Deserialize, Serialize};

/// Share by which a rank's own time must exceed the mean of all ranks to be reported.
const NOTICEABLE: f64 = 0.2;
/// Minimum logged rows between two reports of a slow rank.
const QUIET_ROWS: u64 = 10;

/// Seconds of one rank by part of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct StepSplit {
    /// Seconds of waiting for samples.
    pub data: f64,
    /// Seconds of the forward pass.
    pub forward: f64,
    /// Seconds of waiting for other ranks and of reading their data.
    pub communication: f64,
    /// Seconds of the backward pass.
    pub backward: f64,
    /// Seconds of the optimizer step.
    pub step: f64,
    /// Seconds of copies between device and host tier.
    pub offload: f64,
}

impl StepSplit {
    /// Number of parts (fields).
    pub const PARTS: usize = 6;
    /// Names of the parts, in the order of [`StepSplit::values`].
    pub const NAMES: [&'static str; Self::PARTS] = [
        "data",
        "forward",
        "communication",
        "backward",
        "step",
        "offload",
    ];

    /// Seconds of the parts, in the order of [`StepSplit::NAMES`].
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

    /// Split with these values. Missing values are zero.
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

    /// Sum of all parts, in seconds.
    pub fn total(&self) -> f64 {
        self.values().iter().sum()
    }

    /// Seconds of the rank's own work: everything but waiting for other ranks.
    pub fn own(&self) -> f64 {
        self.total() - self.communication
    }

    /// The split with every part multiplied by `factor`.
    #[must_use]
    pub fn scaled(&self, factor: f64) -> Self {
        Self::from_slice(&self.values().map(|part| part * factor))
    }

    /// Mean over `ranks`, part by part. All parts are zero if there are no ranks.
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

/// Seconds of a discrete device by its own clock, because the host only queues its work. Copies overlap with
/// computation. The last two parts are bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct DeviceSplit {
    /// Seconds of computation in forward and backward, without waits.
    pub compute: f64,
    /// Seconds that the computation waited for data that comes to the device.
    pub waits: f64,
    /// Seconds of host-to-device copies.
    pub inward: f64,
    /// Seconds of device-to-host copies.
    pub outward: f64,
    /// Seconds of communication with other ranks' devices.
    #[serde(default)]
    pub communication: f64,
    /// Seconds of optimizer updates on the host that run at the same time.
    pub updates: f64,
    /// Bytes of host-to-device copies.
    #[serde(default)]
    pub inward_bytes: f64,
    /// Bytes of device-to-host copies.
    #[serde(default)]
    pub outward_bytes: f64,
}

impl DeviceSplit {
    /// Names of the parts in seconds, in the order of the fields.
    pub const NAMES: [&str; 6] = [
        "compute",
        "waits",
        "inward",
        "outward",
        "communication",
        "updates",
    ];
    /// Number of values: six times in seconds, and two counts of bytes.
    pub const PARTS: usize = 8;

    /// All values, in the order of the fields.
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

    /// Split with these values. Missing values are zero.
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

    /// Mean over ranks and updates. `None` if no discrete device was active.
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

/// Seconds of one training step, averaged over the steps since the last logged row.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepTimes {
    /// Mean over ranks, by part of the step.
    pub mean: StepSplit,
    /// Seconds of each rank's own work, without waiting for other ranks.
    pub own: Vec<f64>,
    /// The slowest rank and how much slower it is. `None` with one rank.
    pub imbalance: Option<Imbalance>,
    /// Mean over the ranks' discrete devices. `None` if no rank has one that was active.
    pub device: Option<DeviceSplit>,
}

impl StepTimes {
    /// Times per step, from the sums of every rank over `updates` steps.
    pub fn of(ranks: &[StepSplit], updates: f64) -> Self {
        let per_step = 1.0 / updates.max(1.0);
        Self {
            mean: StepSplit::mean(ranks).scaled(per_step),
            own: ranks.iter().map(|rank| rank.own() * per_step).collect(),
            imbalance: Imbalance::of(ranks),
            device: None,
        }
    }

    /// Adds the times of the ranks' devices over the same steps.
    #[must_use]
    pub fn with_devices(mut self, ranks: &[DeviceSplit], updates: f64) -> Self {
        self.device = DeviceSplit::mean(ranks, updates);
        self
    }

    /// Seconds of one step: the sum of all parts, averaged over ranks.
    pub fn step_seconds(&self) -> f64 {
        self.mean.total()
    }

    /// Share of the step spent waiting for samples, 0 to 1.
    pub fn data_wait(&self) -> f64 {
        self.mean.data / self.step_seconds().max(1e-9)
    }
}

/// Difference between the slowest rank and the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Imbalance {
    /// Rank with the longest own time (time without waiting for other ranks).
    pub rank: usize,
    /// Excess of that rank's own time over the mean of all ranks, as a share of the mean.
    pub share: f64,
    /// Name of the part of the step in which that rank loses most time.
    pub part: &'static str,
    /// Excess of that rank's time in that part over the mean of all ranks, as a share of the mean.
    pub part_share: f64,
}

impl Imbalance {
    /// Compares ranks. `None` if there is nothing to compare.
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

/// Decides when to report a slow rank on the screen.
#[derive(Debug, Default)]
pub struct SlowRankNotice {
    rows: u64,
    last: Option<u64>,
}

impl SlowRankNotice {
    /// Text for a logged row, if the rank is reported now. The first row is never reported, because caches are cold.
    /// Rows soon after another report are not reported either.
    pub fn line(&mut self, imbalance: Option<Imbalance>) -> Option<String> {
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
        Some(format!(
            "rank {rank}: {part} {:+.0} % · own time {:+.0} % of the mean of all ranks",
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
