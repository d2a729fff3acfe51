//! Accumulated gradients of one unit on one rank: f32, or bf16 with stochastic rounding.

use crate::error::EngineError;
use crate::offload::parallel;
use crate::offload::tier::{Access, COPY_ELEMS, Region, access, region_chunks, upload};
use crate::plan::{GroupLayout, Plan, Row, Tier};
use half::bf16;
use kernels::{DType, Float, Part, Shape, Tensor};
use optim::accumulate::{RoundingPosition, add_rounded};
use optim::clip::{NORM_BLOCK_ELEMS, SquareSum};
use optim::rng::RandomStream;
use std::ops::Range;

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Key of the stochastic rounding of one accumulation: (update, micro-batch).
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoundingKey {
    pub(crate) step: u64,
    pub(crate) micro_batch: u32,
}

/// Sum of a unit's gradients over micro-batches.
#[derive(Debug)]
pub(crate) struct Accumulator {
    region: Region,
    dtype: DType,
    /// Range of elements in the parameter group that this rank sums.
    range: Range<usize>,
    filled: bool,
    /// Sum of squares of the whole sum, if the last addition computed it because reading a disk again costs more.
    squares: Option<f64>,
}

impl Accumulator {
    /// Creates an empty sum in the memory of an inventory row.
    pub(crate) fn new(row: &Row, region: Region) -> Self {
        Self {
            region,
            dtype: row.dtype,
            range: row.range.clone(),
            filled: false,
            squares: None,
        }
    }

    /// Marks the sum as having no contributions. Its memory keeps the old values.
    pub(crate) fn clear(&mut self) {
        self.filled = false;
        self.squares = None;
    }

    /// Writes zeros if the sum has no contributions.
    pub(crate) fn write_zeros(&mut self) -> Result<()> {
        self.complete(std::iter::once(self.range.clone()))
    }

    /// Ends a micro-batch without gradients for the ranges `missing`. The first micro-batch writes zeros to them.
    pub(crate) fn complete(&mut self, missing: impl Iterator<Item = Range<usize>>) -> Result<()> {
        if self.filled {
            return Ok(());
        }
        self.filled = true;
        let first = self.range.start;
        if let Region::Resident { states, backend } = &mut self.region {
            let device = access(backend)?;
            for range in missing {
                device.clear(states, range.start - first..range.end - first)?;
            }
            return Ok(());
        }
        // In units of two bytes: every gradient dtype is a multiple of them.
        let halves = self.dtype.size_bytes() / 2;
        for range in missing {
            let range = range.start * halves..range.end * halves;
            let zero = |_: Range<usize>, out: &mut [u16]| {
                out.fill(0);
                Ok(())
            };
            self.region
                .for_each_chunk(first * halves, range, Access::Write, zero)?;
        }
        Ok(())
    }

    /// Adds a micro-batch's gradients of all elements this rank sums; `values` is empty in a dry run.
    pub(crate) fn add(
        &mut self,
        group: &GroupLayout,
        plan: &Plan,
        at: RoundingKey,
        values: &[f32],
    ) -> Result<()> {
        self.add_part(group, plan, at, self.range.clone(), values)?;
        self.filled = true;
        Ok(())
    }

    /// Adds a micro-batch's gradients of one `range` of the parameter group. Each range comes once before
    /// [`Accumulator::complete`].
    pub(crate) fn add_part(
        &mut self,
        group: &GroupLayout,
        plan: &Plan,
        at: RoundingKey,
        range: Range<usize>,
        values: &[f32],
    ) -> Result<()> {
        let (start, first) = (self.range.start, range.start);
        let own = |part: &Range<usize>| part.start - first..part.end - first;
        let filled = self.filled;
        if let Region::Resident { backend, .. } = &self.region {
            let backend = backend.clone();
            for part in region_chunks(range, COPY_ELEMS) {
                let values = match values {
                    [] => values,
                    _ => &values[own(&part)],
                };
                let (bytes, shape) = (bytemuck::cast_slice(values), Shape::new(&[part.len()]));
                let there = upload(&*backend, bytes, shape, DType::F32)?;
                self.add_on_device(group, plan, at, part, &there)?;
            }
            return Ok(());
        }
        let access = if filled {
            Access::Update
        } else {
            Access::Write
        };
        // Reading the disk again for the norm would cost more than this sum.
        let whole = range == self.range;
        let mut squares = (whole && self.region.tier() == Tier::Nvme).then(Squares::default);
        if self.dtype == DType::BF16 {
            let rounding = Rounding::new(plan, at);
            let mut wide = Vec::new();
            self.region
                .for_each_chunk::<bf16>(start, range, access, |part, sums| {
                    if !filled {
                        sums.fill(bf16::ZERO);
                    }
                    let values = &values[own(&part)];
                    rounding.add(group, plan, part, sums, values);
                    if let Some(squares) = &mut squares {
                        squares.push(widen(sums, &mut wide));
                    }
                    Ok(())
                })?;
        } else {
            self.region
                .for_each_chunk::<f32>(start, range, access, |part, sums| {
                    let values = &values[own(&part)];
                    if filled {
                        parallel::add(values, sums);
                    } else {
                        parallel::copy(values, sums);
                    }
                    if let Some(squares) = &mut squares {
                        squares.push(sums);
                    }
                    Ok(())
                })?;
        }
        self.squares = squares.map(Squares::total);
        Ok(())
    }

    /// Adds as [`Accumulator::add_part`], for sums stored on the device that has the values.
    pub(crate) fn add_on_device(
        &mut self,
        group: &GroupLayout,
        plan: &Plan,
        at: RoundingKey,
        range: Range<usize>,
        values: &Tensor,
    ) -> Result<()> {
        let Region::Resident { states, backend } = &mut self.region else {
            return Err(EngineError::NotResident);
        };
        let (device, fresh) = (access(backend)?, !self.filled);
        let values = values.reshape([values.elems()])?;
        let (start, first) = (self.range.start, range.start);
        if self.dtype != DType::BF16 {
            let start = range.start - start;
            return Ok(device.add(Part { of: states, start }, &values, None, fresh)?);
        }
        let rounding = Rounding::new(plan, at);
        for (slot, part) in group.parts(range) {
            let place = rounding.place(plan.first_element(slot.param), part.start - slot.offset);
            let values = values.narrow(part.start - first, part.len())?;
            let start = part.start - start;
            let sums = Part { of: states, start };
            device.add(sums, &values, Some(place.on_device()), fresh)?;
        }
        Ok(())
    }

    /// Adds a micro-batch's gradients of all elements this rank sums, from consecutive tensors on the device that
    /// stores the sums.
    pub(crate) fn add_all_on_device(
        &mut self,
        group: &GroupLayout,
        plan: &Plan,
        at: RoundingKey,
        parts: &[Tensor],
    ) -> Result<()> {
        let mut start = self.range.start;
        for values in parts {
            let range = start..start + values.elems();
            start = range.end;
            self.add_on_device(group, plan, at, range, values)?;
        }
        self.filled = true;
        Ok(())
    }

    /// View of the elements `range` of the parameter group; `None` unless a discrete device stores the sum.
    pub(crate) fn on_device(&self, range: Range<usize>) -> Result<Option<Tensor>> {
        let start = self.range.start;
        let states = self.region.resident();
        let part = states.map(|states| states.part(range.start - start..range.end - start));
        Ok(part.transpose()?)
    }

    /// Reads the elements `range` of the parameter group as f32.
    pub(crate) fn read_f32(&mut self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let (start, first) = (self.range.start, range.start);
        let own = |part: &Range<usize>| part.start - first..part.end - first;
        if self.dtype == DType::F32 {
            return self
                .region
                .for_each_chunk::<f32>(start, range, Access::Read, |part, sums| {
                    out[own(&part)].copy_from_slice(sums);
                    Ok(())
                });
        }
        self.region
            .for_each_chunk::<bf16>(start, range, Access::Read, |part, sums| {
                for (o, sum) in out[own(&part)].iter_mut().zip(sums) {
                    *o = Float::to_f32(*sum);
                }
                Ok(())
            })
    }

    /// Memory that stores the summed gradients.
    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// Memory of the sum, for writes; drops the known sum of squares.
    pub(crate) fn region_mut(&mut self) -> &mut Region {
        self.squares = None;
        &mut self.region
    }

    /// Memory of the sum, for chunks that only read.
    pub(crate) fn region_read(&mut self) -> &mut Region {
        &mut self.region
    }

    /// Range of elements in the parameter group that this rank sums.
    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Tier that stores the summed gradients.
    pub(crate) fn tier(&self) -> Tier {
        self.region.tier()
    }

    /// Sum of squares of the elements `range` of the parameter group.
    pub(crate) fn sum_of_squares(&mut self, range: Range<usize>) -> Result<f64> {
        if let Some(known) = self.squares
            && range == self.range
        {
            return Ok(known);
        }
        let start = self.range.start;
        let mut squares = Squares::default();
        if self.dtype == DType::F32 {
            self.region
                .for_each_chunk::<f32>(start, range, Access::Read, |_, sums| {
                    squares.push(sums);
                    Ok(())
                })?;
        } else {
            let mut wide = Vec::new();
            self.region
                .for_each_chunk::<bf16>(start, range, Access::Read, |_, sums| {
                    for block in sums.chunks(NORM_BLOCK_ELEMS) {
                        squares.push(widen(block, &mut wide));
                    }
                    Ok(())
                })?;
        }
        Ok(squares.total())
    }
}

/// Gradients that an update consumes without a stored sum. They are rounded as their sum would be, and their squares
/// are added up.
pub(crate) struct Consumed<'a> {
    group: &'a GroupLayout,
    plan: &'a Plan,
    rounding: Option<Rounding>,
    squares: Squares,
    sums: Vec<bf16>,
    wide: Vec<f32>,
}

impl<'a> Consumed<'a> {
    pub(crate) fn new(group: &'a GroupLayout, plan: &'a Plan, at: RoundingKey) -> Self {
        let rounds = plan.config().grad_dtype() == DType::BF16;
        Self {
            group,
            plan,
            rounding: rounds.then(|| Rounding::new(plan, at)),
            squares: Squares::default(),
            sums: Vec::new(),
            wide: Vec::new(),
        }
    }

    /// Bytes of the elements `range` of the parameter group in the sum's dtype. Calls come in ascending order.
    pub(crate) fn take<'v>(&'v mut self, range: Range<usize>, values: &'v [f32]) -> &'v [u8] {
        let Some(rounding) = &self.rounding else {
            self.squares.push(values);
            return bytemuck::cast_slice(values);
        };
        self.sums.clear();
        self.sums.resize(values.len(), bf16::ZERO);
        rounding.add(self.group, self.plan, range, &mut self.sums, values);
        self.squares.push(widen(&self.sums, &mut self.wide));
        bytemuck::cast_slice(&self.sums)
    }

    /// Sum of squares of all gradients taken.
    pub(crate) fn squares(self) -> f64 {
        self.squares.total()
    }
}

/// Random stream of stochastic rounding in one accumulation. Its key is (seed, update, micro-batch, index of the
/// element in the model), so rounding does not depend on world size or layout.
struct Rounding {
    stream: RandomStream,
    time: u64,
}

impl Rounding {
    fn new(plan: &Plan, at: RoundingKey) -> Self {
        Self {
            stream: RandomStream::new(plan.config().seed, "gradient-accumulation"),
            time: (at.step << 20) | u64::from(at.micro_batch),
        }
    }

    /// Position in the random stream of a parameter's element `element`; `first_element` is the parameter's first
    /// element in the model.
    fn place(&self, first_element: u64, element: usize) -> RoundingPosition {
        RoundingPosition {
            stream: self.stream,
            time: self.time,
            first_element: first_element + element as u64,
        }
    }

    /// Adds `values` to `sums`, which are the elements `range` of a parameter group.
    fn add(
        &self,
        group: &GroupLayout,
        plan: &Plan,
        range: Range<usize>,
        sums: &mut [bf16],
        values: &[f32],
    ) {
        let start = range.start;
        for (slot, part) in group.parts(range) {
            let place = self.place(plan.first_element(slot.param), part.start - slot.offset);
            let own = part.start - start..part.end - start;
            add_rounded(place, &mut sums[own.clone()], &values[own]);
        }
    }
}

/// A [`SquareSum`] that accepts slices of any length.
#[derive(Default)]
struct Squares {
    sum: SquareSum,
    rest: Vec<f32>,
}

impl Squares {
    fn push(&mut self, mut values: &[f32]) {
        if !self.rest.is_empty() {
            let take = (NORM_BLOCK_ELEMS - self.rest.len()).min(values.len());
            self.rest.extend_from_slice(&values[..take]);
            values = &values[take..];
            if self.rest.len() < NORM_BLOCK_ELEMS {
                return;
            }
            self.sum.add_block(&self.rest);
            self.rest.clear();
        }
        let blocks = values.chunks_exact(NORM_BLOCK_ELEMS);
        self.rest.extend_from_slice(blocks.remainder());
        let whole = values.len() - blocks.remainder().len();
        self.sum.add_blocks(&values[..whole]);
    }

    fn total(mut self) -> f64 {
        if !self.rest.is_empty() {
            self.sum.add_block(&self.rest);
        }
        self.sum.total()
    }
}

fn widen<'a>(values: &[bf16], wide: &'a mut Vec<f32>) -> &'a [f32] {
    wide.clear();
    wide.extend(values.iter().map(|v| Float::to_f32(*v)));
    wide
}

#[cfg(test)]
mod tests {
    use super::*;
    use optim::clip::sum_of_squares;

    #[test]
    fn sums_of_squares_do_not_depend_on_the_split() {
        let values: Vec<f32> = (0..20_000).map(|i| (i as f32 * 0.3).sin()).collect();
        for pieces in [1, 7, 4_095, 4_096, 4_097, 9_000, 30_000] {
            let mut squares = Squares::default();
            values.chunks(pieces).for_each(|piece| squares.push(piece));
            let expected = sum_of_squares(&values);
            assert_eq!(squares.total().to_bits(), expected.to_bits(), "{pieces}");
        }
    }
}
