//! The supervisor with real processes: this binary starts itself, once as the program under test
//! with a fake training loop, whose ranks are this binary again.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::exit,
    reason = "helpers of a test binary"
)]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use launcher::config::{RunPlan, Task};
use launcher::device::Devices;
use launcher::error::{ErrorCode, Failure};
use launcher::lang::Text;
use launcher::launch::rank::{RunSummary, StopFlag};
use launcher::rank_env::RankEnv;
use launcher::ui::{Event, Reporter};
use rustix::process::{Pid, Signal, getpid, kill_process, test_kill_process};

/// What the fake ranks do; also tells the program under test from the driver.
const BEHAVIOUR: &str = "TESSERA_FAKE_BEHAVIOUR";
/// Directory where fake ranks leave marks.
const MARKS: &str = "TESSERA_FAKE_MARKS";

fn main() -> ExitCode {
    if std::env::var_os(BEHAVIOUR).is_some() {
        return launcher::run_with(fake_rank);
    }
    drive()
}

// ---- the fake rank ----

fn fake(code: ErrorCode, title: &str) -> Failure {
    Failure::new(code, Text::literal(title), Text::literal("a fake"))
}

fn fake_rank(
    config: &RunPlan,
    rank: &RankEnv,
    stop: &StopFlag,
    _devices: &dyn Devices,
) -> Result<RunSummary, Failure> {
    let marks = PathBuf::from(std::env::var_os(MARKS).unwrap());
    let shared = format!(
        "/dev/shm/{}-{}-{}",
        marks.file_name().unwrap().to_string_lossy(),
        rank.run_token,
        rank.rank
    );
    fs::write(shared, "x").unwrap();
    fs::write(
        marks.join(format!("pid-{}", rank.rank)),
        getpid().as_raw_nonzero().to_string(),
    )
    .unwrap();
    eprintln!("rank {} is up", rank.rank);
    let reporter = Reporter::for_rank(rank);
    match (std::env::var(BEHAVIOUR).unwrap().as_str(), rank.rank) {
        ("fail", 1) => return Err(fake(ErrorCode::Numeric, "loss is NaN")),
        ("panic", 1) => panic!("boom"),
        ("panic-in-thread", 1) => {
            drop(std::thread::spawn(|| panic!("boom")).join());
        }
        ("kill", 1) => kill_process(getpid(), Signal::KILL).unwrap(),
        ("exit", 1) => std::process::exit(77),
        ("stopped", 1) => {
            fs::write(marks.join("ready"), "").unwrap();
            kill_process(getpid(), Signal::STOP).unwrap();
        }
        ("stopped", 0) => {
            until(|| marks.join("ready").exists());
            return Err(fake(ErrorCode::Numeric, "loss is NaN"));
        }
        ("consequence", 0) => {
            return Err(fake(ErrorCode::Collective, "peer is gone"));
        }
        ("consequence", 1) => {
            until(|| Failure::load(&config.output, 0).is_some());
            return Err(fake(ErrorCode::Numeric, "loss is NaN"));
        }
        ("save-and-stop", _) => {
            until(|| stop.is_set());
            return Ok(RunSummary {
                steps: 3,
                interrupted: true,
                ..RunSummary::default()
            });
        }
        ("ok" | "drift", _) => {
            reporter.emit(&Event::TrainStart { total: 2, done: 0 });
            let drift =
                if config.task == Task::Evaluate && std::env::var(BEHAVIOUR).unwrap() == "drift" {
                    1e-16
                } else {
                    0.0
                };
            return Ok(RunSummary {
                steps: 2,
                eval_loss: Some(0.1 + drift),
                checkpoint: Some(config.output.join("checkpoint-2")),
                ..RunSummary::default()
            });
        }
        _ => {}
    }
    // Everybody else would wait for the others for ever.
    loop {
        std::thread::park();
    }
}

/// Waits for a condition that another process brings about.
fn until(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain");
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

// ---- the driver ----

const TESTS: &[(&str, fn(&Bench))] = &[
    ("a_good_run_ends_well_and_proves_its_checkpoint", good_run),
    (
        "a_checkpoint_that_evaluates_differently_is_an_error",
        drifting_run,
    ),
    (
        "a_failing_rank_ends_the_others_with_one_report",
        failing_rank,
    ),
    ("a_panic_is_reported_with_its_message", panicking_rank),
    ("a_panic_in_a_thread_ends_the_rank_too", panicking_thread),
    (
        "a_killed_rank_ends_with_the_status_of_host_memory",
        killed_rank,
    ),
    (
        "an_unknown_exit_code_is_reported_with_the_last_lines",
        exiting_rank,
    ),
    ("a_rank_that_cannot_react_is_killed", stopped_rank),
    ("a_consequence_does_not_hide_its_cause", consequence),
    ("one_interrupt_saves_and_stops", interrupt),
    ("a_second_interrupt_stops_at_once", second_interrupt),
    ("ranks_do_not_outlive_the_supervisor", parent_death),
    (
        "a_rank_of_another_launcher_is_not_supervised",
        foreign_launcher,
    ),
    ("bad_flags_touch_nothing", bad_flags),
];

fn drive() -> ExitCode {
    let filter: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| !word.starts_with('-'))
        .collect();
    if std::env::args().any(|word| word == "--list") {
        TESTS.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let cache = tempfile::tempdir().unwrap();
    let mut failed = 0;
    for (name, test) in TESTS {
        if !filter.is_empty() && !filter.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let bench = Bench::new(cache.path());
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            test(&bench);
            bench.assert_nothing_is_left();
        }));
        println!(
            "test {name} ... {}",
            if result.is_ok() { "ok" } else { "FAILED" }
        );
        failed += u32::from(result.is_err());
    }
    if failed > 0 {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// A private place for one run of the program.
struct Bench {
    cache: PathBuf,
    directory: tempfile::TempDir,
}

struct Outcome {
    code: Option<i32>,
    stderr: String,
    seconds: f64,
}

impl Bench {
    fn new(cache: &Path) -> Self {
        let directory = tempfile::Builder::new()
            .prefix("tessera-test-")
            .tempdir()
            .unwrap();
        for name in ["tmp", "marks"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        Self {
            cache: cache.to_path_buf(),
            directory,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A name that no other test's shared-memory files have.
    fn marks(&self) -> PathBuf {
        let name = self
            .directory
            .path()
            .file_name()
            .unwrap()
            .to_string_lossy()
            .into_owned();
        let marks = self.path("marks").join(name);
        fs::create_dir_all(&marks).unwrap();
        marks
    }

    fn command(&self, behaviour: &str, flags: &[&str]) -> Command {
        // Tests may run where SIGINT is ignored, which the program would keep.
        let mut command = Command::new("env");
        command
            .arg("--default-signal")
            .arg(std::env::current_exe().unwrap())
            .args(["--output", self.path("out").to_str().unwrap()])
            .args(flags)
            .env(BEHAVIOUR, behaviour)
            .env(MARKS, self.marks())
            .env("TMPDIR", self.path("tmp"))
            .env("XDG_CACHE_HOME", &self.cache)
            .env_remove("RUST_LOG")
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, behaviour: &str) -> Outcome {
        let started = Instant::now();
        let output = self.command(behaviour, &["--nproc", "3"]).output().unwrap();
        Outcome {
            code: output.status.code(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            seconds: started.elapsed().as_secs_f64(),
        }
    }

    /// Runs a failing behaviour and checks what every failure has in common.
    fn fails(&self, behaviour: &str, code: i32, words: &[&str]) -> Outcome {
        let outcome = self.run(behaviour);
        assert_eq!(outcome.code, Some(code), "{}", outcome.stderr);
        assert_eq!(
            outcome.stderr.matches("error[").count(),
            1,
            "{}",
            outcome.stderr
        );
        for word in words {
            assert!(
                outcome.stderr.contains(word),
                "{word:?} missing in:\n{}",
                outcome.stderr
            );
        }
        assert!(outcome.seconds < 10.0, "took {} s", outcome.seconds);
        self.assert_no_rank_is_alive();
        outcome
    }

    fn pids(&self) -> Vec<Pid> {
        let entries = fs::read_dir(self.marks()).unwrap().flatten();
        entries
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("pid-"))
            // A file that is just being written is empty.
            .filter_map(|entry| fs::read_to_string(entry.path()).unwrap().parse().ok())
            .filter_map(Pid::from_raw)
            .collect()
    }

    fn assert_no_rank_is_alive(&self) {
        for pid in self.pids() {
            assert!(
                test_kill_process(pid).is_err(),
                "rank process {pid:?} is alive"
            );
        }
    }

    fn assert_nothing_is_left(&self) {
        self.assert_no_rank_is_alive();
        let in_temp: Vec<_> = fs::read_dir(self.path("tmp")).unwrap().flatten().collect();
        assert!(in_temp.is_empty(), "left in TMPDIR: {in_temp:?}");
        let marks = self.marks();
        let name = marks.file_name().unwrap().to_string_lossy();
        let shared: Vec<_> = fs::read_dir("/dev/shm")
            .unwrap()
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().contains(name.as_ref()))
            .collect();
        assert!(shared.is_empty(), "left in /dev/shm: {shared:?}");
    }
}

/// A running program whose screen is read line by line.
struct Running {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStderr>>,
    seen: String,
}

impl Running {
    fn start(bench: &Bench, behaviour: &str) -> Self {
        let mut child = bench.command(behaviour, &["--nproc", "3"]).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut running = Self {
            child,
            lines,
            seen: String::new(),
        };
        running.wait_for("rank 0 is up");
        until(|| bench.pids().len() == 3);
        running
    }

    fn wait_for(&mut self, word: &str) {
        for line in self.lines.by_ref() {
            let line = line.unwrap();
            self.seen += &line;
            self.seen.push('\n');
            if line.contains(word) {
                return;
            }
        }
        panic!("{word:?} never came; screen:\n{}", self.seen);
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn end(mut self) -> (Option<i32>, String) {
        for line in self.lines.by_ref().map_while(Result::ok) {
            self.seen += &line;
            self.seen.push('\n');
        }
        (self.child.wait().unwrap().code(), self.seen)
    }
}

fn good_run(bench: &Bench) {
    let outcome = bench.run("ok");
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    for word in [" train ", "bit for bit", " done ", " next ", "rank 0 is up"] {
        assert!(
            outcome.stderr.contains(word),
            "{word:?} missing in:\n{}",
            outcome.stderr
        );
    }
    assert!(
        !outcome.stderr.contains("rank 1 is up"),
        "only rank 0 speaks on the screen"
    );
    let log = fs::read_to_string(bench.path("out/logs/rank-0001.log")).unwrap();
    assert!(log.contains("rank 1 is up"));
    assert!(bench.path("out/logs/rank-0002.jsonl").exists());
    let config = RunPlan::load_from(&bench.path("out/config.resolved.json")).unwrap();
    assert_eq!((config.world_size, config.task), (3, Task::Train));
    assert!(!bench.path("out/errors").exists());
    let again = bench.run("ok");
    assert_eq!(
        again.code,
        Some(2),
        "a run is not overwritten: {}",
        again.stderr
    );
}

fn drifting_run(bench: &Bench) {
    bench.fails("drift", 9, &["has another evaluation loss", "DIFFERS"]);
}

fn failing_rank(bench: &Bench) {
    bench.fails(
        "fail",
        15,
        &[
            "error[E05] rank 1: loss is NaN",
            "cause",
            "errors/rank-0001.json",
        ],
    );
    assert!(Failure::load(&bench.path("out"), 1).is_some());
}

fn panicking_rank(bench: &Bench) {
    bench.fails("panic", 101, &["rank 1 panicked: boom", "supervisor.rs:"]);
}

fn panicking_thread(bench: &Bench) {
    bench.fails("panic-in-thread", 101, &["rank 1 panicked: boom"]);
}

fn killed_rank(bench: &Bench) {
    bench.fails(
        "kill",
        12,
        &[
            "error[E02] rank 1 was killed",
            "signal 9",
            "`kill -9`",
            "| rank 1 is up",
        ],
    );
}

fn exiting_rank(bench: &Bench) {
    bench.fails(
        "exit",
        101,
        &["rank 1 ended with exit code 77", "| rank 1 is up"],
    );
}

fn stopped_rank(bench: &Bench) {
    bench.fails("stopped", 15, &["rank 0: loss is NaN"]);
}

fn consequence(bench: &Bench) {
    bench.fails("consequence", 15, &["rank 1: loss is NaN"]);
}

fn interrupt(bench: &Bench) {
    let mut running = Running::start(bench, "save-and-stop");
    running.signal(Signal::INT);
    running.wait_for("SIGINT: saving and stopping");
    let (code, screen) = running.end();
    assert_eq!(code, Some(130), "{screen}");
    assert!(
        screen.contains(" stopped ") && screen.contains("next    launcher --resume "),
        "{screen}"
    );
    assert!(!screen.contains("error["), "{screen}");
}

fn second_interrupt(bench: &Bench) {
    let mut running = Running::start(bench, "hang");
    running.signal(Signal::INT);
    running.wait_for("another SIGINT (Ctrl-C) stops at once");
    running.signal(Signal::INT);
    let (code, screen) = running.end();
    assert_eq!(code, Some(130), "{screen}");
    assert!(screen.contains("error[E21]"), "{screen}");
}

fn parent_death(bench: &Bench) {
    let running = Running::start(bench, "hang");
    running.signal(Signal::KILL);
    let (code, _) = running.end();
    assert_eq!(code, None);
    until(|| {
        bench
            .pids()
            .iter()
            .all(|pid| test_kill_process(*pid).is_err())
    });
}

fn foreign_launcher(bench: &Bench) {
    let output = bench
        .command("ok", &[])
        .envs([
            ("RANK", "0"),
            ("LOCAL_RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("MASTER_PORT", "4"),
        ])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(
        stderr.contains(" train "),
        "the rank draws itself: {stderr}"
    );
    assert!(bench.path("out/config.resolved.json").exists());
    // Without a supervisor the shared file is the fake rank's own to remove.
    for entry in fs::read_dir("/dev/shm").unwrap().flatten() {
        if entry
            .file_name()
            .to_string_lossy()
            .contains(bench.marks().file_name().unwrap().to_str().unwrap())
        {
            fs::remove_file(entry.path()).unwrap();
        }
    }
}

fn bad_flags(bench: &Bench) {
    for flags in [
        vec!["--nproc", "0"],
        vec!["--learning-rat", "1"],
        vec!["--bf16", "--precision", "f32"],
    ] {
        let output = bench.command("ok", &flags).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        std::io::sink().write_all(&output.stderr).unwrap();
        assert!(
            !bench.path("out").exists(),
            "{flags:?} touched the output folder"
        );
    }
}
