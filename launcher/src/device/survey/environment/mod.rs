//! Environment variables: those that this program reads, those that affect what it loads, and those of other
//! trainers, which have no effect here.

mod known;

use crate::lang::{Both, both, text};
use serde::Serialize;

use crate::rank_env::{Env, Variables};
use crate::ui::Event;
use known::{ACT_ON_OTHERS, FAMILIES, FOREIGN, HIDDEN, READ};

/// Entry in the list of environment variables of `launcher doctor`: one variable, or all variables of a
/// family such as `SLURM_*` that are set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Variable {
    /// Name of the variable, or of the family, such as `SLURM_*`.
    pub name: String,
    /// Which program reads the variable.
    pub kind: Kind,
    /// Whether the variable is set in this process.
    pub is_set: bool,
    /// Value of the variable. `None` if it is unset or secret. For a family, a text with the number of set variables.
    pub value: Option<String>,
    /// Effect of the variable on a run, or why it has none.
    pub effect: Both,
    /// Flags of this program to use instead of a variable that has no effect here.
    pub instead: Option<Both>,
}

/// Which program reads an environment variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// This program reads the variable.
    Read,
    /// A library or tool that this program uses reads the variable.
    ActsOnOthers,
    /// Neither this program nor its libraries read the variable, so it has no effect.
    WithoutEffect,
}

/// Every variable that is known by name, set or not, and the families of which any is set.
pub(crate) fn table(variables: &Variables) -> Vec<Variable> {
    let own = READ.iter().map(|row| (Kind::Read, *row));
    let others = ACT_ON_OTHERS.iter().map(|row| (Kind::ActsOnOthers, *row));
    let mut table: Vec<Variable> = own
        .chain(others)
        .map(|(kind, (name, effect))| named(variables, name, kind, effect, None))
        .collect();
    for (names, effect, instead) in FOREIGN {
        let row = |name: &&str| named(variables, name, Kind::WithoutEffect, effect, Some(instead));
        table.extend(names.iter().map(row));
    }
    for (beginning, kind, effect, instead) in FAMILIES {
        let known = |name: &str| table.iter().any(|row| row.name == name);
        let set = variables
            .names()
            .filter(|name| name.starts_with(beginning) && !known(name))
            .count();
        if set > 0 {
            table.push(Variable {
                name: format!("{beginning}*"),
                kind,
                is_set: true,
                value: Some(format!("{set} set")),
                effect,
                instead,
            });
        }
    }
    table.sort_by_key(|row| row.kind);
    table
}

/// Notes of a run on the variables of other trainers that are set and have no effect.
pub(crate) fn notes(variables: &Variables) -> Vec<Event> {
    let rows = FOREIGN.iter().flat_map(|(names, effect, instead)| {
        let set = names.iter().filter(|name| variables.get(name).is_some());
        set.map(move |name| Event::Note {
            flag: (*name).to_owned(),
            reason: text!("{effect}; here: {instead}", "{effect}；请改用：{instead}"),
        })
    });
    rows.chain(stand_ins(variables)).collect()
}

/// Notes of a run or a plan on the variables of other trainers that are read in place of a flag.
pub(crate) fn stand_ins(variables: &Variables) -> Vec<Event> {
    let set = |(name, flag): (&'static str, &'static str)| {
        let value = variables.get(name)?.to_string_lossy().into_owned();
        Some(Event::Info {
            label: both("environment", "环境").into(),
            text: text!(
                "{name}={value} stands for {flag} {value}, where no flag says otherwise",
                "{name}={value} 等同于 {flag} {value}，除非另有参数指定"
            ),
        })
    };
    Env::STAND_INS.into_iter().filter_map(set).collect()
}

fn named(
    variables: &Variables,
    name: &str,
    kind: Kind,
    effect: Both,
    instead: Option<Both>,
) -> Variable {
    let value = variables.get(name);
    let shown = value.filter(|_| !HIDDEN.contains(&name));
    Variable {
        name: name.to_string(),
        kind,
        is_set: value.is_some(),
        value: shown.map(|value| printable(&value.to_string_lossy())),
        effect,
        instead,
    }
}

/// Escapes control characters. Reports are pasted, and a value must not control a terminal.
fn printable(value: &str) -> String {
    let escaped = |letter: char| -> String {
        if letter.is_control() {
            letter.escape_default().collect()
        } else {
            letter.to_string()
        }
    };
    value.chars().map(escaped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rank_env::{
        CudaSearchPaths, GpuCode, HostRegister, Matmul, fused_attention_backward,
    };
    use std::cell::RefCell;
    use std::collections::BTreeSet;
    use std::ffi::OsString;
    use std::path::Path;

    fn environment(pairs: &[(&str, &str)]) -> Variables {
        let pairs = pairs.iter();
        pairs
            .map(|(name, value)| (name.to_string(), OsString::from(value)))
            .collect()
    }

    fn row<'a>(table: &'a [Variable], name: &str) -> &'a Variable {
        let found = table.iter().find(|row| row.name == name);
        found.unwrap_or_else(|| panic!("no {name}"))
    }

    #[test]
    fn runs_name_variables_of_other_trainers() {
        let notes = notes(&environment(&[
            ("MP_SIZE", "4"),
            ("NUM_WORKERS", "4"),
            ("RANK", "0"),
            ("HOME", "/"),
        ]));
        let [Event::Note { flag, reason }, Event::Info { text, .. }] = &notes[..] else {
            panic!("{notes:?}");
        };
        assert_eq!(flag, "NUM_WORKERS");
        for name in ["ROOT_IMAGE_DIR", "IMAGE_MAX_TOKEN_NUM", "VIDEO_MAX_PIXELS"] {
            let notes = super::notes(&environment(&[(name, "1")]));
            assert!(
                matches!(&notes[..], [Event::Note { flag, .. }] if flag == name),
                "{name}: {notes:?}"
            );
        }
        assert!(reason.contains("--nproc"), "{reason}");
        assert!(text.contains("MP_SIZE=4 stands for --mp-size 4"), "{text}");
    }

    #[test]
    fn exactly_the_variables_that_are_read_are_listed() {
        let asked = RefCell::new(BTreeSet::new());
        for environment in [
            vec![],
            vec![("LOCAL_RANK", "0"), ("RANK", "0"), ("WORLD_SIZE", "1")],
            vec![
                ("OMPI_COMM_WORLD_RANK", "0"),
                ("OMPI_COMM_WORLD_SIZE", "2"),
                ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ],
            vec![
                ("PMI_RANK", "0"),
                ("PMI_SIZE", "2"),
                ("MPI_LOCALRANKID", "0"),
            ],
            vec![
                ("MV2_COMM_WORLD_RANK", "0"),
                ("MV2_COMM_WORLD_SIZE", "2"),
                ("MV2_COMM_WORLD_LOCAL_RANK", "0"),
            ],
            vec![
                ("SLURM_STEP_ID", "0"),
                ("SLURM_PROCID", "0"),
                ("SLURM_NTASKS", "2"),
                ("SLURM_LOCALID", "0"),
                ("SLURM_NODEID", "0"),
            ],
        ] {
            let lookup = |name: &str| {
                asked.borrow_mut().insert(name.to_string());
                let found = environment.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| OsString::from(value))
            };
            Env::from_lookup(&lookup).expect("a good environment");
            CudaSearchPaths::from_lookup(&lookup);
            Matmul::from_lookup(&lookup).expect("a good environment");
            GpuCode::from_lookup(&lookup).expect("a good environment");
            HostRegister::from_lookup(&lookup).expect("a good environment");
            fused_attention_backward(&lookup).expect("a good environment");
        }
        // The operating system searches these directories for programs that this program starts.
        asked.borrow_mut().insert("PATH".to_string());
        let listed: BTreeSet<_> = READ.iter().map(|(name, _)| name.to_string()).collect();
        assert_eq!(*asked.borrow(), listed);
    }

    #[test]
    fn only_one_file_reads_the_environment() {
        let mut directories = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).expect("readable") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    directories.push(path);
                    continue;
                }
                let text = std::fs::read_to_string(&path).expect("readable");
                let reads = text.contains(concat!("env::", "var"));
                assert_eq!(
                    reads,
                    path.ends_with("rank_env/mod.rs"),
                    "{}",
                    path.display()
                );
            }
        }
    }

    #[test]
    fn variables_are_listed_once() {
        let names: Vec<_> = table(&Variables::default())
            .iter()
            .map(|row| row.name.clone())
            .collect();
        let once: BTreeSet<_> = names.iter().collect();
        assert_eq!(names.len(), once.len());
    }

    #[test]
    fn variables_of_other_trainers_name_their_replacement() {
        let table = table(&environment(&[
            ("NUM_WORKERS", "4"),
            ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128"),
        ]));
        for (name, words) in [
            ("NUM_WORKERS", "--nproc"),
            ("PYTORCH_CUDA_ALLOC_CONF", "--device-memory-limit"),
        ] {
            let row = row(&table, name);
            assert_eq!(row.kind, Kind::WithoutEffect);
            assert!(
                row.instead.is_some_and(|text| text.en.contains(words)),
                "{name}"
            );
        }
        assert_eq!(row(&table, "NUM_WORKERS").value.as_deref(), Some("4"));
        let unset = row(&table, "PYTORCH_ALLOC_CONF");
        assert!(!unset.is_set && unset.value.is_none());
        assert_eq!(row(&table, "CUDA_VISIBLE_DEVICES").kind, Kind::ActsOnOthers);
    }

    #[test]
    fn secrets_and_unknown_values_are_not_shown() {
        let table = table(&environment(&[
            ("HF_TOKEN", "hf_secret"),
            ("WANDB_API_KEY", "secret"),
            ("TESSERA_JOB_TOKEN", "secret"),
            ("SLURM_JWT", "secret"),
            ("SLURM_JOB_USER", "secret"),
            ("SLURM_NTASKS", "2"),
            ("MY_PASSWORD", "secret"),
        ]));
        let shown = serde_json::to_string(&table).expect("serialises");
        assert!(!shown.contains("secret") && !shown.contains("MY_PASSWORD"));
        assert!(row(&table, "HF_TOKEN").is_set);
        assert_eq!(row(&table, "SLURM_*").value.as_deref(), Some("2 set"));
        assert_eq!(row(&table, "SLURM_NTASKS").value.as_deref(), Some("2"));
    }

    #[test]
    fn control_characters_of_values_are_escaped() {
        assert_eq!(printable("a\u{1b}[31m\nb ü"), "a\\u{1b}[31m\\nb ü");
    }
}
