//! Suggestions after a lack of memory: similar configurations whose plans fit.

use super::rank_memory::whole_memory;
use super::{Count, Counted, DECODING, Machine, MemoryCheck, Settled, settle};
use crate::cli::{self, Command, resolve};
use crate::config::{
    Device, Found, Offload, OptimizerInBackward, PrecisionChoice, Recompute, RunConfig, RunPlan,
    Tier, Workers,
};
use crate::data::check::{self, encode_options};
use crate::data::{SampleSet, Taken};
use crate::error::failures::unusable;
use crate::error::{ErrorCode, Failure};
use crate::lang::{both, text};
use crate::model::setup;
use crate::rank_env::Env;
use crate::units::bytes;
use engine::checkpoint::find_latest;
use kernels::STRETCH_ROWS;
use models::data::{EncodeOptions, EncodedSample, SampleSize};
use models::{Processor, QuantizedWeights};
use std::path::Path;
use std::sync::Arc;

/// Text before the step number in the title of a failure during a training step.
pub(crate) const AT_STEP: &str = " at step ";

/// Function that adds suggestions to the report of a rank that ran out of memory in training: similar
/// configurations that fit. Reports of other failures stay unchanged. It is made for the model and data of
/// one run.
pub type Suggestions = Box<dyn Fn(&mut Failure)>;

/// Maximum number of suggestions in a report.
const NAMED: usize = 3;
/// Tokens of the tiles that are suggested: the fewest on a GPU.
const TILE_TOKENS: usize = STRETCH_ROWS;
/// Divisor of the host memory from which on image decoding is named as a large part of it.
const LARGE_PART: u64 = 8;

type Flags = Vec<(&'static str, String)>;

/// Flags of similar configurations, nearest first. Changes of execution come before changes of the result, except
/// those of adapters that people make first: the adapters alone, and frozen weights in 4 bits.
fn neighbours(config: &RunConfig) -> Vec<Flags> {
    let mut found: Vec<Flags> = Vec::new();
    let zero = || ("zero", "3".to_owned());
    let offload = || ("offload", "cpu".to_owned());
    if config.zero < 3 {
        found.push(vec![zero()]);
    }
    if config.shard_group.is_some() {
        found.push(vec![("shard-group", config.data_ranks().to_string())]);
    }
    if config.checkpoint_activations != Recompute::ALL {
        found.push(vec![("checkpoint-activations", "all".to_owned())]);
    }
    found.extend(adapters_alone(config));
    if config.offload.is_none() {
        found.push(vec![offload()]);
        if config.zero < 3 {
            found.push(vec![zero(), offload()]);
        }
    }
    if config.trainable.lora.is_some() && is_plain(config) {
        found.push(four_bits());
    }
    if config.batch.data_workers != Workers::Count(1) {
        found.push(vec![("data-workers", "1".to_owned())]);
    }
    if config.device == Device::Cuda && config.offload.activation == Tier::None {
        let offload = Offload {
            activation: Tier::Cpu,
            ..config.offload.clone()
        };
        found.push(vec![("offload", offload.to_string())]);
    }
    let batch = &config.batch;
    let halves = std::iter::successors(Some(batch.micro_batch / 2), |half| Some(half / 2));
    for micro_batch in halves.take_while(|half| *half > 0) {
        let accumulation = batch.accumulation_steps * batch.micro_batch / micro_batch;
        found.push(vec![
            ("per-device-train-batch-size", micro_batch.to_string()),
            ("gradient-accumulation-steps", accumulation.to_string()),
        ]);
    }
    let budgets = batch
        .tokens_per_batch
        .into_iter()
        .flat_map(|most| [(most / 2, 2), (most / 4, 4)]);
    found.extend(budgets.map(|(most, times)| {
        vec![
            ("tokens-per-batch", most.to_string()),
            (
                "gradient-accumulation-steps",
                (times * batch.accumulation_steps).to_string(),
            ),
        ]
    }));
    if config.checkpoint_num_layers == 1 && config.checkpoint_activations != Recompute::NONE {
        found.push(vec![("checkpoint-num-layers", "6".to_owned())]);
    }
    found.extend(mlp_tiles(config));
    let precision = |name: &str| vec![("precision", name.to_owned())];
    if config.precision == PrecisionChoice::F32 {
        found.push(precision("bf16"));
    }
    found.extend(adapters_instead(config));
    if config.precision != PrecisionChoice::PureBf16 {
        found.push(precision("pure-bf16"));
    }
    if config.world_size > 1 && config.mp_size == 1 {
        let accumulation = batch.accumulation_steps * config.world_size;
        found.push(vec![
            ("nproc", "1".to_owned()),
            ("gradient-accumulation-steps", accumulation.to_string()),
        ]);
    }
    if batch.max_slice_nums > 1 {
        found.push(vec![("max-slice-nums", "1".to_owned())]);
    }
    found
}

/// Flags that compute the feed-forward layers in tiles. `None` if the run does, or if no sample is longer than a tile.
pub(crate) fn mlp_tiles(config: &RunConfig) -> Option<Flags> {
    let batch = &config.batch;
    let most = batch.micro_batch * batch.model_max_length;
    let long = batch.tokens_per_batch.unwrap_or(most) > TILE_TOKENS;
    let flags = vec![("mlp-tile-tokens", TILE_TOKENS.to_string())];
    (config.mlp_tile_tokens.is_none() && long).then_some(flags)
}

/// Flags that store frozen weights in 4 bits.
pub(crate) fn four_bits() -> Flags {
    vec![
        ("quantize", "nf4".to_owned()),
        ("quantize-double", "true".to_owned()),
    ]
}

/// Whether neither the run nor its base model quantizes weights.
pub(crate) fn is_plain(config: &RunConfig) -> bool {
    let declared = QuantizedWeights::declared(&config.model_dir());
    config.quantize.is_none() && !matches!(declared, Ok(Some(_)))
}

/// Flags that freeze everything but adapters and prefixes. `None` if they are absent or already train alone.
pub(crate) fn adapters_alone(config: &RunConfig) -> Option<Flags> {
    let trainable = &config.trainable;
    let lora = trainable.lora.as_ref();
    let modules =
        lora.is_some_and(|lora| lora.modules_to_save.as_ref().is_none_or(|m| !m.is_empty()));
    let mut flags = frozen(config);
    if modules {
        flags.push(("modules-to-save", "none".to_owned()));
    }
    let has = lora.is_some() || trainable.ptuning_tokens > 0;
    (has && !flags.is_empty()).then_some(flags)
}

/// Flags that train adapters instead of the weights. `None` if the run has adapters or prefixes.
pub(crate) fn adapters_instead(config: &RunConfig) -> Option<Flags> {
    let trainable = &config.trainable;
    let has = trainable.lora.is_some() || trainable.ptuning_tokens > 0;
    let adapters = vec![("use-lora", "true".to_owned())];
    (!has).then(|| [adapters, frozen(config)].concat())
}

/// Flags that freeze the parts that train by themselves.
fn frozen(config: &RunConfig) -> Flags {
    let trainable = &config.trainable;
    let mut flags = Flags::new();
    if trainable.train.is_some() {
        flags.push(("train", "none".to_owned()));
    }
    if trainable.tune_llm {
        flags.push(("tune-llm", "false".to_owned()));
    }
    if trainable.tune_vision {
        flags.push(("tune-vision", "false".to_owned()));
    }
    flags
}

/// The neighbours that a run with a checkpoint can continue as: precision and trainable parts stay.
fn possible(config: &RunConfig) -> Vec<Flags> {
    let mut all = neighbours(config);
    if let Ok(Some(_)) = find_latest(&config.output) {
        let stays = |name: &str| {
            matches!(
                name,
                "precision"
                    | "quantize"
                    | "use-lora"
                    | "modules-to-save"
                    | "train"
                    | "tune-llm"
                    | "tune-vision"
            )
        };
        all.retain(|flags| !flags.iter().any(|(name, _)| stays(name)));
    }
    all
}

/// `config` with the given flags changed. `None` if the result is invalid.
pub(crate) fn changed(config: &RunConfig, flags: &[(&'static str, String)]) -> Option<RunConfig> {
    let kept = config.to_flags();
    let kept = kept
        .iter()
        // Micro-batch and accumulation steps are resolved and suffice.
        .filter(|(name, _)| !matches!(*name, "global-batch-size" | "find-batch"))
        .filter(|(name, _)| !flags.iter().any(|(changed, _)| changed == name))
        // The shard group ends with a change of the number of ranks, or with stage 0.
        .filter(|(name, _)| {
            let ends =
                |(name, value): &(_, String)| *name == "nproc" || *name == "zero" && value == "0";
            *name != "shard-group" || !flags.iter().any(ends)
        });
    let line: Vec<String> = kept
        .chain(flags)
        .map(|(name, value)| format!("--{name}={value}"))
        .collect();
    let Ok(Command::Train { args, .. }) = cli::parse(&line) else {
        return None;
    };
    let env = Env::from_lookup(&|_| None).ok()?;
    Some(RunConfig {
        source: config.source.clone(),
        gpus: config.gpus.clone(),
        ..resolve(&args, &env).ok()?.config
    })
}

/// Function for [`add`] that plans a similar configuration, with the samples of the run.
pub(crate) fn counter<'a>(
    train: &'a SampleSet,
    eval: Option<&'a SampleSet>,
    processor: &'a dyn Processor,
) -> impl FnMut(&RunPlan) -> Result<Counted, Failure> + 'a {
    // Most similar configurations have the same samples, whose images take long to decode.
    let mut encoded: Option<(EncodeOptions, Option<usize>, Vec<EncodedSample>)> = None;
    move |run| {
        let (model, plan) = setup::replan(run)?;
        let plan = Arc::new(plan);
        let (options, budget) = (encode_options(run), run.batch.tokens_per_batch);
        let count = |samples: &[EncodedSample]| match budget {
            Some(_) => samples.len(),
            None => run.batch.micro_batch,
        };
        let known = encoded.take().filter(|(with, of, samples)| {
            (*with, *of) == (options, budget) && samples.len() >= count(samples)
        });
        let (.., samples) = match known {
            Some(known) => encoded.insert(known),
            None => encoded.insert((options, budget, check::largest(train, run, processor)?)),
        };
        let worst = samples.get(..count(samples)).unwrap_or(samples);
        let (memory, eval_batch) = whole_memory(run, &*model, processor, &plan, worst, eval)?;
        Ok(Counted {
            plan,
            memory,
            eval_batch,
        })
    }
}

/// Adds suggestions to `failure`: the nearest configurations that need less of the memory that ran out than `config`, and
/// that fit by the plan that a run of them would make. Returns the check of `config` itself.
pub(crate) fn add(
    failure: &mut Failure,
    config: &RunPlan,
    count: &mut Count<'_>,
) -> Option<MemoryCheck> {
    let memory = count(config).ok()?.memory;
    let base = MemoryCheck::new(config, &memory, Machine::here());
    let on_device = failure.code == ErrorCode::DeviceMemory
        || failure.code == ErrorCode::Plan && base.exceeds_device();
    let mut lines = Vec::new();
    let mut taken: Vec<Flags> = Vec::new();
    let mut smallest: Option<(u64, String)> = None;
    for flags in possible(config) {
        // Skips a superset of flags that already suffice.
        if taken
            .iter()
            .any(|less| less.iter().all(|flag| flags.contains(flag)))
        {
            continue;
        }
        let Some(neighbour) = changed(config, &flags) else {
            continue;
        };
        let neighbour = RunPlan::draft(neighbour, config.found().ipc_refused.clone());
        let neighbour = neighbour.with_found(Found {
            image_bytes: config.found().image_bytes,
            ..neighbour.found().clone()
        });
        let Ok(Settled { fit, .. }) = settle(&neighbour, &Machine::here, count) else {
            continue;
        };
        let spelled: Vec<String> = flags.iter().map(|(n, v)| format!("--{n} {v}")).collect();
        let spelled = spelled.join(" ");
        let (need, before) = if on_device {
            (fit.need.device, base.need.device)
        } else {
            (fit.need.host, base.need.host)
        };
        if smallest.as_ref().is_none_or(|(least, _)| need < *least) {
            smallest = Some((need, spelled.clone()));
        }
        if need < before && fit.fits() && lines.len() < NAMED {
            lines.push(text!(
                "{spelled}   (plan: {}, fits)",
                "{spelled}   (计划 {}，放得下)",
                fit.needs()
            ));
            taken.push(flags);
        }
    }
    if lines.is_empty()
        && let Some((need, spelled)) = smallest
    {
        lines.push(text!(
            "no single change makes it fit; {spelled} comes closest and needs {}{}",
            "任何单项改动都放不下；{spelled} 最接近，需要 {}{}",
            bytes(need),
            if on_device {
                both(" per rank", "（每个 rank）")
            } else {
                both("", "")
            }
        ));
    }
    let [_, decoding, _] = memory.of_part(&DECODING);
    let all_decoding = decoding * config.ranks_here() as u64;
    if !on_device && all_decoding >= base.need.host / LARGE_PART {
        lines.push(text!(
            "image decoding takes {} of the {}: use smaller images, or --data-workers 1",
            "图片解码占用 {}，总共 {}：请使用更小的图片，或 --data-workers 1",
            bytes(all_decoding),
            bytes(base.need.host)
        ));
    }
    // Computed suggestions come before the general ones.
    lines.append(&mut failure.next);
    failure.next = lines;
    Some(base)
}

/// Suggestions for failures of ranks, as the supervisor stores them. `sizes` are those of the samples for training and
/// for evaluation. `spared` is the spare host memory that updates in backward took.
pub(crate) fn later(
    config: &RunPlan,
    sizes: (Vec<SampleSize>, Option<Vec<SampleSize>>),
    spared: Option<u64>,
) -> Suggestions {
    // Alternatives are compared by minimum need: each resolves updates in backward itself.
    let config = match spared {
        Some(_) => config.with_optimizer_in_backward(OptimizerInBackward::Off),
        None => config.clone(),
    };
    Box::new(move |failure| {
        // The memory plan covers training, not evaluation.
        let planned = match failure.code {
            ErrorCode::DeviceMemory => failure.title.contains(AT_STEP),
            code => code == ErrorCode::HostMemory,
        };
        if planned {
            // Without suggestions the report is still the report.
            drop(add_later(failure, &config, &sizes, spared));
        }
    })
}

/// As [`add`], with samples that are read again.
fn add_later(
    failure: &mut Failure,
    config: &RunPlan,
    (train, eval): &(Vec<SampleSize>, Option<Vec<SampleSize>>),
    spared: Option<u64>,
) -> Result<(), Failure> {
    let dir = config.model_dir();
    let processor = models::open_processor(&dir).map_err(|e| unusable(&dir, &e))?;
    let read = |path: &Path, taken: Taken, sizes: &[SampleSize]| {
        check::reload(config, path, taken, &*processor, sizes)
    };
    let train = read(
        &config.data_file(),
        Taken::Training(config.batch.limit),
        train,
    )?;
    let eval = match (config.eval_file(), eval) {
        (Some(path), Some(sizes)) => Some(read(&path, Taken::HeldOut, sizes)?),
        _ => None,
    };
    let mut count = counter(&train, eval.as_ref(), &*processor);
    let base = add(failure, config, &mut count);
    let spared = spared.filter(|_| failure.code == ErrorCode::HostMemory);
    if let (Some(spared), Some(base)) = (spared, base.filter(MemoryCheck::fits)) {
        let line = text!(
            "--optimizer-in-backward off   (plan: {}, fits; the second copies of states used {} of spare host memory)",
            "--optimizer-in-backward off   (计划 {}，放得下；状态的第二份副本占用了 {} 空余主机内存)",
            base.needs(),
            bytes(spared)
        );
        failure.next.insert(0, line);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(line: &str) -> RunConfig {
        let argv: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let Ok(Command::Train { args, .. }) = cli::parse(&argv) else {
            panic!("parses")
        };
        let env = Env::from_lookup(&|_| None).expect("reads");
        resolve(&args, &env).expect("resolves").config
    }

    #[test]
    fn suggestions_keep_the_global_batch_and_everything_else() {
        let config = config(
            "--model m --data d --zero 1 --per-device-train-batch-size 4 --nproc 2 --precision f32",
        );
        let all = neighbours(&config);
        for flags in &all {
            let neighbour = changed(&config, flags).expect("resolves");
            assert_eq!(neighbour.global_batch(), 8, "{flags:?}");
            assert_eq!(neighbour.seed, config.seed);
            assert_ne!(neighbour, config, "{flags:?}");
        }
        let spelled: Vec<&str> = all.iter().map(|flags| flags[0].0).collect();
        assert_eq!(
            spelled,
            [
                "zero",
                "offload",
                "zero",
                "data-workers",
                "per-device-train-batch-size",
                "per-device-train-batch-size",
                "checkpoint-num-layers",
                "mlp-tile-tokens",
                "precision",
                "use-lora",
                "precision",
                "nproc",
                "max-slice-nums",
            ]
        );
    }

    #[test]
    fn adapters_alone_come_before_offload_and_pure_bf16() {
        let config = config(
            "--model m --data d --zero 3 --lora-rank 8 --modules-to-save embed_tokens --train resampler",
        );
        let all = neighbours(&config);
        let at = |name: &str, value: &str| {
            let has = |flags: &Flags| flags.iter().any(|(n, v)| *n == name && v == value);
            all.iter().position(has).expect("a neighbour")
        };
        let alone = at("modules-to-save", "none");
        assert!(alone < at("offload", "cpu"), "{all:?}");
        assert!(alone < at("precision", "pure-bf16"), "{all:?}");
        let frozen = changed(&config, &all[alone]).expect("resolves").trainable;
        assert_eq!((frozen.train, frozen.tune_llm), (None, false));
        let lora = frozen.lora.expect("adapters");
        assert_eq!(lora.modules_to_save.as_deref(), Some(&[][..]));
    }

    #[test]
    fn options_already_in_use_are_not_suggested() {
        let config = config(
            "--model m --data d --zero 3 --offload cpu --precision pure-bf16 --nproc 1 --use-lora --max-slice-nums 1 --checkpoint-num-layers 6 --data-workers 1 --quantize nf4",
        );
        assert_eq!(neighbours(&config), Vec::<Flags>::new());
    }
}
