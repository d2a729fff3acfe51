//! Table of all keys of DeepSpeed 0.19, with DeepSpeed's default and the effect here.

use super::schema::Fate::{Flag, Off, Old, Only, Unused};
use super::schema::Kind::{Any, Bool, Map, Number, Pair, Text, Whole, Words};
use super::schema::{Fate, Key, Kind, Section};
use crate::lang::{Both, both};

const UNITS: Both = both(
    "each unit of the model is gathered and reduced as a whole; results do not depend on sizes",
    "模型的每个单元整体汇集和规约；结果不取决于这些大小",
);
const LAYOUT: Both = both(
    "the layout of gradients is fixed; results do not depend on it",
    "梯度的布局是固定的；结果不取决于它",
);
const OVERLAP: Both = both(
    "gathers and reductions always overlap with the computation",
    "汇集和规约总是与计算重叠",
);
const BUFFERS: Both = both(
    "the program chooses its host buffers",
    "主机缓冲区由程序决定",
);
const DISK: Both = both(
    "request size and queue depth of disk I/O are fixed; `launcher bench nvme` measures it",
    "磁盘 I/O 的请求大小和队列深度是固定的；`launcher bench nvme` 可以测量",
);
const MEASURED: Both = both(
    "times, bytes and traffic are always measured; report.html shows them",
    "时间、字节数和通信量总会测量；report.html 会显示它们",
);
const WHOLE_WEIGHTS: Both = both(
    "checkpoints always contain complete weights under their published names",
    "检查点总是包含完整的权重，并使用官方名称",
);
const STATES: Both = both(
    "checkpoints always contain master weights and moments, and load at any number of ranks",
    "检查点总是包含主权重和动量，可用任意数量的 rank 加载",
);
const SUM: Both = both(
    "gradients are always summed between ranks in f32, rank by rank",
    "rank 之间的梯度总是按 rank 顺序以 f32 求和",
);
const ANY_OPTIMIZER: Both = both(
    "the optimizer works in every stage and tier",
    "优化器在每个阶段和存放层级都可用",
);
const RECOMPUTED: Both = both(
    "it configures a function of DeepSpeed; --checkpoint-activations selects what is recomputed",
    "它配置的是 DeepSpeed 的函数；--checkpoint-activations 选择重算哪些部分",
);
const LOG: Both = both(
    "--logging-steps sets how often a row is printed",
    "--logging-steps 设定每隔多少步打印一行",
);
const LOGGED: Both = both(
    "trainer_log.jsonl always contains the metrics",
    "trainer_log.jsonl 总是包含这些指标",
);
const NOTHING_SENT: Both = both(
    "nothing is sent anywhere; metrics are in the run's directory",
    "不会向任何地方发送内容；指标在运行目录中",
);
const NO_TORCH: Both = both("this program does not use PyTorch", "本程序不使用 PyTorch");
const NO_SECOND_WEIGHTS: Both = both(
    "weights have no second copy; --shard-group shards all states within groups",
    "权重没有第二份副本；--shard-group 在组内对所有状态分片",
);
const NO_QUANTISED: Both = both(
    "quantized weights and gradients are not available: they change results",
    "不支持量化的权重和梯度：它们会改变结果",
);
const NO_PARALLEL: Both = both(
    "the model is sharded by ZeRO and divided by layers (--mp-size); other kinds of parallelism are not available",
    "模型用 ZeRO 分片，并可按层切分（--mp-size）；不支持其他并行方式",
);
const NOT_AVAILABLE: Both = both(
    "it would change the training and is not available",
    "它会改变训练，因此不支持",
);
const ONLY_ADAMW: Both = both("the optimizer is AdamW", "优化器是 AdamW");

const fn key(name: &'static str, kind: Kind, default: &'static str, fate: Fate) -> Key {
    Key {
        name,
        kind,
        default,
        fate,
    }
}

/// A key whose value is a section with its own table.
const fn section(name: &'static str) -> Key {
    key(name, Map, "", Fate::Section)
}

const OFF: &[&str] = &["false"];
const ON: &[&str] = &["true"];
const ONE: &[&str] = &["0", "1"];

/// All sections.
#[rustfmt::skip] // a row is a line
pub(super) const SECTIONS: &[Section] = &[
    Section {
        path: "",
        strict: false,
        keys: &[
            key("train_batch_size", Whole, "", Flag("global-batch-size")),
            key("train_micro_batch_size_per_gpu", Whole, "", Flag("per-device-train-batch-size")),
            key("gradient_accumulation_steps", Whole, "1", Flag("gradient-accumulation-steps")),
            key("gradient_clipping", Number, "0", Flag("max-grad-norm")),
            section("zero_optimization"),
            section("fp16"),
            section("bf16"),
            section("optimizer"),
            section("scheduler"),
            section("activation_checkpointing"),
            section("data_types"),
            section("tensorboard"),
            section("tensor_parallel"),
            section("aio"),
            key("steps_per_print", Whole, "", Unused(LOG)),
            key("wall_clock_breakdown", Bool, "false", Unused(MEASURED)),
            key("memory_breakdown", Bool, "false", Unused(MEASURED)),
            key("dump_state", Bool, "false", Unused(both("config.resolved.json contains the configuration", "config.resolved.json 中有完整配置"))),
            key("flops_profiler", Map, "", Unused(MEASURED)),
            section("comms_logger"),
            section("csv_monitor"),
            section("wandb"),
            section("comet"),
            key("log_level", Any, "", Unused(both("RUST_LOG chooses what is logged", "日志内容由 RUST_LOG 选择"))),
            key("zero_allow_untested_optimizer", Bool, "false", Unused(ANY_OPTIMIZER)),
            key("zero_force_ds_cpu_optimizer", Bool, "true", Unused(ANY_OPTIMIZER)),
            key("managed_gradient_accumulation", Bool, "true", Only(ON, both("the batch sizes determine the updates", "更新由各批大小决定"), both("remove it", "请删除它"))),
            key("communication_data_type", Words(&["fp32", "fp16", "bf16", "bfp16"]), "", Unused(SUM)),
            key("seq_parallel_communication_data_type", Text, "fp32", Unused(SUM)),
            key("gradient_allreduce_op", Words(&["mean", "sum"]), "mean", Only(&["mean"], both("gradients are divided by the supervised tokens of the whole batch", "梯度除以整个批次中被监督的 token 数"), both("remove it, and scale the learning rate", "请删除它，并相应调整学习率"))),
            key("prescale_gradients", Bool, "false", Unused(SUM)),
            key("gradient_predivide_factor", Number, "1.0", Unused(SUM)),
            key("sparse_gradients", Bool, "false", Only(OFF, both("gradients are dense", "梯度是稠密的"), both("remove it", "请删除它"))),
            key("disable_allgather", Bool, "false", Unused(UNITS)),
            key("dataloader_drop_last", Bool, "false", Only(OFF, both("no sample is dropped", "不会丢弃样本"), both("remove it", "请删除它"))),
            key("graph_harvesting", Bool, "false", Unused(NO_TORCH)),
            key("compile", Any, "", Unused(NO_TORCH)),
            key("torch_autocast", Map, "", Off(both("the sections bf16 and fp16 set the number format", "数值格式由 bf16 和 fp16 两节设定"))),
            key("amp", Map, "", Off(both("the sections bf16 and fp16 set the number format", "数值格式由 bf16 和 fp16 两节设定"))),
            key("vocabulary_size", Whole, "", Unused(both("the model directory states it", "由模型目录给出"))),
            key("checkpoint", Map, "", Unused(STATES)),
            key("nebula", Map, "", Off(both("DeepSpeed no longer has it", "DeepSpeed 已不再支持它"))),
            key("datastates_ckpt", Map, "", Unused(STATES)),
            key("elasticity", Map, "", Off(both("the number of ranks changes only between runs; a checkpoint loads at any number", "rank 数只能在两次运行之间改变；检查点可用任意数量的 rank 加载"))),
            key("sequence_parallel_size", Whole, "1", Only(ONE, NO_PARALLEL, both("remove it", "请删除它"))),
            key("use_data_before_expert_parallelism", Bool, "false", Only(&["false"], NO_PARALLEL, both("remove it", "请删除它"))),
            key("pipeline", Map, "", Off(both("--mp-size M divides the layers among M ranks", "--mp-size M 把各层分给 M 个 rank"))),
            key("expert_parallel", Map, "", Off(NO_PARALLEL)),
            key("autotuning", Map, "", Off(both("`launcher plan` and --find-batch choose sizes before the run", "`launcher plan` 和 --find-batch 在运行之前选择大小"))),
            key("sparse_attention", Map, "", Off(NOT_AVAILABLE)),
            key("data_efficiency", Map, "", Off(NOT_AVAILABLE)),
            key("curriculum_learning", Map, "", Off(NOT_AVAILABLE)),
            key("compression_training", Map, "", Off(NOT_AVAILABLE)),
            key("progressive_layer_drop", Map, "", Off(NOT_AVAILABLE)),
            key("eigenvalue", Map, "", Off(NOT_AVAILABLE)),
            key("hybrid_engine", Map, "", Off(NOT_AVAILABLE)),
            key("weight_quantization", Map, "", Off(NO_QUANTISED)),
        ],
    },
    Section {
        path: "zero_optimization",
        strict: true,
        keys: &[
            key("stage", Whole, "0", Flag("zero")),
            section("offload_optimizer"),
            section("offload_param"),
            key("cpu_offload", Bool, "false", Old("offload_optimizer")),
            key("cpu_offload_param", Bool, "false", Old("offload_param")),
            key("cpu_offload_use_pin_memory", Bool, "false", Old("offload_optimizer.pin_memory")),
            key("stage3_gather_fp16_weights_on_model_save", Bool, "false", Old("stage3_gather_16bit_weights_on_model_save")),
            key("stage3_gather_16bit_weights_on_model_save", Bool, "false", Unused(WHOLE_WEIGHTS)),
            key("contiguous_gradients", Bool, "true", Unused(LAYOUT)),
            key("round_robin_gradients", Bool, "false", Unused(LAYOUT)),
            key("reduce_scatter", Bool, "true", Unused(UNITS)),
            key("reduce_bucket_size", Whole, "5e8", Unused(UNITS)),
            key("use_multi_rank_bucket_allreduce", Bool, "true", Unused(UNITS)),
            key("allgather_partitions", Bool, "true", Unused(UNITS)),
            key("allgather_bucket_size", Whole, "5e8", Unused(UNITS)),
            key("overlap_comm", Bool, "", Unused(OVERLAP)),
            key("load_from_fp32_weights", Bool, "true", Unused(STATES)),
            key("elastic_checkpoint", Bool, "false", Unused(STATES)),
            key("pipeline_loading_checkpoint", Bool, "false", Unused(STATES)),
            key("sub_group_size", Whole, "1e9", Unused(UNITS)),
            key("stage3_prefetch_bucket_size", Whole, "5e7", Unused(UNITS)),
            key("stage3_param_persistence_threshold", Whole, "1e5", Unused(UNITS)),
            key("stage3_model_persistence_threshold", Whole, "", Unused(UNITS)),
            key("stage3_max_live_parameters", Whole, "1e9", Unused(UNITS)),
            key("stage3_max_reuse_distance", Whole, "1e9", Unused(UNITS)),
            key("stage3_module_granularity_threshold", Whole, "0", Unused(UNITS)),
            key("stage3_use_all_reduce_for_fetch_params", Bool, "false", Unused(UNITS)),
            key("stage3_allgather_sequential", Bool, "false", Unused(UNITS)),
            key("leaf_module", Any, "", Unused(UNITS)),
            key("memory_efficient_linear", Bool, "true", Unused(NO_TORCH)),
            key("override_module_apply", Bool, "true", Unused(NO_TORCH)),
            key("ignore_unused_parameters", Bool, "true", Unused(both("a unit that a batch does not use has zero gradients", "某个批次没有用到的单元，其梯度为零"))),
            key("legacy_stage1", Bool, "false", Unused(UNITS)),
            key("log_trace_cache_warnings", Bool, "false", Unused(both("the order of gathers comes from the plan", "汇集的顺序来自计划"))),
            key("enable_sanity_checks", Bool, "false", Unused(both("the order of collectives is always checked between ranks", "各 rank 之间总会检查集合通信的顺序"))),
            key("zero_hpz_partition_size", Whole, "1", Unused(NO_SECOND_WEIGHTS)),
            key("zero_quantized_weights", Bool, "false", Only(OFF, NO_QUANTISED, both("remove it", "请删除它"))),
            key("zero_quantized_nontrainable_weights", Bool, "false", Only(OFF, NO_QUANTISED, both("remove it; --offload param=cpu saves device memory", "请删除它；--offload param=cpu 可以节省显存"))),
            key("zero_quantized_gradients", Bool, "false", Only(OFF, NO_QUANTISED, both("remove it", "请删除它"))),
            key("zeropp_loco_param", Any, "", Only(&["null"], NO_QUANTISED, both("remove it", "请删除它"))),
            key("zenflow", Any, "", Only(&["null"], both("it updates weights from late gradients, which changes results", "它用过时的梯度更新权重，会改变结果"), both("remove it", "请删除它"))),
            key("mics_shard_size", Any, "-1", Flag("shard-group")),
            key("mics_hierarchical_params_gather", Bool, "false", Unused(both("a gather stays within its shard group", "汇集只在分片组内进行"))),
            key("save_muon_momentum_buffer_in_memory", Bool, "false", Only(OFF, ONLY_ADAMW, both("remove it", "请删除它"))),
        ],
    },
    Section {
        path: "zero_optimization.offload_optimizer",
        strict: true,
        keys: &[
            key("device", Words(&["none", "cpu", "nvme"]), "none", Flag("offload")),
            key("nvme_path", Text, "", Flag("offload")),
            key("pin_memory", Bool, "true", Unused(BUFFERS)),
            key("buffer_count", Whole, "4", Unused(BUFFERS)),
            key("pipeline_read", Bool, "false", Unused(DISK)),
            key("pipeline_write", Bool, "false", Unused(DISK)),
            key("fast_init", Bool, "false", Unused(BUFFERS)),
            key("ratio", Number, "1.0", Unused(both("the whole optimizer state is in one tier", "整个优化器状态位于同一层级"))),
            key("super_offload", Bool, "false", Unused(both("updates on the host begin when the gradient norm is known", "梯度范数已知之后，主机上的更新才开始"))),
            key("cpuadam_cores_perc", Number, "0.8", Unused(both("ranks share the cores evenly", "各 rank 平均使用 CPU 核心"))),
        ],
    },
    Section {
        path: "zero_optimization.offload_param",
        strict: true,
        keys: &[
            key("device", Words(&["none", "cpu", "nvme"]), "none", Flag("offload")),
            key("nvme_path", Text, "", Flag("offload")),
            key("pin_memory", Bool, "true", Unused(BUFFERS)),
            key("buffer_count", Whole, "5", Unused(BUFFERS)),
            key("buffer_size", Whole, "1e8", Unused(BUFFERS)),
            key("max_in_cpu", Whole, "1e9", Unused(BUFFERS)),
        ],
    },
    Section {
        path: "fp16",
        strict: true,
        keys: &[
            key("enabled", Bool, "false", Flag("precision")),
            key("loss_scale", Number, "0", Flag("loss-scale")),
            key("initial_scale_power", Whole, "16", Flag("initial-scale-power")),
            key("loss_scale_window", Whole, "1000", Flag("loss-scale-window")),
            key("hysteresis", Whole, "2", Flag("hysteresis")),
            key("min_loss_scale", Number, "1", Flag("min-loss-scale")),
            key("consecutive_hysteresis", Bool, "false", Only(OFF, both("the hysteresis is reset when the scale grows", "缩放增大时，滞后计数会重置"), both("remove it", "请删除它"))),
            key("auto_cast", Bool, "false", Unused(NO_TORCH)),
            key("fp16_master_weights_and_grads", Bool, "false", Only(OFF, both("fp16 has f32 master weights", "fp16 使用 f32 主权重"), both("--precision pure-bf16 has no master weights", "--precision pure-bf16 没有主权重"))),
        ],
    },
    Section {
        path: "bf16",
        strict: true,
        keys: &[
            key("enabled", Bool, "false", Flag("precision")),
            key("bf16_master_weights_and_grads", Bool, "false", Flag("precision")),
            key("bf16_optimizer_states", Bool, "false", Flag("pure-bf16-moments")),
            key("immediate_grad_update", Bool, "false", Unused(LAYOUT)),
            key("check_grad_overflow", Bool, "true", Only(ON, both("non-finite updates are skipped in every stage", "在每个阶段都会跳过非有限的更新"), both("remove it", "请删除它"))),
        ],
    },
    Section {
        path: "optimizer",
        strict: false,
        keys: &[
            key("type", Text, "", Only(&["adam", "adamw"], ONLY_ADAMW, both("\"type\": \"AdamW\"", "\"type\": \"AdamW\""))),
            section("params"),
            key("legacy_fusion", Bool, "false", Unused(NO_TORCH)),
        ],
    },
    Section {
        path: "optimizer.params",
        strict: false,
        keys: &[
            key("lr", Number, "1e-3", Flag("learning-rate")),
            key("betas", Pair, "[0.9, 0.999]", Flag("adam-beta1")),
            key("eps", Number, "1e-8", Flag("adam-epsilon")),
            key("weight_decay", Number, "0", Flag("weight-decay")),
            key("bias_correction", Bool, "true", Only(ON, both("the bias correction of AdamW is always on", "AdamW 的偏差修正总是开启"), both("remove it", "请删除它"))),
            key("adam_w_mode", Bool, "true", Only(ON, both("weight decay is always decoupled", "权重衰减总是解耦的"), both("remove it", "请删除它"))),
            key("amsgrad", Bool, "false", Only(OFF, ONLY_ADAMW, both("remove it", "请删除它"))),
            key("torch_adam", Bool, "false", Unused(NO_TORCH)),
            key("fp32_optimizer_states", Bool, "true", Only(ON, both("f32 master weights have f32 moments", "f32 主权重使用 f32 动量"), both("--precision pure-bf16", "--precision pure-bf16"))),
        ],
    },
    Section {
        path: "scheduler",
        strict: false,
        keys: &[
            key("type", Words(&["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]), "", Flag("lr-scheduler-type")),
            section("params"),
        ],
    },
    Section {
        path: "scheduler.params",
        // DeepSpeed passes them as arguments of a function.
        strict: true,
        keys: &[
            key("warmup_min_lr", Number, "0", Flag("lr-scheduler-kwargs")),
            key("warmup_max_lr", Number, "", Flag("learning-rate")),
            key("warmup_num_steps", Whole, "1000", Flag("warmup-steps")),
            key("warmup_type", Words(&["log", "linear"]), "log", Flag("lr-scheduler-kwargs")),
            key("total_num_steps", Whole, "", Flag("max-steps")),
            key("warmup_min_ratio", Number, "0", Flag("lr-scheduler-kwargs")),
            key("cos_min_ratio", Number, "1e-4", Flag("lr-scheduler-kwargs")),
        ],
    },
    Section {
        path: "activation_checkpointing",
        strict: false,
        keys: &[
            key("partition_activations", Bool, "false", Unused(RECOMPUTED)),
            key("contiguous_memory_optimization", Bool, "false", Unused(RECOMPUTED)),
            key("cpu_checkpointing", Bool, "false", Flag("offload")),
            key("number_checkpoints", Whole, "", Unused(RECOMPUTED)),
            key("synchronize_checkpoint_boundary", Bool, "false", Unused(RECOMPUTED)),
            key("profile", Bool, "false", Unused(MEASURED)),
        ],
    },
    Section {
        path: "data_types",
        strict: false,
        keys: &[
            key("grad_accum_dtype", Words(&["fp32", "bf16"]), "", Flag("grad-dtype")),
            key("param_dtype", Any, "", Unused(both("the sections bf16 and fp16 set the number format", "数值格式由 bf16 和 fp16 两节设定"))),
            key("buffer_dtype", Any, "", Unused(both("the sections bf16 and fp16 set the number format", "数值格式由 bf16 和 fp16 两节设定"))),
        ],
    },
    Section {
        path: "tensorboard",
        strict: true,
        keys: &[
            key("enabled", Bool, "false", Flag("report-to")),
            key("output_path", Text, "", Unused(both("all files of a run are in --output", "运行的所有文件都在 --output 中"))),
            key("job_name", Text, "", Unused(both("all files of a run are in --output", "运行的所有文件都在 --output 中"))),
        ],
    },
    Section {
        path: "csv_monitor",
        strict: true,
        keys: &[
            key("enabled", Bool, "false", Unused(LOGGED)),
            key("output_path", Text, "", Unused(LOGGED)),
            key("job_name", Text, "", Unused(LOGGED)),
        ],
    },
    Section {
        path: "wandb",
        strict: true,
        keys: &[
            key("enabled", Bool, "false", Unused(NOTHING_SENT)),
            key("group", Any, "", Unused(NOTHING_SENT)),
            key("team", Any, "", Unused(NOTHING_SENT)),
            key("project", Any, "", Unused(NOTHING_SENT)),
        ],
    },
    Section {
        path: "comet",
        strict: true,
        keys: &[
            key("enabled", Bool, "false", Unused(NOTHING_SENT)),
            key("samples_log_interval", Any, "", Unused(NOTHING_SENT)),
            key("project", Any, "", Unused(NOTHING_SENT)),
            key("workspace", Any, "", Unused(NOTHING_SENT)),
            key("api_key", Any, "", Unused(NOTHING_SENT)),
            key("experiment_name", Any, "", Unused(NOTHING_SENT)),
            key("experiment_key", Any, "", Unused(NOTHING_SENT)),
            key("online", Any, "", Unused(NOTHING_SENT)),
            key("mode", Any, "", Unused(NOTHING_SENT)),
        ],
    },
    Section {
        path: "comms_logger",
        strict: true,
        keys: &[
            key("enabled", Bool, "false", Unused(MEASURED)),
            key("verbose", Bool, "false", Unused(MEASURED)),
            key("prof_all", Bool, "true", Unused(MEASURED)),
            key("prof_ops", Any, "", Unused(MEASURED)),
            key("debug", Bool, "false", Unused(MEASURED)),
        ],
    },
    Section {
        path: "tensor_parallel",
        strict: true,
        keys: &[
            key("autotp_size", Whole, "0", Only(ONE, NO_PARALLEL, both("--mp-size M divides the layers among M ranks; --zero 3 shards the weights", "--mp-size M 把各层分给 M 个 rank；--zero 3 会把权重分片"))),
            key("preset_model", Any, "", Unused(NO_PARALLEL)),
            key("tp_overlap_comm", Bool, "false", Unused(NO_PARALLEL)),
            key("partition_config", Any, "", Unused(NO_PARALLEL)),
        ],
    },
    Section {
        path: "aio",
        strict: false,
        keys: &[
            key("block_size", Whole, "1048576", Unused(DISK)),
            key("queue_depth", Whole, "8", Unused(DISK)),
            key("intra_op_parallelism", Whole, "1", Unused(DISK)),
            key("single_submit", Bool, "false", Unused(DISK)),
            key("overlap_events", Bool, "true", Unused(DISK)),
            key("use_gds", Bool, "false", Unused(DISK)),
        ],
    },
];
