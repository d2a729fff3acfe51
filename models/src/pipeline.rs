//! Passes of one pipeline stage: optimizer steps in 1F1B order, forward passes, and generation.
//!
//! An optimizer step has several micro-batches. After its first forward passes, a stage runs one forward and one backward
//! in turn (1F1B), so at most as many micro-batches are alive as stages follow, this one included. Gradients are deposited
//! in the order of the micro-batches, as without stages. A boundary carries every value that later layers read, and its
//! gradient, summed so far, in return; so sums have the order and the bits of an undivided model.

use crate::VisionLanguageModel;
use crate::autograd::{Dropout, Loss, LossFetch, Tape, Var};
use crate::batch::Batch;
use crate::error::Result;
use engine::comm::mesh::Neighbor;
use engine::{BoundaryTensor, ParamAccess, PassKind, PipelineStage, UnitId};
use kernels::{DType, Shape, Tag, Tensor};
use std::cell::OnceCell;
use std::collections::VecDeque;
use std::num::NonZeroUsize;

/// Collated micro-batch of an optimizer step.
#[derive(Debug)]
pub struct MicroBatch {
    /// Its samples.
    pub batch: Batch,
    /// Random state of dropout, if adapters have any.
    pub dropout: Option<Dropout>,
}

/// Point of a step at which a caller may measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// A forward pass has ended.
    Forward,
    /// A backward pass has ended.
    Backward,
}

/// Schedule of one optimizer step on a pipeline stage: one forward and one backward pass in turn (1F1B).
#[derive(Clone, Copy)]
pub struct Schedule1F1B<'a> {
    /// The model.
    pub model: &'a dyn VisionLanguageModel,
    /// Units whose activations are stored instead of being recomputed in backward.
    pub stored: &'a dyn Fn(UnitId) -> bool,
    /// Factor on losses in backward.
    pub factor: f32,
    /// Number of micro-batches.
    pub micro_batches: usize,
    /// Rows of the tiles of feed-forward layers ([`Tape::with_mlp_tiles`]).
    pub mlp_tiles: Option<NonZeroUsize>,
}

impl std::fmt::Debug for Schedule1F1B<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Schedule1F1B")
            .field("factor", &self.factor)
            .field("micro_batches", &self.micro_batches)
            .finish_non_exhaustive()
    }
}

/// Micro-batch between its forward and its backward pass.
struct Alive<'e, 'm> {
    tape: Tape<'e, 'm>,
    /// Loss of the last stage.
    loss: Option<(Loss, LossFetch)>,
}

impl Schedule1F1B<'_> {
    /// Largest number of micro-batches that a stage has between their forward and their backward pass.
    #[must_use]
    pub fn most_alive(stage: usize, stages: usize, micro_batches: usize) -> usize {
        micro_batches.min(stages - stage)
    }

    /// Runs the micro-batches of a step on `stage`. `next` returns the micro-batches in order. Returns for each the sum of
    /// its token losses and its number of supervised tokens, both 0 on all stages but the last. `at` is called after each
    /// pass with the index of its micro-batch.
    ///
    /// # Errors
    /// When the engine, the device, a transfer or `next` fails.
    pub fn run<S: PipelineStage>(
        &self,
        stage: &S,
        next: &mut dyn FnMut(usize) -> Result<MicroBatch>,
        at: &mut dyn FnMut(usize, Point),
    ) -> Result<Vec<(f64, usize)>> {
        let count = self.micro_batches;
        let batches: Vec<OnceCell<Batch>> = (0..count).map(|_| OnceCell::new()).collect();
        let place = stage.coordinates();
        let alive_most = Self::most_alive(place.stage, place.stages, count);
        let mut alive: VecDeque<Alive<'_, '_>> = VecDeque::new();
        let mut sums = Vec::with_capacity(count);
        for (index, cell) in batches.iter().enumerate() {
            let MicroBatch { batch, dropout } = next(index)?;
            let batch = cell.get_or_init(|| batch);
            alive.push_back(self.forward(stage, batch, dropout)?);
            at(index, Point::Forward);
            if alive.len() == alive_most {
                sums.extend(self.backward(stage, alive.pop_front())?);
                at(sums.len() - 1, Point::Backward);
            }
        }
        while !alive.is_empty() {
            sums.extend(self.backward(stage, alive.pop_front())?);
            at(sums.len() - 1, Point::Backward);
        }
        Ok(sums)
    }

    fn forward<'e, 'm, S: PipelineStage>(
        &'e self,
        stage: &'e S,
        batch: &'m Batch,
        dropout: Option<Dropout>,
    ) -> Result<Alive<'e, 'm>>
    where
        'e: 'm,
    {
        stage.begin(PassKind::Forward);
        let mut tape = Tape::training(stage)
            .with_stored(self.stored)
            .with_loss_factor(self.factor)
            .with_mlp_tiles(self.mlp_tiles)
            .with_received(receive(stage)?);
        if let Some(dropout) = dropout {
            tape = tape.with_dropout(dropout);
        }
        let loss = self.model.forward(&tape, batch)?;
        send(stage, &tape)?;
        let loss = match stage.coordinates().is_last() {
            true => Some((loss.clone(), loss.fetch()?)),
            false => None,
        };
        stage.end(PassKind::Forward)?;
        Ok(Alive { tape, loss })
    }

    fn backward<S: PipelineStage>(
        &self,
        stage: &S,
        alive: Option<Alive<'_, '_>>,
    ) -> Result<Option<(f64, usize)>> {
        let Some(Alive { tape, loss }) = alive else {
            return Ok(None);
        };
        let place = stage.coordinates();
        stage.begin(PassKind::Backward);
        let gradients = match place.is_last() {
            true => Vec::new(),
            false => stage.receive(Neighbor::Next)?,
        };
        let seed = loss.as_ref().map(|(loss, _)| (loss, self.factor));
        let gradients = tape.backward_stage(seed, gradients)?;
        // The loss is read before the gradients leave: after it, the read would wait for their copy, and the next pass
        // would begin only then.
        let total = match loss {
            // A dry run has no values.
            Some((loss, _)) if loss.rows.value().is_meta() => (0.0, loss.supervised),
            Some((loss, fetch)) => (fetch.sum()?, loss.supervised),
            None => (0.0, 0),
        };
        if place.stage > 0 {
            stage.send(Neighbor::Previous, &gradients)?;
        }
        stage.end(PassKind::Backward)?;
        Ok(Some(total))
    }
}

/// Values of the previous stage for the next forward pass; none on the first stage.
///
/// # Errors
/// When the transfer fails.
pub fn receive<S: PipelineStage + ?Sized>(stage: &S) -> Result<Vec<BoundaryTensor>> {
    match stage.coordinates().stage {
        0 => Ok(Vec::new()),
        _ => Ok(stage.receive(Neighbor::Previous)?),
    }
}

/// Sends the values of a forward pass that later stages read; the last stage sends nothing.
///
/// # Errors
/// When the transfer fails.
pub fn send<S: PipelineStage + ?Sized>(stage: &S, tape: &Tape<'_, '_>) -> Result<()> {
    if stage.coordinates().is_last() {
        return Ok(());
    }
    Ok(stage.send(Neighbor::Next, &passed(&tape.sent()))?)
}

/// Values as they cross a boundary.
fn passed(values: &[Var]) -> Vec<BoundaryTensor> {
    let values = values.iter().filter_map(|var| {
        Some(BoundaryTensor {
            index: var.output()?,
            wants_gradient: var.slot().is_some(),
            value: var.value().clone(),
        })
    });
    values.collect()
}

/// Forward pass of a batch without backward. The caller begins and ends the pass. Only the last stage has a loss; the rows
/// of the others are empty. `mlp_tiles` are the rows of the tiles of feed-forward layers.
///
/// # Errors
/// When the engine, the device or a transfer fails.
pub fn forward<S: PipelineStage>(
    model: &dyn VisionLanguageModel,
    stage: &S,
    batch: &Batch,
    mlp_tiles: Option<NonZeroUsize>,
) -> Result<Loss> {
    let tape = Tape::inference(stage)
        .with_mlp_tiles(mlp_tiles)
        .with_received(receive(stage)?);
    let loss = model.forward(&tape, batch)?;
    send(stage, &tape)?;
    Ok(loss)
}

/// f32 logits after the last token of each sample of `batch`; empty on all stages but the last. Without stages it is the
/// whole model's forward pass. `mlp_tiles` are the rows of the tiles of feed-forward layers.
///
/// # Errors
/// When the engine, the device or a transfer fails.
pub(crate) fn next_token_logits(
    model: &dyn VisionLanguageModel,
    access: &dyn ParamAccess,
    batch: &Batch,
    mlp_tiles: Option<NonZeroUsize>,
) -> Result<Tensor> {
    let mut tape = Tape::inference(access).with_mlp_tiles(mlp_tiles);
    let stage = access.pipeline();
    if let Some(stage) = stage {
        tape = tape.with_received(receive(stage)?);
    }
    let logits = model.next_token_logits(&tape, batch)?;
    if let Some(stage) = stage {
        send(stage, &tape)?;
    }
    Ok(logits)
}

/// The tokens that the last stage chose, on every stage of a data-parallel rank. `choose` runs on the last stage.
///
/// # Errors
/// When `choose` or a transfer fails.
pub(crate) fn chosen(
    access: &dyn ParamAccess,
    choose: impl FnOnce() -> Result<Vec<i32>>,
) -> Result<Vec<i32>> {
    let Some(stage) = access.pipeline() else {
        return choose();
    };
    let place = stage.coordinates();
    let tokens = match place.is_last() {
        true => choose()?,
        false => {
            let received = stage.receive(Neighbor::Next)?;
            let bytes = received.first().map(|passed| passed.value.to_bytes());
            let bytes = bytes.transpose()?.unwrap_or_default();
            let word = |bytes: &[u8; 4]| i32::from_le_bytes(*bytes);
            bytes.as_chunks::<4>().0.iter().map(word).collect()
        }
    };
    if place.stage > 0 {
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect();
        let shape = Shape::new(&[tokens.len()]);
        let backend = access.backend();
        let sent = BoundaryTensor {
            index: 0,
            wants_gradient: false,
            value: backend.upload(&bytes, shape, DType::I32, Tag::Activations)?,
        };
        stage.send(Neighbor::Previous, &[sent])?;
    }
    Ok(tokens)
}
