//! Accumulated gradients of one unit on one rank: f32, or bf16 with stochastic rounding.

use crate::error::EngineError;
use crate::plan::{GroupLayout, Plan, Tier, UnitPlan};
use crate::tier::{Region, Tiers};
use half::bf16;
use kernels::{DType, Float, Tag};
use optim::accumulate::{RoundingPlace, add_rounded};
use optim::clip::{NORM_BLOCK_ELEMS, SquareSum};
use optim::rng::RandomStream;
use std::ops::Range;

/// Key of the rounding of one accumulation: update, micro-batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) step: u64,
    pub(crate) micro_batch: u32,
}

/// The sum of a unit's gradients over micro-batches.
#[derive(Debug)]
pub(crate) struct Accumulator {
    region: Region,
    dtype: DType,
    /// First element of the group that is kept.
    start: usize,
    filled: bool,
}

impl Accumulator {
    pub(crate) fn new(
        unit: &UnitPlan,
        plan: &Plan,
        rank: usize,
        tiers: &Tiers,
    ) -> Result<Option<Self>, EngineError> {
        let group = &unit.trainable;
        if group.is_empty() {
            return Ok(None);
        }
        let config = plan.config();
        let range = if config.shards_gradients() {
            group.shard(rank)
        } else {
            0..group.padded_elems
        };
        let dtype = config.grad_dtype();
        let bytes = range.len() * dtype.size_bytes();
        let region = tiers.allocate(config.offload.optimizer, bytes, Tag::Gradients)?;
        Ok(Some(Self {
            region,
            dtype,
            start: range.start,
            filled: false,
        }))
    }

    /// Forgets the sum.
    pub(crate) fn clear(&mut self) {
        self.filled = false;
    }

    /// Makes a sum without contributions zero.
    pub(crate) fn settle(&mut self) {
        if !self.filled {
            self.region.as_mut_slice::<u8>().fill(0);
            self.filled = true;
        }
    }

    /// Adds a micro-batch's gradients of everything kept here.
    pub(crate) fn add(&mut self, group: &GroupLayout, plan: &Plan, at: Moment, values: &[f32]) {
        match self.dtype {
            DType::BF16 => self.add_rounded(group, plan, at, values),
            _ if self.filled => {
                for (sum, v) in self.region.as_mut_slice::<f32>().iter_mut().zip(values) {
                    *sum += v;
                }
            }
            _ => self.region.as_mut_slice::<f32>().copy_from_slice(values),
        }
        self.filled = true;
    }

    /// Rounded by (seed, update, micro-batch, logical element), so that the sum does not depend on
    /// world size or layout beyond the values themselves.
    fn add_rounded(&mut self, group: &GroupLayout, plan: &Plan, at: Moment, values: &[f32]) {
        let stream = RandomStream::new(plan.config().seed, "gradient-accumulation");
        let time = (at.step << 20) | u64::from(at.micro_batch);
        let (start, filled) = (self.start, self.filled);
        let sums = self.region.as_mut_slice::<bf16>();
        if !filled {
            sums.fill(bf16::ZERO);
        }
        for (slot, part) in group.parts(start..start + sums.len()) {
            let first_element = plan.first_element(slot.param) + (part.start - slot.offset) as u64;
            let own = part.start - start..part.end - start;
            let place = RoundingPlace {
                stream,
                time,
                first_element,
            };
            add_rounded(place, &mut sums[own.clone()], &values[own]);
        }
    }

    /// The elements as f32; `range` counts in the group.
    pub(crate) fn read<'a>(&'a self, range: Range<usize>, scratch: &'a mut Vec<f32>) -> &'a [f32] {
        let own = range.start - self.start..range.end - self.start;
        if self.dtype == DType::F32 {
            return &self.region.as_slice::<f32>()[own];
        }
        scratch.clear();
        scratch.extend(
            self.region.as_slice::<bf16>()[own]
                .iter()
                .map(|v| Float::to_f32(*v)),
        );
        scratch
    }

    /// The f32 sums, writable.
    pub(crate) fn as_mut_f32(&mut self) -> &mut [f32] {
        self.region.as_mut_slice()
    }

    /// Where the sum is kept.
    pub(crate) fn tier(&self) -> Tier {
        self.region.tier()
    }

    /// Everything kept, as bytes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.region.as_ref()
    }

    /// Sum of squares of `range` of the group.
    pub(crate) fn sum_of_squares(&self, range: Range<usize>) -> f64 {
        let mut scratch = Vec::new();
        let mut sum = SquareSum::default();
        for block in crate::zero::split(range, NORM_BLOCK_ELEMS) {
            sum.add_block(self.read(block, &mut scratch));
        }
        sum.total()
    }
}
