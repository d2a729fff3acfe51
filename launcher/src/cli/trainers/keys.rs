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
const VIDEO: Both = both(
    "the data lists the frames of a video, and all of them are taken, at the size of the model's own settings",
    "视频的帧由数据列出，全部使用，尺寸按模型自身的设置",
);
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
const START: Both = both(
    "new adapters begin as peft's default: A random, B zero",
    "新适配器按 peft 的默认方式开始：A 随机，B 为零",
);
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
const UNPACKED: Both = both(
    "samples are not joined; --tokens-per-batch N fills micro-batches without padding",
    "样本不会拼接；--tokens-per-batch N 会不加填充地填满微批",
);
/// What becomes of long samples in a recipe of ms-swift, whose `truncation_strategy` is `delete`.
pub(in crate::cli) const CUT: Both = both(
    "samples longer than --model-max-length (max_length) are cut at the right end; ms-swift leaves them out (truncation_strategy delete). `launcher data check` finds them",
    "比 --model-max-length（max_length）更长的样本在右端截断；ms-swift 会丢弃它们（truncation_strategy delete）。`launcher data check` 可找出它们",
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
const MACHINES: Both = both(
    "each machine starts the program with NNODES, NODE_RANK and MASTER_ADDR in its environment, or under torchrun",
    "每台机器在环境变量 NNODES、NODE_RANK 和 MASTER_ADDR 下启动本程序，或用 torchrun 启动",
);
const RUN_DIRECTORY: Both = both(
    "all files of a run are in --output",
    "运行的所有文件都在 --output 中",
);

/// A word of a key, and the flags with values that it means.
pub(in crate::cli) type Word = (&'static str, &'static [(&'static str, &'static str)]);

/// Meaning of a key that is not a flag here.
pub(in crate::cli) enum Meaning {
    /// It becomes this flag with the same value.
    Flag(&'static str),
    /// Words with the flags that each means, none where it changes nothing; other words are refused.
    Words(&'static [Word]),
    /// As `Words`, and other values become this flag.
    WordsOr(&'static [Word], &'static str),
    /// No effect, for this reason.
    Unused(Both),
    /// No effect for these values; others are refused, for this reason.
    Only(&'static [&'static str], Both),
    /// These values have no effect, and the run says why; other values mean what the last field says.
    Named(&'static [&'static str], Both, &'static Self),
}

/// Effect of a key with a value.
pub(in crate::cli) enum Effect {
    /// It becomes these flags with these values.
    Flags(Vec<(&'static str, String)>),
    /// No effect: it is how it is done here, for this reason.
    Here(Both),
    /// No effect, for this reason.
    Unused(Both),
    /// The value cannot be honored, for this reason.
    Refused(Text),
}

use Meaning::{Flag, Named, Only, Unused, Words, WordsOr};

impl Meaning {
    /// What becomes of the key, for the documentation.
    pub(in crate::cli) fn describe(&self) -> String {
        let listed = |words: &[Word]| {
            let one = |(word, flags): &Word| {
                let flags: Vec<String> = flags
                    .iter()
                    .map(|(flag, value)| format!("--{flag} {value}"))
                    .collect();
                match (*word, &*flags) {
                    ("", []) => None,
                    (word, []) => Some(format!("`{word}`: no effect")),
                    (word, flags) => Some(format!("`{word}`: `{}`", flags.join(" "))),
                }
            };
            words.iter().filter_map(one).collect::<Vec<_>>().join(", ")
        };
        match self {
            Flag(flag) => format!("`--{flag}`"),
            Words(words) => listed(words),
            WordsOr(words, flag) => {
                let others = format!("`--{flag}`");
                match listed(words) {
                    words if words.is_empty() => others,
                    words => format!("{words}; otherwise {others}"),
                }
            }
            Unused(reason) => format!("no effect: {reason}"),
            Named(values, reason, others) => {
                let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
                format!(
                    "{}: no effect: {reason}; {}",
                    values.join(" "),
                    others.describe()
                )
            }
            Only(neutral, reason) => {
                let words = neutral.iter().filter(|word| !word.is_empty());
                let words: Vec<String> = words.map(|word| format!("`{word}`")).collect();
                match words.is_empty() {
                    true => format!("refused: {reason}"),
                    false => format!("only {}: {reason}", words.join(" ")),
                }
            }
        }
    }

    /// Effect of the key with the value `text`.
    pub(in crate::cli) fn effect(&self, text: &str) -> Effect {
        let found = |words: &'static [Word]| {
            let (_, flags) = words.iter().find(|(word, _)| is_word(word, text))?;
            Some(match flags {
                [] => Effect::Here(both("it changes nothing", "它不改变任何内容")),
                flags => {
                    let flags = flags
                        .iter()
                        .map(|(flag, value)| (*flag, (*value).to_owned()));
                    Effect::Flags(flags.collect())
                }
            })
        };
        let flag = |flag: &'static str| Effect::Flags(vec![(flag, text.to_owned())]);
        match self {
            Flag(name) => flag(name),
            Unused(reason) => Effect::Unused(*reason),
            Named(values, reason, others) => match values.iter().any(|word| is_word(word, text)) {
                true => Effect::Unused(*reason),
                false => others.effect(text),
            },
            Words(words) => found(words).unwrap_or_else(|| {
                let words = words.iter().map(|(word, _)| *word);
                let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
                Effect::Refused(text!("only {} is available", "只支持 {}", words.join(", ")))
            }),
            WordsOr(words, name) => found(words).unwrap_or_else(|| flag(name)),
            Only(neutral, reason) => match neutral.iter().any(|word| is_word(word, text)) {
                true => Effect::Here(*reason),
                false => Effect::Refused((*reason).into()),
            },
        }
    }
}

/// A boolean in the spellings of Python, YAML and Hugging Face's parser of flags.
pub(in crate::cli) fn boolean(text: &str) -> Option<bool> {
    match &*text.to_ascii_lowercase() {
        "true" | "yes" | "on" | "t" | "y" | "1" => Some(true),
        "false" | "no" | "off" | "f" | "n" | "0" => Some(false),
        _ => None,
    }
}

/// Whether `text` is the value `known`: the same word in any case, an equal number, or another spelling of `true` or
/// `false`.
pub(in crate::cli) fn is_word(known: &str, text: &str) -> bool {
    let number = |text: &str| text.parse::<f64>().ok().filter(|x| x.is_finite());
    let text = text.trim();
    known.eq_ignore_ascii_case(text)
        || number(known).is_some_and(|known| number(text) == Some(known))
        || match known {
            "true" => boolean(text) == Some(true),
            "false" => boolean(text) == Some(false),
            _ => false,
        }
}

/// Names of keys in snake_case, separated by spaces, with their meaning.
type Key = (&'static str, Meaning);

const OPTIMIZER: Both = both("the optimizer is AdamW", "优化器是 AdamW");
const LOSS: Both = both("the loss is plain cross entropy", "损失是普通的交叉熵");
const TOKENIZER: Both = both(
    "the tokenizer of the model directory is used",
    "使用模型目录中的分词器",
);
const DIRECTORIES: Both = both(
    "models and data are read from directories",
    "模型和数据从目录中读取",
);
const ORDER: Both = both(
    "seed and epoch decide the order of samples",
    "样本的顺序由种子和 epoch 决定",
);
const PLACES: Both = both(
    "the plan places weights and states; --offload moves them",
    "权重和状态的位置由计划决定；--offload 可移动它们",
);
const PARTS: Both = both(
    "--train and --freeze select parts",
    "由 --train 和 --freeze 选择各部分",
);
const NO_PADDING: Both = both("nothing is padded", "不做填充");
const TENSORS: Both = both(
    "ZeRO shards the model: --zero 3",
    "模型由 ZeRO 分片：--zero 3",
);
const EXPERTS: Both = both(
    "no model here routes tokens to experts by a loss",
    "此处没有按损失把 token 分配给专家的模型",
);
const MEASURED: Both = both("always measured", "总是测量");
const SAVED: Both = both(
    "checkpoints are safetensors with sharded state",
    "检查点是 safetensors，训练状态分片保存",
);
const AS_WRITTEN: Both = both(
    "answers are trained as written; nothing is inserted",
    "回答按原文训练；不插入任何内容",
);
const OTHER_STAGES: Both = both(
    "only stages beside sft have it; a run is supervised fine-tuning",
    "只用于 sft 以外的阶段；运行是有监督微调",
);
const CLASSES: Both = both(
    "only classification has it; a run trains a language model",
    "只用于分类；运行训练的是语言模型",
);
const OTHER_TUNERS: Both = both(
    "only other kinds of tuners have it; adapters are low-rank matrices",
    "只用于其他种类的微调器；适配器是低秩矩阵",
);
const NO_PLUGINS: Both = both("no Python runs", "不运行 Python");
const FORM: Both = both(
    "--data-format names the form of the samples; no Python runs",
    "样本的格式由 --data-format 指定；不运行 Python",
);
const TEMPLATE: Both = both(
    "the chat template of the model directory is used",
    "使用模型目录中的对话模板",
);
const LAYERS: Both = both(
    "--lora-layers selects decoder layers, a regular expression in --lora-target-modules any layers",
    "--lora-layers 选择解码器的层，--lora-target-modules 的正则表达式可选择任意层",
);
const PREFIXES: Both = both(
    "--ptuning-tokens N trains key and value prefixes, also beside --use-lora",
    "--ptuning-tokens N 训练键和值的前缀，也可与 --use-lora 同用",
);
const HUB: Both = both("nothing is sent anywhere", "不会向任何地方发送内容");

const TUNE_VISION: Meaning = Words(&[
    ("true", &[("tune-vision", "false")]),
    ("false", &[("tune-vision", "true")]),
]);
const TUNE_LLM: Meaning = Words(&[
    ("true", &[("tune-llm", "false")]),
    ("false", &[("tune-llm", "true")]),
]);
const FREEZE_PROJECTOR: Meaning = Words(&[
    ("true", &[("freeze", "projector")]),
    ("false", &[("freeze", "none")]),
]);
const TUNE_PROJECTOR: Meaning = Words(&[
    ("true", &[("freeze", "none")]),
    ("false", &[("freeze", "projector")]),
]);
const ADAPTERS: Meaning = Words(&[
    ("lora", &[("use-lora", "true")]),
    ("full", &[("use-lora", "false")]),
]);

const BITS: Meaning = Words(&[
    ("4", &[("load-in-4bit", "true")]),
    ("8", &[("load-in-8bit", "true")]),
    ("0", &[]),
    ("none", &[]),
]);
const FOUR_BITS: Meaning = Words(&[("true", &[("load-in-4bit", "true")]), ("false", &[])]);
const METHOD: Meaning = Only(
    &["bnb", "bitsandbytes"],
    both(
        "weights are quantized as bitsandbytes quantizes them",
        "权重按 bitsandbytes 的方式压缩存储",
    ),
);

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
        Words(&[("true", &[("precision", "pure-bf16")]), ("false", &[])]),
    ),
    ("freeze_vision_tower", TUNE_VISION),
    ("freeze_multi_modal_projector", FREEZE_PROJECTOR),
    ("freeze_language_model", TUNE_LLM),
    ("adapter_name_or_path", Flag("adapter")),
    (
        "create_new_adapter",
        Only(
            &["false"],
            both(
                "training goes on with the adapters of --adapter; `launcher export --merge` merges them first",
                "训练在 --adapter 的适配器上继续；`launcher export --merge` 可先合并它们",
            ),
        ),
    ),
    (
        "adapter_folder",
        Only(
            &[],
            both("--adapter takes the whole path", "--adapter 接受完整路径"),
        ),
    ),
    (
        "overwrite_cache tokenized_path preprocessing_batch_size buffer_size data_shared_file_system",
        Unused(CACHE),
    ),
    (
        "eval_on_each_dataset",
        Only(
            &["false"],
            both("held-out samples form one set", "留出样本构成一个集合"),
        ),
    ),
    ("mix_strategy", Only(&["concat"], ORDER)),
    ("interleave_probs", Only(&["none", ""], ORDER)),
    ("disable_shuffling", Only(&["false"], ORDER)),
    (
        "default_system",
        Only(
            &["none", ""],
            both(
                "the data gives the system text of a sample",
                "样本的 system 文本由数据给出",
            ),
        ),
    ),
    (
        "tool_format",
        Only(
            &["none", ""],
            both("samples have no tools", "样本中没有工具"),
        ),
    ),
    (
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules",
        Unused(both(
            "only --finetuning_type freeze has it; --train selects parts",
            "只用于 --finetuning_type freeze；由 --train 选择各部分",
        )),
    ),
    (
        "use_galore use_apollo use_badam use_adam_mini use_muon",
        Only(&["false"], OPTIMIZER),
    ),
    (
        "optim_args optim_target_modules",
        Only(&["none", ""], OPTIMIZER),
    ),
    (
        "fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap accelerator_config parallelism_config",
        Only(
            &["none", "", "0", "{}"],
            both(
                "sharding is chosen by the ZeRO stage",
                "分片方式由 ZeRO 阶段决定",
            ),
        ),
    ),
    (
        "galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose galore_target_modules galore_update_proj_gap galore_optim_per_parameter galore_with_embedding galore_quantization galore_proj_quant galore_proj_bits galore_proj_group_size galore_cos_threshold galore_gamma_proj galore_queue_size lisa_step_interval",
        Unused(OPTIMIZER),
    ),
    (
        "pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma ld_alpha ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit reward_model reward_model_adapters reward_model_quantization_bit reward_model_type beta precompute_ref_log_probs dpo_loss max_completion_length max_prompt_length",
        Unused(OTHER_STAGES),
    ),
    (
        "export_dir export_size export_device export_quantization_bit export_quantization_dataset export_quantization_nsamples export_quantization_maxlen export_legacy_format export_hub_model_id",
        Unused(both(
            "`launcher export` writes other forms of the weights",
            "其他形式的权重由 `launcher export` 写出",
        )),
    ),
    (
        "hyper_parallel_args ray_run_name ray_storage_path ray_storage_filesystem ray_num_workers ray_init_kwargs resources_per_worker placement_strategy",
        Unused(RANKS),
    ),
    (
        "do_sample max_new_tokens repetition_penalty skip_special_tokens vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend task task_dir n_shot min_p stream stop_words logprobs top_logprobs structured_outputs_regex eval_dataset_args eval_limit eval_generation_config extra_eval_args",
        Unused(GENERATION),
    ),
    (
        "upcast_lmhead_output",
        Only(
            &["false"],
            both("--precision decides", "由 --precision 决定"),
        ),
    ),
    (
        "use_dft_loss use_asft_loss use_eaft_loss enable_dft_loss",
        Only(&["false"], LOSS),
    ),
    (
        "asft_alpha eaft_alpha focal_alpha focal_gamma class_balanced_beta",
        Unused(LOSS),
    ),
    (
        "module_dropout oft_rank oft_block_size oft_target",
        Unused(OTHER_TUNERS),
    ),
    (
        "mode",
        Only(
            &["normal", "finetune"],
            both("a run fine-tunes a model", "运行是对模型的微调"),
        ),
    ),
    (
        "compute_dtype fp8_backend fp8_enable_fsdp_float8_all_gather",
        Unused(both("--precision decides", "由 --precision 决定")),
    ),
    (
        "use_llama_pro use_mca use_ray use_hyper_parallel use_kt mixture_of_depths",
        Only(&["false", "none"], FAMILY),
    ),
    (
        "swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret swanlab_token swanlab_exp_name swanlab_notification_method swanlab_webhook_url swanlab_secret swanlab_sender_email swanlab_receiver_email swanlab_smtp_server swanlab_smtp_port swanlab_email_language",
        Unused(HUB),
    ),
    (
        "compute_accuracy include_effective_tokens_per_second print_param_status",
        Unused(MEASURED),
    ),
    (
        "early_stopping_steps early_stop_interval",
        Flag("early-stopping-patience"),
    ),
    ("split_special_tokens", Only(&["false"], TOKENIZER)),
    (
        "add_tokens add_special_tokens new_special_tokens_config",
        Only(&["none", ""], TOKENIZER),
    ),
    ("init_special_tokens", Unused(TOKENIZER)),
    ("model_revision", Unused(DIRECTORIES)),
    (
        "hf_hub_token ms_hub_token om_hub_token",
        Unused(DIRECTORIES),
    ),
    ("use_unsloth_gc use_reentrant_gc", Unused(RECOMPUTE)),
    (
        "moe_aux_loss_coef router_aux_loss_coef",
        Only(&["none", "0", "0.0"], EXPERTS),
    ),
    (
        "train_from_scratch",
        Words(&[("true", &[("init", "random")]), ("false", &[])]),
    ),
    (
        "infer_backend offload_folder use_kv_cache infer_dtype eval_num_beams",
        Unused(GENERATION),
    ),
    (
        "image_do_pan_and_scan crop_to_patches",
        Only(&["false"], FAMILY),
    ),
    (
        "fp8",
        Only(
            &["false"],
            both("--precision decides", "由 --precision 决定"),
        ),
    ),
    (
        "plot_loss",
        Unused(both(
            "report.html and training_loss.svg are always drawn",
            "report.html 和 training_loss.svg 总会绘制",
        )),
    ),
    ("flash_attn", Unused(ATTENTION)),
    (
        "enable_liger_kernel use_liger_kernel use_liger use_liger_loss use_unsloth use_v1_kernels block_diag_attn enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps profiler_repeat profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size kt_optimize_rule cpu_infer chunk_size kt_maxlen kt_use_cuda_graph kt_mode kt_force_think",
        Unused(NO_TORCH),
    ),
    (
        "video_max_pixels video_min_pixels video_fps video_maxlen video_resized_width video_resized_height fps nframes use_audio_in_video audio_sampling_rate max_num_frames",
        Unused(VIDEO),
    ),
    ("val_size", Only(&["0", "0.0"], NO_SPLIT)),
    ("quantization_bit", BITS),
    ("quantization_method", METHOD),
    ("quantization_type", Flag("bnb-4bit-quant-type")),
    ("quantization_device_map", Only(&["none", "auto"], RANKS)),
    ("use_dora", Only(&["false"], ADAPTER_KIND)),
    ("pissa_init pissa_convert", Only(&["false"], START)),
    ("pissa_iter", Unused(ADAPTER_KIND)),
    ("generation_config", Unused(GENERATION)),
    ("generation_max_length", Unused(GENERATION)),
    (
        "enable_thinking preserve_thinking add_non_thinking_prefix disable_ignore_empty_think enable_reasoning",
        Unused(AS_WRITTEN),
    ),
    ("train_on_prompt", Only(&["false"], SUPERVISED)),
    ("mask_history", Only(&["false"], SUPERVISED)),
    ("neat_packing", Only(&["false"], UNPACKED)),
    (
        "neftune_noise_alpha neftune_alpha",
        Only(&["0", "0.0", "none"], NO_NOISE),
    ),
    ("shift_attn", Only(&["false"], ATTENTION)),
    ("rope_scaling", Only(&["none"], FAMILY)),
    ("resize_vocab", Only(&["false"], FAMILY)),
    ("lorap_lr_ratio", Flag("loraplus-lr-ratio")),
    (
        "loraplus_lr_embedding lorap_emb_lr",
        Unused(both("embeddings get no adapters", "嵌入没有适配器")),
    ),
    (
        "disable_gradient_checkpointing",
        Words(&[
            ("true", &[("gradient-checkpointing", "false")]),
            ("false", &[]),
        ]),
    ),
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
    ("adapters", Flag("adapter")),
    ("target_regex", Flag("lora-target-modules")),
    ("tuner_backend", Only(&["peft"], ADAPTER_KIND)),
    (
        "init_weights init_lora_weights",
        Only(&["true", "none"], START),
    ),
    ("use_swift_lora", Only(&["false"], ADAPTER_KIND)),
    (
        "vit_lr aligner_lr vision_lr vision_tower_lr merger_lr projector_lr img_projector_lr connector_lr head_lr resampler_lr",
        Only(&["none"], RATES),
    ),
    (
        "lora_dtype",
        Only(
            &["none", "auto"],
            both("--precision decides", "由 --precision 决定"),
        ),
    ),
    (
        "norm_bbox",
        Only(
            &["none"],
            both(
                "coordinates in texts are taken as they are",
                "文本中的坐标按原样使用",
            ),
        ),
    ),
    (
        "target_parameters",
        Only(
            &["none", "", "[]"],
            both(
                "adapters are on linear layers: --lora-target-modules",
                "适配器加在线性层上：--lora-target-modules",
            ),
        ),
    ),
    (
        "freeze_parameters trainable_parameters additional_trainable_parameters freeze_parameters_regex trainable_parameters_regex",
        Only(&["none", "", "[]"], PARTS),
    ),
    (
        "freeze_parameters_ratio unfreeze_topk_llm unfreeze_topk_vision",
        Only(&["0", "0.0", "0."], PARTS),
    ),
    (
        "task_type",
        Only(
            &["causal_lm"],
            both("a run trains a language model", "运行训练的是语言模型"),
        ),
    ),
    (
        "check_model ignore_args_error use_logits_to_keep acc_strategy metric eval_metric check_dataset_strategy use_profiler eval_human test_oom_error",
        Unused(MEASURED),
    ),
    (
        "device_map max_memory init_strategy gpu_memory_fraction",
        Unused(PLACES),
    ),
    (
        "local_repo_path download_mode model_cache_dir",
        Unused(DIRECTORIES),
    ),
    ("use_chat_template", Only(&["true"], TEMPLATE)),
    ("template_backend", Unused(TEMPLATE)),
    ("padding_side", Unused(NO_PADDING)),
    ("loss_scale", Only(&["default"], SUPERVISED)),
    (
        "loss_type agent_template response_prefix",
        Only(&["none", ""], SUPERVISED),
    ),
    (
        "sequence_parallel_size deepspeed_autotp_size zero_hpz_partition_size",
        Only(&["1", "none"], TENSORS),
    ),
    (
        "dataset_shuffle train_dataloader_shuffle",
        Only(&["true"], ORDER),
    ),
    ("val_dataset_shuffle shuffle_buffer_size", Unused(ORDER)),
    ("interleave_prob", Only(&["none", ""], ORDER)),
    ("stopping_strategy", Unused(ORDER)),
    ("packing_length", Unused(NO_PADDING)),
    (
        "columns disable_auto_column_mapping cached_dataset cached_val_dataset custom_dataset_info custom_register_path external_plugins",
        Only(&["none", "", "{}", "[]", "false"], FORM),
    ),
    (
        "strict",
        Unused(both(
            "samples that cannot be used stop the run; --skip-bad-samples leaves them out",
            "无法使用的样本会使运行停止；--skip-bad-samples 会跳过它们",
        )),
    ),
    (
        "max_epochs",
        Only(
            &["none"],
            both(
                "--num-train-epochs and --max-steps bound the run",
                "--num-train-epochs 和 --max-steps 限制运行的长度",
            ),
        ),
    ),
    (
        "resume_only_model",
        Only(
            &["false"],
            both(
                "--adapter starts from adapters, --resume continues a run",
                "--adapter 从适配器开始，--resume 继续运行",
            ),
        ),
    ),
    ("freeze_vit", TUNE_VISION),
    ("freeze_llm", TUNE_LLM),
    ("freeze_aligner", FREEZE_PROJECTOR),
    (
        "model_kwargs",
        Only(
            &["none", "", "{}"],
            both(
                "--image-max-pixels, --image-min-pixels and --max-slice-nums size images; the rest is read from the model directory",
                "图片大小由 --image-max-pixels、--image-min-pixels 和 --max-slice-nums 决定；其余由模型目录读出",
            ),
        ),
    ),
    (
        "load_args load_data_args load_dataset_config",
        Only(
            &["false"],
            both(
                "--resume RUN takes the settings of a run",
                "--resume RUN 采用一次运行的设置",
            ),
        ),
    ),
    (
        "lora_modules",
        Only(
            &["none", "", "[]"],
            both(
                "it names adapters to answer with: --adapter DIR starts from adapters, --lora-target-modules selects the layers of new ones",
                "它指定用于回答的适配器：--adapter DIR 从适配器开始，--lora-target-modules 选择新适配器的层",
            ),
        ),
    ),
    (
        "decision_drop_instructions decision_subsample_options decision_state_as_text decision_shuffle_fields",
        Only(
            &["0", "0.0", "false"],
            both("samples are taken as they are", "样本按原样使用"),
        ),
    ),
    (
        "experts_impl enable_npu_model_patch train_backend model_layer_cls_name metric_warmup_step fsdp_num acc_steps",
        Unused(NO_TORCH),
    ),
    ("new_special_tokens", Only(&["none", "", "[]"], TOKENIZER)),
    (
        "num_labels problem_type mlp_head_dim mlp_head_dropout",
        Unused(CLASSES),
    ),
    ("mrl_dims", Only(&["none", "", "[]"], CLASSES)),
    ("max_model_len", Only(&["none"], MAX_LENGTH)),
    (
        "hqq_axis",
        Unused(both(
            "only other kinds of quantization have it",
            "只用于其他种类的量化",
        )),
    ),
    ("is_binary_loss_scale", Unused(SUPERVISED)),
    (
        "lora_ga_batch_size lora_ga_iters lora_ga_max_length lora_ga_direction lora_ga_scale lora_ga_stable_gamma fourier_n_frequency fourier_scaling boft_block_size boft_block_num boft_n_butterfly_factor boft_dropout vera_rank vera_projection_prng_key vera_dropout vera_d_initial adapter_act adapter_length adalora_target_r adalora_init_r adalora_tinit adalora_tfinal adalora_deltaT adalora_beta1 adalora_beta2 adalora_orth_reg_weight llamapro_num_new_blocks llamapro_num_groups reft_layer_key reft_layers reft_rank reft_intervention_type reft_args ia3_feedforward_modules",
        Unused(OTHER_TUNERS),
    ),
    ("lisa_activated_layers", Only(&["0"], PARTS)),
    (
        "enable_channel_loss",
        Unused(both(
            "one loss of all samples is logged",
            "记录的是所有样本的同一个损失",
        )),
    ),
    (
        "safe_serialization max_shard_size use_flash_ckpt only_save_model",
        Unused(SAVED),
    ),
    ("ds3_gather_for_generation", Unused(GENERATION)),
    (
        "optimizer",
        Only(
            &["none", "", "default", "adamw"],
            both(
                "the optimizer is AdamW; LoRA+ is --loraplus-lr-ratio X, rates of parts are --lr PART=X",
                "优化器是 AdamW；LoRA+ 用 --loraplus-lr-ratio X，各部分的学习率用 --lr PART=X",
            ),
        ),
    ),
    ("callbacks", Only(&["none", "", "[]"], NO_PLUGINS)),
    (
        "eval_use_evalscope",
        Only(
            &["false"],
            both(
                "`launcher eval` evaluates a checkpoint on any file",
                "`launcher eval` 可在任意文件上评估检查点",
            ),
        ),
    ),
    ("packing_num_proc packing_strategy", Unused(UNPACKED)),
    // Names of its second major version.
    ("model_id_or_path", Flag("model")),
    ("template_type is_instruct_model", Unused(TEMPLATE)),
    ("lora_dropout_p", Flag("lora-dropout")),
    ("lora_target_regex", Flag("lora-target-modules")),
    ("lora_lr_ratio", Flag("loraplus-lr-ratio")),
    ("lora_bias_trainable", Only(&["none"], ADAPTER_KIND)),
    (
        "dtype",
        Words(&[
            ("bf16", &[("precision", "bf16")]),
            ("fp16", &[("precision", "fp16")]),
            ("fp32", &[("precision", "f32")]),
            ("auto", &[]),
        ]),
    ),
    ("custom_train_dataset_path", Flag("data")),
    ("custom_val_dataset_path", Flag("eval-data")),
    ("dataset_test_ratio", Only(&["0", "0.0", "0."], NO_SPLIT)),
    (
        "train_dataset_sample",
        WordsOr(&[("-1", &[]), ("none", &[])], "limit"),
    ),
    (
        "val_dataset_sample",
        Only(
            &["-1", "none"],
            both("all held-out samples are evaluated", "评估所有留出样本"),
        ),
    ),
    ("dataset_seed", Only(&["none"], ORDER)),
    (
        "train_dataset_mix_ratio self_cognition_sample",
        Only(&["0", "0.0"], OTHER_DATA),
    ),
    ("train_dataset_mix_ds", Unused(OTHER_DATA)),
    ("add_output_dir_suffix", Unused(RUN_DIRECTORY)),
    ("use_flash_attn", Unused(ATTENTION)),
    (
        "preprocess_num_proc preprocess_batch_size dataset_enable_cache",
        Unused(CACHE),
    ),
    ("gradient_checkpointing_enable", Unused(RECOMPUTE)),
    ("rescale_image", Only(&["-1", "none"], FAMILY)),
    (
        "tools_prompt",
        Unused(both("samples have no tools", "样本中没有工具")),
    ),
    (
        "merge_lora",
        Unused(both(
            "`launcher export --merge` merges adapters",
            "`launcher export --merge` 合并适配器",
        )),
    ),
    ("neftune_backend", Unused(NO_NOISE)),
    ("deepspeed_config_path", Flag("deepspeed")),
    ("push_hub_strategy", Unused(HUB)),
    ("loss_name", Only(&["none", ""], SUPERVISED)),
    ("quant_device_map", Only(&["none", "auto"], RANKS)),
    (
        "bnb_4bit_comp_dtype",
        Unused(both("--precision decides", "由 --precision 决定")),
    ),
    (
        "torch_dtype",
        Words(&[
            ("bfloat16", &[("precision", "bf16")]),
            ("float16", &[("precision", "fp16")]),
            ("float32", &[("precision", "f32")]),
            ("auto", &[]),
        ]),
    ),
    (
        "deepspeed",
        WordsOr(
            &[
                ("zero0", &[("zero", "0")]),
                ("zero1", &[("zero", "1")]),
                ("zero2", &[("zero", "2")]),
                ("zero3", &[("zero", "3")]),
                (
                    "zero2_offload",
                    &[("zero", "2"), ("offload", "optimizer=cpu")],
                ),
                ("zero3_offload", &[("zero", "3"), ("offload", "cpu")]),
                ("default-zero2", &[("zero", "2")]),
                ("default-zero3", &[("zero", "3")]),
                (
                    "zero2-offload",
                    &[("zero", "2"), ("offload", "optimizer=cpu")],
                ),
                ("zero3-offload", &[("zero", "3"), ("offload", "cpu")]),
            ],
            "deepspeed",
        ),
    ),
    (
        "truncation_strategy",
        Named(
            &["delete"],
            CUT,
            &Only(
                &["right"],
                both("samples are cut at the right end", "样本在右端截断"),
            ),
        ),
    ),
    ("packing", Only(&["false"], UNPACKED)),
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
    ("quant_bits", BITS),
    ("quant_method", METHOD),
    ("add_version", Unused(RUN_DIRECTORY)),
    (
        "create_checkpoint_symlink",
        Unused(both(
            "`latest` names the newest checkpoint",
            "`latest` 指向最近的检查点",
        )),
    ),
];

/// Keys of OpenBMB's `finetune.py`.
const OPENBMB: &[Key] = &[
    ("q_lora", FOUR_BITS),
    (
        "lora_layer_replication",
        Only(&["none", "", "[]"], ADAPTER_KIND),
    ),
    (
        "lora_layers_to_transform lora_layers_pattern",
        Only(&["none", "", "[]"], LAYERS),
    ),
    // Flags of torchrun and of DeepSpeed's launcher, which scripts put before those of the trainer.
    ("num_gpus", Flag("nproc")),
    ("nnodes num_nodes", Only(&["1", "1:1"], MACHINES)),
    ("node_rank", Only(&["0"], MACHINES)),
    (
        "master_addr master_port rdzv_endpoint rdzv_backend rdzv_id standalone",
        Unused(RANKS),
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
            ("cosine", &[("lr-scheduler-type", "sat_cosine")]),
            ("linear", &[("lr-scheduler-type", "sat_linear")]),
            ("constant", &[("lr-scheduler-type", "sat_constant")]),
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
            ("base", &[("template", "sat-base")]),
            ("chat", &[("template", "sat-chat")]),
            ("vqa", &[("template", "sat-vqa")]),
            ("chat_old", &[("template", "sat-chat-old")]),
        ]),
    ),
    ("use_qlora", FOUR_BITS),
    ("use_ptlora use_ptuning", Only(&["false"], PREFIXES)),
    (
        "pre_seq_len",
        Unused(both(
            "only p-tuning has prefixes: --ptuning-tokens N",
            "只有 p-tuning 有前缀：--ptuning-tokens N",
        )),
    ),
    (
        "layer_range",
        Only(
            &["none"],
            both(
                "it selects layers of decoder and vision tower alike: --lora-layers 0..16 selects decoder layers, a regular expression in --lora-target-modules any layers",
                "它同时选择解码器和视觉塔的层：--lora-layers 0..16 选择解码器的层，--lora-target-modules 的正则表达式可选择任意层",
            ),
        ),
    ),
    ("deepspeed", WordsOr(&[("true", &[])], "deepspeed")),
    (
        "load",
        Only(
            &[],
            both(
                "--resume RUN continues a run, --adapter DIR starts from adapters",
                "--resume RUN 继续运行，--adapter DIR 从适配器开始",
            ),
        ),
    ),
    (
        "lr_decay_ratio",
        Only(
            &["0.1"],
            both(
                "sat_cosine ends at a tenth of the peak",
                "sat_cosine 以峰值的十分之一结束",
            ),
        ),
    ),
    (
        "lr_decay_iters exit_interval train_data_weights",
        Only(
            &["none"],
            both(
                "the schedule covers all steps of the run",
                "学习率安排覆盖运行的所有步",
            ),
        ),
    ),
    (
        "batch_from_same_dataset iterable_dataset iterable_dataset_eval",
        Only(&["false"], ORDER),
    ),
    ("block_size prefetch_factor", Unused(CACHE)),
    (
        "no_save_rng no_load_rng",
        Unused(both("a resumed run is exact", "续训是精确的")),
    ),
    ("save_args force_train profiling", Unused(MEASURED)),
    ("wandb wandb_project_name", Unused(HUB)),
    ("tokenizer_type vocab_size", Unused(TOKENIZER)),
    (
        "num_layers hidden_size num_attention_heads max_sequence_length layernorm_order inner_hidden_size hidden_size_per_attention_head layernorm_epsilon make_vocab_size_divisible_by image_length eva_args cross_image_pix",
        Unused(both(
            "sizes of the model are read from config.json",
            "模型的大小由 config.json 读出",
        )),
    ),
    (
        "hidden_dropout attention_dropout",
        Only(
            &["0", "0.0", "none"],
            both(
                "only adapters have dropout: --lora-dropout X",
                "只有适配器有 dropout：--lora-dropout X",
            ),
        ),
    ),
    (
        "use_gpu_initialization",
        Unused(both("weights are read from files", "权重从文件读取")),
    ),
    (
        "strategy temperature top_p top_k num_beams length_penalty no_repeat_ngram_size min_tgt_length out_seq_length input_source output_path with_id max_inference_batch_size",
        Unused(GENERATION),
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

/// Keys of `peft_lora.py` in CogVLM2's `finetune_demo`, and of `train_peft_lora.py` in CogVLM's.
const COGVLM2: &[Key] = &[
    ("show_progress", Unused(MEASURED)),
    ("lr", Flag("learning-rate")),
    ("num_epochs", Flag("num-train-epochs")),
    ("batch_size", Flag("per-device-train-batch-size")),
    ("model_path model_dir", Flag("model")),
    ("dataset_path dataset_dir", Flag("data")),
    ("save_path save_dir", Flag("output")),
    ("save_step", Flag("save-steps")),
    ("save_freq", Words(&[("1", &[("save-strategy", "epoch")])])),
    ("lora_target", Flag("lora-target-modules")),
    ("max_length", Flag("model-max-length")),
    (
        "torch_type",
        Words(&[
            ("torch.bfloat16", &[("precision", "bf16")]),
            ("torch.float16", &[("precision", "fp16")]),
            ("torch.float32", &[("precision", "f32")]),
        ]),
    ),
    (
        "train_dataset_rate train_rate",
        Only(&["1", "1.0"], NO_SPLIT),
    ),
    ("max_input_len max_output_len", Unused(MAX_LENGTH)),
    ("tokenizer_dir", Unused(TOKENIZER)),
    ("ds_config", Flag("deepspeed")),
];

/// Keys of 2U1's `Qwen2-VL-Finetune` and its siblings, beside those of `TrainingArguments`.
const TWO_U1: &[Key] = &[
    ("model_id", Flag("model")),
    ("eval_path", Flag("eval-data")),
    (
        "lora_enable",
        Words(&[
            ("true", &[("use-lora", "true")]),
            ("false", &[("use-lora", "false")]),
        ]),
    ),
    ("freeze_vision_tower", TUNE_VISION),
    ("freeze_llm", TUNE_LLM),
    ("lora_weight_path", WordsOr(&[("", &[])], "adapter")),
    ("max_seq_length", Flag("model-max-length")),
    (
        "freeze_merger freeze_projector freeze_img_projector freeze_connector freeze_resampler",
        FREEZE_PROJECTOR,
    ),
    (
        "tune_merger tune_img_projector tune_connector tune_resampler tune_mm_mlp",
        TUNE_PROJECTOR,
    ),
    (
        "tune_mm_mlp_adapter",
        Words(&[("true", &[("train", "projector")]), ("false", &[])]),
    ),
    ("tune_vision_tower tune_mm_vision", Flag("tune-vision")),
    ("tune_mm_llm", Flag("tune-llm")),
    ("data_flatten", Only(&["false"], UNPACKED)),
    (
        "loss_type",
        Only(&["cross_entropy", "sigmoid", "none", ""], LOSS),
    ),
    (
        "early_stopping_threshold",
        Only(
            &["0", "0.0", "0."],
            both(
                "any better value counts as an improvement",
                "任何更好的值都算作改进",
            ),
        ),
    ),
    (
        "eval_image_folder",
        Only(
            &["none", ""],
            both(
                "--image-dir also holds the images of --eval-data",
                "--image-dir 也存放 --eval-data 的图片",
            ),
        ),
    ),
    ("num_crops", Only(&["none"], FAMILY)),
    (
        "vision_lora",
        Only(
            &["false"],
            both(
                "a regular expression in --lora-target-modules puts adapters on the tower",
                "--lora-target-modules 的正则表达式可把适配器加在视觉塔上",
            ),
        ),
    ),
    (
        "lora_namespan_exclude",
        Only(
            &[
                "['lm_head', 'embed_tokens']",
                "['embed_tokens', 'lm_head']",
                "['lm_head','embed_tokens']",
                "['embed_tokens','lm_head']",
                "[]",
            ],
            both(
                "adapters by name are never on embeddings or the head; --lora-target-modules selects the layers",
                "按名称选择的适配器从不在嵌入和输出头上；层由 --lora-target-modules 选择",
            ),
        ),
    ),
    (
        "num_lora_modules",
        Only(
            &["-1"],
            both("--lora-layers selects layers", "由 --lora-layers 选择层"),
        ),
    ),
    (
        "bits",
        Words(&[
            ("4", &[("load-in-4bit", "true")]),
            ("8", &[("load-in-8bit", "true")]),
            ("16", &[]),
            ("32", &[]),
        ]),
    ),
    ("double_quant", Flag("quantize-double")),
    ("quant_type", Flag("bnb-4bit-quant-type")),
    ("disable_flash_attn2", Unused(ATTENTION)),
    ("lazy_preprocess", Unused(CACHE)),
    ("generate_eval", Unused(MEASURED)),
    (
        "image_resized_width image_resized_height",
        Only(
            &["none"],
            both(
                "the model's own rules size the images",
                "图片的大小由模型自己的规则决定",
            ),
        ),
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
        Words(&[("true", &[("freeze", "vision")]), ("false", &[])]),
    ),
    ("swanlab", Unused(HUB)),
];
/// Keys of `peft_config`.
pub(in crate::cli) const PEFT: &[Key] = &[
    ("peft_type", Words(&[("lora", &[("use-lora", "true")])])),
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
    ("use_rslora", Flag("use-rslora")),
    ("use_dora", Only(&["false"], ADAPTER_KIND)),
    ("target_modules", Flag("lora-target-modules")),
    ("modules_to_save", Flag("modules-to-save")),
    (
        "bias",
        Only(
            &["none"],
            both("adapters do not train biases", "适配器不训练偏置"),
        ),
    ),
    (
        "inference_mode fan_in_fan_out",
        Only(&["false"], ADAPTER_KIND),
    ),
    (
        "auto_mapping base_model_name_or_path revision peft_version megatron_core qalora_group_size",
        Unused(both(
            "adapters are added to the model of --model",
            "适配器加在 --model 的模型上",
        )),
    ),
    (
        "layers_to_transform layers_pattern exclude_modules",
        Only(&["none", "", "[]"], LAYERS),
    ),
    (
        "rank_pattern alpha_pattern",
        Only(
            &["none", "", "{}"],
            both(
                "new adapters have one rank and one alpha",
                "新适配器只有一个秩和一个 alpha",
            ),
        ),
    ),
    ("init_lora_weights", Only(&["true", "none"], START)),
    (
        "trainable_token_indices layer_replication loftq_config eva_config corda_config lora_ga_config velora_config alora_invocation_tokens monteclora_config use_qalora arrow_config kasa_config use_bdlora megatron_config target_parameters lora_bias ensure_weight_tying runtime_config ephemeral_gpu_offload",
        Only(&["none", "", "false", "{}", "[]"], ADAPTER_KIND),
    ),
    ("num_virtual_tokens", Only(&["none"], PREFIXES)),
    (
        "token_dim num_attention_heads num_layers num_transformer_submodules encoder_hidden_size prefix_projection",
        Unused(PREFIXES),
    ),
];

/// Keys of Hugging Face's `TrainingArguments` that every trainer passes on.
const SHARED: &[Key] = &[
    (
        "optim",
        Words(&[
            ("adamw", &[]),
            ("adamw_hf", &[]),
            ("adamw_torch", &[]),
            ("adamw_torch_fused", &[]),
            ("adamw_torch_xla", &[]),
            ("adamw_torch_npu_fused", &[]),
            ("adamw_apex_fused", &[]),
            ("paged_adamw", &[]),
            ("paged_adamw_32bit", &[]),
            ("adamw_8bit", &[("moments", "8bit")]),
            ("adamw_bnb_8bit", &[("moments", "8bit")]),
            ("paged_adamw_8bit", &[("moments", "8bit")]),
        ]),
    ),
    (
        "use_cpu no_cuda",
        Words(&[("true", &[("device", "cpu")]), ("false", &[])]),
    ),
    (
        "llm_int8_skip_modules",
        Only(
            &["none"],
            both(
                "--quantize-modules selects the layers",
                "由 --quantize-modules 选择层",
            ),
        ),
    ),
];

/// Meaning of the key `name` (snake_case) in a table.
pub(in crate::cli) fn find(keys: &'static [Key], name: &str) -> Option<&'static Meaning> {
    keys.iter()
        .find(|(names, _)| names.split(' ').any(|known| known == name))
        .map(|(_, meaning)| meaning)
}

/// Trainers by their names for people, with their keys.
pub(in crate::cli) const TABLES: [(&str, &[Key]); 6] = [
    (
        "Hugging Face's `TrainingArguments`, in every recipe",
        SHARED,
    ),
    ("LLaMA-Factory", LLAMA_FACTORY),
    ("ms-swift", MS_SWIFT),
    ("SwissArmyTransformer and CogVLM's `finetune_demo`", SAT),
    ("CogVLM2's `peft_lora.py`", COGVLM2),
    ("2U1's `Qwen2-VL-Finetune`", TWO_U1),
];

/// Meaning of a key (snake_case) that `trainer` understands in another way than this program, or alone.
pub(in crate::cli) fn own_meaning(
    trainer: Option<Trainer>,
    name: &str,
) -> Option<&'static Meaning> {
    match trainer? {
        Trainer::LlamaFactory => find(LLAMA_FACTORY, name),
        Trainer::MsSwift => find(MS_SWIFT, name),
        Trainer::Sat => find(SAT, name),
        Trainer::CogVlm2 => find(COGVLM2, name),
        Trainer::TwoU1 => find(TWO_U1, name),
        Trainer::Glm4 => find(GLM_TOP, name),
        Trainer::OpenBmb => find(OPENBMB, name),
        Trainer::HuggingFace => None,
    }
}

/// Meaning of a key (snake_case) in a recipe of `trainer`. Keys that name the same thing for every trainer are
/// understood without one.
pub(in crate::cli) fn meaning(trainer: Option<Trainer>, name: &str) -> Option<&'static Meaning> {
    let is_foreign = IGNORED.iter().any(|(key, _)| *key == name)
        || RESTRICTED.iter().any(|rule| rule.name == name);
    let tables = [LLAMA_FACTORY, MS_SWIFT, OPENBMB, TWO_U1, SAT, COGVLM2];
    let shared = || tables.iter().find_map(|keys| find(keys, name));
    own_meaning(trainer, name)
        .or_else(|| find(SHARED, name))
        .or_else(|| shared().filter(|_| !is_foreign))
}
