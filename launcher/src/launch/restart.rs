//! `--max-restarts`: restart of a run after one of its ranks died.
//!
//! A restart follows failures that may not repeat: a process that was killed, crashed, panicked or hung. Failures
//! that would repeat end the run at once, for example wrong flags or data, a plan that does not fit, a full disk, or
//! non-finite values. So does a user's signal.

use crate::lang::{Text, both, text};

use crate::config::{BatchConfig, CONFIG_FILE, Fault, FaultKind, Resume, RunConfig, RunPlan};
use crate::error::{Failure, file_name};
use crate::launch::supervisor::RunFailure;
use crate::report::checkpoints::{newest_intact, of_run};
use crate::report::run_directory;
use crate::ui::{Event, Screen};

/// Warning that `--collectives auto` falls back to host memory.
pub(crate) fn refused(why: &str) -> Event {
    Event::Warning {
        text: text!(
            "the GPUs of the ranks cannot read each other's memory: {why}; ranks exchange through host memory (shm)",
            "各 rank 的 GPU 无法互相读取显存：{why}；改为经由主机内存（shm）交换"
        ),
    }
}

/// Line that ranks share a GPU, which the ranks see only together.
pub(crate) fn shared(ranks: usize) -> Event {
    let text = match ranks {
        1 => both("each rank has a GPU of its own", "每个 rank 独占一块 GPU").into(),
        ranks => text!(
            "{ranks} ranks share a GPU: each rank has a part of the memory, and the ranks take turns",
            "{ranks} 个 rank 共用一块 GPU：每个 rank 占一部分显存，轮流使用"
        ),
    };
    Event::Info {
        label: both("device", "设备").into(),
        text,
    }
}

/// Attempts of one run: the first one, and restarts after a rank died or hung.
#[derive(Debug)]
pub(crate) struct Attempts {
    /// Configuration of the run as requested, before any restart.
    asked: RunConfig,
    /// Resolved configuration of the current attempt.
    run: RunPlan,
    /// Number of restarts so far.
    ended: u32,
}

/// Function that checks a changed draft and resolves it.
type Prepare<'a> = dyn FnMut(&RunPlan, &mut Screen) -> Result<RunPlan, Failure> + 'a;

impl Attempts {
    pub(crate) fn new(asked: RunConfig, run: RunPlan) -> Self {
        Self {
            asked,
            run,
            ended: 0,
        }
    }

    /// Resolved configuration of the current attempt.
    pub(crate) fn run(&self) -> &RunPlan {
        &self.run
    }

    /// Prepares another attempt after one that ended with `ended`. Calls `prepare` only if fewer ranks remain.
    ///
    /// # Errors
    /// The failure of the attempt, if the run must not restart.
    pub(crate) fn again(
        &mut self,
        ended: RunFailure,
        prepare: &mut Prepare<'_>,
        screen: &mut Screen,
    ) -> Result<(), Failure> {
        let RunFailure { failure, died } = ended;
        let mut failure = *failure;
        let allowed = self.run.max_restarts;
        if allowed == 0 || !died {
            return Err(failure);
        }
        if self.ended == allowed {
            failure = failure.evidence(text!(
                "the run was already restarted {allowed} times (--max-restarts {allowed})",
                "运行已经重新启动了 {allowed} 次（--max-restarts {allowed}）"
            ));
            return Err(failure);
        }
        let lost = self.lost_ranks();
        if lost > 0 && !self.run.elastic {
            failure = failure
                .evidence(both(
                    "that rank is lost permanently and was not restarted",
                    "该 rank 已永久丢失，没有重新启动",
                ))
                .next(both(
                    "--elastic continues with the remaining ranks",
                    "--elastic 会用剩余的 rank 继续",
                ));
            return Err(failure);
        }
        self.ended += 1;
        run_directory::set_errors_aside(&self.run.output, self.ended)?;
        let (resume, from) = self.newest(screen);
        let mut config = RunConfig {
            resume,
            inject: self.faults_to_come(),
            ..self.run.config().clone()
        };
        if lost > 0 {
            config = fewer_ranks(&config, lost).ok_or_else(|| failure.clone())?;
        }
        screen.show(&Event::Warning {
            text: text!(
                "{} ({}); restart {} of {} on {} ranks: {}",
                "{}（{}）；第 {} 次重新启动（最多 {} 次），使用 {} 个 rank：{}",
                failure.title,
                failure.code,
                self.ended,
                allowed,
                config.world_size,
                from
            ),
        });
        if lost == 0 {
            self.run = self.run.with_config(config);
            return Ok(());
        }
        let refused = self.run.found().ipc_refused.clone();
        self.plan(config, refused, prepare, screen)
    }

    /// Plans the run again with exchange through host memory. Used after ranks found that their GPUs have no peer
    /// access, before any training. All choices of the previous plan are made again.
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
        let config = match self.ended {
            0 => self.asked.clone(),
            _ => self.run.config().clone(),
        };
        self.plan(config, Some(why), prepare, screen)
    }

    /// Resolves the run again and saves it. Choices that depend on spare memory return to the requested setting.
    fn plan(
        &mut self,
        config: RunConfig,
        ipc_refused: Option<String>,
        prepare: &mut Prepare<'_>,
        screen: &mut Screen,
    ) -> Result<(), Failure> {
        let config = RunConfig {
            optimizer_in_backward: self.asked.optimizer_in_backward,
            prefetch_weights: self.asked.prefetch_weights,
            zero: self.asked.zero,
            zero_auto: self.asked.zero_auto,
            ..config
        };
        self.run = prepare(&RunPlan::draft(config, ipc_refused), screen)?;
        self.run.save_to(&self.run.output.join(CONFIG_FILE))
    }

    /// Newest intact checkpoint of this run, or else the original starting point, with its description.
    fn newest(&self, screen: &mut Screen) -> (Resume, Text) {
        let output = &self.run.output;
        let Some(directory) = newest_intact(output, None) else {
            let resume = self.run.resume.clone();
            let from = match &resume {
                Resume::From(path) => text!("again from {}", "再次从 {} 开始", path.display()),
                _ => both(
                    "from the beginning, because no checkpoint was saved",
                    "从头开始，因为没有保存过检查点",
                )
                .into(),
            };
            return (resume, from);
        };
        let all = of_run(output);
        let newer = all
            .iter()
            .rev()
            .take_while(|(_, other)| *other != directory);
        for (_, damaged) in newer {
            let text = text!(
                "{} is damaged and is skipped",
                "{} 已损坏，跳过",
                file_name(damaged)
            );
            screen.show(&Event::Warning { text });
        }
        let from = text!("continuing from {}", "从 {} 继续", file_name(&directory));
        (Resume::From(directory), from)
    }

    /// Number of ranks that injected faults remove for good in this attempt.
    fn lost_ranks(&self) -> usize {
        let faults = self.run.inject.iter();
        let lost = faults.filter(|fault| fault.lost && fault.kind == FaultKind::Kill);
        lost.count().min(self.run.world_size - 1)
    }

    /// Injected faults that still apply to the next attempt.
    fn faults_to_come(&self) -> Vec<Fault> {
        let faults = self.run.inject.iter().map(|fault| Fault {
            times: fault.times - 1,
            ..fault.clone()
        });
        faults.filter(|fault| fault.times > 0).collect()
    }
}

/// Configuration with at least `lost` fewer ranks and more micro-batches for each. The global batch and thus the
/// order of the data stay the same. The number of pipeline stages stays while that many ranks are left. `None` if that is
/// impossible.
fn fewer_ranks(config: &RunConfig, lost: usize) -> Option<RunConfig> {
    let micro_batches = config.micro_batches();
    let left = config.world_size - lost;
    let mp_size = config.mp_size.min(left);
    // One data-parallel rank always works, since 1 divides every number.
    let data_ranks = (1..=left / mp_size)
        .rev()
        .find(|n| micro_batches.is_multiple_of(*n))?;
    let world_size = data_ranks * mp_size;
    let split = config.mp_split.clone();
    let inject = config.inject.iter().filter(|fault| fault.rank < world_size);
    Some(RunConfig {
        world_size,
        mp_size,
        mp_split: split.filter(|split| split.len() == mp_size),
        batch: BatchConfig {
            // The batch size is already found and must not change.
            find_batch: false,
            accumulation_steps: micro_batches / data_ranks,
            ..config.batch
        },
        inject: inject.cloned().collect(),
        ..config.clone()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Args, resolve};
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
        let run = config.draft();
        Attempts::new(config, run)
    }

    fn ended(died: bool) -> RunFailure {
        RunFailure {
            failure: Box::new(Failure::new(ErrorCode::RankDied, "rank 1 died", "a test")),
            died,
        }
    }

    fn fault(text: &str) -> Fault {
        text.parse().expect("a fault")
    }

    #[test]
    fn only_deaths_of_ranks_are_restarted_and_at_most_max_restarts_times() {
        let directory = tempfile::tempdir().expect("temp dir");
        let mut attempts = attempts(directory.path(), |_| ());
        let (mut screen, prepare) = (
            Screen::on_stderr(true),
            &mut |draft: &RunPlan, _: &mut Screen| Ok(draft.clone()),
        );
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
        assert_eq!(attempts.run().resume, Resume::No);
    }

    #[test]
    fn fewer_ranks_keep_the_global_batch() {
        let directory = tempfile::tempdir().expect("temp dir");
        let mut attempts = attempts(directory.path(), |args| {
            args.elastic = Some(true);
            args.inject = [
                "kill:rank=1,lost=true",
                "nan:rank=0,times=2",
                "nan:rank=3,times=2",
            ]
            .map(fault)
            .to_vec();
        });
        let batch = attempts.run().global_batch();
        let mut asked = 0;
        let mut prepare = |draft: &RunPlan, _: &mut Screen| {
            asked += 1;
            Ok(draft.clone())
        };
        let mut screen = Screen::on_stderr(true);
        attempts
            .again(ended(true), &mut prepare, &mut screen)
            .expect("again");
        let config = attempts.run();
        assert_eq!((config.world_size, config.batch.accumulation_steps), (3, 4));
        assert_eq!(config.global_batch(), batch);
        assert_eq!(config.inject, [fault("nan:rank=0")]);
        // Nothing more is lost: the same ranks, and nothing to plan.
        attempts
            .again(ended(true), &mut prepare, &mut screen)
            .expect("again");
        assert_eq!((attempts.run().world_size, asked), (3, 1));
        assert!(attempts.run().inject.is_empty());
    }

    #[test]
    fn pipeline_stages_stay_while_enough_ranks_are_left() {
        let directory = tempfile::tempdir().expect("temp dir");
        for (ranks, stages, split, want) in [
            (4, 2, None, (2, 2, 6, None)),
            (8, 2, Some(vec![3, 4]), (6, 2, 4, Some(vec![3, 4]))),
            (3, 3, Some(vec![1, 1, 5]), (2, 2, 3, None)),
        ] {
            let attempts = attempts(directory.path(), |args| {
                args.nproc = Some(ranks);
                args.mp_size = Some(stages);
                args.mp_split = split;
            });
            let fewer = fewer_ranks(attempts.run(), 1).expect("a configuration");
            let found = (
                fewer.world_size,
                fewer.mp_size,
                fewer.batch.accumulation_steps,
                fewer.mp_split.clone(),
            );
            assert_eq!(found, want, "{ranks} ranks, {stages} stages");
            assert_eq!(fewer.global_batch(), attempts.run().global_batch());
        }
    }

    #[test]
    fn a_lost_rank_without_elastic_ends_the_run() {
        let directory = tempfile::tempdir().expect("temp dir");
        let mut attempts = attempts(directory.path(), |args| {
            args.inject = vec![fault("kill:rank=1,lost=true")];
        });
        let mut screen = Screen::on_stderr(true);
        let failure = attempts
            .again(ended(true), &mut |draft, _| Ok(draft.clone()), &mut screen)
            .expect_err("gone");
        assert!(failure.next[0].contains("--elastic"), "{failure}");
    }
}
