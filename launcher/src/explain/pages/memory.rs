//! Memory of devices, of the host, and shared memory.

use super::{Page, both};

pub(super) static DEVICE_MEMORY: Page = Page {
    title: both("device memory ran out", "设备内存不足"),
    meaning: both(
        "A rank asked its device for more memory than there is, or than --device-memory-limit allows, while it ran. The report names the operation's unit, what the memory was used for, and the samples at hand.",
        "某个 rank 在运行中申请的设备内存超过了设备容量或 --device-memory-limit 的上限。报告会给出所在的单元、各类内存的占用以及当时的样本。",
    ),
    causes: &[
        both(
            "A micro-batch with much longer samples or larger pictures than the ones before it.",
            "当前微批的样本或图片比之前的大得多。",
        ),
        both(
            "An evaluation batch that is larger than a training batch.",
            "评估批次比训练批次更大。",
        ),
        both(
            "A limit set close to what the plan needs.",
            "内存上限设置得过于接近计划所需。",
        ),
    ],
    look_at: &[
        both(
            "The line 'in use': its largest part is what to reduce.",
            "查看 in use 一行：占用最大的一项就是要减少的对象。",
        ),
        both(
            "The samples named: are they far longer than the rest? `launcher data check` lists the longest.",
            "报告中的样本是否远长于其他样本？用 `launcher data check` 可以列出最长的样本。",
        ),
    ],
    what_to_do: &[
        both(
            "Take the first line under 'next': it was computed for this run and fits by its plan.",
            "采用 next 下的第一行建议：它是针对本次运行计算的，按计划可以放下。",
        ),
        both(
            "A smaller --per-device-train-batch-size with more --gradient-accumulation-steps gives the same global batch.",
            "减小 --per-device-train-batch-size 并增大 --gradient-accumulation-steps，全局批大小保持不变。",
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
        "The operating system killed a rank (signal 9), or host memory for offloaded states could not be had. This is RAM, not GPU memory. Where the kernel counts its kills, the report says by how many the counter rose.",
        "操作系统杀死了某个 rank（信号 9），或者无法为卸载的状态分配主机内存。这里指的是内存（RAM），不是显存。若内核记录了 OOM 次数，报告会给出增量。",
    ),
    causes: &[
        both(
            "The limit of a container or a batch job is lower than the machine's memory.",
            "容器或作业的内存上限低于机器内存。",
        ),
        both(
            "Other programs took memory after the run had been planned.",
            "在计划之后其他程序占用了内存。",
        ),
        both(
            "Somebody or a scheduler used `kill -9`.",
            "有人或调度器执行了 `kill -9`。",
        ),
    ],
    look_at: &[
        both(
            "oom_kill: above 0 the kernel killed for lack of memory; at 0 look for who sent the signal.",
            "oom_kill 大于 0 表示内核因内存不足而杀进程；为 0 时请查找发送信号者。",
        ),
        both(
            "The resident memory of every rank just before, and the cgroup limit.",
            "各 rank 被杀前的常驻内存，以及 cgroup 上限。",
        ),
        both(
            "`launcher doctor` shows the limits in force.",
            "`launcher doctor` 会显示生效的限制。",
        ),
    ],
    what_to_do: &[
        both(
            "Take the first line under 'next'; its need is computed by the plan.",
            "采用 next 下的第一行，其所需内存由计划算出。",
        ),
        both(
            "--precision pure-bf16 needs the least memory per trained parameter.",
            "--precision pure-bf16 使每个可训练参数占用的内存最少。",
        ),
        both(
            "Raise the limit of the container or job, then --resume auto.",
            "提高容器或作业的内存上限，然后用 --resume auto 继续。",
        ),
    ],
    example: include_str!("examples/E02.txt"),
};

pub(super) static PLAN: Page = Page {
    title: both("the run does not fit by its plan", "按计划无法放下"),
    meaning: both(
        "Before a weight was read, the memory that the run needs was computed and compared with what there is. Nothing was started and nothing was written.",
        "在读取任何权重之前，程序会计算运行所需的内存并与可用内存比较。没有启动任何进程，也没有写入任何文件。",
    ),
    causes: &[
        both(
            "The model with its gradients and optimizer states is larger than the memory.",
            "模型连同梯度和优化器状态大于可用内存。",
        ),
        both(
            "A very long sample or a large micro-batch: its activations are measured, not guessed.",
            "样本很长或微批很大：激活内存是实测的，不是估计的。",
        ),
    ],
    look_at: &[both(
        "The parts per rank: the largest one decides which change helps.",
        "查看每个 rank 的各部分：最大的一项决定哪种改动有效。",
    )],
    what_to_do: &[
        both(
            "The lines under 'next' are plans of neighbouring settings; those that say 'fits' would start.",
            "next 下各行是相邻设置的计划；标有 fits 的可以启动。",
        ),
        both(
            "`launcher plan` with the same flags shows the bytes by phase, tier and kind and the nearest settings that fit; with --hw and --ram it plans for another machine.",
            "用相同参数运行 `launcher plan` 可以按阶段、层级和类别查看字节数，以及最接近且能放下的设置；加上 --hw 和 --ram 可以为另一台机器做计划。",
        ),
        both(
            "Train less: --use-lora true, --tune-vision false, --train PARTS.",
            "减少训练的部分：--use-lora true、--tune-vision false、--train PARTS。",
        ),
    ],
    example: include_str!("examples/E17.txt"),
};

pub(super) static SHARED_MEMORY: Page = Page {
    title: both("shared memory is too small", "共享内存过小"),
    meaning: both(
        "The ranks of one machine exchange data through a file in /dev/shm, or in /tmp where that is too small. Neither had room for it.",
        "同一台机器上的 rank 通过 /dev/shm 中的文件交换数据，/dev/shm 太小时改用 /tmp。两处都没有足够空间。",
    ),
    causes: &[
        both(
            "A container with Docker's default of 64 MiB.",
            "容器使用了 Docker 默认的 64 MiB。",
        ),
        both(
            "Files that another job left in /dev/shm.",
            "其他作业在 /dev/shm 中留下了文件。",
        ),
    ],
    look_at: &[both(
        "`df -h /dev/shm /tmp`, and the bytes named under 'evidence'.",
        "执行 `df -h /dev/shm /tmp`，并对照 evidence 中的字节数。",
    )],
    what_to_do: &[
        both(
            "Docker: --shm-size 8g; Kubernetes: an emptyDir of medium Memory at /dev/shm.",
            "Docker 使用 --shm-size 8g；Kubernetes 在 /dev/shm 挂载 medium 为 Memory 的 emptyDir。",
        ),
        both(
            "--nproc 1 needs no shared memory.",
            "--nproc 1 不需要共享内存。",
        ),
    ],
    example: include_str!("examples/E15.txt"),
};
