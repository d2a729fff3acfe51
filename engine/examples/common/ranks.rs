//! Starts this program once per rank and joins the processes to a world over shared memory.

use engine::comm::{Communicator, World, shm};
use std::error::Error;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::Arc;

/// Bytes of each rank's part of the shared window: several of the largest group.
const REGION_BYTES: usize = 1 << 20;

/// Runs `work` in `size` processes and ends well if all of them do. The first call starts the ranks, which are this
/// program again, told apart by their arguments.
pub(crate) fn in_processes(
    size: usize,
    work: impl FnOnce(Arc<dyn Communicator>) -> Result<(), Box<dyn Error>>,
) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let ended = match &arguments[..] {
        [part, rank, window] if part == "rank" => rank
            .parse()
            .map_err(Into::into)
            .and_then(|rank| {
                let world = World { rank, size };
                let options = shm::ShmOptions::new(window.as_str(), world, REGION_BYTES);
                Ok(shm::join(&options)?)
            })
            .and_then(work),
        _ => start(size),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Directory for checkpoints of the processes that the process `parent` started.
fn directory_of(parent: u32) -> PathBuf {
    std::env::temp_dir().join(format!("engine-example-checkpoints-{parent}"))
}

/// Directory for checkpoints of all ranks, which is removed at the end.
pub(crate) fn directory() -> PathBuf {
    directory_of(std::os::unix::process::parent_id())
}

fn start(size: usize) -> Result<(), Box<dyn Error>> {
    let directory = directory_of(std::process::id());
    std::fs::create_dir(&directory)?;
    let ended = start_ranks(size);
    std::fs::remove_dir_all(&directory)?;
    ended
}

fn start_ranks(size: usize) -> Result<(), Box<dyn Error>> {
    let program = std::env::current_exe()?;
    let window = format!("engine-example-{}", std::process::id());
    let mut ranks = Vec::new();
    for rank in 0..size {
        let mut command = Command::new(&program);
        ranks.push(command.args(["rank", &rank.to_string(), &window]).spawn()?);
    }
    for (rank, process) in ranks.iter_mut().enumerate() {
        let status = process.wait()?;
        if !status.success() {
            return Err(format!("rank {rank} ended with {status}").into());
        }
    }
    Ok(())
}
