//! Optimizer in backward: a thread updates a unit as soon as its gradients are final, into the unit's second copy.
//!
//! A unit's memory moves to the thread and back, so nothing is shared. At most one unit waits while another is updated.
//! This bounds the memory of waiting gradients: a slow optimizer slows backward down. The thread affects only time.
//! Every element gets one update, with the same numbers as after the pass.

use super::OptimizerConfig;
use super::gradients::{Accumulator, Consumed, RoundingKey};
use super::state::UnitState;
use super::update::{CHUNKS_AHEAD, Chunk, Rule, Scalars, chunks};
use crate::error::EngineError;
use crate::offload::tier::{Access, Region, Tiers};
use crate::offload::worker::Worker;
use crate::plan::{GroupKind, Plan, Tier};
use crate::spec::UnitId;
use crate::trace::Lane;
use kernels::DType;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Maximal number of elements of a chunk in memory. Chunks are copied before the update and should still be in a cache.
pub(crate) const CHUNK_ELEMS: usize = 1 << 20;

/// Gradients of a unit for its update.
#[derive(Debug)]
pub(crate) enum Gradients {
    /// The sum over micro-batches, which the update does not change.
    Summed(Accumulator),
    /// The only micro-batch's gradients, f32, of the elements whose state this rank stores; the update consumes them.
    Coming(Region, RoundingKey),
}

/// Job of the update thread: update one unit's weights and optimizer state during the backward pass.
#[derive(Debug)]
pub(crate) struct BackwardJob {
    pub(crate) unit: UnitId,
    pub(crate) gradients: Gradients,
    pub(crate) state: UnitState,
    /// Sum of the squares of the gradients that the update consumed.
    pub(crate) squares: Option<f64>,
    pub(crate) outcome: Result<()>,
    /// Time that the update of this unit took.
    pub(crate) took: Duration,
}

/// Stored weights, and the element of the parameter group at which they begin.
pub(crate) type Weights = (Arc<Region>, usize);

/// Handle of the thread that applies one update, unit by unit, during the backward pass.
#[derive(Debug)]
pub(crate) struct BackwardUpdates {
    scalars: Scalars,
    thread: Worker<BackwardJob, Option<Weights>>,
}

impl BackwardUpdates {
    /// Starts the thread of an update with the numbers `scalars`.
    pub(crate) fn start(
        plan: Arc<Plan>,
        optimizer: Arc<OptimizerConfig>,
        scalars: Scalars,
        tiers: &Tiers,
    ) -> Result<Self> {
        let trace = tiers.trace().clone();
        let work = move |job: &mut BackwardJob, weights: Option<Weights>| {
            let rule = Rule {
                plan: &plan,
                optimizer: &optimizer,
                scalars,
            };
            let (started, begun) = (trace.now(), Instant::now());
            job.outcome = job.step(rule, weights.as_ref());
            job.took = begun.elapsed();
            trace.end(started, Lane::UpdateInBackward, || {
                plan.spec().units[job.unit.index()].name.clone()
            });
        };
        let thread = tiers.worker("early-step", work)?;
        Ok(Self { scalars, thread })
    }

    /// AdamW's constants for this update.
    pub(crate) fn scalars(&self) -> Scalars {
        self.scalars
    }

    /// Number of units that were sent to the thread and not received.
    pub(crate) fn open(&self) -> usize {
        self.thread.open()
    }

    /// Sends a unit to the thread, which may read `weights` until the unit returns.
    pub(crate) fn send(&mut self, job: BackwardJob, weights: Option<Weights>) -> Result<()> {
        Ok(self.thread.send(job, weights)?)
    }

    /// Waits for the unit that was sent first of those at the thread, and returns it.
    pub(crate) fn receive(&mut self) -> Result<BackwardJob> {
        Ok(self.thread.receive()?)
    }
}

impl BackwardJob {
    fn step(&mut self, rule: Rule<'_>, weights: Option<&Weights>) -> Result<()> {
        let config = rule.plan.config();
        let on_disk = [config.offload.param, config.offload.optimizer].contains(&Tier::Nvme);
        let most = config.sub_group_elems.min(CHUNK_ELEMS);
        let of_unit = [(self.unit, self.state.range())];
        let group = &rule.plan.unit(self.unit).trainable;
        let border = group.elementwise_elems;
        let chunks = chunks(of_unit.into_iter(), |_| border, most, on_disk);
        let Some((weights, start)) = weights else {
            return Ok(());
        };
        let mut consumed = match &self.gradients {
            Gradients::Coming(_, rounding_key) => {
                Some(Consumed::new(group, rule.plan, *rounding_key))
            }
            Gradients::Summed(_) => None,
        };
        let mut prefetched = VecDeque::new();
        for (i, chunk) in chunks.iter().enumerate() {
            while prefetched.len() <= CHUNKS_AHEAD && i + prefetched.len() < chunks.len() {
                let summed = match &self.gradients {
                    Gradients::Summed(sum) => Some(sum),
                    Gradients::Coming(..) => None,
                };
                let range = &chunks[i + prefetched.len()].range;
                prefetched.push_back(rule.read_ahead(
                    range,
                    summed,
                    (weights, *start),
                    &self.state,
                )?);
            }
            let reads = prefetched.pop_front().unwrap_or_default();
            let first = self.state.range().start;
            self.gradients
                .chunk(chunk, first, reads, &mut consumed, |grads, prefetched| {
                    let dtype = rule.plan.dtype_of(GroupKind::Trainable);
                    let from = (&**weights, *start);
                    let region_chunks = self.state.backward_chunks(
                        &chunk.range,
                        dtype,
                        from,
                        rule.reads_weights(),
                        prefetched,
                    )?;
                    match region_chunks {
                        Some((weight, states)) => rule.apply(chunk, grads, weight, states),
                        None => Ok(()),
                    }
                })?;
        }
        self.squares = consumed.map(Consumed::squares);
        Ok(())
    }
}

impl Gradients {
    /// Calls `step` with the gradients of a chunk, and with the reads in flight of its weights and state.
    fn chunk(
        &mut self,
        chunk: &Chunk,
        first: usize,
        reads: super::update::Reads,
        consumed: &mut Option<Consumed<'_>>,
        step: impl FnOnce(
            &[u8],
            &mut dyn FnMut() -> Option<crate::offload::spill::PendingRead>,
        ) -> Result<()>,
    ) -> Result<()> {
        let mut reads = reads.into_iter();
        let of_gradients = reads.next().flatten();
        let mut prefetched = || reads.next().flatten();
        let bytes = |range: &Range<usize>, start: usize, dtype: DType| {
            let size = dtype.size_bytes();
            (range.start - start) * size..(range.end - start) * size
        };
        match (self, consumed) {
            (Self::Summed(sum), _) => {
                let bytes = bytes(&chunk.range, sum.range().start, sum.dtype());
                let region = sum.region_read();
                let mut window = region.window(bytes, Access::Read, of_gradients)?;
                step(window.as_mut_bytes(), &mut prefetched)
            }
            (Self::Coming(values, _), Some(consumed)) => {
                let bytes = bytes(&chunk.range, first, DType::F32);
                let mut window = values.window(bytes, Access::Read, None)?;
                step(
                    consumed.take(chunk.range.clone(), window.as_mut_slice()),
                    &mut prefetched,
                )
            }
            (Self::Coming(..), None) => Ok(()),
        }
    }
}
