//! Optimizer step on a device that stores master weights and optimizer state in its own memory.
//!
//! Only the scalars of the update are copied to the device; gradients are read where they were summed. Weights stored
//! elsewhere are updated in scratch memory and copied from the device, chunk by chunk.

use super::state::UnitState;
use super::update::{Chunk, Rule, bytes};
use crate::error::EngineError;
use crate::offload::tier::{Region, access, upload};
use crate::plan::{GroupKind, Plan};
use kernels::{AdamWArgs, Backend, DType, Form, Part, Resident, Scalars, Shape, Tag, Tensor};
use std::sync::Arc;

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Gradients of one chunk of an update, on the device or in host memory.
pub(crate) enum Gradients<'a> {
    /// On the device: the elements of the chunk.
    There(Tensor),
    /// In host memory: the bytes of the chunk's elements; empty in a dry run.
    Here(&'a [u8]),
}

/// Constants of an update in device memory: one entry for each pair of learning-rate factor and weight decay.
#[derive(Debug)]
pub(crate) struct DeviceStep {
    backend: Arc<dyn Backend>,
    table: Resident,
    /// Index of a parameter's entry, by parameter.
    entries: Vec<usize>,
    form: Option<Form>,
}

impl DeviceStep {
    /// Allocates memory for the constants of every parameter of a plan.
    pub(crate) fn new(plan: &Plan, backend: Arc<dyn Backend>) -> Result<Self> {
        let most = plan.spec().params.len();
        let words = most * size_of::<Scalars>() / size_of::<f32>();
        let table = access(&backend)?.zeros(words, DType::F32, Tag::Optimizer)?;
        Ok(Self {
            backend,
            table,
            entries: vec![0; most],
            form: None,
        })
    }

    /// Copies the scalars of the next update to the device. Returns false if the device cannot run the update rule; the
    /// host then updates.
    pub(crate) fn begin(&mut self, rule: &Rule<'_>) -> Result<bool> {
        let (config, optimizer) = (rule.plan.config(), rule.optimizer);
        let Some((adamw, form)) = optimizer.rule.on_device(config.precision) else {
            self.form = None;
            return Ok(false);
        };
        let mut distinct: Vec<Scalars> = Vec::new();
        for (entry, options) in self.entries.iter_mut().zip(&optimizer.groups) {
            let constants = adamw.scalars(
                rule.scalars.step,
                (rule.scalars.lr * f64::from(options.lr_scale)) as f32,
                options.weight_decay,
                rule.scalars.grad_scale,
                config.seed,
            )?;
            let known = distinct.iter().position(|other| *other == constants);
            *entry = known.unwrap_or(distinct.len());
            if known.is_none() {
                distinct.push(constants);
            }
        }
        let bytes = bytemuck::cast_slice(&distinct);
        access(&self.backend)?.write(&mut self.table, 0, bytes)?;
        self.form = Some(form);
        Ok(true)
    }

    /// Updates a chunk. `weights` begin at the element `weights_start` of the parameter group.
    pub(crate) fn step(
        &self,
        plan: &Plan,
        chunk: &Chunk,
        gradients: Gradients<'_>,
        (weights, weights_start): (&mut Region, usize),
        state: &mut UnitState,
    ) -> Result<()> {
        let Some(form) = self.form else {
            return Err(EngineError::NotResident);
        };
        let Chunk { unit, range } = chunk;
        let (device, config) = (access(&self.backend)?, plan.config());
        let gradients = match gradients {
            Gradients::There(values) => values,
            Gradients::Here(values) => {
                let shape = Shape::new(&[range.len()]);
                upload(&*self.backend, values, shape, config.grad_dtype())?
            }
        };
        let weight_dtype = plan.dtype_of(GroupKind::Trainable);
        let place = bytes(range, weights_start, weight_dtype);
        let mut scratch = match weights.resident() {
            Some(_) => None,
            None => {
                let tag = Tag::Workspace;
                let mut scratch = device.zeros(range.len(), weight_dtype, tag)?;
                if form.copy().is_none() {
                    let mut values = vec![0; place.len()];
                    weights.read(place.start, &mut values)?;
                    device.write(&mut scratch, 0, &values)?;
                }
                Some(scratch)
            }
        };
        for (slot, part) in plan.unit(*unit).trainable.parts(range.clone()) {
            let grad = gradients.narrow(part.start - range.start, part.len())?;
            let model = match (&mut scratch, weights.resident_mut()) {
                (Some(of), _) => Part {
                    of,
                    start: part.start - range.start,
                },
                (None, Some(of)) => Part {
                    of,
                    start: part.start - weights_start,
                },
                (None, None) => return Err(EngineError::NotResident),
            };
            // States that cover the parameter: the master weights, if any, and the moments, each with its absmax, if any.
            let mut kept = state.kinds_mut().iter_mut().filter_map(|kind| {
                let start = kind.of(&part)?.start;
                let of = kind.region.resident_mut();
                Some(of.map(|of| Part { of, start }))
            });
            let mut next = || kept.next().flatten().ok_or(EngineError::NotResident);
            let (weight, copy) = match form.copy() {
                Some(_) => (next()?, Some(model)),
                None => (model, None),
            };
            let exp_avg = next()?;
            let form = match exp_avg.of.dtype() {
                DType::U8 => form,
                _ => form.elementwise(),
            };
            let (exp_avg_sq, absmax) = match form.moment_dtype() {
                DType::U8 => {
                    let of_first = next()?;
                    (next()?, Some([of_first, next()?]))
                }
                _ => (next()?, None),
            };
            device.adamw(AdamWArgs {
                form,
                grad: &grad,
                weight,
                copy,
                exp_avg,
                exp_avg_sq,
                absmax,
                scalars: (&self.table, self.entries[slot.param.index()]),
                first_element: plan.first_element(slot.param) + (part.start - slot.offset) as u64,
            })?;
        }
        if let Some(scratch) = scratch
            && weights.has_values()
        {
            let mut values = vec![0; place.len()];
            device.read(&scratch, 0, &mut values)?;
            weights.write(place.start, &values)?;
        }
        Ok(())
    }
}
