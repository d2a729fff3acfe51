//! Tests of the structure: which module of a crate may import which, and that no two directories import each other.
//!
//! The code is read as text: paths that begin with `crate::`, `self::` or `super::`, outside of comments and tests.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A top-level module and the modules it imports. A row names rows above it only, so that imports have no cycle.
type Row = (&'static str, &'static str);

const ENGINE: &[Row] = &[
    ("spec", ""),
    ("sync", ""),
    ("trace", ""),
    ("plan", "spec"),
    ("comm", "sync"),
    ("checkpoint", "plan spec"),
    ("error", "checkpoint comm plan spec"),
    ("timing", "plan"),
    ("offload", "comm error plan sync timing trace"),
    ("access", "comm error offload plan spec"),
    ("step", "comm error offload plan spec trace"),
    (
        "store",
        "access comm error offload plan spec step timing trace",
    ),
    (
        "zero",
        "access checkpoint comm error offload plan spec step store timing trace",
    ),
    ("dry_run", "access comm error offload plan step zero"),
    (
        "sharded",
        "access checkpoint comm error offload plan spec step zero",
    ),
    ("fuzzing", "checkpoint comm"),
];

#[rustfmt::skip] // One line for each module.
const LAUNCHER: &[Row] = &[
    ("lang", ""),
    ("units", "lang"),
    ("memory", "lang"),
    ("error", "lang memory units"),
    ("rank_env", "error lang"),
    ("config", "error lang units"),
    ("ui", "lang memory rank_env units"),
    ("device", "config error lang memory rank_env ui units"),
    ("data", "config error lang memory rank_env units"),
    ("model", "config error lang ui"),
    ("report", "config error lang memory ui units"),
    ("cli", "config device error lang rank_env units"),
    ("launch", "cli config device error lang memory rank_env report ui units"),
    ("fuzzing", "cli error launch"),
    ("plan", "cli config data device error lang memory model rank_env report ui units"),
    ("train", "config data device error lang launch memory model plan rank_env report ui units"),
    ("commands", "cli config data device error lang launch memory model plan rank_env report train ui units"),
];

/// A module by its names from the root of its crate on.
type Module = Vec<String>;

/// The production code of one crate: its modules, and the imports of each.
struct Code {
    /// Whether a module is a directory.
    modules: BTreeMap<Module, bool>,
    imports: Vec<(Module, Module)>,
}

impl Code {
    fn read(package: &str) -> Self {
        let source = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("..")
            .join(package)
            .join("src");
        let mut files = Vec::new();
        collect(&source, &Vec::new(), &mut files);
        let mut tests = BTreeSet::new();
        let mut texts = Vec::new();
        for (module, path) in files {
            let is_directory = path.ends_with("mod.rs");
            let text = fs::read_to_string(&path).expect("a source file");
            let text = production(&text, &module, &mut tests);
            texts.push((module, is_directory, text));
        }
        let is_test = |module: &Module| tests.iter().any(|test: &Module| module.starts_with(test));
        texts.retain(|(module, ..)| !is_test(module));
        let all = texts.iter();
        let modules: BTreeMap<_, _> = all
            .map(|(m, directory, _)| (m.clone(), *directory))
            .collect();
        let mut imports = Vec::new();
        for (module, _, text) in &texts {
            for path in paths(text, module) {
                // The deepest module that the path names.
                let named = (0..=path.len()).rev().map(|len| path[..len].to_vec());
                let known = |m: &Module| m.is_empty() || modules.contains_key(m);
                let target = named.into_iter().find(known).expect("the crate's root");
                assert!(
                    !target.is_empty() || path.is_empty() || module.is_empty(),
                    "{}: import {} from its own module instead of the root of {package}",
                    module.join("::"),
                    path.join("::")
                );
                imports.push((module.clone(), target));
            }
        }
        Self { modules, imports }
    }

    /// The directory of a module.
    fn directory<'m>(&self, module: &'m [String]) -> &'m [String] {
        match self.modules.get(module) {
            Some(false) => &module[..module.len() - 1],
            _ => module,
        }
    }
}

/// Every source file below `directory`, which has the module `of`; roots of programs and libraries have none.
fn collect(directory: &Path, of: &Module, files: &mut Vec<(Module, PathBuf)>) {
    for entry in fs::read_dir(directory).expect("a source directory") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().expect("a name").to_string_lossy();
        let mut module = of.clone();
        if path.is_dir() {
            module.push(name.into_owned());
            collect(&path, &module, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            if !matches!(&*name, "lib" | "main" | "mod") {
                module.push(name.into_owned());
            }
            if !module.is_empty() {
                files.push((module, path));
            }
        }
    }
}

/// `text` without comments and test modules; test modules in files of their own go to `tests`.
fn production(text: &str, module: &Module, tests: &mut BTreeSet<Module>) -> String {
    let mut kept = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let code = line.split("//").next().unwrap_or_default();
        if !(code.trim().starts_with("#[cfg(") && code.contains("test")) {
            kept.push_str(code);
            kept.push('\n');
            continue;
        }
        let item = lines
            .find(|line| !line.trim().starts_with("#["))
            .unwrap_or_default();
        if let Some((_, name)) = item.split_once("mod ")
            && let Some(name) = name.strip_suffix(';')
        {
            tests.insert([&module[..], &[name.to_owned()]].concat());
        } else if item.ends_with('{') {
            let end = item.replace(|c: char| !c.is_whitespace(), "");
            let end = format!("{}}}", &end[..item.len() - item.trim_start().len()]);
            lines.find(|line| *line == end);
        }
    }
    kept
}

/// The paths of `text`, a part of `module`, that begin in its own crate.
fn paths(text: &str, module: &Module) -> Vec<Module> {
    let mut found = Vec::new();
    for start in ["crate::", "self::", "super::"] {
        for (at, _) in text.match_indices(start) {
            let before = text[..at].chars().next_back().unwrap_or(' ');
            if before.is_alphanumeric() || matches!(before, '_' | ':' | '$') {
                continue;
            }
            let of = match start {
                "crate::" => Vec::new(),
                "self::" => module.clone(),
                _ => module[..module.len() - 1].to_vec(),
            };
            expand(&text[at + start.len()..], of, &mut found);
        }
    }
    found
}

/// Adds the paths at the beginning of `text` to `found`, each behind `path`, and returns what follows them.
fn expand<'t>(text: &'t str, mut path: Module, found: &mut Vec<Module>) -> &'t str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = rest.trim_start();
            if let Some(after) = rest.strip_prefix('}') {
                return after;
            }
            rest = expand(rest, path.clone(), found);
            rest = rest.trim_start_matches(|c| !matches!(c, ',' | '}'));
            rest = rest.strip_prefix(',').unwrap_or(rest);
        }
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    let (name, rest) = text.split_at(end.unwrap_or(text.len()));
    match name {
        "super" => drop(path.pop()),
        "" | "self" => {}
        _ => path.push(name.to_owned()),
    }
    match rest.strip_prefix("::") {
        Some(rest) => expand(rest, path, found),
        None => {
            found.push(path);
            rest
        }
    }
}

/// Fails unless the top-level modules of `package` are those of `table`, and import what it says.
fn check(package: &str, table: &[Row]) {
    let code = Code::read(package);
    let mut wrong = Vec::new();
    let top: BTreeSet<&str> = code.modules.keys().map(|module| &*module[0]).collect();
    let rows: BTreeSet<&str> = table.iter().map(|(module, _)| *module).collect();
    for module in top.symmetric_difference(&rows) {
        wrong.push(format!(
            "{module} is not both a module and a row of the table"
        ));
    }
    for (at, (module, allowed)) in table.iter().enumerate() {
        let allowed: BTreeSet<&str> = allowed.split_whitespace().collect();
        let above: BTreeSet<&str> = table[..at].iter().map(|(module, _)| *module).collect();
        let of = code.imports.iter().filter(|(from, _)| from[0] == *module);
        let imported: BTreeSet<&str> = of
            .filter_map(|(_, to)| to.first().map(|to| &**to))
            .filter(|to| to != module)
            .collect();
        for other in allowed.difference(&above) {
            wrong.push(format!(
                "the row of {module} names {other}, which is not above it"
            ));
        }
        for other in imported.difference(&allowed) {
            wrong.push(format!(
                "{module} imports {other}, which its row does not name"
            ));
        }
        for other in allowed.difference(&imported) {
            wrong.push(format!(
                "the row of {module} names {other}, which it does not import"
            ));
        }
    }
    wrong.extend(two_way(&code));
    assert!(wrong.is_empty(), "{package}:\n{}", wrong.join("\n"));
}

/// Directories beside each other of which each reaches the other through imports.
fn two_way(code: &Code) -> Vec<String> {
    let mut reached: BTreeMap<&[String], BTreeSet<&[String]>> = BTreeMap::new();
    for (from, to) in &code.imports {
        let (from, to) = (code.directory(from), code.directory(to));
        let common = from.iter().zip(to).take_while(|(a, b)| a == b).count();
        // A directory and one inside of it are one room.
        if common < from.len().min(to.len()) {
            let (from, to) = (&from[..=common], &to[..=common]);
            reached.entry(from).or_default().insert(to);
        }
    }
    loop {
        let mut grown = reached.clone();
        for reach in grown.values_mut() {
            let further = reach.iter().filter_map(|via| reached.get(via)).flatten();
            let further: Vec<_> = further.copied().collect();
            reach.extend(further);
        }
        if grown == reached {
            break;
        }
        reached = grown;
    }
    let circles = reached.iter().filter(|(from, to)| to.contains(*from));
    circles
        .map(|(from, _)| {
            format!(
                "the directory {} imports itself through others",
                from.join("/")
            )
        })
        .collect()
}

#[test]
fn modules_of_the_engine_import_what_the_table_says() {
    check("engine", ENGINE);
}

#[test]
fn modules_of_the_launcher_import_what_the_table_says() {
    check("launcher", LAUNCHER);
}

#[test]
fn paths_are_found_in_groups_and_from_modules_above() {
    let module = ["store", "mod", "x"].map(str::to_owned).to_vec();
    let text = "use crate::plan::{self, memory::{A, B}, Tier};\nlet y = super::super::z::<u8>();";
    let found = paths(text, &module[..2].to_vec());
    let found: Vec<String> = found.iter().map(|path| path.join("::")).collect();
    let expected = [
        "plan",
        "plan::memory::A",
        "plan::memory::B",
        "plan::Tier",
        "z",
    ];
    assert_eq!(found, expected);
    let mut tests = BTreeSet::new();
    let text = "a // crate::b\n#[cfg(test)]\nmod c;\n#[cfg(test)]\nmod d {\n    crate::e\n}\nf\n";
    assert_eq!(production(text, &module, &mut tests), "a \nf\n");
    assert_eq!(tests.len(), 1);
}
