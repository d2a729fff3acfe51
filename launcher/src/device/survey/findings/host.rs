//! Findings about start, memory, directories and the environment.

use super::{Findings, is_usable};
use crate::device::survey::environment::Kind;
use crate::device::survey::facts::{Facts, Role};
use crate::units::{bytes, grouped};

/// Usable host memory below which most runs fail.
const LITTLE_MEMORY_BYTES: u64 = 2 << 30;
/// Shared memory below which a warning is given. Containers often have 64 MiB.
const LITTLE_SHARED_MEMORY_BYTES: u64 = 1 << 30;
/// Bytes of lockable memory below which a note is given: one rank on a GPU may need as much pinned memory.
const LITTLE_LOCKED_MEMORY_BYTES: u64 = 1 << 30;
const LITTLE_DISK_BYTES: u64 = 10 << 30;
const FEW_OPEN_FILES: u64 = 1024;
/// Number of threads and processes below which the limit is noted.
const FEW_PROCESSES: u64 = 512;

/// Adds findings on how the program was built and started.
pub(super) fn launch(facts: &Facts, findings: &mut Findings) {
    let launch = &facts.launch;
    if let Some(problem) = &launch.problem {
        let next: Vec<&str> = launch.next.iter().map(String::as_str).collect();
        let title = format!("runs are refused in this environment: {problem}");
        if next.is_empty() {
            findings.problem("rank-variables", title, &["unset the rank variables"]);
        } else {
            findings.problem("rank-variables", title, &next);
        }
    }
    if let (Some(rank), Some(world)) = (launch.rank, launch.world_size) {
        findings.note(
            "is-a-rank",
            format!(
                "the environment numbers this process: a run would join as rank {rank} of {world}"
            ),
            &["outside of torchrun, mpirun or srun: unset the variables that are left over"],
        );
    }
    if let Some(tasks) = &launch.scheduler_tasks {
        findings.warning(
            "scheduler-tasks",
            format!(
                "{}={}, but this process is not one of these tasks: a run would start its ranks on this machine",
                tasks.variable, tasks.tasks
            ),
            &["start every task: srun launcher, mpirun launcher"],
        );
    }
    if !facts.program.is_release {
        findings.note(
            "debug-build",
            "this program was built without --release: it trains more slowly",
            &["cargo run --release -p launcher"],
        );
    }
    let is_slow =
        facts.system.architecture == "x86_64" && !facts.cpu.instruction_sets.contains(&"avx2");
    if is_slow {
        findings.note(
            "no-avx2",
            "the processor has no AVX2: computation on the CPU is slow",
            &["in a virtual machine: pass the host CPU through"],
        );
    }
}

/// Adds findings on host memory (too little, or limited by a cgroup) and on the process's limits for locked memory
/// open files and processes.
pub(super) fn memory(facts: &Facts, findings: &mut Findings) {
    let memory = &facts.memory;
    if memory.usable_bytes < LITTLE_MEMORY_BYTES {
        findings.warning(
            "memory-low",
            format!(
                "only {} of host memory can be used",
                bytes(memory.usable_bytes)
            ),
            &["end other programs; in a container raise its memory limit"],
        );
    }
    let limit = memory.cgroup.as_ref().and_then(|group| group.limit_bytes);
    if let Some(limit) = limit.filter(|limit| *limit < memory.total_bytes) {
        findings.note(
            "memory-limited",
            format!(
                "a cgroup limits host memory to {} of {}",
                bytes(limit),
                bytes(memory.total_bytes)
            ),
            &["plans respect this limit; raise it with Docker's --memory or the job's request"],
        );
    }
    let locked = facts.limits.locked_memory_bytes.soft;
    if let Some(limit) = locked.filter(|limit| *limit < LITTLE_LOCKED_MEMORY_BYTES)
        && facts.gpus.iter().any(is_usable)
    {
        findings.note(
            "locked-memory-low",
            format!(
                "only {} of memory can be locked: pinned host memory may be refused",
                bytes(limit)
            ),
            &["ulimit -l unlimited, or Docker's --ulimit memlock=-1"],
        );
    }
    let files = facts.limits.open_files.soft;
    if let Some(limit) = files.filter(|limit| *limit < FEW_OPEN_FILES) {
        findings.note(
            "open-files-low",
            format!("only {} files can be open at once", grouped(limit)),
            &["ulimit -n 4096"],
        );
    }
    let processes = facts.limits.processes.soft;
    if let Some(limit) = processes.filter(|limit| *limit < FEW_PROCESSES) {
        findings.note(
            "processes-low",
            format!(
                "only {} threads and processes can run at once",
                grouped(limit)
            ),
            &["ulimit -u 65536, or Docker's --pids-limit -1"],
        );
    }
}

/// Adds findings on the directories that runs write to: not writable, or little free space.
pub(super) fn storage(facts: &Facts, findings: &mut Findings) {
    for directory in &facts.storage {
        let path = directory.path.display();
        let free = directory.free_bytes.unwrap_or(0);
        match directory.role {
            Role::SharedMemory if !directory.is_writable => findings.warning(
                "shared-memory-missing",
                format!("{path} is not writable: ranks exchange through files in /tmp"),
                &["mount a tmpfs at this path"],
            ),
            Role::SharedMemory if free < LITTLE_SHARED_MEMORY_BYTES => findings.warning(
                "shared-memory-small",
                format!(
                    "{path} has only {} free; ranks exchange through it",
                    bytes(free)
                ),
                &[
                    "Docker: --shm-size 8g; Kubernetes: an emptyDir of medium Memory",
                    "data that does not fit goes to /tmp, which is slower on a disk",
                ],
            ),
            Role::Runs if !directory.is_writable => findings.warning(
                "runs-not-writable",
                "the current directory is not writable; runs are stored in it by default",
                &["choose another directory with --output"],
            ),
            Role::Runs if free < LITTLE_DISK_BYTES => findings.note(
                "disk-small",
                format!(
                    "only {} are free for runs in the current directory",
                    bytes(free)
                ),
                &["a checkpoint takes about 14 bytes for each trained parameter; --output DIR"],
            ),
            Role::Temporary if !directory.is_writable => findings.problem(
                "temporary-not-writable",
                format!("{path} is not writable: no run can start"),
                &["set TMPDIR to a writable directory"],
            ),
            _ => {}
        }
    }
}

/// Adds a finding that names the set environment variables that have no effect here.
pub(super) fn environment(facts: &Facts, findings: &mut Findings) {
    let set: Vec<&str> = facts
        .environment
        .iter()
        .filter(|row| row.kind == Kind::WithoutEffect && row.is_set && !row.name.ends_with('*'))
        .map(|row| row.name.as_str())
        .collect();
    if !set.is_empty() {
        findings.note(
            "variables-without-effect",
            format!(
                "these variables are set but have no effect here: {}",
                set.join(", ")
            ),
            &["the environment table lists what to use instead"],
        );
    }
}
