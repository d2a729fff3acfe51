//! Environment variables known by name, in the order of the report.

use super::Kind;
use crate::lang::{Both, both};

/// Variables that this program reads, with their effect.
pub(super) const READ: [(&str, &str); 61] = [
    (
        "MAX_PIXELS",
        "largest area of an image of GLM-4.1V, as --image-max-pixels",
    ),
    (
        "MIN_PIXELS",
        "smallest area of an image of GLM-4.1V, as --image-min-pixels",
    ),
    (
        "TESSERA_CUDA_LIBS",
        "directories with CUDA libraries, separated by colons; searched first",
    ),
    (
        "TESSERA_MATMUL",
        "matrix products on GPUs: auto, cublaslt, own; auto uses cuBLASLt if it is found",
    ),
    (
        "TESSERA_CUDA_ARCH",
        "machine code of the kernels: native, sm_80; sm_80 uses the code of A100 and RTX 30 on every GPU",
    ),
    (
        "CUDA_HOME",
        "an installed CUDA toolkit; its lib64 is searched",
    ),
    ("CUDA_PATH", "the same, if CUDA_HOME is not set"),
    (
        "VIRTUAL_ENV",
        "a Python environment whose NVIDIA packages are searched",
    ),
    (
        "CONDA_PREFIX",
        "a Python environment whose NVIDIA packages are searched",
    ),
    (
        "PYTHONPATH",
        "directories whose NVIDIA packages are searched",
    ),
    (
        "PATH",
        "doctor finds python3 in it and asks python3 for its package directories",
    ),
    (
        "TMPDIR",
        "directory of a job's private files; default: /tmp",
    ),
    (
        "XDG_CACHE_HOME",
        "the demo's model and images are stored in its tessera directory",
    ),
    (
        "HOME",
        "the demo's files are stored in ~/.cache/tessera if XDG_CACHE_HOME is not set",
    ),
    ("NO_COLOR", "no colors on the terminal"),
    (
        "RUST_LOG",
        "filter of the log, such as debug or engine=trace",
    ),
    (
        "RANK",
        "number of this process among all ranks, or of this machine if LOCAL_RANK is not set",
    ),
    (
        "LOCAL_RANK",
        "if set, this process is a rank and starts no others",
    ),
    (
        "WORLD_SIZE",
        "number of ranks, or of machines if LOCAL_RANK is not set",
    ),
    ("LOCAL_WORLD_SIZE", "number of ranks on this machine"),
    ("LOCAL_SIZE", "the same, from DeepSpeed's launcher"),
    (
        "NNODES",
        "number of machines, each of which starts its ranks",
    ),
    ("NODE_RANK", "number of this machine"),
    (
        "NPROC_PER_NODE",
        "ranks on each machine; --nproc must not differ",
    ),
    ("PET_NNODES", "number of machines, from PyTorchJob"),
    ("PET_NODE_RANK", "number of this machine, from PyTorchJob"),
    (
        "PET_NPROC_PER_NODE",
        "ranks on each machine, from PyTorchJob",
    ),
    (
        "OMPI_COMM_WORLD_RANK",
        "if set, this process is a rank of OpenMPI's mpirun",
    ),
    ("OMPI_COMM_WORLD_SIZE", "number of its ranks"),
    (
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "number among those on this machine",
    ),
    (
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "number of those on this machine",
    ),
    (
        "PMI_RANK",
        "if set, this process is a rank of Intel MPI or MPICH",
    ),
    ("PMI_SIZE", "number of its ranks"),
    ("MPI_LOCALRANKID", "number among those on this machine"),
    ("MPI_LOCALNRANKS", "number of those on this machine"),
    (
        "MV2_COMM_WORLD_RANK",
        "if set, this process is a rank of MVAPICH",
    ),
    ("MV2_COMM_WORLD_SIZE", "number of its ranks"),
    (
        "MV2_COMM_WORLD_LOCAL_RANK",
        "number among those on this machine",
    ),
    (
        "MV2_COMM_WORLD_LOCAL_SIZE",
        "number of those on this machine",
    ),
    (
        "SLURM_STEP_ID",
        "if set with several tasks, this process is a rank of srun",
    ),
    ("SLURM_PROCID", "number of this task"),
    ("SLURM_STEP_NUM_TASKS", "number of tasks of srun"),
    ("SLURM_NTASKS", "the same, if the variable above is not set"),
    ("SLURM_LOCALID", "number of this task on its machine"),
    ("SLURM_NODEID", "number of this machine"),
    (
        "SLURM_STEP_TASKS_PER_NODE",
        "tasks of each machine, as 2(x3),1",
    ),
    (
        "SLURM_TASKS_PER_NODE",
        "the same, if the variable above is not set",
    ),
    (
        "SLURM_STEP_NODELIST",
        "machines of the tasks; the rendezvous is on the first one",
    ),
    (
        "SLURM_JOB_NODELIST",
        "the same, if the variable above is not set",
    ),
    (
        "SLURM_JOB_ID",
        "names the job and sets the rendezvous port: 15000 + number % 20000",
    ),
    ("PMIX_NAMESPACE", "names the job of mpirun"),
    ("MASTER_ADDR", "machine of rank 0; names the job"),
    ("MASTER_PORT", "likewise"),
    ("PET_MASTER_ADDR", "the same, from PyTorchJob"),
    ("PET_MASTER_PORT", "the same, from PyTorchJob"),
    ("TORCHELASTIC_RUN_ID", "set by torchrun: names the job"),
    ("TORCHELASTIC_RESTART_COUNT", "likewise"),
    (
        "TESSERA_JOB_TOKEN",
        "token that the ranks of a job on several machines share",
    ),
    ("TESSERA_JOB_TOKEN_FILE", "a file that contains the token"),
    (
        "TESSERA_RUN_TOKEN",
        "names the job; set by this program for its ranks",
    ),
    (
        "TESSERA_JOB_DIR",
        "the job's private directory; set by this program for its ranks",
    ),
];

/// Variables that the driver, libraries or tools around this program read.
pub(super) const ACT_ON_OTHERS: [(&str, &str); 17] = [
    (
        "CUDA_VISIBLE_DEVICES",
        "the driver shows only these GPUs, renumbered from 0",
    ),
    (
        "CUDA_DEVICE_ORDER",
        "PCI_BUS_ID numbers GPUs as nvidia-smi does; otherwise the fastest is first",
    ),
    (
        "CUDA_LAUNCH_BLOCKING",
        "1: the program waits for every kernel; slow, for debugging",
    ),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "queues between program and GPU; 1 prevents overlapping copies",
    ),
    (
        "CUDA_CACHE_PATH",
        "directory of the driver's cache of code compiled from PTX",
    ),
    (
        "CUDA_CACHE_DISABLE",
        "1: the driver caches no machine code and compiles it again in each process",
    ),
    (
        "CUDA_MPS_PIPE_DIRECTORY",
        "processes share a GPU through this MPS server",
    ),
    (
        "NVIDIA_VISIBLE_DEVICES",
        "GPUs that the container runtime adds to the container",
    ),
    (
        "NVIDIA_DRIVER_CAPABILITIES",
        "the container runtime mounts the CUDA driver only for compute",
    ),
    (
        "NVIDIA_TF32_OVERRIDE",
        "0: NVIDIA's libraries never use TF32",
    ),
    (
        "NCCL_DEBUG",
        "verbosity of NCCL, if ranks exchange through it",
    ),
    (
        "NCCL_SOCKET_IFNAME",
        "network interface of NCCL, if ranks exchange through it",
    ),
    (
        "NCCL_P2P_DISABLE",
        "1: NCCL copies between GPUs through host memory",
    ),
    (
        "LD_LIBRARY_PATH",
        "directories that the dynamic linker searches first",
    ),
    ("LD_PRELOAD", "libraries that are loaded before all others"),
    ("RUST_BACKTRACE", "1: reports of panics include a backtrace"),
    (
        "RAYON_NUM_THREADS",
        "threads of the checks before a run; each rank uses cores ÷ ranks",
    ),
];

/// Names, why they have no effect here, what to use instead.
pub(super) type Foreign = (&'static [&'static str], Both, Both);

pub(super) const FOREIGN: [Foreign; 24] = [
    (
        &["MP_SIZE", "NUM_GPUS_PER_WORKER"],
        both(
            "the model is not split by layers or tensors",
            "模型不按层或张量切分",
        ),
        both(
            "--nproc N --zero 3 shards the parameters over N ranks",
            "--nproc N --zero 3 会把参数分片到 N 个 rank",
        ),
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
            "weights are packed and unpacked by kernels of this program",
            "权重由本程序自己的内核压缩和解压",
        ),
        both("--quantize", "--quantize"),
    ),
];

/// Prefix of names known as a family only, kind, effect, what to use instead.
pub(super) type Family = (&'static str, Kind, &'static str, Option<&'static str>);

pub(super) const FAMILIES: [Family; 14] = [
    (
        "NCCL_",
        Kind::ActsOnOthers,
        "NCCL reads it if ranks exchange through NCCL",
        None,
    ),
    (
        "TESSERA_",
        Kind::WithoutEffect,
        "this program has no variable with this name",
        Some("the names above"),
    ),
    (
        "DS_",
        Kind::WithoutEffect,
        "DeepSpeed is not used",
        Some("--zero, --offload"),
    ),
    (
        "DEEPSPEED_",
        Kind::WithoutEffect,
        "DeepSpeed is not used",
        Some("--zero, --offload"),
    ),
    (
        "ACCELERATE_",
        Kind::WithoutEffect,
        "Accelerate is not used",
        Some("flags; see docs/flags.md"),
    ),
    (
        "FSDP_",
        Kind::WithoutEffect,
        "the ZeRO stage selects the sharding",
        Some("--zero 3"),
    ),
    ("PYTORCH_", Kind::WithoutEffect, "PyTorch is not used", None),
    ("TORCH_", Kind::WithoutEffect, "PyTorch is not used", None),
    (
        "HF_",
        Kind::WithoutEffect,
        "nothing is downloaded",
        Some("--model DIR"),
    ),
    (
        "WANDB_",
        Kind::WithoutEffect,
        "nothing is sent anywhere",
        Some("--report-to tensorboard"),
    ),
    ("SLURM_", Kind::WithoutEffect, "not read", None),
    ("OMPI_", Kind::WithoutEffect, "not read", None),
    ("PMI_", Kind::WithoutEffect, "not read", None),
    (
        "PET_",
        Kind::WithoutEffect,
        "read by torchrun, not by this program",
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
