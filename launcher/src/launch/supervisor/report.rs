//! Derives one failure from the ends of all rank processes.

use crate::lang::{Text, both, text};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;

use crate::error::{ErrorCode, Failure, continue_run, file_name};
use crate::units::bytes;
use engine::checkpoint;

use super::vitals::{Machine, OomKills, Seen};

/// Maximum number of quoted log lines of a rank that left no failure.
const QUOTED_LINES: usize = 8;

/// End of one rank. Lists of it are in the order of the ends.
#[derive(Debug, Clone)]
pub(super) struct Ending {
    pub(super) rank: usize,
    pub(super) status: ExitStatus,
    /// Whether the supervisor had already begun to end all ranks.
    pub(super) was_aborted: bool,
    pub(super) tail: Vec<String>,
}

impl Ending {
    /// Whether the rank succeeded, or saved and stopped on request.
    pub(super) fn is_good(&self) -> bool {
        self.status.success() || self.is_interrupted()
    }

    /// Whether the process died or hung: a signal, a panic, a broken exchange.
    pub(super) fn died(&self) -> bool {
        match self.status.code().map(ErrorCode::from_status) {
            // A signal, or an exit status that this program does not use.
            None | Some(None) => true,
            Some(Some(code)) => matches!(
                code,
                ErrorCode::Panic | ErrorCode::RankDied | ErrorCode::Collective
            ),
        }
    }

    pub(super) fn is_interrupted(&self) -> bool {
        self.status.code() == Some(i32::from(ErrorCode::Interrupted.status()))
    }
}

/// Failure of one rank: the one it saved, or one derived from its end.
pub(super) fn explain(
    ending: &Ending,
    machine: &Machine,
    output: &Path,
    suggestions: &dyn Fn(&mut Failure),
) -> Failure {
    let rank = ending.rank;
    let details = Failure::path(output, rank);
    let (mut failure, quoted) = of_rank(ending, machine, output, true);
    if failure.details.is_none() {
        if quoted {
            let from = ending.tail.len().saturating_sub(QUOTED_LINES);
            failure.evidence.extend(
                ending.tail[from..]
                    .iter()
                    .map(|line| Text::literal(format_args!("| {line}"))),
            );
        }
        if failure.code == ErrorCode::Collective {
            let others = machine.ranks.iter().filter(|seen| seen.rank != rank);
            failure.evidence.extend(others.filter_map(Seen::condition));
        }
        // They save memory, which does not help if enough of it was free.
        if ending.status.signal() != Some(9) || may_lack_memory(machine) {
            suggestions(&mut failure);
        }
        failure = with_commands(failure, output);
        // The saved failure has all details. The printed one refers to it.
        drop(failure.save(output, rank));
        failure = failure.details(details);
    }
    failure
}

/// Failure of one rank, with its number in the title, and whether it left none of its own or was killed. `trains`: the
/// ranks train, so their logs stay and the run can be resumed. Those of `eval` leave nothing.
pub(super) fn of_rank(
    ending: &Ending,
    machine: &Machine,
    output: &Path,
    trains: bool,
) -> (Failure, bool) {
    let rank = ending.rank;
    let own = Failure::load(output, rank);
    let quoted = own.is_none() || ending.status.signal().is_some();
    let mut failure = match (own, ending.status.signal(), ending.status.code()) {
        // A rank that saved a failure and exited ended by itself.
        (Some(own), None, _) => own,
        (_, Some(9), _) => killed(rank, machine, trains),
        (_, Some(signal), _) => Failure::new(
            ErrorCode::RankDied,
            text!(
                "rank {rank} was terminated by signal {signal} ({})",
                "rank {rank} 被信号 {signal}（{}）终止",
                signal_name(signal)
            ),
            both(
                "the process crashed, or somebody sent the signal",
                "进程崩溃，或有人发送了该信号",
            ),
        )
        .next(look_at_log(rank, trains)),
        (None, None, code) => {
            let code = code.unwrap_or(-1);
            Failure::new(
                ErrorCode::from_status(code).unwrap_or(ErrorCode::RankDied),
                text!(
                    "rank {rank} ended with exit code {code}",
                    "rank {rank} 以退出码 {code} 结束"
                ),
                both("it left no report of its own", "它没有留下自己的报告"),
            )
            .next(look_at_log(rank, trains))
        }
    };
    if failure.details.is_none() && !failure.title.contains("rank ") {
        failure.title = text!("rank {rank}: {}", "rank {rank}：{}", failure.title);
    }
    (failure, quoted)
}

fn look_at_log(rank: usize, trains: bool) -> Text {
    if !trains {
        return both(
            "see `dmesg`, and run the same command again",
            "请查看 `dmesg`，然后重新运行同一命令",
        )
        .into();
    }
    text!(
        "see logs/rank-{rank:04}.log and `dmesg`",
        "请查看 logs/rank-{rank:04}.log 和 `dmesg`"
    )
}

/// The failure with complete command lines, the last of which continues the run where that can help.
fn with_commands(failure: Failure, output: &Path) -> Failure {
    let command = continue_run(output);
    let resumed = ["--resume".to_owned(), output.display().to_string()];
    let failure = failure.complete(&resumed);
    let ends_by_itself = matches!(
        failure.code,
        ErrorCode::Numeric
            | ErrorCode::Samples
            | ErrorCode::Placeholders
            | ErrorCode::Resume
            | ErrorCode::Usage
            | ErrorCode::ModelFiles
            | ErrorCode::NothingToDo
            | ErrorCode::Plan
            | ErrorCode::DataFile
    );
    if ends_by_itself {
        return failure;
    }
    let from = checkpoint::find_latest(output).ok().flatten();
    let from = from.map_or_else(
        || {
            both(
                "starts again: no checkpoint was saved",
                "从头开始：没有保存过检查点",
            )
            .into()
        },
        |directory| text!("continues from {}", "从 {} 继续", file_name(&directory)),
    );
    failure.next(text!("{command}   # {from}", "{command}   # {from}"))
}

/// Whether a rank that got SIGKILL may have lacked host memory: the kernel reported it, or less than a tenth of the
/// memory is free after its end.
fn may_lack_memory(machine: &Machine) -> bool {
    let OomKills {
        cgroup,
        machine: on_machine,
    } = machine.oom_kills;
    let memory = &machine.memory;
    cgroup > 0 || on_machine > 0 || memory.free_bytes < memory.total_bytes / 10
}

fn killed(rank: usize, machine: &Machine, trains: bool) -> Failure {
    let OomKills {
        cgroup,
        machine: on_machine,
    } = machine.oom_kills;
    let cause = if cgroup > 0 {
        both(
            "host memory ran out: this is RAM, not GPU memory",
            "主机内存不足：这里指内存（RAM），不是显存",
        )
    } else if on_machine > 0 {
        both(
            "the kernel killed processes on this machine because memory ran out: this is RAM, not GPU memory",
            "因为内存不足，内核杀死了本机的进程：这里指内存（RAM），不是显存",
        )
    } else if may_lack_memory(machine) {
        both(
            "host memory probably ran out (RAM, not GPU memory); the kernel did not report it, so `kill -9` is possible too",
            "很可能是主机内存不足（RAM，不是显存）；内核没有报告，因此也可能是有人执行了 `kill -9`",
        )
    } else {
        both(
            "somebody sent `kill -9`, or a scheduler ended it: the kernel reported no lack of memory, and enough is free",
            "有人执行了 `kill -9`，或调度器结束了它：内核没有报告内存不足，且空闲内存充足",
        )
    };
    let limit = machine.memory.cgroup_limit_bytes.map_or_else(
        || both("no cgroup limit", "无 cgroup 上限").into(),
        |limit| text!("cgroup limit {}", "cgroup 上限 {}", bytes(limit)),
    );
    let mut failure = Failure::new(
        ErrorCode::HostMemory,
        text!(
            "rank {rank} was killed by the operating system (signal 9)",
            "rank {rank} 被操作系统杀死（信号 9）"
        ),
        cause,
    )
    .evidence(text!(
        "{limit} · oom_kill +{cgroup} (machine +{on_machine}) · host {} · free now {}",
        "{limit} · oom_kill +{cgroup}（整机 +{on_machine}）· 主机内存 {} · 当前空闲 {}",
        bytes(machine.memory.total_bytes),
        bytes(machine.memory.free_bytes)
    ));
    if !machine.ranks.is_empty() {
        let seen: Vec<_> = machine
            .ranks
            .iter()
            .map(|seen| {
                let before = if seen.seconds_before < 0.1 {
                    Text::default()
                } else {
                    text!(" ({:.1} s before)", "（{:.1} 秒前）", seen.seconds_before)
                };
                let rss = bytes(seen.rss_bytes);
                text!("rank {} {rss}{before}", "rank {} {rss}{before}", seen.rank)
            })
            .collect();
        failure = failure.evidence(text!(
            "resident memory: {}",
            "常驻内存：{}",
            Text::join(&seen, " · ")
        ));
    }
    failure.next(match (may_lack_memory(machine), trains) {
        (true, true) => both("or use a machine with more memory", "或使用内存更大的机器"),
        (true, false) => both("use a machine with more memory", "使用内存更大的机器"),
        (false, true) => both(
            "with --max-restarts 3 a run starts again by itself after such an end",
            "加上 --max-restarts 3 后，运行在这样结束时会自动重新开始",
        ),
        (false, false) => both("run the same command again", "重新运行同一命令"),
    })
}

/// The ending of the first rank whose failure does not follow from another rank's failure. Ranks that ended during
/// the abort do not count.
pub(super) fn first_failure<'a>(endings: &'a [Ending], output: &Path) -> Option<&'a Ending> {
    let consequence = |ending: &Ending| {
        ending.was_aborted
            || Failure::load(output, ending.rank).map_or_else(
                || {
                    ending
                        .status
                        .code()
                        .and_then(ErrorCode::from_status)
                        .is_some_and(ErrorCode::is_consequence)
                },
                |own| own.code.is_consequence(),
            )
    };
    let bad = || endings.iter().filter(|ending| !ending.is_good());
    bad()
        .find(|ending| !consequence(ending))
        .or_else(|| bad().next())
}

pub(super) fn signal_name(signal: i32) -> &'static str {
    signal_hook::low_level::signal_name(signal).unwrap_or("unknown")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::HostMemory;

    fn ending(rank: usize, raw: i32) -> Ending {
        Ending {
            rank,
            status: ExitStatus::from_raw(raw),
            was_aborted: false,
            tail: vec!["last words".into()],
        }
    }

    fn machine(oom_kills: u64) -> Machine {
        let memory = HostMemory {
            total_bytes: 1 << 36,
            free_bytes: 1 << 30,
            cgroup_limit_bytes: None,
        };
        Machine {
            memory,
            oom_kills: OomKills {
                cgroup: oom_kills,
                machine: oom_kills,
            },
            ranks: vec![Seen {
                rank: 0,
                process: 7,
                rss_bytes: 1 << 30,
                seconds_before: 0.5,
                state: Some('T'),
            }],
        }
    }

    #[test]
    fn a_sigkill_is_reported_as_exhausted_host_memory() {
        let directory = tempfile::tempdir().expect("temp dir");
        let failure = explain(&ending(1, 9), &machine(1), directory.path(), &|_| ());
        assert_eq!(failure.code.status(), 12);
        assert!(failure.cause.starts_with("host memory ran out"));
        let text = failure.to_string();
        assert!(
            text.contains("oom_kill +1")
                && text.contains("rank 0 1.0G (0.5 s before)")
                && text.contains("| last words"),
            "{text}"
        );
        assert!(Failure::load(directory.path(), 1).is_some());
        crate::lang::assert_chinese(&failure);
        let failure = explain(&ending(1, 11), &machine(0), directory.path(), &|_| ());
        assert_eq!(failure.code.as_str(), "E20");
        crate::lang::assert_chinese(&failure);
    }

    #[test]
    fn a_sigkill_with_free_memory_is_no_reason_to_save_memory() {
        let directory = tempfile::tempdir().expect("temp dir");
        let mut machine = machine(0);
        let suggestions = |failure: &mut Failure| failure.next.push("save memory".into());
        let short = explain(&ending(1, 9), &machine, directory.path(), &suggestions);
        assert!(short.next.contains(&"save memory".into()), "{short}");
        machine.memory.free_bytes = machine.memory.total_bytes / 2;
        let other = tempfile::tempdir().expect("temp dir");
        let failure = explain(&ending(1, 9), &machine, other.path(), &suggestions);
        assert_eq!(failure.code.status(), 12);
        assert!(failure.cause.contains("kill -9"), "{failure}");
        assert!(failure.next[0].contains("--max-restarts"), "{failure}");
        assert!(failure.next[1].contains("--resume"), "{failure}");
        assert_eq!(failure.next.len(), 2, "{failure}");
        let evaluated = of_rank(&ending(1, 9), &machine, other.path(), false).0;
        assert_eq!(evaluated.next, ["run the same command again"]);
        let evaluated = of_rank(&ending(1, 11), &machine, other.path(), false).0;
        assert!(!evaluated.to_string().contains("logs/"), "{evaluated}");
    }

    #[test]
    fn other_signals_and_codes_are_named() {
        let directory = tempfile::tempdir().expect("temp dir");
        let failure = explain(&ending(0, 11), &machine(0), directory.path(), &|_| ());
        assert!(failure.title.contains("SIGSEGV"), "{failure}");
        let failure = explain(&ending(2, 77 << 8), &machine(0), directory.path(), &|_| ());
        assert!(failure.title.contains("exit code 77") && failure.code == ErrorCode::RankDied);
    }

    #[test]
    fn the_failure_saved_by_a_rank_takes_precedence() {
        let directory = tempfile::tempdir().expect("temp dir");
        let own = Failure::new(ErrorCode::Numeric, "loss is NaN at step 3", "overflow")
            .evidence("norm 97");
        own.save(directory.path(), 1).expect("saved");
        let failure = explain(&ending(1, 15 << 8), &machine(0), directory.path(), &|_| ());
        assert_eq!(failure.title, "rank 1: loss is NaN at step 3");
        assert_eq!(
            (failure.code, failure.evidence.len()),
            (ErrorCode::Numeric, 1)
        );
    }

    #[test]
    fn a_stall_shows_the_states_of_the_others_and_adds_suggestions() {
        let directory = tempfile::tempdir().expect("temp dir");
        let own = Failure::new(ErrorCode::Collective, "rank 1 waits for rank 0", "stopped");
        own.save(directory.path(), 1).expect("saved");
        let suggestions = |failure: &mut Failure| failure.next.push("an idea".into());
        let failure = explain(
            &ending(1, 14 << 8),
            &machine(0),
            directory.path(),
            &suggestions,
        );
        assert!(failure.evidence[0].contains("process 7 is stopped by a signal"));
        let command = continue_run(directory.path());
        let again = format!("{command}   # starts again: no checkpoint was saved");
        assert_eq!(failure.next, ["an idea".to_owned(), again]);
        let stored = Failure::load(directory.path(), 1).expect("stored");
        assert_eq!(
            (stored.evidence, stored.next),
            (failure.evidence, failure.next)
        );
    }

    #[test]
    fn consequences_do_not_hide_the_cause() {
        let directory = tempfile::tempdir().expect("temp dir");
        let mut endings = vec![ending(0, 14 << 8), ending(2, 130 << 8), ending(1, 15 << 8)];
        assert_eq!(
            first_failure(&endings, directory.path()).map(|ending| ending.rank),
            Some(1)
        );
        endings.pop();
        assert_eq!(
            first_failure(&endings, directory.path()).map(|ending| ending.rank),
            Some(0)
        );
        assert!(
            first_failure(&endings[1..], directory.path()).is_none(),
            "saved and stopped is no failure"
        );
        let mut late = ending(3, 15);
        late.was_aborted = true;
        let endings = [late, ending(0, 14 << 8)];
        assert_eq!(
            first_failure(&endings, directory.path()).map(|ending| ending.rank),
            Some(3)
        );
    }
}
