//! Tokenizers of the golden packs: token ids of the reference, the file forms among each other, and files
//! damaged on purpose.

#![allow(clippy::unwrap_used, reason = "helpers of a test binary")]

use std::path::{Path, PathBuf};

use models::text::{Tokenizer, TokenizerError};
use proptest::prelude::*;
use proptest::sample::Index;
use safetensors::SafeTensors;
use serde_json::Value;

const SENTENCEPIECE: [&str; 2] = ["cogvlm-chat-hf", "cogagent-chat-hf"];

fn pack(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/golden")
        .join(name)
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<i32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// The tokenizer of the sentencepiece file of `name`, without the `tokenizer.json` beside it.
fn from_sentencepiece(name: &str) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    for file in ["tokenizer.model", "tokenizer_config.json"] {
        std::fs::copy(pack(name).join(file), dir.path().join(file)).unwrap();
    }
    Tokenizer::load(dir.path()).unwrap()
}

fn check_specials(tokenizer: &Tokenizer, cases: &Value) {
    let specials = cases["specials"].as_object().unwrap();
    assert!(specials.len() >= 14);
    for (text, id) in specials {
        let id = i32::try_from(id.as_i64().unwrap()).unwrap();
        assert_eq!(tokenizer.id(text).unwrap(), id);
        assert_eq!(tokenizer.encode(text).unwrap(), [id]);
        assert_eq!(tokenizer.decode(&[id]).unwrap(), "");
        assert_eq!(tokenizer.decode_verbatim(&[id]).unwrap(), *text);
        assert!(tokenizer.encode_plain(text).unwrap().len() > 1);
    }
    assert_eq!(
        tokenizer.eos_id().unwrap(),
        tokenizer.id("<|endoftext|>").unwrap()
    );
}

#[test]
fn glm_4v_encodes_and_decodes_every_text_of_the_reference() {
    let dir = pack("glm-4v-9b");
    let cases = read_json(&dir.join("tokenizer_cases.json"));
    let tokenizer = Tokenizer::load(&dir).unwrap();
    check_specials(&tokenizer, &cases);
    for case in cases["ordinary"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(
            tokenizer.encode_plain(text).unwrap(),
            ids(&case["ids"]),
            "{text:?}"
        );
        assert_eq!(tokenizer.decode(&ids(&case["ids"])).unwrap(), text);
    }
    for case in cases["partial_decode"].as_array().unwrap() {
        assert_eq!(
            tokenizer.decode(&ids(&case["ids"])).unwrap(),
            case["text"].as_str().unwrap()
        );
    }
}

#[test]
fn glm_4v_chat_prompts_are_built_from_plain_text_between_special_tokens() {
    let dir = pack("glm-4v-9b");
    let cases = read_json(&dir.join("tokenizer_cases.json"));
    let tokenizer = Tokenizer::load(&dir).unwrap();
    for case in cases["chat_prompts"].as_array().unwrap() {
        let mut found = tokenizer.encode("[gMASK]<sop>").unwrap();
        let turns = case["messages"].as_array().unwrap();
        // the last answer is what the prompt asks for
        for (index, turn) in turns[..turns.len() - 1].iter().enumerate() {
            let (role, content) = (
                turn["role"].as_str().unwrap(),
                turn["content"].as_str().unwrap(),
            );
            found.push(tokenizer.id(&format!("<|{role}|>")).unwrap());
            found.extend(tokenizer.encode_plain("\n").unwrap());
            if index == 0 && case["image_on_first"] == true {
                let image = "<|begin_of_image|><|endoftext|><|end_of_image|>";
                found.extend(tokenizer.encode(image).unwrap());
            }
            found.extend(tokenizer.encode_plain(content).unwrap());
        }
        found.push(tokenizer.id("<|assistant|>").unwrap());
        assert_eq!(found, ids(&case["ids"]));
    }
}

#[test]
fn glm_4_1v_encodes_and_decodes_every_text_of_the_reference() {
    let dir = pack("glm-4.1v-9b-thinking");
    let cases = read_json(&dir.join("tokenizer_cases.json"));
    let tokenizer = Tokenizer::load(&dir).unwrap();
    check_specials(&tokenizer, &cases);
    for case in cases["with_specials"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(
            tokenizer.encode(text).unwrap(),
            ids(&case["ids"]),
            "{text:?}"
        );
        assert_eq!(tokenizer.decode_verbatim(&ids(&case["ids"])).unwrap(), text);
    }
}

#[test]
fn merges_may_be_texts_or_pairs() {
    for name in [
        "glm-4.1v-9b-thinking",
        "cogvlm2-llama3-chat-19B",
        "cogvlm-chat-hf",
    ] {
        let mut file = read_json(&pack(name).join("tokenizer.json"));
        let merges = file["model"]["merges"].as_array_mut().unwrap();
        assert!(merges.iter().all(Value::is_array));
        for merge in merges {
            let parts: Vec<String> = serde_json::from_value(merge.clone()).unwrap();
            *merge = parts.join(" ").into();
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        let (texts, pairs) = (
            Tokenizer::load(dir.path()).unwrap(),
            Tokenizer::load(&pack(name)).unwrap(),
        );
        for text in TEXTS {
            assert_eq!(texts.encode(text).unwrap(), pairs.encode(text).unwrap());
        }
    }
}

const TEXTS: [&str; 20] = [
    "",
    " ",
    "   ",
    "\n",
    " \n\t \r\n",
    "Question: What is in the picture? Answer:",
    "two  blanks   and a trailing one ",
    " leading",
    "0123456789 3.14 1,000",
    "CAPTCHA:",
    "这张图片里有什么？",
    "図 カナ ｶﾅ ＡＢＣ",
    "🙂👩‍👩‍👧 flags 🇨🇭",
    "é e\u{301} ß ﷺ ½ ²",
    "\u{0} \u{1} \u{7f} \u{feff} \u{fffd} \u{10ffff}",
    "\u{2581}\u{2581}a \u{2581}",
    "<0x41> <0xFF>",
    "<s>a</s> <unk>b",
    "[INST] x [/INST]",
    "hello worldhello worldhello world the the the",
];

#[test]
fn a_sentencepiece_model_equals_its_tokenizer_json() {
    for name in SENTENCEPIECE {
        let (model, json) = (
            from_sentencepiece(name),
            Tokenizer::load(&pack(name)).unwrap(),
        );
        for text in TEXTS {
            check_equal(&model, &json, text).unwrap();
        }
        assert_eq!(model.vocab_size(), json.vocab_size());
        assert_eq!(model.eos_id().unwrap(), json.eos_id().unwrap());
        for id in 0..i32::try_from(model.vocab_size()).unwrap() {
            assert_eq!(model.decode(&[id]).unwrap(), json.decode(&[id]).unwrap());
        }
    }
}

#[test]
fn a_sentencepiece_model_names_its_own_special_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let source = pack("cogvlm-chat-hf").join("tokenizer.model");
    std::fs::copy(source, dir.path().join("tokenizer.model")).unwrap();
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.eos_id().unwrap(), 2);
    assert_eq!(tokenizer.encode("<s></s>").unwrap(), [1, 2]);
}

fn check_equal(model: &Tokenizer, json: &Tokenizer, text: &str) -> Result<(), TestCaseError> {
    let encoded = model.encode(text).unwrap();
    prop_assert_eq!(&encoded, &json.encode(text).unwrap(), "{:?}", text);
    prop_assert_eq!(
        model.encode_plain(text).unwrap(),
        json.encode_plain(text).unwrap()
    );
    prop_assert_eq!(
        model.decode(&encoded).unwrap(),
        json.decode(&encoded).unwrap()
    );
    Ok(())
}

/// Ids of the golden case `case`.
fn input_ids(name: &str, case: &str) -> Vec<i32> {
    let bytes = std::fs::read(
        pack(name)
            .join("cases")
            .join(case)
            .join("expected.safetensors"),
    )
    .unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let data = tensors.tensor("input_ids").unwrap();
    let ids = data.data().as_chunks::<8>().0.iter();
    ids.map(|bytes| i32::try_from(i64::from_le_bytes(*bytes)).unwrap())
        .collect()
}

#[test]
fn prompts_of_the_cog_cases_are_the_ids_of_the_reference() {
    for name in [
        "cogvlm-chat-hf",
        "cogagent-chat-hf",
        "cogvlm2-llama3-chat-19B",
    ] {
        let tokenizer = Tokenizer::load(&pack(name)).unwrap();
        let mut prompts = 0;
        for case in std::fs::read_dir(pack(name).join("cases")).unwrap() {
            let case = case.unwrap();
            let conversation = read_json(&case.path().join("conversation.json"));
            let (Some(prompt), Some(answer)) = (
                conversation["rendered_prompt"].as_str(),
                conversation["answer"].as_str(),
            ) else {
                continue;
            };
            let mut text = tokenizer.encode(prompt).unwrap();
            text.extend(tokenizer.encode(answer).unwrap());
            text.push(tokenizer.eos_id().unwrap());
            let found = input_ids(name, case.file_name().to_str().unwrap());
            assert!(found.ends_with(&text), "{name} {:?}", case.file_name());
            prompts += 1;
        }
        assert!(prompts >= 2, "{name}: {prompts} cases with a prompt");
    }
}

proptest! {
    #[test]
    fn a_sentencepiece_model_equals_its_tokenizer_json_on_any_text(
        texts in proptest::collection::vec(text(), 16),
    ) {
        let (model, json) = (from_sentencepiece(SENTENCEPIECE[0]), Tokenizer::load(&pack(SENTENCEPIECE[0])).unwrap());
        for text in &texts {
            check_equal(&model, &json, text)?;
            // U+2581 stands for a blank and comes back as one; special tokens are left out
            if !text.contains(['\u{2581}', '<']) {
                prop_assert_eq!(&model.decode(&model.encode(text).unwrap()).unwrap(), text);
            }
        }
    }

    #[test]
    fn rank_files_round_trip_any_text(texts in proptest::collection::vec(text(), 16)) {
        let tokenizer = Tokenizer::load(&pack("glm-4v-9b")).unwrap();
        for text in &texts {
            let ids = tokenizer.encode_plain(text).unwrap();
            prop_assert_eq!(&tokenizer.decode(&ids).unwrap(), text);
        }
    }

    #[test]
    fn a_damaged_file_is_an_error_or_a_tokenizer(
        (name, file) in proptest::sample::select(FILES.as_slice()),
        cut in proptest::option::weighted(0.2, any::<Index>()),
        edits in proptest::collection::vec((any::<Index>(), edit()), 1..6),
    ) {
        let dir = tempfile::tempdir().unwrap();
        for other in ["tokenizer.model", "tokenizer.json", "tokenizer_config.json"] {
            // a tokenizer.json would win over the tokenizer.model
            let hides = file == "tokenizer.model" && other == "tokenizer.json";
            let source = pack(name).join(other);
            if source.exists() && !hides {
                std::fs::copy(source, dir.path().join(other)).unwrap();
            }
        }
        let mut bytes = std::fs::read(pack(name).join(file)).unwrap();
        for (at, edit) in edits {
            let at = at.index(bytes.len());
            match edit {
                Edit::Set(byte) => bytes[at] = byte,
                Edit::Insert(byte) => bytes.insert(at, byte),
                Edit::Remove(count) => { bytes.drain(at..(at + count).min(bytes.len())); }
                Edit::Repeat(count) => {
                    let copy = bytes[at..(at + count).min(bytes.len())].to_vec();
                    bytes.splice(at..at, copy);
                }
            }
            if bytes.is_empty() {
                break;
            }
        }
        if let Some(cut) = cut.filter(|_| !bytes.is_empty()) {
            bytes.truncate(cut.index(bytes.len()));
        }
        std::fs::write(dir.path().join(file), &bytes).unwrap();
        match Tokenizer::load(dir.path()) {
            Err(error) => {
                let unread = matches!(error, TokenizerError::Read { .. });
                prop_assert!(!unread, "{}", error);
            }
            Ok(tokenizer) => {
                for text in TEXTS {
                    if let Ok(ids) = tokenizer.encode(text) {
                        let _text = tokenizer.decode(&ids);
                    }
                    let _ids = tokenizer.encode_plain(text);
                }
            }
        }
    }
}

const FILES: [(&str, &str); 7] = [
    ("glm-4v-9b", "tokenizer.model"),
    ("glm-4v-9b", "tokenizer_config.json"),
    ("cogvlm-chat-hf", "tokenizer.model"),
    ("cogvlm-chat-hf", "tokenizer.json"),
    ("cogvlm-chat-hf", "tokenizer_config.json"),
    ("glm-4.1v-9b-thinking", "tokenizer.json"),
    ("minicpm-v-2_6", "tokenizer.json"),
];

#[derive(Clone, Copy, Debug)]
enum Edit {
    Set(u8),
    Insert(u8),
    Remove(usize),
    Repeat(usize),
}

fn edit() -> impl Strategy<Value = Edit> {
    // bytes that mean something in one of the forms
    let byte = prop_oneof![
        any::<u8>(),
        proptest::sample::select(b"\"{}[]:,0129 \n=\x08\x0a\xff\x80".as_slice())
    ];
    prop_oneof![
        byte.clone().prop_map(Edit::Set),
        byte.prop_map(Edit::Insert),
        (1usize..40).prop_map(Edit::Remove),
        (1usize..40).prop_map(Edit::Repeat),
    ]
}

/// Texts of any characters, with those in front that tokenizers treat differently.
fn text() -> impl Strategy<Value = String> {
    let special = proptest::sample::select(
        [
            " ", "  ", "\n", "\r\n", "\t", "0", "17", "the", "The ", "is", "'s", "图片", "🙂",
            "\u{2581}", "\u{a0}", "\u{3000}", "<s>", "é",
        ]
        .as_slice(),
    );
    let part = prop_oneof![
        3 => special.prop_map(str::to_owned),
        1 => "[a-z ]{1,12}",
        1 => "\\PC{1,4}",
        1 => any::<char>().prop_map(String::from),
    ];
    proptest::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}
