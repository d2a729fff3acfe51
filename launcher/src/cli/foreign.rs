//! Flags of the Hugging Face trainers that do not exist here.

const COLUMNS: &str = "samples are read by --data-format, not by columns";
const FAMILY: &str = "the family is read from config.json";
const ALWAYS_TRAIN: &str = "a run trains, and evaluates where --eval-data is given";
const RECOMPUTE: &str =
    "activations are recomputed block by block; --checkpoint-activations says where";
const EVAL_PRECISION: &str = "evaluation uses the precision of the run";
const GENERATED: &str = "evaluation generates answers, at every stage";
const RUN_DIRECTORY: &str = "all files of a run are in --output";
const NEVER_OVERWRITTEN: &str = "a directory that holds another run is never overwritten";
const LOADER: &str = "the program chooses loader threads and prefetch";
const RANKS: &str = "the program starts and connects ranks";
const LOCAL_RANK: &str =
    "the rank is read from the environment, where the launcher that sets this flag put it too";
const NO_PYTHON: &str = "this program has no Python and no torch";
const HUB: &str = "nothing is sent anywhere";
const SCREEN: &str = "the screen adapts to the terminal";
const SAVED: &str = "checkpoints are safetensors with sharded state";
const METRICS: &str = "always measured";

/// Why a report to another program has no effect.
pub(crate) const OTHER_REPORT: &str = "no other program is reported to; --report-to tensorboard writes event files, which `wandb sync` reads";
/// Values of `report_to` in transformers and its relatives that name programs.
const REPORTS: [&str; 12] = [
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
    "wandb",
];

/// A value of `report_to`, words separated by commas, without the programs that are not reported to; `None` if no word
/// is left.
pub(crate) fn without_other_reports(value: &str) -> Option<String> {
    let words = value.split(',').map(str::trim);
    let is_other = |word: &&str| REPORTS.iter().any(|name| name.eq_ignore_ascii_case(word));
    let left: Vec<&str> = words.filter(|word| !is_other(word)).collect();
    (!left.is_empty()).then(|| left.join(","))
}

/// Flags of other trainers, such as Hugging Face's, that are accepted but have no effect: (name in
/// snake_case, reason). The reason is shown to the user.
pub const IGNORED: &[(&str, &str)] = &[
    ("remove_unused_columns", COLUMNS),
    ("label_names", COLUMNS),
    ("length_column_name", COLUMNS),
    ("llm_type", FAMILY),
    ("batch_vision", FAMILY),
    ("trust_remote_code", FAMILY),
    ("do_train", ALWAYS_TRAIN),
    ("do_eval", ALWAYS_TRAIN),
    ("do_predict", ALWAYS_TRAIN),
    ("prediction_loss_only", ALWAYS_TRAIN),
    ("gradient_checkpointing_kwargs", RECOMPUTE),
    ("bf16_full_eval", EVAL_PRECISION),
    ("fp16_full_eval", EVAL_PRECISION),
    ("eval_accumulation_steps", EVAL_PRECISION),
    ("predict_with_generate", GENERATED),
    ("logging_dir", RUN_DIRECTORY),
    ("run_name", RUN_DIRECTORY),
    ("cache_dir", RUN_DIRECTORY),
    ("overwrite_output_dir", NEVER_OVERWRITTEN),
    ("dataloader_pin_memory", LOADER),
    ("dataloader_persistent_workers", LOADER),
    ("dataloader_prefetch_factor", LOADER),
    ("preprocessing_num_workers", LOADER),
    ("local_rank", LOCAL_RANK),
    ("ddp_backend", RANKS),
    ("ddp_timeout", RANKS),
    ("ddp_find_unused_parameters", RANKS),
    ("ddp_bucket_cap_mb", RANKS),
    ("torch_compile", NO_PYTHON),
    ("torch_dtype", NO_PYTHON),
    ("attn_implementation", NO_PYTHON),
    ("use_fast_tokenizer", NO_PYTHON),
    ("half_precision_backend", NO_PYTHON),
    ("tf32", NO_PYTHON),
    ("full_determinism", NO_PYTHON),
    ("use_cpu", NO_PYTHON),
    ("no_cuda", NO_PYTHON),
    ("push_to_hub", HUB),
    ("hub_model_id", HUB),
    ("hub_token", HUB),
    ("disable_tqdm", SCREEN),
    ("log_level", SCREEN),
    ("logging_first_step", SCREEN),
    ("logging_nan_inf_filter", SCREEN),
    ("save_safetensors", SAVED),
    ("save_only_model", SAVED),
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
    pub reason: &'static str,
    /// What the user can do instead of giving a refused value, for the error message.
    pub next: &'static str,
}

/// Flags of other trainers that are refused unless their value matches what this program does anyway.
pub const RESTRICTED: &[Restricted] = &[
    Restricted {
        name: "q_lora",
        neutral: &["false"],
        reason: "quantized base weights are not available",
        next: "--use-lora with --zero 3 --offload cpu",
    },
    Restricted {
        name: "lora_bias",
        neutral: &["none"],
        reason: "adapters leave biases alone",
        next: "--lora_bias none",
    },
    Restricted {
        name: "optim",
        neutral: &["adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused"],
        reason: "the optimizer is AdamW",
        next: "--optim adamw_torch",
    },
    Restricted {
        name: "scale_resolution",
        neutral: &["448"],
        reason: "slices have the size that config.json names",
        next: "leave the flag out",
    },
    Restricted {
        name: "label_smoothing_factor",
        neutral: &["0", "0.0"],
        reason: "the loss is plain cross entropy",
        next: "--label_smoothing_factor 0",
    },
    Restricted {
        name: "load_best_model_at_end",
        neutral: &["false"],
        reason: "checkpoints are kept up to --save-total-limit; none is loaded back",
        next: "choose a checkpoint by eval_results.json",
    },
    Restricted {
        name: "group_by_length",
        neutral: &["false"],
        reason: "the order of samples depends on seed and epoch only",
        next: "leave the flag out",
    },
    Restricted {
        name: "dataloader_drop_last",
        neutral: &["false"],
        reason: "no sample is dropped",
        next: "leave the flag out",
    },
    Restricted {
        name: "fsdp",
        neutral: &["", "false"],
        reason: "sharding is chosen by the ZeRO stage",
        next: "--zero 3",
    },
];
