//! GPUs that cannot be used.

use super::{Page, both};

pub(super) static DEVICE_TOO_OLD: Page = Page {
    title: both("the GPU is too old", "GPU 过旧"),
    meaning: both(
        "--device cuda was asked for, and the driver works, but no visible GPU has compute capability 8.0 or newer. Kernels here use bf16 matrix instructions that older GPUs (V100, T4, RTX 20, GTX) do not have.",
        "指定了 --device cuda，驱动也能工作，但可见的 GPU 计算能力都低于 8.0。本程序的内核使用 bf16 矩阵指令，较旧的 GPU（V100、T4、RTX 20、GTX）没有这些指令。",
    ),
    causes: &[
        both("A machine with older GPUs only.", "机器上只有较旧的 GPU。"),
        both(
            "CUDA_VISIBLE_DEVICES names the older ones of several.",
            "CUDA_VISIBLE_DEVICES 选中了多块 GPU 中较旧的。",
        ),
    ],
    look_at: &[both(
        "`launcher doctor` lists every GPU with its compute capability, also those that are hidden.",
        "`launcher doctor` 会列出所有 GPU 及其计算能力，包括被隐藏的。",
    )],
    what_to_do: &[
        both(
            "Choose newer GPUs: CUDA_VISIBLE_DEVICES=1, or by identity: CUDA_VISIBLE_DEVICES=GPU-....",
            "选择较新的 GPU：CUDA_VISIBLE_DEVICES=1，或按 UUID：CUDA_VISIBLE_DEVICES=GPU-....",
        ),
        both(
            "--device cpu trains on the CPU; --device auto takes a GPU only where one can be used.",
            "--device cpu 在 CPU 上训练；--device auto 只在有可用 GPU 时使用 GPU。",
        ),
    ],
    example: include_str!("examples/E11.txt"),
};

pub(super) static CUDA: Page = Page {
    title: both("CUDA cannot be used", "无法使用 CUDA"),
    meaning: both(
        "--device cuda was asked for, and there is no driver, it is too old, it shows no GPU, or a GPU failed while the run used it. Nothing is needed but the driver: no CUDA toolkit, no Python.",
        "指定了 --device cuda，但没有驱动、驱动过旧、驱动没有显示 GPU，或 GPU 在运行中出错。只需要驱动，不需要 CUDA 工具包，也不需要 Python。",
    ),
    causes: &[
        both(
            "A container that was started without GPUs, or a machine without NVIDIA's driver.",
            "容器启动时没有挂载 GPU，或机器没有安装 NVIDIA 驱动。",
        ),
        both(
            "A driver below 570 (CUDA 12.8), or one that was updated since the machine started.",
            "驱动低于 570（CUDA 12.8），或开机之后更新过驱动。",
        ),
        both(
            "CUDA_VISIBLE_DEVICES is empty or names GPUs that are not there.",
            "CUDA_VISIBLE_DEVICES 为空，或指定了不存在的 GPU。",
        ),
        both(
            "A GPU that fell off the bus or reported memory errors; the cause is then the driver's own word.",
            "GPU 掉线或报告了显存错误；此时 cause 一行是驱动给出的原文。",
        ),
    ],
    look_at: &[
        both(
            "The evidence: which places were searched for libcuda.so.1, and how many NVIDIA devices the bus has.",
            "查看 evidence：在哪些位置查找过 libcuda.so.1，总线上有多少 NVIDIA 设备。",
        ),
        both(
            "`nvidia-smi` and `launcher doctor`, in the same shell or container.",
            "在同一个终端或容器里运行 `nvidia-smi` 和 `launcher doctor`。",
        ),
    ],
    what_to_do: &[
        both(
            "Docker: --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility.",
            "Docker：使用 --gpus all 和 NVIDIA_DRIVER_CAPABILITIES=compute,utility。",
        ),
        both(
            "A driver from 570 on; after an update, restart the machine.",
            "安装 570 或更新的驱动；更新后请重启机器。",
        ),
        both(
            "--device cpu trains on the CPU; after a failure in a run, --resume auto continues from the last checkpoint.",
            "--device cpu 在 CPU 上训练；运行中出错后可用 --resume auto 从最近的检查点继续。",
        ),
    ],
    example: include_str!("examples/E12.txt"),
};
