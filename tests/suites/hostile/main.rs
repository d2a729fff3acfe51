//! Adversarial input of every kind that the program reads. It must cause no panic, and memory must stay within the
//! bound for the input's length. The fuzzers of `fuzz/` do the same for longer; their corpus provides the inputs here.

#[path = "../../../fuzz/src/memory.rs"]
#[allow(unreachable_pub, reason = "public to the fuzzers")]
mod memory;
#[path = "../../../fuzz/src/targets.rs"]
#[allow(unreachable_pub, reason = "public to the fuzzers")]
mod targets;

use proptest::prelude::*;
use proptest::sample::Index;
use std::path::Path;
use std::sync::OnceLock;
use targets::{TARGETS, Target, target};

#[global_allocator]
static COUNTING: memory::Counting = memory::Counting;

/// The files of a target's corpus, by name.
fn corpus(name: &str) -> Vec<(String, Vec<u8>)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../fuzz/corpus")
        .join(name);
    let files = std::fs::read_dir(&directory).expect("a corpus");
    let mut files: Vec<_> = files
        .map(|file| {
            let path = file.expect("a file").path();
            let name = path
                .file_name()
                .expect("a name")
                .to_string_lossy()
                .into_owned();
            (name, std::fs::read(&path).expect("its content"))
        })
        .collect();
    files.sort();
    files
}

/// The corpora of all targets, in their order.
fn corpora() -> &'static [Vec<(String, Vec<u8>)>] {
    static CORPORA: OnceLock<Vec<Vec<(String, Vec<u8>)>>> = OnceLock::new();
    CORPORA.get_or_init(|| TARGETS.iter().map(|target| corpus(target.name)).collect())
}

/// The plan of a run counts these bytes for each image.
#[test]
fn decoding_stays_within_the_bytes_that_the_header_states() {
    use image::{DynamicImage, ImageFormat};
    let noise = image::RgbImage::from_fn(1100, 700, |x, y| {
        let mixed = x.wrapping_mul(2_654_435_761) ^ y.wrapping_mul(40_503);
        let mixed = mixed.wrapping_mul(2_246_822_519);
        image::Rgb([(mixed >> 24) as u8, (mixed >> 16) as u8, x as u8])
    });
    let color = DynamicImage::ImageRgb8(noise);
    let images = [
        color.to_luma8().into(),
        color.to_rgba8().into(),
        color.to_luma16().into(),
        color.to_rgba16().into(),
        color,
    ];
    for image in &images {
        for format in [
            ImageFormat::Png,
            ImageFormat::Jpeg,
            ImageFormat::WebP,
            ImageFormat::Bmp,
            ImageFormat::Tiff,
        ] {
            let mut file = std::io::Cursor::new(Vec::new());
            // Not every format stores every kind of pixel.
            if image.write_to(&mut file, format).is_err() {
                continue;
            }
            let bytes = file.into_inner();
            let header = models::fuzzing::header(&bytes).expect("a header");
            let (decoded, peak) = memory::peak(|| {
                let bytes = bytes.clone();
                models::fuzzing::image(&bytes)
            });
            let (most, kind) = (header.decode_bytes(false), image.color());
            assert_eq!(decoded.expect("an image").width(), 1100);
            assert!(
                peak as u64 <= most,
                "{format:?} {kind:?}: {peak} of {most} bytes"
            );
            // An estimate far above the need would refuse runs that fit.
            assert!(
                peak as u64 > most / 3,
                "{format:?} {kind:?}: {peak} of {most} bytes"
            );
        }
    }
}

#[test]
fn every_file_of_the_corpus_is_read_or_refused_within_its_memory() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    assert_eq!(
        std::fs::read_dir(directory).expect("corpora").count(),
        TARGETS.len()
    );
    for (target, files) in TARGETS.iter().zip(corpora()) {
        let accepted: Vec<&str> = files
            .iter()
            .filter(|(name, bytes)| {
                std::panic::catch_unwind(|| target.check(bytes))
                    .unwrap_or_else(|_| panic!("{}/{name}", target.name))
            })
            .map(|(name, _)| name.as_str())
            .collect();
        // Without an accepted input, mutations would reach the first check only.
        assert!(!accepted.is_empty(), "{}: nothing is accepted", target.name);
        for valid in files
            .iter()
            .map(|(name, _)| name)
            .filter(|name| name.starts_with("valid"))
        {
            assert!(
                accepted.contains(&valid.as_str()),
                "{}/{valid}",
                target.name
            );
        }
        for bad in ["bomb", "deep", "nothing", "cut", "not-text"] {
            let bad = accepted.iter().find(|name| name.starts_with(bad));
            assert_eq!(bad, None, "{}", target.name);
        }
    }
}

/// Inputs with the most memory for their length, or the deepest stack.
#[test]
fn adversarial_inputs_take_bounded_memory_and_stack() {
    let repeated = |before: &str, part: &str, times: usize, after: &str| {
        [before, &part.repeat(times), after].concat().into_bytes()
    };
    let with_length =
        |header: Vec<u8>| [&(header.len() as u64).to_le_bytes(), &header[..]].concat();
    const MANY: usize = 60_000;
    let in_meta = |part: &str, end: &str| {
        let manifest = String::from_utf8(
            corpora()[2]
                .iter()
                .find(|(name, _)| name == "valid")
                .expect("valid")
                .1
                .clone(),
        );
        let part = format!("\"seed\": [{}{end}]", part.repeat(MANY));
        manifest
            .expect("text")
            .replace("\"seed\": 1", &part)
            .into_bytes()
    };
    let inputs: Vec<(&str, Vec<u8>)> = vec![
        ("weights", with_length(repeated("", "[", MANY, ""))),
        (
            "weights",
            with_length(repeated(
                "{\"a\":{\"dtype\":\"U8\",\"shape\":[",
                "0,",
                MANY,
                "0],\"data_offsets\":[0,0]}}",
            )),
        ),
        ("weights", {
            let tensors: Vec<String> = (0..5000)
                .map(|i| {
                    format!("\"{i}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}")
                })
                .collect();
            with_length(format!("{{{}}}", tensors.join(",")).into_bytes())
        }),
        ("weights", {
            let texts: Vec<String> = (0..20_000).map(|i| format!("\"{i}\":\"\"")).collect();
            with_length(format!("{{\"__metadata__\":{{{}}}}}", texts.join(",")).into_bytes())
        }),
        ("manifest", in_meta("[", "")),
        ("manifest", in_meta("0,", "0")),
        ("manifest", in_meta("[0],", "0")),
        ("manifest", in_meta("{\"\":0},", "0")),
        ("config", repeated("{\"a\": ", "[", MANY, "")),
        ("config", repeated("a: ", "[", MANY, "")),
        ("config", repeated("", "- ", MANY, "")),
        ("config", repeated("a = ", "[", MANY, "")),
        ("config", repeated("a = ", "{a=", MANY, "")),
        ("config", repeated("a", ".a", MANY, " = 1")),
        ("config", repeated("[a", ".a", MANY, "]\nb = 1")),
        ("config", repeated("{\"a\": [", "0,", MANY, "]}")),
        ("config", repeated("{\"a\": [", "[0],", MANY, "]}")),
        ("config", repeated("a: [", "0,", MANY, "]")),
        ("config", repeated("a = [", "[0],", MANY, "]")),
        (
            "config",
            (0..4000)
                .map(|i| format!("k{i}: 1\n"))
                .collect::<String>()
                .into_bytes(),
        ),
        (
            "config",
            (0..4000)
                .map(|i| format!("k{i} = 1\n"))
                .collect::<String>()
                .into_bytes(),
        ),
        (
            "config",
            (0..8000)
                .map(|i| format!("[k{i}]\n"))
                .collect::<String>()
                .into_bytes(),
        ),
        (
            "hostfile",
            (0..50_000)
                .map(|i| format!("h{i} slots=4096\n"))
                .collect::<String>()
                .into_bytes(),
        ),
        (
            "hostfile",
            (0..50_000)
                .map(|i| format!("h{i}\n"))
                .collect::<String>()
                .into_bytes(),
        ),
        ("hostfile", repeated("", "#", MANY, "")),
        ("frames", u32::MAX.to_le_bytes().to_vec()),
        ("frames", (1u32 << 20).to_le_bytes().to_vec()),
        (
            "tokenizer",
            repeated(
                "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]},\"post_processor\":[",
                "[0],",
                MANY,
                "0]}",
            ),
        ),
        (
            "tokenizer",
            repeated(
                "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[],\"junk\":[",
                "[0],",
                MANY,
                "0]}}",
            ),
        ),
        (
            "tokenizer",
            repeated(
                "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]},\"normalizer\":[",
                "[0],",
                MANY,
                "0]}",
            ),
        ),
        (
            "tokenizer",
            repeated(
                "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]},\"normalizer\":",
                "[",
                MANY,
                "",
            ),
        ),
        ("tokenizer", {
            let vocab: Vec<String> = (0..20_000).map(|i| format!("\"{i}\":{i}")).collect();
            format!(
                "{{\"model\":{{\"type\":\"BPE\",\"vocab\":{{{}}},\"merges\":[]}}}}",
                vocab.join(",")
            )
            .into_bytes()
        }),
        ("tokenizer", {
            let added: Vec<String> = (0..20_000)
                .map(|i| format!("\"{}\":{{\"content\":\"x{i}\"}}", i + 3))
                .collect();
            format!("{{\"added_tokens_decoder\":{{{}}}}}", added.join(",")).into_bytes()
        }),
    ];
    for (name, bytes) in inputs {
        let target = target(name).expect("a target");
        let _accepted = target.check(&bytes);
    }
}

/// One mutation of an input.
#[derive(Clone, Debug)]
enum Edit {
    Set(Index, u8),
    Cut(Index),
    Drop(Index, usize),
    Insert(Index, Vec<u8>),
    /// Repeats a range, so many times.
    Repeat(Index, usize, usize),
    /// Inserts a range of another input.
    Splice(Index, Index, Index, usize),
    /// Overwrites four bytes with a number.
    Number(Index, u32),
}

fn edit() -> impl Strategy<Value = Edit> {
    let words = prop::sample::select(vec![
        "[",
        "{",
        "\"",
        "}",
        "]",
        ",",
        ":",
        "0",
        "-1",
        "1e999",
        "18446744073709551615",
        "null",
        "\\u0000",
        "é",
        "\n",
        "\r",
        "\0",
        "slots=4096",
        "..",
        "/",
        "#",
        "&a",
        "*a",
        "!!x",
        "---",
        "=",
        "\"\"",
    ]);
    let bytes = prop_oneof![
        words.prop_map(|word| word.as_bytes().to_vec()),
        prop::collection::vec(any::<u8>(), 1..9),
    ];
    let number = prop_oneof![any::<u32>(), Just(u32::MAX), Just(1 << 31), 0u32..100];
    let at = any::<Index>;
    prop_oneof![
        4 => (at(), any::<u8>()).prop_map(|(at, byte)| Edit::Set(at, byte)),
        1 => at().prop_map(Edit::Cut),
        2 => (at(), 1usize..40).prop_map(|(at, len)| Edit::Drop(at, len)),
        3 => (at(), bytes).prop_map(|(at, bytes)| Edit::Insert(at, bytes)),
        1 => (at(), 1usize..40, 1usize..300).prop_map(|(at, len, times)| Edit::Repeat(at, len, times)),
        2 => (at(), at(), at(), 1usize..200).prop_map(|(at, file, from, len)| Edit::Splice(at, file, from, len)),
        2 => (at(), number).prop_map(|(at, number)| Edit::Number(at, number)),
    ]
}

impl Edit {
    fn apply(&self, bytes: &mut Vec<u8>, others: &[(String, Vec<u8>)]) {
        let place = |at: &Index| at.index(bytes.len() + 1);
        match self {
            Self::Set(at, byte) => {
                let at = place(at);
                if let Some(old) = bytes.get_mut(at) {
                    *old = *byte;
                }
            }
            Self::Cut(at) => bytes.truncate(place(at)),
            Self::Drop(at, len) => {
                let start = place(at);
                let end = (start + len).min(bytes.len());
                bytes.drain(start..end);
            }
            Self::Insert(at, new) => {
                let at = place(at);
                bytes.splice(at..at, new.iter().copied());
            }
            Self::Repeat(at, len, times) => {
                let start = place(at);
                let part = bytes[start..(start + len).min(bytes.len())].repeat(*times);
                bytes.splice(start..start, part);
            }
            Self::Splice(at, file, from, len) => {
                let (_, other) = &others[file.index(others.len())];
                let from = from.index(other.len() + 1);
                let part = other[from..(from + len).min(other.len())].to_vec();
                let at = place(at);
                bytes.splice(at..at, part);
            }
            Self::Number(at, number) => {
                let at = place(at);
                let bytes_of = number.to_le_bytes();
                for (old, new) in bytes[at..].iter_mut().zip(bytes_of) {
                    *old = new;
                }
            }
        }
    }
}

fn survives(target: &Target, files: &[(String, Vec<u8>)], which: Index, edits: &[Edit]) {
    let mut bytes = files[which.index(files.len())].1.clone();
    edits.iter().for_each(|edit| edit.apply(&mut bytes, files));
    let _accepted = target.check(&bytes);
}

macro_rules! twins {
    ($($name:ident: $index:literal,)*) => {
        proptest! {
            #![proptest_config(ProptestConfig::with_cases(1500))]
            $(
                #[test]
                fn $name(
                    which in any::<Index>(),
                    edits in prop::collection::vec(edit(), 1..8),
                    noise in prop::collection::vec(any::<u8>(), 0..300),
                ) {
                    let target = &TARGETS[$index];
                    survives(target, &corpora()[$index], which, &edits);
                    let _accepted = target.check(&noise);
                }
            )*
        }
    };
}

twins! {
    damaged_weights_are_read_or_refused: 0,
    damaged_torch_files_are_read_or_refused: 1,
    damaged_manifests_are_read_or_refused: 2,
    damaged_configurations_are_read_or_refused: 3,
    damaged_hostfiles_are_read_or_refused: 4,
    damaged_frames_are_read_or_refused: 5,
    damaged_tokenizers_are_read_or_refused: 6,
    damaged_images_are_read_or_refused: 7,
}
