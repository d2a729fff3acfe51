//! Identity: which rank this process is, from the variables of the program that started it.
//!
//! Sources have a fixed order: `RANK`, `LOCAL_RANK` and `WORLD_SIZE` (torchrun, DeepSpeed, scripts, this program's
//! supervisor), OpenMPI, Intel MPI and MPICH, MVAPICH, Slurm. The first source that is set decides. Later ones must
//! agree, unless one source is known to start the other. For example, processes of torchrun and of this program
//! inherit the variables of their own task, and MPI starts its helpers through Slurm. If only machines are numbered
//! (Kubeflow's PyTorchJob, PAI-DLC, `NNODES`), this process starts the ranks of its machine.

mod compare;
#[cfg(test)]
mod deploy;
pub mod nodelist;
mod sources;
#[cfg(test)]
mod tests;

use crate::lang::{Text, both, text};
use std::ffi::OsString;
use std::fmt;

use clap::ValueEnum;

use crate::error::{ErrorCode, Failure};

/// What the environment variable `RANK` counts if no other variable tells (`--rank-is`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RankIs {
    /// Machines: this process starts the ranks of its machine.
    Node,
    /// Processes: this process is one rank.
    Process,
}

/// Program that set the environment variables with this process's rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// `RANK`, `LOCAL_RANK`, `WORLD_SIZE`: torchrun, DeepSpeed, a script.
    Torch,
    /// OpenMPI's mpirun.
    OpenMpi,
    /// mpirun of Intel MPI and MPICH.
    Pmi,
    /// MVAPICH's mpirun.
    Mvapich,
    /// Slurm's srun.
    Slurm,
    /// `RANK` and `WORLD_SIZE` of machines, `NNODES` and similar.
    Nodes,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Torch => both(
                "RANK, LOCAL_RANK and WORLD_SIZE",
                "RANK、LOCAL_RANK 和 WORLD_SIZE",
            ),
            Self::OpenMpi => both("OpenMPI", "OpenMPI"),
            Self::Pmi => both("Intel MPI or MPICH", "Intel MPI 或 MPICH"),
            Self::Mvapich => both("MVAPICH", "MVAPICH"),
            Self::Slurm => both("Slurm", "Slurm"),
            Self::Nodes => both("NNODES and its kind", "NNODES 及同类变量"),
        };
        name.fmt(f)
    }
}

/// Role of this process in a job, as its environment variables tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// No variable is set: this process starts all ranks.
    Alone,
    /// This process is a rank.
    Rank(RankAssignment),
    /// This process starts the ranks of its machine.
    Node(NodeAssignment),
}

/// Place of a rank process in its job: its rank, the number of ranks, and the address of the rendezvous.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankAssignment {
    /// Rank of this process, counted over all machines from 0.
    pub rank: usize,
    /// Rank of this process among those on its machine (local rank), from 0.
    pub local_rank: usize,
    /// Number of ranks on all machines.
    pub world_size: usize,
    /// Number of ranks on this machine (local world size).
    pub local_world_size: usize,
    /// Address of the rendezvous, as far as variables give it.
    pub master: Master,
    /// Program that set the variables with these numbers.
    pub source: Source,
    /// Identifier of this start of the job: the same on all its ranks, derived from its address and the
    /// scheduler's ids. It is not secret.
    pub job: String,
}

/// Place of a machine in a job: its number among the machines, and how many ranks run on each machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeAssignment {
    /// Number of this machine among those of the job, from 0.
    pub node_rank: usize,
    /// Number of machines in the job.
    pub nodes: usize,
    /// The variable that gives the number of ranks per machine, and that number. `None` if no variable gives
    /// it.
    pub ranks: Option<(String, usize)>,
    /// Number of ranks on each machine, indexed by machine, if a hostfile gives them.
    pub counts: Option<Vec<usize>>,
    /// Address of the rendezvous, as far as variables give it.
    pub master: Master,
    /// Identifier of this start of the job: the same on all its machines. It is not secret.
    pub job: String,
}

impl NodeAssignment {
    /// Ranks of this machine as (its first rank, number of its ranks, number of ranks on all machines).
    /// `each` is the number of ranks per machine if no variable or hostfile gives it.
    pub fn share(&self, each: usize) -> (usize, usize, usize) {
        match &self.counts {
            Some(counts) => (
                counts[..self.node_rank].iter().sum(),
                counts[self.node_rank],
                counts.iter().sum(),
            ),
            None => {
                let each = self.ranks.as_ref().map_or(each, |(_, told)| *told);
                (self.node_rank * each, each, self.nodes * each)
            }
        }
    }
}

/// Address of the rendezvous over several machines: host and port on which rank 0 listens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Master {
    /// Host name or address of rank 0's machine. `None` if it is not known.
    pub addr: Option<String>,
    /// TCP port on which rank 0 listens. `None` if no variable gives it.
    pub port: Option<u16>,
}

/// Role of this process in its job: supervisor of all ranks, supervisor of one machine's ranks, or a rank.
/// `lookup` returns the value of an environment variable by name.
///
/// `rank_is` says whether `RANK` counts machines or processes, if the variables do not tell.
///
/// # Errors
/// Variables are incomplete, not numbers, contradictory, or ambiguous in what they count (exit 13).
pub fn find(
    lookup: &dyn Fn(&str) -> Option<OsString>,
    rank_is: Option<RankIs>,
) -> Result<Identity, Failure> {
    let vars = Vars(lookup);
    let tasks = sources::tasks(&vars)?;
    compare::agree(&vars, &tasks)?;
    if let Some(task) = tasks.first() {
        if rank_is == Some(RankIs::Node) && task.source != Source::Torch {
            return sources::one_task_per_node(&vars, task).map(Identity::Node);
        }
        if rank_is == Some(RankIs::Node) && !vars.is_nested() {
            return Err(refused(
                text!(
                    "--rank-is node and {} contradict each other",
                    "--rank-is node 与 {} 互相矛盾",
                    task.local_rank
                ),
                both(
                    "a process with a local rank number is a rank",
                    "带有本地 rank 编号的进程是一个 rank",
                ),
            )
            .next(both(
                "omit --rank-is, or unset LOCAL_RANK",
                "请去掉 --rank-is，或取消设置 LOCAL_RANK",
            )));
        }
        return sources::place(&vars, task).map(Identity::Rank);
    }
    sources::without_local_rank(&vars, rank_is)
}

/// Environment variable whose value is a number.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Reading {
    name: String,
    value: usize,
}

impl fmt::Display for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)
    }
}

/// Rank and number of ranks of this process, as one source gives them.
#[derive(Debug, Clone)]
struct TaskNumbers {
    source: Source,
    rank: Reading,
    size: Reading,
    local_rank: Reading,
    local_size: Option<Reading>,
}

struct Vars<'a>(&'a dyn Fn(&str) -> Option<OsString>);

impl Vars<'_> {
    /// Text of a variable that is set and not empty.
    fn text(&self, name: &str) -> Option<String> {
        let value = (self.0)(name)?.to_string_lossy().trim().to_string();
        (!value.is_empty()).then_some(value)
    }

    fn number(&self, name: &str) -> Result<Option<Reading>, Failure> {
        let Some(value) = (self.0)(name) else {
            return Ok(None);
        };
        let text = value.to_string_lossy();
        // Far above any cluster, and far below where products overflow.
        let parsed = text.trim().parse().ok().filter(|n: &usize| *n <= 1 << 24);
        match parsed {
            Some(value) => Ok(Some(Reading {
                name: name.to_string(),
                value,
            })),
            None => Err(not_a_number(name, &text)),
        }
    }

    /// Number of the first of `names` that is set. Others that are set must be equal.
    fn same(&self, names: &[&str]) -> Result<Option<Reading>, Failure> {
        let mut first: Option<Reading> = None;
        for name in names {
            let Some(reading) = self.number(name)? else {
                continue;
            };
            match &first {
                Some(known) if known.value != reading.value => {
                    return Err(conflict(known.to_string(), reading.to_string()));
                }
                Some(_) => {}
                None => first = Some(reading),
            }
        }
        Ok(first)
    }

    /// Whether torchrun, or this program, started this process inside a task that another program numbered.
    fn is_nested(&self) -> bool {
        ["TORCHELASTIC_RUN_ID", crate::rank_env::JOB_DIR]
            .iter()
            .any(|name| (self.0)(name).is_some())
    }
}

fn not_a_number(name: &str, value: &str) -> Failure {
    refused(
        text!(
            "environment variable {name}={value:?} is not a number in range",
            "环境变量 {name}={value:?} 不是范围内的数"
        ),
        both(
            "rank variables must be whole numbers",
            "rank 变量必须是整数",
        ),
    )
    .next(text!(
        "unset {name}, or set it to a whole number",
        "请取消设置 {name}，或把它设为整数"
    ))
}

/// Failure of two sources that contradict each other.
fn conflict(first: impl fmt::Display, second: impl fmt::Display) -> Failure {
    refused(
        text!("{first} and {second} contradict each other", "{first} 与 {second} 互相矛盾"),
        both("both set the rank of this process, or the number of ranks", "两者都设定本进程的 rank 或 rank 数"),
    )
    .next(both("unset variables that an earlier start left over, or export the variables of one source only", "请取消设置先前启动留下的变量，或只导出同一来源的变量"))
}

fn refused(title: impl Into<Text>, cause: impl Into<Text>) -> Failure {
    Failure::new(ErrorCode::Rendezvous, title, cause)
}
