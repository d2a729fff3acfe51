//! Injected faults. Each happens at the requested point, is reported as itself, and leaves no files.

use crate::site::{Outcome, Site, assert_says, listing, losses};
use engine::checkpoint::{Checkpoint, audit};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest time a run may take after its fault, including start and end. The timeouts of the ranks are added.
const LIMIT: Duration = Duration::from_secs(30);
const RUN: &str = "--save-steps 1 --lr-scheduler-type constant --nproc 2";

/// Runs with a fault that ends the run. No file or process of the job may be left.
fn broken(site: &Site, line: &str, status: i32, words: &[&str]) -> Outcome {
    let began = Instant::now();
    let before = shared_memory();
    let outcome = site.run(&format!("{RUN} --max-steps 4 {line}"));
    assert!(began.elapsed() < LIMIT, "{line}: {:?}", began.elapsed());
    assert_eq!(outcome.code, Some(status), "{line}\n{}", outcome.screen);
    assert_says(&outcome.screen, &["FAULT INJECTION", "on purpose"]);
    assert_says(&outcome.screen, words);
    let errors = outcome.screen.matches("error[").count();
    assert_eq!(errors, 1, "{line}\n{}", outcome.screen);
    let after = shared_memory();
    let new = after.iter().find(|name| !before.contains(name));
    // Other tests have windows of their own, each with its token.
    let own = new.filter(|name| outcome.screen.contains(*name));
    assert_eq!(own, None);
    outcome
}

fn shared_memory() -> Vec<String> {
    listing(Path::new("/dev/shm"))
}

fn is_whole(site: &Site, checkpoint: &str) -> bool {
    audit(&site.path(checkpoint)).is_ok_and(|found| found.is_whole())
}

#[test]
fn malformed_faults_and_those_that_would_never_happen_are_refused() {
    let site = Site::new();
    for (spec, words) in [
        ("kil:rank=1", "did you mean kill?"),
        ("kill:rank=1,step", "is not KEY=VALUE"),
        ("kill:rank=2", "ranks 0 to 1"),
        ("kill:step=9", "the run has 2 steps"),
        ("slow-link:rank=0", "needs ms"),
        ("disk-full --save-strategy no", "nothing is saved"),
    ] {
        let screen = site.refuse(&format!("--nproc 2 --inject {spec}"), 2, "E09");
        assert_says(&screen, &[words]);
    }
}

#[test]
fn check_26_a_rank_that_dies_is_named_wherever_it_dies() {
    for (phase, step) in [("forward", 3), ("collective", 2), ("save", 2)] {
        let site = Site::new();
        let fault = |kind| format!("--inject {kind}:rank=1,step={step},phase={phase}");
        broken(
            &site,
            &fault("kill"),
            12,
            &["rank 1 was killed", "signal 9"],
        );
        // Earlier checkpoints are intact, and an interrupted save is no checkpoint.
        let before = step - 1;
        assert!(
            is_whole(&site, &format!("out/checkpoint-{before}")),
            "{phase}"
        );
        let names = listing(&site.path("out"));
        assert!(!names.iter().any(|name| name.contains(".tmp")), "{names:?}");
        assert!(!site.path(&format!("out/checkpoint-{step}")).exists());
        let line = fault("panic").replace("rank=1", "rank=0") + " --output panic";
        broken(
            &site,
            &line,
            101,
            &["error[E19]", "rank 0 panicked", "--inject panic"],
        );
        let line = fault("stop") + " --output stop --comm-timeout 2";
        let outcome = broken(&site, &line, 14, &["error[E04]", "waits for rank 1"]);
        assert_says(
            &outcome.screen,
            &[
                "rank 1 was last seen in",
                "is stopped by a signal",
                "its last collectives",
            ],
        );
        // The report names the collective that the waiting rank began last.
        let text = fs::read_to_string(site.path("stop/errors/collectives-0000.txt")).unwrap();
        let began: Vec<&str> = text.lines().filter(|line| line.contains(" #")).collect();
        assert!((2..=64).contains(&began.len()), "{text}");
        let waits = outcome
            .screen
            .lines()
            .find_map(|line| line.split_once("rank 0 waits in "));
        let (_, waits) = waits.unwrap_or_else(|| panic!("{}", outcome.screen));
        let waits = waits.split(' ').find(|word| word.starts_with('#')).unwrap();
        assert!(
            began.iter().any(|line| line.contains(&format!("{waits} "))),
            "{waits}\n{text}"
        );
    }
}

#[test]
fn check_08_a_step_that_is_not_finite_changes_no_state() {
    for (value, line) in [
        ("nan", "--precision f32 --zero 3 --offload cpu"),
        ("inf", "--precision bf16 --zero 2"),
        ("-inf", "--precision pure-bf16 --zero 1"),
        ("nan", "--precision bf16 --zero 3 --offload nvme:disk"),
    ] {
        let site = Site::new();
        fs::create_dir(site.path("disk")).unwrap();
        let line = format!("{RUN} --max-steps 4 {line} --inject nan:rank=1,step=2,value={value}");
        let outcome = site.train(&line);
        let warning = outcome
            .screen
            .lines()
            .find(|l| l.contains("step 2:"))
            .unwrap();
        assert!(warning.contains("skipped on every rank"), "{warning}");
        let state = |step: u64| {
            let directory = site.path(&format!("out/checkpoint-{step}"));
            let checkpoint = Checkpoint::open(&directory).unwrap();
            let files = checkpoint.files().iter();
            let files = files.filter(|file| file.path.ends_with(".safetensors"));
            let updates = checkpoint.meta()["updates"].clone();
            (
                files.map(|file| file.blake3.clone()).collect::<Vec<_>>(),
                updates,
            )
        };
        assert_eq!(state(1), state(2), "{line}");
        assert_ne!(state(2).0, state(3).0, "{line}");
        assert_eq!(losses(&site.path("out")).len(), 4);
    }
}

#[test]
fn check_23_a_full_disk_ends_the_run_and_keeps_what_was_saved() {
    for rank in [0, 1] {
        let site = Site::new();
        let line = format!("--inject disk-full:rank={rank},step=2");
        let words = ["error[E13]", "no space left", "needs ", "checkpoint-2"];
        let outcome = broken(&site, &line, 16, &words[..3]);
        assert_says(
            &outcome.screen,
            &["earlier checkpoints are intact", "launcher --resume "],
        );
        assert!(is_whole(&site, "out/checkpoint-1"));
        let names = listing(&site.path("out"));
        assert!(
            !names.iter().any(|name| name.starts_with("checkpoint-2")),
            "{names:?}"
        );
        site.train(&format!("{RUN} --max-steps 4 --resume auto"));
        assert!(is_whole(&site, "out/checkpoint-4"));
    }
}

#[test]
fn a_short_write_and_a_slow_link_change_nothing_but_time() {
    let site = Site::new();
    site.train(&format!("{RUN} --max-steps 4 --output plain"));
    let line = "--inject short-write:rank=1,step=2 --inject slow-link:rank=1,step=2,ms=1";
    let outcome = site.train(&format!("{RUN} --max-steps 4 {line}"));
    assert_says(
        &outcome.screen,
        &["short-write:rank=1,step=2", "slow-link:rank=1,step=2,ms=1"],
    );
    assert_eq!(losses(&site.path("plain")), losses(&site.path("out")));
    for file in ["model.safetensors", "state/rank-0001.safetensors"] {
        let read = |run: &str| fs::read(site.path(&format!("{run}/checkpoint-2/{file}"))).unwrap();
        assert!(read("plain") == read("out"), "{file}");
    }
    assert!(is_whole(&site, "out/checkpoint-2"));
}

#[test]
fn a_flipped_bit_is_where_the_seed_says_and_is_detected() {
    let flipped = |seed: u64| {
        let site = Site::new();
        site.train(&format!(
            "{RUN} --inject flip-bit:rank=1,step=2,seed={seed}"
        ));
        assert!(is_whole(&site, "out/checkpoint-1"));
        let found = audit(&site.path("out/checkpoint-2")).unwrap();
        assert_eq!(found.problems.len(), 1);
        let problem = found.problems[0].to_string();
        assert!(
            problem.contains("state/rank-0001.safetensors is damaged"),
            "{problem}"
        );
        fs::read(site.path("out/checkpoint-2/state/rank-0001.safetensors")).unwrap()
    };
    let [first, again, other] = [5, 5, 6].map(flipped);
    assert!(first == again, "the same seed flips the same bit");
    let differ =
        |a: &[u8], b: &[u8]| -> u32 { a.iter().zip(b).map(|(a, b)| (a ^ b).count_ones()).sum() };
    // Each file differs from the saved one in one bit, and the two differ from each other in both.
    assert_eq!(differ(&first, &other), 2);
}

#[test]
fn a_cut_link_ends_the_run_within_the_timeout() {
    let site = Site::new();
    let line = "--inject cut-link:rank=1,step=2 --comm-timeout 2";
    broken(&site, line, 14, &["error[E04]", "collective timed out"]);
    assert!(is_whole(&site, "out/checkpoint-1"));
}
