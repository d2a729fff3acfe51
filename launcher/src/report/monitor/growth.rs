//! Detector of memory that keeps growing after warm-up, because a leak would end a long run hours later.
//!
//! It fits a straight line to the peaks of the last windows (a window is the time between two logged rows). A warning
//! needs steady growth: the line explains the points, and the later half grows like the whole, so a level that is
//! being reached does not count. The growth must also matter: it would add a noticeable share by the end of the run.

use crate::lang::{Both, Text, both, text};
use std::collections::VecDeque;

use crate::report::TierBytes;
use crate::units::{bytes, grouped};

/// Windows at the start that are ignored, because caches fill.
const WARM_UP: usize = 5;
/// Minimum number of windows for a warning.
const FEWEST: usize = 20;
/// Maximum number of windows that the line is fitted to.
const MOST: usize = 100;
/// Minimum growth until the end of the run, as a share of the current level.
const SHARE: f64 = 0.1;
/// Minimum growth until the end of the run in bytes.
const NOTICEABLE_BYTES: f64 = (64u64 << 20) as f64;
/// Minimum ratio of observed steps to remaining steps.
const SEEN: f64 = 0.05;
/// Minimum slope of the later half, as a share of the whole line's slope.
const LASTING: f64 = 0.8;
/// Minimum share of the variance that the line explains.
const STEADY: f64 = 0.8;

/// Kinds of memory watched on each rank.
const KINDS: [(Both, fn(&TierBytes) -> u64); 3] = [
    (both("resident memory", "常驻内存"), |peaks| peaks.rss),
    (both("device memory", "设备内存"), |peaks| peaks.device),
    (both("host tier", "主机层级"), |peaks| peaks.host),
];

/// Steady growth of one kind of memory on one rank, such as a leak, that would matter before the run ends.
#[derive(Debug, Clone, PartialEq)]
pub struct Growth {
    /// Rank whose memory grows.
    pub rank: usize,
    /// Name of the memory that grows: `resident memory`, `device memory`, or `host tier`.
    pub kind: Both,
    /// Growth in bytes per training step: the slope of a line fitted to peaks of memory by step.
    pub slope: f64,
    /// Number of windows (spans between two logged rows) that the line was fitted to, one peak each.
    pub windows: usize,
    /// Bytes at the (first, last) of these windows, on the fitted line.
    pub from_to: (u64, u64),
    /// Number of training steps left in the run.
    pub remaining_steps: u64,
}

impl Growth {
    /// Bytes by which this kind of memory would grow on this rank until the end of the run, at the fitted slope.
    pub fn projected_bytes(&self) -> f64 {
        self.slope * self.remaining_steps as f64
    }
}

impl Growth {
    /// The warning about this growth.
    pub(crate) fn warning(&self) -> Text {
        text!(
            "memory keeps growing: {kind} of rank {rank} by {} per step ({} to {} over {} logged rows); the remaining {} steps would add {}",
            "内存持续增长：rank {rank} 的{kind}每步增加 {}（从 {} 增至 {}，共 {} 行日志）；剩余的 {} 步还会增加 {}",
            bytes(self.slope as u64),
            bytes(self.from_to.0),
            bytes(self.from_to.1),
            self.windows,
            grouped(self.remaining_steps),
            bytes(self.projected_bytes() as u64),
            kind = self.kind,
            rank = self.rank,
        )
    }
}

/// Detector of memory that keeps growing, such as a leak. It stores the memory peaks of every rank in the
/// last windows (spans between two logged rows).
#[derive(Debug, Default)]
pub struct GrowthDetector {
    seen: usize,
    steps: VecDeque<u64>,
    peaks: VecDeque<Vec<TierBytes>>,
    warned: [bool; KINDS.len()],
}

impl GrowthDetector {
    /// Adds the memory peaks of all ranks, indexed by rank, in the window that ends after `step` of `total`
    /// steps. Returns growth that is steady and large enough to matter before the end of the run, on the rank
    /// where it is fastest. Each kind of memory is reported at most once. Otherwise `None`.
    pub fn observe(&mut self, step: u64, total: u64, peaks: &[TierBytes]) -> Option<Growth> {
        self.seen += 1;
        if self.seen <= WARM_UP {
            return None;
        }
        self.steps.push_back(step);
        self.peaks.push_back(peaks.to_vec());
        if self.steps.len() > MOST {
            self.steps.pop_front();
            self.peaks.pop_front();
        }
        let remaining = total.saturating_sub(step);
        let kind = (0..KINDS.len()).find(|kind| {
            !self.warned[*kind] && self.growth(*kind, remaining, peaks.len()).is_some()
        })?;
        self.warned[kind] = true;
        self.growth(kind, remaining, peaks.len())
    }

    /// Fastest growth of one kind over all ranks, if it matters.
    fn growth(&self, kind: usize, remaining_steps: u64, ranks: usize) -> Option<Growth> {
        let (name, read) = KINDS[kind];
        let of_rank = |rank: usize| {
            let series: Vec<(f64, f64)> = self
                .steps
                .iter()
                .zip(&self.peaks)
                .filter_map(|(step, peaks)| Some((*step as f64, read(peaks.get(rank)?) as f64)))
                .collect();
            let line = steady_line(&series)?;
            let at = |point: Option<&(f64, f64)>| point.map_or(0.0, |(step, _)| line.at(*step));
            let (from, to) = (at(series.first()), at(series.last()));
            let left = remaining_steps as f64;
            let projected = line.slope * left;
            let seen = series.last()?.0 - series.first()?.0;
            (seen >= SEEN * left && projected > NOTICEABLE_BYTES && projected > SHARE * to)
                .then_some(Growth {
                    rank,
                    kind: name,
                    slope: line.slope,
                    windows: series.len(),
                    from_to: (from as u64, to as u64),
                    remaining_steps,
                })
        };
        (0..ranks)
            .filter_map(of_rank)
            .max_by(|a, b| a.slope.total_cmp(&b.slope))
    }
}

/// Straight line fitted to points by least squares.
struct Line {
    slope: f64,
    offset: f64,
    /// Share of the variance that the line explains.
    explained: f64,
}

impl Line {
    fn through(points: &[(f64, f64)]) -> Option<Self> {
        let count = points.len() as f64;
        let mean = |read: fn(&(f64, f64)) -> f64| points.iter().map(read).sum::<f64>() / count;
        let (x, y) = (mean(|p| p.0), mean(|p| p.1));
        let sum = |term: &dyn Fn(f64, f64) -> f64| -> f64 {
            points.iter().map(|p| term(p.0 - x, p.1 - y)).sum()
        };
        let (xx, xy, yy) = (sum(&|a, _| a * a), sum(&|a, b| a * b), sum(&|_, b| b * b));
        (xx > 0.0 && yy > 0.0).then(|| Self {
            slope: xy / xx,
            offset: y - xy / xx * x,
            explained: xy * xy / (xx * yy),
        })
    }

    fn at(&self, x: f64) -> f64 {
        self.offset + self.slope * x
    }
}

/// Line through the points, if they rise steadily.
fn steady_line(points: &[(f64, f64)]) -> Option<Line> {
    if points.len() < FEWEST {
        return None;
    }
    let line = Line::through(points).filter(|line| line.slope > 0.0 && line.explained > STEADY)?;
    let later = Line::through(&points[points.len() / 2..])?;
    (later.slope > LASTING * line.slope).then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: f64 = (1u64 << 20) as f64;

    /// Warnings of a run of `steps` steps, logged every ten steps, on two ranks. The first rank's memory is constant.
    fn warnings(steps: u64, rss: impl Fn(u64) -> f64) -> Vec<(u64, Growth)> {
        let mut detector = GrowthDetector::default();
        let flat = TierBytes {
            device: 1 << 30,
            host: 2 << 30,
            rss: 4 << 30,
        };
        let windows = (10..=steps).step_by(10);
        let observed = windows.filter_map(|step| {
            let grows = TierBytes {
                rss: rss(step) as u64,
                ..flat
            };
            Some((step, detector.observe(step, steps, &[flat, grows])?))
        });
        observed.collect()
    }

    /// Noise between -1 and 1 that depends on the step only.
    fn noise(step: u64) -> f64 {
        // Mixed well, because the plain product of multiples of ten is a ramp.
        let mut bits = step.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ bits >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((bits ^ bits >> 32) % 2001) as f64 / 1000.0 - 1.0
    }

    #[test]
    fn a_leak_is_reported_once_soon_and_with_numbers() {
        let found = warnings(5000, |step| {
            4096.0 * MIB + MIB * (step as f64 + 3.0 * noise(step))
        });
        let [(step, growth)] = &found[..] else {
            panic!("one warning: {found:?}");
        };
        assert!(*step <= 400, "found after {step} steps");
        assert_eq!((growth.rank, growth.kind.en), (1, "resident memory"));
        assert!((growth.slope / MIB - 1.0).abs() < 0.1, "{growth:?}");
        assert_eq!(growth.remaining_steps, 5000 - step);
        let text = growth.warning();
        assert!(
            text.contains("rank 1 by 1.0M per step") && text.contains("steps would add 4."),
            "{text}"
        );
    }

    #[test]
    fn noise_plateaus_and_shrinking_are_no_leak() {
        let flat = |step: u64| MIB * (4096.0 + 200.0 * noise(step));
        assert_eq!(warnings(5000, flat), []);
        let constant = |_| 4096.0 * MIB;
        assert_eq!(warnings(5000, constant), []);
        // Rises by 1 GiB in the first tenth of the run and stays constant after.
        let level = |step: u64| MIB * (4096.0 + 1024.0 * (1.0 - (-(step as f64) / 100.0).exp()));
        assert_eq!(warnings(5000, level), []);
        let shrinks = |step: u64| MIB * (9000.0 - step as f64);
        assert_eq!(warnings(5000, shrinks), []);
    }

    #[test]
    fn growth_that_ends_before_it_matters_is_not_mentioned() {
        // 30 MiB until the end: a small process may do that.
        assert_eq!(warnings(300, |step| MIB * (60.0 + 0.1 * step as f64)), []);
        // 5 % of the current level.
        assert_eq!(
            warnings(5000, |step| MIB * (100_000.0 + step as f64)).len(),
            0
        );
    }

    #[test]
    fn growth_of_pools_is_reported() {
        let mut detector = GrowthDetector::default();
        let mut found = Vec::new();
        for step in 1..=40u64 {
            let peaks = TierBytes {
                device: (1 << 30) + step * (8 << 20),
                host: 2 << 30,
                rss: 4 << 30,
            };
            found.extend(detector.observe(step, 600, &[peaks]));
        }
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].rank, found[0].kind.en), (0, "device memory"));
    }
}
