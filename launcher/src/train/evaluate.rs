//! Evaluation on held-out samples: loss, and answers by greedy decoding with all ranks in lock step.

use super::numeric::observe;
use super::replica::Replica;
use crate::data::SampleSet;
use crate::data::answers::{self, Answer, Question, sample_failure};
use crate::data::check::encode_options;
use crate::error::{Failure, failures};
use crate::lang::{Text, both};
use crate::model::not_finite::not_finite_loss;
use engine::PassKind;
use engine::comm::Tag;
use models::data::EncodeOptions;
use models::generate::{GenerateOptions, Prompt, Sampling, generate_watched};
use models::{ModelError, SampleInput, pipeline};
use std::cell::Cell;

/// Maximum number of held-out samples whose answers are generated. The loss covers all of them.
const GENERATED_SAMPLES: usize = 200;
/// Number of these whose answers are written to files.
const SHOWN_SAMPLES: usize = 12;

/// Mean loss per supervised token over the held-out samples. The sums are added in index order in f64, so the result
/// has the same bits for every world size.
pub(crate) fn loss(replica: &Replica<'_>, set: &SampleSet) -> Result<f64, Failure> {
    let losses = losses(replica, set, &encode_options(replica.config))?;
    let sum: f64 = losses.iter().map(|(sum, _)| sum).sum();
    let tokens: f64 = losses.iter().map(|(_, supervised)| supervised).sum();
    Ok(sum / tokens.max(1.0))
}

/// Sum of the losses and number of supervised tokens of each held-out sample, on all ranks. Each sample is one forward
/// pass.
pub(crate) fn losses(
    replica: &Replica<'_>,
    set: &SampleSet,
    options: &EncodeOptions,
) -> Result<Vec<(f64, f64)>, Failure> {
    let world = replica.data();
    let mut own = vec![0f64; 2 * set.samples.len()];
    for first in (0..set.samples.len()).step_by(world.size) {
        let index = first + world.rank;
        replica.zero.begin_pass(PassKind::Infer);
        if let Some(sample) = set.samples.get(index) {
            let encoded = replica
                .processor
                .encode(sample, &set.images, options)
                .map_err(|e| sample_failure(index, &e))?;
            let (sum, supervised) = forward(replica, &[SampleInput::from(&encoded)])?;
            own[2 * index] = sum;
            own[2 * index + 1] = supervised as f64;
        }
        replica
            .zero
            .end_pass()
            .map_err(|e| failures::engine(both("evaluate", "评估"), &e))?;
    }
    let all = replica
        .comm
        .all_gather_f64(&own, Tag::new("eval-loss", 0))
        .map_err(|e| failures::comm(&e))?;
    let of = |i: usize| all.iter().map(|r| r[i]).sum::<f64>();
    if let Some(index) = (0..set.samples.len()).find(|i| !of(2 * i).is_finite()) {
        return Err(not_finite(replica, set, options, index, of(2 * index))?);
    }
    Ok((0..set.samples.len())
        .map(|i| (of(2 * i), of(2 * i + 1)))
        .collect())
}

/// Failure of sample `index`, whose loss is not finite. All ranks repeat the pass that it was in, and report the same
/// first non-finite value.
fn not_finite(
    replica: &Replica<'_>,
    set: &SampleSet,
    options: &EncodeOptions,
    index: usize,
    loss: f64,
) -> Result<Failure, Failure> {
    let world = replica.data();
    let own = index - index % world.size + world.rank;
    replica.zero.begin_pass(PassKind::Infer);
    let mut found = None;
    if let Some(sample) = set.samples.get(own) {
        let encoded = replica.processor.encode(sample, &set.images, options);
        let encoded = encoded.map_err(|e| sample_failure(own, &e))?;
        found = observe(replica, &[SampleInput::from(&encoded)])?;
    }
    let ended = replica.zero.end_pass();
    ended.map_err(|e| {
        failures::engine(
            both("look for the first non-finite value", "查找第一个非有限值"),
            &e,
        )
    })?;
    let all = replica
        .comm
        .all_gather_bytes(
            &serde_json::to_vec(&found).unwrap_or_default(),
            Tag::new("eval-non-finite", 0),
        )
        .map_err(|e| failures::comm(&e))?;
    let at = replica.zero.mesh().coordinates();
    let first = (0..at.stages).find_map(|stage| {
        let text = all.get(at.rank(index % world.size, stage))?;
        serde_json::from_slice::<Option<Text>>(text).ok()?
    });
    Ok(not_finite_loss(&set.samples[index], index, loss, first))
}

fn forward(replica: &Replica<'_>, samples: &[SampleInput<'_>]) -> Result<(f64, usize), Failure> {
    let run = || -> Result<_, ModelError> {
        let batch = replica.model.collate(samples, &*replica.backend)?;
        let loss = pipeline::forward(
            &*replica.model,
            &replica.zero,
            &batch,
            replica.config.mlp_tile_tokens,
        )?;
        match replica.zero.mesh().coordinates().is_last() {
            true => Ok((loss.sum()?, loss.supervised)),
            false => Ok((0.0, 0)),
        }
    };
    run().map_err(|e| failures::model(both("evaluate", "评估"), &e))
}

/// Fraction of held-out answers that match exactly, in 0..=1. The first answers are written to the run's directory.
pub(crate) fn exact_match(
    replica: &Replica<'_>,
    set: &SampleSet,
    step: u64,
) -> Result<f64, Failure> {
    let asking = Asking {
        options: &encode_options(replica.config),
        count: set.samples.len().min(GENERATED_SAMPLES),
        max_new_tokens: None,
    };
    let (mut right, mut asked) = (0f64, 0f64);
    let mut shown = Vec::new();
    let mut answered = answers(replica, set, &asking, &mut |_| ())?;
    if replica.zero.mesh().coordinates().stage > 0 {
        // All stages have the same answers; the first counts them.
        answered.clear();
    }
    for answer in answered {
        right += f64::from(answer.exact);
        asked += 1.0;
        if answer.index < SHOWN_SAMPLES {
            shown.push(answer);
        }
    }
    let all = replica
        .comm
        .all_gather_f64(&[right, asked], Tag::new("eval-match", 0))
        .map_err(|e| failures::comm(&e))?;
    answers::keep(&*replica.comm, &replica.config.output, step, &shown)?;
    let total: f64 = all.iter().map(|r| r[1]).sum();
    Ok(all.iter().map(|r| r[0]).sum::<f64>() / total.max(1.0))
}

/// What is asked about held-out samples.
pub(crate) struct Asking<'a> {
    pub(crate) options: &'a EncodeOptions,
    /// Number of samples, from the first one on.
    pub(crate) count: usize,
    /// Longest answer in tokens. `None`: by the length of the reference.
    pub(crate) max_new_tokens: Option<usize>,
}

/// This rank's answers, by greedy decoding. `done` is told after each batch how many samples all ranks have answered.
pub(crate) fn answers(
    replica: &Replica<'_>,
    set: &SampleSet,
    asking: &Asking<'_>,
    done: &mut dyn FnMut(usize),
) -> Result<Vec<Answer>, Failure> {
    let world = replica.data();
    let own: Vec<usize> = (world.rank..asking.count).step_by(world.size).collect();
    let per_batch = replica.config.batch.eval_batch.max(1);
    let rounds = asking.count.div_ceil(world.size).div_ceil(per_batch);
    let options = GenerateOptions {
        sampling: Sampling::GREEDY,
        stop_ids: replica.processor.stop_ids(),
        mlp_tiles: replica.config.mlp_tile_tokens,
    };
    let mut answers = Vec::new();
    for round in 0..rounds {
        let from = (round * per_batch).min(own.len());
        let to = ((round + 1) * per_batch).min(own.len());
        let ask = |i: &usize| {
            let sample = &set.samples[*i];
            Question::new(&*replica.processor, sample, &set.images, *i, asking.options)
                .map(|question| question.with_limit(asking.max_new_tokens))
        };
        let questions = own[from..to].iter().map(ask);
        let questions = questions.collect::<Result<Vec<_>, Failure>>()?;
        let prompts: Vec<Prompt<'_>> = questions.iter().map(Question::prompt).collect();
        let tokens = decode(replica, &prompts, &options, &mut |_| ())?;
        for (question, tokens) in questions.iter().zip(tokens) {
            answers.push(question.judge(&*replica.processor, &tokens)?);
        }
        done(((round + 1) * per_batch * world.size).min(asking.count));
    }
    Ok(answers)
}

/// Answers `prompts`, those of this rank. Every rank runs the same number of passes, until no rank has an open answer.
/// `after_pass` gets the new tokens of each prompt so far.
pub(crate) fn decode(
    replica: &Replica<'_>,
    prompts: &[Prompt<'_>],
    options: &GenerateOptions,
    after_pass: &mut dyn FnMut(&[Vec<i32>]),
) -> Result<Vec<Vec<i32>>, Failure> {
    let open = Cell::new(false);
    let mut anyone_left = |left: bool| -> Result<bool, ModelError> {
        if open.replace(false) {
            replica.zero.end_pass()?;
        }
        let left = f64::from(left);
        let all = replica
            .comm
            .all_gather_f64(&[left], Tag::new("decoding", 0));
        let anyone = all
            .map_err(engine::EngineError::from)?
            .iter()
            .any(|r| r[0] > 0.0);
        if anyone {
            replica.zero.begin_pass(PassKind::Infer);
            open.set(true);
        }
        Ok(anyone)
    };
    generate_watched(
        &*replica.model,
        &replica.zero,
        prompts,
        options,
        &mut anyone_left,
        after_pass,
    )
    .map_err(|e| failures::model(both("generate answers", "生成回答"), &e))
}
