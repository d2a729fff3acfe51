//! Pages about device memory, host memory and shared memory.

use super::{Page, both};

pub(super) static DEVICE_MEMORY: Page = Page {
    title: both("device memory ran out", "设备内存不足"),
    meaning: both(
        "During the run, a rank requested more device memory than the device has, or than --device-memory-limit allows. The report names the unit and the phase, how the memory was used, and the samples of the micro-batch.",
        "运行过程中，某个 rank 申请的设备内存超过了设备容量或 --device-memory-limit 的上限。报告会给出当时所在的单元和阶段、内存的用途，以及该微批的样本。",
    ),
    causes: &[
        both(
            "The micro-batch has much longer samples or larger images than earlier ones.",
            "当前微批的样本比之前长得多，或图片比之前大得多。",
        ),
        both(
            "An evaluation batch is larger than a training batch.",
            "评估批次比训练批次更大。",
        ),
        both(
            "The memory limit is close to the need of the plan.",
            "内存上限与计划的需求过于接近。",
        ),
        both(
            "Another process took memory of the GPU after the plan was made.",
            "制定计划之后，其他进程占用了 GPU 显存。",
        ),
    ],
    look_at: &[
        both(
            "The line 'in use': reduce its largest part.",
            "“已用”（in use）一行：应减少占用最大的一项。",
        ),
        both(
            "The samples in the report. `launcher data check` lists the longest samples.",
            "报告中的样本。`launcher data check` 会列出最长的样本。",
        ),
    ],
    what_to_do: &[
        both(
            "Use the first line under 'next' that says 'fits': the program computed it for this run.",
            "采用“下一步”（next）中第一条标有“放得下”（fits）的建议：它是程序针对本次运行计算出来的。",
        ),
        both(
            "Adapters alone need the least: --lora-rank N with --modules-to-save none, --train none, --tune-llm false and --tune-vision false.",
            "只训练适配器占用最少：--lora-rank N，并使用 --modules-to-save none、--train none、--tune-llm false 和 --tune-vision false。",
        ),
        both(
            "A smaller --per-device-train-batch-size with more --gradient-accumulation-steps gives the same global batch.",
            "减小 --per-device-train-batch-size，同时增大 --gradient-accumulation-steps，全局批大小保持不变。",
        ),
        both(
            "--offload cpu moves parameters, gradients and optimizer states to host memory.",
            "--offload cpu 会把参数、梯度和优化器状态放到主机内存。",
        ),
    ],
    example: include_str!("examples/E01.txt"),
};

pub(super) static HOST_MEMORY: Page = Page {
    title: both("host memory ran out", "主机内存不足"),
    meaning: both(
        "The operating system killed a rank (signal 9), or the program could not allocate host memory for offloaded states. This is RAM, not GPU memory.",
        "操作系统杀死了某个 rank（信号 9），或者程序无法为卸载的状态分配主机内存。这里指内存（RAM），不是显存。",
    ),
    causes: &[
        both(
            "The memory limit of the container or of the batch job is lower than the memory of the machine.",
            "容器或作业的内存上限低于机器内存。",
        ),
        both(
            "Other programs took memory after the plan was made.",
            "制定计划之后，其他程序占用了内存。",
        ),
        both(
            "A person or a scheduler used `kill -9`.",
            "有人或调度器执行了 `kill -9`。",
        ),
    ],
    look_at: &[
        both(
            "oom_kill, the number of such kills by the kernel. If it is 0, find out who sent the signal.",
            "oom_kill：内核因内存不足而杀死进程的次数。如果为 0，请查明信号是谁发送的。",
        ),
        both(
            "The resident memory of every rank shortly before, and the cgroup limit.",
            "各 rank 被杀之前的常驻内存，以及 cgroup 上限。",
        ),
        both(
            "`launcher doctor` shows the memory and the limits of this machine.",
            "`launcher doctor` 会显示本机的内存和各项限制。",
        ),
    ],
    what_to_do: &[
        both(
            "Use the first line under 'next': its memory need comes from the plan.",
            "采用“下一步”（next）中的第一条建议：它的内存需求由计划算出。",
        ),
        both(
            "Train adapters alone; if weights must train, --precision pure-bf16 needs the least memory per trained parameter.",
            "只训练适配器；如果必须训练权重，--precision pure-bf16 使每个可训练参数占用的内存最少。",
        ),
        both(
            "Raise the limit of the container or job, then continue with --resume RUN, the run's directory.",
            "提高容器或作业的内存上限，然后用 --resume RUN（RUN 为运行目录）继续。",
        ),
    ],
    example: include_str!("examples/E02.txt"),
};

pub(super) static PLAN: Page = Page {
    title: both("the plan of the run does not fit", "按计划放不下"),
    meaning: both(
        "Before it reads a weight, the program computes the memory that the run needs and compares it with the memory of the machine. It started no rank and wrote no file.",
        "在读取任何权重之前，程序会计算运行所需的内存，并与本机可用的内存比较。程序没有启动任何 rank，也没有写入任何文件。",
    ),
    causes: &[
        both(
            "The model with its gradients and optimizer states is larger than the memory.",
            "模型连同梯度和优化器状态超过了可用内存。",
        ),
        both(
            "A sample is very long, or the micro-batch is large. A dry run measures the activations.",
            "某个样本很长，或微批很大。激活的大小由一次试运行（不占用实际内存）测得。",
        ),
    ],
    look_at: &[both(
        "The parts per rank: the largest part tells which change helps.",
        "每个 rank 的各部分：由最大的一项可知哪种改动有效。",
    )],
    what_to_do: &[
        both(
            "The lines under 'next' are plans of similar settings. A setting with 'fits' will start.",
            "“下一步”（next）中各行是相近设置的计划。标有“放得下”（fits）的设置可以启动。",
        ),
        both(
            "`launcher plan` with the same flags shows the bytes by phase, tier and kind, and the nearest setting that fits. With --hw and --ram it plans for another machine.",
            "用相同参数运行 `launcher plan`，可以按阶段、层级和类别查看字节数，以及最接近的可行设置。加上 --hw 和 --ram 可以为另一台机器做计划。",
        ),
        both(
            "Train fewer parameters: adapters alone (--lora-rank N), or --train PARTS.",
            "减少可训练参数：只训练适配器（--lora-rank N），或 --train PARTS。",
        ),
        both(
            "The plan keeps a reserve of host memory for the system and for pages of files; --host-reserve BYTES sets it.",
            "计划会为系统和文件页缓存保留一部分主机内存；用 --host-reserve BYTES 设置。",
        ),
    ],
    example: include_str!("examples/E17.txt"),
};

pub(super) static SHARED_MEMORY: Page = Page {
    title: both("shared memory is too small", "共享内存过小"),
    meaning: both(
        "The ranks of one machine exchange data through a file in /dev/shm. If /dev/shm is too small or not writable, they use TMPDIR, then /tmp. None of them has enough free space.",
        "同一台机器上的 rank 通过 /dev/shm 中的文件交换数据；/dev/shm 太小或不可写时依次改用 TMPDIR 和 /tmp。这些目录都没有足够的空闲空间。",
    ),
    causes: &[
        both(
            "The container has Docker's default /dev/shm of 64 MiB.",
            "容器的 /dev/shm 是 Docker 默认的 64 MiB。",
        ),
        both(
            "Another job left files in /dev/shm.",
            "其他作业在 /dev/shm 中留下了文件。",
        ),
    ],
    look_at: &[both(
        "`df -h /dev/shm /tmp`, and the bytes in the report.",
        "`df -h /dev/shm /tmp` 的输出，以及报告中的字节数。",
    )],
    what_to_do: &[
        both(
            "Docker: --shm-size 8g; Kubernetes: an emptyDir of medium Memory at /dev/shm.",
            "Docker 使用 --shm-size 8g；Kubernetes 在 /dev/shm 挂载 medium 为 Memory 的 emptyDir。",
        ),
        both(
            "Set TMPDIR to a writable directory with that much free space.",
            "把 TMPDIR 设为有足够空闲空间的可写目录。",
        ),
        both(
            "--nproc 1 needs no shared memory.",
            "--nproc 1 不需要共享内存。",
        ),
    ],
    example: include_str!("examples/E15.txt"),
};
