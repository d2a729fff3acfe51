//! Pages about unusable GPUs.

use super::{Page, both};

pub(super) static DEVICE_TOO_OLD: Page = Page {
    title: both("the GPU is too old", "GPU 过旧"),
    meaning: both(
        "The flag --device cuda is set and the driver works, but no visible GPU has compute capability 8.0 or newer. The kernels use bf16 matrix instructions, which older GPUs (V100, T4, RTX 20, GTX) do not have.",
        "指定了 --device cuda，驱动也能工作，但可见的 GPU 计算能力都低于 8.0。本程序的内核使用 bf16 矩阵指令，较旧的 GPU（V100、T4、RTX 20、GTX）没有这些指令。",
    ),
    causes: &[
        both("The machine has only older GPUs.", "机器上只有较旧的 GPU。"),
        both(
            "CUDA_VISIBLE_DEVICES selects the older GPUs of the machine.",
            "CUDA_VISIBLE_DEVICES 选中了机器上较旧的 GPU。",
        ),
    ],
    look_at: &[both(
        "`launcher doctor` lists every GPU with its compute capability, including hidden GPUs.",
        "`launcher doctor` 会列出所有 GPU 及其计算能力，包括被隐藏的 GPU。",
    )],
    what_to_do: &[
        both(
            "Select newer GPUs: CUDA_VISIBLE_DEVICES=1, or by UUID: CUDA_VISIBLE_DEVICES=GPU-....",
            "选择较新的 GPU：按编号 CUDA_VISIBLE_DEVICES=1，或按 UUID CUDA_VISIBLE_DEVICES=GPU-....",
        ),
        both(
            "--device cpu trains on the CPU; --device auto uses a GPU only if one is usable.",
            "--device cpu 在 CPU 上训练；--device auto 只在有可用 GPU 时才使用 GPU。",
        ),
    ],
    example: include_str!("examples/E11.txt"),
};

pub(super) static CUDA: Page = Page {
    title: both("CUDA cannot be used", "无法使用 CUDA"),
    meaning: both(
        "The flag --device cuda is set, but the driver is missing, too old, or reports no GPU; or a GPU failed during the run. The program needs only the driver, no CUDA toolkit.",
        "指定了 --device cuda，但缺少驱动、驱动过旧或驱动没有报告 GPU；或者 GPU 在运行中出错。本程序只需要驱动，不需要 CUDA 工具包。",
    ),
    causes: &[
        both(
            "The container was started without GPUs, or the machine has no NVIDIA driver.",
            "容器启动时没有挂载 GPU，或机器没有安装 NVIDIA 驱动。",
        ),
        both(
            "The driver is older than 535 (CUDA 12.2), or it was updated after the machine started.",
            "驱动低于 535（CUDA 12.2），或开机之后更新过驱动。",
        ),
        both(
            "CUDA_VISIBLE_DEVICES is empty or names GPUs that do not exist.",
            "CUDA_VISIBLE_DEVICES 为空，或指定了不存在的 GPU。",
        ),
        both(
            "A GPU fell off the bus or reported memory errors. The line 'cause' is then the message of the driver.",
            "GPU 掉线或报告了显存错误。此时 cause 一行是驱动给出的原文。",
        ),
    ],
    look_at: &[
        both(
            "The lines 'evidence': where libcuda.so.1 was searched, and how many NVIDIA devices the bus has.",
            "evidence 各行：在哪些位置查找过 libcuda.so.1，总线上有多少 NVIDIA 设备。",
        ),
        both(
            "`nvidia-smi` and `launcher doctor`, in the same shell or container.",
            "在同一个终端或容器中运行 `nvidia-smi` 和 `launcher doctor`。",
        ),
    ],
    what_to_do: &[
        both(
            "Docker: use --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility.",
            "Docker：使用 --gpus all 和 NVIDIA_DRIVER_CAPABILITIES=compute,utility。",
        ),
        both(
            "Install driver 535 or newer. Restart the machine after an update.",
            "安装 535 或更新的驱动。更新后请重启机器。",
        ),
        both(
            "--device cpu trains on the CPU. After a failure during a run, --resume RUN (its directory) continues from the last checkpoint.",
            "--device cpu 在 CPU 上训练。运行中出错后，可用 --resume RUN（RUN 为运行目录）从最后一个检查点继续。",
        ),
    ],
    example: include_str!("examples/E12.txt"),
};

pub(super) static VERIFICATION: Page = Page {
    title: both(
        "a GPU does not compute what the CPU computes",
        "GPU 的计算结果与 CPU 不一致",
    ),
    meaning: both(
        "Before a run with a new combination of GPU, driver, libraries and kernels is planned, its operations and two steps of a tiny model were compared with the CPU. They differ, failed or did not end, and no other library, transport or mode of this program was right.",
        "遇到新的 GPU、驱动、库和内核组合时，本程序会在制定计划之前把本次运行的各项运算以及一个微型模型的两步训练与 CPU 对比。结果不一致、出错或没有结束，而且本程序的其他库、传输方式和模式也都不正确。",
    ),
    causes: &[
        both(
            "The kernels of this program are wrong on this GPU, or with this driver. They were tested on an emulator.",
            "本程序的内核在该 GPU 或该驱动上有错误。这些内核是在模拟器上测试的。",
        ),
        both(
            "The GPU is damaged, overclocked, or has memory errors.",
            "GPU 损坏、超频，或显存有错误。",
        ),
    ],
    look_at: &[
        both(
            "The lines 'evidence': the operation, the element, and both numbers.",
            "evidence 各行：运算、元素以及两个数值。",
        ),
        both(
            "`nvidia-smi -q -d ECC` and the kernel log, for errors of the memory.",
            "`nvidia-smi -q -d ECC` 和内核日志，查看显存错误。",
        ),
    ],
    what_to_do: &[
        both(
            "Run `launcher doctor --verify-gpu` and send the report that it writes.",
            "运行 `launcher doctor --verify-gpu`，并发送它写出的报告。",
        ),
        both(
            "Use another GPU: CUDA_VISIBLE_DEVICES=1. Or train on the CPU: --device cpu.",
            "使用另一块 GPU：CUDA_VISIBLE_DEVICES=1。或者在 CPU 上训练：--device cpu。",
        ),
        both(
            "--verify-gpu off trains without the check. Results may be wrong.",
            "--verify-gpu off 跳过检查直接训练，结果可能是错的。",
        ),
    ],
    example: include_str!("examples/E22.txt"),
};
