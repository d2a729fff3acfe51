//! Pipeline stages in a plan: the dry run of a stage, whose transfers have shapes only, and the output lines about stages.

use crate::config::{RunConfig, RunPlan};
use crate::error::Failure;
use crate::lang::text;
use crate::memory::RankMemory;
use crate::model::setup::{dropout, keeps};
use crate::model::stages::Cost;
use crate::ui::{Event, StagesEvent};
use engine::comm::World;
use engine::comm::mesh::{Coordinates, Neighbor};
use engine::{
    BoundaryTensor, DryRun, EngineError, Lease, ParamAccess, ParamId, PassKind, Phase,
    PipelineStage, Plan, UnitId, Zero,
};
use kernels::{Backend, DType, Shape, Tag, Tensor};
use models::autograd::Tape;
use models::data::EncodedSample;
use models::pipeline::{self, MicroBatch, Point, Schedule1F1B};
use models::{ModelError, SampleInput, VisionLanguageModel};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Value of a transfer.
#[derive(Clone, Copy, Debug)]
struct Crossed {
    index: u32,
    wants_gradient: bool,
    shape: Shape,
    dtype: DType,
}

/// Values that one forward pass sends to the next stage.
#[derive(Clone, Debug, Default)]
pub(super) struct Transfer(Vec<Crossed>);

impl Transfer {
    /// Bytes of all values.
    pub(super) fn bytes(&self) -> u64 {
        let bytes = |value: &Crossed| value.shape.elems() * value.dtype.size_bytes();
        self.0.iter().map(bytes).sum::<usize>() as u64
    }

    fn of(values: &[BoundaryTensor]) -> Self {
        let crossed = |passed: &BoundaryTensor| Crossed {
            index: passed.index,
            wants_gradient: passed.wants_gradient,
            shape: passed.value.shape(),
            dtype: passed.value.dtype(),
        };
        Self(values.iter().map(crossed).collect())
    }

    /// The values as a stage receives them.
    fn on(&self, backend: &dyn Backend) -> Result<Vec<BoundaryTensor>, EngineError> {
        let received = |value: &Crossed| {
            let Crossed { shape, dtype, .. } = *value;
            let bytes = vec![0; shape.elems() * dtype.size_bytes()];
            Ok(BoundaryTensor {
                index: value.index,
                wants_gradient: value.wants_gradient,
                value: backend.upload(&bytes, shape, dtype, Tag::Activations)?,
            })
        };
        self.0.iter().map(received).collect()
    }
}

/// State of the dry run of one pipeline stage.
#[derive(Debug)]
pub(super) struct StageRun {
    coordinates: Coordinates,
    kind: Cell<PassKind>,
    /// What the previous stage sent, one entry for each forward pass still to come.
    received: RefCell<VecDeque<Transfer>>,
    /// What this stage sent, one entry for each forward pass so far.
    sent: RefCell<Vec<Transfer>>,
    /// What this stage sent in forward passes whose backward is still to come.
    open: RefCell<VecDeque<Transfer>>,
    /// Values that threads send to the previous and the next stage, until the next transfer there.
    leaving: RefCell<[Vec<BoundaryTensor>; 2]>,
}

impl StageRun {
    /// Pipeline stage `stage` of `plan`, which receives `received` in its forward passes.
    pub(super) fn new(stage: usize, plan: &Plan, received: Vec<Transfer>) -> Self {
        Self {
            coordinates: Coordinates {
                data: World {
                    rank: 0,
                    size: plan.world_size(),
                },
                stage,
                stages: plan.stages(),
            },
            kind: Cell::new(PassKind::Infer),
            received: RefCell::new(received.into()),
            sent: RefCell::default(),
            open: RefCell::default(),
            leaving: RefCell::default(),
        }
    }

    /// Ends the transfers, as an update does.
    pub(super) fn wait(&self) {
        self.leaving.take();
    }

    /// What the stage sent, one entry for each forward pass.
    pub(super) fn sent(self) -> Vec<Transfer> {
        self.sent.into_inner()
    }

    /// The stage as passes use it.
    pub(super) fn on<'a>(&'a self, dry_run: &'a DryRun) -> OnStage<'a> {
        OnStage {
            zero: dry_run,
            run: self,
        }
    }
}

/// Dry run of the micro-batches of one update on a pipeline stage, in the order of the trainer. `at` is called after each
/// pass.
///
/// # Errors
/// A sample does not fit the model.
pub(super) fn step(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
    (dry_run, stage): (&DryRun, &StageRun),
    micro_batches: &[&[EncodedSample]],
    at: &mut dyn FnMut(Point),
) -> Result<(), ModelError> {
    let keep = |unit| keeps(config, model, unit);
    let schedule = Schedule1F1B {
        model,
        stored: &keep,
        factor: 1.0,
        micro_batches: micro_batches.len(),
        mlp_tiles: config.mlp_tile_tokens,
    };
    let mut next = |index: usize| collated(config, model, dry_run, micro_batches[index]);
    schedule.run(&stage.on(dry_run), &mut next, &mut |_, point| at(point))?;
    Ok(())
}

/// Dry run of the forward passes of one update on a pipeline stage. Returns what they send.
///
/// # Errors
/// A sample does not fit the model.
pub(super) fn forwards(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
    (dry_run, stage): (&DryRun, StageRun),
    micro_batches: &[&[EncodedSample]],
) -> Result<Vec<Transfer>, ModelError> {
    for samples in micro_batches {
        let micro_batch = collated(config, model, dry_run, samples)?;
        let on = stage.on(dry_run);
        on.begin(PassKind::Forward);
        let mut tape = Tape::training(&on)
            .with_mlp_tiles(config.mlp_tile_tokens)
            .with_received(pipeline::receive(&on)?);
        if let Some(dropout) = micro_batch.dropout {
            tape = tape.with_dropout(dropout);
        }
        model.forward(&tape, &micro_batch.batch)?;
        pipeline::send(&on, &tape)?;
        on.end(PassKind::Forward)?;
    }
    stage.wait();
    Ok(stage.sent())
}

fn collated(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
    dry_run: &DryRun,
    samples: &[EncodedSample],
) -> Result<MicroBatch, ModelError> {
    let backend: &dyn Backend = &**dry_run.backend();
    let samples: Vec<SampleInput<'_>> = samples.iter().map(SampleInput::from).collect();
    let keys = vec![0; samples.len()];
    Ok(MicroBatch {
        batch: model.collate(&samples, backend)?,
        dropout: dropout(config, &keys, &samples, backend)?,
    })
}

/// Dry run of a pipeline stage, as passes use it.
#[derive(Debug)]
pub(super) struct OnStage<'a> {
    zero: &'a Zero,
    run: &'a StageRun,
}

impl ParamAccess for OnStage<'_> {
    fn backend(&self) -> &Arc<dyn Backend> {
        self.zero.backend()
    }

    fn lease(&self, unit: UnitId, phase: Phase) -> Result<Lease<'_>, EngineError> {
        self.zero.lease(unit, phase)
    }

    fn deposit(&self, id: ParamId, grad: &Tensor) -> Result<(), EngineError> {
        self.zero.deposit(id, grad)
    }

    fn activations(&self) -> Option<&engine::Activations> {
        self.zero.activations()
    }

    fn is_trainable(&self, id: ParamId) -> bool {
        self.zero.is_trainable(id)
    }

    fn needs_backward(&self, unit: UnitId) -> bool {
        self.zero.needs_backward(unit)
    }

    fn recomputes_input(&self, unit: UnitId) -> bool {
        self.zero.recomputes_input(unit)
    }

    fn own_units(&self) -> Option<Range<u32>> {
        self.zero.own_units()
    }

    fn pipeline(&self) -> Option<&dyn PipelineStage> {
        Some(self)
    }
}

impl PipelineStage for OnStage<'_> {
    fn coordinates(&self) -> Coordinates {
        self.run.coordinates
    }

    fn begin(&self, kind: PassKind) {
        self.run.kind.set(kind);
        self.zero.begin_pass(kind);
    }

    fn end(&self, _kind: PassKind) -> Result<(), EngineError> {
        self.zero.end_pass()
    }

    fn send(&self, to: Neighbor, values: &[BoundaryTensor]) -> Result<(), EngineError> {
        if to == Neighbor::Next {
            let transfer = Transfer::of(values);
            if self.run.kind.get() == PassKind::Forward {
                self.run.open.borrow_mut().push_back(transfer.clone());
            }
            self.run.sent.borrow_mut().push(transfer);
        }
        self.run.leaving.borrow_mut()[usize::from(to == Neighbor::Next)] = values.to_vec();
        Ok(())
    }

    fn receive(&self, from: Neighbor) -> Result<Vec<BoundaryTensor>, EngineError> {
        let queue = match from {
            Neighbor::Previous => &self.run.received,
            Neighbor::Next => &self.run.open,
        };
        let mut transfer = queue.borrow_mut().pop_front().unwrap_or_default();
        if from == Neighbor::Next {
            transfer.0.retain(|value| value.wants_gradient);
        }
        transfer.on(&**self.zero.backend())
    }
}

/// Fraction of a step in which a stage waits, with `micro_batches` per update on `stages` pipeline stages (1F1B).
pub(super) fn bubble(stages: usize, micro_batches: usize) -> f64 {
    (stages - 1) as f64 / (micro_batches + stages - 1) as f64
}

/// Pipeline stages of a run: units, balance, bubble and transfers. `costs` are those of the units. `None` without stages.
pub(crate) fn described(
    run: &RunPlan,
    plan: &Plan,
    memory: &RankMemory,
    costs: &dyn Fn() -> Result<Vec<Cost>, Failure>,
) -> Result<Option<StagesEvent>, Failure> {
    let Some(slice) = &plan.config().slice else {
        return Ok(None);
    };
    let (stages, micro_batches) = (run.mp_size, run.batch.accumulation_steps);
    let costs = costs()?;
    let shares = |of: fn(&Cost) -> f64| -> Vec<f64> {
        let total = costs.iter().map(of).sum::<f64>().max(1.0);
        let share = |stage: usize| {
            let units = slice.units(stage);
            let part = &costs[units.start as usize..units.end as usize];
            100.0 * part.iter().map(of).sum::<f64>() / total
        };
        (0..stages).map(share).collect()
    };
    Ok(Some(StagesEvent {
        units: slice.counts.clone(),
        operations_percent: shares(|cost| cost.operations),
        bytes_percent: shares(|cost| cost.bytes),
        boundary_bytes: memory.boundary_bytes.clone(),
        data_ranks: run.data_ranks(),
        micro_batches,
        waiting_percent: 100.0 * bubble(stages, micro_batches),
    }))
}

/// The line about pipeline stages, and a warning about too few micro-batches.
pub(crate) fn lines(described: Option<StagesEvent>) -> Vec<Event> {
    let Some(event) = described else {
        return Vec::new();
    };
    let (stages, micro_batches) = (event.units.len(), event.micro_batches);
    let waits = event.waiting_percent;
    let mut lines = vec![Event::Stages(event)];
    if micro_batches < stages {
        let less = 100.0 * bubble(stages, 4 * stages);
        let keep = match micro_batches {
            1 => "micro-batch keeps",
            _ => "micro-batches keep",
        };
        lines.push(Event::Warning {
            text: text!(
                "{micro_batches} {keep} {stages} pipeline stages waiting {waits:.0} % of a step: --gradient-accumulation-steps {} waits {less:.0} %",
                "{micro_batches} 个微批使 {stages} 个流水线段有 {waits:.0} % 的时间在等待：--gradient-accumulation-steps {} 时为 {less:.0} %",
                4 * stages
            ),
        });
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_micro_batches_are_named_with_a_number_that_waits_less() {
        let event = |micro_batches| StagesEvent {
            units: vec![3; 4],
            operations_percent: vec![25.0; 4],
            bytes_percent: vec![25.0; 4],
            boundary_bytes: vec![1; 3],
            data_ranks: 1,
            micro_batches,
            waiting_percent: 100.0 * bubble(4, micro_batches),
        };
        for (micro_batches, words) in [
            (1, "1 micro-batch keeps 4 pipeline stages waiting 75 %"),
            (2, "2 micro-batches keep 4 pipeline stages waiting 60 %"),
        ] {
            let [_, Event::Warning { text }] = &lines(Some(event(micro_batches)))[..] else {
                panic!("a warning");
            };
            assert!(text.starts_with(words), "{text}");
            assert!(
                text.contains("--gradient-accumulation-steps 16 waits 16 %"),
                "{text}"
            );
        }
        assert_eq!(lines(Some(event(4))).len(), 1);
    }

    #[test]
    fn more_micro_batches_wait_less() {
        assert_eq!(bubble(1, 1), 0.0);
        assert_eq!(bubble(2, 1), 0.5);
        assert_eq!(bubble(4, 12), 0.2);
    }
}
