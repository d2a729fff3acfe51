//! Environment variables known by name, in the order of the report.

use super::Kind;
use crate::lang::{Both, both};

/// Variables that this program reads, with their effect.
pub(super) const READ: [(&str, Both); 66] = [
    (
        "MAX_PIXELS",
        both(
            "largest area of an image of GLM-4.1V, as --image-max-pixels",
            "GLM-4.1V 图片的最大面积，同 --image-max-pixels",
        ),
    ),
    (
        "MIN_PIXELS",
        both(
            "smallest area of an image of GLM-4.1V, as --image-min-pixels",
            "GLM-4.1V 图片的最小面积，同 --image-min-pixels",
        ),
    ),
    (
        "MAX_SLICE_NUMS",
        both(
            "most slices of an image, as --max-slice-nums",
            "每张图片的最大切片数，同 --max-slice-nums",
        ),
    ),
    (
        "MP_SIZE",
        both(
            "pipeline stages that divide the layers, as --mp-size",
            "分担各层的流水线段数，同 --mp-size",
        ),
    ),
    (
        "NUM_GPUS_PER_WORKER",
        both(
            "ranks on each machine, as --nproc",
            "每台机器的 rank 数，同 --nproc",
        ),
    ),
    (
        "TESSERA_CUDA_LIBS",
        both(
            "directories with CUDA libraries, separated by colons; searched first",
            "含有 CUDA 库的目录，用冒号分隔；最先搜索",
        ),
    ),
    (
        "TESSERA_MATMUL",
        both(
            "matrix products on GPUs: auto, cublaslt, own; auto uses cuBLASLt if it is found",
            "GPU 上的矩阵乘法：auto、cublaslt、own；auto 在找到 cuBLASLt 时使用它",
        ),
    ),
    (
        "TESSERA_ATTENTION_BACKWARD",
        both(
            "attention's backward on GPUs: split, fused; fused computes all gradients in one kernel",
            "GPU 上注意力的反向传播：split、fused；fused 用一个内核计算全部梯度",
        ),
    ),
    (
        "TESSERA_HOST_REGISTER",
        both(
            "frozen host weights are copied to GPUs from where they are (auto), or through pinned memory (off)",
            "冻结的主机权重从原处复制到 GPU（auto），或经锁页内存复制（off）",
        ),
    ),
    (
        "TESSERA_CUDA_ARCH",
        both(
            "machine code of the kernels: native, sm_80; sm_80 uses the code of A100 and RTX 30 on every GPU",
            "内核的机器码：native、sm_80；sm_80 在所有 GPU 上使用 A100 和 RTX 30 的机器码",
        ),
    ),
    (
        "CUDA_HOME",
        both(
            "an installed CUDA toolkit; its lib64 is searched",
            "已安装的 CUDA toolkit；会搜索其 lib64",
        ),
    ),
    (
        "CUDA_PATH",
        both(
            "the same, if CUDA_HOME is not set",
            "同上，用于未设置 CUDA_HOME 时",
        ),
    ),
    (
        "VIRTUAL_ENV",
        both(
            "a Python environment whose NVIDIA packages are searched",
            "会搜索其中 NVIDIA 软件包的 Python 环境",
        ),
    ),
    (
        "CONDA_PREFIX",
        both(
            "a Python environment whose NVIDIA packages are searched",
            "会搜索其中 NVIDIA 软件包的 Python 环境",
        ),
    ),
    (
        "PYTHONPATH",
        both(
            "directories whose NVIDIA packages are searched",
            "会搜索其中 NVIDIA 软件包的目录",
        ),
    ),
    (
        "PATH",
        both(
            "doctor finds python3 in it and asks python3 for its package directories",
            "doctor 在其中查找 python3，并向它询问软件包目录",
        ),
    ),
    (
        "TMPDIR",
        both(
            "directory of a job's private files; default: /tmp",
            "作业私有文件的目录；默认为 /tmp",
        ),
    ),
    (
        "XDG_CACHE_HOME",
        both(
            "the demo's model and images are stored in its tessera directory",
            "演示的模型和图片保存在其下的 tessera 目录中",
        ),
    ),
    (
        "HOME",
        both(
            "the demo's files are stored in ~/.cache/tessera if XDG_CACHE_HOME is not set",
            "未设置 XDG_CACHE_HOME 时，演示的文件保存在 ~/.cache/tessera 中",
        ),
    ),
    (
        "NO_COLOR",
        both("no colors on the terminal", "终端不使用颜色"),
    ),
    (
        "RUST_LOG",
        both(
            "filter of the log, such as debug or engine=trace",
            "日志的过滤条件，例如 debug 或 engine=trace",
        ),
    ),
    (
        "RANK",
        both(
            "number of this process among all ranks, or of this machine if LOCAL_RANK is not set",
            "本进程在所有 rank 中的编号；未设置 LOCAL_RANK 时为本机的编号",
        ),
    ),
    (
        "LOCAL_RANK",
        both(
            "if set, this process is a rank and starts no others",
            "设置后，本进程就是一个 rank，不再启动其他 rank",
        ),
    ),
    (
        "WORLD_SIZE",
        both(
            "number of ranks, or of machines if LOCAL_RANK is not set",
            "rank 数；未设置 LOCAL_RANK 时为机器数",
        ),
    ),
    (
        "LOCAL_WORLD_SIZE",
        both("number of ranks on this machine", "本机的 rank 数"),
    ),
    (
        "LOCAL_SIZE",
        both(
            "the same, from DeepSpeed's launcher",
            "同上，来自 DeepSpeed 的启动器",
        ),
    ),
    (
        "NNODES",
        both(
            "number of machines, each of which starts its ranks",
            "机器数，每台机器启动自己的 rank",
        ),
    ),
    ("NODE_RANK", both("number of this machine", "本机的编号")),
    (
        "NPROC_PER_NODE",
        both(
            "ranks on each machine; --nproc must not differ",
            "每台机器的 rank 数；--nproc 必须与它相同",
        ),
    ),
    (
        "PET_NNODES",
        both(
            "number of machines, from PyTorchJob",
            "机器数，来自 PyTorchJob",
        ),
    ),
    (
        "PET_NODE_RANK",
        both(
            "number of this machine, from PyTorchJob",
            "本机的编号，来自 PyTorchJob",
        ),
    ),
    (
        "PET_NPROC_PER_NODE",
        both(
            "ranks on each machine, from PyTorchJob",
            "每台机器的 rank 数，来自 PyTorchJob",
        ),
    ),
    (
        "OMPI_COMM_WORLD_RANK",
        both(
            "if set, this process is a rank of OpenMPI's mpirun",
            "设置后，本进程是 OpenMPI 的 mpirun 的一个 rank",
        ),
    ),
    (
        "OMPI_COMM_WORLD_SIZE",
        both("number of its ranks", "其 rank 数"),
    ),
    (
        "OMPI_COMM_WORLD_LOCAL_RANK",
        both(
            "number among those on this machine",
            "在本机各 rank 中的编号",
        ),
    ),
    (
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        both("number of those on this machine", "其中在本机的 rank 数"),
    ),
    (
        "PMI_RANK",
        both(
            "if set, this process is a rank of Intel MPI or MPICH",
            "设置后，本进程是 Intel MPI 或 MPICH 的一个 rank",
        ),
    ),
    ("PMI_SIZE", both("number of its ranks", "其 rank 数")),
    (
        "MPI_LOCALRANKID",
        both(
            "number among those on this machine",
            "在本机各 rank 中的编号",
        ),
    ),
    (
        "MPI_LOCALNRANKS",
        both("number of those on this machine", "其中在本机的 rank 数"),
    ),
    (
        "MV2_COMM_WORLD_RANK",
        both(
            "if set, this process is a rank of MVAPICH",
            "设置后，本进程是 MVAPICH 的一个 rank",
        ),
    ),
    (
        "MV2_COMM_WORLD_SIZE",
        both("number of its ranks", "其 rank 数"),
    ),
    (
        "MV2_COMM_WORLD_LOCAL_RANK",
        both(
            "number among those on this machine",
            "在本机各 rank 中的编号",
        ),
    ),
    (
        "MV2_COMM_WORLD_LOCAL_SIZE",
        both("number of those on this machine", "其中在本机的 rank 数"),
    ),
    (
        "SLURM_STEP_ID",
        both(
            "if set with several tasks, this process is a rank of srun",
            "设置且有多个任务时，本进程是 srun 的一个 rank",
        ),
    ),
    ("SLURM_PROCID", both("number of this task", "本任务的编号")),
    (
        "SLURM_STEP_NUM_TASKS",
        both("number of tasks of srun", "srun 的任务数"),
    ),
    (
        "SLURM_NTASKS",
        both(
            "the same, if the variable above is not set",
            "同上，用于未设置上一个变量时",
        ),
    ),
    (
        "SLURM_LOCALID",
        both(
            "number of this task on its machine",
            "本任务在其机器上的编号",
        ),
    ),
    ("SLURM_NODEID", both("number of this machine", "本机的编号")),
    (
        "SLURM_STEP_TASKS_PER_NODE",
        both(
            "tasks of each machine, as 2(x3),1",
            "每台机器的任务数，形如 2(x3),1",
        ),
    ),
    (
        "SLURM_TASKS_PER_NODE",
        both(
            "the same, if the variable above is not set",
            "同上，用于未设置上一个变量时",
        ),
    ),
    (
        "SLURM_STEP_NODELIST",
        both(
            "machines of the tasks; the rendezvous is on the first one",
            "各任务所在的机器；会合在第一台上进行",
        ),
    ),
    (
        "SLURM_JOB_NODELIST",
        both(
            "the same, if the variable above is not set",
            "同上，用于未设置上一个变量时",
        ),
    ),
    (
        "SLURM_JOB_ID",
        both(
            "names the job and sets the rendezvous port: 15000 + number % 20000",
            "确定作业的名称和会合端口：15000 + 编号 % 20000",
        ),
    ),
    (
        "PMIX_NAMESPACE",
        both("names the job of mpirun", "确定 mpirun 作业的名称"),
    ),
    (
        "MASTER_ADDR",
        both(
            "machine of rank 0; names the job",
            "rank 0 所在的机器；确定作业的名称",
        ),
    ),
    ("MASTER_PORT", both("likewise", "同上")),
    (
        "PET_MASTER_ADDR",
        both("the same, from PyTorchJob", "同上，来自 PyTorchJob"),
    ),
    (
        "PET_MASTER_PORT",
        both("the same, from PyTorchJob", "同上，来自 PyTorchJob"),
    ),
    (
        "TORCHELASTIC_RUN_ID",
        both(
            "set by torchrun: names the job",
            "由 torchrun 设置：确定作业的名称",
        ),
    ),
    ("TORCHELASTIC_RESTART_COUNT", both("likewise", "同上")),
    (
        "TESSERA_JOB_TOKEN",
        both(
            "token that the ranks of a job on several machines share",
            "跨机器作业的各 rank 共用的令牌",
        ),
    ),
    (
        "TESSERA_JOB_TOKEN_FILE",
        both("a file that contains the token", "含有该令牌的文件"),
    ),
    (
        "TESSERA_RUN_TOKEN",
        both(
            "names the job; set by this program for its ranks",
            "确定作业的名称；由本程序为其 rank 设置",
        ),
    ),
    (
        "TESSERA_JOB_DIR",
        both(
            "the job's private directory; set by this program for its ranks",
            "作业的私有目录；由本程序为其 rank 设置",
        ),
    ),
];

/// Variables that the driver, libraries or tools around this program read.
pub(super) const ACT_ON_OTHERS: [(&str, Both); 17] = [
    (
        "CUDA_VISIBLE_DEVICES",
        both(
            "the driver shows only these GPUs, renumbered from 0",
            "驱动只显示这些 GPU，并从 0 重新编号",
        ),
    ),
    (
        "CUDA_DEVICE_ORDER",
        both(
            "PCI_BUS_ID numbers GPUs as nvidia-smi does; otherwise the fastest is first",
            "PCI_BUS_ID 按 nvidia-smi 的方式给 GPU 编号；否则最快的排在最前",
        ),
    ),
    (
        "CUDA_LAUNCH_BLOCKING",
        both(
            "1: the program waits for every kernel; slow, for debugging",
            "1：程序等待每个内核完成；很慢，用于调试",
        ),
    ),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        both(
            "queues between program and GPU; 1 prevents overlapping copies",
            "程序与 GPU 之间的队列数；1 会使拷贝无法与计算重叠",
        ),
    ),
    (
        "CUDA_CACHE_PATH",
        both(
            "directory of the driver's cache of code compiled from PTX",
            "驱动缓存 PTX 编译结果的目录",
        ),
    ),
    (
        "CUDA_CACHE_DISABLE",
        both(
            "1: the driver caches no machine code and compiles it again in each process",
            "1：驱动不缓存机器码，每个进程都重新编译",
        ),
    ),
    (
        "CUDA_MPS_PIPE_DIRECTORY",
        both(
            "processes share a GPU through this MPS server",
            "各进程经由该 MPS 服务共用一块 GPU",
        ),
    ),
    (
        "NVIDIA_VISIBLE_DEVICES",
        both(
            "GPUs that the container runtime adds to the container",
            "容器运行时加入容器的 GPU",
        ),
    ),
    (
        "NVIDIA_DRIVER_CAPABILITIES",
        both(
            "the container runtime mounts the CUDA driver only for compute",
            "只有含 compute 时，容器运行时才挂载 CUDA 驱动",
        ),
    ),
    (
        "NVIDIA_TF32_OVERRIDE",
        both(
            "0: NVIDIA's libraries never use TF32",
            "0：NVIDIA 的库从不使用 TF32",
        ),
    ),
    (
        "NCCL_DEBUG",
        both(
            "verbosity of NCCL, if ranks exchange through it",
            "NCCL 的日志级别，用于各 rank 经由 NCCL 交换数据时",
        ),
    ),
    (
        "NCCL_SOCKET_IFNAME",
        both(
            "network interface of NCCL, if ranks exchange through it",
            "NCCL 的网卡，用于各 rank 经由 NCCL 交换数据时",
        ),
    ),
    (
        "NCCL_P2P_DISABLE",
        both(
            "1: NCCL copies between GPUs through host memory",
            "1：NCCL 经由主机内存在 GPU 之间拷贝",
        ),
    ),
    (
        "LD_LIBRARY_PATH",
        both(
            "directories that the dynamic linker searches first",
            "动态链接器最先搜索的目录",
        ),
    ),
    (
        "LD_PRELOAD",
        both(
            "libraries that are loaded before all others",
            "先于其他库加载的库",
        ),
    ),
    (
        "RUST_BACKTRACE",
        both(
            "1: reports of panics include a backtrace",
            "1：panic 的报告中包含调用栈",
        ),
    ),
    (
        "RAYON_NUM_THREADS",
        both(
            "threads of the checks before a run; each rank uses cores ÷ ranks",
            "运行前各项检查的线程数；每个 rank 使用 核心数 ÷ rank 数 个线程",
        ),
    ),
];

/// Names, why they have no effect here, what to use instead.
pub(super) type Foreign = (&'static [&'static str], Both, Both);

pub(super) const FOREIGN: [Foreign; 26] = [
    (
        &["ROOT_IMAGE_DIR"],
        both(
            "a flag names the directory of images",
            "图片的目录由参数指定",
        ),
        both("--image-dir DIR", "--image-dir DIR"),
    ),
    (
        &["IMAGE_MAX_TOKEN_NUM", "IMAGE_MIN_TOKEN_NUM"],
        both(
            "images are bounded in pixels or slices",
            "图片按像素或切片数限制",
        ),
        both(
            "--image-max-pixels N, --image-min-pixels N, --max-slice-nums N",
            "--image-max-pixels N、--image-min-pixels N、--max-slice-nums N",
        ),
    ),
    (
        &[
            "VIDEO_MAX_PIXELS",
            "VIDEO_MIN_PIXELS",
            "VIDEO_MAX_TOKEN_NUM",
            "VIDEO_MIN_TOKEN_NUM",
            "FPS_MAX_FRAMES",
        ],
        both(
            "frames have the size of the model's own settings, and all that the data lists are taken",
            "帧的尺寸按模型自身的设置，数据列出的帧全部使用",
        ),
        both("fewer frames in the data", "在数据中减少帧数"),
    ),
    (
        &["NUM_WORKERS"],
        both("this program starts the ranks", "各 rank 由本程序启动"),
        both("--nproc N", "--nproc N"),
    ),
    (
        &[
            "PYTORCH_CUDA_ALLOC_CONF",
            "PYTORCH_ALLOC_CONF",
            "PYTORCH_NO_CUDA_MEMORY_CACHING",
        ],
        both(
            "PyTorch's allocator is not used: memory is planned and comes from a pool of this program",
            "不使用 PyTorch 的分配器：内存由计划决定，来自本程序的内存池",
        ),
        both(
            "--device-memory-limit BYTES, --offload cpu",
            "--device-memory-limit BYTES、--offload cpu",
        ),
    ),
    (
        &["DS_ACCELERATOR"],
        both("a flag selects the device", "设备由参数选择"),
        both("--device", "--device"),
    ),
    (
        &[
            "DS_BUILD_OPS",
            "DS_BUILD_CPU_ADAM",
            "DS_BUILD_FUSED_ADAM",
            "DS_SKIP_CUDA_CHECK",
        ],
        both("nothing is built at installation", "安装时不构建任何内容"),
        both("nothing to set", "无需设置"),
    ),
    (
        &["ACCELERATE_MIXED_PRECISION"],
        both("a flag selects the number format", "数值格式由参数选择"),
        both("--precision", "--precision"),
    ),
    (
        &[
            "ACCELERATE_USE_DEEPSPEED",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE",
        ],
        both("a flag selects the stage", "阶段由参数选择"),
        both("--zero STAGE", "--zero STAGE"),
    ),
    (
        &["ACCELERATE_USE_FSDP"],
        both(
            "the ZeRO stage selects the sharding",
            "分片方式由 ZeRO 阶段决定",
        ),
        both("--zero 3", "--zero 3"),
    ),
    (
        &["GROUP_RANK", "CROSS_RANK", "CROSS_SIZE"],
        both("rank numbers identify the machines", "机器由 rank 编号确定"),
        both("nothing to set", "无需设置"),
    ),
    (
        &["FORCE_TORCHRUN"],
        both("this program starts the ranks", "各 rank 由本程序启动"),
        both("--nproc N", "--nproc N"),
    ),
    (
        &["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"],
        both(
            "a rank uses cores ÷ ranks threads",
            "每个 rank 使用 核心数 ÷ rank 数 个线程",
        ),
        both(
            "limit the cores: taskset, or the container's cpus",
            "请限制核心：taskset，或容器的 cpus",
        ),
    ),
    (
        &["TORCH_CUDA_ARCH_LIST", "MAX_JOBS"],
        both(
            "kernels are compiled at run time for the present GPU",
            "内核在运行时按现有的 GPU 编译",
        ),
        both("nothing to set", "无需设置"),
    ),
    (
        &[
            "TORCH_DISTRIBUTED_DEBUG",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "NCCL_ASYNC_ERROR_HANDLING",
            "TORCH_NCCL_BLOCKING_WAIT",
            "NCCL_BLOCKING_WAIT",
        ],
        both(
            "every wait has a timeout and reports what it waited for",
            "每次等待都有时限，并报告等待的对象",
        ),
        both("nothing to set", "无需设置"),
    ),
    (
        &["PYTHONHASHSEED"],
        both("a flag sets the only seed", "唯一的种子由参数设定"),
        both("--seed N", "--seed N"),
    ),
    (
        &["TOKENIZERS_PARALLELISM"],
        both("samples are tokenized one by one", "样本逐个分词"),
        both("nothing to set", "无需设置"),
    ),
    (
        &[
            "HF_HOME",
            "HF_HUB_CACHE",
            "HF_HUB_OFFLINE",
            "TRANSFORMERS_CACHE",
            "TRANSFORMERS_OFFLINE",
            "HF_DATASETS_CACHE",
            "MODELSCOPE_CACHE",
        ],
        both("nothing is downloaded", "不会下载任何内容"),
        both("--model DIR", "--model DIR"),
    ),
    (
        &["HF_ENDPOINT", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"],
        both("nothing is downloaded or sent", "不会下载或发送任何内容"),
        both("--model DIR", "--model DIR"),
    ),
    (
        &[
            "WANDB_API_KEY",
            "WANDB_PROJECT",
            "WANDB_MODE",
            "WANDB_DISABLED",
            "MLFLOW_TRACKING_URI",
        ],
        both("nothing is sent anywhere", "不会向任何地方发送内容"),
        both(
            "--report-to tensorboard; wandb sync reads those files",
            "--report-to tensorboard；wandb sync 可以读取这些文件",
        ),
    ),
    (
        &["TENSORBOARD_LOGGING_DIR"],
        both(
            "event files are in the run directory",
            "事件文件在运行目录中",
        ),
        both(
            "--report-to tensorboard --output DIR",
            "--report-to tensorboard --output DIR",
        ),
    ),
    (
        &["RECORD_VRAM"],
        both("every log line has the peak memory", "每行日志都有内存峰值"),
        both("nothing to set", "无需设置"),
    ),
    (
        &["SIZE_FACTOR"],
        both(
            "the model's own rules slice the images",
            "图片按模型自己的规则切片",
        ),
        both("--max-slice-nums N", "--max-slice-nums N"),
    ),
    (
        &["LLAMAFACTORY_VERBOSITY", "TRANSFORMERS_VERBOSITY"],
        both(
            "the log has its own filter variable",
            "日志有自己的过滤变量",
        ),
        both("RUST_LOG", "RUST_LOG"),
    ),
    (
        &["DISABLE_VERSION_CHECK"],
        both(
            "the program uses no Python packages",
            "本程序不使用 Python 软件包",
        ),
        both("nothing to set", "无需设置"),
    ),
    (
        &["BNB_CUDA_VERSION", "BITSANDBYTES_NOWELCOME"],
        both(
            "weights are quantized and dequantized by kernels of this program",
            "权重由本程序自己的内核压缩和解压",
        ),
        both("--quantize", "--quantize"),
    ),
];

/// Prefix of names known as a family only, kind, effect, what to use instead.
pub(super) type Family = (&'static str, Kind, Both, Option<Both>);

pub(super) const FAMILIES: [Family; 14] = [
    (
        "NCCL_",
        Kind::ActsOnOthers,
        both(
            "NCCL reads it if ranks exchange through NCCL",
            "各 rank 经由 NCCL 交换数据时由 NCCL 读取",
        ),
        None,
    ),
    (
        "TESSERA_",
        Kind::WithoutEffect,
        both(
            "this program has no variable with this name",
            "本程序没有这个名称的变量",
        ),
        Some(both("the names above", "上面的名称")),
    ),
    (
        "DS_",
        Kind::WithoutEffect,
        both("DeepSpeed is not used", "不使用 DeepSpeed"),
        Some(both("--zero, --offload", "--zero、--offload")),
    ),
    (
        "DEEPSPEED_",
        Kind::WithoutEffect,
        both("DeepSpeed is not used", "不使用 DeepSpeed"),
        Some(both("--zero, --offload", "--zero、--offload")),
    ),
    (
        "ACCELERATE_",
        Kind::WithoutEffect,
        both("Accelerate is not used", "不使用 Accelerate"),
        Some(both("flags; see docs/flags.md", "参数；见 docs/flags.md")),
    ),
    (
        "FSDP_",
        Kind::WithoutEffect,
        both(
            "the ZeRO stage selects the sharding",
            "分片方式由 ZeRO 阶段决定",
        ),
        Some(both("--zero 3", "--zero 3")),
    ),
    (
        "PYTORCH_",
        Kind::WithoutEffect,
        both("PyTorch is not used", "不使用 PyTorch"),
        None,
    ),
    (
        "TORCH_",
        Kind::WithoutEffect,
        both("PyTorch is not used", "不使用 PyTorch"),
        None,
    ),
    (
        "HF_",
        Kind::WithoutEffect,
        both("nothing is downloaded", "不会下载任何内容"),
        Some(both("--model DIR", "--model DIR")),
    ),
    (
        "WANDB_",
        Kind::WithoutEffect,
        both("nothing is sent anywhere", "不会向任何地方发送内容"),
        Some(both("--report-to tensorboard", "--report-to tensorboard")),
    ),
    (
        "SLURM_",
        Kind::WithoutEffect,
        both("not read", "不读取"),
        None,
    ),
    (
        "OMPI_",
        Kind::WithoutEffect,
        both("not read", "不读取"),
        None,
    ),
    (
        "PMI_",
        Kind::WithoutEffect,
        both("not read", "不读取"),
        None,
    ),
    (
        "PET_",
        Kind::WithoutEffect,
        both(
            "read by torchrun, not by this program",
            "由 torchrun 读取，本程序不读取",
        ),
        None,
    ),
];

/// Variables whose value is not shown: secrets, and values that are long and say nothing.
pub(super) const HIDDEN: [&str; 7] = [
    "TESSERA_JOB_TOKEN",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "HF_ENDPOINT",
    "MLFLOW_TRACKING_URI",
    "PATH",
];
