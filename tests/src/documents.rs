//! Tests of the documents: sizes, first lines, and links.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Largest page of docs/ and largest front page, in bytes.
const PAGE: usize = 15_000;
const FRONT: usize = 10_000;
/// Pages that a program generates. They may be longer.
const GENERATED: [&str; 2] = ["docs/flags.md", "docs/errors.md"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every Markdown file of the repository, relative to its root.
fn pages() -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut open = vec![PathBuf::new()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(root().join(&directory)).expect("a directory of the repository") {
            let entry = entry.expect("an entry");
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = directory.join(&name);
            if entry.file_type().expect("a type").is_dir() {
                if !matches!(&*name, "target" | "runs") && !name.starts_with(".git") {
                    open.push(path);
                }
            } else if name.ends_with(".md") {
                found.insert(path);
            }
        }
    }
    found
}

fn read(page: &Path) -> String {
    fs::read_to_string(root().join(page)).expect("a page")
}

/// The targets of `[text](target)` outside code.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced || line.starts_with("    ") {
            continue;
        }
        // Text between backticks is code: every second part.
        let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("x");
        for part in prose.split("](").skip(1) {
            let target = part.split(')').next().unwrap_or_default();
            found.push(target.to_string());
        }
    }
    found
}

/// The anchor of a heading: lower case, dashes for spaces, no punctuation.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| anchor(line.trim_start_matches('#')))
        .collect()
}

#[test]
fn every_relative_link_has_a_target() {
    let mut broken = Vec::new();
    for page in pages() {
        let text = read(&page);
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (file, section) = link.split_once('#').unwrap_or((&link, ""));
            let target = match file {
                "" => page.clone(),
                file => page.parent().unwrap_or(Path::new("")).join(file),
            };
            let whole = root().join(&target);
            let leads = whole.exists()
                && (section.is_empty()
                    || fs::read_to_string(&whole)
                        .is_ok_and(|text| anchors(&text).contains(section)));
            if !leads {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn the_index_links_to_every_page_of_docs() {
    let index: BTreeSet<String> = links(&read(Path::new("docs/README.md")))
        .into_iter()
        .collect();
    for page in pages() {
        let Ok(inside) = page.strip_prefix("docs") else {
            continue;
        };
        let own_index = inside.components().count() > 1;
        let listed = if own_index {
            let directory = inside.parent().expect("a directory").join("README.md");
            index.contains(&*directory.to_string_lossy())
        } else {
            inside == Path::new("README.md") || index.contains(&*inside.to_string_lossy())
        };
        assert!(listed, "docs/README.md does not lead to {}", page.display());
    }
}

#[test]
fn pages_are_short_and_say_whom_they_are_for() {
    for front in ["README.md", "README.zh.md", "ARCHITECTURE.md"] {
        let bytes = read(Path::new(front)).len();
        assert!(bytes <= FRONT, "{front} has {bytes} bytes");
    }
    for page in pages().iter().filter(|page| page.starts_with("docs")) {
        let text = read(page);
        let generated = GENERATED.iter().any(|name| page == Path::new(name));
        assert!(
            generated || text.len() <= PAGE,
            "{} has {} bytes",
            page.display(),
            text.len()
        );
        if !page.starts_with("docs/decisions") {
            let first = text
                .lines()
                .skip(1)
                .find(|line| !line.is_empty())
                .unwrap_or_default();
            assert!(first.contains("For "), "{}: {first}", page.display());
        }
    }
}

#[test]
fn a_decision_has_three_sections_and_at_most_150_words() {
    for page in pages()
        .iter()
        .filter(|page| page.starts_with("docs/decisions"))
    {
        if page.ends_with("README.md") {
            continue;
        }
        let text = read(page);
        let words = text
            .split_whitespace()
            .filter(|word| !word.starts_with('#'))
            .count();
        assert!(words <= 150, "{} has {words} words", page.display());
        for heading in ["## Context", "## Decision", "## Consequence"] {
            assert!(text.contains(heading), "{} lacks {heading}", page.display());
        }
    }
}
