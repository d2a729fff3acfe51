//! Check that sources which are set at the same time agree.

use super::{Source, TaskNumbers, Vars, conflict};
use crate::error::Failure;
use crate::lang::{Text, both, text};

/// Compares the numbers of the first source in `tasks`, which decides, with those of every other source.
pub(super) fn agree(vars: &Vars<'_>, tasks: &[TaskNumbers]) -> Result<(), Failure> {
    let Some((first, others)) = tasks.split_first() else {
        return Ok(());
    };
    if first.source == Source::Torch && vars.is_nested() {
        return Ok(());
    }
    for other in others {
        // One program starts the tasks of the other. MPI's helpers are Slurm's tasks but not its ranks.
        let starts_them =
            other.size.value == 1 || other.source == Source::Slurm && first.source != Source::Torch;
        if starts_them {
            continue;
        }
        for (own, theirs) in [
            (&first.size, &other.size),
            (&first.rank, &other.rank),
            (&first.local_rank, &other.local_rank),
        ] {
            if own.value != theirs.value {
                return Err(between(first, other, &own.to_string(), &theirs.to_string()));
            }
        }
    }
    machines(vars, first)
}

/// Checks that number of machines times ranks per machine is the number of ranks.
fn machines(vars: &Vars<'_>, first: &TaskNumbers) -> Result<(), Failure> {
    let nodes = vars.same(&["NNODES", "PET_NNODES"]);
    let each = vars.same(&["NPROC_PER_NODE", "PET_NPROC_PER_NODE"]);
    // Ranges of machines and words such as `gpu` are valid for torchrun only; they cannot be compared.
    let (Ok(Some(nodes)), Ok(Some(each))) = (nodes, each) else {
        return Ok(());
    };
    if nodes.value * each.value == first.size.value {
        return Ok(());
    }
    let failure = conflict(
        Text::literal(&first.size),
        text!("{nodes} with {each}", "{nodes}，{each}"),
    );
    Err(match first.source {
        Source::Torch => failure,
        _ => failure.next(both(
            "--rank-is node: each of these processes represents a machine and starts its ranks",
            "使用 --rank-is node：其中每个进程代表一台机器，并启动该机器的 rank",
        )),
    })
}

fn between(first: &TaskNumbers, other: &TaskNumbers, own: &str, theirs: &str) -> Failure {
    let numbers = |task: &TaskNumbers| {
        Text::literal(format_args!(
            "{}: {} {} {}",
            task.source, task.rank, task.size, task.local_rank
        ))
    };
    conflict(own, theirs)
        .evidence(numbers(first))
        .evidence(numbers(other))
}
