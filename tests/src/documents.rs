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

/// The alternatives of a pattern with at most one `{a,b}`.
fn alternatives(pattern: &str) -> Vec<String> {
    let Some((start, rest)) = pattern.split_once('{') else {
        return vec![pattern.to_owned()];
    };
    let (inner, end) = rest.split_once('}').expect("a closed brace");
    let one = |middle: &str| format!("{start}{middle}{end}");
    inner.split(',').map(one).collect()
}

/// Paths and directories of the table of CONTRIBUTING.md that lists the modules with unsafe code.
fn listed_as_unsafe() -> Vec<String> {
    let text = read(Path::new("CONTRIBUTING.md"));
    let (_, table) = text.split_once("**Unsafe code.**").expect("the section");
    let rows = table
        .lines()
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'));
    let mut listed = Vec::new();
    let mut source = String::new();
    for row in rows.skip(2) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        match cells[1].strip_prefix('`') {
            Some(name) => source = format!("{}/src/", name.trim_end_matches('`')),
            None if !cells[1].is_empty() => source.clear(),
            None => {}
        }
        let patterns = cells[2].split('`').skip(1).step_by(2);
        listed.extend(
            patterns
                .flat_map(alternatives)
                .map(|path| format!("{source}{path}")),
        );
    }
    listed
}

/// Whether a line of code, not of a comment, opens unsafe code.
fn is_unsafe(line: &str) -> bool {
    let line = line.trim_start();
    let opens = ["unsafe {", "unsafe fn ", "unsafe impl ", "unsafe extern "];
    !line.starts_with("//") && opens.iter().any(|word| line.contains(word))
}

#[test]
fn contributing_lists_the_modules_with_unsafe_code() {
    let mut files = Vec::new();
    let mut open: Vec<PathBuf> = [
        "benches", "engine", "examples", "fuzz", "kernels", "launcher", "models", "optim", "tests",
    ]
    .map(PathBuf::from)
    .into();
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(root().join(&directory)).expect("a directory of the repository") {
            let path = directory.join(entry.expect("an entry").file_name());
            let is_own = path.file_name().is_some_and(|name| name != "target");
            if root().join(&path).is_dir() && is_own {
                open.push(path);
            } else if path.extension().is_some_and(|kind| kind == "rs")
                && path != Path::new("tests/src/documents.rs")
                && read(&path).lines().any(is_unsafe)
            {
                files.push(path.to_string_lossy().into_owned());
            }
        }
    }
    let listed = listed_as_unsafe();
    let covers = |entry: &str, file: &str| match entry.ends_with('/') {
        true => file.starts_with(entry),
        false => file == entry || file.strip_suffix(".rs") == Some(entry),
    };
    let missing = files
        .iter()
        .filter(|file| !listed.iter().any(|entry| covers(entry, file)));
    let idle = listed
        .iter()
        .filter(|entry| !files.iter().any(|file| covers(entry, file)));
    let (missing, idle): (Vec<_>, Vec<_>) = (missing.collect(), idle.collect());
    assert!(
        missing.is_empty() && idle.is_empty(),
        "unsafe code, but not listed: {missing:#?}; listed without any: {idle:#?}"
    );
}
