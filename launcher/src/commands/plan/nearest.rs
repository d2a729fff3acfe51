//! Search for the nearest configurations that fit.
//!
//! The layout of states, the execution and the batch are searched first. Changes of what is trained, and of its numbers,
//! follow in the order in which people make them: adapters alone, quantized frozen weights, bf16, adapters instead of
//! weights, these beside quantized ones, pure bf16. Each of
//! them is searched with every layout. Whatever is proposed was planned and fits.

use super::planner::Planner;
use crate::config::{
    Collectives, Device, Offload, PrecisionChoice, Recompute, Resume, RunConfig, Tier,
};
use crate::error::Failure;
use crate::model::optimizer::rule;
use crate::plan::Settled;
use crate::plan::suggestion::{
    adapters_alone, adapters_instead, changed, four_bits, is_plain, mlp_tiles,
};
use optim::Optimizer as _;

/// Command-line flags as (name without `--`, value).
pub(super) type Flags = Vec<(&'static str, String)>;

/// Alternatives of one setting, as (cost, flags). Changes of the layout of states cost least, then those of speed,
/// then those of numeric results.
type Choices = Vec<(u32, Flags)>;

/// Checkpointed-segment lengths to try, as (extra cost, layers). Two layers save half of the stored inputs. Six is
/// the square root of 28 to 40 layers, which minimizes memory with one recompute (Chen et al. 2016).
const NUM_LAYERS: [(u32, usize); 2] = [(0, 2), (1, 6)];

/// Cost of freezing what trains besides adapters: more than another stage, less than an offload.
const ADAPTERS_ALONE: u32 = 7;

/// Cost of storing the frozen weights beside adapters in 4 bits: more than an offload of the optimizer's states.
const QUANTIZED: u32 = 12;

/// Cost of computing the feed-forward layers in tiles, which is searched where no other layout fits.
const TILES: u32 = 6;

/// Most proposals for one run.
const MOST: usize = 2;

/// Change of a run that fits the machine.
#[derive(Debug)]
pub(super) struct Proposal {
    pub(super) flags: Flags,
    pub(super) planned: Settled,
    /// Whether it freezes what trains besides adapters.
    pub(super) freezes: bool,
    cost: u32,
}

impl Proposal {
    /// Whether it stores the frozen weights in 4 bits.
    pub(super) fn quantizes(&self) -> bool {
        self.flags.iter().any(|(name, _)| *name == "quantize")
    }
}

fn stages(config: &RunConfig) -> Choices {
    let more = (config.zero + 1..=3).map(|stage| {
        let cost = 2 + u32::from(3 - stage);
        (cost, vec![("zero", stage.to_string())])
    });
    let alone = config.world_size == 1;
    std::iter::once((0, Vec::new()))
        .chain(more.filter(|_| !alone))
        .collect()
}

fn groups(config: &RunConfig) -> Choices {
    let one = vec![("shard-group", config.data_ranks().to_string())];
    let one = config.shard_group.map(|_| (1, one));
    std::iter::once((0, Vec::new())).chain(one).collect()
}

/// Alternatives of the transport. GPUs that sum gradients by peer access hold the gradients of every rank for a unit
/// at the same time.
fn carriers(config: &RunConfig) -> Choices {
    let through_host = vec![("collectives", Collectives::Shm.name().to_owned())];
    let by_gpus = config.resolved_collectives() == Collectives::Ipc;
    let other = by_gpus.then_some((1, through_host));
    std::iter::once((0, Vec::new())).chain(other).collect()
}

fn offloads(planner: &Planner, config: &RunConfig) -> Choices {
    let now = &config.offload;
    let mut steps: Vec<(u32, Offload)> = Vec::new();
    let mut add = |cost: u32, tier: &Tier| {
        let optimizer = Offload {
            optimizer: tier.clone(),
            ..now.clone()
        };
        let both = Offload {
            param: tier.clone(),
            ..optimizer.clone()
        };
        steps.extend([(cost, optimizer), (cost + 4, both)]);
    };
    // An offload to disk that the user chose is not moved back to host memory.
    if now.directories().is_empty() {
        add(8, &Tier::Cpu);
    }
    if let Some(directory) = planner.disk(config) {
        add(16, &Tier::Nvme(directory));
    }
    // Activations of a GPU can be copied to host memory while it computes.
    if config.device == Device::Cuda && now.activation == Tier::None {
        let mut also = vec![(0, now.clone())];
        also.extend(steps.iter().cloned());
        steps.extend(also.into_iter().map(|(cost, offload)| {
            let offload = Offload {
                activation: Tier::Cpu,
                ..offload
            };
            (cost + 5, offload)
        }));
    }
    let changed = steps.into_iter().filter(|(_, offload)| offload != now);
    let changed = changed.map(|(cost, offload)| (cost, vec![("offload", offload.to_string())]));
    std::iter::once((0, Vec::new())).chain(changed).collect()
}

fn recomputes(config: &RunConfig) -> Choices {
    let mut choices: Choices = vec![(0, Vec::new())];
    let all = ("checkpoint-activations", "all".to_owned());
    let again = config.checkpoint_activations != Recompute::ALL;
    let mut flags: Flags = again.then_some(all).into_iter().collect();
    if again {
        choices.push((4, flags.clone()));
    }
    for (more, layers) in NUM_LAYERS {
        if config.checkpoint_num_layers < layers {
            flags.push(("checkpoint-num-layers", layers.to_string()));
            choices.push((6 + more, flags.clone()));
            flags.pop();
        }
    }
    choices
}

/// Smaller micro-batches with the same samples per update.
fn batches(config: &RunConfig) -> Choices {
    let (micro, steps) = (config.batch.micro_batch, config.batch.accumulation_steps);
    let smaller = (1..micro).rev().filter(|n| micro.is_multiple_of(*n));
    let smaller = smaller.enumerate().map(|(i, n)| {
        let flags = vec![
            ("per-device-train-batch-size", n.to_string()),
            (
                "gradient-accumulation-steps",
                (steps * micro / n).to_string(),
            ),
        ];
        (5 + i as u32, flags)
    });
    std::iter::once((0, Vec::new())).chain(smaller).collect()
}

/// Changes of the result, the ones that people make first come first. A run that continues from a checkpoint has none.
fn results(config: &RunConfig) -> Choices {
    let mut choices: Choices = vec![(0, Vec::new())];
    if config.resume != Resume::No {
        return choices;
    }
    let of = |name: &str| vec![("precision", name.to_owned())];
    let alone = adapters_alone(config);
    choices.extend(alone.clone().map(|flags| (ADAPTERS_ALONE, flags)));
    let is_plain = is_plain(config);
    if is_plain && config.trainable.lora.is_some() {
        let alone = alone.clone().unwrap_or_default();
        choices.push((QUANTIZED, [alone, four_bits()].concat()));
    }
    let is_f32 = config.precision == PrecisionChoice::F32;
    if is_f32 {
        choices.push((20, of("bf16")));
    }
    if let Some(flags) = adapters_instead(config) {
        choices.push((25, flags.clone()));
        if is_plain {
            choices.push((26, [flags.clone(), four_bits()].concat()));
        }
        if is_f32 {
            choices.push((27, [flags, of("bf16")].concat()));
        }
    }
    if config.precision != PrecisionChoice::PureBf16 {
        choices.push((30, of("pure-bf16")));
        choices.extend(alone.map(|flags| (37, [flags, of("pure-bf16")].concat())));
    }
    choices
}

/// Flags of every combination of alternatives that keep the result, lowest total cost first; none of them is the first.
fn layouts(planner: &Planner, config: &RunConfig) -> Choices {
    let mut all: Choices = vec![(0, Vec::new())];
    for choices in [
        stages(config),
        groups(config),
        carriers(config),
        recomputes(config),
        batches(config),
        offloads(planner, config),
    ] {
        let mut longer = Vec::with_capacity(all.len() * choices.len());
        for (cost, flags) in &all {
            for (more, changed) in &choices {
                longer.push((cost + more, [&flags[..], changed].concat()));
            }
        }
        all = longer;
    }
    all.sort_by_key(|(cost, flags)| (*cost, flags.len()));
    all
}

/// Finds the changes of `config` with the lowest cost that fit the machine, the lowest first: at most one that keeps what
/// is trained (with tiles of the feed-forward layers if nothing else fits), and one that trains adapters alone or quantizes the frozen weights. Only if none fits, another change of the
/// result.
///
/// # Errors
/// Those of planning.
pub(super) fn nearest(planner: &Planner, config: &RunConfig) -> Result<Vec<Proposal>, Failure> {
    let layouts = layouts(planner, config);
    let mut found: Vec<Proposal> = Vec::new();
    for (cost, result) in results(config) {
        if cost > QUANTIZED && !found.is_empty() || found.len() == MOST {
            break;
        }
        let mut fits = first_that_fits(planner, config, (cost, &result), &layouts)?;
        if let (None, 0, Some(tiles)) = (&fits, cost, mlp_tiles(config)) {
            fits = first_that_fits(planner, config, (TILES, &tiles), &layouts)?;
        }
        found.extend(fits);
    }
    found.sort_by_key(|proposal| proposal.cost);
    Ok(found)
}

/// The first of `layouts` with which `config` fits after the change `result`.
fn first_that_fits(
    planner: &Planner,
    config: &RunConfig,
    (cost, result): (u32, &Flags),
    layouts: &Choices,
) -> Result<Option<Proposal>, Failure> {
    for (more, layout) in layouts {
        let flags = [&result[..], layout].concat();
        if flags.is_empty() {
            continue;
        }
        let Some(neighbour) = changed(config, &flags).map(RunConfig::without_spare) else {
            continue;
        };
        if !states_fit(planner, &neighbour)? || !micro_batch_fits(planner, &neighbour)? {
            continue;
        }
        let planned = planner.plan(&neighbour)?;
        if planned.fit.fits() {
            return Ok(Some(Proposal {
                flags,
                planned,
                freezes: cost == ADAPTERS_ALONE,
                cost: cost + more,
            }));
        }
    }
    Ok(None)
}

/// Whether parameters, gradients and optimizer states alone fit into memory. This quick check needs no dry run.
fn states_fit(planner: &Planner, config: &RunConfig) -> Result<bool, Failure> {
    let (_, plan) = crate::model::setup::shapes(&config.draft())?;
    let slots = rule(config).slots(plan.config().precision);
    let states = plan.memory(slots);
    let (machine, ranks) = (planner.machine(), config.world_size as u64);
    let kinds = [states.parameters, states.gradients, states.optimizer];
    let device: u64 = kinds.iter().map(|kind| kind.device).sum();
    let host: u64 = kinds.iter().map(|kind| kind.host).sum();
    let device_fits = fits_device(planner, config, device);
    let on_host = if machine.device_bytes.is_none() {
        device + host
    } else {
        host
    };
    let free = machine.limited(config).usable_host_bytes();
    Ok(device_fits && ranks * on_host <= free)
}

/// Whether a micro-batch alone fits into device memory. This check takes a tenth of the time of a plan.
fn micro_batch_fits(planner: &Planner, config: &RunConfig) -> Result<bool, Failure> {
    let bytes = planner.least_device_bytes(config)?;
    Ok(fits_device(planner, config, bytes))
}

fn fits_device(planner: &Planner, config: &RunConfig, bytes: u64) -> bool {
    let limits = [planner.machine().device_bytes, config.device_memory_limit];
    limits.iter().flatten().all(|limit| bytes <= *limit)
}
