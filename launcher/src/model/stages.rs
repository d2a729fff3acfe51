//! Division of a model's units among pipeline stages, balanced by a dry run.
//!
//! The largest possible sample runs forward without values. A unit's time is estimated by the multiplications of its linear
//! layers, forward and backward. Its bytes are those of its stored states. No stage should have much more than its share of
//! either.

use super::optimizer::rule;
use crate::config::RunConfig;
use crate::error::failures::unusable;
use crate::error::{Failure, failures};
use crate::lang::{Text, both, text};
use engine::plan::{GroupKind, UnitPlan};
use engine::{
    DeviceTransport, DryRun, EngineError, ParamAccess, ParamId, PassKind, Plan, ZeroConfig,
};
use kernels::Tensor;
use models::autograd::Tape;
use models::{ModelError, SampleInput, VisionLanguageModel, largest_sample};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of f32 gradients and optimizer states of a trainable element, for shares only.
const BYTES_PER_TRAINED: u64 = 16;

/// Estimated cost of a unit in one training step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Cost {
    /// Multiplications and additions of linear layers, forward and backward, of one sample.
    pub(crate) operations: f64,
    /// Bytes of stored states.
    pub(crate) bytes: f64,
}

/// Number of units of each pipeline stage: the requested ones, or a balanced division.
///
/// # Errors
/// The request does not divide the model's units, or the model has fewer units than stages (exit 2).
pub(crate) fn counts(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
    zero: &ZeroConfig,
) -> Result<Vec<u32>, Failure> {
    let units = model.spec().units.len();
    if let Some(split) = &config.mp_split {
        let all: u32 = split.iter().sum();
        if all as usize == units {
            return Ok(split.clone());
        }
        return Err(Failure::usage(
            text!(
                "--mp-split divides {all} units, and the model has {units}",
                "--mp-split 划分了 {all} 个单元，而模型有 {units} 个"
            ),
            both(
                "every unit belongs to one stage: layers, embeddings and the head are units",
                "每个单元属于一个段：各层、嵌入和输出头都是单元",
            ),
        )
        .next(both(
            "omit --mp-split, and planning balances the stages",
            "请去掉 --mp-split，由规划平衡各段",
        )));
    }
    if units < config.mp_size {
        return Err(Failure::usage(
            text!(
                "--mp-size {}: the model has {units} units",
                "--mp-size {}：模型只有 {units} 个单元",
                config.mp_size
            ),
            both(
                "each pipeline stage needs at least one unit",
                "每个流水线段至少需要一个单元",
            ),
        )
        .next(Text::literal(format_args!("--mp-size {units}"))));
    }
    Ok(balanced(&costs(config, model, zero)?, config.mp_size))
}

/// Costs of all units.
///
/// # Errors
/// The model's configuration cannot be used.
pub(crate) fn costs(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
    zero: &ZeroConfig,
) -> Result<Vec<Cost>, Failure> {
    let (dir, batch) = (config.model_dir(), &config.batch);
    let (tokens, slices) = (batch.model_max_length, batch.max_slice_nums);
    let sample = largest_sample(&dir, tokens, slices, batch.image_max_pixels);
    let sample = sample.map_err(|error| unusable(&dir, &error))?;
    let spec = model.spec();
    let operations = RefCell::new(vec![0.0; spec.units.len()]);
    let count = || -> Result<Arc<Plan>, ModelError> {
        let zero = ZeroConfig {
            slice: None,
            optimizer_in_backward: None,
            // The meta device of the CPU shares no memory with other ranks.
            device_transport: DeviceTransport::Host,
            ..zero.clone()
        };
        let plan = Plan::new(spec.clone(), zero, config.data_ranks());
        let plan = Arc::new(plan.map_err(EngineError::from)?);
        let dry_run = DryRun::new(plan.clone(), Arc::new(rule(config)))?;
        let observer = |name: &'static str, params: &[ParamId], result: &Tensor| {
            for id in params {
                let param = &spec.params[id.index()];
                let products = products(name, param.shape.elems(), result);
                operations.borrow_mut()[param.unit.index()] += products;
            }
        };
        dry_run.begin_pass(PassKind::Infer);
        let input = [SampleInput::from(&sample)];
        let batch = model.collate(&input, &**dry_run.backend())?;
        let tape = Tape::inference(&*dry_run).with_op_observer(&observer);
        model.forward(&tape, &batch)?;
        drop(tape);
        dry_run.end_pass()?;
        Ok(plan)
    };
    let plan = count().map_err(|e| failures::model(both("plan stages", "规划各段"), &e))?;
    let operations = operations.into_inner();
    let cost = |unit: &UnitPlan| {
        let backward = if unit.needs_backward { 2.0 } else { 0.0 };
        let weights = GroupKind::ALL.iter().map(|kind| {
            let elems = unit.group(*kind).padded_elems;
            (elems * plan.dtype_of(*kind).size_bytes()) as u64
        });
        let trained = unit.trainable.padded_elems as u64 * BYTES_PER_TRAINED;
        Cost {
            operations: operations[unit.id.index()] * (1.0 + backward),
            bytes: (weights.sum::<u64>() + trained) as f64,
        }
    };
    Ok(plan.units().iter().map(cost).collect())
}

/// Multiplications and additions of an operation with one of its weights of `elems` elements.
fn products(name: &str, elems: usize, result: &Tensor) -> f64 {
    let rows = match name {
        "linear_cross_entropy" => result.elems() as f64,
        "linear" | "matmul" => result.shape().rows() as f64,
        // Each row has one of two experts.
        "grouped_linear" => result.shape().rows() as f64 / 2.0,
        _ => 0.0,
    };
    2.0 * rows * elems as f64
}

/// Consecutive units for `stages` stages, such that the largest share of a stage, in operations or in bytes, is smallest.
pub(crate) fn balanced(costs: &[Cost], stages: usize) -> Vec<u32> {
    let total = |of: fn(&Cost) -> f64| costs.iter().map(of).sum::<f64>().max(1.0);
    let (operations, bytes) = (total(|c| c.operations), total(|c| c.bytes));
    let share = |range: Range<usize>| {
        let part = |of: fn(&Cost) -> f64| costs[range.clone()].iter().map(of).sum::<f64>();
        (part(|c| c.operations) / operations).max(part(|c| c.bytes) / bytes)
    };
    let units = costs.len();
    // By number of stages so far and first unit after them: the largest share, and where the last stage starts.
    let mut best = vec![vec![(f64::INFINITY, 0); units + 1]; stages + 1];
    best[0][0] = (0.0, 0);
    for stage in 1..=stages {
        for end in stage..=units {
            for start in stage - 1..end {
                let largest = best[stage - 1][start].0.max(share(start..end));
                if largest < best[stage][end].0 {
                    best[stage][end] = (largest, start);
                }
            }
        }
    }
    let mut end = units;
    let mut counts = vec![0; stages];
    for stage in (1..=stages).rev() {
        let start = best[stage][end].1;
        counts[stage - 1] = (end - start) as u32;
        end = start;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost((operations, bytes): (f64, f64)) -> Cost {
        Cost { operations, bytes }
    }

    #[test]
    fn stages_have_similar_shares_of_operations_and_bytes() {
        let even = vec![cost((1.0, 1.0)); 7];
        assert_eq!(balanced(&even, 1), [7]);
        assert_eq!(balanced(&even, 7), [1; 7]);
        let counts = balanced(&even, 3);
        let most = counts.iter().max();
        assert_eq!((counts.iter().sum::<u32>(), most), (7, Some(&3)));
        // The first half has the bytes, the second the operations.
        let (bytes, operations) = ((1.0, 5.0), (5.0, 1.0));
        let uneven = [bytes, bytes, bytes, operations, operations, operations].map(cost);
        assert_eq!(balanced(&uneven, 2), [3, 3]);
        let heavy_last = [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (9.0, 9.0)].map(cost);
        assert_eq!(balanced(&heavy_last, 2), [3, 1]);
    }
}
