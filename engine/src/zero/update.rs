//! Update after the pass, chunk by chunk: the next chunks are read while one is updated and the previous one is
//! written.

use super::Result;
use crate::comm::ReadBuffer;
use crate::error::EngineError;
use crate::plan::GroupKind;
use crate::spec::UnitId;
use crate::step::device_step::{DeviceStep, Gradients};
use crate::step::update::{CHUNKS_AHEAD, Chunk, Parts, Reads, Rule, bytes};
use crate::store::Store;
use crate::trace::{Lane, Trace};
use std::collections::VecDeque;

/// An update after the pass: the rule, and the store it changes.
pub(crate) struct Update<'a> {
    pub(crate) rule: Rule<'a>,
    pub(crate) store: &'a mut Store,
    /// The device that updates; `None` if the host does.
    pub(crate) device: Option<&'a DeviceStep>,
    pub(crate) trace: &'a Trace,
}

impl Update<'_> {
    fn read_ahead(&self, chunk: &Chunk, with_gradients: bool) -> Result<Reads> {
        let Chunk { unit, range } = chunk;
        let weights = self.store.weights(*unit, GroupKind::Trainable);
        let (Some(weights), Some(state)) = (weights, self.store.state(*unit)) else {
            return Ok(Reads::new());
        };
        let start = self.store.resting(*unit, GroupKind::Trainable).start;
        let gradients = self.store.gradients(*unit).filter(|_| with_gradients);
        self.rule
            .read_ahead(range, gradients, (weights, start), state)
    }

    /// Updates all chunks in order. `gathered` returns the gradients of a unit's whole trainable group, or `None` to
    /// use the accumulated ones.
    pub(crate) fn run(
        mut self,
        chunks: &[Chunk],
        gathered: &mut dyn FnMut(&mut Store, UnitId) -> Result<Option<ReadBuffer>>,
    ) -> Result<()> {
        let mut prefetched: VecDeque<Reads> = VecDeque::new();
        let mut of_unit: Option<(UnitId, Option<ReadBuffer>)> = None;
        for (i, chunk) in chunks.iter().enumerate() {
            if of_unit.as_ref().is_none_or(|(unit, _)| *unit != chunk.unit) {
                of_unit = Some((chunk.unit, gathered(self.store, chunk.unit)?));
            }
            let all = of_unit.as_ref().and_then(|(_, all)| all.as_ref());
            while prefetched.len() <= CHUNKS_AHEAD && i + prefetched.len() < chunks.len() {
                let next = self.read_ahead(&chunks[i + prefetched.len()], all.is_none())?;
                prefetched.push_back(next);
            }
            let reads = prefetched.pop_front().unwrap_or_default();
            let (trace, units) = (self.trace, &self.rule.plan.spec().units);
            let name = || units[chunk.unit.index()].name.clone();
            trace.span(Lane::Update, name, || self.step(chunk, reads, all))?;
        }
        Ok(())
    }

    fn step_on_device(
        &mut self,
        device: &DeviceStep,
        chunk: &Chunk,
        gathered: Option<&ReadBuffer>,
    ) -> Result<()> {
        let Chunk { unit, range } = chunk;
        let start = self.store.resting(*unit, GroupKind::Trainable).start;
        let (gradients, weights, state) = self.store.of_update(*unit)?;
        let gradients = match gathered {
            Some(all) => Gradients::Here(all.part(bytes(range, 0, gradients.dtype()))),
            None => {
                let there = gradients.on_device(range.clone())?;
                Gradients::There(there.ok_or(EngineError::NotResident)?)
            }
        };
        device.step(self.rule.plan, chunk, gradients, (weights, start), state)
    }

    fn step(&mut self, chunk: &Chunk, reads: Reads, gathered: Option<&ReadBuffer>) -> Result<()> {
        if let Some(device) = self.device {
            return self.step_on_device(device, chunk, gathered);
        }
        let start = self.store.resting(chunk.unit, GroupKind::Trainable).start;
        let (gradients, weights, state) = self.store.of_update(chunk.unit)?;
        if !weights.has_values() {
            return Ok(());
        }
        let parts = Parts {
            gradients,
            weights: (weights, start),
            state,
        };
        self.rule.step(chunk, reads, gathered, parts)
    }
}
