//! Check that the checkpoints of a run fit on its disk, made before a weight is read.

use crate::config::{Cadence, RunConfig};
use crate::error::{ErrorCode, Failure};
use crate::lang::{both, text};
use crate::memory::{disk_free_bytes, on_one_disk};
use crate::model::contents::CheckpointBytes;
use crate::report::run_directory;
use crate::ui::Event;
use crate::units::bytes;

/// Bytes that a run's checkpoints need on the disk of the output directory, and the free space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DiskCheck {
    pub(crate) checkpoint: CheckpointBytes,
    /// Maximum number of this run's checkpoints that exist at the same time.
    pub(crate) most: u64,
    /// New checkpoints that must exist at the same time: the one being written and those that `--save-total-limit`
    /// keeps, less the checkpoints already on disk. Without a limit at most one, because a user can remove older
    /// ones.
    pub(crate) certain: u64,
    /// Free bytes, after the run's own spill files. `None` if unknown.
    pub(crate) free: Option<u64>,
    /// Bytes of the run's spill files on the same disk.
    pub(crate) spilled: u64,
}

impl DiskCheck {
    /// Check for a run on this machine that saves `saves` times. All ranks together spill `spilled` bytes.
    pub(crate) fn of(
        config: &RunConfig,
        checkpoint: CheckpointBytes,
        saves: u64,
        spilled: u64,
    ) -> Self {
        let directories = config.offload.directories();
        let spills_here = directories
            .iter()
            .any(|dir| on_one_disk(dir, &config.output));
        let spilled = if spills_here { spilled } else { 0 };
        let free = disk_free_bytes(&config.output).ok();
        let there = run_directory::checkpoints(&config.output).len() as u64;
        // The oldest checkpoint is removed after the newest one is complete.
        // The best checkpoint stays beside the latest.
        let fewest = 1 + usize::from(config.best.is_some_and(|best| best.load));
        let limit = config.save_total_limit.map(|limit| limit.max(fewest));
        let kept = limit.map(|limit| {
            let at_once = limit as u64 + 1;
            saves.min(at_once.saturating_sub(there).max(1))
        });
        Self {
            checkpoint,
            most: kept.unwrap_or(saves),
            certain: kept.unwrap_or(saves.min(1)),
            free: free.map(|free| free.saturating_sub(spilled)),
            spilled,
        }
    }

    /// Check for a described machine, whose disks are unknown. The run saves once.
    pub(crate) const fn elsewhere(checkpoint: CheckpointBytes) -> Self {
        Self {
            checkpoint,
            most: 1,
            certain: 1,
            free: None,
            spilled: 0,
        }
    }

    /// Line of output for this check: a warning if not all checkpoints fit.
    pub(crate) fn event(&self, config: &RunConfig) -> Event {
        let mut text = text!(
            "a checkpoint takes {} (state {}, weights {})",
            "一个检查点占用 {}（训练状态 {}，权重 {}）",
            bytes(self.checkpoint.total()),
            bytes(self.checkpoint.state),
            bytes(self.checkpoint.weights)
        );
        if self.most > 1 {
            text += text!(
                ", {} at once {}",
                "，同时保留 {} 个需要 {}",
                self.most,
                bytes(self.needs(self.most))
            );
        }
        if let Some(free) = self.free {
            text += text!(
                "; {} free on {}",
                "；{1} 上空闲 {0}",
                bytes(free),
                config.output.display()
            );
        }
        let label = both("saves", "保存").into();
        if self.holds(self.most) {
            return Event::Info { label, text };
        }
        let fit = self.free.unwrap_or(0) / self.checkpoint.total().max(1);
        Event::Warning {
            text: text!(
                "the disk has space for only {fit} of {} checkpoints: {text}; --save-total-limit keeps fewer",
                "磁盘空间只够 {} 个检查点中的 {fit} 个：{text}；--save-total-limit 可以少保留一些",
                self.most
            ),
        }
    }

    /// Refuses a run whose checkpoints certainly do not fit.
    ///
    /// # Errors
    /// The disk is too small for [`DiskCheck::certain`] checkpoints (exit 16).
    pub(crate) fn check(&self, config: &RunConfig) -> Result<(), Failure> {
        if self.holds(self.certain) {
            return Ok(());
        }
        let free = bytes(self.free.unwrap_or(0));
        let mut failure = Failure::new(
            ErrorCode::Disk,
            both(
                "the disk is too small for the checkpoints; no weight was read",
                "磁盘太小，放不下检查点；没有读取任何权重",
            ),
            text!(
                "{} at once need {} on the disk of {}, {free} are free",
                "同时保留 {} 个在 {2} 所在磁盘上需要 {1}，空闲 {free}",
                self.certain,
                bytes(self.needs(self.certain)),
                config.output.display()
            ),
        )
        .evidence(text!(
            "each: state {} + weights {}",
            "每个：训练状态 {} + 权重 {}",
            bytes(self.checkpoint.state),
            bytes(self.checkpoint.weights)
        ));
        if self.spilled > 0 {
            failure = failure.evidence(text!(
                "spill files will take {} of the same disk",
                "溢出文件还会占用同一磁盘的 {}",
                bytes(self.spilled)
            ));
        }
        failure = failure.next(both(
            "free space on that disk, or choose another disk with --output",
            "请清理该磁盘的空间，或用 --output 选择另一块磁盘",
        ));
        if self.certain > 2 {
            failure = failure.next(both(
                "use a smaller --save-total-limit",
                "请减小 --save-total-limit",
            ));
        }
        Err(failure.next(both(
            "--save-strategy no saves no checkpoint",
            "--save-strategy no 不保存检查点",
        )))
    }

    const fn needs(&self, checkpoints: u64) -> u64 {
        checkpoints * self.checkpoint.total()
    }

    fn holds(&self, checkpoints: u64) -> bool {
        self.free.is_none_or(|free| self.needs(checkpoints) <= free)
    }
}

/// Number of saves in a run of `total` updates, of which an epoch has `epoch`.
pub(crate) fn saves(config: &RunConfig, total: u64, epoch: u64) -> u64 {
    match config.save {
        Cadence::Never => 0,
        Cadence::End => 1,
        Cadence::Steps(_) | Cadence::Share(_) => {
            total.div_ceil(config.save.steps(total).unwrap_or(total))
        }
        Cadence::Epoch => total.div_ceil(epoch.max(1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Args, resolve};
    use crate::rank_env::Env;
    use std::path::Path;

    const EACH: CheckpointBytes = CheckpointBytes {
        state: 800,
        weights: 200,
    };

    fn config(output: &Path, limit: Option<usize>) -> RunConfig {
        let env = Env::from_lookup(&|_| None).expect("reads");
        let args = Args {
            output: Some(output.to_path_buf()),
            save_total_limit: limit,
            save_steps: Some(crate::config::Every::Steps(10)),
            ..Args::default()
        };
        resolve(&args, &env).expect("resolves").config
    }

    #[test]
    fn checkpoints_on_disk_at_once_follow_from_limit_saves_and_existing_ones() {
        let directory = tempfile::tempdir().expect("temp dir");
        let at_once = |limit, saves| {
            let disk = DiskCheck::of(&config(directory.path(), limit), EACH, saves, 0);
            (disk.certain, disk.most)
        };
        assert_eq!(at_once(None, 0), (0, 0));
        assert_eq!(at_once(None, 7), (1, 7));
        assert_eq!(at_once(Some(2), 7), (3, 3));
        assert_eq!(at_once(Some(2), 1), (1, 1));
        for step in [1, 2, 3] {
            std::fs::create_dir(directory.path().join(format!("checkpoint-{step}"))).expect("made");
        }
        assert_eq!(at_once(Some(2), 7), (1, 1), "one goes for each that comes");
    }

    #[test]
    fn a_disk_that_lacks_one_byte_is_refused() {
        let directory = tempfile::tempdir().expect("temp dir");
        for (limit, certain) in [(None, 1), (Some(1), 2)] {
            let config = config(directory.path(), limit);
            let mut disk = DiskCheck::of(&config, EACH, 5, 0);
            disk.free = Some(certain * EACH.total());
            disk.check(&config).expect("enough");
            disk.free = Some(certain * EACH.total() - 1);
            let failure = disk.check(&config).expect_err("too little");
            assert_eq!(failure.code.status(), 16, "{failure}");
        }
        let config = config(directory.path(), None);
        let mut disk = DiskCheck::of(&config, EACH, 5, 0);
        disk.free = Some(4 * EACH.total());
        let Event::Warning { text } = disk.event(&config) else {
            panic!("four of five find room");
        };
        assert!(
            text.starts_with("the disk has space for only 4 of 5 checkpoints"),
            "{text}"
        );
        disk.free = Some(5 * EACH.total());
        assert!(matches!(disk.event(&config), Event::Info { .. }));
    }

    #[test]
    fn spill_files_count_on_the_disk_of_the_checkpoints() {
        let directory = tempfile::tempdir().expect("temp dir");
        let mut config = config(&directory.path().join("out"), None);
        assert_eq!(DiskCheck::of(&config, EACH, 1, 77).spilled, 0);
        config.offload = format!("nvme:{}", directory.path().join("spill").display())
            .parse()
            .expect("an offload");
        assert_eq!(DiskCheck::of(&config, EACH, 1, 77).spilled, 77);
    }

    #[test]
    fn planned_saves_are_those_of_the_training_loop() {
        let directory = tempfile::tempdir().expect("temp dir");
        let mut config = config(directory.path(), None);
        let by_loop = |config: &RunConfig, total: u64, epoch: u64| {
            let due = |step: &u64| config.save.is_due(*step, total, step.is_multiple_of(epoch));
            (1..=total).filter(due).count() as u64
        };
        for cadence in [
            Cadence::Never,
            Cadence::End,
            Cadence::Steps(3),
            Cadence::Share(0.3),
            Cadence::Epoch,
        ] {
            config.save = cadence;
            for total in 1..12 {
                assert_eq!(
                    saves(&config, total, 4),
                    by_loop(&config, total, 4),
                    "{cadence:?} {total}"
                );
            }
        }
    }
}
