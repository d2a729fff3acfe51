//! The demo's model directory: the files of MiniCPM-V 2.6, for a model of about a million parameters.

use serde_json::{Value, json};

use super::dataset::corpus;
use super::tokenizer::train;
use crate::commands::synth::files::{ModelFiles, TEMPLATE, preprocessor_config};
use crate::commands::synth::tokenizer::Vocabulary;

/// Tokens per image (queries of the resampler).
const QUERIES: usize = 16;
/// Side of a square whose area a slice has approximately, in pixels.
const SCALE_RESOLUTION: usize = 56;
/// Side of a patch in pixels.
const PATCH_SIZE: usize = 14;

/// Name and contents of every file. Weights are initialized randomly, so no file has them.
pub(super) fn files() -> Vec<(&'static str, Value)> {
    let vocabulary = train(&corpus());
    let mut files = vec![("config.json", config(&vocabulary))];
    let small = ModelFiles {
        tokenizer_config: tokenizer_config(&vocabulary),
        preprocessor: Some(preprocessor_config(QUERIES, SCALE_RESOLUTION, PATCH_SIZE)),
        vocabulary,
    };
    files.extend(small.files().expect("all tokens fit"));
    files
}

fn config(vocabulary: &Vocabulary) -> Value {
    json!({
        "version": 2.6,
        "architectures": ["MiniCPMV"],
        "model_type": "minicpmv",
        "attention_dropout": 0.0,
        "bos_token_id": vocabulary.special_id("<|endoftext|>"),
        "eos_token_id": vocabulary.special_id("<|im_end|>"),
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.09,
        "intermediate_size": 384,
        "max_position_embeddings": 4096,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "use_sliding_window": false,
        "tie_word_embeddings": false,
        "torch_dtype": "float32",
        "vocab_size": vocabulary.size,
        "batch_vision_input": true,
        "drop_vision_last_layer": false,
        "image_size": 56,
        "patch_size": 14,
        "query_num": QUERIES,
        "slice_mode": true,
        "use_image_id": true,
        "vision_batch_size": 16,
        "slice_config": {
            "max_slice_nums": 9,
            "patch_size": 14,
            "scale_resolution": SCALE_RESOLUTION,
            "model_type": "minicpmv",
        },
        "vision_config": {
            "hidden_size": 96,
            "image_size": 56,
            "intermediate_size": 384,
            "num_attention_heads": 3,
            "num_hidden_layers": 2,
            "patch_size": 14,
            "model_type": "siglip",
        },
    })
}

fn tokenizer_config(vocabulary: &Vocabulary) -> Value {
    let special = &vocabulary.special;
    let added: serde_json::Map<String, Value> = special
        .iter()
        .map(|(id, token)| {
            let entry = json!({
                "content": token, "lstrip": false, "normalized": false, "rstrip": false,
                "single_word": false, "special": true,
            });
            (id.to_string(), entry)
        })
        .collect();
    json!({
        "add_prefix_space": false,
        "added_tokens_decoder": added,
        "additional_special_tokens": special[4..].iter().map(|(_, token)| token).collect::<Vec<_>>(),
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": false,
        "errors": "replace",
        "model_max_length": 4096,
        "split_special_tokens": false,
        "tokenizer_class": "MiniCPMVTokenizer",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_files_of_the_demo_agree() {
        let files = files();
        let get = |name: &str| {
            &files
                .iter()
                .find(|(known, _)| *known == name)
                .expect("a file")
                .1
        };
        let (config, tokenizer) = (get("config.json"), get("tokenizer.json"));
        let vocab = tokenizer["model"]["vocab"]
            .as_object()
            .expect("a map")
            .len();
        let added = tokenizer["added_tokens"].as_array().expect("a list").len();
        assert_eq!(config["vocab_size"].as_u64(), Some((vocab + added) as u64));
        assert_eq!(
            config["query_num"],
            get("preprocessor_config.json")["image_feature_size"]
        );
        let eos = config["eos_token_id"].to_string();
        assert_eq!(
            get("tokenizer_config.json")["added_tokens_decoder"][&eos]["content"],
            "<|im_end|>"
        );
    }

    #[test]
    fn attention_heads_divide_their_widths() {
        let config = config(&train(&corpus()));
        let of = |value: &Value| value.as_u64().expect("a number");
        assert_eq!(
            of(&config["hidden_size"]) % 128,
            0,
            "resampler heads are 128 wide"
        );
        assert_eq!(
            of(&config["hidden_size"]) % of(&config["num_attention_heads"]),
            0
        );
        let vision = &config["vision_config"];
        assert_eq!(
            of(&vision["hidden_size"]) % of(&vision["num_attention_heads"]),
            0
        );
    }
}
