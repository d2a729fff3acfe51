//! Other trainers: whose keys a file or command line has, what these keys mean here (`keys.rs`), and what an absent key
//! means there (`defaults.rs`).

mod defaults;
mod keys;
#[cfg(test)]
mod published;

use clap::ValueEnum;

pub(super) use defaults::{Absent, absent, refuse_adapted_tower};
pub(super) use keys::{
    CUT, Effect, GLM_DATA, GLM_TOP, Meaning, PEFT, TABLES, boolean, find, is_word, meaning,
    own_meaning,
};

/// `--defaults`: whose values absent settings take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DefaultsOf {
    /// Those of this program.
    Ours,
    /// Those of the trainer whose file or line it is.
    Theirs,
    /// Those of LLaMA-Factory.
    LlamaFactory,
    /// Those of ms-swift.
    MsSwift,
    /// Those of OpenBMB's `finetune.py`.
    Openbmb,
    /// Those of GLM-4's `finetune.py`.
    #[value(name = "glm-4")]
    Glm4,
    /// Those of SwissArmyTransformer, with CogVLM's `finetune_demo`.
    Sat,
    /// Those of CogVLM2's `peft_lora.py`.
    #[value(name = "cogvlm2")]
    CogVlm2,
    /// Those of 2U1's `Qwen2-VL-Finetune`.
    #[value(name = "2u1")]
    TwoU1,
    /// Those of Hugging Face's `TrainingArguments` and of peft.
    HuggingFace,
}

/// A trainer whose files and command lines are recognized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trainer {
    LlamaFactory,
    MsSwift,
    OpenBmb,
    Glm4,
    Sat,
    CogVlm2,
    TwoU1,
    HuggingFace,
}

/// Keys that only one trainer has. One of them is enough, also beside flags of this program.
const OWN_KEYS: [(Trainer, &[&str]); 6] = [
    (
        Trainer::TwoU1,
        &[
            "lora_enable",
            "model_id",
            "freeze_merger",
            "lora_namespan_exclude",
        ],
    ),
    (
        Trainer::CogVlm2,
        &[
            "train_dataset_rate",
            "max_input_len",
            "train_rate",
            "torch_type",
        ],
    ),
    (
        Trainer::Glm4,
        &[
            "peft_config",
            "data_config",
            "training_args",
            "max_input_length",
            "max_output_length",
            "freezeV",
        ],
    ),
    (
        Trainer::LlamaFactory,
        &["stage", "finetuning_type", "lora_target", "cutoff_len"],
    ),
    (
        Trainer::MsSwift,
        &[
            "train_type",
            "tuner_type",
            "sft_type",
            "freeze_vit",
            "freeze_aligner",
            "freeze_llm",
            "target_modules",
        ],
    ),
    (
        Trainer::Sat,
        &[
            "train_iters",
            "experiment_name",
            "from_pretrained",
            "lr_decay_style",
        ],
    ),
];

impl Trainer {
    /// The trainer that has these keys, in snake_case, as its own. Keys that several trainers share decide only where
    /// no flag of this program stands for the same thing.
    pub(crate) fn of_keys(keys: &[String]) -> Option<Self> {
        let has = |key: &str| keys.iter().any(|known| known == key);
        let own = OWN_KEYS
            .iter()
            .find(|(_, keys)| keys.iter().any(|key| has(key)));
        let foreign_model = has("model_name_or_path") && !has("model");
        let foreign_output = has("output_dir") && !has("output") && !has("model");
        match own {
            Some((trainer, _)) => Some(*trainer),
            None if has("llm_type") || (has("data_path") && (foreign_model || foreign_output)) => {
                Some(Self::OpenBmb)
            }
            None => (foreign_model || foreign_output).then_some(Self::HuggingFace),
        }
    }

    /// The trainer of a value of `--defaults`. `None` for `ours` and `theirs`.
    pub(crate) fn named(value: &str) -> Option<Self> {
        match <DefaultsOf as ValueEnum>::from_str(value, true).ok()? {
            DefaultsOf::Ours | DefaultsOf::Theirs => None,
            DefaultsOf::LlamaFactory => Some(Self::LlamaFactory),
            DefaultsOf::MsSwift => Some(Self::MsSwift),
            DefaultsOf::Openbmb => Some(Self::OpenBmb),
            DefaultsOf::Glm4 => Some(Self::Glm4),
            DefaultsOf::Sat => Some(Self::Sat),
            DefaultsOf::CogVlm2 => Some(Self::CogVlm2),
            DefaultsOf::TwoU1 => Some(Self::TwoU1),
            DefaultsOf::HuggingFace => Some(Self::HuggingFace),
        }
    }

    /// Its name as a value of `--defaults`.
    pub(crate) const fn flag_value(self) -> &'static str {
        match self {
            Self::LlamaFactory => "llama-factory",
            Self::MsSwift => "ms-swift",
            Self::OpenBmb => "openbmb",
            Self::Glm4 => "glm-4",
            Self::Sat => "sat",
            Self::CogVlm2 => "cogvlm2",
            Self::TwoU1 => "2u1",
            Self::HuggingFace => "hugging-face",
        }
    }

    /// Its name for people.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::LlamaFactory => "LLaMA-Factory",
            Self::MsSwift => "ms-swift",
            Self::OpenBmb => "OpenBMB's finetune.py",
            Self::Glm4 => "GLM-4's finetune.py",
            Self::Sat => "SwissArmyTransformer",
            Self::CogVlm2 => "CogVLM2's peft_lora.py",
            Self::TwoU1 => "2U1's Qwen2-VL-Finetune",
            Self::HuggingFace => "Hugging Face's TrainingArguments",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trainer_is_recognized_by_its_own_keys_and_names() {
        for (keys, expected) in [
            ("stage model data", Some(Trainer::LlamaFactory)),
            ("model dataset train_type", Some(Trainer::MsSwift)),
            ("peft_config training_args", Some(Trainer::Glm4)),
            ("from_pretrained lr", Some(Trainer::Sat)),
            ("model_name_or_path data_path", Some(Trainer::OpenBmb)),
            ("output_dir llm_type", Some(Trainer::OpenBmb)),
            ("model_name_or_path data", Some(Trainer::HuggingFace)),
            ("output_dir learning_rate", Some(Trainer::HuggingFace)),
            ("model data output lora_rank", None),
            ("model data output_dir use_lora", None),
            ("model data freeze_vision_tower", None),
        ] {
            let words: Vec<String> = keys.split(' ').map(str::to_owned).collect();
            assert_eq!(Trainer::of_keys(&words), expected, "{keys}");
        }
    }

    #[test]
    fn a_trainer_is_named_by_the_flag() {
        for trainer in OWN_KEYS.map(|(trainer, _)| trainer) {
            assert_eq!(Trainer::named(trainer.flag_value()), Some(trainer));
        }
        assert_eq!(Trainer::named("theirs"), None);
    }
}
