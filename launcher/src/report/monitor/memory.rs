//! Highest memory of one rank by phase, and what it consisted of.

use crate::memory::{self, Kinds, Phase};
use std::collections::BTreeMap;

use kernels::{Pool, PoolStats, Tag};
use serde::{Deserialize, Serialize};

use crate::report::TierBytes;

/// The highest use of one pool.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PoolPeak {
    /// Most bytes in use at once.
    pub bytes: u64,
    /// What they were at that moment: the cause of the peak.
    pub at_peak: Kinds,
    /// Most bytes of each kind, at whatever moment.
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

    /// The largest kinds at the peak, largest first.
    pub fn causes(&self, most: usize) -> Vec<(&str, u64)> {
        let kinds = self.at_peak.iter();
        let mut kinds: Vec<(&str, u64)> = kinds.map(|(kind, bytes)| (&**kind, *bytes)).collect();
        kinds.sort_by_key(|(kind, bytes)| (std::cmp::Reverse(*bytes), *kind));
        kinds.truncate(most);
        kinds
    }
}

/// The highest memory of one phase.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PhasePeak {
    /// Device memory.
    pub device: PoolPeak,
    /// Host tier.
    pub host: PoolPeak,
    /// Resident bytes of the process, highest of those read at the ends of the phase.
    pub rss: u64,
}

/// A row of `memory.jsonl`: what happened since the row before it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemoryRow {
    /// Steps done.
    pub step: u64,
    /// Peaks of rank 0 by phase.
    pub phases: BTreeMap<String, PhasePeak>,
    /// Peaks of every rank; empty where ranks exchanged nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<TierBytes>,
}

/// Peaks of one rank while it runs. It owns the high-water marks of the pools: nobody else may
/// reset them.
#[derive(Debug, Default)]
pub(super) struct Timeline {
    phases: BTreeMap<Phase, PhasePeak>,
    /// Since the last row, all phases and what lies between them.
    window: TierBytes,
    /// Since the start.
    highest: TierBytes,
}

impl Timeline {
    /// Ends a phase.
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

    /// Ends a stretch that belongs to no phase.
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

    /// Highest bytes in the pools so far, and what is resident now.
    pub(super) fn peaks(&self) -> TierBytes {
        TierBytes {
            rss: memory::resident_bytes(),
            ..self.highest
        }
    }

    /// Highest bytes since the last row.
    pub(super) fn window_peaks(&mut self) -> TierBytes {
        std::mem::take(&mut self.window)
    }

    /// The phases since the last row.
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
    fn every_phase_has_its_own_peak_and_the_whole_keeps_the_highest() {
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
    fn a_later_lower_peak_changes_nothing_but_kinds_of_their_own() {
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
