//! What one rank does, from the resolved configuration to the last report, and what the supervisor
//! checks before any rank starts.

mod advice;
mod batch;
pub(crate) mod check;
mod evaluate;
mod export;
pub(crate) mod failures;
mod fit;
mod numeric;
mod place;
mod resume;
mod save;
mod session;
mod setup;
pub(crate) use check::encode_options;
pub(crate) use setup::unusable;
pub(crate) use spill::hold_folders;
mod spill;
mod split;
mod stall;
mod stored;
mod trainer;
mod weight_files;

use crate::config::{Cadence, RunConfig, Task};
use crate::exit::Failure;
use crate::job::Advice;
use crate::rank::{RunSummary, StopFlag};
use crate::rank_env::{Env, RankEnv};
use crate::ui::{DataEvent, Event};
pub(crate) use export::export;
use session::Session;
use setup::Setup;

/// Checks model, data and memory before a rank starts and before the run's folder is touched.
///
/// # Errors
/// Whatever would make the run fail later, as a report for people.
pub(crate) fn prepare(
    config: &mut RunConfig,
    _env: &Env,
    show: &mut dyn FnMut(Event),
) -> Result<Advice, Failure> {
    let setup = Setup::open(config)?;
    setup.check_weights(show)?;
    let limit = config.batch.limit;
    let train = check::check(config, &config.data_file(), limit, &*setup.processor)?;
    let eval = match config.eval_file() {
        Some(path) => Some(check::check(config, &path, None, &*setup.processor)?),
        None => None,
    };
    for set in std::iter::once(&train).chain(&eval) {
        check::text_only(config, set)?;
    }
    if config.batch.find_batch {
        batch::find(config, &setup, &train, show)?;
    }
    if config.batch.worst_first {
        config.first_samples = train.by_size();
        config.first_samples.truncate(config.global_batch());
    }
    let worst = check::largest(&train, config, &*setup.processor)?;
    let mut activations = fit::activation_bytes(config, &*setup.model, &worst)?;
    if let Some(held_out) = &eval
        && config.eval != Cadence::Never
    {
        let (model, processor) = (&setup.model, &setup.processor);
        let need =
            fit::fit_evaluation(config, &**model, &**processor, held_out, activations, show)?;
        activations = activations.max(need);
    }
    let plan = setup.plan(config)?;
    let total_steps = config.total_steps(train.samples.len());
    resume::check(config, &plan, train.samples.len(), total_steps)?;
    let fit = fit::fit(config, &plan, activations);
    show(Event::Plan(fit.event.clone()));
    show(Event::Trains(session::trained_parts(
        config,
        &*setup.model,
    )?));
    show(batch::line(config));
    let sampler = setup::sampler(config, train.samples.len(), &[]);
    show(Event::Data(DataEvent {
        samples: train.samples.len(),
        eval_samples: eval.as_ref().map_or(0, |e| e.samples.len()),
        longest_tokens: train.sizes.iter().map(|s| s.tokens).max().unwrap_or(0),
        images: train.pictures + eval.as_ref().map_or(0, |e| e.pictures),
        supervised_min_tokens: train.sizes.iter().map(|s| s.supervised).min().unwrap_or(0),
        skipped: train.problems.len() + eval.as_ref().map_or(0, |e| e.problems.len()),
        wraps_around_global_batch: sampler.wraps_around(),
    }));
    if let Err(mut failure) = fit.check(config) {
        let largest = |config: &RunConfig, count: usize| {
            check::encode_some(config, &train.by_size(), count, &*setup.processor)
        };
        advice::add(&mut failure, config, &largest);
        return Err(failure);
    }
    Ok(advice::later(config, train.by_size()))
}

/// The whole life of a rank.
///
/// # Errors
/// Whatever ends the run early, as a report for people.
pub(crate) fn rank_main(
    config: &RunConfig,
    env: &RankEnv,
    stop: &StopFlag,
) -> Result<RunSummary, Failure> {
    let mut session = Session::open(config, env)?;
    let result = match config.task {
        Task::Train => trainer::train(&mut session, stop),
        Task::Evaluate => trainer::verify_resume(&mut session),
    };
    result.map_err(|failure| {
        let failure = place::complete(failure, &session);
        session.comm.abort(&failure.title);
        failure
    })
}
