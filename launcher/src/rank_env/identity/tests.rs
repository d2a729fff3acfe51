//! Tests of every source and every conflict, as tables.

use super::{Identity, NodeAssignment, RankAssignment, RankIs, Source, find};
use crate::error::{ErrorCode, Failure};
use std::ffi::OsString;

/// Reads an environment written as `A=1 B=2`; values have no spaces.
fn read_as(line: &str, rank_is: Option<RankIs>) -> Result<Identity, Failure> {
    let vars: Vec<(&str, &str)> = line
        .split_whitespace()
        .map(|word| word.split_once('=').expect("a variable"))
        .collect();
    let lookup = |name: &str| {
        let found = vars.iter().find(|(key, _)| *key == name);
        found.map(|(_, value)| OsString::from(value))
    };
    find(&lookup, rank_is)
}

fn read(line: &str) -> Result<Identity, Failure> {
    read_as(line, None)
}

fn rank(line: &str) -> RankAssignment {
    match read(line) {
        Ok(Identity::Rank(place)) => place,
        other => panic!("{line}: {other:?}"),
    }
}

fn node_as(line: &str, rank_is: Option<RankIs>) -> NodeAssignment {
    match read_as(line, rank_is) {
        Ok(Identity::Node(place)) => place,
        other => panic!("{line}: {other:?}"),
    }
}

const TORCHRUN: &str = "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=n1 \
                        MASTER_PORT=29400 TORCHELASTIC_RUN_ID=x TORCHELASTIC_RESTART_COUNT=0";
const BY_HAND: &str = "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4";
const DEEPSPEED: &str = "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_SIZE=4 CROSS_RANK=1 CROSS_SIZE=2 MASTER_ADDR=n1 \
                         MASTER_PORT=29500";
const OPENMPI: &str = "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                       OMPI_COMM_WORLD_LOCAL_SIZE=4";
const PMI: &str = "PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4";
const MVAPICH: &str = "MV2_COMM_WORLD_RANK=5 MV2_COMM_WORLD_SIZE=8 MV2_COMM_WORLD_LOCAL_RANK=1 \
                       MV2_COMM_WORLD_LOCAL_SIZE=4";
const SLURM: &str = "SLURM_JOB_ID=70001 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 SLURM_NTASKS=8 \
                     SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_JOB_NODELIST=gpu[07-08]";

#[test]
fn a_number_of_no_use_is_unset_or_replaced() {
    for line in ["NPROC_PER_NODE=abc", "LOCAL_RANK=-1"] {
        let failure = read(line).expect_err(line).to_string();
        let name = line.split('=').next().expect("a name");
        assert!(failure.contains(&format!("unset {name}")), "{failure}");
    }
}

#[test]
fn every_source_names_the_same_rank() {
    for (line, source) in [
        (TORCHRUN, Source::Torch),
        (DEEPSPEED, Source::Torch),
        (OPENMPI, Source::OpenMpi),
        (PMI, Source::Pmi),
        (MVAPICH, Source::Mvapich),
        (SLURM, Source::Slurm),
    ] {
        let found = rank(line);
        assert_eq!(
            (
                found.rank,
                found.local_rank,
                found.world_size,
                found.local_world_size,
                found.source
            ),
            (5, 1, 8, 4, source),
            "{line}"
        );
    }
}

#[test]
fn slurm_gives_its_first_host_and_a_port_of_the_job() {
    let found = rank(SLURM);
    assert_eq!(found.master.addr.as_deref(), Some("gpu07"));
    assert_eq!(found.master.port, Some(15_000 + 10_001));
    let found = rank(&format!("{SLURM} MASTER_ADDR=b1 MASTER_PORT=4000"));
    assert_eq!(found.master.addr.as_deref(), Some("b1"));
    assert_eq!(found.master.port, Some(4000));
    // The host list of a step on some of the machines has priority.
    let found = rank(&format!("{SLURM} SLURM_STEP_NODELIST=gpu08"));
    assert_eq!(found.master.addr.as_deref(), Some("gpu08"));
    for bad in [
        "SLURM_JOB_NODELIST=gpu[07-",
        "SLURM_STEP_TASKS_PER_NODE=4(x",
    ] {
        let (name, _) = bad.split_once('=').expect("a variable");
        let others = SLURM
            .split_whitespace()
            .filter(|word| !word.starts_with(name));
        let line = format!("{} {bad}", others.collect::<Vec<_>>().join(" "));
        let failure = read(&line).expect_err("cannot be read");
        assert!(failure.title.contains(name), "{failure}");
    }
}

#[test]
fn slurm_numbers_count_only_inside_a_step_of_several_tasks() {
    for line in [
        "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0 SLURM_NODEID=0",
        "SLURM_JOB_ID=7 SLURM_STEP_ID=1 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=8 SLURM_LOCALID=0 \
         SLURM_NODEID=0",
        "SLURM_JOB_ID=7 SLURM_STEP_ID=1 SLURM_NTASKS=8",
    ] {
        assert_eq!(read(line), Ok(Identity::Alone), "{line}");
    }
    // srun --mpi=pmi2 sets these two as well.
    let found = rank(&format!("{SLURM} PMI_RANK=5 PMI_SIZE=8"));
    assert_eq!(found.source, Source::Slurm);
}

#[test]
fn ranks_of_one_start_share_a_job_name_and_other_starts_do_not() {
    let job = |line: &str| rank(line).job;
    let other = TORCHRUN
        .replace("RANK=5", "RANK=4")
        .replace("LOCAL_RANK=1", "LOCAL_RANK=0");
    assert_eq!(job(TORCHRUN), job(&other));
    assert_ne!(job(TORCHRUN), job(&TORCHRUN.replace("COUNT=0", "COUNT=1")));
    assert_ne!(job(SLURM), job(&SLURM.replace("70001", "70002")));
    assert_eq!(job(TORCHRUN).len(), 24);
    // torchrun's agent listens on MASTER_PORT itself.
    let port = rank(TORCHRUN).master.port;
    assert!(port.is_some_and(|port| port != 29_400 && (15_000..35_000).contains(&port)));
    assert_eq!(port, rank(&other).master.port);
    assert_eq!(rank(DEEPSPEED).master.port, Some(29_500));
}

#[test]
fn sources_that_disagree_are_refused_with_both_values() {
    let both = |first: &str, second: &str| format!("{first} {second}");
    let size = |line: &str| {
        line.replace("SIZE=8", "SIZE=6")
            .replace("TASKS=8", "TASKS=6")
    };
    for (line, words) in [
        // Variables set by hand contradict each launcher.
        (
            both(BY_HAND, &size(OPENMPI)),
            ["WORLD_SIZE=8", "OMPI_COMM_WORLD_SIZE=6"],
        ),
        (both(BY_HAND, &size(PMI)), ["WORLD_SIZE=8", "PMI_SIZE=6"]),
        (
            both(BY_HAND, &size(MVAPICH)),
            ["WORLD_SIZE=8", "MV2_COMM_WORLD_SIZE=6"],
        ),
        (
            both(BY_HAND, &size(SLURM)),
            ["WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=6"],
        ),
        (
            both(BY_HAND, &OPENMPI.replace("_RANK=5", "_RANK=2")),
            ["RANK=5", "OMPI_COMM_WORLD_RANK=2"],
        ),
        (
            both(BY_HAND, &SLURM.replace("PROCID=5", "PROCID=4")),
            ["RANK=5", "SLURM_PROCID=4"],
        ),
        (
            both(BY_HAND, &PMI.replace("RANKID=1", "RANKID=0")),
            ["LOCAL_RANK=1", "MPI_LOCALRANKID=0"],
        ),
        // Launchers contradict each other.
        (
            both(OPENMPI, &size(PMI)),
            ["OMPI_COMM_WORLD_SIZE=8", "PMI_SIZE=6"],
        ),
        (
            both(OPENMPI, &size(MVAPICH)),
            ["OMPI_COMM_WORLD_SIZE=8", "MV2_COMM_WORLD_SIZE=6"],
        ),
        (
            both(PMI, &MVAPICH.replace("WORLD_RANK=5", "WORLD_RANK=3")),
            ["PMI_RANK=5", "MV2_COMM_WORLD_RANK=3"],
        ),
        // Two variables for one number contradict each other.
        (
            both(BY_HAND, "LOCAL_SIZE=2"),
            ["LOCAL_WORLD_SIZE=4", "LOCAL_SIZE=2"],
        ),
        (
            both(BY_HAND, "NNODES=2 NPROC_PER_NODE=8"),
            ["WORLD_SIZE=8", "NNODES=2 with NPROC_PER_NODE=8"],
        ),
        (
            both(SLURM, "NNODES=8 NODE_RANK=5 NPROC_PER_NODE=8"),
            ["SLURM_STEP_NUM_TASKS=8", "NNODES=8 with NPROC_PER_NODE=8"],
        ),
        (
            "NNODES=2 PET_NNODES=3 NODE_RANK=0".to_string(),
            ["NNODES=2", "PET_NNODES=3"],
        ),
        (
            "NNODES=2 NODE_RANK=0 PET_NODE_RANK=1".to_string(),
            ["NODE_RANK=0", "PET_NODE_RANK=1"],
        ),
        (
            "NNODES=2 NODE_RANK=0 NPROC_PER_NODE=2 PET_NPROC_PER_NODE=4".to_string(),
            ["NPROC_PER_NODE=2", "PET_NPROC_PER_NODE=4"],
        ),
        (
            "RANK=1 WORLD_SIZE=3 NNODES=2 NPROC_PER_NODE=2".to_string(),
            ["NNODES=2", "WORLD_SIZE=3"],
        ),
        (
            "RANK=1 WORLD_SIZE=2 NODE_RANK=0".to_string(),
            ["NODE_RANK=0", "RANK=1"],
        ),
        (
            both(BY_HAND, "MASTER_PORT=1000 PET_MASTER_PORT=2000"),
            ["MASTER_PORT=1000", "PET_MASTER_PORT=2000"],
        ),
        (
            both(BY_HAND, "MASTER_ADDR=a PET_MASTER_ADDR=b"),
            ["MASTER_ADDR=a", "PET_MASTER_ADDR=b"],
        ),
    ] {
        let failure = read(&line).expect_err(&line);
        assert_eq!(failure.code, ErrorCode::Rendezvous, "{failure}");
        assert!(
            words.iter().all(|word| failure.title.contains(word)),
            "{line}: {failure}"
        );
        assert!(!failure.next.is_empty(), "{failure}");
    }
}

#[test]
fn a_scheduler_task_that_starts_ranks_does_not_contradict_them() {
    for line in [
        // torchrun, or this program, runs inside tasks of other launchers.
        format!(
            "{TORCHRUN} {}",
            SLURM
                .replace("PROCID=5", "PROCID=1")
                .replace("TASKS=8", "TASKS=2")
        ),
        format!("{TORCHRUN} {}", OPENMPI.replace("SIZE=8", "SIZE=2")),
        format!(
            "{BY_HAND} TESSERA_JOB_DIR=/job {}",
            PMI.replace("SIZE=8", "SIZE=2")
        ),
        // The pod's own address no longer applies to its ranks.
        format!("{TORCHRUN} PET_MASTER_ADDR=pod PET_MASTER_PORT=1"),
        // A single task is not a rank.
        format!(
            "{BY_HAND} {}",
            OPENMPI
                .replace("_RANK=5", "_RANK=0")
                .replace("WORLD_SIZE=8", "WORLD_SIZE=1")
        ),
        // MPI starts its helpers with srun.
        format!(
            "{OPENMPI} {}",
            SLURM
                .replace("PROCID=5", "PROCID=1")
                .replace("TASKS=8", "TASKS=2")
        ),
        // Two sources agree.
        format!("{BY_HAND} {OPENMPI} {PMI} {SLURM}"),
    ] {
        assert_eq!((rank(&line).rank, rank(&line).world_size), (5, 8), "{line}");
    }
}

#[test]
fn machines_that_are_numbered_start_their_ranks() {
    let kubeflow = "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456 PET_NNODES=2 PET_NODE_RANK=1";
    for (line, number, nodes, ranks) in [
        (kubeflow.to_string(), 1, 2, None),
        (format!("{kubeflow} PET_NPROC_PER_NODE=4"), 1, 2, Some(4)),
        (format!("{kubeflow} PET_NPROC_PER_NODE=auto"), 1, 2, None),
        // Newer operators count ranks in WORLD_SIZE.
        (
            format!(
                "{} PET_NPROC_PER_NODE=4",
                kubeflow.replace("WORLD_SIZE=2", "WORLD_SIZE=8")
            ),
            1,
            2,
            Some(4),
        ),
        (
            kubeflow.replace("PET_NNODES=2", "PET_NNODES=2:2"),
            1,
            2,
            None,
        ),
        // PAI-DLC.
        (
            "RANK=0 WORLD_SIZE=2 NPROC_PER_NODE=8 MASTER_ADDR=m".to_string(),
            0,
            2,
            Some(8),
        ),
        // LLaMA-Factory and ms-swift.
        (
            "NNODES=2 NODE_RANK=1 NPROC_PER_NODE=4 MASTER_ADDR=m".to_string(),
            1,
            2,
            Some(4),
        ),
        ("NNODES=1 NPROC_PER_NODE=2".to_string(), 0, 1, Some(2)),
        ("NPROC_PER_NODE=2".to_string(), 0, 1, Some(2)),
    ] {
        let found = node_as(&line, None);
        let each = found.ranks.as_ref().map(|(_, each)| *each);
        assert_eq!(
            (found.node_rank, found.nodes, each),
            (number, nodes, ranks),
            "{line}"
        );
    }
    for line in [
        "NNODES=2",
        "NNODES=2 NODE_RANK=2",
        "NNODES=0 NODE_RANK=0",
        "NPROC_PER_NODE=0",
        "NPROC_PER_NODE=x",
        "PET_NNODES=1:4 PET_NODE_RANK=0",
        "PET_NNODES=x:x PET_NODE_RANK=0",
    ] {
        assert_eq!(read(line).expect_err(line).code, ErrorCode::Rendezvous);
    }
}

#[test]
fn rank_numbers_without_local_rank_require_rank_is() {
    let line = "RANK=1 WORLD_SIZE=4";
    let failure = read(line).expect_err("asks");
    let next = crate::lang::Text::join(&failure.next, " ");
    assert!(failure.title.contains("RANK=1") && failure.title.contains("WORLD_SIZE=4"));
    assert!(next.contains("--rank-is node") && next.contains("--rank-is process"));

    let found = node_as(line, Some(RankIs::Node));
    assert_eq!((found.node_rank, found.nodes, found.ranks), (1, 4, None));
    for (more, local_rank, local_size) in [
        ("", 1, 4),
        ("MASTER_ADDR=localhost", 1, 4),
        ("MASTER_ADDR=other", 0, 1),
        ("MASTER_ADDR=other NPROC_PER_NODE=2", 1, 2),
    ] {
        let found = read_as(&format!("{line} {more}"), Some(RankIs::Process));
        let Ok(Identity::Rank(place)) = found else {
            panic!("{more}: {found:?}")
        };
        assert_eq!((place.rank, place.world_size), (1, 4));
        assert_eq!(
            (place.local_rank, place.local_world_size),
            (local_rank, local_size),
            "{more}"
        );
    }
    for (line, rank_is) in [
        ("RANK=1", RankIs::Process),
        ("RANK=5 WORLD_SIZE=4", RankIs::Node),
        ("RANK=5 WORLD_SIZE=4", RankIs::Process),
        (BY_HAND, RankIs::Node),
        (OPENMPI, RankIs::Node),
    ] {
        read_as(line, Some(rank_is)).expect_err(line);
    }
    assert_eq!(read("RANK=0 WORLD_SIZE=1"), Ok(Identity::Alone));
    assert_eq!(read("MASTER_ADDR=x MASTER_PORT=1"), Ok(Identity::Alone));
}

#[test]
fn one_scheduler_task_per_machine_can_start_its_ranks() {
    let slurm = SLURM
        .replace("4(x2)", "1(x8)")
        .replace("LOCALID=1", "LOCALID=0");
    let line = format!("{slurm} NPROC_PER_NODE=4");
    let found = node_as(&line, Some(RankIs::Node));
    assert_eq!((found.node_rank, found.nodes), (5, 8));
    assert_eq!(found.ranks, Some(("NPROC_PER_NODE".to_string(), 4)));
    assert_eq!(found.share(9), (20, 4, 32));
    assert_eq!(found.master.addr.as_deref(), Some("gpu07"));
    let uneven = NodeAssignment {
        node_rank: 2,
        counts: Some(vec![3, 1, 2, 5]),
        ..found
    };
    assert_eq!(uneven.share(9), (4, 2, 11));
}

#[test]
fn incomplete_or_impossible_identity_is_refused() {
    for line in [
        "LOCAL_RANK=0",
        "LOCAL_RANK=0 RANK=0",
        "LOCAL_RANK=0 RANK=2 WORLD_SIZE=2",
        "LOCAL_RANK=x RANK=0 WORLD_SIZE=2",
        "LOCAL_RANK=0 RANK=0 WORLD_SIZE=99999999999",
        "LOCAL_RANK=2 RANK=3 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2",
        "LOCAL_RANK=0 RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=4",
        "LOCAL_RANK=0 RANK=0 WORLD_SIZE=1 MASTER_PORT=70000",
        "LOCAL_RANK=0 RANK=0 WORLD_SIZE=1 MASTER_PORT=0",
        "LOCAL_RANK= RANK=0 WORLD_SIZE=1",
        "OMPI_COMM_WORLD_RANK=0",
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2",
        "PMI_RANK=0 PMI_SIZE=2",
        "SLURM_STEP_ID=0 SLURM_PROCID=0",
        "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=2",
    ] {
        assert_eq!(
            read(line).expect_err(line).code,
            ErrorCode::Rendezvous,
            "{line}"
        );
    }
}
