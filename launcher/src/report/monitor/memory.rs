//! Peak memory of one rank by phase, and its composition.

use crate::memory::{self, Kinds, Phase};
use std::collections::BTreeMap;

use kernels::{Pool, PoolStats, Tag};
use serde::{Deserialize, Serialize};

use crate::report::TierBytes;

/// Peak use of one memory pool (device or host) of one rank, in total and by kind of memory.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PoolPeak {
    /// Peak: maximum bytes in use in the pool at one time.
    pub bytes: u64,
    /// Bytes in use by each kind of memory at the time of that peak: the composition of the peak.
    pub at_peak: Kinds,
    /// Maximum bytes in use by each kind of memory. Kinds may reach their maxima at different times, so the
    /// sum can exceed `bytes`.
    pub by_kind: Kinds,
}

impl PoolPeak {
    fn fold(&mut self, stats: &PoolStats) {
        let kinds = |bytes: &dyn Fn(Tag) -> u64| -> Kinds {
            let kinds = Tag::ALL
                .iter()
                .map(|tag| (tag.name().to_owned(), bytes(*tag)));
            kinds.filter(|(_, bytes)| *bytes > 0).collect()
        };
        if stats.peak > self.bytes {
            self.bytes = stats.peak;
            self.at_peak = kinds(&|tag| stats.tag(tag).at_peak);
        }
        for (kind, bytes) in kinds(&|tag| stats.tag(tag).peak) {
            let most = self.by_kind.entry(kind).or_default();
            *most = bytes.max(*most);
        }
    }

    /// Largest kinds of memory at the peak as (kind, bytes), in decreasing order, at most `most` of them.
    pub fn causes(&self, most: usize) -> Vec<(&str, u64)> {
        let kinds = self.at_peak.iter();
        let mut kinds: Vec<(&str, u64)> = kinds.map(|(kind, bytes)| (&**kind, *bytes)).collect();
        kinds.sort_by_key(|(kind, bytes)| (std::cmp::Reverse(*bytes), *kind));
        kinds.truncate(most);
        kinds
    }
}

/// Peak memory of one rank in one phase of the run, such as forward.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PhasePeak {
    /// Peak of the device memory pool.
    pub device: PoolPeak,
    /// Peak of the host memory pool, where offloaded states are.
    pub host: PoolPeak,
    /// Maximum resident bytes (RSS) of the process, read whenever the phase ends. For the phase `load` it is
    /// the peak RSS of the process so far.
    pub rss: u64,
}

/// Row of `memory.jsonl`: peak memory since the previous row, of rank 0 by phase and of every rank in total.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemoryRow {
    /// Number of training steps (optimizer updates) completed when the row was written.
    pub step: u64,
    /// Peak memory of rank 0 in each phase, by the phase's name, such as `forward`.
    pub phases: BTreeMap<String, PhasePeak>,
    /// Memory peaks of every rank since the previous row, indexed by rank. Empty if the ranks did not
    /// exchange them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<TierBytes>,
}

/// Peaks of one rank while it runs. It owns the maxima of the pools: nothing else may reset them.
#[derive(Debug, Default)]
pub(super) struct Timeline {
    phases: BTreeMap<Phase, PhasePeak>,
    /// Peaks since the last row, inside and outside of phases.
    window: TierBytes,
    /// Peaks since the start of the process.
    highest: TierBytes,
}

impl Timeline {
    /// Ends a phase and reads its peaks.
    pub(super) fn end(&mut self, phase: Phase, device: &Pool, host: &Pool) {
        let process = if phase == Phase::Load {
            memory::process().peak_rss_bytes
        } else {
            memory::resident_bytes()
        };
        let (on_device, on_host) = self.read(device, host, process);
        let peak = self.phases.entry(phase).or_default();
        peak.device.fold(&on_device);
        peak.host.fold(&on_host);
        peak.rss = peak.rss.max(process);
    }

    /// Ends a time span that belongs to no phase.
    pub(super) fn pass(&mut self, device: &Pool, host: &Pool) {
        self.read(device, host, 0);
    }

    fn read(&mut self, device: &Pool, host: &Pool, rss: u64) -> (PoolStats, PoolStats) {
        let stats = [device, host].map(|pool| {
            let stats = pool.stats();
            pool.reset_peaks();
            stats
        });
        let [device, host] = stats;
        for marks in [&mut self.window, &mut self.highest] {
            marks.device = marks.device.max(device.peak);
            marks.host = marks.host.max(host.peak);
            marks.rss = marks.rss.max(rss);
        }
        (device, host)
    }

    /// Peak bytes of the pools since the start, and resident bytes now.
    pub(super) fn peaks(&self) -> TierBytes {
        TierBytes {
            rss: memory::resident_bytes(),
            ..self.highest
        }
    }

    /// Peak bytes since the last row. Starts anew.
    pub(super) fn window_peaks(&mut self) -> TierBytes {
        std::mem::take(&mut self.window)
    }

    /// Row of the phases since the last row, if any. Starts anew.
    pub(super) fn take_row(&mut self, step: u64, ranks: Vec<TierBytes>) -> Option<MemoryRow> {
        let phases = std::mem::take(&mut self.phases);
        let phases = phases
            .into_iter()
            .map(|(phase, peak)| (phase.name().to_owned(), peak));
        let phases: BTreeMap<String, PhasePeak> = phases.collect();
        (!phases.is_empty()).then_some(MemoryRow {
            step,
            phases,
            ranks,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_has_its_own_peak_and_the_total_is_the_highest() {
        let (device, host) = (Pool::new("device", None), Pool::new("host", None));
        let mut timeline = Timeline::default();
        let weights = host.reserve(500, Tag::Parameters).expect("unlimited");
        timeline.end(Phase::Load, &device, &host);
        let kept = device.reserve(100, Tag::Activations).expect("unlimited");
        drop(device.reserve(40, Tag::Gathered).expect("unlimited"));
        timeline.end(Phase::Forward, &device, &host);
        drop(device.reserve(900, Tag::Workspace).expect("unlimited"));
        timeline.end(Phase::Backward, &device, &host);
        drop(kept);
        timeline.pass(&device, &host);
        assert_eq!(
            (timeline.peaks().device, timeline.peaks().host),
            (1000, 500)
        );
        let window = timeline.window_peaks();
        assert_eq!((window.device, window.host), (1000, 500));
        assert!(window.rss > 0);
        assert_eq!(
            timeline.window_peaks(),
            TierBytes::default(),
            "a new window"
        );

        let row = timeline.take_row(7, Vec::new()).expect("phases ran");
        let names: Vec<&str> = row.phases.keys().map(String::as_str).collect();
        assert_eq!(names, ["backward", "forward", "load"]);
        let forward = &row.phases["forward"].device;
        assert_eq!(forward.bytes, 140);
        assert_eq!(forward.causes(9), [("activations", 100), ("gathered", 40)]);
        let backward = &row.phases["backward"].device;
        assert_eq!(backward.causes(1), [("workspace", 900)]);
        assert_eq!(row.phases["load"].host.by_kind["parameters"], 500);
        assert_eq!(timeline.take_row(8, Vec::new()), None, "nothing ran since");
        drop(weights);
    }

    #[test]
    fn a_lower_peak_changes_only_the_peaks_of_single_tags() {
        let pool = Pool::new("device", None);
        let mut peak = PoolPeak::default();
        drop(pool.reserve(100, Tag::Activations).expect("unlimited"));
        peak.fold(&pool.stats());
        pool.reset_peaks();
        drop(pool.reserve(60, Tag::Workspace).expect("unlimited"));
        peak.fold(&pool.stats());
        assert_eq!(
            (peak.bytes, peak.causes(9)),
            (100, vec![("activations", 100)])
        );
        assert_eq!(peak.by_kind["workspace"], 60);
    }
}
