//! Device of a run: the choice between the CPU and GPUs, made once before anything else is resolved; and how a rank
//! opens its GPU.

pub(crate) mod checks;
pub(crate) mod cores;
mod cuda;
mod memory;
pub mod survey;
#[cfg(test)]
mod tests;

use crate::config::{
    Collectives, CudaGraph, Device, DeviceChoice, Offload, Products, RunConfig, RunGpu, Task, Tier,
};
use crate::lang::{Both, Text, both, text};
use std::fmt;
use std::sync::Arc;

use kernels::Backend;

use crate::error::{ErrorCode, Failure};
use crate::rank_env::{GpuCode, MATMUL, Matmul, Variables};
use crate::ui::Event;
use crate::units::bytes;
use survey::facts::{Cuda, Gpu};
use survey::findings;
use survey::findings::{Finding, Severity};

pub use cuda::Nvidia;
pub(crate) use memory::{arena_bytes, counting, counting_of, free_bytes};

/// Variable with the GPUs that a process may use; CUDA reads it.
const MASK: &str = "CUDA_VISIBLE_DEVICES";
/// End of `launcher doctor`'s findings if CUDA shows no GPU; runs cut it off.
const INSTEAD: Both = both(": runs use the CPU", "：运行使用 CPU");

/// Source of GPUs: those of the machine, or described ones in unit tests.
pub trait Devices: Sync + fmt::Debug {
    /// Facts about driver and GPUs; never fails. Ordinals are CUDA's for this process.
    fn survey(&self, variables: &Variables) -> (Cuda, Vec<Gpu>);

    /// Opens a GPU with an arena of `arena_bytes` for all work of a rank. `graphs` says whether kernels are launched
    /// as CUDA graphs.
    ///
    /// # Errors
    /// The GPU cannot be opened (exit 13) or does not have the memory (exit 11).
    fn open(
        &self,
        gpu: &RunGpu,
        arena_bytes: u64,
        graphs: CudaGraph,
        variables: &Variables,
    ) -> Result<Arc<dyn Backend>, Failure>;

    /// Free memory of a GPU in bytes; `None` if it cannot be read.
    fn free_bytes(&self, gpu: &RunGpu, variables: &Variables) -> Option<u64>;
}

/// Error report of a rank whose GPU lacks free memory for the arena: one allocation of `arena_bytes` for all
/// work of the rank.
///
/// `free` is the GPU's free memory in bytes now, `others` a text about other processes that use its memory;
/// both `None` if unknown. `cause` is the error of the allocation.
#[must_use]
pub fn no_room(
    gpu: &RunGpu,
    arena_bytes: u64,
    free: Option<u64>,
    others: Option<Text>,
    cause: &(dyn std::error::Error + 'static),
) -> Failure {
    let mut failure = Failure::new(
        ErrorCode::DeviceMemory,
        text!(
            "GPU {} ({}) has too little free memory for this run",
            "GPU {}（{}）的空闲显存不足以进行本次运行",
            gpu.ordinal,
            gpu.name
        ),
        crate::error::chain(cause),
    )
    .evidence(text!(
        "the plan reserves {} at the start; {} were free when the plan was made{}",
        "计划在启动时预留 {}；制定计划时空闲 {}{}",
        bytes(arena_bytes),
        bytes(gpu.free_bytes),
        free.map_or(Text::default(), |free| text!(
            ", {} are free now",
            "，现在空闲 {}",
            bytes(free)
        ))
    ));
    if let Some(others) = others {
        failure = failure.evidence(others);
    }
    failure.next(text!(
        "end the other processes on the GPU, or choose another GPU with {MASK}",
        "请结束该 GPU 上的其他进程，或用 {MASK} 选择另一个 GPU"
    ))
}

/// The chosen device of a run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Chosen {
    pub(crate) device: Device,
    pub(crate) gpus: Vec<RunGpu>,
    /// Reason, if the choice was left to the program.
    reason: Option<Text>,
    driver: Option<Text>,
    /// Findings about GPUs and driver that the run reports.
    findings: Vec<Finding>,
}

impl Chosen {
    /// The CPU, chosen by the user or by default.
    pub(crate) const fn cpu() -> Self {
        Self {
            device: Device::Cpu,
            gpus: Vec::new(),
            reason: None,
            driver: None,
            findings: Vec::new(),
        }
    }

    /// GPUs that are described and need not exist on this machine.
    pub(crate) fn described(gpus: Vec<RunGpu>) -> Self {
        Self {
            device: Device::Cuda,
            gpus,
            ..Self::cpu()
        }
    }

    /// Events to show when the run starts.
    pub(crate) fn events(&self, config: &RunConfig) -> Vec<Event> {
        let mut lines = Vec::new();
        match self.device {
            Device::Cpu => {
                lines.extend(
                    self.reason
                        .iter()
                        .map(|why| text!("cpu · {why}", "cpu · {why}")),
                );
            }
            Device::Cuda => {
                let products = self.gpus.first().map(|gpu| gpu.products);
                let products =
                    products.map(|by| text!("matrix products by {by}", "矩阵乘法由 {by} 完成"));
                let fused = self.gpus.iter().find(|gpu| gpu.fused_attention_backward);
                let fused =
                    fused.map(|_| both("fused attention backward", "融合的注意力反向传播").into());
                let mut parts = vec![Text::literal("cuda")];
                parts.extend(
                    [self.reason.clone(), self.driver.clone(), products, fused]
                        .into_iter()
                        .flatten(),
                );
                lines.push(Text::join(&parts, " · "));
                lines.extend(self.gpus.iter().enumerate().map(|(place, gpu)| {
                    let ranks = ranks_on(place, self.gpus.len(), config.world_size);
                    text!(
                        "GPU {} {} · {}, {} free · {ranks}",
                        "GPU {} {} · {}，空闲 {} · {ranks}",
                        gpu.ordinal,
                        gpu.name,
                        bytes(gpu.memory_bytes),
                        bytes(gpu.free_bytes),
                    )
                }));
                if config.task != Task::Answer {
                    lines.push(resting(&config.offload));
                }
                if config.world_size > 1 {
                    lines.push(carried(config));
                }
                if config.ranks_here() > self.gpus.len() {
                    lines.push(text!("{} ranks share {}: each rank has a part of the memory, and the ranks take turns", "{} 个 rank 共用 {}：每个 rank 使用一部分显存，各 rank 轮流计算",
                        config.ranks_here(),
                        counted(self.gpus.len())
                    ));
                }
            }
        }
        let mut events = Vec::new();
        if !lines.is_empty() {
            events.push(Event::Info {
                label: both("device", "设备").into(),
                text: Text::join(&lines, "\n"),
            });
        }
        events.extend(self.findings.iter().map(|finding| {
            let mut text = finding.title.clone();
            if let Some(next) = finding.next.first() {
                text += text!("; {next}", "；{next}");
            }
            match finding.severity {
                Severity::Problem | Severity::Warning => Event::Warning { text },
                Severity::Note => Event::Info {
                    label: both("device", "设备").into(),
                    text,
                },
            }
        }));
        events
    }
}

/// Names of the model states stored on the GPU.
fn resting(offload: &Offload) -> Text {
    let states = [
        (both("weights", "权重"), &offload.param),
        (
            both("gradients and optimizer states", "梯度和优化器状态"),
            &offload.optimizer,
        ),
    ];
    let of = |on_gpu: bool| {
        let own = states
            .iter()
            .filter(|(_, tier)| (**tier == Tier::None) == on_gpu);
        let names: Vec<Both> = own.map(|(name, _)| *name).collect();
        Text::list(&names)
    };
    match (of(true), of(false)) {
        (there, elsewhere) if elsewhere.is_empty() => {
            text!("{there} are in GPU memory", "{there}在显存中")
        }
        (there, elsewhere) if there.is_empty() => {
            text!(
                "{elsewhere} are in host memory or on a disk",
                "{elsewhere}在主机内存或磁盘上"
            )
        }
        (there, elsewhere) => {
            text!(
                "{there} are in GPU memory, {elsewhere} in host memory or on a disk",
                "{there}在显存中，{elsewhere}在主机内存或磁盘上"
            )
        }
    }
}

/// First usable GPU of this machine: its product name, and its backend with an arena of `arena_bytes` bytes,
/// one allocation that serves all requests for memory of this GPU.
///
/// # Errors
/// The same as for a run with `--device cuda`: no GPU is usable, or it cannot be opened with that much
/// memory.
pub fn first_gpu(arena_bytes: u64) -> Result<(String, Arc<dyn Backend>), Failure> {
    let variables = Variables::read();
    let chosen = choose(DeviceChoice::Cuda, &Nvidia, &variables)?;
    let gpu = &chosen.gpus[0];
    Ok((
        gpu.name.clone(),
        Nvidia.open(gpu, arena_bytes, CudaGraph::default(), &variables)?,
    ))
}

/// The GPU of a rank. Ranks take GPUs in turn, so each GPU has about the same number of ranks.
pub(crate) fn gpu_of(config: &RunConfig, local_rank: usize) -> Option<&RunGpu> {
    let count = config.gpus.len();
    (count > 0).then(|| &config.gpus[local_rank % count])
}

/// Configuration of ranks that another launcher started, before they met: each rank has a GPU of its own. Slurm's
/// `--gpus-per-task=1` shows each rank another GPU as its only one.
pub(crate) fn one_gpu_each(config: RunConfig) -> RunConfig {
    let known = config.gpus.iter().all(|gpu| gpu.uuid.is_some());
    let ranks_per_gpu = (known && !config.gpus.is_empty()).then_some(1);
    RunConfig {
        ranks_per_gpu,
        ..config
    }
}

fn ranks_on(place: usize, gpus: usize, ranks: usize) -> Text {
    let on: Vec<String> = (place..ranks)
        .step_by(gpus)
        .map(|rank| rank.to_string())
        .collect();
    match on.len() {
        0 => both("no rank", "没有 rank").into(),
        1 => text!("rank {}", "rank {}", on[0]),
        _ => text!("ranks {}", "rank {}", on.join(", ")),
    }
}

/// Transport of weights and gradients between the GPUs, with the reason, in words.
fn carried(config: &RunConfig) -> Text {
    let why = config.missing_peer_access();
    match (config.resolved_collectives(), why) {
        (Collectives::Ipc, _) => both(
            "between ranks: ipc, GPUs read each other's memory",
            "rank 之间：ipc，GPU 互相读取显存",
        )
        .into(),
        (Collectives::Nccl, _) if config.shares_gpus() => both(
            "between ranks: nccl, through sockets, because ranks share a GPU",
            "rank 之间：nccl，经由套接字，因为多个 rank 共用一个 GPU",
        )
        .into(),
        (Collectives::Nccl, _) => both("between ranks: nccl", "rank 之间：nccl").into(),
        (_, Some(why)) if config.collectives == Collectives::Auto => {
            text!(
                "between ranks: shm, through host memory; {why}",
                "rank 之间：shm，经由主机内存；{why}"
            )
        }
        _ => both(
            "between ranks: shm, through host memory",
            "rank 之间：shm，经由主机内存",
        )
        .into(),
    }
}

fn counted(gpus: usize) -> Text {
    match gpus {
        1 => both("1 GPU", "1 个 GPU").into(),
        more => text!("{more} GPUs", "{more} 个 GPU"),
    }
}

/// Chooses the device of a run. It looks for GPUs only if they may be used.
///
/// # Errors
/// `cuda` without a usable GPU, or without cuBLASLt if the environment asks for it (exit 13).
pub(crate) fn choose(
    choice: DeviceChoice,
    devices: &dyn Devices,
    variables: &Variables,
) -> Result<Chosen, Failure> {
    if choice == DeviceChoice::Cpu {
        return Ok(Chosen::cpu());
    }
    let (cuda, gpus) = devices.survey(variables);
    let findings = survey::gpu_findings(&cuda, &gpus, variables);
    let products = products(&cuda, variables)?;
    let fused = variables.fused_attention_backward()?;
    let code = variables.gpu_code()?;
    // A wrong value ends the run before its ranks start.
    variables.host_register()?;
    let new_enough = cuda.cuda_version.is_none() || cuda.cuda_version >= cuda.minimum_cuda_version;
    let usable: Vec<RunGpu> = gpus
        .iter()
        .filter(|gpu| new_enough && findings::is_usable(gpu))
        .filter_map(|gpu| run_gpu(gpu, products, fused))
        .collect();
    if usable.is_empty() {
        return match choice {
            DeviceChoice::Cuda => Err(refusal(&cuda, &gpus, &findings, variables)),
            _ => Ok(Chosen {
                reason: Some(text!("auto: {}", "auto：{}", missing(&cuda, &findings))),
                findings: findings.into_iter().filter(is_of_shown).collect(),
                ..Chosen::cpu()
            }),
        };
    }
    let driver = match (&cuda.driver, cuda.cuda_version) {
        (Some(driver), Some((major, minor))) => Some(text!(
            "driver {driver} (CUDA {major}.{minor})",
            "驱动 {driver}（CUDA {major}.{minor}）"
        )),
        (Some(driver), None) => Some(text!("driver {driver}", "驱动 {driver}")),
        (None, Some((major, minor))) => Some(text!(
            "driver for CUDA {major}.{minor}",
            "CUDA {major}.{minor} 的驱动"
        )),
        (None, None) => None,
    };
    let driver = match code {
        GpuCode::Native => driver,
        GpuCode::Sm80 => {
            let driver = driver
                .unwrap_or_else(|| both("driver of unknown version", "未知版本的驱动").into());
            Some(text!(
                "{driver} · kernels of sm_80",
                "{driver} · sm_80 的内核"
            ))
        }
    };
    let reason = match choice {
        DeviceChoice::Auto => Some(text!(
            "auto: {} can be used",
            "auto：可以使用 {}",
            counted(usable.len())
        )),
        DeviceChoice::Cpu | DeviceChoice::Cuda => None,
    };
    Ok(Chosen {
        gpus: usable,
        reason,
        driver,
        findings: findings.into_iter().filter(is_of_shown).collect(),
        ..Chosen::described(Vec::new())
    })
}

/// Whether a run reports the finding at its start: failures, slow or shared GPUs.
fn is_of_shown(finding: &Finding) -> bool {
    finding.severity != Severity::Note || finding.id == "some-gpus-hidden"
}

/// Library for matrix products: cuBLASLt if it is found, unless the environment says otherwise.
fn products(cuda: &Cuda, variables: &Variables) -> Result<Products, Failure> {
    let library = cuda
        .libraries
        .iter()
        .find(|library| library.kind == survey::facts::LibraryKind::CublasLt);
    let found = library.is_some_and(|library| library.path.is_some());
    match (variables.matmul()?, found) {
        (Matmul::Own, _) | (Matmul::Auto, false) => Ok(Products::Own),
        (Matmul::Auto | Matmul::CublasLt, true) => Ok(Products::CublasLt),
        (Matmul::CublasLt, false) => {
            let mut failure = Failure::new(
                ErrorCode::Cuda,
                text!(
                    "{MATMUL}=cublaslt: cuBLASLt was not found",
                    "{MATMUL}=cublaslt：没有找到 cuBLASLt"
                ),
                both(
                    "it is loaded at run time, and none of the searched directories has it",
                    "它在运行时加载，但搜索过的目录中都没有它",
                ),
            );
            for attempt in library.iter().flat_map(|library| &library.attempts) {
                failure = failure.evidence(attempt.sentence());
            }
            Err(failure
                .next(both(
                    "give its directory: TESSERA_CUDA_LIBS=/path/to/directory",
                    "请指定它所在的目录：TESSERA_CUDA_LIBS=/path/to/directory",
                ))
                .next(text!(
                    "unset {MATMUL}: the kernels of this program then compute matrix products",
                    "请取消设置 {MATMUL}：矩阵乘法改由本程序的内核计算"
                )))
        }
    }
}

fn run_gpu(gpu: &Gpu, products: Products, fused: bool) -> Option<RunGpu> {
    let memory_bytes = gpu.memory_bytes?;
    Some(RunGpu {
        ordinal: gpu.ordinal?,
        name: gpu.name.clone().unwrap_or_else(|| "unnamed".to_owned()),
        uuid: gpu.uuid.clone(),
        multiprocessors: gpu.multiprocessors?,
        compute_capability: gpu.compute_capability,
        memory_bytes,
        free_bytes: gpu.free_bytes.unwrap_or(memory_bytes),
        peers: gpu.peers.clone().unwrap_or_default(),
        products,
        fused_attention_backward: fused,
    })
}

/// Why no GPU is usable, in words.
fn missing(cuda: &Cuda, findings: &[Finding]) -> Text {
    let about = |finding: &&Finding| finding.id != "some-gpus-hidden";
    let first = findings.iter().find(about);
    let title = first.map(|finding| finding.title.without_end(INSTEAD));
    title
        .or_else(|| cuda.problem_text())
        .unwrap_or_else(|| both("CUDA reports no GPU", "CUDA 报告没有 GPU").into())
}

/// Failure of `--device cuda`: a GPU that is too old (E11), or no working CUDA (E12).
fn refusal(cuda: &Cuda, gpus: &[Gpu], findings: &[Finding], variables: &Variables) -> Failure {
    let too_old = findings.iter().any(|finding| finding.id == "gpu-too-old");
    let mut failure = Failure::new(
        if too_old {
            ErrorCode::DeviceTooOld
        } else {
            ErrorCode::Cuda
        },
        both(
            "--device cuda: no usable GPU was found",
            "--device cuda：没有找到可用的 GPU",
        ),
        missing(cuda, findings),
    );
    if let Some(mask) = variables.get(MASK) {
        failure = failure.evidence(Text::literal(format_args!(
            "{MASK}={}",
            mask.to_string_lossy()
        )));
    }
    if let Some(version) = &cuda.kernel_module {
        failure = failure.evidence(text!("kernel module {version}", "内核模块 {version}"));
    }
    if let Some(problem) = cuda.problem_text() {
        failure = failure.evidence(problem);
    }
    failure = failure.evidence(text!(
        "NVIDIA graphics devices: {} on the bus, {} seen by CUDA or NVML",
        "NVIDIA 图形设备：总线上 {} 个，CUDA 或 NVML 可见 {} 个",
        cuda.pci_devices,
        gpus.len()
    ));
    for library in cuda.libraries.iter().filter(|found| found.path.is_none()) {
        let tried = library.attempts.iter();
        let tried: Vec<Text> = tried.map(survey::facts::AttemptFacts::sentence).collect();
        if library.kind == survey::facts::LibraryKind::Driver {
            failure = failure.evidence(text!(
                "{}: tried {}",
                "{}：尝试过 {}",
                library.name,
                Text::list(&tried)
            ));
        }
    }
    let about = findings
        .iter()
        .filter(|f| f.severity != Severity::Note || f.id == "no-gpu");
    for next in about.flat_map(|finding| &finding.next) {
        if !failure.next.contains(next) {
            failure = failure.next(next.clone());
        }
    }
    failure
        .next(both(
            "--device cpu trains on the CPU; --device auto uses a GPU only if one is usable",
            "--device cpu 在 CPU 上训练；--device auto 只在有可用 GPU 时使用它",
        ))
        .next(both(
            "`launcher doctor` lists the libraries and where they were searched",
            "`launcher doctor` 会列出各个库以及搜索过的位置",
        ))
}
