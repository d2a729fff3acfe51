//! Observations of ranks from outside: memory, process state, and kills by the kernel.

use crate::lang::{Text, both, text};
use std::time::Instant;

use crate::memory::{self, HostMemory, ProcessMemory};

/// One observation of a rank process.
#[derive(Debug, Clone, Copy)]
struct Look {
    at: Instant,
    process: u32,
    memory: ProcessMemory,
    state: Option<char>,
}

/// The last observation of every rank's process, indexed by rank.
#[derive(Debug)]
pub(super) struct Vitals {
    last: Vec<Option<Look>>,
}

/// Number of kills for lack of memory, in this process's cgroup and on the machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct OomKills {
    pub(super) cgroup: u64,
    pub(super) machine: u64,
}

impl OomKills {
    pub(super) fn now() -> Self {
        Self {
            cgroup: memory::oom_kills(),
            machine: memory::machine_oom_kills(),
        }
    }

    fn since(self, before: Self) -> Self {
        Self {
            cgroup: self.cgroup.saturating_sub(before.cgroup),
            machine: self.machine.saturating_sub(before.machine),
        }
    }
}

/// Last observation of one rank, and its age at the first failure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    pub(super) rank: usize,
    pub(super) process: u32,
    pub(super) rss_bytes: u64,
    pub(super) seconds_before: f64,
    /// State of the process, as a letter of [`memory::process_state`].
    pub(super) state: Option<char>,
}

/// Observations of the machine at the first failure.
#[derive(Debug, Clone)]
pub(super) struct Machine {
    pub(super) memory: HostMemory,
    pub(super) oom_kills: OomKills,
    /// Ranks that were observed at least once.
    pub(super) ranks: Vec<Seen>,
}

impl Vitals {
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            last: vec![None; ranks],
        }
    }

    /// Observes the living ranks. The last observation of an ended rank stays.
    pub(super) fn look(&mut self, alive: impl Iterator<Item = (usize, u32)>) {
        for (rank, process) in alive {
            let seen = memory::process_of(process).filter(|memory| memory.rss_bytes > 0);
            if let (Some(memory), Some(last)) = (seen, self.last.get_mut(rank)) {
                *last = Some(Look {
                    at: Instant::now(),
                    process,
                    memory,
                    state: memory::process_state(process),
                });
            }
        }
    }

    pub(super) fn machine(&self, oom_kills_before: OomKills) -> Machine {
        let seen = self.last.iter().enumerate();
        Machine {
            memory: memory::host(),
            oom_kills: OomKills::now().since(oom_kills_before),
            ranks: seen
                .filter_map(|(rank, look)| {
                    let look = (*look)?;
                    Some(Seen {
                        rank,
                        process: look.process,
                        rss_bytes: look.memory.rss_bytes,
                        seconds_before: look.at.elapsed().as_secs_f64(),
                        state: look.state,
                    })
                })
                .collect(),
        }
    }
}

impl Seen {
    /// Meaning of the process state for the other ranks, if it deserves a line.
    pub(super) fn condition(&self) -> Option<Text> {
        let what = match self.state? {
            'T' => both(
                "is stopped by a signal (state T; `kill -CONT` lets it go on)",
                "被信号暂停（状态 T；`kill -CONT` 可让它继续）",
            ),
            't' => both("is held by a debugger (state t)", "被调试器暂停（状态 t）"),
            'D' => both(
                "waits for a device or a network disk (state D)",
                "正在等待设备或网络磁盘（状态 D）",
            ),
            'R' => both("is running (state R)", "正在运行（状态 R）"),
            'S' => both("is asleep (state S)", "处于睡眠（状态 S）"),
            _ => return None,
        };
        Some(text!(
            "rank {}: process {} {what}",
            "rank {}：进程 {} {what}",
            self.rank,
            self.process
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_memory_figures_of_an_ended_rank_stay() {
        let mut vitals = Vitals::new(2);
        vitals.look([(1, std::process::id())].into_iter());
        vitals.look(std::iter::empty());
        vitals.look([(1, u32::MAX)].into_iter());
        let machine = vitals.machine(OomKills::now());
        assert_eq!(machine.oom_kills, OomKills::default());
        let [seen] = machine.ranks.as_slice() else {
            panic!("one rank was seen: {machine:?}")
        };
        assert_eq!((seen.rank, seen.process), (1, std::process::id()));
        assert!(seen.rss_bytes > 0);
        let condition = seen.condition().expect("running");
        assert!(condition.starts_with("rank 1: process "), "{condition}");
    }
}
