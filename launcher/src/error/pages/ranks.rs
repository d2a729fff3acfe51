//! Pages about rank processes and their communication.

use super::{Page, both};

pub(super) static RENDEZVOUS: Page = Page {
    title: both("the rendezvous of the ranks failed", "各 rank 会合失败"),
    meaning: both(
        "Not all ranks joined within --comm-timeout, or a rank could not be started. The code also reports ranks with different plans, with different libraries, or with contradicting rank variables.",
        "并非所有 rank 都在 --comm-timeout 内加入，或者某个 rank 无法启动。各 rank 的计划或计算库不同、rank 环境变量相互矛盾时，也会报告此错误。",
    ),
    causes: &[
        both(
            "A rank starts slowly: a cold disk, a huge data file.",
            "某个 rank 启动缓慢：磁盘缓存未预热，或数据文件巨大。",
        ),
        both(
            "Another launcher started the ranks with different command lines or builds.",
            "其他启动器用不同的命令行或不同的构建版本启动了各 rank。",
        ),
        both(
            "On several machines: MASTER_ADDR names another machine, a firewall blocks the port, or the tokens differ.",
            "多台机器时：MASTER_ADDR 指向了别的机器，防火墙拦截了端口，或令牌不一致。",
        ),
        both(
            "The machines have different libraries (NVRTC, C library, MPI) or GPU generations, so results would differ.",
            "各机器的库（NVRTC、C 库、MPI）或 GPU 架构代次不同，会使结果不一致。",
        ),
        both(
            "The rank variables are ambiguous, or those of two launchers contradict each other.",
            "rank 环境变量含义不明，或者两个启动器的环境变量相互矛盾。",
        ),
    ],
    look_at: &[
        both(
            "The logs in logs/ of the missing ranks.",
            "缺席的 rank 在 logs/ 中的日志。",
        ),
        both(
            "`launcher doctor` on each machine: it shows the GPUs, the libraries and the rank variables.",
            "在每台机器上运行 `launcher doctor`：它会显示 GPU、库和 rank 环境变量。",
        ),
    ],
    what_to_do: &[
        both(
            "Start all ranks with the same command line and the same build.",
            "用同一命令行和同一构建启动所有 rank。",
        ),
        both(
            "Use one container image, or the same library versions, on every machine.",
            "在所有机器上使用同一容器镜像，或相同版本的库。",
        ),
        both(
            "Raise --comm-timeout if a rank only starts slowly.",
            "如果某个 rank 只是启动慢，请增大 --comm-timeout。",
        ),
    ],
    example: include_str!("examples/E03.txt"),
};

pub(super) static PORT_IN_USE: Page = Page {
    title: both("the rendezvous port is in use", "会合端口已被占用"),
    meaning: both(
        "The ranks of several machines connect to a port of the first machine. Another program already listens on this port.",
        "多台机器的 rank 会连接第一台机器的一个端口，而另一个程序已经在监听该端口。",
    ),
    causes: &[
        both(
            "Another run uses the machine, or an earlier run has not ended.",
            "该机器上有另一个运行，或之前的运行尚未结束。",
        ),
        both(
            "A service always uses this port.",
            "某个服务一直占用该端口。",
        ),
    ],
    look_at: &[both(
        "The process in the report; `ss -ltnp` lists all listening processes.",
        "报告中的进程；`ss -ltnp` 会列出所有监听端口的进程。",
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
    title: both("a collective between ranks failed", "rank 间集合通信失败"),
    meaning: both(
        "A rank waited longer than --comm-timeout for another rank, or two ranks were in different collectives. The report names the last collective of every rank and the state of the silent process.",
        "某个 rank 等待另一个 rank 的时间超过了 --comm-timeout，或者两个 rank 处于不同的集合通信中。报告会给出每个 rank 最后的集合通信，以及无响应进程的状态。",
    ),
    causes: &[
        both(
            "A rank was suspended: SIGSTOP, a debugger, a frozen container.",
            "某个 rank 被挂起：SIGSTOP、调试器、冻结的容器。",
        ),
        both(
            "A rank waits for a dead network disk, or it swaps.",
            "某个 rank 卡在失效的网络磁盘上，或正在使用交换空间。",
        ),
        both(
            "Two ranks in different collectives: this is a bug of this program.",
            "两个 rank 处于不同的集合通信：这是本程序的缺陷。",
        ),
    ],
    look_at: &[
        both(
            "The lines 'was last seen in': the other ranks wait for the rank with the smallest collective number.",
            "was last seen in 各行：其他 rank 在等待集合通信编号最小的那个 rank。",
        ),
        both(
            "The state of its process: T is stopped, D waits for a disk, R is running.",
            "该进程的状态：T 表示已停止，D 表示等待磁盘，R 表示正在运行。",
        ),
        both(
            "logs/rank-NNNN.jsonl of that rank.",
            "该 rank 的 logs/rank-NNNN.jsonl。",
        ),
    ],
    what_to_do: &[
        both(
            "Remove the cause and continue with --resume RUN, the directory of the run.",
            "排除原因后用 --resume RUN（RUN 为运行目录）继续。",
        ),
        both(
            "Raise --comm-timeout only if the rank was slow and not stuck.",
            "只有当该 rank 只是慢而没有卡住时，才增大 --comm-timeout。",
        ),
    ],
    example: include_str!("examples/E04.txt"),
};

pub(super) static PANIC: Page = Page {
    title: both("a rank panicked", "rank 发生 panic"),
    meaning: both(
        "A rank reached a state that must not occur. This is a bug of this program.",
        "某个 rank 进入了不应出现的状态。这是本程序的缺陷。",
    ),
    causes: &[both(
        "A bug of the program, or faulty memory of the machine.",
        "程序缺陷，或机器的内存有故障。",
    )],
    look_at: &[both(
        "The position in the source under 'evidence', and the log of the rank.",
        "evidence 中的源码位置，以及该 rank 的日志。",
    )],
    what_to_do: &[
        both(
            "Report it with the directories errors/ and logs/ of the run.",
            "报告该缺陷，并附上该次运行的 errors/ 和 logs/ 目录。",
        ),
        both(
            "--resume RUN, with the directory of the run, continues from the last checkpoint.",
            "--resume RUN（RUN 为运行目录）会从最后一个检查点继续。",
        ),
    ],
    example: include_str!("examples/E19.txt"),
};

pub(super) static RANK_DIED: Page = Page {
    title: both("a rank ended unexpectedly", "rank 意外结束"),
    meaning: both(
        "A signal other than 9 ended a rank process, or the process ended with an exit code that this program does not use.",
        "某个 rank 进程因 9 以外的信号结束，或以本程序不使用的退出码结束。",
    ),
    causes: &[
        both(
            "A crash: SIGSEGV, SIGBUS (/dev/shm or the disk of a memory map is full), SIGILL (the CPU is too old).",
            "崩溃：SIGSEGV、SIGBUS（/dev/shm 或内存映射所在的磁盘已满）、SIGILL（CPU 过旧）。",
        ),
        both("Somebody sent the signal.", "有人发送了该信号。"),
    ],
    look_at: &[both(
        "The last lines of the rank under 'evidence', logs/rank-NNNN.log, and `dmesg`.",
        "evidence 中该 rank 的最后几行输出、logs/rank-NNNN.log，以及 `dmesg`。",
    )],
    what_to_do: &[
        both(
            "`launcher doctor` checks limits, disks and the CPU.",
            "`launcher doctor` 会检查各项限制、磁盘和 CPU。",
        ),
        both(
            "--resume RUN, with the directory of the run, continues from the last checkpoint.",
            "--resume RUN（RUN 为运行目录）会从最后一个检查点继续。",
        ),
    ],
    example: include_str!("examples/E20.txt"),
};

pub(super) static INTERRUPTED: Page = Page {
    title: both("stopped by a signal", "被信号终止"),
    meaning: both(
        "After the first SIGINT, SIGTERM, SIGHUP or SIGUSR1 the run saves and stops. The process then ends with this exit code and without a report. The report appears only if the run stopped before it saved its state.",
        "收到第一个 SIGINT、SIGTERM、SIGHUP 或 SIGUSR1 后，运行会保存并停止，进程以此退出码结束，不打印报告。只有在保存状态之前就停止时，才会打印报告。",
    ),
    causes: &[
        both(
            "Ctrl-C was pressed twice: a second SIGINT or SIGHUP stops at once.",
            "按了两次 Ctrl-C：第二个 SIGINT 或 SIGHUP 会立即停止运行。",
        ),
        both(
            "The signal arrived during start-up, before the run had a state to save.",
            "信号在启动阶段到达，此时还没有可保存的状态。",
        ),
    ],
    look_at: &[both(
        "The checkpoint-N directories of the run.",
        "该运行目录中有哪些 checkpoint-N。",
    )],
    what_to_do: &[both(
        "launcher --resume RUN continues from the last checkpoint, with the settings of that run.",
        "launcher --resume RUN 从最后一个检查点继续，并沿用该次运行的设置。",
    )],
    example: include_str!("examples/E21.txt"),
};
