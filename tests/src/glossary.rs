//! Tests of the words: the project uses the field's terms, and old names of its own do not come back.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A term, what the project called it once, and who may still say so.
struct Row {
    /// The word in use, with its source.
    term: &'static str,
    /// Words that no identifier has among its parts (`spill_folder` has `spill` and `folder`), in lower case.
    parts: &'static [&'static str],
    /// Identifiers that are gone. One with an underscore is gone inside others too: `early_step` in `with_early_step`.
    identifiers: &'static [&'static str],
    /// Phrases that no comment has, in lower case.
    phrases: &'static [&'static str],
    /// Identifiers that keep a word: names of other libraries, and of file formats.
    keep: &'static [&'static str],
}

const NONE: &[&str] = &[];

const GLOSSARY: &[Row] = &[
    Row {
        term: "dry run",
        parts: &["rehearsal", "rehearse", "rehearsed"],
        identifiers: NONE,
        phrases: &["rehears", "without bytes"],
        keep: NONE,
    },
    Row {
        term: "meta device (PyTorch)",
        parts: NONE,
        identifiers: &["NullBackend"],
        phrases: &["null device", "counting device", "device that only counts"],
        keep: NONE,
    },
    Row {
        term: "discrete device, host addressable (CUDA, HSA)",
        parts: NONE,
        identifiers: &["is_apart", "DevicesApart"],
        phrases: &["device apart", "devices apart", "gpu apart"],
        keep: NONE,
    },
    Row {
        term: "optimizer in backward (torchtune), optimizer in forward",
        parts: NONE,
        identifiers: &[
            "EarlyStep",
            "EarlyRun",
            "EarlyUpdate",
            "LateStep",
            "LateRun",
            "LateUpdate",
            "early_step",
            "late_step",
            "steps_early",
            "steps_late",
            "early_share",
        ],
        phrases: &["early step", "late step"],
        keep: NONE,
    },
    Row {
        term: "memory plan, allocation (TVM, XLA)",
        parts: NONE,
        identifiers: &["Script"],
        phrases: NONE,
        keep: NONE,
    },
    Row {
        term: "checkpointed segment, recompute (Chen et al. 2016, PyTorch)",
        parts: NONE,
        identifiers: &[
            "ReplayDiffers",
            "with_replay_check",
            "Segment",
            "SegmentPool",
        ],
        phrases: NONE,
        keep: NONE,
    },
    Row {
        term: "event (CUDA); \"moment\" is Adam's",
        parts: NONE,
        identifiers: &["Moment"],
        phrases: &["a moment behind"],
        keep: NONE,
    },
    Row {
        term: "borrowed, returned",
        parts: &["lent"],
        identifiers: &["given_back"],
        phrases: NONE,
        keep: NONE,
    },
    Row {
        term: "chunk of a region or a parameter",
        parts: NONE,
        identifiers: &[
            "StateWindow",
            "WeightWindow",
            "GradWindow",
            "for_each_window",
        ],
        phrases: NONE,
        keep: NONE,
    },
    Row {
        term: "prefetch (FSDP), reserved upload",
        parts: &["arrivals"],
        identifiers: &[
            "Ahead",
            "Arrival",
            "UploadAhead",
            "upload_ahead",
            "uploads_ahead",
        ],
        phrases: NONE,
        keep: NONE,
    },
    Row {
        term: "rendezvous (torchrun)",
        parts: &["meeting"],
        identifiers: NONE,
        phrases: &["the meeting"],
        keep: NONE,
    },
    Row {
        term: "subcommand (clap)",
        parts: &["verb", "verbs"],
        identifiers: NONE,
        phrases: &[" verb ", " verbs "],
        keep: NONE,
    },
    Row {
        term: "directory (POSIX)",
        parts: &["folder", "folders", "subfolder", "subfolders"],
        identifiers: NONE,
        phrases: &["folder"],
        // torchvision's name of the layout.
        keep: &["ImageFolder", "image_folder"],
    },
    Row {
        term: "image (HF)",
        parts: &["picture", "pictures"],
        identifiers: NONE,
        phrases: &["picture"],
        keep: NONE,
    },
    Row {
        term: "disk check, memory check, suggestion, step context",
        parts: &["advice"],
        identifiers: &["Room", "check_room"],
        phrases: NONE,
        // rustix's and memmap2's names for madvise.
        keep: &["Advice", "UncheckedAdvice"],
    },
    Row {
        term: "grouped, per expert (CUTLASS)",
        parts: &["routed"],
        identifiers: NONE,
        phrases: &["routed"],
        keep: NONE,
    },
    Row {
        term: "commands of a queue (Vulkan, CUDA graphs)",
        parts: NONE,
        identifiers: &["works"],
        phrases: NONE,
        keep: NONE,
    },
    Row {
        term: "trainable, supervised (HF)",
        parts: &["learnt"],
        identifiers: NONE,
        phrases: &["learnt"],
        keep: NONE,
    },
    Row {
        term: "worker, gradient accumulator",
        parts: &["handover"],
        identifiers: &["Sums"],
        phrases: &["handover"],
        keep: NONE,
    },
];

/// Types that had one name for several things. Each has one owner: a path that declares it, or nobody.
const OWNERS: &[(&str, &[&str])] = &[
    ("Place", &[]),
    (
        "Window",
        &["engine/src/comm/window.rs", "tests/loom/src/collectives.rs"],
    ),
    (
        "Phase",
        &[
            "engine/src/plan/schedule.rs",
            "launcher/src/memory/phase.rs",
        ],
    ),
    ("Segment", &[]),
    ("Job", &["launcher/src/launch/supervisor/job.rs"]),
    ("Moment", &[]),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every Rust source of the workspace, relative to its root. This file has to name the old words.
fn sources() -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut open = vec![PathBuf::new()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(root().join(&directory)).expect("a directory of the repository") {
            let entry = entry.expect("an entry");
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = directory.join(&name);
            if entry.file_type().expect("a type").is_dir() {
                if name != "target" && !name.starts_with('.') {
                    open.push(path);
                }
            } else if name.ends_with(".rs") && path != Path::new("tests/src/glossary.rs") {
                found.insert(path);
            }
        }
    }
    found
}

/// The code of a line without the contents of its strings, and its comment. Raw strings of several lines are taken for code
/// from their second line on.
fn split(line: &str) -> (String, &str) {
    let (mut code, mut chars, mut quoted) = (String::new(), line.char_indices().peekable(), false);
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' if quoted => drop(chars.next()),
            '"' if line[..at].ends_with('\'') && line[at + 1..].starts_with('\'') => {}
            '"' => quoted = !quoted,
            '/' if !quoted && line[at..].starts_with("//") => return (code, &line[at..]),
            _ if !quoted => code.push(c),
            _ => {}
        }
    }
    (code, "")
}

fn identifiers(code: &str) -> impl Iterator<Item = &str> {
    let parts = code.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    parts.filter(|part| part.starts_with(|c: char| c.is_alphabetic() || c == '_'))
}

/// The words of an identifier in lower case: `spill_folder`, `SpillFolder` and `SPILL_FOLDER` have `spill` and `folder`.
fn words(identifier: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut before = '_';
    for c in identifier.chars() {
        if c == '_' || c.is_uppercase() && before.is_lowercase() {
            words.push(String::new());
        }
        if c != '_' {
            let word = words.last_mut().expect("at least one word");
            word.extend(c.to_lowercase());
        }
        before = c;
    }
    words
}

#[test]
fn old_names_of_the_project_do_not_come_back() {
    let mut found = Vec::new();
    for path in sources() {
        let text = fs::read_to_string(root().join(&path)).expect("a source");
        for (number, line) in text.lines().enumerate() {
            let (code, comment) = split(line);
            let comment = comment.to_lowercase().replace("imagefolder", "");
            for row in GLOSSARY {
                for name in identifiers(&code).filter(|name| !row.keep.contains(name)) {
                    let has = |part: &&str| words(name).iter().any(|word| word == part);
                    let old =
                        |gone: &&str| name == *gone || gone.contains('_') && name.contains(gone);
                    if row.identifiers.iter().any(old) || row.parts.iter().any(has) {
                        found.push(format!(
                            "{}:{}: {name}: {}",
                            path.display(),
                            number + 1,
                            row.term
                        ));
                    }
                }
                for phrase in row
                    .phrases
                    .iter()
                    .filter(|phrase| comment.contains(**phrase))
                {
                    found.push(format!(
                        "{}:{}: \"{phrase}\": {}",
                        path.display(),
                        number + 1,
                        row.term
                    ));
                }
            }
        }
    }
    assert!(
        found.is_empty(),
        "{} old names:\n{}",
        found.len(),
        found.join("\n")
    );
}

#[test]
fn a_type_name_with_many_meanings_has_one_owner() {
    for path in sources() {
        let text = fs::read_to_string(root().join(&path)).expect("a source");
        for line in text.lines() {
            let (code, _) = split(line);
            let names: Vec<&str> = identifiers(&code).collect();
            for pair in names.windows(2) {
                let [kind, name] = pair else { continue };
                if !matches!(*kind, "struct" | "enum" | "type" | "trait" | "union") {
                    continue;
                }
                for (owned, owners) in OWNERS {
                    let allowed = owners.iter().any(|owner| path == Path::new(owner));
                    assert!(
                        name != owned || allowed,
                        "{} declares {name}",
                        path.display()
                    );
                }
            }
        }
    }
}

#[test]
fn identifiers_are_split_at_underscores_and_capitals() {
    for name in ["spill_folder", "SpillFolder", "SPILL_FOLDER"] {
        let words: Vec<String> = words(name)
            .into_iter()
            .filter(|word| !word.is_empty())
            .collect();
        assert_eq!(words, ["spill", "folder"], "{name}");
    }
    let (code, comment) = split(r#"let a = "folder // \" b"; // a note"#);
    assert_eq!((code.as_str(), comment), ("let a = ; ", "// a note"));
}
