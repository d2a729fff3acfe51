//! Rank processes and what they say to each other.

use super::{Page, both};

pub(super) static RENDEZVOUS: Page = Page {
    title: both("the ranks did not meet", "各 rank 未能会合"),
    meaning: both(
        "Not every rank joined the exchange within --comm-timeout, a rank could not be started, or the ranks run different plans or compute with different libraries.",
        "并非所有 rank 都在 --comm-timeout 内加入交换，或某个 rank 无法启动，或各 rank 的计划或计算库不同。",
    ),
    causes: &[
        both(
            "A rank is slow to start: a cold disk, a huge data file.",
            "某个 rank 启动缓慢：磁盘冷启动，数据文件巨大。",
        ),
        both(
            "Ranks of another launcher were started with different command lines or builds.",
            "由其他启动器启动的 rank 使用了不同的命令行或构建版本。",
        ),
        both(
            "On several machines: MASTER_ADDR names another machine, a firewall closes the port, or tokens differ.",
            "多台机器时：MASTER_ADDR 指向了别的机器，防火墙关闭了端口，或令牌不一致。",
        ),
        both(
            "Machines compute with unlike libraries or GPUs, so that results would differ: NVRTC, the GPU's generation, the C library's mathematics, MPI.",
            "各机器的计算库或 GPU 不同，会使结果不一致：NVRTC、GPU 架构代次、C 库的数学函数、MPI。",
        ),
        both(
            "Variables of two launchers contradict each other, or do not tell what they count.",
            "两个启动器的环境变量相互矛盾，或没有说明计数的对象。",
        ),
    ],
    look_at: &[
        both(
            "logs/ of the ranks that are missing.",
            "缺席 rank 的 logs/ 日志。",
        ),
        both(
            "`launcher doctor` on both machines: it shows GPUs and the libraries that are found.",
            "在两台机器上运行 `launcher doctor`：它会显示 GPU 和找到的库。",
        ),
    ],
    what_to_do: &[
        both(
            "Start all ranks from the same command line and the same build.",
            "用同一命令行和同一构建启动所有 rank。",
        ),
        both(
            "Use one container image, or the same library versions, on every machine.",
            "所有机器使用同一容器镜像，或相同版本的库。",
        ),
        both(
            "Raise --comm-timeout where a rank merely starts slowly.",
            "若某个 rank 只是启动慢，请增大 --comm-timeout。",
        ),
    ],
    example: include_str!("examples/E03.txt"),
};

pub(super) static PORT_IN_USE: Page = Page {
    title: both("the port where ranks meet is in use", "会合端口已被占用"),
    meaning: both(
        "Ranks of several machines meet at a port of the first one, and another program listens there.",
        "多台机器的 rank 在第一台机器的一个端口会合，而该端口已有其他程序在监听。",
    ),
    causes: &[
        both(
            "Another run on that machine, or one that has not ended.",
            "该机器上有另一个运行，或某个运行尚未结束。",
        ),
        both(
            "A service that always has this port.",
            "某个服务一直占用该端口。",
        ),
    ],
    look_at: &[both(
        "The process that the report names; `ss -ltnp` lists all.",
        "报告中指出的进程；`ss -ltnp` 会列出全部。",
    )],
    what_to_do: &[
        both(
            "Set MASTER_PORT to another number, the same on every machine.",
            "将 MASTER_PORT 设为另一个端口号，所有机器保持一致。",
        ),
        both("End the other run.", "结束另一个运行。"),
    ],
    example: include_str!("examples/E14.txt"),
};

pub(super) static COLLECTIVE: Page = Page {
    title: both("an exchange between ranks failed", "rank 间通信失败"),
    meaning: both(
        "A rank waited longer than --comm-timeout for another one, or two ranks were found in different operations. The report names the last collective of every rank and what the process of the silent one does.",
        "某个 rank 等待另一个 rank 超过了 --comm-timeout，或者两个 rank 处于不同的操作中。报告会给出每个 rank 最后的集合通信，以及无响应进程的状态。",
    ),
    causes: &[
        both(
            "A rank was suspended: SIGSTOP, a debugger, a frozen container.",
            "某个 rank 被挂起：SIGSTOP、调试器、冻结的容器。",
        ),
        both(
            "A rank hangs on a dead network disk, or swaps.",
            "某个 rank 卡在失效的网络磁盘上，或正在换页。",
        ),
        both(
            "Different operations on two ranks are a bug of this program.",
            "两个 rank 执行不同的操作属于本程序的缺陷。",
        ),
    ],
    look_at: &[
        both(
            "'was last seen in': the rank with the smallest number is the one that the others wait for.",
            "查看 was last seen in：编号最小的 rank 就是其他 rank 在等待的对象。",
        ),
        both(
            "The state of its process: T is stopped, D waits for a disk, R is computing.",
            "该进程的状态：T 表示已停止，D 表示等待磁盘，R 表示正在计算。",
        ),
        both(
            "logs/rank-NNNN.jsonl of that rank.",
            "该 rank 的 logs/rank-NNNN.jsonl。",
        ),
    ],
    what_to_do: &[
        both(
            "Remove the cause and continue with --resume auto.",
            "排除原因后用 --resume auto 继续。",
        ),
        both(
            "Raise --comm-timeout only if the rank was merely slow.",
            "只有当该 rank 仅仅是慢时才增大 --comm-timeout。",
        ),
    ],
    example: include_str!("examples/E04.txt"),
};

pub(super) static PANIC: Page = Page {
    title: both("a rank panicked", "rank 发生 panic"),
    meaning: both(
        "A rank met a state that its authors held to be impossible: a bug of this program.",
        "某个 rank 遇到了作者认为不可能出现的状态：这是本程序的缺陷。",
    ),
    causes: &[both(
        "A bug, or damaged memory of the machine.",
        "程序缺陷，或机器内存损坏。",
    )],
    look_at: &[both(
        "The place in the source under 'evidence', and the rank's log.",
        "evidence 中的源码位置，以及该 rank 的日志。",
    )],
    what_to_do: &[
        both(
            "Report it with errors/ and logs/ of the run.",
            "请附上该次运行的 errors/ 和 logs/ 进行报告。",
        ),
        both(
            "--resume auto continues from the last checkpoint.",
            "--resume auto 可从最后一个检查点继续。",
        ),
    ],
    example: include_str!("examples/E19.txt"),
};

pub(super) static RANK_DIED: Page = Page {
    title: both("a rank ended unexpectedly", "rank 意外结束"),
    meaning: both(
        "A rank process ended by a signal other than 9, or with an exit code that this program does not use. It left no report of its own.",
        "某个 rank 进程因 9 以外的信号结束，或以本程序不使用的退出码结束，且没有留下自己的报告。",
    ),
    causes: &[
        both(
            "A crash: SIGSEGV, SIGBUS (a full /dev/shm or disk under a memory map), SIGILL (an older CPU).",
            "崩溃：SIGSEGV、SIGBUS（内存映射所在的 /dev/shm 或磁盘已满）、SIGILL（CPU 过旧）。",
        ),
        both("Somebody sent the signal.", "有人发送了该信号。"),
    ],
    look_at: &[both(
        "The rank's last lines, quoted under 'evidence', and `dmesg`.",
        "evidence 中引用的该 rank 最后几行输出，以及 `dmesg`。",
    )],
    what_to_do: &[
        both(
            "`launcher doctor` checks limits, disks and the CPU.",
            "`launcher doctor` 会检查限制、磁盘和 CPU。",
        ),
        both(
            "--resume auto continues from the last checkpoint.",
            "--resume auto 可从最后一个检查点继续。",
        ),
    ],
    example: include_str!("examples/E20.txt"),
};

pub(super) static INTERRUPTED: Page = Page {
    title: both("stopped by a signal", "被信号终止"),
    meaning: both(
        "A first SIGINT, SIGTERM or SIGUSR1 saves and stops; the process then ends with this status and no report. The report is printed only when a second signal ended the run before the state was saved.",
        "第一次 SIGINT、SIGTERM 或 SIGUSR1 会保存并停止，进程以此退出码结束且不打印报告。只有第二次信号在保存之前终止运行时才会打印报告。",
    ),
    causes: &[
        both("Ctrl-C pressed twice.", "按了两次 Ctrl-C。"),
        both(
            "A scheduler that repeats its signal during start-up.",
            "调度器在启动阶段重复发送信号。",
        ),
    ],
    look_at: &[both(
        "Which checkpoint-N folders there are.",
        "有哪些 checkpoint-N 文件夹。",
    )],
    what_to_do: &[both(
        "--resume auto with the same --output continues from the last one.",
        "使用相同的 --output 和 --resume auto 从最后一个检查点继续。",
    )],
    example: include_str!("examples/E21.txt"),
};
