//! Keys of other trainers that are no flags here, with their meaning.

use super::Trainer;
use crate::cli::foreign::{IGNORED, RESTRICTED};
use crate::lang::{Both, Text, both, text};

const OTHER_DATA: Both = both(
    "--data and --eval-data give the files",
    "文件由 --data 和 --eval-data 指定",
);
const MAX_LENGTH: Both = both(
    "--model-max-length counts all tokens of the decoder, including those of images",
    "--model-max-length 计算解码器的所有 token，包括图片的 token",
);
const VIDEO: Both = both("no sample has a video", "样本中没有视频");
const NO_TORCH: Both = both("this program does not use PyTorch", "本程序不使用 PyTorch");
const GENERATION: Both = both(
    "it concerns generation; `launcher generate` and `launcher eval` have flags for it",
    "它与生成有关；`launcher generate` 和 `launcher eval` 有相应的参数",
);
const CACHE: Both = both(
    "samples are read when they are needed",
    "样本在需要时才读取",
);
const ADAPTER_KIND: Both = both("adapters are low-rank matrices", "适配器是低秩矩阵");
const ATTENTION: Both = both("attention is always tiled", "注意力总是分块计算");
const FAMILY: Both = both(
    "the family is read from config.json",
    "模型系列由 config.json 读出",
);
const NO_SPLIT: Both = both(
    "--eval-data gives the held-out samples",
    "留出样本由 --eval-data 指定",
);
const RECOMPUTE: Both = both(
    "activations are recomputed block by block; --checkpoint-activations says where",
    "激活按块重算；--checkpoint-activations 指定范围",
);
const SUPERVISED: Both = both(
    "the loss covers the answers of a sample",
    "损失只计算样本中的回答",
);
const NO_NOISE: Both = both("no noise is added to embeddings", "不向嵌入添加噪声");
const RATES: Both = both(
    "--lr PART=X gives parts their own learning rates",
    "--lr PART=X 为各部分设定各自的学习率",
);
const RANKS: Both = both(
    "the program starts and connects ranks",
    "各 rank 由程序启动和连接",
);
const RUN_DIRECTORY: Both = both(
    "all files of a run are in --output",
    "运行的所有文件都在 --output 中",
);

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
    Unused(Both),
    /// No effect for these values; others are refused, for this reason.
    Only(&'static [&'static str], Both),
}

/// Effect of a key with a value.
pub(in crate::cli) enum Effect {
    /// It becomes this flag with this value.
    Flag(&'static str, String),
    /// No effect: it is how it is done here, for this reason.
    Here(Both),
    /// No effect, for this reason.
    Unused(Both),
    /// The value cannot be honored, for this reason.
    Refused(Text),
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
                "" => Effect::Here(both("it is off", "它是关闭的")),
                flag => Effect::Flag(flag, (*value).to_owned()),
            })
        };
        match self {
            Flag(flag) => Effect::Flag(flag, text.to_owned()),
            Unused(reason) => Effect::Unused(*reason),
            Words(words) => found(words).unwrap_or_else(|| {
                let words: Vec<&str> = words.iter().map(|(word, ..)| *word).collect();
                Effect::Refused(text!("only {} is available", "只支持 {}", words.join(", ")))
            }),
            WordsOr(words, flag) => {
                found(words).unwrap_or_else(|| Effect::Flag(flag, text.to_owned()))
            }
            Only(neutral, reason) => match neutral.iter().any(|n| n.eq_ignore_ascii_case(text)) {
                true => Effect::Here(*reason),
                false => Effect::Refused((*reason).into()),
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
    (
        "stage",
        Only(
            &["sft"],
            both("a run is supervised fine-tuning", "运行是有监督微调"),
        ),
    ),
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
        Unused(both(
            "report.html and training_loss.svg are always drawn",
            "report.html 和 training_loss.svg 总会绘制",
        )),
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
        Only(
            &[],
            both(
                "quantized base weights are not available",
                "不支持量化的基座权重",
            ),
        ),
    ),
    ("use_dora", Only(&["false"], ADAPTER_KIND)),
    (
        "use_rslora",
        Only(
            &["false"],
            both(
                "the scale of an adapter is alpha ÷ rank",
                "适配器的缩放为 alpha ÷ 秩",
            ),
        ),
    ),
    ("pissa_init", Only(&["false"], ADAPTER_KIND)),
    ("generation_config", Unused(GENERATION)),
    ("generation_max_length", Unused(GENERATION)),
    (
        "enable_thinking",
        Unused(both(
            "answers are trained as written; nothing is inserted",
            "回答按原文训练；不插入任何内容",
        )),
    ),
    ("train_on_prompt", Only(&["false"], SUPERVISED)),
    ("mask_history", Only(&["false"], SUPERVISED)),
    (
        "neat_packing",
        Only(&["false"], both("a sample is not packed", "不对样本做打包")),
    ),
    ("neftune_noise_alpha", Only(&["0", "0.0", "none"], NO_NOISE)),
    ("shift_attn", Only(&["false"], ATTENTION)),
    ("rope_scaling", Only(&["none"], FAMILY)),
    ("resize_vocab", Only(&["false"], FAMILY)),
    ("loraplus_lr_ratio", Only(&["0", "0.0", "none"], RATES)),
    ("disable_gradient_checkpointing", Unused(RECOMPUTE)),
    ("low_cpu_mem_usage", Unused(NO_TORCH)),
    (
        "upcast_layernorm",
        Only(
            &["false"],
            both("--precision decides", "由 --precision 决定"),
        ),
    ),
    (
        "use_swanlab",
        Only(
            &["false"],
            both("no other program is reported to", "不向其他程序报告"),
        ),
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
        Only(
            &["right"],
            both("samples are cut at the right end", "样本在右端截断"),
        ),
    ),
    (
        "packing",
        Only(&["false"], both("a sample is not packed", "不对样本做打包")),
    ),
    (
        "padding_free",
        Unused(both("nothing is padded", "不做填充")),
    ),
    (
        "system",
        Only(
            &[""],
            both(
                "the data gives the system text of a sample",
                "样本的 system 文本由数据给出",
            ),
        ),
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
        Unused(both(
            "models and data are read from directories",
            "模型和数据从目录中读取",
        )),
    ),
    ("add_version", Unused(RUN_DIRECTORY)),
    (
        "create_checkpoint_symlink",
        Unused(both(
            "`latest` names the newest checkpoint",
            "`latest` 指向最近的检查点",
        )),
    ),
];

/// Keys of SwissArmyTransformer and of CogVLM's `finetune_demo`.
const SAT: &[Key] = &[
    (
        "mode",
        Only(
            &["finetune"],
            both("a run fine-tunes a model", "运行是对模型的微调"),
        ),
    ),
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
        Only(
            &["1"],
            both(
                "ZeRO shards the model: --zero 3",
                "模型由 ZeRO 分片：--zero 3",
            ),
        ),
    ),
    ("experiment_name", Unused(RUN_DIRECTORY)),
    ("summary_dir", Unused(RUN_DIRECTORY)),
    ("test_data", Unused(OTHER_DATA)),
    ("split", Unused(OTHER_DATA)),
    (
        "eval_iters",
        Unused(both(
            "all held-out samples are evaluated",
            "评估所有留出样本",
        )),
    ),
    (
        "strict_eval",
        Unused(both(
            "all held-out samples are evaluated",
            "评估所有留出样本",
        )),
    ),
    (
        "local_tokenizer",
        Unused(both(
            "the tokenizer of the model directory is used",
            "使用模型目录中的分词器",
        )),
    ),
    (
        "ignore_pad_token_for_loss",
        Unused(both("the loss covers answers only", "损失只计算回答")),
    ),
    ("vit_checkpoint_activations", Unused(RECOMPUTE)),
    ("distributed_backend", Unused(RANKS)),
    (
        "resume_dataloader",
        Unused(both("a resumed run is exact", "续训是精确的")),
    ),
    (
        "skip_init",
        Unused(both("weights are read from files", "权重从文件读取")),
    ),
];

/// Keys of `data_config` in GLM-4's files.
pub(in crate::cli) const GLM_DATA: &[Key] = &[
    ("train_file", Flag("data")),
    ("val_file", Flag("eval-data")),
    (
        "test_file",
        Unused(both(
            "`launcher eval` evaluates a checkpoint on any file",
            "`launcher eval` 可在任意文件上评估检查点",
        )),
    ),
    ("num_proc", Unused(CACHE)),
];
/// Keys of the top level of GLM-4's files. `freezeV` freezes the projector too, which is a part of its vision module.
pub(in crate::cli) const GLM_TOP: &[Key] = &[
    ("max_input_length", Unused(MAX_LENGTH)),
    ("max_output_length", Unused(MAX_LENGTH)),
    (
        "combine",
        Unused(both("a conversation is one sample", "一段对话就是一个样本")),
    ),
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
        Only(
            &["causal_lm"],
            both("a run trains a language model", "运行训练的是语言模型"),
        ),
    ),
    ("r", Flag("lora-rank")),
    ("lora_alpha", Flag("lora-alpha")),
    ("lora_dropout", Flag("lora-dropout")),
    ("target_modules", Flag("lora-target-modules")),
    ("modules_to_save", Flag("modules-to-save")),
    (
        "bias",
        Only(
            &["none"],
            both("adapters do not train biases", "适配器不训练偏置"),
        ),
    ),
];

/// Keys of Hugging Face's `TrainingArguments` that every trainer passes on.
const SHARED: &[Key] = &[(
    "optim",
    Words(&[
        ("adamw", "", ""),
        ("adamw_hf", "", ""),
        ("adamw_torch", "", ""),
        ("adamw_torch_fused", "", ""),
        ("adamw_8bit", "moments", "8bit"),
        ("adamw_bnb_8bit", "moments", "8bit"),
        ("paged_adamw_8bit", "moments", "8bit"),
    ]),
)];

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
    own_meaning(trainer, name)
        .or_else(|| find(SHARED, name))
        .or_else(|| shared().filter(|_| !is_foreign))
}
