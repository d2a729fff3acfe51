//! What is checked and planned before a rank starts and before the run's directory is touched.

use super::Advice;
use super::disk_check::{Room, saves};
use super::rank_memory::{upload_line, whole_memory};
use super::{
    early_line, find_batch, late_line, rank_memory, resume, settle_early_step, suggestion,
};
use crate::config::{Device, RunConfig, check_faults, fault_lines};
use crate::data::{SampleSet, check};
use crate::error::Failure;
use crate::error::failures::unusable;
use crate::launch::spill_directories;
use crate::model::contents::CheckpointBytes;
use crate::model::optimizer::{rule, trained_parts};
use crate::model::setup::{Setup, sampler};
use crate::rank_env::Env;
use crate::ui::{DataEvent, Event};
use models::Processor;
use optim::Optimizer;
use std::sync::Arc;

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
        find_batch::find(config, &setup, &train, show)?;
    }
    if config.batch.worst_first {
        config.first_samples = train.by_size();
        config.first_samples.truncate(config.global_batch());
    }
    let worst = check::largest(&train, config, &*setup.processor)?;
    let (model, processor) = (&*setup.model, &*setup.processor);
    let held_out = eval.as_ref();
    let eval_batch = config.batch.eval_batch;
    let mut said = Vec::new();
    let mut plan = Arc::new(setup.plan(config)?);
    let mut memory = whole_memory(
        config,
        model,
        processor,
        &plan,
        &worst,
        held_out,
        &mut |event| said.push(event),
    )?;
    // As if the plan before had not been tried.
    let again = |config: &mut RunConfig, said: &mut Vec<Event>| {
        config.batch.eval_batch = eval_batch;
        said.clear();
        let plan = Arc::new(setup.plan(config)?);
        let mut keep = |event| said.push(event);
        let memory = whole_memory(config, model, processor, &plan, &worst, held_out, &mut keep)?;
        Ok::<_, Failure>((plan, memory))
    };
    let exceeds_nvme = rank_memory::fit(config, &memory).exceeds_nvme();
    if config.settle_early_step_on_disk(&plan, exceeds_nvme) {
        (plan, memory) = again(config, &mut said)?;
    }
    let tried = rank_memory::fit(config, &memory);
    let falls_back = config.settle_upload_ahead(&plan, tried.exceeds_device());
    if falls_back {
        (plan, memory) = again(config, &mut said)?;
    }
    // Last, since it takes what all else leaves.
    let without = rank_memory::fit(config, &memory);
    let (replanned, spare) = settle_early_step(config, &plan, &without, &mut |config| {
        again(config, &mut said)
    })?;
    if let Some(replanned) = replanned {
        (plan, memory) = replanned;
    }
    said.into_iter().for_each(&mut *show);
    config.spilled_activation_bytes = rank_memory::spilled_activations(&memory);
    let total_steps = config.total_steps(train.samples.len());
    check_faults(config, total_steps)?;
    for text in fault_lines(config) {
        show(Event::Warning { text });
    }
    resume::check(config, &plan, train.samples.len(), total_steps)?;
    let fit = rank_memory::fit(config, &memory);
    show(Event::Plan(rank_memory::plan_event(
        config, &plan, &memory, &fit,
    )));
    if config.device == Device::Cuda {
        config.arena_bytes = fit.arena_bytes(&memory);
        show(rank_memory::device_line(config, &memory, &fit));
    }
    if let Some(line) = upload_line(&plan, falls_back.then_some(&tried)) {
        show(line);
    }
    let rule = rule(config);
    show(Event::Info {
        label: "formats".into(),
        text: plan
            .formats(rule.slots(plan.config().precision))
            .to_string(),
    });
    for line in [early_line(&plan, spare.as_ref()), late_line(&plan)]
        .into_iter()
        .flatten()
    {
        show(line);
    }
    show(Event::Trains(trained_parts(config, &*setup.model)?));
    show(find_batch::line(config));
    let order = sampler(config, train.samples.len(), &[]);
    show(Event::Data(DataEvent {
        samples: train.samples.len(),
        eval_samples: eval.as_ref().map_or(0, |e| e.samples.len()),
        longest_tokens: train.sizes.iter().map(|s| s.tokens).max().unwrap_or(0),
        images: train.pictures + eval.as_ref().map_or(0, |e| e.pictures),
        supervised_min_tokens: train.sizes.iter().map(|s| s.supervised).min().unwrap_or(0),
        skipped: train.problems.len() + eval.as_ref().map_or(0, |e| e.problems.len()),
        wraps_around_global_batch: order.wraps_around(),
    }));
    if let Err(mut failure) = fit.check(config, &memory) {
        let largest = |config: &RunConfig, count: usize| {
            check::encode_some(config, &train.by_size(), count, &*setup.processor)
        };
        suggestion::add(&mut failure, config, &largest);
        return Err(failure);
    }
    let checkpoint = CheckpointBytes::of(config, model, &plan, setup.weights.as_ref())?;
    let saves = saves(config, total_steps, train.samples.len());
    let room = Room::of(config, checkpoint, saves, fit.need.nvme);
    room.check(config)?;
    if let warning @ Event::Warning { .. } = room.event(config) {
        show(warning);
    }
    spill_directories::sweep_folders(config, show)?;
    let taken = spare.and_then(|spare| spare.taken);
    Ok(suggestion::later(config, train.by_size(), taken))
}

/// Reads and checks the samples of a run that is only planned.
///
/// # Errors
/// As [`prepare`].
pub(crate) fn check_data(
    config: &RunConfig,
) -> Result<(Arc<dyn Processor>, SampleSet, Option<SampleSet>), Failure> {
    let dir = config.model_dir();
    let processor = models::open_processor(&dir).map_err(|e| unusable(&dir, &e))?;
    let train = check::check(config, &config.data_file(), config.batch.limit, &*processor)?;
    let eval = config.eval_file();
    let eval = eval.map(|path| check::check(config, &path, None, &*processor));
    Ok((processor, train, eval.transpose()?))
}
