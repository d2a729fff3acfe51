use super::*;
use serde_json::{Value, json};

fn model(merges: &Value) -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{
            "id": 4, "content": "<end>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true
        }],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {
            "type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<unk>": 3}, "merges": merges
        }
    })
}

fn load(tokenizer: &str, config: &str) -> Result<Tokenizer, TokenizerError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    Tokenizer::load(dir.path())
}

#[test]
fn merges_may_be_strings_or_pairs() {
    for merges in [json!(["a b"]), json!([["a", "b"]])] {
        let tokenizer = load(&model(&merges).to_string(), "{}").unwrap();
        assert_eq!(tokenizer.encode("abb").unwrap(), [2, 1]);
    }
}

#[test]
fn tokens_of_the_config_are_added_and_found_by_text() {
    let config = json!({
        "added_tokens_decoder": {
            "3": {"content": "<unk>", "special": true},
            "4": {"content": "<end>", "special": true},
            "5": {"content": "<new>", "special": true}
        },
        "eos_token": {"content": "<end>"}
    });
    let tokenizer = load(&model(&json!([])).to_string(), &config.to_string()).unwrap();
    assert_eq!(
        tokenizer.encode("a<new><unk>b<end>").unwrap(),
        [0, 5, 3, 1, 4]
    );
    assert_eq!(tokenizer.decode(&[0, 5, 1]).unwrap().replace(' ', ""), "ab");
    assert_eq!(tokenizer.eos_id().unwrap(), 4);
    let missing = tokenizer.id("<image>").unwrap_err();
    assert!(matches!(missing, TokenizerError::MissingToken { token } if token == "<image>"));
}

#[test]
fn tokenizer_files_that_disagree_are_an_error() {
    let config = json!({"added_tokens_decoder": {"3": {"content": "<end>"}}}).to_string();
    let error = load(&model(&json!([])).to_string(), &config).unwrap_err();
    assert!(matches!(
        error,
        TokenizerError::IdMismatch {
            stated: 3,
            found: 4,
            ..
        }
    ));
}

#[test]
fn hostile_tokenizer_files_are_errors_not_panics() {
    let valid = model(&json!([])).to_string();
    for tokenizer in ["", "{", "[]", "{\"model\": 3}", &valid[..valid.len() / 2]] {
        assert!(matches!(
            load(tokenizer, "{}"),
            Err(TokenizerError::Invalid { .. })
        ));
    }
    let unknown_parts = model(&json!(["x y"])).to_string();
    assert!(matches!(
        load(&unknown_parts, "{}"),
        Err(TokenizerError::Invalid { .. })
    ));
    for config in [
        "[",
        "{\"eos_token\": 3}",
        "{\"added_tokens_decoder\": {\"x\": {}}}",
    ] {
        assert!(matches!(
            load(&valid, config),
            Err(TokenizerError::Invalid { .. })
        ));
    }
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(
        Tokenizer::load(dir.path()),
        Err(TokenizerError::NoVocabulary { .. })
    ));
}

#[test]
fn negative_ids_do_not_decode() {
    let tokenizer = load(&model(&json!([])).to_string(), "{}").unwrap();
    assert!(matches!(
        tokenizer.decode(&[-100]),
        Err(TokenizerError::Decode { tokens: 1, .. })
    ));
}

#[test]
fn special_tokens_can_be_encoded_as_plain_text() {
    let mut file = model(&json!([]));
    file["model"]["vocab"] = json!({"<": 0, "e": 1, "n": 2, "d": 3, ">": 5});
    file["added_tokens"][0]["id"] = json!(6);
    file["model"]["vocab"]["x"] = json!(4);
    let tokenizer = load(&file.to_string(), "{}").unwrap();
    assert_eq!(tokenizer.encode("e<end>d").unwrap(), [1, 6, 3]);
    assert_eq!(
        tokenizer.encode_plain("e<end>d").unwrap(),
        [1, 0, 1, 2, 3, 5, 3]
    );
    assert_eq!(tokenizer.encode_plain("").unwrap(), [0; 0]);
}

#[test]
fn the_content_of_a_vocabulary_file_decides_what_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.model");
    std::fs::write(&path, "IQ== 0\n").unwrap();
    assert!(matches!(
        Tokenizer::load(dir.path()),
        Err(TokenizerError::Ranks { .. })
    ));
    for content in ["", "no vocabulary", "{}"] {
        std::fs::write(&path, content).unwrap();
        let result = Tokenizer::load(dir.path());
        assert!(matches!(result, Err(TokenizerError::SentencePiece { .. })));
    }
    std::fs::write(
        dir.path().join("tokenizer.json"),
        model(&json!([])).to_string(),
    )
    .unwrap();
    assert_eq!(Tokenizer::load(dir.path()).unwrap().vocab_size(), 5);
}

#[test]
fn a_file_that_is_too_large_or_no_file_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    // A sparse file.
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(limits::MAX_FILE_BYTES + 1).unwrap();
    let error = Tokenizer::load(dir.path()).unwrap_err();
    let TokenizerError::Read { source, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(source.kind(), std::io::ErrorKind::FileTooLarge);
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(matches!(
        Tokenizer::load(dir.path()),
        Err(TokenizerError::Read { .. })
    ));
}
