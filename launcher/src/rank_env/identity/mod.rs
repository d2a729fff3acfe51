//! Which rank this process is, from the variables of whatever started it.
//!
//! Sources are asked in a fixed order: `RANK`, `LOCAL_RANK` and `WORLD_SIZE` (torchrun, DeepSpeed, scripts, our own
//! supervisor), OpenMPI, Intel MPI and MPICH, MVAPICH, Slurm. The first that is set decides. A later one that is set
//! too must say the same, unless one is known to start the other: what torchrun or this program starts inherits the
//! variables of its own task, and MPI starts its helpers through Slurm. Where only machines are numbered (Kubeflow's
//! PyTorchJob, PAI-DLC, `NNODES`), this process starts the ranks of its machine.

mod compare;
#[cfg(test)]
mod deploy;
pub mod nodelist;
mod sources;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::fmt;

use clap::ValueEnum;

use crate::error::{ErrorCode, Failure};

/// What `RANK` counts where nothing else tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RankIs {
    /// Machines: this process starts the ranks of its machine.
    Node,
    /// Processes: this process is one rank.
    Process,
}

/// Who set the variables.
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
    /// `RANK` and `WORLD_SIZE` of machines, `NNODES` and its kind.
    Nodes,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torch => "RANK, LOCAL_RANK and WORLD_SIZE",
            Self::OpenMpi => "OpenMPI",
            Self::Pmi => "Intel MPI or MPICH",
            Self::Mvapich => "MVAPICH",
            Self::Slurm => "Slurm",
            Self::Nodes => "NNODES and its kind",
        })
    }
}

/// What the variables say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// Nothing: this process starts all ranks.
    Alone,
    /// This process is a rank.
    Rank(RankPlace),
    /// This process starts the ranks of its machine.
    Node(NodePlace),
}

/// The place of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankPlace {
    /// Rank over all machines.
    pub rank: usize,
    /// Rank on this machine.
    pub local_rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Number of ranks on this machine.
    pub local_world_size: usize,
    /// Where ranks meet, as far as the variables say.
    pub master: Master,
    /// Who said so.
    pub source: Source,
    /// Names this start of the job: the same on all ranks, no secret.
    pub job: String,
}

/// The place of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePlace {
    /// Number of this machine.
    pub node_rank: usize,
    /// Number of machines.
    pub nodes: usize,
    /// Ranks on each machine, and the variable that says so.
    pub ranks: Option<(String, usize)>,
    /// Ranks of every machine, where a hostfile says so.
    pub counts: Option<Vec<usize>>,
    /// Where ranks meet, as far as the variables say.
    pub master: Master,
    /// Names this start of the job: the same on all machines, no secret.
    pub job: String,
}

impl NodePlace {
    /// The first rank of this machine, the number of its ranks, and that of all; `each` where nothing else tells.
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

/// Where the ranks of several machines meet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Master {
    /// Name or address of the machine of rank 0.
    pub addr: Option<String>,
    /// Port there.
    pub port: Option<u16>,
}

/// Reads who this process is.
///
/// # Errors
/// Variables are incomplete, are no numbers, contradict each other, or do not tell what they count (exit 13).
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
                format!(
                    "--rank-is node and {} contradict each other",
                    task.local_rank
                ),
                "a process with a local rank number is a rank",
            )
            .next("omit --rank-is, or unset LOCAL_RANK"));
        }
        return sources::place(&vars, task).map(Identity::Rank);
    }
    sources::without_local_rank(&vars, rank_is)
}

/// A variable that was set to a number.
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

/// A process that one source numbers.
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
    /// The text of a variable that is set to something.
    fn text(&self, name: &str) -> Option<String> {
        let value = (self.0)(name)?.to_string_lossy().trim().to_string();
        (!value.is_empty()).then_some(value)
    }

    fn number(&self, name: &str) -> Result<Option<Reading>, Failure> {
        let Some(value) = (self.0)(name) else {
            return Ok(None);
        };
        let text = value.to_string_lossy();
        // Far above every machine, and far below where products could overflow.
        let parsed = text.trim().parse().ok().filter(|n: &usize| *n <= 1 << 24);
        match parsed {
            Some(value) => Ok(Some(Reading {
                name: name.to_string(),
                value,
            })),
            None => Err(not_a_number(name, &text)),
        }
    }

    /// The number of the first of `names` that is set; the others must not differ.
    fn same(&self, names: &[&str]) -> Result<Option<Reading>, Failure> {
        let mut first: Option<Reading> = None;
        for name in names {
            let Some(reading) = self.number(name)? else {
                continue;
            };
            match &first {
                Some(known) if known.value != reading.value => {
                    return Err(conflict(&known.to_string(), &reading.to_string()));
                }
                Some(_) => {}
                None => first = Some(reading),
            }
        }
        Ok(first)
    }

    /// Whether torchrun, or this program, started this process inside of a task that others numbered.
    fn is_nested(&self) -> bool {
        ["TORCHELASTIC_RUN_ID", crate::rank_env::JOB_DIR]
            .iter()
            .any(|name| (self.0)(name).is_some())
    }
}

fn not_a_number(name: &str, value: &str) -> Failure {
    refused(
        format!("environment variable {name}={value:?} is not a number in range"),
        "rank variables must be whole numbers",
    )
}

/// Two sources that say different things.
fn conflict(first: &str, second: &str) -> Failure {
    refused(
        format!("{first} and {second} contradict each other"),
        "both set the rank of this process, or the number of ranks",
    )
    .next("unset variables that an earlier start left over, or export the variables of one source only")
}

fn refused(title: String, cause: &str) -> Failure {
    Failure::new(ErrorCode::Rendezvous, title, cause)
}
