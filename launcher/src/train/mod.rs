//! What one rank does, from the resolved configuration to the last report.

mod collectives;
mod evaluate;
mod inject;
mod numeric;
mod save;
mod session;
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
use session::{NotOpened, Session};

/// The whole life of a rank.
///
/// # Errors
/// Whatever ends the run early, as a report for people.
pub(crate) fn rank_main(
    config: &RunPlan,
    env: &RankEnv,
    stop: &StopFlag,
    devices: &dyn Devices,
) -> Result<RunSummary, Failure> {
    let mut session = match Session::open(config, env, devices) {
        Ok(session) => session,
        Err(NotOpened::IpcRefused(why)) => {
            return Ok(RunSummary {
                ipc_refused: Some(why),
                ..RunSummary::default()
            });
        }
        Err(NotOpened::Failed(failure)) => return Err(*failure),
    };
    let result = match config.task {
        Task::Train => trainer::train(&mut session, stop),
        Task::Evaluate => trainer::verify_resume(&mut session),
    };
    result.map_err(|failure| {
        let failure = step_context::complete(failure, &session);
        session.comm.abort(&failure.title);
        failure
    })
}
