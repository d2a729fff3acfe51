//! Layout: the offset of every parameter in its unit, and the division of units among ranks.
//!
//! A unit has three parameter groups, trainable, frozen and quantized, each one flat buffer. A buffer is padded to divide
//! into equal shards. Every parameter and every shard starts at a 128-byte boundary in f32, and in bytes if it is quantized.
//! Where optimizer states are stored in blocks, trainable parameters and shards start at block borders, and parameters
//! without blocks come first.

use crate::spec::{ModelSpec, ParamId, ParamSpec, UnitId};
use optim::adamw::{BLOCK_ELEMS, has_blocks};
use std::ops::Range;

/// Alignment of parameters and shards in a flat buffer, in elements: each starts at a multiple of it.
pub const ALIGN_ELEMS: usize = 32;
/// Alignment of the first parameter with states in blocks, in elements: its states of one byte then begin at a block of
/// the disk.
const FIRST_BLOCK_ALIGN: usize = 4096;

/// As [`ALIGN_ELEMS`], of quantized parameters, whose elements are bytes.
pub const QUANTIZED_ALIGN_BYTES: usize = 128;

/// Kind of a parameter group: the trainable, the frozen or the quantized parameters of a unit, in one flat buffer.
/// Each unit has one group of each kind, which may be empty.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GroupKind {
    /// Parameters that the optimizer updates.
    Trainable,
    /// Parameters that are never updated.
    Frozen,
    /// Frozen parameters stored in fewer bits. Elements of the group's buffer are bytes.
    Quantized,
}

impl GroupKind {
    /// All kinds of parameter groups, trainable first.
    pub const ALL: [Self; 3] = [Self::Trainable, Self::Frozen, Self::Quantized];

    /// Kind of the group that stores the parameter.
    #[must_use]
    pub fn of(param: &ParamSpec) -> Self {
        match (param.trainable, param.stored_quantization()) {
            (true, _) => Self::Trainable,
            (false, None) => Self::Frozen,
            (false, Some(_)) => Self::Quantized,
        }
    }

    /// Alignment of parameters and shards in the group's flat buffer, in elements.
    pub(crate) const fn align_elems(self) -> usize {
        match self {
            Self::Trainable | Self::Frozen => ALIGN_ELEMS,
            Self::Quantized => QUANTIZED_ALIGN_BYTES,
        }
    }
}

/// Location of one parameter in the flat buffer of its parameter group (a unit's trainable or frozen
/// parameters).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Slot {
    /// Id of the parameter whose location this is.
    pub param: ParamId,
    /// Offset of the parameter's first element in the flat buffer of its group, in elements.
    pub offset: usize,
    /// Number of elements of the parameter, without padding.
    pub len: usize,
}

impl Slot {
    /// Range of the parameter's elements in the flat buffer of its group, without padding.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// Layout of one parameter group: a unit's trainable or frozen parameters, concatenated with padding in one
/// flat buffer, which is divided into equal shards.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GroupLayout {
    /// Locations of the group's parameters in the flat buffer, ascending by offset.
    pub slots: Vec<Slot>,
    /// Number of elements of one shard, padding included.
    pub shard_elems: usize,
    /// Number of elements of the whole flat buffer, padding included: all shards together.
    pub padded_elems: usize,
    /// Number of elements, padding included, before the first parameter whose optimizer states are stored in blocks;
    /// `padded_elems` without such a parameter.
    pub elementwise_elems: usize,
}

impl GroupLayout {
    pub(crate) fn new(
        params: impl Iterator<Item = (ParamId, usize)>,
        world_size: usize,
        align_elems: usize,
    ) -> Self {
        let mut end = 0;
        let slots = params
            .map(|(param, len)| {
                let offset = end;
                end += len.next_multiple_of(align_elems);
                Slot { param, offset, len }
            })
            .collect();
        let shard_elems = end.div_ceil(world_size).next_multiple_of(align_elems);
        let shard_elems = if end == 0 { 0 } else { shard_elems };
        Self {
            slots,
            shard_elems,
            padded_elems: shard_elems * world_size,
            elementwise_elems: shard_elems * world_size,
        }
    }

    /// Layout of trainable parameters whose optimizer states are stored in blocks, except those for which the last
    /// value of `params` is false. They come first, so rank 0 stores the most bytes.
    pub(crate) fn in_blocks(
        params: impl Iterator<Item = (ParamId, usize, bool)>,
        world_size: usize,
    ) -> Self {
        let (blocks, elementwise): (Vec<_>, Vec<_>) = params.partition(|param| param.2);
        let mut end: usize = 0;
        let mut slots = Vec::with_capacity(blocks.len() + elementwise.len());
        let mut place = |params: &[(ParamId, usize, bool)], mut end: usize| {
            for &(param, len, _) in params {
                let offset = end;
                end += len.next_multiple_of(BLOCK_ELEMS);
                slots.push(Slot { param, offset, len });
            }
            end
        };
        end = place(&elementwise, end);
        let border = end.next_multiple_of(FIRST_BLOCK_ALIGN);
        if !blocks.is_empty() {
            end = place(&blocks, border);
        }
        let shard_elems = end.div_ceil(world_size).next_multiple_of(BLOCK_ELEMS);
        let padded_elems = shard_elems * world_size;
        Self {
            slots,
            shard_elems,
            padded_elems,
            elementwise_elems: if blocks.is_empty() {
                padded_elems
            } else {
                border
            },
        }
    }

    /// Whether the parameter group contains no parameter.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Range of elements of one shard in the whole flat buffer, padding included. `rank` is the index of the
    /// shard ([`Plan::shard_of`](super::Plan::shard_of)), in hybrid sharding the rank's index in its shard
    /// group.
    #[must_use]
    pub fn shard(&self, rank: usize) -> Range<usize> {
        rank * self.shard_elems..(rank + 1) * self.shard_elems
    }

    /// Parts of parameters inside `range` of the flat buffer, in order. Each is the parameter's slot and the
    /// range of those of its elements that are inside, also in the flat buffer.
    pub fn parts(&self, range: Range<usize>) -> impl Iterator<Item = (&Slot, Range<usize>)> {
        self.slots.iter().filter_map(move |slot| {
            let start = slot.offset.max(range.start);
            let end = (slot.offset + slot.len).min(range.end);
            (start < end).then_some((slot, start..end))
        })
    }

    /// Ranges of padding in the flat buffer: elements that belong to no parameter.
    pub fn gaps(&self) -> impl Iterator<Item = Range<usize>> {
        let ends = self.slots.iter().map(|s| s.offset + s.len);
        let starts = self
            .slots
            .iter()
            .skip(1)
            .map(|s| s.offset)
            .chain([self.padded_elems]);
        ends.zip(starts)
            .map(|(end, start)| end..start)
            .filter(|r| !r.is_empty())
    }
}

/// Layout of one unit (parameters that are gathered together, usually one layer): its trainable, its
/// frozen and its quantized parameters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitPlan {
    /// Id of the unit whose layout this is.
    pub id: UnitId,
    /// Layout of the unit's trainable parameters in their flat buffer.
    pub trainable: GroupLayout,
    /// Layout of the unit's frozen parameters in their flat buffer.
    pub frozen: GroupLayout,
    /// Layout of the unit's quantized parameters in their flat buffer, in bytes.
    pub quantized: GroupLayout,
    /// Whether backward visits the unit: it has trainable parameters, or a previous unit does.
    pub needs_backward: bool,
}

impl UnitPlan {
    /// Layout of the unit's parameters of one kind.
    #[must_use]
    pub fn group(&self, kind: GroupKind) -> &GroupLayout {
        match kind {
            GroupKind::Trainable => &self.trainable,
            GroupKind::Frozen => &self.frozen,
            GroupKind::Quantized => &self.quantized,
        }
    }
}

pub(super) fn plan_units(spec: &ModelSpec, world_size: usize, in_blocks: bool) -> Vec<UnitPlan> {
    let mut trained_before = false;
    (0..spec.units.len() as u32)
        .map(UnitId)
        .map(|id| {
            let group = |kind: GroupKind| {
                let members = spec
                    .params
                    .iter()
                    .enumerate()
                    .filter(|(_, p)| p.unit == id && GroupKind::of(p) == kind)
                    .map(|(i, p)| (ParamId(i as u32), p));
                if kind == GroupKind::Trainable && in_blocks {
                    let member = |(id, p): (ParamId, &ParamSpec)| {
                        let elems = p.shape.elems();
                        (id, elems, has_blocks(&p.name, elems))
                    };
                    return GroupLayout::in_blocks(members.map(member), world_size);
                }
                let members = members.map(|(id, p)| (id, p.stored_shape().elems()));
                GroupLayout::new(members, world_size, kind.align_elems())
            };
            let [trainable, frozen, quantized] = GroupKind::ALL.map(group);
            trained_before |= !trainable.is_empty();
            UnitPlan {
                id,
                trainable,
                frozen,
                quantized,
                needs_backward: trained_before,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shards_partition_every_element_once(
            lens in proptest::collection::vec(1usize..300, 1..12),
            world in 1usize..7,
        ) {
            let layout = GroupLayout::new(
                lens.iter().enumerate().map(|(i, n)| (ParamId(i as u32), *n)), world, ALIGN_ELEMS);
            let mut owners = vec![0u32; layout.padded_elems];
            let mut named = vec![0u32; layout.padded_elems];
            for rank in 0..world {
                for (slot, part) in layout.parts(layout.shard(rank)) {
                    prop_assert!(slot.range().start <= part.start && part.end <= slot.range().end);
                    part.for_each(|i| named[i] += 1);
                }
                layout.shard(rank).for_each(|i| owners[i] += 1);
            }
            layout.gaps().flatten().for_each(|i| named[i] += 1);
            prop_assert!(owners.iter().all(|n| *n == 1));
            prop_assert!(named.iter().all(|n| *n == 1));
            prop_assert_eq!(lens.iter().sum::<usize>(),
                layout.slots.iter().map(|s| s.len).sum::<usize>());
        }
    }

    #[test]
    fn a_flat_buffer_smaller_than_the_world_leaves_later_ranks_padding_only() {
        let layout = GroupLayout::new([(ParamId(0), 3)].into_iter(), 4, ALIGN_ELEMS);
        assert_eq!(layout.parts(layout.shard(0)).count(), 1);
        assert_eq!(layout.parts(layout.shard(3)).count(), 0);
    }

    #[test]
    fn blocks_never_cross_shards_and_elementwise_parameters_come_first() {
        let lens = [5000, 300, 4096, 70, 9000];
        for world in 1..7 {
            let params = lens.iter().enumerate();
            let params = params.map(|(i, n)| (ParamId(i as u32), *n, *n >= 4096));
            let layout = GroupLayout::in_blocks(params, world);
            let order: Vec<_> = layout.slots.iter().map(|slot| slot.param.0).collect();
            assert_eq!(order, [1, 3, 0, 2, 4]);
            let starts = layout.slots.iter().map(|slot| slot.offset);
            let cuts = starts.chain((0..world).map(|rank| layout.shard(rank).start));
            assert!(
                cuts.chain([layout.padded_elems])
                    .all(|at| at % BLOCK_ELEMS == 0)
            );
            assert_eq!(layout.slots[2].offset, layout.elementwise_elems);
        }
        let small = GroupLayout::in_blocks([(ParamId(0), 7, false)].into_iter(), 2);
        assert_eq!((small.elementwise_elems, small.padded_elems), (512, 512));
        let none = GroupLayout::in_blocks(std::iter::empty(), 2);
        assert_eq!(none, GroupLayout::default());
    }

    #[test]
    fn an_empty_flat_buffer_takes_no_bytes() {
        let layout = GroupLayout::new(std::iter::empty(), 3, ALIGN_ELEMS);
        assert_eq!((layout.shard_elems, layout.padded_elems), (0, 0));
        assert_eq!(layout.gaps().count(), 0);
    }
}
