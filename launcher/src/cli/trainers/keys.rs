//! Keys of other trainers that are no flags here, with their meaning.

use super::Trainer;
use crate::cli::foreign::{IGNORED, RESTRICTED};

const OTHER_DATA: &str = "--data and --eval-data give the files";
const MAX_LENGTH: &str =
    "--model-max-length counts all tokens of the decoder, including those of images";
const VIDEO: &str = "no sample has a video";
const NO_TORCH: &str = "this program does not use PyTorch";
const GENERATION: &str =
    "it concerns generation; `launcher generate` and `launcher eval` have flags for it";
const CACHE: &str = "samples are read when they are needed";
const ADAPTER_KIND: &str = "adapters are low-rank matrices";
const ATTENTION: &str = "attention is always tiled";
const FAMILY: &str = "the family is read from config.json";
const NO_SPLIT: &str = "--eval-data gives the held-out samples";
const RECOMPUTE: &str =
    "activations are recomputed block by block; --checkpoint-activations says where";
const SUPERVISED: &str = "the loss covers the answers of a sample";
const NO_NOISE: &str = "no noise is added to embeddings";
const RATES: &str = "--lr PART=X gives parts their own learning rates";
const RANKS: &str = "the program starts and connects ranks";
const RUN_DIRECTORY: &str = "all files of a run are in --output";

/// Meaning of a key that is not a flag here.
pub(in crate::cli) enum Meaning {
    /// It becomes this flag with the same value.
    Flag(&'static str),
    /// Words with the flag and value that each means; other words are refused.
    Words(&'static [(&'static str, &'static str, &'static str)]),
    /// As `Words`, and other values become this flag.
    WordsOr(
        &'static [(&'static str, &'static str, &'static str)],
        &'static str,
    ),
    /// No effect, for this reason.
    Unused(&'static str),
    /// No effect for these values; others are refused, for this reason.
    Only(&'static [&'static str], &'static str),
}

/// Effect of a key with a value.
pub(in crate::cli) enum Effect {
    /// It becomes this flag with this value.
    Flag(&'static str, String),
    /// No effect: it is how it is done here, for this reason.
    Here(&'static str),
    /// No effect, for this reason.
    Unused(&'static str),
    /// The value cannot be honored, for this reason.
    Refused(String),
}

use Meaning::{Flag, Only, Unused, Words, WordsOr};

impl Meaning {
    /// Effect of the key with the value `text`.
    pub(in crate::cli) fn effect(&self, text: &str) -> Effect {
        let found = |words: &'static [(&str, &'static str, &'static str)]| {
            let word = words
                .iter()
                .find(|(word, ..)| word.eq_ignore_ascii_case(text));
            word.map(|(_, flag, value)| match *flag {
                "" => Effect::Here("it is off"),
                flag => Effect::Flag(flag, (*value).to_owned()),
            })
        };
        match self {
            Flag(flag) => Effect::Flag(flag, text.to_owned()),
            Unused(reason) => Effect::Unused(reason),
            Words(words) => found(words).unwrap_or_else(|| {
                let words: Vec<&str> = words.iter().map(|(word, ..)| *word).collect();
                Effect::Refused(format!("only {} is available", words.join(", ")))
            }),
            WordsOr(words, flag) => {
                found(words).unwrap_or_else(|| Effect::Flag(flag, text.to_owned()))
            }
            Only(neutral, reason) => match neutral.iter().any(|n| n.eq_ignore_ascii_case(text)) {
                true => Effect::Here(reason),
                false => Effect::Refused((*reason).to_owned()),
            },
        }
    }
}

type Key = (&'static str, Meaning);

const TUNE_VISION: Meaning = Words(&[
    ("true", "tune-vision", "false"),
    ("false", "tune-vision", "true"),
]);
const TUNE_LLM: Meaning = Words(&[("true", "tune-llm", "false"), ("false", "tune-llm", "true")]);
const FREEZE_PROJECTOR: Meaning =
    Words(&[("true", "freeze", "projector"), ("false", "freeze", "none")]);
const ADAPTERS: Meaning = Words(&[("lora", "use-lora", "true"), ("full", "use-lora", "false")]);

/// Keys of LLaMA-Factory.
const LLAMA_FACTORY: &[Key] = &[
    ("stage", Only(&["sft"], "a run is supervised fine-tuning")),
    ("finetuning_type", ADAPTERS),
    ("lora_target", Flag("lora-target-modules")),
    ("additional_target", Flag("modules-to-save")),
    ("cutoff_len", Flag("model-max-length")),
    ("max_samples", Flag("limit")),
    (
        "pure_bf16",
        Words(&[("true", "precision", "pure-bf16"), ("false", "", "")]),
    ),
    ("freeze_vision_tower", TUNE_VISION),
    ("freeze_multi_modal_projector", FREEZE_PROJECTOR),
    ("freeze_language_model", TUNE_LLM),
    ("overwrite_cache", Unused(CACHE)),
    ("tokenized_path", Unused(CACHE)),
    ("preprocessing_batch_size", Unused(CACHE)),
    (
        "plot_loss",
        Unused("report.html and training_loss.svg are always drawn"),
    ),
    ("flash_attn", Unused(ATTENTION)),
    ("enable_liger_kernel", Unused(NO_TORCH)),
    ("use_liger_kernel", Unused(NO_TORCH)),
    ("use_unsloth", Unused(NO_TORCH)),
    ("video_max_pixels", Unused(VIDEO)),
    ("video_min_pixels", Unused(VIDEO)),
    ("val_size", Only(&["0", "0.0"], NO_SPLIT)),
    (
        "quantization_bit",
        Only(&[], "quantized base weights are not available"),
    ),
    ("use_dora", Only(&["false"], ADAPTER_KIND)),
    (
        "use_rslora",
        Only(&["false"], "the scale of an adapter is alpha ÷ rank"),
    ),
    ("pissa_init", Only(&["false"], ADAPTER_KIND)),
    ("generation_config", Unused(GENERATION)),
    ("generation_max_length", Unused(GENERATION)),
    (
        "enable_thinking",
        Unused("answers are trained as written; nothing is inserted"),
    ),
    ("train_on_prompt", Only(&["false"], SUPERVISED)),
    ("mask_history", Only(&["false"], SUPERVISED)),
    ("neat_packing", Only(&["false"], "a sample is not packed")),
    ("neftune_noise_alpha", Only(&["0", "0.0", "none"], NO_NOISE)),
    ("shift_attn", Only(&["false"], ATTENTION)),
    ("rope_scaling", Only(&["none"], FAMILY)),
    ("resize_vocab", Only(&["false"], FAMILY)),
    ("loraplus_lr_ratio", Only(&["0", "0.0", "none"], RATES)),
    ("disable_gradient_checkpointing", Unused(RECOMPUTE)),
    ("low_cpu_mem_usage", Unused(NO_TORCH)),
    ("upcast_layernorm", Only(&["false"], "--precision decides")),
    (
        "use_swanlab",
        Only(&["false"], "no other program is reported to"),
    ),
];

/// Keys of ms-swift.
const MS_SWIFT: &[Key] = &[
    ("train_type", ADAPTERS),
    ("tuner_type", ADAPTERS),
    ("sft_type", ADAPTERS),
    ("target_modules", Flag("lora-target-modules")),
    ("dataset", Flag("data")),
    ("val_dataset", Flag("eval-data")),
    ("max_length", Flag("model-max-length")),
    ("freeze_vit", TUNE_VISION),
    ("freeze_llm", TUNE_LLM),
    ("freeze_aligner", FREEZE_PROJECTOR),
    (
        "torch_dtype",
        Words(&[
            ("bfloat16", "precision", "bf16"),
            ("float16", "precision", "fp16"),
            ("float32", "precision", "f32"),
            ("auto", "", ""),
        ]),
    ),
    (
        "deepspeed",
        WordsOr(
            &[
                ("zero0", "zero", "0"),
                ("zero1", "zero", "1"),
                ("zero2", "zero", "2"),
                ("zero3", "zero", "3"),
                ("zero2_offload", "offload", "optimizer=cpu"),
                ("zero3_offload", "offload", "cpu"),
            ],
            "deepspeed",
        ),
    ),
    (
        "truncation_strategy",
        Only(&["right"], "samples are cut at the right end"),
    ),
    ("packing", Only(&["false"], "a sample is not packed")),
    ("padding_free", Unused("nothing is padded")),
    (
        "system",
        Only(&[""], "the data gives the system text of a sample"),
    ),
    ("split_dataset_ratio", Only(&["0", "0.0", "0."], NO_SPLIT)),
    ("model_type", Unused(FAMILY)),
    ("model_name", Unused(OTHER_DATA)),
    ("model_author", Unused(OTHER_DATA)),
    ("attn_impl", Unused(ATTENTION)),
    ("lazy_tokenize", Unused(CACHE)),
    ("streaming", Unused(CACHE)),
    ("dataset_num_proc", Unused(CACHE)),
    ("load_from_cache_file", Unused(CACHE)),
    ("vit_gradient_checkpointing", Unused(RECOMPUTE)),
    (
        "use_hf",
        Unused("models and data are read from directories"),
    ),
    ("add_version", Unused(RUN_DIRECTORY)),
    (
        "create_checkpoint_symlink",
        Unused("`latest` names the newest checkpoint"),
    ),
];

/// Keys of SwissArmyTransformer and of CogVLM's `finetune_demo`.
const SAT: &[Key] = &[
    ("mode", Only(&["finetune"], "a run fine-tunes a model")),
    ("from_pretrained", Flag("model")),
    ("train_iters", Flag("max-steps")),
    ("epochs", Flag("num-train-epochs")),
    ("batch_size", Flag("per-device-train-batch-size")),
    ("eval_batch_size", Flag("per-device-eval-batch-size")),
    ("lr", Flag("learning-rate")),
    (
        "lr_decay_style",
        Words(&[
            ("cosine", "lr-scheduler-type", "sat_cosine"),
            ("linear", "lr-scheduler-type", "linear"),
            ("constant", "lr-scheduler-type", "constant"),
        ]),
    ),
    ("warmup", Flag("warmup-ratio")),
    ("zero_stage", Flag("zero")),
    ("max_length", Flag("model-max-length")),
    ("train_data", Flag("data")),
    ("valid_data", Flag("eval-data")),
    ("save", Flag("output")),
    ("save_interval", Flag("save-steps")),
    ("eval_interval", Flag("eval-steps")),
    ("log_interval", Flag("logging-steps")),
    ("num_workers", Flag("data-workers")),
    (
        "version",
        Words(&[
            ("base", "template", "sat-base"),
            ("chat", "template", "sat-chat"),
        ]),
    ),
    ("use_qlora", Only(&["false"], ADAPTER_KIND)),
    (
        "model_parallel_size",
        Only(&["1"], "ZeRO shards the model: --zero 3"),
    ),
    ("experiment_name", Unused(RUN_DIRECTORY)),
    ("summary_dir", Unused(RUN_DIRECTORY)),
    ("test_data", Unused(OTHER_DATA)),
    ("split", Unused(OTHER_DATA)),
    ("eval_iters", Unused("all held-out samples are evaluated")),
    ("strict_eval", Unused("all held-out samples are evaluated")),
    (
        "local_tokenizer",
        Unused("the tokenizer of the model directory is used"),
    ),
    (
        "ignore_pad_token_for_loss",
        Unused("the loss covers answers only"),
    ),
    ("vit_checkpoint_activations", Unused(RECOMPUTE)),
    ("distributed_backend", Unused(RANKS)),
    ("resume_dataloader", Unused("a resumed run is exact")),
    ("skip_init", Unused("weights are read from files")),
];

/// Keys of `data_config` in GLM-4's files.
pub(in crate::cli) const GLM_DATA: &[Key] = &[
    ("train_file", Flag("data")),
    ("val_file", Flag("eval-data")),
    (
        "test_file",
        Unused("`launcher eval` evaluates a checkpoint on any file"),
    ),
    ("num_proc", Unused(CACHE)),
];
/// Keys of the top level of GLM-4's files. `freezeV` freezes the projector too, which is a part of its vision module.
pub(in crate::cli) const GLM_TOP: &[Key] = &[
    ("max_input_length", Unused(MAX_LENGTH)),
    ("max_output_length", Unused(MAX_LENGTH)),
    ("combine", Unused("a conversation is one sample")),
    (
        "freezeV",
        Words(&[("true", "freeze", "vision"), ("false", "", "")]),
    ),
];
/// Keys of `peft_config`.
pub(in crate::cli) const PEFT: &[Key] = &[
    ("peft_type", Words(&[("lora", "use-lora", "true")])),
    (
        "task_type",
        Only(&["causal_lm"], "a run trains a language model"),
    ),
    ("r", Flag("lora-rank")),
    ("lora_alpha", Flag("lora-alpha")),
    ("lora_dropout", Flag("lora-dropout")),
    ("target_modules", Flag("lora-target-modules")),
    ("modules_to_save", Flag("modules-to-save")),
    ("bias", Only(&["none"], "adapters do not train biases")),
];

fn find<'k>(keys: &'k [Key], name: &str) -> Option<&'k Meaning> {
    keys.iter()
        .find(|(key, _)| *key == name)
        .map(|(_, meaning)| meaning)
}

/// Meaning of a key (snake_case) that `trainer` understands in another way than this program, or alone.
pub(in crate::cli) fn own_meaning(
    trainer: Option<Trainer>,
    name: &str,
) -> Option<&'static Meaning> {
    match trainer? {
        Trainer::LlamaFactory => find(LLAMA_FACTORY, name),
        Trainer::MsSwift => find(MS_SWIFT, name),
        Trainer::Sat => find(SAT, name),
        Trainer::Glm4 => find(GLM_TOP, name),
        Trainer::OpenBmb | Trainer::HuggingFace => None,
    }
}

/// Meaning of a key (snake_case) in a recipe of `trainer`. Keys that name the same thing for every trainer are
/// understood without one.
pub(in crate::cli) fn meaning(trainer: Option<Trainer>, name: &str) -> Option<&'static Meaning> {
    let is_foreign = IGNORED.iter().any(|(key, _)| *key == name)
        || RESTRICTED.iter().any(|rule| rule.name == name);
    let shared = || find(LLAMA_FACTORY, name).or_else(|| find(MS_SWIFT, name));
    own_meaning(trainer, name).or_else(|| shared().filter(|_| !is_foreign))
}
