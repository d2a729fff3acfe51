//! The reading half of a collective, as a state machine that never blocks.
#![expect(
    unsafe_code,
    reason = "reads peers' buffers in the window under the protocol"
)]

use super::endpoint::Endpoint;
use super::fingerprint::Fingerprint;
use super::reduce::sum_in_rank_order;
use super::window::{Failure, RingPhase, Window};
use super::{Collective, CollectiveKind, CommError, Participation, World};
use kernels::DType;
use std::ops::Range;
use std::sync::Mutex;

/// One collective of this rank, from its publication until this rank no longer needs its peers.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) sequence: u64,
    pub(super) print: Fingerprint,
    pub(super) collective: Collective,
    pub(super) bytes: usize,
    /// Offset of the buffer in this rank's region.
    pub(super) offset: usize,
    pub(super) state: Mutex<State>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Bit mask of the peers whose part has been copied, or that have arrived.
    seen: u64,
    reduced: bool,
    /// Whether this rank has finished all reads and writes of this collective.
    pub(super) finished: bool,
}

impl Op {
    /// Whether the rank needs nothing from its peers.
    pub(super) fn needs_no_peer(&self, world: World) -> bool {
        let kind = self.collective.kind;
        let contribute_only = self.collective.participation == Participation::ContributeOnly;
        self.partners(world).next().is_none() && !kind.sums()
            || world.size == 1
            || kind == (CollectiveKind::Broadcast { root: world.rank })
            || contribute_only && !self.shares_sums(world) && kind != CollectiveKind::Barrier
    }

    /// Whether a peer may read this rank's buffer.
    pub(super) fn is_read_by_peers(&self, world: World) -> bool {
        match self.collective.kind {
            CollectiveKind::Broadcast { root } => world.size > 1 && root == world.rank,
            CollectiveKind::Barrier => false,
            CollectiveKind::AllGather => self.partners(world).next().is_some(),
            CollectiveKind::ReduceScatter | CollectiveKind::AllReduce => world.size > 1,
        }
    }

    /// Whether other ranks need the part that a rank sums: in an all-reduce, and in a reduce-scatter whose shards
    /// several shard groups hold.
    pub(super) fn shares_sums(&self, world: World) -> bool {
        match self.collective.kind {
            CollectiveKind::AllReduce => true,
            CollectiveKind::ReduceScatter => self.parts(world.size) < world.size,
            _ => false,
        }
    }

    /// The peers whose finished part this rank copies, and that copy its own. In a gather they are those of its shard
    /// group. In a reduce-scatter they are those with the same shard.
    pub(super) fn partners(&self, world: World) -> impl Iterator<Item = usize> + use<> {
        let parts = self.parts(world.size);
        let kind = self.collective.kind;
        world.peers().filter(move |peer| match kind {
            CollectiveKind::AllGather => peer / parts == world.rank / parts,
            CollectiveKind::ReduceScatter => peer % parts == world.rank % parts,
            _ => true,
        })
    }

    /// The peers that may read this rank's buffer, as a bit mask.
    pub(super) fn readers(&self, world: World) -> u64 {
        let mask = |peers: &mut dyn Iterator<Item = usize>| peers.fold(0, |all, p| all | 1 << p);
        match self.collective.kind {
            CollectiveKind::AllGather => mask(&mut self.partners(world)),
            _ => mask(&mut world.peers()),
        }
    }

    /// The record of `peer` after its publication; an error if the peer issued another collective.
    pub(super) fn peer(
        &self,
        window: &Window,
        world: World,
        peer: usize,
    ) -> Result<Option<usize>, CommError> {
        match window.published(peer, self.sequence) {
            None => Ok(None),
            Some((print, offset)) if print == self.print => Ok(Some(offset)),
            Some((print, _)) => {
                let (mut ranks, mut prints) = ([world.rank, peer], [self.print, print]);
                if peer < world.rank {
                    ranks.reverse();
                    prints.reverse();
                }
                let failure = Failure::Mismatch {
                    sequence: self.sequence,
                    ranks,
                    prints,
                };
                Err(window.fail(failure).error(window))
            }
        }
    }

    /// Progresses as far as possible without waiting; true after this rank has finished.
    pub(super) fn advance(
        &self,
        endpoint: &Endpoint,
        state: &mut State,
    ) -> Result<bool, CommError> {
        if state.finished {
            return Ok(true);
        }
        let complete = match self.collective.kind {
            CollectiveKind::Barrier => self.see_peers(endpoint, state)?,
            CollectiveKind::AllGather => self.copy_parts(endpoint, state, RingPhase::Published)?,
            CollectiveKind::Broadcast { root } => self.copy_from_root(endpoint, root)?,
            CollectiveKind::ReduceScatter if !self.shares_sums(endpoint.world) => {
                self.reduce(endpoint)?
            }
            CollectiveKind::ReduceScatter | CollectiveKind::AllReduce => {
                self.share_sum(endpoint, state)?
            }
        };
        if complete {
            endpoint.finish(self, state);
        }
        Ok(complete)
    }

    fn see_peers(&self, endpoint: &Endpoint, state: &mut State) -> Result<bool, CommError> {
        let world = endpoint.world;
        for peer in world.peers() {
            if self.peer(&endpoint.window, world, peer)?.is_some() {
                state.seen |= 1 << peer;
            }
        }
        Ok(state.seen.count_ones() as usize == world.size - 1)
    }

    /// Copies the part of every peer that has reached `phase`.
    fn copy_parts(
        &self,
        endpoint: &Endpoint,
        state: &mut State,
        phase: RingPhase,
    ) -> Result<bool, CommError> {
        let Endpoint { world, window, .. } = endpoint;
        for peer in self
            .partners(*world)
            .filter(|peer| state.seen >> peer & 1 == 0)
            .collect::<Vec<_>>()
        {
            let Some(offset) = self.peer(window, *world, peer)? else {
                continue;
            };
            if !window.reached(peer, self.sequence, phase) {
                continue;
            }
            let part = self.finished_part(peer, world.size);
            // SAFETY: `peer` wrote its own part before it reached `phase`, and does not write it until this rank is
            // done.
            let from = unsafe { window.bytes(peer, offset, part.clone()) };
            // SAFETY: from here on peers read only the own part of this rank's buffer. An all-gather never reads other
            // parts. In a sum `peer` is the only reader of this part, and it had finished with it when it reached
            // `Reduced`.
            let to = unsafe { window.bytes_mut(world.rank, self.offset, part) };
            to.copy_from_slice(from);
            state.seen |= 1 << peer;
        }
        Ok(state.seen.count_ones() as usize == self.partners(*world).count())
    }

    fn copy_from_root(&self, endpoint: &Endpoint, root: usize) -> Result<bool, CommError> {
        let Endpoint { world, window, .. } = endpoint;
        let Some(offset) = self.peer(window, *world, root)? else {
            return Ok(false);
        };
        // SAFETY: the root wrote its buffer before its publication and does not write it until all are done.
        let from = unsafe { window.bytes(root, offset, 0..self.bytes) };
        // SAFETY: nobody reads the buffer of a rank that is not the root.
        let to = unsafe { window.bytes_mut(world.rank, self.offset, 0..self.bytes) };
        to.copy_from_slice(from);
        Ok(true)
    }

    /// Sums the own part after every peer has published; false before.
    fn reduce(&self, endpoint: &Endpoint) -> Result<bool, CommError> {
        let Endpoint { world, window, .. } = endpoint;
        let mut offsets = [self.offset; super::MAX_RANKS];
        for peer in world.peers() {
            let Some(offset) = self.peer(window, *world, peer)? else {
                return Ok(false);
            };
            offsets[peer] = offset;
        }
        let part = self.finished_part(world.rank, world.size);
        let source = |peer: usize| {
            // SAFETY: `peer` wrote its buffer before its publication. Until this rank has reduced its own part, `peer`
            // writes only other parts.
            unsafe { window.bytes(peer, offsets[peer], part.clone()) }
        };
        // SAFETY: no peer reads this rank's own part before this rank has reduced it.
        let out = unsafe { window.bytes_mut(world.rank, self.offset, part.clone()) };
        let World { rank, size } = *world;
        if self.collective.dtype == DType::F64 {
            let source = |peer| bytemuck::cast_slice::<u8, f64>(source(peer));
            sum_in_rank_order(size, rank, source, bytemuck::cast_slice_mut(out));
        } else {
            let source = |peer| bytemuck::cast_slice::<u8, f32>(source(peer));
            sum_in_rank_order(size, rank, source, bytemuck::cast_slice_mut(out));
        }
        Ok(true)
    }

    fn share_sum(&self, endpoint: &Endpoint, state: &mut State) -> Result<bool, CommError> {
        if !state.reduced {
            if !self.reduce(endpoint)? {
                return Ok(false);
            }
            state.reduced = true;
            if self.collective.participation == Participation::ContributeOnly {
                return Ok(true);
            }
            endpoint.reach(self, RingPhase::Reduced);
        }
        self.copy_parts(endpoint, state, RingPhase::Reduced)
    }

    /// Number of parts of the buffer.
    fn parts(&self, ranks: usize) -> usize {
        self.collective.group.unwrap_or(ranks)
    }

    /// The part that `rank` finishes for others: its shard, or its share of a shard that several ranks hold.
    pub(super) fn finished_part(&self, rank: usize, ranks: usize) -> Range<usize> {
        let parts = self.parts(ranks);
        let shard = self.divided(0..self.bytes, rank % parts, parts);
        match self.collective.kind {
            CollectiveKind::AllGather => shard,
            _ => self.divided(shard, rank / parts, ranks / parts),
        }
    }

    /// Part `index` of `count` of these bytes. Parts are equal and of whole elements; the last ones may be shorter.
    fn divided(&self, bytes: Range<usize>, index: usize, count: usize) -> Range<usize> {
        let elem_bytes = self.collective.dtype.size_bytes();
        let part_bytes = (bytes.len() / elem_bytes).div_ceil(count) * elem_bytes;
        let edge = |index: usize| (bytes.start + index * part_bytes).min(bytes.end);
        edge(index)..edge(index + 1)
    }
}
