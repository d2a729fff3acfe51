//! Signals and deaths of processes. Training progress is saved, and no other files are left.

use crate::site::{Site, assert_nothing_left, completed, losses, ranks, signal, wait_for_end};
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

pub(crate) const LONG: &str =
    "--max-steps 1000000 --lr-scheduler-type constant --zero 3 --offload cpu";
const STOP_LIMIT: Duration = Duration::from_secs(10);

#[test]
fn an_interrupted_run_saves_and_can_be_resumed() {
    for name in ["INT", "TERM", "USR1"] {
        let site = Site::new();
        let mut run = site.start(LONG);
        run.wait_for_step();
        let token = site.token();
        assert_eq!(ranks(&token).len(), 2);
        run.signal(name);
        let outcome = run.finish();
        assert_eq!(outcome.code, Some(130), "{}", outcome.screen);
        assert!(
            outcome.screen.contains("launcher --resume "),
            "{}",
            outcome.screen
        );
        assert_nothing_left(&site, &token);
        let done = losses(&site.path("out")).len();
        assert!(site.path(&format!("out/checkpoint-{done}")).is_dir());
        let line = format!("--max-steps {} --resume auto", done + 2);
        site.train(&format!(
            "{line} --lr-scheduler-type constant --zero 3 --offload cpu"
        ));
        assert_eq!(losses(&site.path("out")).len(), done + 2);
    }
}

#[test]
fn a_second_interrupt_ends_at_once() {
    let site = Site::new();
    let mut run = site.start(LONG);
    run.wait_for_step();
    let token = site.token();
    // Stopped ranks cannot save, so the first signal alone does not end the run.
    for (pid, _) in ranks(&token) {
        signal(pid, "STOP");
    }
    run.signal("INT");
    run.wait_for("the answer to the signal", |line| {
        line.contains("another SIGINT (Ctrl-C) stops at once")
    });
    let asked = Instant::now();
    run.signal("INT");
    let outcome = run.finish();
    assert!(asked.elapsed() < STOP_LIMIT);
    assert_eq!(outcome.code, Some(130), "{}", outcome.screen);
    assert_nothing_left(&site, &token);
}

#[test]
fn a_killed_rank_ends_the_run_with_its_name() {
    let site = Site::new();
    let mut run = site.start(LONG);
    run.wait_for_step();
    let token = site.token();
    let (victim, rank) = ranks(&token)[1];
    assert_eq!(rank, 1);
    let killed = Instant::now();
    signal(victim, "KILL");
    let outcome = run.finish();
    assert!(killed.elapsed() < STOP_LIMIT, "{:?}", killed.elapsed());
    assert_eq!(outcome.code, Some(12), "{}", outcome.screen);
    assert!(
        outcome.screen.contains("rank 1 was killed") && outcome.screen.contains("signal 9"),
        "{}",
        outcome.screen
    );
    assert_eq!(
        outcome.screen.matches("error[").count(),
        1,
        "{}",
        outcome.screen
    );
    assert_nothing_left(&site, &token);
    assert!(site.path("out/errors/rank-0001.json").is_file());
}

#[test]
fn a_crashed_rank_is_named_with_its_signal() {
    let site = Site::new();
    let mut run = site.start(LONG);
    run.wait_for_step();
    let token = site.token();
    signal(ranks(&token)[0].0, "ABRT");
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(101), "{}", outcome.screen);
    assert!(
        outcome.screen.contains("rank 0")
            && outcome.screen.contains("SIGABRT")
            && outcome.screen.contains("see logs/rank-0000.log"),
        "{}",
        outcome.screen
    );
    assert_nothing_left(&site, &token);
}

#[test]
fn ranks_end_when_their_supervisor_dies() {
    let site = Site::new();
    let mut run = site.start(LONG);
    run.wait_for_step();
    let token = site.token();
    let left = ranks(&token);
    assert_eq!(left.len(), 2);
    run.signal("KILL");
    assert_eq!(run.finish().signal, Some(9));
    for (pid, _) in left {
        wait_for_end(pid, STOP_LIMIT);
    }
    assert_nothing_left(&site, &token);
}

#[test]
fn the_next_job_removes_what_a_job_left_that_was_killed_as_a_whole() {
    let site = Site::new();
    let mut run = site.start(LONG);
    run.wait_for_step();
    let token = site.token();
    let left = ranks(&token);
    // A stopped supervisor cannot clean up after its ranks.
    run.signal("STOP");
    left.iter().for_each(|(pid, _)| signal(*pid, "KILL"));
    run.signal("KILL");
    assert_eq!(run.finish().signal, Some(9));
    for (pid, _) in left {
        wait_for_end(pid, STOP_LIMIT);
    }
    assert_eq!(site.token(), token, "the private directory is left");
    // The run checks that the directory for temporary files is empty afterwards.
    site.train("--max-steps 1 --output other");
    assert_nothing_left(&site, &token);
}

#[test]
fn a_run_whose_parent_ignores_hangups_goes_on_after_one() {
    let site = Site::new();
    let mut command = Command::new("sh");
    let line = completed("--max-steps 40 --lr-scheduler-type constant");
    command
        .args(["-c", "trap '' HUP; exec \"$0\" \"$@\""])
        .arg(env!("CARGO_BIN_EXE_tessera_test_launcher"))
        .args(line.split_whitespace());
    let mut run = site.start_command(command);
    run.wait_for_step();
    run.signal("HUP");
    for (pid, _) in ranks(&site.token()) {
        signal(pid, "HUP");
    }
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(0), "{}", outcome.screen);
    assert_eq!(losses(&site.path("out")).len(), 40);
}

/// Number of steps that a stopped run has completed.
fn losses_so_far(site: &Site) -> usize {
    let out = site.path("out");
    if out.join("trainer_log.jsonl").exists() {
        losses(&out).len()
    } else {
        0
    }
}

#[test]
fn a_run_that_diverges_ends_with_its_own_status() {
    let site = Site::new();
    // The short run ends before the limit of skipped updates.
    for (steps, output) in [(100, "long"), (4, "short")] {
        let line = "--learning-rate 1e30 --lr-scheduler-type constant";
        let outcome = site.run(&format!("{line} --max-steps {steps} --output {output}"));
        assert_eq!(outcome.code, Some(15), "{}", outcome.screen);
        for part in ["error[E05]", "--learning-rate", "gradient norm"] {
            assert!(outcome.screen.contains(part), "{part}\n{}", outcome.screen);
        }
    }
}

#[test]
fn a_run_stopped_during_startup_leaves_no_files() {
    // Signals before the ranks start, during the rendezvous, and while the first weights are read.
    for (label, name) in [
        (" plan", "TERM"),
        (" data", "INT"),
        (" comm", "TERM"),
        (" load", "INT"),
    ] {
        let site = Site::new();
        let mut run = site.start(LONG);
        run.wait_for(label, |line| line.starts_with(label));
        run.signal(name);
        let outcome = run.finish();
        // Before the supervisor handles signals, it has nothing to clean up.
        let ended = outcome.code == Some(130) || outcome.signal.is_some();
        assert!(ended, "{label}: {:?}\n{}", outcome.code, outcome.screen);
        if outcome.signal.is_some() {
            assert!(!site.path("out").exists(), "{label}");
        }
        site.assert_tidy();
        // Files of the stopped run do not prevent another run in the directory.
        let done = losses_so_far(&site);
        site.train(&format!(
            "--max-steps {} --resume auto --lr-scheduler-type constant",
            done + 1
        ));
        assert_eq!(losses(&site.path("out")).len(), done + 1, "{label}");
    }
}

/// A shell that may mount in its own namespace, which ends with it. `None` where the system does not allow this to
/// ordinary users.
fn mounting_shell(script: &str) -> Option<Command> {
    let arguments = ["--user", "--map-root-user", "--mount", "sh", "-c"];
    let shell = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(arguments).arg(script);
        command
    };
    let allowed = shell("mount -t tmpfs tmpfs /mnt").output();
    allowed
        .is_ok_and(|output| output.status.success())
        .then(|| shell(script))
}

#[test]
fn an_unwritable_file_ends_the_run() {
    let site = Site::new();
    fs::create_dir(site.path("out")).unwrap();
    // /dev/full takes the place of a file that is written and renamed later.
    std::os::unix::fs::symlink("/dev/full", site.path("out/training_loss.svg.tmp")).unwrap();
    let outcome = site.run("--max-steps 4");
    assert_eq!(outcome.code, Some(16), "{}", outcome.screen);
    for part in ["error[E13]", "No space left", "--output"] {
        assert!(outcome.screen.contains(part), "{part}\n{}", outcome.screen);
    }
}

#[test]
fn a_full_disk_ends_the_run_and_keeps_the_last_checkpoint() {
    let site = Site::new();
    // The disk fits one checkpoint of about 6 MB.
    let script = format!(
        "mkdir small && mount -t tmpfs -o size=10m tmpfs small && {{ \
         '{}' {} --output small/out --max-steps 4 --save-steps 1; \
         echo \"status $?\" >&2; ls small/out >&2; cd small/out/checkpoint-1 && ls . state >&2; }}",
        env!("CARGO_BIN_EXE_tessera_test_launcher"),
        "--model model --data data/samples.json --precision f32"
    );
    let Some(command) = mounting_shell(&script) else {
        // Without such a disk only the failure itself can be tested, not the remaining files.
        return an_unwritable_file_ends_the_run();
    };
    let outcome = site.start_command(command).finish();
    let screen = &outcome.screen;
    for part in [
        "status 16",
        "error[E13]",
        "no space left",
        "  next      ",
        "MANIFEST.json",
    ] {
        assert!(screen.contains(part), "{part}\n{screen}");
    }
    for half in ["\ncheckpoint-2\n", "\ncheckpoint-2.tmp\n"] {
        assert!(!screen.contains(half), "{screen}");
    }
    site.assert_tidy();
}

#[test]
fn a_disk_without_room_for_the_checkpoints_is_found_before_training() {
    // A checkpoint takes about 6 MB. Two exist until the older one is removed.
    for (size, flags) in [
        ("4m", "--max-steps 1"),
        ("10m", "--max-steps 2 --save-steps 1 --save-total-limit 1"),
    ] {
        let site = Site::new();
        let script = format!(
            "mkdir small && mount -t tmpfs -o size={size} tmpfs small && {{ \
             '{}' {} --output small/out {flags}; echo \"status $?\" >&2; \
             ls -a small/out >&2; }}",
            env!("CARGO_BIN_EXE_tessera_test_launcher"),
            "--model model --data data/samples.json --precision f32"
        );
        let Some(command) = mounting_shell(&script) else {
            // A unit test of the disk check covers the rule.
            return;
        };
        let outcome = site.start_command(command).finish();
        let screen = &outcome.screen;
        for part in [
            "status 16",
            "error[E13]",
            "no weight was read",
            "--output",
            "--save-strategy no",
            "No such file",
        ] {
            assert!(screen.contains(part), "{part}\n{screen}");
        }
        site.assert_tidy();
    }
}

#[test]
fn two_runs_never_share_a_directory() {
    let site = Site::new();
    let mut first = site.start(LONG);
    first.wait_for_step();
    let second = site.start("--max-steps 1 --resume auto").finish();
    assert_eq!(second.code, Some(2), "{}", second.screen);
    for part in ["is in use", "launcher watch"] {
        assert!(second.screen.contains(part), "{part}\n{}", second.screen);
    }
    first.signal("TERM");
    let outcome = first.finish();
    assert_eq!(outcome.code, Some(130), "{}", outcome.screen);
}

#[test]
fn shared_memory_that_cannot_be_written_falls_back_to_tmpdir() {
    let site = Site::new();
    let script = format!(
        "mount -t tmpfs -o ro,size=64m tmpfs /dev/shm && exec '{}' {} --output out --max-steps 1 --nproc 2",
        env!("CARGO_BIN_EXE_tessera_test_launcher"),
        "--model model --data data/samples.json --precision f32"
    );
    let Some(command) = mounting_shell(&script) else {
        // A unit test covers the choice of the directory.
        return;
    };
    let outcome = site.start_command(command).finish();
    assert_eq!(outcome.code, Some(0), "{}", outcome.screen);
    site.assert_tidy();
}

#[test]
fn too_little_shared_memory_has_its_own_failure() {
    let site = Site::new();
    // The site and the program may be in /tmp, which is hidden. Another mount makes them reachable.
    let script = format!(
        "cp '{}' program && mount --bind . /mnt && mount -t tmpfs -o size=64k tmpfs /dev/shm && \
         mount -t tmpfs -o size=64k tmpfs /tmp && cd /mnt && \
         TMPDIR=/tmp HOME=/mnt/home XDG_CACHE_HOME=/mnt/home/cache \
         ./program {} --output out --max-steps 1",
        env!("CARGO_BIN_EXE_tessera_test_launcher"),
        "--model model --data data/samples.json --precision f32"
    );
    let Some(command) = mounting_shell(&script) else {
        // A unit test covers the message.
        return;
    };
    let outcome = site.start_command(command).finish();
    assert_eq!(outcome.code, Some(13), "{}", outcome.screen);
    for part in [
        "error[E15]",
        "/dev/shm: 64.0K free",
        "--shm-size",
        "--nproc 1",
    ] {
        assert!(outcome.screen.contains(part), "{part}\n{}", outcome.screen);
    }
    site.assert_tidy();
}
