//! Table of all keys of DeepSpeed 0.19, with DeepSpeed's default and the effect here.

use super::schema::Fate::{Flag, Off, Old, Only, Unused};
use super::schema::Kind::{Any, Bool, Map, Number, Pair, Text, Whole, Words};
use super::schema::{Fate, Key, Kind, Section};

const UNITS: &str =
    "each unit of the model is gathered and reduced as a whole; results do not depend on sizes";
const LAYOUT: &str = "the layout of gradients is fixed; results do not depend on it";
const OVERLAP: &str = "gathers and reductions always overlap with the computation";
const BUFFERS: &str = "the program chooses its host buffers";
const DISK: &str =
    "request size and queue depth of disk I/O are fixed; `launcher bench nvme` measures it";
const MEASURED: &str = "times, bytes and traffic are always measured; report.html shows them";
const WHOLE_WEIGHTS: &str =
    "checkpoints always contain complete weights under their published names";
const STATES: &str =
    "checkpoints always contain master weights and moments, and load at any number of ranks";
const SUM: &str = "gradients are always summed between ranks in f32, rank by rank";
const ANY_OPTIMIZER: &str = "the optimizer works in every stage and tier";
const RECOMPUTED: &str =
    "it configures a function of DeepSpeed; --checkpoint-activations selects what is recomputed";
const LOG: &str = "--logging-steps sets how often a row is printed";
const LOGGED: &str = "trainer_log.jsonl always contains the metrics";
const NOTHING_SENT: &str = "nothing is sent anywhere; metrics are in the run's directory";
const NO_TORCH: &str = "this program does not use PyTorch";
const NO_SECOND_WEIGHTS: &str =
    "weights have no second copy; --shard-group shards all states within groups";
const NO_QUANTISED: &str = "quantized weights and gradients are not available: they change results";
const NO_PARALLEL: &str =
    "the model is sharded by ZeRO only; other kinds of parallelism are not available";
const NOT_AVAILABLE: &str = "it would change the training and is not available";
const ONLY_ADAMW: &str = "the optimizer is AdamW";

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
            key("gradient_clipping", Number, "1.0", Flag("max-grad-norm")),
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
            key("dump_state", Bool, "false", Unused("config.resolved.json contains the configuration")),
            key("flops_profiler", Map, "", Unused(MEASURED)),
            section("comms_logger"),
            section("csv_monitor"),
            section("wandb"),
            section("comet"),
            key("log_level", Any, "", Unused("RUST_LOG chooses what is logged")),
            key("zero_allow_untested_optimizer", Bool, "false", Unused(ANY_OPTIMIZER)),
            key("zero_force_ds_cpu_optimizer", Bool, "true", Unused(ANY_OPTIMIZER)),
            key("managed_gradient_accumulation", Bool, "true", Only(ON, "the batch sizes determine the updates", "remove it")),
            key("communication_data_type", Words(&["fp32", "fp16", "bf16", "bfp16"]), "", Unused(SUM)),
            key("seq_parallel_communication_data_type", Text, "fp32", Unused(SUM)),
            key("gradient_allreduce_op", Words(&["mean", "sum"]), "mean", Only(&["mean"], "gradients are divided by the supervised tokens of the whole batch", "remove it, and scale the learning rate")),
            key("prescale_gradients", Bool, "false", Unused(SUM)),
            key("gradient_predivide_factor", Number, "1.0", Unused(SUM)),
            key("sparse_gradients", Bool, "false", Only(OFF, "gradients are dense", "remove it")),
            key("disable_allgather", Bool, "false", Unused(UNITS)),
            key("dataloader_drop_last", Bool, "false", Only(OFF, "no sample is dropped", "remove it")),
            key("graph_harvesting", Bool, "false", Unused(NO_TORCH)),
            key("compile", Any, "", Unused(NO_TORCH)),
            key("torch_autocast", Map, "", Off("the sections bf16 and fp16 set the number format")),
            key("amp", Map, "", Off("the sections bf16 and fp16 set the number format")),
            key("vocabulary_size", Whole, "", Unused("the model directory states it")),
            key("checkpoint", Map, "", Unused(STATES)),
            key("nebula", Map, "", Off("DeepSpeed no longer has it")),
            key("datastates_ckpt", Map, "", Unused(STATES)),
            key("elasticity", Map, "", Off("the number of ranks changes only between runs; a checkpoint loads at any number")),
            key("sequence_parallel_size", Whole, "1", Only(ONE, NO_PARALLEL, "remove it")),
            key("pipeline", Map, "", Off(NO_PARALLEL)),
            key("expert_parallel", Map, "", Off(NO_PARALLEL)),
            key("autotuning", Map, "", Off("`launcher plan` and --find-batch choose sizes before the run")),
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
            key("ignore_unused_parameters", Bool, "true", Unused("a unit that a batch does not use has zero gradients")),
            key("legacy_stage1", Bool, "false", Unused(UNITS)),
            key("log_trace_cache_warnings", Bool, "false", Unused("the order of gathers comes from the plan")),
            key("enable_sanity_checks", Bool, "false", Unused("the order of collectives is always checked between ranks")),
            key("zero_hpz_partition_size", Whole, "1", Unused(NO_SECOND_WEIGHTS)),
            key("zero_quantized_weights", Bool, "false", Only(OFF, NO_QUANTISED, "remove it")),
            key("zero_quantized_nontrainable_weights", Bool, "false", Only(OFF, NO_QUANTISED, "remove it; --offload param=cpu saves device memory")),
            key("zero_quantized_gradients", Bool, "false", Only(OFF, NO_QUANTISED, "remove it")),
            key("zeropp_loco_param", Any, "", Only(&["null"], NO_QUANTISED, "remove it")),
            key("zenflow", Any, "", Only(&["null"], "it updates weights from late gradients, which changes results", "remove it")),
            key("mics_shard_size", Any, "-1", Flag("shard-group")),
            key("mics_hierarchical_params_gather", Bool, "false", Unused("a gather stays within its shard group")),
            key("save_muon_momentum_buffer_in_memory", Bool, "false", Only(OFF, ONLY_ADAMW, "remove it")),
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
            key("ratio", Number, "1.0", Unused("the whole optimizer state is in one tier")),
            key("super_offload", Bool, "false", Unused("updates on the host begin when the gradient norm is known")),
            key("cpuadam_cores_perc", Number, "0.8", Unused("ranks share the cores evenly")),
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
            key("consecutive_hysteresis", Bool, "false", Only(OFF, "the hysteresis is reset when the scale grows", "remove it")),
            key("auto_cast", Bool, "false", Unused(NO_TORCH)),
            key("fp16_master_weights_and_grads", Bool, "false", Only(OFF, "fp16 has f32 master weights", "--precision pure-bf16 has no master weights")),
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
            key("check_grad_overflow", Bool, "true", Only(ON, "non-finite updates are skipped in every stage", "remove it")),
        ],
    },
    Section {
        path: "optimizer",
        strict: false,
        keys: &[
            key("type", Text, "", Only(&["adam", "adamw"], ONLY_ADAMW, "\"type\": \"AdamW\"")),
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
            key("bias_correction", Bool, "true", Only(ON, "the bias correction of AdamW is always on", "remove it")),
            key("adam_w_mode", Bool, "true", Only(ON, "weight decay is always decoupled", "remove it")),
            key("amsgrad", Bool, "false", Only(OFF, ONLY_ADAMW, "remove it")),
            key("torch_adam", Bool, "false", Unused(NO_TORCH)),
            key("fp32_optimizer_states", Bool, "true", Only(ON, "f32 master weights have f32 moments", "--precision pure-bf16")),
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
            key("param_dtype", Any, "", Unused("the sections bf16 and fp16 set the number format")),
            key("buffer_dtype", Any, "", Unused("the sections bf16 and fp16 set the number format")),
        ],
    },
    Section {
        path: "tensorboard",
        strict: true,
        keys: &[
            key("enabled", Bool, "false", Flag("report-to")),
            key("output_path", Text, "", Unused("all files of a run are in --output")),
            key("job_name", Text, "", Unused("all files of a run are in --output")),
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
            key("autotp_size", Whole, "0", Only(ONE, NO_PARALLEL, "--zero 3 shards the weights over the ranks")),
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
