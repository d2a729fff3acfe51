//! Findings about driver, GPUs and libraries.

use std::fmt::Display;

use super::{Findings, MINIMUM_CAPABILITY, is_usable};
use crate::device::survey::facts::{Facts, Gpu, LibraryKind, version_text};
use crate::lang::{Both, Text, both, text};
use crate::units::bytes;

/// Used bytes of a GPU above which a finding is reported although no process is visible. The driver itself uses less.
const UNSEEN_BYTES: u64 = 2 << 30;

const INSTALL: Both = both(
    "install NVIDIA's driver; the CUDA toolkit is not needed",
    "请安装 NVIDIA 驱动；不需要 CUDA toolkit",
);
const CONTAINER: Both = both(
    "in a container: start it with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    "在容器中：启动时请加 --gpus all 和 NVIDIA_DRIVER_CAPABILITIES=compute,utility",
);
const NAME_DIRECTORY: Both = both(
    "or give its directory: TESSERA_CUDA_LIBS=/path/to/directory",
    "或指定它所在的目录：TESSERA_CUDA_LIBS=/path/to/directory",
);
const CHOOSE: Both = both(
    "or choose GPUs with CUDA_VISIBLE_DEVICES",
    "或用 CUDA_VISIBLE_DEVICES 选择 GPU",
);

/// Adds findings on the NVIDIA driver and on why CUDA shows no GPU.
pub(super) fn driver(facts: &Facts, findings: &mut Findings) {
    let cuda = &facts.cuda;
    let is_there = cuda.pci_devices > 0 || cuda.kernel_module.is_some() || !facts.gpus.is_empty();
    if !facts.program.has_cuda {
        let title = both(
            "this build has no CUDA support: runs use the CPU",
            "此构建不支持 CUDA：运行使用 CPU",
        );
        let next: [&dyn Display; 1] = [&both(
            "build without --no-default-features",
            "请在构建时去掉 --no-default-features",
        )];
        if is_there {
            findings.warning("cuda-left-out", title, &next);
        } else {
            findings.note("cuda-left-out", title, &next);
        }
        return;
    }
    if cuda.is_mismatched {
        findings.problem(
            "driver-mismatch",
            both(
                "the driver's kernel module and its libraries have different versions",
                "驱动的内核模块与其库的版本不同",
            ),
            &[&both(
                "restart the machine; the driver was probably updated since its last start",
                "请重启机器；上次启动之后驱动可能更新过",
            )],
        );
    }
    if let (Some(version), Some(minimum)) = (cuda.cuda_version, cuda.minimum_cuda_version)
        && version < minimum
    {
        let (version, minimum) = (version_text(version), version_text(minimum));
        findings.problem(
            "driver-too-old",
            text!(
                "the driver supports CUDA {version}; {minimum} is needed",
                "驱动支持 CUDA {version}，而需要 {minimum}"
            ),
            &[&text!(
                "install a driver for CUDA {minimum} or newer",
                "请安装支持 CUDA {minimum} 或更新版本的驱动"
            )],
        );
    }
    if facts.gpus.iter().any(|gpu| gpu.ordinal.is_some()) || cuda.is_mismatched {
        return;
    }
    let none = both("CUDA reports no GPU", "CUDA 报告没有 GPU");
    let problem = cuda.problem_text().unwrap_or_else(|| none.into());
    let mask = variable(facts, "CUDA_VISIBLE_DEVICES");
    if !is_there {
        findings.note(
            "no-gpu",
            both(
                "no NVIDIA GPU was found: runs use the CPU",
                "没有找到 NVIDIA GPU：运行使用 CPU",
            ),
            &[
                &both(
                    "if the machine has one: install NVIDIA's driver",
                    "如果机器上有 GPU：请安装 NVIDIA 驱动",
                ),
                &CONTAINER,
            ],
        );
    } else if !is_found(facts, LibraryKind::Driver) {
        findings.problem(
            "driver-library-missing",
            both("an NVIDIA GPU is present, but the CUDA driver library is missing: runs use the CPU", "有 NVIDIA GPU，但缺少 CUDA 驱动库：运行使用 CPU"),
            &[&INSTALL, &CONTAINER, &NAME_DIRECTORY],
        );
    } else if let (Some(mask), false) = (mask, facts.gpus.is_empty()) {
        findings.warning(
            "gpus-hidden",
            text!(
                "CUDA_VISIBLE_DEVICES={mask} hides every GPU: runs use the CPU",
                "CUDA_VISIBLE_DEVICES={mask} 隐藏了所有 GPU：运行使用 CPU"
            ),
            &[&both(
                "unset it, or name GPUs by their numbers: CUDA_VISIBLE_DEVICES=0",
                "请取消设置，或按编号指定 GPU：CUDA_VISIBLE_DEVICES=0",
            )],
        );
    } else {
        findings.problem(
            "driver-fails",
            text!(
                "an NVIDIA GPU is present, but CUDA does not work: {problem}",
                "有 NVIDIA GPU，但 CUDA 无法工作：{problem}"
            ),
            &[
                &both(
                    "check whether nvidia-smi works",
                    "请检查 nvidia-smi 是否可用",
                ),
                &INSTALL,
                &CONTAINER,
            ],
        );
    }
}

/// Adds findings on each GPU by itself: lost, unhealthy, too old, in use by others, or on a narrow PCI Express link.
pub(super) fn devices(facts: &Facts, findings: &mut Findings) {
    for gpu in &facts.gpus {
        let label = gpu.label();
        if gpu.ordinal.is_none() && gpu.name.is_none() {
            let reason = match gpu.unread.first() {
                Some(reason) => Text::literal(reason),
                None => both("no reason given", "没有给出原因").into(),
            };
            findings.problem(
                "gpu-lost",
                text!(
                    "{label} does not respond: {reason}",
                    "{label} 没有响应：{reason}"
                ),
                &[&both(
                    "restart the machine; look for Xid messages in its log (dmesg)",
                    "请重启机器；在系统日志（dmesg）中查找 Xid 消息",
                )],
            );
            continue;
        }
        health(gpu, &label, findings);
        if gpu.ordinal.is_none() {
            continue;
        }
        if let Some(capability) = gpu.compute_capability.filter(|_| !is_usable(gpu)) {
            let (has, needs) = (version_text(capability), version_text(MINIMUM_CAPABILITY));
            let name = gpu.product();
            findings.warning(
                "gpu-too-old",
                text!(
                    "{label} ({name}) has compute capability {has}; kernels need {needs}",
                    "{label}（{name}）的计算能力为 {has}，而内核需要 {needs}"
                ),
                &[&both(
                    "choose other GPUs with CUDA_VISIBLE_DEVICES, or --device cpu",
                    "请用 CUDA_VISIBLE_DEVICES 选择其他 GPU，或使用 --device cpu",
                )],
            );
        }
        foreign_use(gpu, &label, findings);
        if let (Some(width), Some(most)) = (gpu.pcie.width, gpu.pcie.max_width)
            && width < most
        {
            findings.note(
                "pcie-narrow",
                text!("{label} uses {width} of {most} PCI Express lanes", "{label} 使用了 {most} 条 PCI Express 通道中的 {width} 条"),
                &[ &both("offload to host memory is slower; check the slot, the riser and the firmware settings", "卸载到主机内存会更慢；请检查插槽、转接卡和固件设置")],
            );
        }
    }
    let hidden = facts.gpus.iter().filter(|gpu| gpu.ordinal.is_none());
    let (hidden, all) = (hidden.count(), facts.gpus.len());
    if let (Some(mask), true) = (
        variable(facts, "CUDA_VISIBLE_DEVICES"),
        hidden > 0 && hidden < all,
    ) {
        findings.note(
            "some-gpus-hidden",
            text!(
                "CUDA_VISIBLE_DEVICES={mask} hides {hidden} of {all} GPUs",
                "CUDA_VISIBLE_DEVICES={mask} 隐藏了 {all} 块 GPU 中的 {hidden} 块"
            ),
            &[&both(
                "unset it to use all of them",
                "请取消设置以使用全部 GPU",
            )],
        );
    }
}

fn health(gpu: &Gpu, label: &str, findings: &mut Findings) {
    if gpu.has_row_remap_failed == Some(true) {
        findings.problem(
            "gpu-memory-defect",
            text!(
                "{label} has a memory row that could not be remapped",
                "{label} 有一行显存无法重映射"
            ),
            &[&both(
                "do not train on this GPU; have it replaced",
                "请勿在这块 GPU 上训练；请更换它",
            )],
        );
    }
    if gpu.is_row_remap_pending == Some(true) {
        findings.warning(
            "gpu-row-remap-pending",
            text!(
                "{label} has a memory row that will be remapped at the next reset",
                "{label} 有一行显存将在下次重置时重映射"
            ),
            &[&both(
                "reset the GPU or restart the machine before a long run",
                "长时间运行之前，请重置 GPU 或重启机器",
            )],
        );
    }
    if let Some(errors) = gpu.uncorrected_ecc_errors.filter(|errors| *errors > 0) {
        findings.warning(
            "gpu-ecc-errors",
            text!(
                "{label} had {errors} uncorrected memory errors since the driver was loaded",
                "自驱动加载以来，{label} 出现过 {errors} 次不可纠正的显存错误"
            ),
            &[&both(
                "restart the machine; have the GPU replaced if the errors return",
                "请重启机器；如果错误再次出现，请更换这块 GPU",
            )],
        );
    }
}

/// Adds a finding if other processes use memory of the GPU.
fn foreign_use(gpu: &Gpu, label: &str, findings: &mut Findings) {
    let processes = gpu.processes.as_deref().unwrap_or_default();
    let all = gpu.memory_bytes.unwrap_or(0);
    let end = both(
        "end these processes, or set --device-memory-limit",
        "请结束这些进程，或设置 --device-memory-limit",
    );
    if !processes.is_empty() {
        let held: u64 = processes
            .iter()
            .filter_map(|process| process.used_bytes)
            .sum();
        let held = match held {
            0 => gpu.used_bytes.unwrap_or(0),
            held => held,
        };
        let numbers: Vec<String> = processes.iter().map(|p| p.pid.to_string()).collect();
        findings.warning(
            "gpu-in-use",
            text!(
                "{label}: other processes hold {} of {} (process {})",
                "{label}：其他进程占用了 {1} 中的 {0}（进程 {2}）",
                bytes(held),
                bytes(all),
                numbers.join(", ")
            ),
            &[&end, &CHOOSE],
        );
    } else if let Some(used) = gpu.used_bytes.filter(|used| *used > UNSEEN_BYTES) {
        findings.warning(
            "gpu-in-use",
            text!(
                "{label}: {} of {} are in use by processes that are not visible here",
                "{label}：此处不可见的进程占用了 {1} 中的 {0}",
                bytes(used),
                bytes(all)
            ),
            &[
                &both(
                    "run nvidia-smi outside the container",
                    "请在容器外运行 nvidia-smi",
                ),
                &CHOOSE,
            ],
        );
    }
}

/// Whether two GPUs count as equal: same name, compute capability and multiprocessors, and memory within 1 %.
pub(super) fn is_alike(one: &Gpu, other: &Gpu) -> bool {
    let kind = |gpu: &Gpu| {
        (
            gpu.name.clone(),
            gpu.compute_capability,
            gpu.multiprocessors,
        )
    };
    // Firmware uses slightly different amounts of memory on different cards.
    let (a, b) = (
        one.memory_bytes.unwrap_or(0),
        other.memory_bytes.unwrap_or(0),
    );
    kind(one) == kind(other) && a.abs_diff(b) <= a.max(b) / 100
}

/// Adds findings on how the usable GPUs go together: different kinds, or no peer access.
pub(super) fn together(facts: &Facts, findings: &mut Findings) {
    let gpus: Vec<&Gpu> = facts.gpus.iter().filter(|gpu| is_usable(gpu)).collect();
    if super::are_equal(facts) == Some(false) {
        let kinds: Vec<Text> = gpus
            .iter()
            .map(|gpu| {
                text!(
                    "{} {} {}",
                    "{} {} {}",
                    gpu.label(),
                    gpu.product(),
                    bytes(gpu.memory_bytes.unwrap_or(0))
                )
            })
            .collect();
        findings.warning(
            "gpus-differ",
            text!("the GPUs differ: {}", "各 GPU 不同：{}", Text::list(&kinds)),
            &[
                &both(
                    "ranks get equal shares: the smallest memory and the slowest GPU limit the run",
                    "各 rank 的份额相同：最小的显存和最慢的 GPU 限制整个运行",
                ),
                &both(
                    "choose equal GPUs with CUDA_VISIBLE_DEVICES",
                    "请用 CUDA_VISIBLE_DEVICES 选择相同的 GPU",
                ),
            ],
        );
    }
    let mut apart = Vec::new();
    for (place, gpu) in gpus.iter().enumerate() {
        for other in &gpus[place + 1..] {
            if let (Some(peers), Some(one), Some(two)) = (&gpu.peers, gpu.ordinal, other.ordinal)
                && !peers.contains(&two)
            {
                apart.push(format!("{one}–{two}"));
            }
        }
    }
    if !apart.is_empty() {
        findings.note(
            "no-peer-access",
            text!(
                "GPUs without peer access to each other: {}",
                "彼此没有对等访问的 GPU：{}",
                apart.join(", ")
            ),
            &[ &both("ranks on them exchange through host memory; most consumer GPUs have no peer access", "其上的 rank 经由主机内存交换数据；多数消费级 GPU 没有对等访问")],
        );
    }
}

/// Adds findings on NVIDIA libraries that are missing, if a GPU could use them, and on search directories that do not
/// exist.
pub(super) fn libraries(facts: &Facts, findings: &mut Findings) {
    let shown = facts.gpus.iter().filter(|gpu| gpu.ordinal.is_some());
    let shown = shown.count();
    for directory in &facts.cuda.search.directories {
        if !directory.is_dir() {
            findings.warning(
                "library-folder-missing",
                text!(
                    "TESSERA_CUDA_LIBS names {}, which is not a directory",
                    "TESSERA_CUDA_LIBS 指定的 {} 不是目录",
                    directory.display()
                ),
                &[&both(
                    "give directories that contain libraries, separated by colons",
                    "请指定含有这些库的目录，用冒号分隔",
                )],
            );
        }
    }
    if shown == 0 {
        return;
    }
    // Packages for CUDA 13 and later have no version in their names.
    let suffix = match facts.cuda.cuda_version {
        Some((major, _)) if major < 13 => "-cu12",
        _ => "",
    };
    let install = |package: &str| {
        text!(
            "pip install {package}{suffix}; no toolkit is needed",
            "pip install {package}{suffix}；不需要 toolkit"
        )
    };
    if !is_found(facts, LibraryKind::Nvrtc) {
        findings.warning(
            "nvrtc-missing",
            both("NVRTC was not found: runs use the built-in PTX kernels and none compiled for this GPU", "没有找到 NVRTC：运行使用内置的 PTX 内核，不为这块 GPU 编译"),
            &[&install("nvidia-cuda-nvrtc"), &NAME_DIRECTORY],
        );
    }
    if !is_found(facts, LibraryKind::CublasLt) {
        findings.note(
            "cublaslt-missing",
            both(
                "cuBLASLt was not found: matrix products use this program's kernels",
                "没有找到 cuBLASLt：矩阵乘法使用本程序的内核",
            ),
            &[&install("nvidia-cublas"), &NAME_DIRECTORY],
        );
    }
    if shown > 1 && !is_found(facts, LibraryKind::Nccl) {
        findings.note(
            "nccl-missing",
            both(
                "NCCL was not found: ranks exchange through shared memory",
                "没有找到 NCCL：各 rank 经由共享内存交换数据",
            ),
            &[&install("nvidia-nccl"), &NAME_DIRECTORY],
        );
    }
    if let Some(problem) = &facts.cuda.management_problem {
        findings.note(
            "nvml-fails",
            text!(
                "the use of the GPUs by other processes is unknown: {problem}",
                "无法得知其他进程对 GPU 的使用：{problem}"
            ),
            &[&CONTAINER],
        );
    }
}

fn is_found(facts: &Facts, kind: LibraryKind) -> bool {
    let libraries = &facts.cuda.libraries;
    libraries
        .iter()
        .any(|library| library.kind == kind && library.path.is_some())
}

/// Value of the environment variable `name`, if it is set.
fn variable<'a>(facts: &'a Facts, name: &str) -> Option<&'a str> {
    let row = facts.environment.iter().find(|row| row.name == name)?;
    row.value.as_deref()
}
