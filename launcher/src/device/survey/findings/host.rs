//! Findings about start, memory, directories and the environment.

use std::fmt::Display;

use super::{Findings, is_usable};
use crate::device::survey::environment::Kind;
use crate::device::survey::facts::{Facts, Role};
use crate::lang::{both, text};
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
        let title = text!(
            "runs are refused in this environment: {problem}",
            "此环境中会拒绝运行：{problem}"
        );
        let unset = both("unset the rank variables", "请取消设置 rank 变量");
        let mut next: Vec<&dyn Display> = Vec::new();
        next.extend(launch.next.iter().map(|step| step as &dyn Display));
        if next.is_empty() {
            next.push(&unset);
        }
        findings.problem("rank-variables", title, &next);
    }
    if let (Some(rank), Some(world)) = (launch.rank, launch.world_size) {
        findings.note(
            "is-a-rank",
            text!(
                "the environment numbers this process: a run would join as rank {rank} of {world}",
                "环境变量给本进程编了号：运行会作为 {world} 个 rank 中的 rank {rank} 加入"
            ),
            &[&both(
                "outside of torchrun, mpirun or srun: unset the variables that are left over",
                "不在 torchrun、mpirun 或 srun 之下时：请取消设置残留的变量",
            )],
        );
    }
    if let Some(tasks) = &launch.scheduler_tasks {
        findings.warning(
            "scheduler-tasks",
            text!(
                "{}={}, but this process is not one of these tasks: a run would start its ranks on this machine",
                "{}={}，但本进程不是其中的任务：运行会在本机启动自己的 rank",
                tasks.variable, tasks.tasks
            ),
            &[ &both("start every task: srun launcher, mpirun launcher", "请启动每个任务：srun launcher、mpirun launcher")],
        );
    }
    if !facts.program.is_release {
        findings.note(
            "debug-build",
            both(
                "this program was built without --release: it trains more slowly",
                "本程序构建时没有加 --release：训练更慢",
            ),
            &[&"cargo run --release -p launcher"],
        );
    }
    let is_slow =
        facts.system.architecture == "x86_64" && !facts.cpu.instruction_sets.contains(&"avx2");
    if is_slow {
        findings.note(
            "no-avx2",
            both(
                "the processor has no AVX2: computation on the CPU is slow",
                "处理器没有 AVX2：CPU 计算很慢",
            ),
            &[&both(
                "in a virtual machine: pass the host CPU through",
                "在虚拟机中：请透传主机的 CPU",
            )],
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
            text!(
                "only {} of host memory can be used",
                "可用的主机内存只有 {}",
                bytes(memory.usable_bytes)
            ),
            &[&both(
                "end other programs; in a container raise its memory limit",
                "请结束其他程序；在容器中请提高内存上限",
            )],
        );
    }
    let limit = memory.cgroup.as_ref().and_then(|group| group.limit_bytes);
    if let Some(limit) = limit.filter(|limit| *limit < memory.total_bytes) {
        findings.note(
            "memory-limited",
            text!(
                "a cgroup limits host memory to {} of {}",
                "cgroup 把主机内存限制为 {1} 中的 {0}",
                bytes(limit),
                bytes(memory.total_bytes)
            ),
            &[&both(
                "plans respect this limit; raise it with Docker's --memory or the job's request",
                "计划会遵守这个上限；可用 Docker 的 --memory 或作业的资源申请提高它",
            )],
        );
    }
    let locked = facts.limits.locked_memory_bytes.soft;
    if let Some(limit) = locked.filter(|limit| *limit < LITTLE_LOCKED_MEMORY_BYTES)
        && facts.gpus.iter().any(is_usable)
    {
        findings.note(
            "locked-memory-low",
            text!(
                "only {} of memory can be locked: pinned host memory may be refused",
                "只能锁定 {} 内存：锁页主机内存可能被拒绝",
                bytes(limit)
            ),
            &[&both(
                "ulimit -l unlimited, or Docker's --ulimit memlock=-1",
                "ulimit -l unlimited，或 Docker 的 --ulimit memlock=-1",
            )],
        );
    }
    let files = facts.limits.open_files.soft;
    if let Some(limit) = files.filter(|limit| *limit < FEW_OPEN_FILES) {
        findings.note(
            "open-files-low",
            text!(
                "only {} files can be open at once",
                "最多只能同时打开 {} 个文件",
                grouped(limit)
            ),
            &[&"ulimit -n 4096"],
        );
    }
    let processes = facts.limits.processes.soft;
    if let Some(limit) = processes.filter(|limit| *limit < FEW_PROCESSES) {
        findings.note(
            "processes-low",
            text!(
                "only {} threads and processes can run at once",
                "最多只能同时运行 {} 个线程和进程",
                grouped(limit)
            ),
            &[&both(
                "ulimit -u 65536, or Docker's --pids-limit -1",
                "ulimit -u 65536，或 Docker 的 --pids-limit -1",
            )],
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
                text!(
                    "{path} is not writable: ranks exchange through files in /tmp",
                    "{path} 不可写：各 rank 经由 /tmp 中的文件交换数据"
                ),
                &[&both("mount a tmpfs at this path", "请在该路径挂载 tmpfs")],
            ),
            Role::SharedMemory if free < LITTLE_SHARED_MEMORY_BYTES => findings.warning(
                "shared-memory-small",
                text!(
                    "{path} has only {} free; ranks exchange through it",
                    "{path} 只有 {} 空闲；各 rank 经由它交换数据",
                    bytes(free)
                ),
                &[
                    &both(
                        "Docker: --shm-size 8g; Kubernetes: an emptyDir of medium Memory",
                        "Docker：--shm-size 8g；Kubernetes：medium 为 Memory 的 emptyDir",
                    ),
                    &both(
                        "data that does not fit goes to /tmp, which is slower on a disk",
                        "放不下的数据写到 /tmp；如果它在磁盘上，会更慢",
                    ),
                ],
            ),
            Role::Runs if !directory.is_writable => findings.warning(
                "runs-not-writable",
                both(
                    "the current directory is not writable; runs are stored in it by default",
                    "当前目录不可写；运行默认保存在其中",
                ),
                &[&both(
                    "choose another directory with --output",
                    "请用 --output 指定其他目录",
                )],
            ),
            Role::Runs if free < LITTLE_DISK_BYTES => findings.note(
                "disk-small",
                text!(
                    "only {} are free for runs in the current directory",
                    "当前目录只有 {} 空闲可供运行使用",
                    bytes(free)
                ),
                &[&both(
                    "a checkpoint takes about 14 bytes for each trained parameter; --output DIR",
                    "每个训练的参数在检查点中约占 14 字节；可用 --output DIR 指定其他目录",
                )],
            ),
            Role::Temporary if !directory.is_writable => findings.problem(
                "temporary-not-writable",
                text!(
                    "{path} is not writable: no run can start",
                    "{path} 不可写：任何运行都无法启动"
                ),
                &[&both(
                    "set TMPDIR to a writable directory",
                    "请把 TMPDIR 设为可写的目录",
                )],
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
            text!(
                "these variables are set but have no effect here: {}",
                "这些变量已设置，但在此没有效果：{}",
                set.join(", ")
            ),
            &[&both(
                "the environment table lists what to use instead",
                "环境变量表列出了应改用什么",
            )],
        );
    }
}
