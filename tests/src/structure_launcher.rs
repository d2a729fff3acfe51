//! Which top-level module of `launcher` may import which.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Modules from the lowest to the highest, each with those it imports. All of them come earlier in the table, so no two
/// modules import each other.
#[rustfmt::skip] // One line for each module.
const IMPORTS: [(&str, &str); 16] = [
    ("units", ""),
    ("memory", ""),
    ("error", "memory units"),
    ("rank_env", "error"),
    ("config", "error units"),
    ("ui", "memory rank_env units"),
    ("device", "config error memory rank_env ui units"),
    ("data", "config error units"),
    ("model", "config data error ui"),
    ("report", "config error memory ui units"),
    ("cli", "config device error rank_env units"),
    ("launch", "cli config device error memory rank_env report ui units"),
    ("fuzzing", "cli error launch"),
    ("plan", "cli config data device error memory model rank_env report ui units"),
    ("train", "config data device error launch memory model plan rank_env report ui units"),
    ("commands", "cli config data device error launch memory model plan rank_env report ui units"),
];

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../launcher/src")
}

/// The source files below `directory`, each with the path of its module.
fn files(directory: &Path, module: &[String], found: &mut Vec<(PathBuf, Vec<String>)>) {
    for entry in fs::read_dir(directory).expect("a directory of the crate") {
        let path = entry.expect("an entry").path();
        let stem = path
            .file_stem()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        let inner = [module, &[stem.clone()]].concat();
        if path.is_dir() {
            files(&path, &inner, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let own = matches!(&*stem, "mod" | "lib" | "main");
            found.push((path, if own { module.to_vec() } else { inner }));
        }
    }
}

/// Source text without comments and without the module of its tests, which is the last item of a file.
fn code(text: &str) -> String {
    let tests = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    let lines = text[..tests].lines();
    let lines = lines.map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// Modules that `text` declares for its tests only: `#[cfg(test)] mod name;`.
fn test_modules(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().collect();
    let of_tests = lines.windows(2).filter_map(|pair| {
        let only_tests = pair[0].starts_with("#[cfg(") && pair[0].contains("test");
        let name = pair[1].strip_prefix("mod ")?.strip_suffix(';')?;
        only_tests.then_some(name)
    });
    of_tests.collect()
}

/// The first names of a path or a group of paths: `a::b` and `{a::b, c}`.
fn first_names(path: &str) -> Vec<&str> {
    let name = |part: &'_ str| -> usize {
        part.find(|c: char| !c.is_alphanumeric() && c != '_')
            .unwrap_or(part.len())
    };
    let Some(group) = path.strip_prefix('{') else {
        return vec![&path[..name(path)]];
    };
    let mut found = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' | ',' if depth == 0 => {
                let part = group[start..at].trim();
                found.push(&part[..name(part)]);
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    found
}

/// Top-level modules that the code of `module` names.
fn imports(code: &str, module: &[String]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (start, _) in code.match_indices("crate::") {
        found.extend(first_names(&code[start + "crate::".len()..]));
    }
    // As many steps up as the module is deep lead to the root of the crate.
    let root = "super::".repeat(module.len());
    for (start, _) in code.match_indices(&root).filter(|_| !module.is_empty()) {
        if !code[..start].ends_with("super::") {
            found.extend(first_names(&code[start + root.len()..]));
        }
    }
    let found = found
        .into_iter()
        .filter(|name| !name.is_empty() && *name != "super");
    found.map(str::to_owned).collect()
}

/// Every import of a top-level module by another, with a file that has it.
fn arrows() -> BTreeMap<(String, String), PathBuf> {
    let mut all = Vec::new();
    files(&sources(), &[], &mut all);
    let mut of_tests = BTreeSet::new();
    for (path, module) in &all {
        let text = fs::read_to_string(path).expect("a source file");
        for name in test_modules(&text) {
            of_tests.insert([&module[..], &[name.to_owned()]].concat());
        }
    }
    let mut found = BTreeMap::new();
    for (path, module) in all.iter().filter(|(_, module)| !module.is_empty()) {
        if (1..=module.len()).any(|depth| of_tests.contains(&module[..depth])) {
            continue;
        }
        let text = fs::read_to_string(path).expect("a source file");
        for to in imports(&code(&text), module) {
            if to != module[0] {
                found
                    .entry((module[0].clone(), to))
                    .or_insert_with(|| path.clone());
            }
        }
    }
    found
}

#[test]
fn every_import_of_the_launcher_is_in_the_table() {
    let allowed: BTreeSet<(&str, &str)> = IMPORTS
        .iter()
        .flat_map(|(from, to)| to.split_whitespace().map(move |to| (*from, to)))
        .collect();
    let arrows = arrows();
    let unlisted: Vec<String> = arrows
        .iter()
        .filter(|((from, to), _)| !allowed.contains(&(&**from, &**to)))
        .map(|((from, to), path)| format!("{from} imports {to}: {}", path.display()))
        .collect();
    assert!(unlisted.is_empty(), "{unlisted:#?}");
    let stale: Vec<_> = allowed
        .iter()
        .filter(|(from, to)| !arrows.contains_key(&((*from).to_owned(), (*to).to_owned())))
        .collect();
    assert!(
        stale.is_empty(),
        "nothing imports these any more: {stale:#?}"
    );
}

#[test]
fn modules_of_the_launcher_import_lower_ones_only() {
    for (place, (from, imported)) in IMPORTS.iter().enumerate() {
        for to in imported.split_whitespace() {
            let lower = IMPORTS[..place].iter().any(|(name, _)| *name == to);
            assert!(
                lower,
                "{from} imports {to}, which does not come before it in the table"
            );
        }
    }
    let modules: BTreeSet<String> = arrows().into_keys().map(|(from, _)| from).collect();
    let missing: Vec<_> = modules
        .iter()
        .filter(|module| !IMPORTS.iter().any(|(name, _)| name == module))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn paths_are_found_in_groups_and_through_parents() {
    let module = ["plan".to_owned(), "early".to_owned()];
    let code = "use crate::{a::b, c::{d, e}, f};\nuse super::super::g::h;\nuse super::own;\nlet x = crate::i::j();";
    let found = imports(code, &module);
    let wanted = ["a", "c", "f", "g", "i"].map(str::to_owned);
    assert_eq!(found, BTreeSet::from(wanted));
}
