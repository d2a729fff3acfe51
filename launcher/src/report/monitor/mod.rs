//! Time and memory of a rank by phase.
//!
//! The training loop reports the end of each phase; everything since the previous end belongs to it. The engine's
//! time in collectives and in copies between tiers is subtracted from the phase and counted separately. So the parts
//! of a step add up to the step. Nothing is communicated here except in [`Monitor::gather`], which a logged row needs
//! anyway.

pub mod growth;
pub mod memory;
pub mod split;

use crate::memory::Phase;
use std::time::{Duration, Instant};

use engine::comm::{CommError, Communicator, Tag};
use engine::{DeviceTimes, Times, Zero};

use crate::report::TierBytes;
use memory::{MemoryRow, Timeline};
use split::{DeviceSplit, StepSplit};

/// Timer and memory tracker of one rank: seconds and peak bytes by phase, since the last row of the training
/// log.
#[derive(Debug)]
pub struct Monitor {
    mark: Instant,
    engine: Times,
    split: StepSplit,
    memory: Timeline,
    /// Times by the device's clock at the end of the last phase and at the last row.
    device: [DeviceTimes; 2],
}

/// Measurements of all ranks since the last row of the training log. Each list has one entry per rank, in
/// order of rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Gathered {
    /// Number of tokens that each rank processed since the last row.
    pub tokens: Vec<f64>,
    /// Seconds of each rank by part of a step (forward, backward, …), summed over all steps since the last
    /// row.
    pub splits: Vec<StepSplit>,
    /// Busy seconds and copied bytes of each rank's discrete device (a GPU with its own memory) since the
    /// last row. All are zero without discrete devices.
    pub devices: Vec<DeviceSplit>,
    /// Peak bytes of each rank since the last row: device memory, host tier, and resident set of the process.
    pub peaks: Vec<TierBytes>,
}

impl Gathered {
    /// Number of values in the message that each rank sends.
    const NUMBERS: usize = 1 + StepSplit::PARTS + 3 + DeviceSplit::PARTS;

    fn from_messages(messages: &[Vec<f64>]) -> Self {
        let mut gathered = Self {
            tokens: Vec::new(),
            splits: Vec::new(),
            devices: Vec::new(),
            peaks: Vec::new(),
        };
        for message in messages.iter().filter(|m| m.len() == Self::NUMBERS) {
            let (times, bytes) = message[1..].split_at(StepSplit::PARTS);
            gathered.tokens.push(message[0]);
            gathered.splits.push(StepSplit::from_slice(times));
            gathered.peaks.push(TierBytes {
                device: bytes[0] as u64,
                host: bytes[1] as u64,
                rss: bytes[2] as u64,
            });
            let devices = DeviceSplit::from_slice(&bytes[3..]);
            gathered.devices.push(devices);
        }
        gathered
    }
}

impl Monitor {
    /// Monitor of a rank that has just loaded its model. The peaks of the memory pools so far are recorded
    /// under [`Phase::Load`].
    pub fn new(zero: &Zero) -> Self {
        let mut memory = Timeline::default();
        memory.end(Phase::Load, zero.device_pool(), zero.host_pool());
        Self {
            mark: Instant::now(),
            engine: zero.times(),
            split: StepSplit::default(),
            memory,
            device: [zero.device_times(); 2],
        }
    }

    /// Restarts the timer for the next phase. Time and memory peaks since the end of the last phase are
    /// assigned to no phase.
    pub fn begin(&mut self, zero: &Zero) {
        self.memory.pass(zero.device_pool(), zero.host_pool());
        self.mark = Instant::now();
        self.engine = zero.times();
    }

    /// Ends `phase`, which began at the last call of this function or of [`Monitor::begin`].
    ///
    /// Records its seconds if it is part of a step, and its memory peaks unless it is [`Phase::Data`].
    pub fn end(&mut self, phase: Phase, zero: &Zero) {
        let (now, engine) = (Instant::now(), zero.times());
        let elapsed = now.duration_since(self.mark);
        self.split.add(
            phase,
            elapsed,
            engine.since(std::mem::replace(&mut self.engine, engine)),
        );
        self.mark = now;
        self.device[0] = zero.device_times();
        // Waiting for samples has no memory use of its own.
        if phase == Phase::Data {
            self.memory.pass(zero.device_pool(), zero.host_pool());
        } else {
            self.memory.end(phase, zero.device_pool(), zero.host_pool());
        }
    }

    /// Seconds of this rank by part of a step, summed over the steps since the last row of the training log.
    pub fn split(&self) -> StepSplit {
        self.split
    }

    /// Peak bytes of this rank's device and host pools since the start of the process, and its resident bytes
    /// now.
    pub fn peaks(&self) -> TierBytes {
        self.memory.peaks()
    }

    /// Gathers the measurements of all ranks since the last row of the training log, and resets those of this
    /// rank. It is an all-gather, so every rank must call it. `tokens` is the number of tokens that this rank
    /// processed since the last row.
    ///
    /// # Errors
    /// When the exchange fails.
    pub fn gather(&mut self, tokens: u64, comm: &dyn Communicator) -> Result<Gathered, CommError> {
        let bytes = self.memory.window_peaks();
        let mut message = vec![tokens as f64];
        message.extend(self.split.values());
        message.extend([bytes.device, bytes.host, bytes.rss].map(|b| b as f64));
        let [now, before] = self.device;
        message.extend(DeviceSplit::from(now.since(before)).values());
        self.device[1] = now;
        let all = comm.all_gather_f64(&message, Tag::new("tokens", 0))?;
        self.split = StepSplit::default();
        Ok(Gathered::from_messages(&all))
    }

    /// Row for `memory.jsonl`: this rank's memory peaks by phase since the last such row, which are then
    /// reset. `None` if no phase ended since.
    ///
    /// `step` is the number of completed steps, `peaks` the peaks of all ranks for the same row.
    pub fn take_memory(&mut self, step: u64, peaks: Vec<TierBytes>) -> Option<MemoryRow> {
        self.memory.take_row(step, peaks)
    }
}

impl StepSplit {
    /// Adds a phase that took `elapsed`. `engine` is the engine's time in collectives and copies during it.
    fn add(&mut self, phase: Phase, elapsed: Duration, engine: Times) {
        let part = match phase {
            Phase::Data => &mut self.data,
            Phase::Forward => &mut self.forward,
            Phase::Backward => &mut self.backward,
            Phase::Step => &mut self.step,
            // These phases are not part of a step.
            Phase::Load | Phase::Eval | Phase::Save => return,
        };
        // The two clocks may differ by the time between their readings.
        let offload = engine.offload.min(elapsed);
        let communication = engine.communication.min(elapsed - offload);
        *part += (elapsed - offload - communication).as_secs_f64();
        self.offload += offload.as_secs_f64();
        self.communication += communication.as_secs_f64();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(communication: u64, offload: u64) -> Times {
        Times {
            communication: Duration::from_millis(communication),
            offload: Duration::from_millis(offload),
        }
    }

    #[test]
    fn parts_of_a_step_add_up_to_its_time() {
        let mut split = StepSplit::default();
        let phases = [
            (Phase::Data, 10, times(0, 0)),
            (Phase::Forward, 100, times(30, 20)),
            (Phase::Backward, 200, times(50, 10)),
            (Phase::Step, 40, times(5, 0)),
        ];
        for (phase, elapsed, engine) in phases {
            split.add(phase, Duration::from_millis(elapsed), engine);
        }
        let expected = StepSplit {
            data: 0.01,
            forward: 0.05,
            communication: 0.085,
            backward: 0.14,
            step: 0.035,
            offload: 0.03,
        };
        for (value, expected) in split.values().iter().zip(expected.values()) {
            assert!((value - expected).abs() < 1e-12, "{split:?}");
        }
        assert!((split.total() - 0.35).abs() < 1e-12, "{split:?}");
    }

    #[test]
    fn no_part_is_negative_and_evaluation_is_no_part_of_a_step() {
        let mut split = StepSplit::default();
        split.add(Phase::Forward, Duration::from_millis(10), times(50, 4));
        assert!((split.total() - 0.01).abs() < 1e-12, "{split:?}");
        assert!(split.values().iter().all(|part| *part >= 0.0), "{split:?}");
        let before = split;
        split.add(Phase::Eval, Duration::from_secs(9), times(1, 1));
        assert_eq!(split, before);
    }

    #[test]
    fn messages_of_ranks_round_trip() {
        let message = |rank: f64| {
            let mut numbers = vec![100.0 + rank];
            numbers.extend((1..=6).map(|part| f64::from(part) + rank));
            numbers.extend([1e9 + rank, 2e9, 3e9]);
            numbers.extend((1..=8).map(|part| f64::from(part) - rank));
            numbers
        };
        let gathered = Gathered::from_messages(&[message(0.0), message(1.0)]);
        assert_eq!(gathered.tokens, [100.0, 101.0]);
        assert_eq!(gathered.splits[1].values(), [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        let want = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        assert_eq!(gathered.devices[1].values(), want);
        assert_eq!(gathered.peaks[1].device, 1_000_000_001);
        assert_eq!(
            (gathered.peaks[0].host, gathered.peaks[0].rss),
            (2_000_000_000, 3_000_000_000)
        );
    }
}
