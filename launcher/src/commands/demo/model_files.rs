//! The demo's model directory: the files of MiniCPM-V 2.6, for a model of about a million parameters.

use serde_json::{Value, json};

use super::dataset::corpus;
use super::tokenizer::{SPECIAL, Vocabulary};

/// Tokens per image (queries of the resampler).
const QUERIES: usize = 16;
/// Side of a square whose area a slice has approximately, in pixels.
const SCALE_RESOLUTION: usize = 56;
/// Side of a patch in pixels.
const PATCH_SIZE: usize = 14;

/// Chat template. It adds a default system message to conversations without one.
pub(crate) const TEMPLATE: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Name and contents of every file. Weights are initialized randomly, so no file has them.
pub(super) fn files() -> Vec<(&'static str, Value)> {
    let vocabulary = Vocabulary::train(&corpus());
    vec![
        ("config.json", config(&vocabulary)),
        ("tokenizer.json", vocabulary.to_json()),
        ("tokenizer_config.json", tokenizer_config(&vocabulary)),
        (
            "preprocessor_config.json",
            preprocessor_config(QUERIES, SCALE_RESOLUTION, PATCH_SIZE),
        ),
    ]
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
        "vocab_size": vocabulary.len(),
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
    let added: serde_json::Map<String, Value> = SPECIAL
        .iter()
        .map(|token| {
            let entry = json!({
                "content": token, "lstrip": false, "normalized": false, "rstrip": false,
                "single_word": false, "special": true,
            });
            (vocabulary.special_id(token).to_string(), entry)
        })
        .collect();
    json!({
        "add_prefix_space": false,
        "added_tokens_decoder": added,
        "additional_special_tokens": SPECIAL[4..],
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

/// Contents of the family's `preprocessor_config.json`. Lengths are in pixels.
pub(crate) fn preprocessor_config(
    queries: usize,
    scale_resolution: usize,
    patch_size: usize,
) -> Value {
    json!({
        "image_processor_type": "MiniCPMVImageProcessor",
        "max_slice_nums": 9,
        "scale_resolution": scale_resolution,
        "patch_size": patch_size,
        "use_image_id": true,
        "image_feature_size": queries,
        "im_start": "<image>",
        "im_end": "</image>",
        "slice_start": "<slice>",
        "slice_end": "</slice>",
        "unk": "<unk>",
        "im_id_start": "<image_id>",
        "im_id_end": "</image_id>",
        "slice_mode": true,
        "norm_mean": [0.5, 0.5, 0.5],
        "norm_std": [0.5, 0.5, 0.5],
        "version": 2.6,
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
        let config = config(&Vocabulary::train(&corpus()));
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
