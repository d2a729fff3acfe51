use super::*;
use proptest::prelude::*;

/// A model file under construction.
struct File {
    pieces: Vec<(String, f32, u64)>,
    trainer: Vec<u8>,
    normalizer: Vec<u8>,
}

const NORMAL: u64 = 1;
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const BYTE: u64 = 6;

/// Protobuf field `number` with an integer below 128.
fn small(number: u8, value: u8) -> Vec<u8> {
    let mut out = tag(number, 0);
    out.push(value);
    out
}

fn tag(number: u8, wire: u8) -> Vec<u8> {
    let tag = (u16::from(number) << 3) | u16::from(wire);
    if tag < 128 {
        vec![tag as u8]
    } else {
        vec![tag as u8 | 0x80, (tag >> 7) as u8]
    }
}

fn message(number: u8, content: &[u8]) -> Vec<u8> {
    let mut out = tag(number, 2);
    assert!(content.len() < 1 << 14);
    out.extend([content.len() as u8 | 0x80, (content.len() >> 7) as u8]);
    out.extend(content);
    out
}

impl File {
    /// A model with the special pieces, all bytes, and then `normal` with decreasing scores.
    fn new(normal: &[&str]) -> Self {
        let mut pieces = vec![("<unk>".to_owned(), 0.0, UNKNOWN)];
        pieces.extend(["<s>", "</s>"].map(|text| (text.to_owned(), 0.0, CONTROL)));
        pieces.extend((0..=u8::MAX).map(|byte| (format!("<0x{byte:02X}>"), 0.0, BYTE)));
        let normal = normal.iter().zip(0i16..);
        pieces.extend(normal.map(|(text, at)| ((*text).to_owned(), -f32::from(at), NORMAL)));
        Self {
            pieces,
            trainer: [small(3, 2), small(35, 1)].concat(),
            normalizer: [small(3, 1), small(4, 0)].concat(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (text, score, kind) in &self.pieces {
            let mut piece = message(1, text.as_bytes());
            piece.extend(tag(2, 5));
            piece.extend(score.to_le_bytes());
            piece.extend(small(3, *kind as u8));
            out.extend(message(1, &piece));
        }
        out.extend(message(2, &self.trainer));
        out.extend(message(3, &self.normalizer));
        out
    }

    fn error(&self) -> SentencePieceError {
        build(&self.bytes()).unwrap_err()
    }
}

fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    tokenizer.encode(text, false).unwrap().get_tokens().to_vec()
}

const ABC: [&str; 7] = ["ab", "▁ab", "abc", "▁", "a", "b", "c"];

#[test]
fn scores_decide_and_a_blank_is_prepended() {
    let built = build(&File::new(&ABC).bytes()).unwrap();
    assert_eq!(tokens(&built.tokenizer, "abc ab"), ["▁ab", "c", "▁ab"]);
    assert_eq!(
        tokens(&built.tokenizer, "  babc"),
        ["▁", "▁", "▁", "b", "abc"]
    );
    assert_eq!(tokens(&built.tokenizer, ""), [""; 0]);
    assert_eq!(
        tokens(&built.tokenizer, "aé<s>"),
        ["▁", "a", "<0xC3>", "<0xA9>", "<s>"]
    );
    let roles = [
        ("unk_token", "<unk>"),
        ("bos_token", "<s>"),
        ("eos_token", "</s>"),
    ];
    assert_eq!(
        built.named,
        roles.map(|(role, text)| (role, text.to_owned()))
    );
}

#[test]
fn the_dummy_prefix_is_a_setting_and_decoding_takes_it_back() {
    let mut file = File::new(&ABC);
    for (prefix, expected) in [(1, vec!["▁", "▁ab"]), (0, vec!["▁ab"])] {
        file.normalizer = [small(3, prefix), small(4, 0)].concat();
        let tokenizer = build(&file.bytes()).unwrap().tokenizer;
        assert_eq!(tokens(&tokenizer, " ab"), expected);
        let encoding = tokenizer.encode(" abé", false).unwrap();
        assert_eq!(tokenizer.decode(encoding.get_ids(), true).unwrap(), " abé");
    }
}

#[test]
fn without_byte_fallback_unknown_characters_are_one_token() {
    let mut file = File::new(&ABC);
    file.pieces.retain(|piece| piece.2 != BYTE);
    file.trainer = small(3, 2);
    let tokenizer = build(&file.bytes()).unwrap().tokenizer;
    assert_eq!(tokens(&tokenizer, "aéüb"), ["▁", "a", "<unk>", "b"]);
}

#[test]
fn unsupported_sentencepiece_settings_are_refused() {
    let trainer = |content: Vec<u8>| File {
        trainer: content,
        ..File::new(&ABC)
    };
    let normalizer = |content: Vec<u8>| File {
        normalizer: content,
        ..File::new(&ABC)
    };
    let kind = |kind: u64| {
        let mut file = File::new(&ABC);
        file.pieces.last_mut().unwrap().2 = kind;
        file
    };
    for (file, part) in [
        (trainer(small(35, 1)), "byte-pair"),
        (trainer([small(3, 1), small(35, 1)].concat()), "byte-pair"),
        (
            trainer([small(3, 2), small(24, 1), small(35, 1)].concat()),
            "suffix",
        ),
        (normalizer(small(3, 1)), "extra blanks"),
        (normalizer([small(4, 0), small(5, 0)].concat()), "escaped"),
        (
            normalizer([small(4, 0), message(2, b"map")].concat()),
            "identity",
        ),
        (
            normalizer([small(4, 0), message(6, b"a\tb")].concat()),
            "identity",
        ),
        (kind(4), "user-defined"),
        (kind(5), "unused"),
        (kind(7), "does not have"),
    ] {
        let error = file.error();
        assert!(matches!(error, SentencePieceError::Unsupported { .. }));
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn pieces_that_form_no_vocabulary_are_refused() {
    let with = |change: &dyn Fn(&mut Vec<(String, f32, u64)>)| {
        let mut file = File::new(&ABC);
        change(&mut file.pieces);
        file.error()
    };
    type E = SentencePieceError;
    assert!(matches!(with(&|p| p.clear()), E::Empty));
    assert!(matches!(
        with(&|p| p[270 - 5].0 = "ab".to_owned()),
        E::Repeated { second: 265, .. }
    ));
    assert!(matches!(
        with(&|p| p[259].0.clear()),
        E::Length { id: 259, bytes: 0 }
    ));
    assert!(matches!(
        with(&|p| p[259].0 = "x".repeat(513)),
        E::Length { .. }
    ));
    assert!(matches!(
        with(&|p| p[260].1 = f32::NAN),
        E::Score { id: 260 }
    ));
    assert!(matches!(with(&|p| p[260].1 = 0.0), E::Tie { .. }));
    assert!(
        matches!(with(&|p| { p.pop(); }), E::MissingCharacter { character, .. } if character == "c")
    );
    assert!(matches!(
        with(&|p| p[5].0 = "other".to_owned()),
        E::Bytes {
            found: 255,
            expected: 256
        }
    ));
    assert!(matches!(
        with(&|p| p[0].2 = CONTROL),
        E::Unknown { found: 0 }
    ));
    assert!(matches!(
        with(&|p| p[1].2 = UNKNOWN),
        E::Unknown { found: 2 }
    ));
    let mut file = File::new(&ABC);
    file.trainer = small(3, 2);
    assert!(matches!(file.error(), E::Bytes { expected: 0, .. }));
}

#[test]
fn malformed_sentencepiece_files_are_refused() {
    type E = SentencePieceError;
    let cut = File::new(&ABC).bytes();
    assert!(matches!(
        build(&cut[..cut.len() - 1]),
        Err(E::Wire(WireError::Truncated { .. }))
    ));
    assert!(matches!(
        build(&small(1, 1)),
        Err(E::Field {
            message: "model",
            number: 1
        })
    ));
    assert!(matches!(
        build(&message(1, &small(2, 1))),
        Err(E::Field {
            message: "piece",
            ..
        })
    ));
    assert!(matches!(
        build(&message(1, &message(1, b"\xff"))),
        Err(E::Utf8 { .. })
    ));
    assert!(matches!(build(b""), Err(E::Unsupported { .. })));
}

proptest! {
    /// The result equals the definition: merge the adjacent pair with the best score, leftmost among equals.
    #[test]
    fn encoding_merges_by_score(
        longer in proptest::collection::hash_set("[ab▁]{2,4}", 0..12),
        texts in proptest::collection::vec("[ab ]{1,16}", 4),
    ) {
        let normal: Vec<&str> = longer.iter().map(String::as_str).chain(["▁", "a", "b"]).collect();
        let tokenizer = build(&File::new(&normal).bytes()).unwrap().tokenizer;
        for text in texts {
            let mut parts: Vec<String> = format!("▁{text}").replace(' ', "▁").chars().map(String::from).collect();
            while let Some((_, left)) = (1..parts.len())
                .filter_map(|i| {
                    let pair = format!("{}{}", parts[i - 1], parts[i]);
                    Some((normal.iter().position(|piece| *piece == pair)?, i - 1))
                })
                .min()
            {
                let right = parts.remove(left + 1);
                parts[left].push_str(&right);
            }
            prop_assert_eq!(tokens(&tokenizer, &text), parts);
        }
    }
}
