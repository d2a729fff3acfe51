//! Runs over several machines, all of them this one: every "machine" is a process of the program that was told its number.

#![allow(clippy::unwrap_used, reason = "helpers of a test binary")]

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

const TOKEN: &str = "a token of these tests alone";
/// Four updates of the demo, each in the log.
const FLAGS: &str =
    "--zero 3 --offload cpu --max-steps 4 --logging-steps 1 --eval-strategy no --comm-timeout 120";

struct Bench {
    directory: tempfile::TempDir,
    port: u16,
}

impl Bench {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Self {
            directory: tempfile::tempdir().unwrap(),
            port: listener.local_addr().unwrap().port(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The program with an environment of its own.
    fn command(&self, output: &str, flags: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_launcher"));
        command
            .args(FLAGS.split(' ').chain(flags.split_whitespace()))
            .arg("--output")
            .arg(self.path(output))
            .env_clear()
            .env("HOME", self.directory.path())
            .env("TMPDIR", std::env::temp_dir())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Machine `number` of two, which starts one rank.
    fn machine(&self, number: usize, flags: &str) -> Command {
        let mut command = self.command("run", flags);
        command
            .env("NNODES", "2")
            .env("NODE_RANK", number.to_string())
            .env("NPROC_PER_NODE", "1")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", self.port.to_string())
            .env("TESSERA_JOB_TOKEN", TOKEN);
        command
    }

    fn losses(&self, output: &str) -> Vec<String> {
        let log = std::fs::read_to_string(self.path(output).join("trainer_log.jsonl")).unwrap();
        let rows = log.lines().map(|line| {
            let row: serde_json::Value = serde_json::from_str(line).unwrap();
            row["loss"].to_string()
        });
        rows.collect()
    }
}

fn ended(child: Child) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    (status.code(), String::from_utf8_lossy(&stderr).into_owned())
}

/// Waits for a condition that another process brings about.
fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

#[test]
fn two_machines_have_the_losses_of_one() {
    let bench = Bench::new();
    let (status, text) = ended(bench.command("alone", "--nproc 2").spawn().unwrap());
    assert_eq!(status, Some(0), "{text}");

    let second = bench.machine(1, "").spawn().unwrap();
    let (status, text) = ended(bench.machine(0, "").spawn().unwrap());
    assert_eq!(status, Some(0), "{text}");
    assert!(
        text.contains("2 ranks in") && text.contains("· tcp"),
        "{text}"
    );
    let (status, text) = ended(second);
    assert_eq!(status, Some(0), "{text}");
    assert_eq!(bench.losses("run"), bench.losses("alone"));
    assert_eq!(bench.losses("run").len(), 4);
    assert!(bench.path("run/checkpoint-4").is_dir());

    // The same by a hostfile, and processes that something else numbered.
    std::fs::write(
        bench.path("hosts"),
        "127.0.0.1 slots=1\nlocalhost slots=1\n",
    )
    .unwrap();
    let hosts = format!("--hostfile {}", bench.path("hosts").display());
    let rank = |number: &str| {
        let mut command = bench.command("ranks", "");
        command
            .env("RANK", number)
            .env("LOCAL_RANK", "0")
            .env("WORLD_SIZE", "2")
            .env("LOCAL_WORLD_SIZE", "1")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", bench.port.to_string())
            .env("TESSERA_JOB_TOKEN", TOKEN);
        command
    };
    let second = rank("1").spawn().unwrap();
    let (status, text) = ended(rank("0").spawn().unwrap());
    assert_eq!((status, ended(second).0), (Some(0), Some(0)), "{text}");
    assert_eq!(bench.losses("ranks"), bench.losses("alone"));
    let mut refused = rank("0");
    let (status, text) = ended(refused.args(hosts.split(' ')).spawn().unwrap());
    assert_eq!(status, Some(2), "{text}");
    assert!(
        text.contains("--hostfile and the environment contradict"),
        "{text}"
    );
}

#[test]
fn pipeline_stages_on_two_machines_have_the_losses_of_one_rank() {
    let bench = Bench::new();
    let steps = "--gradient-accumulation-steps 2 --save-strategy no --max-steps 2 --per-device-train-batch-size 2";
    let (status, text) = ended(
        bench
            .command("alone", &format!("--nproc 1 {steps}"))
            .spawn()
            .unwrap(),
    );
    assert_eq!(status, Some(0), "{text}");
    let line = format!("--mp-size 2 {steps}");
    let second = bench.machine(1, &line).spawn().unwrap();
    let (status, text) = ended(bench.machine(0, &line).spawn().unwrap());
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("· tcp"), "{text}");
    let (status, text) = ended(second);
    assert_eq!(status, Some(0), "{text}");
    assert_eq!(bench.losses("run"), bench.losses("alone"));
    // Ranks that mpirun numbered.
    let rank = |number: &str| {
        let parts = ["RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE"];
        let names = parts.map(|part| format!("OMPI_COMM_WORLD_{part}"));
        let mut command = bench.command("mpirun", &line);
        command
            .envs(names.into_iter().zip([number, number, "2", "2"]))
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", bench.port.to_string())
            .env("TESSERA_JOB_TOKEN", TOKEN);
        command.spawn().unwrap()
    };
    let second = rank("1");
    let (status, text) = ended(rank("0"));
    assert_eq!((status, ended(second).0), (Some(0), Some(0)), "{text}");
    assert_eq!(bench.losses("mpirun"), bench.losses("alone"));
}

#[test]
fn causes_of_a_failed_rendezvous_are_named() {
    let bench = Bench::new();
    // Another seed on the second machine.
    let second = bench.machine(1, "--seed 7").spawn().unwrap();
    let (status, text) = ended(bench.machine(0, "").spawn().unwrap());
    assert_eq!(status, Some(13), "{text}");
    let words = "rank 1 has another configuration: its seed differs";
    assert!(
        text.contains("error[E03]") && text.contains(words),
        "{text}"
    );
    let (status, text) = ended(second);
    assert_eq!(status, Some(13), "{text}");
    assert!(text.contains(words), "{text}");

    // No token, and a port that is taken.
    let mut command = bench.machine(0, "");
    let (status, text) = ended(command.env_remove("TESSERA_JOB_TOKEN").spawn().unwrap());
    assert_eq!(status, Some(13), "{text}");
    assert!(text.contains("have no token"), "{text}");
    let taken = TcpListener::bind(("127.0.0.1", bench.port)).unwrap();
    let (status, text) = ended(bench.machine(0, "").spawn().unwrap());
    assert_eq!(status, Some(13), "{text}");
    let owner = format!("process {} (", std::process::id());
    assert!(
        text.contains("error[E14]") && text.contains(&owner),
        "{text}"
    );
    drop(taken);
    // The token is nowhere in what a run leaves.
    let mut directories = vec![bench.path("run")];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => directories.push(path),
                false => {
                    let text = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
                    assert!(!text.contains(TOKEN), "{}", path.display());
                }
            }
        }
    }
}

/// The processes whose parent is `parent`.
fn children(parent: u32) -> Vec<i32> {
    let stat = |path: &Path| std::fs::read_to_string(path.join("stat")).unwrap_or_default();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter_map(|process| {
            let pid = process.file_name().to_str()?.parse().ok()?;
            let stat = stat(&process.path());
            let after = stat.rsplit(')').next()?;
            let found: u32 = after.split_whitespace().nth(1)?.parse().ok()?;
            (found == parent).then_some(pid)
        })
        .collect()
}

#[test]
fn a_machine_whose_rank_is_killed_ends_the_others() {
    let bench = Bench::new();
    // Long enough that it never ends by itself.
    let flags = "--max-steps 100000 --save-strategy no";
    let machine = |number| {
        let mut command = bench.machine(number, "");
        let args: Vec<_> = command.get_args().map(|word| word.to_owned()).collect();
        let steps = args.iter().position(|word| word == "--max-steps").unwrap();
        let mut command_again = Command::new(command.get_program());
        command_again
            .args(&args[..steps])
            .args(&args[steps + 2..])
            .args(flags.split(' '))
            .env_clear()
            .envs(
                command
                    .get_envs()
                    .filter_map(|(name, value)| Some((name, value?))),
            )
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command = command_again;
        command.spawn().unwrap()
    };
    let (first, second) = (machine(0), machine(1));
    let log = bench.path("run/trainer_log.jsonl");
    until("a step", || log.exists());
    let ranks = children(second.id());
    assert_eq!(ranks.len(), 1);
    let started = Instant::now();
    kill_process(Pid::from_raw(ranks[0]).unwrap(), Signal::KILL).unwrap();
    let (status, text) = ended(first);
    assert!(
        started.elapsed() < Duration::from_secs(60),
        "as soon as the connection is gone"
    );
    assert_eq!(status, Some(14), "{text}");
    assert!(
        text.contains("rank 1 aborted: the connection with it was lost"),
        "{text}"
    );
    let (status, text) = ended(second);
    assert_eq!(status, Some(12), "{text}");
    assert!(text.contains("rank 1 was killed"), "{text}");
}

/// One rank that something else numbered, as each container of a job of one rank has it.
fn lone_rank(bench: &Bench, output: &str, flags: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_launcher"));
    command
        .args("--zero 3 --max-steps 4 --logging-steps 1 --eval-strategy no".split(' '))
        .args(flags.split_whitespace())
        .arg("--output")
        .arg(bench.path(output))
        .env_clear()
        .env("HOME", bench.directory.path())
        .env("TMPDIR", std::env::temp_dir())
        .envs(["RANK", "LOCAL_RANK"].map(|name| (name, "0")))
        .envs(["WORLD_SIZE", "LOCAL_WORLD_SIZE"].map(|name| (name, "1")))
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", bench.port.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

#[test]
fn jobs_with_equal_variables_share_no_spill_directory() {
    let bench = Bench::new();
    let disk = bench.path("disk");
    let flags = format!("--offload nvme:{} --nvme-io mapped", disk.display());
    let mut jobs = ["a", "b"].map(|output| lone_rank(&bench, output, &flags).spawn().unwrap());
    let mut names = std::collections::BTreeSet::new();
    until("two jobs", || {
        let entries = std::fs::read_dir(&disk).into_iter().flatten().flatten();
        let found = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.extend(found.filter(|name| !name.contains(".dead-")));
        jobs.iter_mut().all(|job| job.try_wait().unwrap().is_some())
    });
    for job in jobs {
        let (status, text) = ended(job);
        assert_eq!(status, Some(0), "{text}");
    }
    assert_eq!(names.len(), 2, "{names:?}");
    assert_eq!(bench.losses("a"), bench.losses("b"));
    assert_eq!(bench.losses("a").len(), 4);
    assert_eq!(std::fs::read_dir(&disk).unwrap().count(), 0);
}

#[test]
fn resume_auto_on_a_finished_run_says_so_and_succeeds() {
    let bench = Bench::new();
    let (status, text) = ended(bench.command("run", "--nproc 1").spawn().unwrap());
    assert_eq!(status, Some(0), "{text}");
    let listed = || std::fs::read_dir(bench.path("run")).unwrap().count();
    let (before, losses) = (listed(), bench.losses("run"));
    let again = |flags: &str| ended(bench.command("run", flags).spawn().unwrap());
    let (status, text) = again("--nproc 1 --resume auto");
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("all 4 steps"), "{text}");
    // A requeued job of another launcher.
    let rank = lone_rank(&bench, "run", "--offload cpu --resume auto").spawn();
    let (status, text) = ended(rank.unwrap());
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("all 4 steps"), "{text}");
    assert_eq!((listed(), bench.losses("run")), (before, losses));
    let from = bench.path("run/checkpoint-4");
    let (status, text) = again(&format!("--nproc 1 --resume {}", from.display()));
    assert_eq!(status, Some(9), "{text}");
    assert!(text.contains("E16"), "{text}");
}
