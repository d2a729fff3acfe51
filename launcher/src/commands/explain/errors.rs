//! Generator of `docs/errors.md`: exit codes and all pages, in English.

use crate::error::ErrorCode;

use crate::error::pages::{Page, page};
use crate::lang::{Both, Lang};

/// Exit codes with their names and meanings, ascending.
const EXIT_CODES: [(u8, &str, &str); 14] = [
    (0, "success", "The command succeeded."),
    (
        2,
        "usage",
        "Flags, variables or a configuration file are wrong.",
    ),
    (
        3,
        "data",
        "A data file, an image or some samples cannot be used.",
    ),
    (
        5,
        "plan",
        "The plan needs more memory than the machine has.",
    ),
    (
        9,
        "checkpoint",
        "A checkpoint cannot be used, or it has no step left.",
    ),
    (
        10,
        "model files",
        "The model directory is incomplete, damaged or not supported.",
    ),
    (11, "device memory", "Device memory ran out during the run."),
    (
        12,
        "host memory",
        "Host memory ran out, or the operating system killed a rank.",
    ),
    (
        13,
        "environment",
        "The rendezvous failed, shared memory is too small, or no GPU can be used.",
    ),
    (
        14,
        "collective",
        "A collective between ranks timed out or failed.",
    ),
    (15, "numeric", "A loss, gradient or weight is not finite."),
    (16, "disk", "The disk is full, too small or not writable."),
    (101, "crash", "A rank panicked or ended unexpectedly."),
    (
        130,
        "interrupted",
        "A signal stopped the run. The state is saved unless E21 is printed.",
    ),
];

/// Markdown text of the documentation page that lists all exit codes and error codes.
pub fn errors_page() -> String {
    let mut text = String::from(
        "# Errors\n\n\
         For users whose run ended with an error. Generated from `launcher explain` by\n\
         `cargo run -p launcher --example docs -- write`; do not edit it.\n\n\
         A failed command prints a report: error code, cause, evidence, next steps and exit code.\n\
         `launcher explain E05` shows one section with an example, `--lang zh` in Chinese.\n\n\
         ## Exit codes\n\n\
         | exit code | name | error codes | meaning |\n|---|---|---|---|\n",
    );
    for (status, name, meaning) in EXIT_CODES {
        let codes = ErrorCode::ALL.into_iter().filter(|c| c.status() == status);
        let codes: Vec<&str> = codes.map(ErrorCode::as_str).collect();
        let codes = match codes[..] {
            [] => "–".to_owned(),
            _ => codes.join(" "),
        };
        text += &format!("| {status} | {name} | {codes} | {meaning} |\n");
    }
    for code in ErrorCode::ALL {
        text += &section(code);
    }
    text
}

fn section(code: ErrorCode) -> String {
    let Page {
        title,
        meaning,
        causes,
        look_at,
        what_to_do,
        example: _,
    } = page(code);
    let mut text = format!(
        "\n## {code} {}\n\nExit {}. {}\n",
        title.get(Lang::En),
        code.status(),
        english(meaning)
    );
    for (name, items) in [("Causes", causes), ("Look at", look_at), ("Do", what_to_do)] {
        match items {
            [one] => text += &format!("\n{name}: {}\n", english(one)),
            _ => {
                text += &format!("\n{name}:\n");
                text.extend(items.iter().map(|item| format!("- {}\n", english(item))));
            }
        }
    }
    text
}

/// English text with flags, assignments and placeholders in code font.
fn english(text: &Both) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut is_code = false;
    for word in text.get(Lang::En).split(' ') {
        let ticks = word.matches('`').count();
        if is_code || ticks > 0 {
            is_code ^= ticks % 2 == 1;
            words.push(word.to_owned());
            continue;
        }
        let (before, bare, after) = stripped(word);
        let flag = words.last_mut().filter(|last| {
            let open = last.trim_start_matches('(');
            open.starts_with("`--") && open.ends_with('`')
        });
        match flag {
            Some(flag) if before.is_empty() && is_value(bare) => {
                flag.pop();
                *flag += &format!(" {bare}`{after}");
            }
            _ if is_coded(bare) => words.push(format!("{before}`{bare}`{after}")),
            _ => words.push(word.to_owned()),
        }
    }
    words.join(" ")
}

/// A word without the punctuation around it.
fn stripped(word: &str) -> (&str, &str, &str) {
    let bare = word.trim_start_matches('(');
    let before = &word[..word.len() - bare.len()];
    // Dots that replace the rest of an id.
    if bare.ends_with("....") {
        return (before, bare, "");
    }
    let end = bare.trim_end_matches(['.', ',', ';', ':', ')']).len();
    (before, &bare[..end], &bare[end..])
}

/// Whether a word is a flag, a placeholder of an image or an assignment to a variable.
fn is_coded(word: &str) -> bool {
    let is_variable = |name: &str| name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_');
    word.starts_with("--")
        || word.starts_with('<')
        || word
            .split_once('=')
            .is_some_and(|(name, _)| is_variable(name))
}

/// Whether a word after a flag is the value of that flag.
fn is_value(word: &str) -> bool {
    const VALUES: [&str; 9] = [
        "all",
        "auto",
        "cpu",
        "cuda",
        "f32",
        "false",
        "pure-bf16",
        "true",
        "PARTS",
    ];
    VALUES.contains(&word) || word.starts_with(|first: char| first.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_documented_page_is_current() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/errors.md");
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            text == errors_page(),
            "docs/errors.md is stale: cargo run -p launcher --example docs -- write"
        );
    }

    #[test]
    fn every_exit_status_is_in_the_table() {
        for code in ErrorCode::ALL {
            let known = EXIT_CODES.iter().any(|row| row.0 == code.status());
            assert!(known, "{code}");
        }
        let used = |status| ErrorCode::ALL.iter().any(|code| code.status() == status);
        for (status, ..) in EXIT_CODES {
            assert!(status == 0 || used(status), "{status}");
        }
        assert!(EXIT_CODES.is_sorted_by_key(|row| row.0));
    }

    #[test]
    fn flags_and_placeholders_are_rendered_as_code() {
        let text = Both {
            en: "Use --nproc 1 (or --zero 3), `df -h --all DIR`; <image> needs A_B=c.",
            zh: "",
        };
        assert_eq!(
            english(&text),
            "Use `--nproc 1` (or `--zero 3`), `df -h --all DIR`; `<image>` needs `A_B=c`."
        );
    }
}
