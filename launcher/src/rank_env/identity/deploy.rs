//! Test of the files in `deploy/`: their options, environment and command lines against what the program reads.

use super::{Identity, RankAssignment, Source, find};
use crate::cli::file::{FileValue as Value, read_file};
use crate::cli::{self, Args, Command};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../deploy")
        .join(name)
}

fn text(name: &str) -> String {
    std::fs::read_to_string(path(name)).expect(name)
}

fn identity(vars: &BTreeMap<String, String>) -> Identity {
    let lookup = |name: &str| vars.get(name).map(OsString::from);
    find(&lookup, None).expect("an identity")
}

fn rank(vars: &BTreeMap<String, String>) -> RankAssignment {
    match identity(vars) {
        Identity::Rank(place) => place,
        other => panic!("{vars:?}: {other:?}"),
    }
}

fn variables(pairs: &[(&str, String)]) -> BTreeMap<String, String> {
    let pairs = pairs.iter();
    pairs
        .map(|(name, value)| ((*name).to_string(), value.clone()))
        .collect()
}

/// The arguments after the word `launcher` of a script, up to the end of its line.
fn launched(script: &str) -> Args {
    let joined = script.replace("\\\n", " ");
    let line = joined
        .lines()
        .find(|line| line.split_whitespace().any(|word| word == "launcher"))
        .expect("a line that starts the program");
    let words = line
        .split_whitespace()
        .skip_while(|word| *word != "launcher");
    parsed(words.skip(1))
}

fn parsed<'a>(words: impl Iterator<Item = &'a str>) -> Args {
    let argv: Vec<String> = words.map(str::to_string).collect();
    match cli::parse(&argv).expect("a good line") {
        Command::Train { args, notes, .. } => {
            assert!(notes.is_empty(), "{notes:?}");
            *args
        }
        other => panic!("{other:?}"),
    }
}

/// Ranks that are started one by one need a directory that all know.
fn names_its_directory(args: &Args) {
    assert!(args.output.is_some() && args.model.is_some() && args.data.is_some());
    assert!(
        args.nproc.is_none(),
        "the file starts so many ranks already"
    );
}

#[test]
fn every_task_of_the_batch_file_is_its_rank() {
    let script = text("slurm.sbatch");
    let options: BTreeMap<&str, &str> = script
        .lines()
        .filter_map(|line| line.strip_prefix("#SBATCH --"))
        .map(|option| option.split_once('=').expect("an option with a value"))
        .collect();
    let known = [
        "job-name",
        "nodes",
        "ntasks-per-node",
        "cpus-per-task",
        "time",
        "output",
        "signal",
    ];
    assert!(
        options.keys().all(|option| known.contains(option)),
        "{options:?}"
    );
    // To the tasks, not to the shell of the script (B:), which would not hand it on.
    assert!(options["signal"].starts_with("USR1@"));
    let number = |option: &str| -> usize { options[option].parse().expect("a number") };
    let (nodes, each) = (number("nodes"), number("ntasks-per-node"));
    names_its_directory(&launched(&script));
    assert!(script.contains("\nexport TESSERA_JOB_TOKEN\n") && script.contains("\nsrun "));

    let job = [
        ("SLURM_JOB_ID", "123456".to_string()),
        ("SLURM_NTASKS", (nodes * each).to_string()),
        ("SLURM_TASKS_PER_NODE", format!("{each}(x{nodes})")),
        ("SLURM_JOB_NODELIST", "cpu[03-04]".to_string()),
    ];
    // The script itself is none of the ranks.
    let mut batch = variables(&job);
    batch.extend(variables(&[
        ("SLURM_PROCID", "0".into()),
        ("SLURM_LOCALID", "0".into()),
        ("SLURM_NODEID", "0".into()),
    ]));
    assert_eq!(identity(&batch), Identity::Alone);
    for task in 0..nodes * each {
        let mut vars = variables(&job);
        vars.extend(variables(&[
            ("SLURM_STEP_ID", "0".into()),
            ("SLURM_STEP_NUM_TASKS", (nodes * each).to_string()),
            ("SLURM_PROCID", task.to_string()),
            ("SLURM_LOCALID", (task % each).to_string()),
            ("SLURM_NODEID", (task / each).to_string()),
        ]));
        let place = rank(&vars);
        assert_eq!((place.rank, place.local_rank), (task, task % each));
        assert_eq!(
            (place.world_size, place.local_world_size),
            (nodes * each, each)
        );
        assert_eq!(place.master.addr.as_deref(), Some("cpu03"));
        assert_eq!(place.master.port, Some(15_000 + 3456));
    }
}

#[test]
fn the_mpirun_line_exports_the_variables_of_several_machines() {
    let mpijob = read_file(&path("mpijob.yaml")).expect("YAML");
    let launcher = at(
        &mpijob,
        "spec/mpiReplicaSpecs/Launcher/template/spec/containers/0",
    );
    let script = word(at(launcher, "args/0"));
    for script in [text("mpirun.sh"), script] {
        for name in ["TESSERA_JOB_TOKEN", "MASTER_ADDR", "MASTER_PORT"] {
            assert!(script.contains(&format!("-x {name} ")), "{script}");
        }
        assert!(script.contains(" --hostfile "));
        names_its_directory(&launched(&script));
    }
    let token = at(launcher, "env/0");
    assert_eq!(word(at(token, "name")), "TESSERA_JOB_TOKEN");
    assert!(!word(at(token, "valueFrom/secretKeyRef/name")).is_empty());

    let slots: usize = word(at(&mpijob, "spec/slotsPerWorker"))
        .parse()
        .expect("a number");
    let workers: usize = word(at(&mpijob, "spec/mpiReplicaSpecs/Worker/replicas"))
        .parse()
        .expect("a number");
    let place = rank(&variables(&[
        ("OMPI_COMM_WORLD_RANK", (slots * workers - 1).to_string()),
        ("OMPI_COMM_WORLD_SIZE", (slots * workers).to_string()),
        ("OMPI_COMM_WORLD_LOCAL_RANK", (slots - 1).to_string()),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", slots.to_string()),
        ("MASTER_ADDR", "tessera-worker-0.tessera".to_string()),
        ("MASTER_PORT", "29500".to_string()),
    ]));
    assert_eq!(place.source, Source::OpenMpi);
    assert_eq!(
        place.master.addr.as_deref(),
        Some("tessera-worker-0.tessera")
    );
    assert!(place.local_world_size < place.world_size);
}

#[test]
fn numbered_pods_start_their_ranks() {
    let job = read_file(&path("pytorchjob.yaml")).expect("YAML");
    let each: usize = word(at(&job, "spec/nprocPerNode"))
        .parse()
        .expect("a number");
    let mut pods = 0;
    let mut lines = Vec::new();
    for kind in ["Master", "Worker"] {
        let replicas = at(&job, &format!("spec/pytorchReplicaSpecs/{kind}"));
        pods += word(at(replicas, "replicas"))
            .parse::<usize>()
            .expect("a number");
        let container = at(replicas, "template/spec/containers/0");
        assert_eq!(word(at(container, "name")), "pytorch");
        assert_eq!(word(at(container, "command/0")), "launcher");
        let Value::List(words) = at(container, "args") else {
            panic!("args are a list")
        };
        let words: Vec<String> = words.iter().map(word).collect();
        names_its_directory(&parsed(words.iter().map(String::as_str)));
        lines.push(words);
        assert_eq!(
            word(at(container, "env/0/name")),
            crate::rank_env::TOKEN_FILE
        );
        let file = word(at(container, "env/0/value"));
        let mount = word(at(container, "volumeMounts/1/mountPath"));
        assert!(Path::new(&file).starts_with(mount));
        let mode: u32 = word(at(replicas, "template/spec/volumes/1/secret/defaultMode"))
            .parse()
            .expect("a number");
        assert_eq!(mode, 0o440);
    }
    assert_eq!(lines[0], lines[1], "all pods run one command line");
    for pod in 0..pods {
        // What the operator sets, with WORLD_SIZE as ranks and as pods.
        for world in [pods, pods * each] {
            let vars = variables(&[
                ("RANK", pod.to_string()),
                ("WORLD_SIZE", world.to_string()),
                ("MASTER_ADDR", "tessera-master-0".to_string()),
                ("MASTER_PORT", "23456".to_string()),
                ("PET_NNODES", pods.to_string()),
                ("PET_NODE_RANK", pod.to_string()),
                ("PET_NPROC_PER_NODE", each.to_string()),
                ("PET_MASTER_ADDR", "tessera-master-0".to_string()),
                ("PET_MASTER_PORT", "23456".to_string()),
            ]);
            let Identity::Node(place) = identity(&vars) else {
                panic!("{vars:?}")
            };
            assert_eq!((place.node_rank, place.nodes), (pod, pods));
            assert_eq!(place.share(1), (pod * each, each, pods * each));
            assert_eq!(place.master.port, Some(23_456));
        }
    }
}

/// The value at a path of keys and places of lists.
fn at<'a>(value: &'a Value, path: &str) -> &'a Value {
    path.split('/').fold(value, |value, step| match value {
        Value::List(items) => step
            .parse()
            .ok()
            .and_then(|i: usize| items.get(i))
            .expect(path),
        value => value
            .get(step)
            .unwrap_or_else(|| panic!("{path}: no {step}")),
    })
}

fn word(value: &Value) -> String {
    match value {
        Value::Text(text) | Value::Number(text) => text.clone(),
        other => panic!("{other:?} is no word"),
    }
}
