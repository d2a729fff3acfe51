//! Planner for configurations that differ in flags, with the user's samples or an artificial one.

use crate::cli::PlanArgs;
use crate::config::{
    Found, OptimizerInBackward, PrefetchWeights, RunConfig, RunPlan, Strategy, ZeroAuto,
};
use crate::data::check::{fill, largest};
use crate::data::{SampleSet, Sampler};
use crate::error::failures::unusable;
use crate::error::{Failure, failures};
use crate::lang::{both, text};
use crate::memory::RankMemory;
use crate::model::contents::CheckpointBytes;
use crate::model::setup::shapes;
use crate::plan::disk_check::{DiskCheck, saves};
use crate::plan::rank_memory::{fixed, whole_memory};
use crate::plan::{
    Counted, HeldOut, Machine, Settled, Work, check_data, dry_run, image_bytes, least_device_bytes,
    settle,
};
use engine::Plan;
use models::data::EncodedSample;
use models::generate::Prompt;
use models::{
    Processor, SampleInput, VideoBounds, VisionLanguageModel, WeightSource, largest_sample,
    largest_video, video_frames,
};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

/// Maximum number of answer tokens to generate for the artificial sample.
const ANSWER_TOKENS: usize = 128;

/// The user's training and held-out samples, with the processor that converts them to tokens.
#[derive(Debug)]
struct Samples {
    processor: Arc<dyn Processor>,
    train: SampleSet,
    eval: Option<SampleSet>,
}

/// Planner for configurations of one model on one machine.
#[derive(Debug)]
pub(super) struct Planner {
    machine: Machine,
    samples: Option<Samples>,
    /// The video of the artificial sample, which has an image otherwise.
    video: Option<VideoBounds>,
    weights: Option<WeightSource>,
    /// Whether the artificial sample is also evaluated.
    evaluates: bool,
}

impl Planner {
    /// Reads the samples if `has_data`. Checks that the weights match the model, unless only its configuration is
    /// used.
    pub(super) fn new(
        config: &RunConfig,
        args: &PlanArgs,
        has_data: bool,
    ) -> Result<Self, Failure> {
        let dir = config.model_dir();
        let weights = if args.no_weights != Some(true) && !dir.is_file() && !config.is_demo() {
            Some(check_weights(config)?)
        } else {
            None
        };
        let samples = if has_data {
            let (processor, train, eval) = check_data(config)?;
            Some(Samples {
                processor,
                train,
                eval,
            })
        } else {
            None
        };
        Ok(Self {
            machine: machine(args),
            samples,
            video: video(config, args, has_data)?,
            weights,
            evaluates: args.run.eval_strategy != Some(Strategy::No),
        })
    }

    /// Whether the planner uses an artificial sample.
    pub(super) fn makes_up_samples(&self) -> bool {
        self.samples.is_none()
    }

    /// The artificial sample of a run.
    ///
    /// # Errors
    /// The video of the command line does not fit into it.
    pub(super) fn sample(&self, config: &RunConfig) -> Result<EncodedSample, Failure> {
        made_up_sample(config, self.video)
    }

    /// Number of frames of the artificial sample's video.
    pub(super) fn frames(&self) -> Option<usize> {
        self.video.map(|video| video.frames)
    }

    /// Directory for spill files: that of the run. If there is none, a placeholder if the machine has disk space.
    pub(super) fn disk(&self, config: &RunConfig) -> Option<PathBuf> {
        let own = config
            .offload
            .directories()
            .first()
            .map(|directory| (*directory).to_owned());
        let described = self.machine.nvme_free_bytes.map(|_| PathBuf::from("/DIR"));
        own.or(described)
    }

    /// Memory and disk space of the machine to plan for: this one, or the one that the command line describes.
    pub(super) fn machine(&self) -> Machine {
        self.machine
    }

    /// Plans `asked` on the planner's machine: resolves every `auto`, computes the memory of a rank, and checks
    /// whether it fits.
    pub(super) fn plan(&self, asked: &RunConfig) -> Result<Settled, Failure> {
        let draft = asked.draft();
        let samples = self.samples.as_ref();
        let draft = draft.with_found(Found {
            image_bytes: samples.and_then(|s| image_bytes(&s.train, s.eval.as_ref())),
            ..draft.found().clone()
        });
        settle(&draft, &|| self.machine, &mut |run| {
            let (model, plan) = shapes(run)?;
            let plan = Arc::new(plan);
            let (memory, eval_batch) = match &self.samples {
                Some(samples) => Self::of_samples(run, &*model, &plan, samples)?,
                None => (self.made_up(run, &*model, &plan)?, run.batch.eval_batch),
            };
            Ok(Counted {
                plan,
                memory,
                eval_batch,
            })
        })
    }

    /// Checks whether the disk has room for the checkpoints and spill files of a planned run.
    pub(super) fn disk_check(&self, planned: &Settled) -> Result<DiskCheck, Failure> {
        let config = &planned.run;
        let (model, _) = shapes(config)?;
        let weights = self.weights.as_ref();
        let checkpoint = CheckpointBytes::of(config, &*model, &planned.plan, weights)?;
        if !self.machine.is_here() {
            return Ok(DiskCheck::elsewhere(checkpoint));
        }
        let times = match &self.samples {
            Some(samples) => {
                let sampler = Sampler::of(config, &samples.train, &[]);
                let total = sampler.total_steps(config);
                saves(config, total, sampler.steps_per_epoch())
            }
            None => 1,
        };
        Ok(DiskCheck::of(
            config,
            checkpoint,
            times,
            planned.fit.need.nvme,
        ))
    }

    fn of_samples(
        config: &RunPlan,
        model: &dyn VisionLanguageModel,
        plan: &Arc<Plan>,
        samples: &Samples,
    ) -> Result<(RankMemory, usize), Failure> {
        let processor = &*samples.processor;
        let worst = largest(&samples.train, config, processor)?;
        let eval = samples.eval.as_ref();
        whole_memory(config, model, processor, plan, &worst, eval)
    }

    /// Lower bound of the device memory that a rank of `asked` needs, by [`least_device_bytes`]; 0 if a choice that changes
    /// the passes is left to [`settle`].
    pub(super) fn least_device_bytes(&self, asked: &RunConfig) -> Result<u64, Failure> {
        let draft = asked.draft();
        if draft.zero_auto == Some(ZeroAuto::Open)
            || draft.optimizer_in_backward == OptimizerInBackward::Auto
        {
            return Ok(0);
        }
        let draft = draft.with_prefetch_weights(match draft.prefetch_weights {
            PrefetchWeights::Auto => PrefetchWeights::Off,
            asked => asked,
        });
        let (model, plan) = shapes(&draft)?;
        let train = match &self.samples {
            Some(samples) => largest(&samples.train, &draft, &*samples.processor)?,
            None => self.made_up_batch(&draft)?,
        };
        least_device_bytes(&draft, &*model, &Arc::new(plan), &train)
    }

    /// The largest micro-batch of artificial samples.
    fn made_up_batch(&self, config: &RunConfig) -> Result<Vec<EncodedSample>, Failure> {
        let sample = self.sample(config)?;
        Ok(match config.batch.tokens_per_batch {
            Some(most) => {
                let mut train = vec![sample; most / config.batch.model_max_length.min(most)];
                fill(&mut train, most, config.batch.model_max_length);
                train
            }
            None => vec![sample; config.batch.micro_batch],
        })
    }

    /// Computes the memory of one rank by a dry run. Every sample of the batch is an artificial one of the maximum
    /// length and image size, or of the video's.
    fn made_up(
        &self,
        config: &RunPlan,
        model: &dyn VisionLanguageModel,
        plan: &Arc<Plan>,
    ) -> Result<RankMemory, Failure> {
        let train = self.made_up_batch(config)?;
        let input = SampleInput::from(&train[0]);
        let prompt = Prompt {
            input,
            index: 0,
            max_new_tokens: ANSWER_TOKENS,
        };
        let work = Work {
            train: &train,
            held_out: self.evaluates.then(|| HeldOut {
                longest: &train[..1],
                prompts: vec![prompt],
            }),
            fixed: fixed(config, model),
        };
        dry_run(config, model, plan, &work)
    }
}

/// Artificial sample of the maximum size that the settings allow, with an image or a `video`.
///
/// # Errors
/// The video does not fit into the sample's tokens.
pub(super) fn made_up_sample(
    config: &RunConfig,
    video: Option<VideoBounds>,
) -> Result<EncodedSample, Failure> {
    let (dir, batch) = (config.model_dir(), &config.batch);
    let (tokens, slices) = (batch.model_max_length, batch.max_slice_nums);
    let tokens = tokens.min(batch.tokens_per_batch.unwrap_or(tokens));
    let Some(bounds) = video else {
        let sample = largest_sample(&dir, tokens, slices, batch.image_max_pixels);
        return sample.map_err(|e| unusable(&dir, &e));
    };
    let sample = largest_video(&dir, tokens, slices, bounds).map_err(|e| unusable(&dir, &e))?;
    sample.ok_or_else(|| {
        let frames = bounds.frames;
        let title = text!(
            "a video of {frames} frames does not fit into a sample",
            "{frames} 帧的视频放不进一个样本"
        );
        let cause = text!(
            "its features need more than {tokens} tokens",
            "它的特征需要超过 {tokens} 个 token"
        );
        Failure::usage(title, cause).next(both(
            "raise --model-max-length, or lower --max-frames",
            "请提高 --model-max-length，或降低 --max-frames",
        ))
    })
}

/// The video that `args` plan for.
///
/// # Errors
/// There is data, or the model takes no video of that many frames.
fn video(
    config: &RunConfig,
    args: &PlanArgs,
    has_data: bool,
) -> Result<Option<VideoBounds>, Failure> {
    let Some(frames) = args.max_frames.map(NonZeroUsize::get) else {
        return match args.max_frame_pixels {
            None => Ok(None),
            Some(_) => Err(Failure::usage(
                both(
                    "--max-frame-pixels bounds no video",
                    "--max-frame-pixels 没有可限制的视频",
                ),
                both("--max-frames is absent", "缺少 --max-frames"),
            )
            .next(both("add --max-frames", "请加上 --max-frames"))),
        };
    };
    let refused = |cause, next| {
        let title = text!(
            "a video of {frames} frames cannot be planned",
            "无法为 {frames} 帧的视频做计划"
        );
        Err(Failure::usage(title, cause).next(next))
    };
    if has_data {
        return refused(
            both(
                "the data says which videos there are",
                "有哪些视频由数据决定",
            )
            .into(),
            both(
                "omit --max-frames, or --data",
                "请去掉 --max-frames 或 --data",
            ),
        );
    }
    let dir = config.model_dir();
    match video_frames(&dir).map_err(|error| unusable(&dir, &error))? {
        None => refused(
            both("the model takes no videos", "该模型不接受视频").into(),
            both("omit --max-frames", "请去掉 --max-frames"),
        ),
        Some(known) if !known.contains(&frames) => {
            let (least, most) = (known.start(), known.end());
            refused(
                text!(
                    "the model takes {least} to {most} frames",
                    "该模型接受 {least} 到 {most} 帧"
                ),
                both(
                    "give --max-frames in that range",
                    "请在该范围内给出 --max-frames",
                ),
            )
        }
        Some(_) => Ok(Some(VideoBounds {
            frames,
            frame_pixels: args.max_frame_pixels.map(NonZeroUsize::get),
        })),
    }
}

fn check_weights(config: &RunConfig) -> Result<WeightSource, Failure> {
    let (model, _) = shapes(&config.draft())?;
    let dir = config.model_dir();
    let checked = WeightSource::open(&dir).and_then(|source| {
        source.check(model.spec())?;
        Ok(source)
    });
    checked.map_err(|error| {
        failures::weights(&error).next(both(
            "--no-weights true plans from config.json alone",
            "--no-weights true 只根据 config.json 做计划",
        ))
    })
}

fn machine(args: &PlanArgs) -> Machine {
    let here = Machine::here();
    let device = args.hw.map(|hw| hw.device_bytes);
    if device.is_none() && args.ram.is_none() {
        return Machine {
            nvme_free_bytes: args.nvme,
            ..here
        };
    }
    // A machine described without host memory has that of this machine.
    let ram = args.ram.unwrap_or(here.host_total_bytes);
    Machine::described(device, ram, args.nvme)
}
