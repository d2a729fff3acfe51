//! The variables that are known by name. Order is that of the report.

use super::Kind;

/// Read by this program.
pub(super) const READ: [(&str, &str); 59] = [
    (
        "TESSERA_CUDA_LIBS",
        "folders with CUDA's libraries, colon-separated; looked at first",
    ),
    (
        "TESSERA_MATMUL",
        "matrix products on GPUs: auto, cublaslt, own; auto takes cuBLASLt where it is found",
    ),
    (
        "TESSERA_CUDA_ARCH",
        "machine code of our kernels: native, sm_80; sm_80 is that of A100 and RTX 30 on any GPU",
    ),
    (
        "CUDA_HOME",
        "an installed CUDA toolkit; its lib64 is looked at",
    ),
    ("CUDA_PATH", "the same, where CUDA_HOME is not set"),
    (
        "VIRTUAL_ENV",
        "a Python environment whose NVIDIA packages are looked at",
    ),
    (
        "CONDA_PREFIX",
        "a Python environment whose NVIDIA packages are looked at",
    ),
    ("PYTHONPATH", "folders whose NVIDIA packages are looked at"),
    (
        "PATH",
        "where doctor finds python3, to ask for its package folders",
    ),
    ("TMPDIR", "private files of a job; /tmp without it"),
    (
        "XDG_CACHE_HOME",
        "the demo's drawn model and pictures lie in its tessera folder",
    ),
    (
        "HOME",
        "the demo's files lie in ~/.cache/tessera where XDG_CACHE_HOME is not set",
    ),
    ("NO_COLOR", "no colours on the terminal"),
    (
        "RUST_LOG",
        "filter of the log, such as debug or engine=trace",
    ),
    (
        "RANK",
        "number of this process among all ranks, or of this machine where no LOCAL_RANK is set",
    ),
    (
        "LOCAL_RANK",
        "set: this process is a rank and starts no others",
    ),
    (
        "WORLD_SIZE",
        "number of ranks, or of machines where no LOCAL_RANK is set",
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
        "set: this process is a rank of OpenMPI's mpirun",
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
        "set: this process is a rank of Intel MPI or MPICH",
    ),
    ("PMI_SIZE", "number of its ranks"),
    ("MPI_LOCALRANKID", "number among those on this machine"),
    ("MPI_LOCALNRANKS", "number of those on this machine"),
    (
        "MV2_COMM_WORLD_RANK",
        "set: this process is a rank of MVAPICH",
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
        "set with several tasks: this process is a rank of srun",
    ),
    ("SLURM_PROCID", "number of this task"),
    ("SLURM_STEP_NUM_TASKS", "number of tasks of srun"),
    ("SLURM_NTASKS", "the same, where the one above is not set"),
    ("SLURM_LOCALID", "number of this task on its machine"),
    ("SLURM_NODEID", "number of this machine"),
    (
        "SLURM_STEP_TASKS_PER_NODE",
        "tasks of each machine, as 2(x3),1",
    ),
    (
        "SLURM_TASKS_PER_NODE",
        "the same, where the one above is not set",
    ),
    (
        "SLURM_STEP_NODELIST",
        "machines of the tasks; ranks meet on the first",
    ),
    (
        "SLURM_JOB_NODELIST",
        "the same, where the one above is not set",
    ),
    (
        "SLURM_JOB_ID",
        "names the job, and gives the port where ranks meet: 15000 + number % 20000",
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
        "what only the ranks of a job on several machines know",
    ),
    ("TESSERA_JOB_TOKEN_FILE", "a file that holds it instead"),
    (
        "TESSERA_RUN_TOKEN",
        "names the job; set by this program for its ranks",
    ),
    (
        "TESSERA_JOB_DIR",
        "the job's private folder; set by this program for its ranks",
    ),
];

/// Read by the driver, by libraries or by tools around this program.
pub(super) const ACT_ON_OTHERS: [(&str, &str); 17] = [
    (
        "CUDA_VISIBLE_DEVICES",
        "the driver shows only these GPUs, numbered anew from 0",
    ),
    (
        "CUDA_DEVICE_ORDER",
        "PCI_BUS_ID: GPUs are numbered as nvidia-smi does, else fastest first",
    ),
    (
        "CUDA_LAUNCH_BLOCKING",
        "1: every kernel is waited for; slow, for debugging",
    ),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "queues between program and GPU; 1 keeps copies from overlapping",
    ),
    (
        "CUDA_CACHE_PATH",
        "where the driver keeps machine code that it made of PTX",
    ),
    (
        "CUDA_CACHE_DISABLE",
        "1: the driver keeps no machine code and makes it anew in each process",
    ),
    (
        "CUDA_MPS_PIPE_DIRECTORY",
        "processes share a GPU through this MPS server",
    ),
    (
        "NVIDIA_VISIBLE_DEVICES",
        "which GPUs the container runtime puts into the container",
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
        "how much NCCL tells, where ranks exchange through it",
    ),
    (
        "NCCL_SOCKET_IFNAME",
        "network interface of NCCL, where ranks exchange through it",
    ),
    (
        "NCCL_P2P_DISABLE",
        "1: NCCL copies between GPUs through host memory",
    ),
    (
        "LD_LIBRARY_PATH",
        "where the dynamic linker looks for libraries first",
    ),
    (
        "LD_PRELOAD",
        "libraries that are put in front of all others",
    ),
    ("RUST_BACKTRACE", "1: reports of panics carry a backtrace"),
    (
        "RAYON_NUM_THREADS",
        "threads of the checks before a run; ranks take cores ÷ ranks",
    ),
];

/// Names, why they have no effect, what takes their place.
pub(super) type Foreign = (&'static [&'static str], &'static str, &'static str);

pub(super) const FOREIGN: [Foreign; 24] = [
    (
        &["MP_SIZE", "NUM_GPUS_PER_WORKER"],
        "the model is not split by layers or tensors",
        "--nproc N --zero 3: one number, parameters are sharded over N ranks",
    ),
    (
        &["NUM_WORKERS"],
        "ranks are started by the program",
        "--nproc N",
    ),
    (
        &[
            "PYTORCH_CUDA_ALLOC_CONF",
            "PYTORCH_ALLOC_CONF",
            "PYTORCH_NO_CUDA_MEMORY_CACHING",
        ],
        "there is no PyTorch allocator: memory is planned and comes from an own pool",
        "--device-memory-limit BYTES, --offload cpu",
    ),
    (&["DS_ACCELERATOR"], "the device is a flag", "--device"),
    (
        &[
            "DS_BUILD_OPS",
            "DS_BUILD_CPU_ADAM",
            "DS_BUILD_FUSED_ADAM",
            "DS_SKIP_CUDA_CHECK",
        ],
        "nothing is built at installation",
        "nothing to set",
    ),
    (
        &["ACCELERATE_MIXED_PRECISION"],
        "the number format is a flag",
        "--precision",
    ),
    (
        &[
            "ACCELERATE_USE_DEEPSPEED",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE",
        ],
        "the stage is a flag",
        "--zero STAGE",
    ),
    (
        &["ACCELERATE_USE_FSDP"],
        "sharding is chosen by the ZeRO stage",
        "--zero 3",
    ),
    (
        &["GROUP_RANK", "CROSS_RANK", "CROSS_SIZE"],
        "machines are told apart by the numbers of their ranks",
        "nothing to set",
    ),
    (
        &["FORCE_TORCHRUN"],
        "ranks are started by the program",
        "--nproc N",
    ),
    (
        &["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"],
        "a rank uses cores ÷ ranks threads",
        "limit the cores: taskset, or the container's cpus",
    ),
    (
        &["TORCH_CUDA_ARCH_LIST", "MAX_JOBS"],
        "kernels are compiled at run time, for the GPU that is there",
        "nothing to set",
    ),
    (
        &[
            "TORCH_DISTRIBUTED_DEBUG",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "NCCL_ASYNC_ERROR_HANDLING",
            "TORCH_NCCL_BLOCKING_WAIT",
            "NCCL_BLOCKING_WAIT",
        ],
        "every wait has a deadline and names what it waited for",
        "nothing to set",
    ),
    (&["PYTHONHASHSEED"], "the only seed is a flag", "--seed N"),
    (
        &["TOKENIZERS_PARALLELISM"],
        "samples are tokenized one by one",
        "nothing to set",
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
        "nothing is downloaded",
        "--model FOLDER",
    ),
    (
        &["HF_ENDPOINT", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"],
        "nothing is downloaded or sent",
        "--model FOLDER",
    ),
    (
        &[
            "WANDB_API_KEY",
            "WANDB_PROJECT",
            "WANDB_MODE",
            "WANDB_DISABLED",
            "MLFLOW_TRACKING_URI",
        ],
        "nothing is sent anywhere",
        "--report-to tensorboard; wandb sync reads those files",
    ),
    (
        &["TENSORBOARD_LOGGING_DIR"],
        "event files lie in the run folder",
        "--report-to tensorboard --output DIR",
    ),
    (
        &["RECORD_VRAM"],
        "every log line has the peak memory",
        "nothing to set",
    ),
    (
        &["MAX_PIXELS", "SIZE_FACTOR"],
        "pictures are cut by the model's own rules",
        "--max-slice-nums N",
    ),
    (
        &["LLAMAFACTORY_VERBOSITY", "TRANSFORMERS_VERBOSITY"],
        "the log has its own filter",
        "RUST_LOG",
    ),
    (
        &["DISABLE_VERSION_CHECK"],
        "there are no Python packages to check",
        "nothing to set",
    ),
    (
        &["BNB_CUDA_VERSION", "BITSANDBYTES_NOWELCOME"],
        "quantised weights are not available",
        "--precision, --offload cpu",
    ),
];

/// Beginnings of names that are known as a family only: kind, effect, what takes their place.
pub(super) type Family = (&'static str, Kind, &'static str, Option<&'static str>);

pub(super) const FAMILIES: [Family; 14] = [
    (
        "NCCL_",
        Kind::ActsOnOthers,
        "read by NCCL, where ranks exchange through it",
        None,
    ),
    (
        "TESSERA_",
        Kind::WithoutEffect,
        "no variable of this program has such a name",
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
        "sharding is chosen by the ZeRO stage",
        Some("--zero 3"),
    ),
    ("PYTORCH_", Kind::WithoutEffect, "PyTorch is not used", None),
    ("TORCH_", Kind::WithoutEffect, "PyTorch is not used", None),
    (
        "HF_",
        Kind::WithoutEffect,
        "nothing is downloaded",
        Some("--model FOLDER"),
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

/// Known by name, but not shown: what may open an account, and what is long and tells nothing.
pub(super) const HIDDEN: [&str; 7] = [
    "TESSERA_JOB_TOKEN",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "HF_ENDPOINT",
    "MLFLOW_TRACKING_URI",
    "PATH",
];
