//! Presets: published recipes as lists of plain flags.
//!
//! A preset sets only the flags in its list. Every flag on the command line overrides it.

/// A named list of flags (`--preset NAME`) that reproduces the settings of a published training script.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// Name of the preset on the command line.
    pub name: &'static str,
    /// Repository and path of the published script whose settings the preset copies.
    pub script: &'static str,
    /// Settings of the script that the preset leaves out or sets differently, in words.
    pub differs: &'static str,
    /// Flags that the preset sets: (flag without `--`, value).
    pub flags: &'static [(&'static str, &'static str)],
}

/// Linear layers of the attention of CogVLM's language expert and of its vision tower.
const COG_ATTENTION: &str = r"model\.layers\.\d+\.self_attn\.language_expert_(query_key_value|dense)|model\.vision\.transformer\.layers\.\d+\.attention\.(query_key_value|dense)";
/// The same, with CogAgent's cross-attention.
const COGAGENT_ATTENTION: &str = r"model\.layers\.\d+\.self_attn\.language_expert_(query_key_value|dense)|model\.layers\.\d+\.cross_attn\.(query|key_value|dense)|model\.vision\.transformer\.layers\.\d+\.attention\.(query_key_value|dense)";
/// Parts that CogAgent's script trains in full: towers, projector, cross-attention, vision experts.
const COGAGENT_PARTS: &str = r"cross_vision,cross_attn,post_cross_attention_layernorm,linear_proj,vision_mlp,vision_expert_query_key_value,vision_expert_dense,model\.vision\.(boi|eoi),model\.vision\.(patch_embedding|transformer)";
/// Parameters without weight decay by SwissArmyTransformer's rule: norms, and tensors called `bias` (not `q_bias`).
const SAT_NO_DECAY: &str = r"norm,.*\.bias";

/// Settings of QLoRA for models of 7 to 13 B: a base in 4 bits, adapters on every linear layer of the decoder.
macro_rules! qlora {
    ($name:literal, $rank:literal $(, $flag:literal = $value:expr)*) => {
        Preset {
            name: $name,
            script: "artidoro/qlora scripts/finetune_guanaco_7b.sh",
            differs: "adapters on the decoder alone, of rank 16 where each layer has two experts; the mean over tokens; AdamW of 32 bits without pages",
            flags: &[
                ("zero", "2"),
                ("precision", "bf16"),
                ("checkpoint-activations", "all"),
                ("quantize", "nf4"),
                ("quantize-double", "true"),
                ("learning-rate", "2e-4"),
                ("lr-scheduler-type", "constant"),
                ("warmup-ratio", "0"),
                ("weight-decay", "0"),
                ("adam-beta2", "0.999"),
                ("max-grad-norm", "0.3"),
                ("per-device-train-batch-size", "1"),
                ("gradient-accumulation-steps", "16"),
                ("lora-rank", $rank),
                ("lora-alpha", "16"),
                ("lora-dropout", "0.1"),
                ("lora-target-modules", "all"),
                ("modules-to-save", "none"),
                $(($flag, $value),)*
            ],
        }
    };
}

/// All presets that `--preset` accepts.
pub const PRESETS: [Preset; 15] = [
    Preset {
        name: "cogvlm-captcha",
        script: "THUDM/CogVLM finetune_demo/finetune_cogvlm_lora.sh",
        differs: "no dropout in the language model (the script's framework has 0.1 by default)",
        flags: &[
            ("data-format", "captcha"),
            ("template", "sat-base"),
            ("zero", "2"),
            ("precision", "bf16"),
            ("checkpoint-activations", "all"),
            ("per-device-train-batch-size", "4"),
            ("max-steps", "800"),
            ("model-max-length", "1288"),
            ("learning-rate", "1e-5"),
            ("lr-scheduler-type", "sat_cosine"),
            ("warmup-ratio", "0.02"),
            ("weight-decay", "0.05"),
            ("no-decay", SAT_NO_DECAY),
            ("adam-beta1", "0.9"),
            ("adam-beta2", "0.95"),
            ("adam-epsilon", "1e-8"),
            ("max-grad-norm", "0.1"),
            ("lora-rank", "10"),
            ("lora-alpha", "1"),
            ("lora-per-projection", "true"),
            ("lora-target-modules", COG_ATTENTION),
            ("modules-to-save", "none"),
            (
                "train",
                r"model\.vision\.transformer\.layers\.(4[6-9]|5[0-4])\.mlp",
            ),
        ],
    },
    Preset {
        name: "cogagent-captcha",
        script: "THUDM/CogVLM finetune_demo/finetune_cogagent_lora.sh",
        differs: "no dropout in the language model (the script's framework has 0.1 by default)",
        flags: &[
            ("data-format", "captcha"),
            ("template", "sat-chat"),
            ("zero", "2"),
            ("precision", "bf16"),
            ("checkpoint-activations", "all"),
            ("per-device-train-batch-size", "4"),
            ("max-steps", "2000"),
            ("model-max-length", "400"),
            ("learning-rate", "1e-5"),
            (
                "lr",
                r"model\.cross_vision|model\.vision\.(patch_embedding|transformer)=1e-6",
            ),
            ("lr-scheduler-type", "sat_cosine"),
            ("warmup-ratio", "0.02"),
            ("weight-decay", "0.05"),
            ("no-decay", SAT_NO_DECAY),
            ("adam-beta1", "0.9"),
            ("adam-beta2", "0.95"),
            ("adam-epsilon", "1e-8"),
            ("max-grad-norm", "0.1"),
            ("lora-rank", "50"),
            ("lora-alpha", "1"),
            ("lora-per-projection", "true"),
            ("lora-target-modules", COGAGENT_ATTENTION),
            ("modules-to-save", "none"),
            ("train", COGAGENT_PARTS),
        ],
    },
    Preset {
        name: "cogvlm2-peft",
        script: "THUDM/CogVLM2 finetune_demo/peft_lora.py",
        differs: "every round of a conversation is a sample; nothing is padded",
        flags: &[
            ("data-format", "cogvlm-sft"),
            ("zero", "2"),
            ("precision", "bf16"),
            ("checkpoint-activations", "all"),
            ("learning-rate", "1e-7"),
            ("lr-scheduler-type", "linear"),
            ("warmup-steps", "0"),
            ("warmup-ratio", "0"),
            ("weight-decay", "0.01"),
            ("adam-beta1", "0.9"),
            ("adam-beta2", "0.999"),
            ("adam-epsilon", "1e-8"),
            ("max-grad-norm", "1"),
            ("model-max-length", "4096"),
            ("lora-rank", "8"),
            ("lora-alpha", "32"),
            ("lora-dropout", "0.1"),
            ("lora-target-modules", "vision_expert_query_key_value"),
            ("modules-to-save", "none"),
        ],
    },
    Preset {
        name: "minicpm-lora",
        script: "OpenBMB/MiniCPM-V finetune/finetune_lora.sh",
        differs: "bf16 where the script has fp16",
        flags: &[
            ("zero", "2"),
            ("precision", "bf16"),
            ("checkpoint-activations", "all"),
            ("max-steps", "10000"),
            ("model-max-length", "2048"),
            ("max-slice-nums", "9"),
            ("learning-rate", "1e-6"),
            ("lr-scheduler-type", "cosine"),
            ("warmup-ratio", "0.01"),
            ("weight-decay", "0.1"),
            ("adam-beta2", "0.95"),
            ("lora-rank", "64"),
            ("lora-alpha", "64"),
            ("lora-dropout", "0.05"),
            ("modules-to-save", "embed_tokens,resampler,vpm"),
            ("tune-vision", "true"),
            ("tune-llm", "false"),
        ],
    },
    Preset {
        name: "minicpm-full",
        script: "OpenBMB/MiniCPM-V finetune/finetune_ds.sh",
        differs: "",
        flags: &[
            ("zero", "3"),
            ("precision", "bf16"),
            ("checkpoint-activations", "all"),
            ("max-steps", "10000"),
            ("model-max-length", "2048"),
            ("max-slice-nums", "9"),
            ("learning-rate", "1e-6"),
            ("lr-scheduler-type", "cosine"),
            ("warmup-ratio", "0.01"),
            ("weight-decay", "0.1"),
            ("adam-beta2", "0.95"),
            ("tune-vision", "true"),
            ("tune-llm", "true"),
        ],
    },
    Preset {
        name: "glm4v-lora",
        script: "THUDM/GLM-4 finetune/configs/lora.yaml",
        differs: "the layer the script's names mean; the mean over tokens, not the mean of batches' means",
        flags: &[
            ("data-format", "glm4v"),
            ("zero", "2"),
            ("precision", "bf16"),
            ("checkpoint-activations", "all"),
            ("per-device-train-batch-size", "1"),
            ("max-steps", "3000"),
            ("model-max-length", "2623"),
            ("learning-rate", "5e-4"),
            ("lr-scheduler-type", "linear"),
            ("warmup-ratio", "0"),
            ("weight-decay", "0"),
            ("adam-beta2", "0.999"),
            ("lora-rank", "8"),
            ("lora-alpha", "32"),
            ("lora-dropout", "0.1"),
            ("lora-target-modules", "self_attention.query_key_value"),
            ("modules-to-save", "none"),
            ("freeze", r"transformer\.vision"),
        ],
    },
    Preset {
        name: "glm4v-full",
        script: "THUDM/GLM-4 finetune/configs/sft.yaml",
        differs: "the mean over tokens, not the mean of batches' means",
        flags: &[
            ("data-format", "glm4v"),
            ("zero", "3"),
            ("precision", "bf16"),
            ("checkpoint-activations", "all"),
            ("per-device-train-batch-size", "1"),
            ("max-steps", "3000"),
            ("model-max-length", "2623"),
            ("learning-rate", "5e-5"),
            ("lr-scheduler-type", "linear"),
            ("warmup-ratio", "0"),
            ("weight-decay", "0"),
            ("adam-beta2", "0.999"),
            ("freeze", r"transformer\.vision"),
        ],
    },
    Preset {
        name: "cogagent-9b-lora",
        script: "THUDM/CogAgent finetune/configs/lora.yaml",
        differs: "the mean over tokens, not the mean of batches' means",
        flags: &[
            ("data-format", "glm4v"),
            ("zero", "2"),
            ("precision", "bf16"),
            ("checkpoint-activations", "all"),
            ("per-device-train-batch-size", "1"),
            ("max-steps", "3000"),
            ("model-max-length", "2623"),
            ("learning-rate", "5e-4"),
            ("lr-scheduler-type", "linear"),
            ("warmup-ratio", "0"),
            ("weight-decay", "0"),
            ("adam-beta2", "0.999"),
            ("lora-rank", "8"),
            ("lora-alpha", "32"),
            ("lora-dropout", "0.1"),
            ("lora-target-modules", r"transformer\..*\.query_key_value"),
            ("modules-to-save", "none"),
        ],
    },
    Preset {
        name: "cogagent-9b-full",
        script: "THUDM/CogAgent finetune/configs/sft.yaml",
        differs: "the mean over tokens, not the mean of batches' means",
        flags: &[
            ("data-format", "glm4v"),
            ("zero", "3"),
            ("precision", "bf16"),
            ("checkpoint-activations", "all"),
            ("per-device-train-batch-size", "1"),
            ("max-steps", "3000"),
            ("model-max-length", "2623"),
            ("learning-rate", "5e-5"),
            ("lr-scheduler-type", "linear"),
            ("warmup-ratio", "0"),
            ("weight-decay", "0"),
            ("adam-beta2", "0.999"),
            ("freeze", r"transformer\.vision"),
        ],
    },
    Preset {
        name: "glm-ocr-lora",
        script: "zai-org/GLM-OCR examples/finetune/glm_ocr_lora_sft.yaml",
        differs: "the mean over tokens, not the mean of batches' means",
        flags: &[
            ("zero", "2"),
            ("precision", "bf16"),
            ("checkpoint-activations", "all"),
            ("per-device-train-batch-size", "4"),
            ("gradient-accumulation-steps", "4"),
            ("num-train-epochs", "3"),
            ("model-max-length", "2048"),
            ("learning-rate", "1e-4"),
            ("lr-scheduler-type", "cosine"),
            ("warmup-ratio", "0.1"),
            ("weight-decay", "0"),
            ("adam-beta2", "0.999"),
            ("lora-rank", "8"),
            ("lora-alpha", "16"),
            ("lora-dropout", "0"),
            ("lora-target-modules", "all"),
            ("modules-to-save", "none"),
        ],
    },
    Preset {
        name: "glm-ocr-full",
        script: "zai-org/GLM-OCR examples/finetune/glm_ocr_full_sft.yaml",
        differs: "the mean over tokens, not the mean of batches' means",
        flags: &[
            ("zero", "2"),
            ("precision", "bf16"),
            ("checkpoint-activations", "all"),
            ("per-device-train-batch-size", "4"),
            ("gradient-accumulation-steps", "2"),
            ("num-train-epochs", "3"),
            ("model-max-length", "2048"),
            ("learning-rate", "1e-5"),
            ("lr-scheduler-type", "cosine"),
            ("warmup-ratio", "0.1"),
            ("weight-decay", "0"),
            ("adam-beta2", "0.999"),
            ("freeze", r"model\.visual"),
        ],
    },
    // No script is published for GLM-4.6V-Flash or GLM-4.1V: rank, alpha, dropout, rates and the number of steps are
    // those of GLM-4V's. Without a stage of ZeRO, so that every tier can be added on one card.
    Preset {
        name: "glm-4.6v-flash-lora",
        script: "THUDM/GLM-4 finetune/configs/lora.yaml",
        differs: "the script is GLM-4V's, since none is published for this model; its attention projections, and 4096 tokens; the mean over tokens, not the mean of batches' means",
        flags: &[
            ("precision", "bf16"),
            ("checkpoint-activations", "all"),
            ("per-device-train-batch-size", "1"),
            ("max-steps", "3000"),
            ("model-max-length", "4096"),
            ("learning-rate", "5e-4"),
            ("lr-scheduler-type", "linear"),
            ("warmup-ratio", "0"),
            ("weight-decay", "0"),
            ("adam-beta2", "0.999"),
            ("lora-rank", "8"),
            ("lora-alpha", "32"),
            ("lora-dropout", "0.1"),
            ("lora-target-modules", "attn"),
            ("modules-to-save", "none"),
        ],
    },
    qlora!(
        "minicpm-qlora",
        "64",
        "model-max-length" = "2048",
        "max-slice-nums" = "9"
    ),
    qlora!("cogvlm-qlora", "16", "model-max-length" = "2048"),
    qlora!("glm4v-qlora", "64", "model-max-length" = "2623"),
];

impl Preset {
    /// The preset called `name`; `None` if there is none.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        PRESETS.iter().find(|preset| preset.name == name)
    }

    /// Flags of this preset as text for a command line, such as `--zero 2 --precision bf16`, quoted for a
    /// shell.
    #[must_use]
    pub fn spelled(&self) -> String {
        let flags = self.flags.iter().map(|(flag, value)| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "_-.,=".contains(c);
            match value.chars().all(plain) {
                true => format!("--{flag} {value}"),
                false => format!("--{flag} '{value}'"),
            }
        });
        flags.collect::<Vec<_>>().join(" ")
    }
}

/// Adds the flags of `--preset` to a rewritten line (`--flag=value` each), except those that the line has.
pub(super) fn expand(args: &mut Vec<String>) {
    let chosen = args.iter().find_map(|arg| arg.strip_prefix("--preset="));
    let Some(preset) = chosen.and_then(Preset::named) else {
        return;
    };
    let given = |flag: &str| {
        let start = format!("--{flag}=");
        args.iter().any(|arg| arg.starts_with(&start))
    };
    let missing = preset.flags.iter().filter(|(flag, _)| {
        let instead = INSTEAD.iter().find(|(preset, _)| preset == flag);
        !given(flag) && !instead.is_some_and(|(_, other)| given(other))
    });
    let missing: Vec<String> = missing.map(|(f, v)| format!("--{f}={v}")).collect();
    args.extend(missing);
}

/// Pairs of flags with the same effect: the second on the command line overrides the first in a preset.
const INSTEAD: [(&str, &str); 5] = [
    ("precision", "bf16"),
    ("checkpoint-activations", "gradient-checkpointing"),
    ("max-steps", "num-train-epochs"),
    ("num-train-epochs", "max-steps"),
    ("warmup-ratio", "warmup-steps"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::tests::parse_line;
    use crate::config::ZeroChoice;

    #[test]
    fn every_preset_parses_and_flags_override_it() {
        for preset in PRESETS {
            let (args, _) = parse_line(&format!("--preset {}", preset.name)).expect("parses");
            assert_eq!(args.preset.as_deref(), Some(preset.name));
        }
        let (args, _) =
            parse_line("--preset cogvlm-captcha --zero 3 --lora_rank=4").expect("parses");
        assert_eq!(
            (args.zero, args.lora_rank),
            (Some(ZeroChoice::Stage(3)), Some(4))
        );
        assert_eq!(args.max_grad_norm, Some(0.1));
        let (args, _) = parse_line("--num_train_epochs 2 --preset cogvlm-captcha").expect("parses");
        assert_eq!((args.max_steps, args.num_train_epochs), (None, Some(2.0)));
        let (args, _) = parse_line("--preset glm-ocr-full --max-steps 7").expect("parses");
        assert_eq!((args.max_steps, args.num_train_epochs), (Some(7), None));
    }

    #[test]
    fn presets_print_flags_that_a_shell_accepts() {
        let preset = Preset::named("cogvlm2-peft").expect("is there");
        assert!(
            preset.spelled().starts_with(
                "--data-format cogvlm-sft --zero 2 --precision bf16 --checkpoint-activations all"
            ),
            "{}",
            preset.spelled()
        );
        let captcha = Preset::named("cogvlm-captcha").expect("is there").spelled();
        assert!(captcha.contains("--no-decay 'norm,.*\\.bias'"), "{captcha}");
        assert!(Preset::named("cogvlm").is_none());
    }
}
