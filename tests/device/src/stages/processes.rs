//! Stages of several processes on one GPU. `warm-up` loads all modules. `ipc` and `nccl` are two ranks; they exchange
//! handles through files. The program starts itself.

use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kernels::cuda::launch::Launch;
use kernels::cuda::nccl::{Kind, Nccl};

use super::{Report, Setting, queue};
use crate::compile::modules;

const WORLD: u32 = 2;
const BYTES: usize = 64 << 20;
/// How long one process waits for the other.
const PATIENCE: Duration = Duration::from_secs(120);
/// Elements of each rank's part in the collectives.
const PART: usize = 1 << 20;

/// Checks that a process reads device memory of another one.
#[must_use]
pub fn ipc(setting: &Setting) -> Report {
    let mut report = setting.report("ipc");
    report.part("two processes on one GPU", |report| {
        let figures = pair(setting, "ipc-rank", |_, _| {})?;
        report.row(
            "memory of another process, copied",
            format!("{} GB/s", figures[1]),
            "64 MiB, checked byte by byte",
        );
        Ok(())
    });
    report
}

/// Runs two NCCL ranks on one GPU. NCCL refuses that unless each rank claims a host of its own. Traffic then goes
/// through sockets, so the figure only shows that it works.
#[must_use]
pub fn nccl(setting: &Setting) -> Report {
    let mut report = setting.report("nccl");
    report.part("two ranks on one GPU", |report| {
        let figures = pair(setting, "nccl-rank", |rank, command| {
            command.env("NCCL_HOSTID", format!("rank{rank}"));
            let settings = [
                ("NCCL_NET", "Socket"),
                ("NCCL_SOCKET_IFNAME", "lo"),
                ("NCCL_IB_DISABLE", "1"),
                ("NCCL_ALGO", "Ring"),
                ("NCCL_PROTO", "Simple"),
                ("NCCL_MAX_CTAS", "1"),
                ("NCCL_DEBUG", "WARN"),
            ];
            command.envs(settings);
        })?;
        report.row(
            "all-gather, reduce-scatter, all-reduce",
            "correct",
            figures[0].clone(),
        );
        Ok(())
    });
    report
}

/// Runs this program twice and returns the results that the ranks wrote.
fn pair(
    setting: &Setting,
    subcommand: &str,
    prepare: impl Fn(u32, &mut Command),
) -> Result<[String; 2]> {
    let rendezvous = tempfile::tempdir()?;
    let mut children = Vec::new();
    for rank in 0..WORLD {
        let mut command = this_program(setting, subcommand)?;
        command.arg(rank.to_string()).arg(rendezvous.path());
        prepare(rank, &mut command);
        children.push(Rank(command.spawn().context("starting a rank")?));
    }
    await_all(setting, &mut children)?;
    let result =
        |rank: u32| std::fs::read_to_string(rendezvous.path().join(format!("result{rank}")));
    Ok([result(0)?, result(1)?])
}

/// This program with a subcommand. It searches libraries where this process does, has the same results and the time that
/// is left.
fn this_program(setting: &Setting, subcommand: &str) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(subcommand).arg("--out").arg(&setting.out);
    for (option, directories) in [
        ("--libraries", &setting.search.directories),
        ("--python-packages", &setting.search.python_packages),
    ] {
        for directory in directories {
            command.arg(option).arg(directory);
        }
    }
    let left = setting.deadline.saturating_duration_since(Instant::now());
    command.arg("--seconds").arg(left.as_secs().to_string());
    Ok(command)
}

/// Waits until every child has succeeded.
fn await_all(setting: &Setting, children: &mut [Rank]) -> Result<()> {
    let mut left = children.len();
    while left > 0 {
        left = 0;
        for (rank, child) in children.iter_mut().enumerate() {
            match child.0.try_wait()? {
                None => left += 1,
                Some(status) => ensure!(status.success(), "process {rank} ended with {status}"),
            }
        }
        ensure!(!setting.expired(), "the processes did not end in time");
        std::thread::park_timeout(Duration::from_millis(5));
    }
    Ok(())
}

/// Loads every module once, in several processes. The driver keeps the code that it translates from PTX in its cache, so
/// that the stages after this one measure no translation. A driver translates on one thread per process.
#[must_use]
pub fn warm_up(setting: &Setting, processes: usize) -> Report {
    let mut report = setting.report("warm-up");
    report.part("loading every module", |report| {
        let begun = Instant::now();
        let mut children = Vec::new();
        for index in 0..processes {
            let mut command = this_program(setting, "warm-up-process")?;
            command.arg(index.to_string()).arg(processes.to_string());
            children.push(Rank(command.spawn().context("starting a process")?));
        }
        await_all(setting, &mut children)?;
        report.row(
            "every module loaded",
            format!("{:.1} s", begun.elapsed().as_secs_f64()),
            format!("{} modules, {processes} processes", modules().len()),
        );
        Ok(())
    });
    report
}

/// Loads every `of`-th module, from the one with this index on, and resolves its kernels.
///
/// # Errors
/// A module that the GPU does not load.
pub fn load_share(setting: &Setting, index: usize, of: usize) -> Result<()> {
    let gpu = setting.gpu()?;
    for module in modules().into_iter().skip(index).step_by(of.max(1)) {
        for kernel in module.kernels() {
            let launch = Launch {
                module: module.clone(),
                kernel,
                grid: [1; 3],
                threads: 32,
                shared_bytes: 0,
                args: Vec::new(),
            };
            gpu.resident_blocks(&launch)?;
        }
    }
    Ok(())
}

/// A child process, killed when it is dropped.
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        // An ended child needs no kill.
        let _unused_outcome = self.0.kill();
        let _unused_outcome = self.0.wait();
    }
}

/// Writes a file that appears complete.
fn publish(rendezvous: &Path, name: &str, content: &[u8]) -> Result<()> {
    let partial = rendezvous.join(format!("{name}.partial"));
    std::fs::write(&partial, content)?;
    Ok(std::fs::rename(partial, rendezvous.join(name))?)
}

fn await_file(setting: &Setting, path: &Path) -> Result<Vec<u8>> {
    while !path.exists() {
        if setting.expired() {
            bail!("{} did not appear in time", path.display());
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    Ok(std::fs::read(path)?)
}

fn pattern(n: usize) -> Vec<u8> {
    (0..n as u64)
        .map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

/// Rank 0 fills memory and exports it. Rank 1 maps it, copies it and checks the bytes.
///
/// # Errors
/// A failed step.
pub fn ipc_rank(setting: &Setting, rank: u32, rendezvous: &Path) -> Result<()> {
    let gpu = setting.gpu()?;
    let memory = gpu.allocate(BYTES)?;
    if rank == 0 {
        gpu.write(&memory, 0, &pattern(BYTES))?;
        publish(rendezvous, "handle", &gpu.export(&memory)?)?;
        await_file(setting, &rendezvous.join("done"))?;
        return publish(rendezvous, "result0", b"");
    }
    let handle = await_file(setting, &rendezvous.join("handle"))?;
    let handle = <[u8; 64]>::try_from(&*handle).map_err(|_| anyhow::anyhow!("a short handle"))?;
    let mapped = gpu.map(handle)?;
    let before = gpu.mark()?;
    queue::from_mapped(&gpu, &mapped, &memory)?;
    let after = gpu.mark()?;
    let milliseconds = before.milliseconds_to(&after)?;
    let mut got = vec![0; BYTES];
    gpu.read(&memory, 0, &mut got)?;
    drop(mapped);
    publish(rendezvous, "done", b"")?;
    ensure!(
        got == pattern(BYTES),
        "the copy differs from what the other process wrote"
    );
    let rate = BYTES as f64 / milliseconds / 1e6;
    publish(rendezvous, "result1", format!("{rate:.0}").as_bytes())
}

/// Every rank contributes `rank + 1` and its index; all three collectives are checked.
///
/// # Errors
/// A failed step.
pub fn nccl_rank(setting: &Setting, rank: u32, rendezvous: &Path) -> Result<()> {
    let gpu = setting.gpu()?;
    let nccl = Arc::new(Nccl::open(&setting.search)?);
    let name = rendezvous.join("id");
    if rank == 0 {
        publish(rendezvous, "id", &nccl.unique_id()?)?;
    }
    let id = await_file(setting, &name)?;
    let id = <[u8; 128]>::try_from(&*id).map_err(|_| anyhow::anyhow!("a short name"))?;
    let (before, _) = gpu.memory_info()?;
    let group = nccl.join(gpu.stream(), id, (rank, WORLD), PATIENCE)?;
    let value = |rank: usize, i: usize| (rank + 1) as f32 + (i % 97) as f32;
    let all: Vec<f32> = (0..PART * WORLD as usize)
        .map(|i| value(rank as usize, i))
        .collect();
    let [from, to] = [gpu.allocate(all.len() * 4)?, gpu.allocate(all.len() * 4)?];
    gpu.write(&from, 0, bytemuck::cast_slice(&all))?;
    let begun = Instant::now();
    let read = |n: usize| -> Result<Vec<f32>> {
        let mut bytes = vec![0u8; n * 4];
        gpu.read(&to, 0, &mut bytes)?;
        Ok(bytemuck::pod_collect_to_vec(&bytes))
    };
    queue::gather(&group, &from, &to, PART, Kind::F32)?;
    let want = |i: usize| value(i / PART, i % PART);
    ensure!(
        read(all.len())?
            .iter()
            .enumerate()
            .all(|(i, x)| *x == want(i)),
        "all-gather differs"
    );
    let sum = |i: usize| (0..WORLD as usize).map(|rank| value(rank, i)).sum::<f32>();
    queue::scatter(&group, &from, &to, PART, Kind::F32)?;
    let first = rank as usize * PART;
    ensure!(
        read(PART)?
            .iter()
            .enumerate()
            .all(|(i, x)| *x == sum(first + i)),
        "reduce-scatter differs"
    );
    queue::reduce(&group, &from, &to, all.len(), Kind::F32)?;
    ensure!(
        read(all.len())?
            .iter()
            .enumerate()
            .all(|(i, x)| *x == sum(i)),
        "all-reduce differs"
    );
    let milliseconds = begun.elapsed().as_secs_f64() * 1e3;
    // Memory of both ranks with the arrays above, unless the other rank has already left or not yet come.
    let (after, _) = gpu.memory_info()?;
    let took = before.saturating_sub(after) >> 20;
    group.finish()?;
    let version = nccl.version()?;
    publish(
        rendezvous,
        &format!("result{rank}"),
        format!("NCCL {version}, {milliseconds:.0} ms, {took} MiB of the GPU").as_bytes(),
    )
}
