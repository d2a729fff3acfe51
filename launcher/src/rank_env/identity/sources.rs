//! Variables of each source, and how their numbers are read.

use super::{
    Identity, Master, NodeAssignment, RankAssignment, RankIs, Reading, Source, TaskNumbers, Vars,
    conflict, nodelist, not_a_number, refused,
};
use crate::error::Failure;
use crate::lang::{Text, both, text};
use crate::rank_env::{LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE};

/// Names of the variables for rank, world size, local rank, local world size.
type Names = (Source, [&'static str; 4]);

const MPI: [Names; 3] = [
    (
        Source::OpenMpi,
        [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ],
    ),
    (
        Source::Pmi,
        ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    ),
    (
        Source::Mvapich,
        [
            "MV2_COMM_WORLD_RANK",
            "MV2_COMM_WORLD_SIZE",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_SIZE",
        ],
    ),
];

/// Ports derived from a job's name: the first one, and how many.
const JOB_PORTS: (u64, u64) = (15_000, 20_000);

/// Every source that numbers this process. The first one decides.
pub(super) fn tasks(vars: &Vars<'_>) -> Result<Vec<TaskNumbers>, Failure> {
    let mut found = Vec::new();
    found.extend(torch(vars)?);
    for (source, names) in MPI {
        found.extend(mpi(vars, source, names)?);
    }
    found.extend(slurm(vars)?);
    Ok(found)
}

fn torch(vars: &Vars<'_>) -> Result<Option<TaskNumbers>, Failure> {
    let Some(local_rank) = vars.number(LOCAL_RANK)? else {
        return Ok(None);
    };
    let needed = |name: &str| {
        vars.number(name)?.ok_or_else(|| {
            incomplete(&local_rank, name).next(
                both("start with `launcher --nproc N`, torchrun, or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT", "请用 `launcher --nproc N` 或 torchrun 启动，或设置 RANK、LOCAL_RANK、WORLD_SIZE、MASTER_ADDR 和 MASTER_PORT"),
            )
        })
    };
    Ok(Some(TaskNumbers {
        source: Source::Torch,
        rank: needed(RANK)?,
        size: needed(WORLD_SIZE)?,
        local_size: vars.same(&[LOCAL_WORLD_SIZE, "LOCAL_SIZE"])?,
        local_rank,
    }))
}

fn mpi(
    vars: &Vars<'_>,
    source: Source,
    [rank, size, local_rank, local_size]: [&'static str; 4],
) -> Result<Option<TaskNumbers>, Failure> {
    let Some(rank) = vars.number(rank)? else {
        return Ok(None);
    };
    let size = vars.number(size)?.ok_or_else(|| incomplete(&rank, size))?;
    let Some(local_rank) = vars.number(local_rank)? else {
        // srun also sets these two variables for its tasks; its other numbers have its own names.
        if source == Source::Pmi && vars.text("SLURM_STEP_ID").is_some() {
            return Ok(None);
        }
        return Err(incomplete(&rank, local_rank));
    };
    Ok(Some(TaskNumbers {
        source,
        rank,
        size,
        local_rank,
        local_size: vars.number(local_size)?,
    }))
}

/// Task of srun. A batch script has some of these variables, too, but no step. A step of one task is a shell, or
/// starts its ranks itself.
fn slurm(vars: &Vars<'_>) -> Result<Option<TaskNumbers>, Failure> {
    if vars.text("SLURM_STEP_ID").is_none() {
        return Ok(None);
    }
    let Some(rank) = vars.number("SLURM_PROCID")? else {
        return Ok(None);
    };
    // The job's number of tasks may be that of all its steps.
    let size = match vars.number("SLURM_STEP_NUM_TASKS")? {
        Some(size) => size,
        None => vars
            .number("SLURM_NTASKS")?
            .ok_or_else(|| incomplete(&rank, "SLURM_NTASKS"))?,
    };
    if size.value == 1 {
        return Ok(None);
    }
    let needed = |name: &str| vars.number(name)?.ok_or_else(|| incomplete(&rank, name));
    let local_rank = needed("SLURM_LOCALID")?;
    let node = needed("SLURM_NODEID")?;
    let counts = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
    let counts = counts
        .into_iter()
        .find_map(|name| Some((name, vars.text(name)?)));
    let local_size = match counts {
        None => None,
        Some((name, text)) => nodelist::count_at(&text, node.value)
            .map_err(|error| {
                refused(
                    text!(
                        "environment variable {name}={text:?} cannot be read",
                        "无法解析环境变量 {name}={text:?}"
                    ),
                    both(
                        "Slurm lists the tasks of each machine in it, for example 2(x3),1",
                        "Slurm 在其中列出每台机器的任务数，例如 2(x3),1",
                    ),
                )
                .evidence(Text::literal(&error))
            })?
            .map(|value| Reading {
                name: name.to_string(),
                value,
            }),
    };
    Ok(Some(TaskNumbers {
        source: Source::Slurm,
        rank,
        size,
        local_rank,
        local_size,
    }))
}

fn incomplete(known: &Reading, missing: &str) -> Failure {
    refused(
        text!(
            "{known} is set but {missing} is not",
            "设置了 {known}，但没有设置 {missing}"
        ),
        both(
            "a rank needs all of its variables",
            "一个 rank 需要它的所有变量",
        ),
    )
}

/// The place of the rank that `task` numbers.
pub(super) fn place(vars: &Vars<'_>, task: &TaskNumbers) -> Result<RankAssignment, Failure> {
    let (rank, size, local) = (task.rank.value, task.size.value, task.local_rank.value);
    let local_size = task.local_size.as_ref().map_or(size, |read| read.value);
    if rank >= size || local >= local_size || local_size > size || local > rank {
        let local_size = task.local_size.as_ref().map(Reading::to_string);
        return Err(refused(
            both(
                "the rank variables contradict each other",
                "rank 变量互相矛盾",
            ),
            both(
                "a rank must be smaller than the world size",
                "rank 必须小于 world size",
            ),
        )
        .evidence(Text::literal(format_args!(
            "{} {} {} {}",
            task.rank,
            task.size,
            task.local_rank,
            local_size.unwrap_or_default()
        ))));
    }
    let mut master = master(vars, task.source)?;
    let job = job(vars, &master);
    if vars.text("TORCHELASTIC_RUN_ID").is_some() {
        // The agent of torchrun listens on MASTER_PORT itself.
        master.port = Some(port_of(&job));
    }
    Ok(RankAssignment {
        rank,
        local_rank: local,
        world_size: size,
        local_world_size: local_size,
        job,
        master,
        source: task.source,
    })
}

/// The place of a machine, from the task of an MPI or of Slurm that was started on it.
pub(super) fn one_task_per_node(
    vars: &Vars<'_>,
    task: &TaskNumbers,
) -> Result<NodeAssignment, Failure> {
    if let Some(several) = task.local_size.as_ref().filter(|read| read.value != 1) {
        return Err(refused(
            text!(
                "--rank-is node and {several} contradict each other",
                "--rank-is node 与 {several} 互相矛盾"
            ),
            both(
                "only one process of a machine can start its ranks",
                "每台机器只能由一个进程启动它的 rank",
            ),
        )
        .next(both(
            "one task per machine, such as srun --ntasks-per-node=1, or omit --rank-is",
            "请每台机器只启动一个任务，例如 srun --ntasks-per-node=1，或去掉 --rank-is",
        )));
    }
    let master = master(vars, task.source)?;
    Ok(NodeAssignment {
        node_rank: task.rank.value,
        nodes: task.size.value,
        ranks: per_node(vars)?,
        counts: None,
        job: job(vars, &master),
        master,
    })
}

/// Identity without a local rank: from a number of machines, or from `RANK` and `WORLD_SIZE`, which may count
/// machines or processes.
pub(super) fn without_local_rank(
    vars: &Vars<'_>,
    rank_is: Option<RankIs>,
) -> Result<Identity, Failure> {
    let world = vars.number(WORLD_SIZE)?;
    let rank = vars.number(RANK)?;
    let nodes = nodes(vars)?;
    let node = vars.same(&["NODE_RANK", "PET_NODE_RANK"])?;
    let each = per_node(vars)?;
    let counted = world.as_ref().filter(|world| world.value > 1);
    if rank_is == Some(RankIs::Process) {
        return match (rank, world) {
            (Some(rank), Some(world)) => bare_process(vars, &rank, &world, each),
            _ => Err(refused(
                both(
                    "--rank-is process needs RANK and WORLD_SIZE",
                    "--rank-is process 需要 RANK 和 WORLD_SIZE",
                ),
                both("they set the rank of this process", "它们设定本进程的 rank"),
            )),
        };
    }
    let says_machines = nodes.is_some() || node.is_some() || each.is_some();
    if counted.is_some() && !says_machines && rank_is.is_none() {
        let (rank, world) = (named(&rank, RANK), named(&world, WORLD_SIZE));
        return Err(refused(
            text!(
                "{rank} and {world} are set but {LOCAL_RANK} is not",
                "设置了 {rank} 和 {world}，但没有设置 {LOCAL_RANK}"
            ),
            both(
                "some schedulers number machines with them, and some scripts number processes",
                "有的调度器用它们为机器编号，有的脚本用它们为进程编号",
            ),
        )
        .next(both(
            "--rank-is node: this process starts the ranks of its machine (PyTorchJob, PAI-DLC)",
            "--rank-is node：本进程启动所在机器的 rank（PyTorchJob、PAI-DLC）",
        ))
        .next(both(
            "--rank-is process: this process is one rank",
            "--rank-is process：本进程是一个 rank",
        ))
        .next(both(
            "unset RANK and WORLD_SIZE to run on this machine alone",
            "如果只在本机运行，请取消设置 RANK 和 WORLD_SIZE",
        )));
    }
    if !says_machines && counted.is_none() {
        return Ok(Identity::Alone);
    }
    let count = match (&nodes, counted) {
        (Some(nodes), Some(world)) => {
            let ranks = each.as_ref().map(|(_, each)| nodes.value * each);
            if world.value != nodes.value && Some(world.value) != ranks {
                return Err(conflict(nodes.to_string(), world.to_string()));
            }
            nodes.value
        }
        (Some(nodes), None) => nodes.value,
        (None, Some(world)) => world.value,
        (None, None) => 1,
    };
    let number = match (&node, &rank) {
        (Some(node), Some(rank)) if counted.is_some() && node.value != rank.value => {
            return Err(conflict(node.to_string(), rank.to_string()));
        }
        (Some(node), _) => node.value,
        (None, Some(rank)) if counted.is_some() => rank.value,
        _ if count == 1 => 0,
        _ => {
            return Err(refused(
                text!(
                    "{count} machines, but this machine has no number",
                    "共 {count} 台机器，但本机没有编号"
                ),
                both(
                    "each machine needs its own number from 0",
                    "每台机器需要自己的编号，从 0 开始",
                ),
            )
            .next(both("set NODE_RANK", "请设置 NODE_RANK")));
        }
    };
    if count == 0 || number >= count {
        return Err(refused(
            text!(
                "machine {number} of {count}",
                "机器编号 {number}，共 {count} 台"
            ),
            both("machines are counted from 0", "机器从 0 开始编号"),
        ));
    }
    let master = master(vars, Source::Nodes)?;
    Ok(Identity::Node(NodeAssignment {
        node_rank: number,
        nodes: count,
        ranks: each,
        counts: None,
        job: job(vars, &master),
        master,
    }))
}

/// Rank with `RANK` and `WORLD_SIZE` alone: it belongs to a known number per machine, or all ranks are on this
/// machine, or it is the only one here.
fn bare_process(
    vars: &Vars<'_>,
    rank: &Reading,
    world: &Reading,
    each: Option<(String, usize)>,
) -> Result<Identity, Failure> {
    let elsewhere = vars
        .text(MASTER_ADDR)
        .is_some_and(|addr| !matches!(&*addr, "localhost" | "127.0.0.1" | "::1"));
    let here = match each {
        Some((_, each)) => each.min(world.value),
        None if elsewhere => 1,
        None => world.value,
    };
    let reading = |name: &str, value: usize| Reading {
        name: name.to_string(),
        value,
    };
    let task = TaskNumbers {
        source: Source::Torch,
        rank: rank.clone(),
        size: world.clone(),
        local_rank: reading(LOCAL_RANK, rank.value % here.max(1)),
        local_size: Some(reading(LOCAL_WORLD_SIZE, here)),
    };
    place(vars, &task).map(Identity::Rank)
}

/// Number of machines; the range `2:4` of an elastic job does not count.
fn nodes(vars: &Vars<'_>) -> Result<Option<Reading>, Failure> {
    if let Some(range) = vars.text("PET_NNODES").filter(|text| text.contains(':')) {
        let (fewest, most) = range.split_once(':').unwrap_or((&range, &range));
        if fewest != most {
            return Err(refused(
                text!(
                    "PET_NNODES={range}: the number of machines may change",
                    "PET_NNODES={range}：机器数可能变化"
                ),
                both(
                    "a run has a fixed number of ranks",
                    "一次运行的 rank 数是固定的",
                ),
            )
            .next(both(
                "give the job a fixed number of machines",
                "请为作业指定固定的机器数",
            )));
        }
        let value = fewest.parse().ok().filter(|count| *count <= 1 << 24);
        let value = value.ok_or_else(|| not_a_number("PET_NNODES", &range))?;
        return Ok(Some(Reading {
            name: "PET_NNODES".to_string(),
            value,
        }));
    }
    vars.same(&["NNODES", "PET_NNODES"])
}

/// Number of ranks per machine; words that leave the number to the machine do not count.
fn per_node(vars: &Vars<'_>) -> Result<Option<(String, usize)>, Failure> {
    let mut found: Option<Reading> = None;
    for name in ["NPROC_PER_NODE", "PET_NPROC_PER_NODE"] {
        let text = vars.text(name);
        if text.is_none_or(|text| matches!(&*text, "auto" | "gpu" | "cpu")) {
            continue;
        }
        let Some(reading) = vars.number(name)? else {
            continue;
        };
        if reading.value == 0 {
            return Err(not_a_number(name, "0"));
        }
        match &found {
            Some(known) if known.value != reading.value => {
                return Err(conflict(known.to_string(), reading.to_string()));
            }
            Some(_) => {}
            None => found = Some(reading),
        }
    }
    Ok(found.map(|reading| (reading.name, reading.value)))
}

fn named(reading: &Option<Reading>, name: &str) -> Text {
    match reading {
        Some(reading) => Text::literal(reading),
        None => text!("{name} (unset)", "{name}（未设置）"),
    }
}

/// Address of the rendezvous: `MASTER_ADDR` and `MASTER_PORT`. Under Slurm, the first machine and a port derived from
/// the job.
fn master(vars: &Vars<'_>, source: Source) -> Result<Master, Failure> {
    // A launcher inside a pod sets its own address.
    let from_pod = !vars.is_nested();
    let ports = [MASTER_PORT, "PET_MASTER_PORT"];
    let port = match vars.same(if from_pod { &ports } else { &ports[..1] })? {
        Some(read) => Some(
            u16::try_from(read.value)
                .ok()
                .filter(|port| *port > 0)
                .ok_or_else(|| not_a_number(&read.name, &read.value.to_string()))?,
        ),
        None => None,
    };
    let own = vars.text(MASTER_ADDR);
    let other = vars.text("PET_MASTER_ADDR").filter(|_| from_pod);
    let mut master = Master {
        addr: match (own, other) {
            (Some(own), Some(other)) if own != other => {
                return Err(conflict(
                    format!("{MASTER_ADDR}={own}"),
                    format!("PET_MASTER_ADDR={other}"),
                ));
            }
            (own, other) => own.or(other),
        },
        port,
    };
    if source != Source::Slurm {
        return Ok(master);
    }
    if master.addr.is_none() {
        let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];
        if let Some((name, text)) = lists
            .into_iter()
            .find_map(|name| Some((name, vars.text(name)?)))
        {
            let hosts = nodelist::expand(&text).map_err(|error| {
                refused(
                    text!(
                        "environment variable {name}={text:?} cannot be read",
                        "无法解析环境变量 {name}={text:?}"
                    ),
                    both(
                        "Slurm lists the machines of the job in it, for example gpu[01-04,07],b1",
                        "Slurm 在其中列出作业的机器，例如 gpu[01-04,07],b1",
                    ),
                )
                .evidence(Text::literal(&error))
                .next(both(
                    "set MASTER_ADDR to the first machine",
                    "请把 MASTER_ADDR 设为第一台机器",
                ))
            })?;
            master.addr = hosts.into_iter().next();
        }
    }
    if master.port.is_none() {
        let job: Option<u64> = vars.text("SLURM_JOB_ID").and_then(|text| text.parse().ok());
        let (from, count) = JOB_PORTS;
        master.port = job.and_then(|job| u16::try_from(from + job % count).ok());
    }
    Ok(master)
}

/// Port that every rank derives from the name of the job.
fn port_of(job: &str) -> u16 {
    let (from, count) = JOB_PORTS;
    let number = job
        .bytes()
        .fold(0u64, |sum, byte| (sum * 31 + u64::from(byte)) % count);
    u16::try_from(from + number).unwrap_or(u16::MAX)
}

/// Name of this start of the job: equal on all its ranks, different from other jobs.
fn job(vars: &Vars<'_>, master: &Master) -> String {
    let mut parts = vec![
        master.addr.clone().unwrap_or_default(),
        master
            .port
            .map_or_else(String::new, |port| port.to_string()),
    ];
    let names = [
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "PMIX_NAMESPACE",
    ];
    parts.extend(names.map(|name| vars.text(name).unwrap_or_default()));
    blake3::hash(parts.join("\n").as_bytes()).to_hex()[..24].to_string()
}
