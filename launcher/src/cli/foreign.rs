//! Flags of the Hugging Face trainers that do not exist here.

use crate::lang::{Both, both};

const COLUMNS: Both = both(
    "samples are read by --data-format, not by columns",
    "样本按 --data-format 读取，而不是按列",
);
const FAMILY: Both = both(
    "the family is read from config.json",
    "模型系列由 config.json 读出",
);
const ALWAYS_TRAIN: Both = both(
    "a run trains, and evaluates where --eval-data is given",
    "运行总是训练，给出 --eval-data 时还会评估",
);
const EVALUATED_FIRST: Both = both(
    "held-out samples are evaluated before the first step, too",
    "第一步之前也会评估留出样本",
);
const RECOMPUTE: Both = both(
    "activations are recomputed block by block; --checkpoint-activations says where",
    "激活按块重算；--checkpoint-activations 指定范围",
);
const EVAL_PRECISION: Both = both(
    "evaluation uses the precision of the run",
    "评估使用运行的精度",
);
const GENERATED: Both = both(
    "evaluation generates answers, at every stage",
    "评估会生成回答，在每个 ZeRO 阶段都如此",
);
const RUN_DIRECTORY: Both = both(
    "all files of a run are in --output",
    "运行的所有文件都在 --output 中",
);
const NEVER_OVERWRITTEN: Both = both(
    "a directory that holds another run is never overwritten",
    "从不覆盖含有另一次运行的目录",
);
const LOADER: Both = both(
    "the program chooses loader threads and prefetch",
    "加载线程和预取由程序决定",
);
const RANKS: Both = both(
    "the program starts and connects ranks",
    "各 rank 由程序启动和连接",
);
const LOCAL_RANK: Both = both(
    "the rank is read from the environment, where the launcher that sets this flag put it too",
    "rank 从环境变量读取，设置该参数的启动器也把它放在那里",
);
const NO_PYTHON: Both = both(
    "this program has no Python and no torch",
    "本程序不使用 Python 和 torch",
);
const ORDER: Both = both(
    "the order of samples depends on seed and epoch only",
    "样本的顺序只取决于种子和 epoch",
);
const DEQUANTIZED: Both = both(
    "quantized weights are dequantized to the format that --precision names",
    "压缩存储的权重会解压为 --precision 指定的格式",
);
const WEIGHTS_ALONE: Both = both(
    "int8 stores weights alone; activations keep the format of --precision",
    "int8 只存放权重；激活保持 --precision 的格式",
);
const HUB: Both = both("nothing is sent anywhere", "不会向任何地方发送内容");
const SCREEN: Both = both("the screen adapts to the terminal", "屏幕输出会适应终端");
const SAVED: Both = both(
    "checkpoints are safetensors with sharded state",
    "检查点是 safetensors，训练状态分片保存",
);
const METRICS: Both = both("always measured", "总是测量");

/// Why a report to another program has no effect.
pub(crate) const OTHER_REPORT: Both = both(
    "no other program is reported to; --report-to tensorboard writes event files, which `wandb sync` reads",
    "不向其他程序报告；--report-to tensorboard 会写出事件文件，`wandb sync` 可以读取",
);
/// Values of `report_to` in transformers and its relatives that name programs.
const REPORTS: [&str; 13] = [
    "all",
    "azure_ml",
    "clearml",
    "codecarbon",
    "comet_ml",
    "dagshub",
    "dvclive",
    "flyte",
    "mlflow",
    "neptune",
    "swanlab",
    "trackio",
    "wandb",
];

/// A value of `report_to`, words separated by commas: those for this program, `None` if no word is left, and the
/// programs that are not reported to.
pub(crate) fn split_reports(value: &str) -> (Option<String>, Vec<&str>) {
    let words = value.split(',').map(str::trim);
    let is_other = |word: &&str| REPORTS.iter().any(|name| name.eq_ignore_ascii_case(word));
    let (others, left): (Vec<&str>, Vec<&str>) = words.partition(is_other);
    ((!left.is_empty()).then(|| left.join(",")), others)
}

/// Flags of other trainers, such as Hugging Face's, that are accepted but have no effect: (name in
/// snake_case, reason). The reason is shown to the user.
pub const IGNORED: &[(&str, Both)] = &[
    ("remove_unused_columns", COLUMNS),
    ("label_names", COLUMNS),
    ("length_column_name", COLUMNS),
    ("llm_type", FAMILY),
    ("batch_vision", FAMILY),
    ("trust_remote_code", FAMILY),
    ("do_eval", ALWAYS_TRAIN),
    ("do_predict", ALWAYS_TRAIN),
    ("prediction_loss_only", ALWAYS_TRAIN),
    ("gradient_checkpointing_kwargs", RECOMPUTE),
    ("activation_checkpointing_kwargs", RECOMPUTE),
    ("bf16_full_eval", EVAL_PRECISION),
    ("fp16_full_eval", EVAL_PRECISION),
    ("eval_accumulation_steps", EVAL_PRECISION),
    ("predict_with_generate", GENERATED),
    ("generation_num_beams", GENERATED),
    ("use_cache", GENERATED),
    ("logging_dir", RUN_DIRECTORY),
    ("run_name", RUN_DIRECTORY),
    ("cache_dir", RUN_DIRECTORY),
    ("overwrite_output_dir", NEVER_OVERWRITTEN),
    ("dataloader_pin_memory", LOADER),
    ("dataloader_persistent_workers", LOADER),
    ("dataloader_prefetch_factor", LOADER),
    ("dataloader_multiprocessing_context", LOADER),
    ("dataloader_in_order", LOADER),
    ("preprocessing_num_workers", LOADER),
    ("local_rank", LOCAL_RANK),
    ("ddp_backend", RANKS),
    ("ddp_timeout", RANKS),
    ("ddp_find_unused_parameters", RANKS),
    ("ddp_bucket_cap_mb", RANKS),
    ("ddp_broadcast_buffers", RANKS),
    ("ddp_static_graph", RANKS),
    ("log_level_replica", SCREEN),
    ("log_on_each_node", SCREEN),
    ("bnb_4bit_compute_dtype", DEQUANTIZED),
    ("bnb_4bit_quant_storage", DEQUANTIZED),
    ("llm_int8_threshold", WEIGHTS_ALONE),
    ("llm_int8_has_fp16_weight", WEIGHTS_ALONE),
    ("llm_int8_enable_fp32_cpu_offload", DEQUANTIZED),
    ("torch_compile", NO_PYTHON),
    ("torch_compile_backend", NO_PYTHON),
    ("torch_compile_mode", NO_PYTHON),
    ("torchdynamo", NO_PYTHON),
    ("torch_empty_cache_steps", NO_PYTHON),
    ("jit_mode_eval", NO_PYTHON),
    ("use_ipex", NO_PYTHON),
    ("use_mps_device", NO_PYTHON),
    ("ray_scope", NO_PYTHON),
    ("mp_parameters", NO_PYTHON),
    ("past_index", NO_PYTHON),
    ("tpu_metrics_debug", NO_PYTHON),
    ("fp16_backend", NO_PYTHON),
    ("fp16_opt_level", NO_PYTHON),
    ("tpu_num_cores", NO_PYTHON),
    ("debug", NO_PYTHON),
    ("liger_kernel_config", NO_PYTHON),
    ("use_legacy_prediction_loop", EVAL_PRECISION),
    ("eval_do_concat_batches", EVAL_PRECISION),
    ("eval_on_start", EVALUATED_FIRST),
    ("batch_eval_metrics", EVAL_PRECISION),
    ("eval_use_gather_object", EVAL_PRECISION),
    ("include_inputs_for_metrics", METRICS),
    ("include_for_metrics", METRICS),
    ("hub_strategy", HUB),
    ("hub_private_repo", HUB),
    ("hub_always_push", HUB),
    ("hub_revision", HUB),
    ("trackio_space_id", HUB),
    ("trackio_bucket_id", HUB),
    ("trackio_static_space_id", HUB),
    ("project", HUB),
    ("restore_callback_states_from_checkpoint", SAVED),
    ("torch_dtype", NO_PYTHON),
    ("attn_implementation", NO_PYTHON),
    ("use_fast_tokenizer", NO_PYTHON),
    ("half_precision_backend", NO_PYTHON),
    ("tf32", NO_PYTHON),
    ("full_determinism", NO_PYTHON),
    ("push_to_hub", HUB),
    ("hub_model_id", HUB),
    ("hub_token", HUB),
    ("disable_tqdm", SCREEN),
    ("log_level", SCREEN),
    ("logging_first_step", SCREEN),
    ("logging_nan_inf_filter", SCREEN),
    ("save_safetensors", SAVED),
    ("save_only_model", SAVED),
    ("enable_jit_checkpoint", SAVED),
    ("save_on_each_node", SAVED),
    ("ignore_data_skip", SAVED),
    ("skip_memory_metrics", METRICS),
    ("include_num_input_tokens_seen", METRICS),
    ("include_tokens_per_second", METRICS),
];

/// A flag of another trainer that is accepted only with values that match what this program does anyway. Any
/// other value would change the training, so it is refused.
#[derive(Debug, Clone, Copy)]
pub struct Restricted {
    /// Name of the flag in snake_case.
    pub name: &'static str,
    /// Accepted values of the flag: those that match what this program does anyway, so they have no effect.
    pub neutral: &'static [&'static str],
    /// Why other values of the flag are refused, for the error message.
    pub reason: Both,
    /// What the user can do instead of giving a refused value, for the error message.
    pub next: Both,
}

/// Flags of other trainers that are refused unless their value matches what this program does anyway.
pub const RESTRICTED: &[Restricted] = &[
    Restricted {
        name: "do_train",
        neutral: &["true"],
        reason: ALWAYS_TRAIN,
        next: both(
            "`launcher eval` evaluates and `launcher generate` answers",
            "`launcher eval` 用于评估，`launcher generate` 用于回答",
        ),
    },
    Restricted {
        name: "lora_bias",
        neutral: &["none"],
        reason: both("adapters leave biases alone", "适配器不训练偏置"),
        next: both("--lora_bias none", "--lora_bias none"),
    },
    Restricted {
        name: "scale_resolution",
        neutral: &["448"],
        reason: both(
            "slices have the size that config.json names",
            "切片大小由 config.json 指定",
        ),
        next: both("leave the flag out", "请去掉该参数"),
    },
    Restricted {
        name: "label_smoothing_factor",
        neutral: &["0", "0.0"],
        reason: both("the loss is plain cross entropy", "损失是普通的交叉熵"),
        next: both("--label_smoothing_factor 0", "--label_smoothing_factor 0"),
    },
    Restricted {
        name: "group_by_length",
        neutral: &["false"],
        reason: ORDER,
        next: both("leave the flag out", "请去掉该参数"),
    },
    Restricted {
        name: "sortish_sampler",
        neutral: &["false"],
        reason: ORDER,
        next: both("leave the flag out", "请去掉该参数"),
    },
    Restricted {
        name: "train_sampling_strategy",
        neutral: &["random"],
        reason: ORDER,
        next: both("leave the flag out", "请去掉该参数"),
    },
    Restricted {
        name: "average_tokens_across_devices",
        neutral: &["true"],
        reason: both(
            "the loss is the mean over the tokens of all ranks",
            "损失是所有 rank 的 token 的平均值",
        ),
        next: both("leave the flag out", "请去掉该参数"),
    },
    Restricted {
        name: "adafactor",
        neutral: &["false"],
        reason: both("the optimizer is AdamW", "优化器是 AdamW"),
        next: both("--optim adamw_torch", "--optim adamw_torch"),
    },
    Restricted {
        name: "eval_delay",
        neutral: &["0", "0.0"],
        reason: both(
            "evaluation follows --eval-steps from the first step on",
            "评估从第一步起按 --eval-steps 进行",
        ),
        next: both("leave the flag out", "请去掉该参数"),
    },
    Restricted {
        name: "data_seed",
        neutral: &["none"],
        reason: both(
            "--seed sets the order of samples",
            "样本的顺序由 --seed 决定",
        ),
        next: both("--seed N", "--seed N"),
    },
    Restricted {
        name: "dataloader_drop_last",
        neutral: &["false"],
        reason: both("no sample is dropped", "不会丢弃样本"),
        next: both("leave the flag out", "请去掉该参数"),
    },
    Restricted {
        name: "fsdp",
        neutral: &["", "false"],
        reason: both(
            "sharding is chosen by the ZeRO stage",
            "分片方式由 ZeRO 阶段决定",
        ),
        next: both("--zero 3", "--zero 3"),
    },
];
