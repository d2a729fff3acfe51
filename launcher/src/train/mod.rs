//! Work of one rank, from the plan of its run to the last report.

mod batches;
mod collectives;
pub(crate) mod evaluate;
mod inject;
mod numeric;
pub(crate) mod replica;
mod save;
mod spill;
mod stall;
mod step_context;
mod tiers;
mod trace;
mod trainer;

use crate::config::{RunPlan, Task};
use crate::device::Devices;
use crate::error::Failure;
use crate::launch::rank::{RunSummary, StopFlag};
use crate::rank_env::RankEnv;
use replica::{NotOpened, Opened};
use trainer::Trainer;

/// Main function of a rank.
///
/// # Errors
/// Any failure that ends the run early.
pub(crate) fn rank_main(
    config: &RunPlan,
    env: &RankEnv,
    stop: &StopFlag,
    devices: &dyn Devices,
) -> Result<RunSummary, Failure> {
    let opened = match Opened::open(config, env, stop, devices) {
        Ok(opened) => opened,
        Err(NotOpened::IpcRefused(why)) => {
            return Ok(RunSummary {
                ipc_refused: Some(why),
                ..RunSummary::default()
            });
        }
        Err(NotOpened::SharesGpu(ranks)) => {
            return Ok(RunSummary {
                ranks_per_gpu: Some(ranks),
                ..RunSummary::default()
            });
        }
        Err(NotOpened::Failed(failure)) => return Err(*failure),
    };
    let mut trainer = Trainer::new(opened);
    let result = match config.task {
        Task::Train => trainer.train(stop),
        Task::Evaluate => trainer.verify_resume(),
        // A subcommand runs its ranks itself.
        Task::Answer => Ok(RunSummary::default()),
    };
    result.map_err(|failure| {
        let failure = trainer.abort(failure);
        // Destructors may take long, so the report comes first. An error is reported where the caller saves again.
        drop(failure.save(&config.output, env.rank));
        failure
    })
}
