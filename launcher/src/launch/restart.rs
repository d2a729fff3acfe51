//! `--max-restarts`: restarts of a run after one of its ranks died.
//!
//! A restart happens if another attempt may succeed: a process was killed, crashed, panicked or hung. Failures that
//! would recur end the run: mistakes in flags and data, plans that do not fit, a full disk, values that are not
//! finite. A user's signal ends it, too.

use engine::checkpoint;

use crate::config::{CONFIG_FILE, FaultKind, Resume, RunConfig};
use crate::error::Failure;
use crate::error::file_name;
use crate::launch::supervisor::RunFailure;
use crate::report::checkpoints::newest_intact;
use crate::report::run_directory;
use crate::ui::{Event, Screen};

/// Warning that `--collectives auto` uses host memory after all.
pub(crate) fn refused(why: &str) -> Event {
    Event::Warning {
        text: format!(
            "the GPUs of the ranks cannot read each other's memory: {why}; ranks exchange through host memory (shm)"
        ),
    }
}

/// Attempts at one run.
#[derive(Debug)]
pub(crate) struct Attempts {
    config: RunConfig,
    /// The configuration before its plan filled in values.
    unprepared: RunConfig,
    /// Number of attempts that have ended.
    ended: u32,
}

/// Function that checks and plans a changed configuration.
type Prepare<'a> = dyn FnMut(&mut RunConfig, &mut Screen) -> Result<(), Failure> + 'a;

impl Attempts {
    pub(crate) fn new(config: &RunConfig, unprepared: &RunConfig) -> Self {
        Self {
            config: config.clone(),
            unprepared: unprepared.clone(),
            ended: 0,
        }
    }

    /// Configuration of the current attempt.
    pub(crate) fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Prepares another attempt after one that ended with `ended`. Calls `prepare` if the number of ranks shrinks.
    ///
    /// # Errors
    /// The failure, if the run is over.
    pub(crate) fn again(
        &mut self,
        ended: RunFailure,
        prepare: &mut Prepare<'_>,
        screen: &mut Screen,
    ) -> Result<(), Failure> {
        let RunFailure { failure, died } = ended;
        let mut failure = *failure;
        let allowed = self.config.max_restarts;
        if allowed == 0 || !died {
            return Err(failure);
        }
        if self.ended == allowed {
            failure = failure.evidence(format!(
                "the run was already restarted {allowed} times (--max-restarts {allowed})"
            ));
            return Err(failure);
        }
        let lost = self.lost_ranks();
        if lost > 0 && !self.config.elastic {
            failure = failure
                .evidence("that rank is lost permanently and was not restarted")
                .next("--elastic continues with the remaining ranks");
            return Err(failure);
        }
        self.ended += 1;
        run_directory::set_errors_aside(&self.config.output, self.ended)?;
        let from = self.newest(screen);
        self.forget_past_faults();
        if lost > 0 {
            self.shrink(lost, &failure)?;
        }
        screen.show(&Event::Warning {
            text: format!(
                "{} ({}); restart {} of {} on {} ranks: {}",
                failure.title, failure.code, self.ended, allowed, self.config.nproc, from
            ),
        });
        if lost > 0 {
            self.unsettle();
            prepare(&mut self.config, screen)?;
            self.config.save_to(&self.config.output.join(CONFIG_FILE))?;
        }
        Ok(())
    }

    /// Resets what the last plan decided because it fit, so that the next plan decides again.
    fn unsettle(&mut self) {
        self.config.early_step = self.unprepared.early_step;
        self.config.upload_ahead = self.unprepared.upload_ahead;
    }

    /// Plans the run with collectives through host memory, after ranks whose GPUs could not read each other's memory
    /// ended without a step. The plan decides again.
    ///
    /// # Errors
    /// The run does not fit that way, or its directory cannot be written.
    pub(crate) fn through_host(
        &mut self,
        why: String,
        prepare: &mut Prepare<'_>,
        screen: &mut Screen,
    ) -> Result<(), Failure> {
        screen.show(&refused(&why));
        if self.ended == 0 {
            self.config = self.unprepared.clone();
        }
        self.unsettle();
        self.config.ipc_refused = Some(why);
        prepare(&mut self.config, screen)?;
        self.config.save_to(&self.config.output.join(CONFIG_FILE))
    }

    /// Selects the newest intact checkpoint of this run, or else its original start. Returns a text that says which.
    fn newest(&mut self, screen: &mut Screen) -> String {
        let output = &self.config.output;
        let Some(folder) = newest_intact(output, None) else {
            return match &self.config.resume {
                Resume::From(path) => format!("again from {}", path.display()),
                _ => "from the beginning, because no checkpoint was saved".to_owned(),
            };
        };
        let all = checkpoint::list(output).unwrap_or_default();
        let newer = all.iter().rev().take_while(|(_, other)| *other != folder);
        for (_, damaged) in newer {
            let text = format!("{} is damaged and is skipped", file_name(damaged));
            screen.show(&Event::Warning { text });
        }
        let name = file_name(&folder);
        self.config.resume = Resume::From(folder);
        format!("continuing from {name}")
    }

    /// Number of ranks that injected faults of this attempt declare lost.
    fn lost_ranks(&self) -> usize {
        let faults = self.config.inject.iter();
        let lost = faults.filter(|fault| fault.lost && fault.kind == FaultKind::Kill);
        lost.count().min(self.config.nproc - 1)
    }

    /// Removes injected faults that past attempts have used up.
    fn forget_past_faults(&mut self) {
        for fault in &mut self.config.inject {
            fault.times -= 1;
        }
        self.config.inject.retain(|fault| fault.times > 0);
    }

    /// Reduces the ranks and gives each more micro-batches. The global batch, and so the order of the data, stays the
    /// same.
    fn shrink(&mut self, lost: usize, failure: &Failure) -> Result<(), Failure> {
        let config = &mut self.config;
        let micro_batches = config.micro_batches();
        let left = config.nproc - lost;
        // One rank always divides the micro-batches.
        let nproc = (1..=left).rev().find(|n| micro_batches.is_multiple_of(*n));
        let Some(nproc) = nproc else {
            return Err(failure.clone());
        };
        config.nproc = nproc;
        // The batch size stays, even if it was found automatically.
        config.batch.find_batch = false;
        config.batch.accumulation_steps = micro_batches / nproc;
        config.inject.retain(|fault| fault.rank < nproc);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Args;
    use crate::cli::resolve;
    use crate::error::ErrorCode;
    use crate::rank_env::Env;
    use std::path::Path;

    fn attempts(output: &Path, edit: impl FnOnce(&mut Args)) -> Attempts {
        let env = Env::from_lookup(&|_| None).expect("reads");
        let mut args = Args {
            output: Some(output.to_owned()),
            nproc: Some(4),
            gradient_accumulation_steps: Some(3),
            max_restarts: Some(2),
            ..Args::default()
        };
        edit(&mut args);
        let config = resolve(&args, &env).expect("resolves").config;
        Attempts::new(&config, &config)
    }

    fn ended(died: bool) -> RunFailure {
        RunFailure {
            failure: Box::new(Failure::new(ErrorCode::RankDied, "rank 1 died", "a test")),
            died,
        }
    }

    fn fault(text: &str) -> crate::config::Fault {
        text.parse().expect("a fault")
    }

    #[test]
    fn only_deaths_of_ranks_are_restarted_and_at_most_max_restarts_times() {
        let folder = tempfile::tempdir().expect("temp dir");
        let mut attempts = attempts(folder.path(), |_| ());
        let (mut screen, prepare) = (Screen::on_stderr(true), &mut |_: &mut _, _: &mut _| Ok(()));
        attempts
            .again(ended(false), prepare, &mut screen)
            .expect_err("decided");
        for _ in 0..2 {
            attempts
                .again(ended(true), prepare, &mut screen)
                .expect("again");
        }
        let failure = attempts
            .again(ended(true), prepare, &mut screen)
            .expect_err("over");
        assert!(failure.evidence[0].contains("2 times"), "{failure}");
        assert_eq!(attempts.config().resume, Resume::No);
    }

    #[test]
    fn fewer_ranks_keep_the_global_batch() {
        let folder = tempfile::tempdir().expect("temp dir");
        let mut attempts = attempts(folder.path(), |args| {
            args.elastic = Some(true);
            args.inject = [
                "kill:rank=1,lost=true",
                "nan:rank=0,times=2",
                "nan:rank=3,times=2",
            ]
            .map(fault)
            .to_vec();
        });
        let batch = attempts.config().global_batch();
        let mut asked = 0;
        let mut prepare = |_: &mut RunConfig, _: &mut Screen| {
            asked += 1;
            Ok(())
        };
        let mut screen = Screen::on_stderr(true);
        attempts
            .again(ended(true), &mut prepare, &mut screen)
            .expect("again");
        let config = attempts.config();
        assert_eq!((config.nproc, config.batch.accumulation_steps), (3, 4));
        assert_eq!(config.global_batch(), batch);
        assert_eq!(config.inject, [fault("nan:rank=0")]);
        // Nothing more is lost: the same ranks, and nothing to plan.
        attempts
            .again(ended(true), &mut prepare, &mut screen)
            .expect("again");
        assert_eq!((attempts.config().nproc, asked), (3, 1));
        assert!(attempts.config().inject.is_empty());
    }

    #[test]
    fn a_lost_rank_without_elastic_ends_the_run() {
        let folder = tempfile::tempdir().expect("temp dir");
        let mut attempts = attempts(folder.path(), |args| {
            args.inject = vec![fault("kill:rank=1,lost=true")];
        });
        let mut screen = Screen::on_stderr(true);
        let failure = attempts
            .again(ended(true), &mut |_, _| Ok(()), &mut screen)
            .expect_err("gone");
        assert!(failure.next[0].contains("--elastic"), "{failure}");
    }
}
