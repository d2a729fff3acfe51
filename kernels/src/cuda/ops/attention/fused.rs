//! Launches of the backward in one kernel with five products.

use super::tiles::{Problem, Tiling, lengths, rows_bytes};
use super::{Gradients, Inputs, Outputs, Plan, addresses, int};
use crate::cuda::device_kind::AttentionBackward;
use crate::cuda::launch::{Address, Arg, Launch};

/// Threads of a block, as `FUSED_THREADS` of attention.cu.
const THREADS: u32 = 256;

/// What the fused backward of a call needs beside its tiles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fused {
    /// Blocks of `gradients`: one per tile of keys, key/value head and part of its query heads.
    blocks: u32,
    /// Whether several tiles of keys add to a row of `dq`.
    adds: bool,
    /// Whether a query has no keys: its `dq` is cleared.
    clears: bool,
}

impl Fused {
    /// `None` where the split kernels compute the backward: they were asked for, the call has no tensor cores, or more
    /// blocks than a launch may have.
    pub(super) fn new(problem: &Problem<'_>, tiling: &Tiling) -> Option<Self> {
        if problem.backward == AttentionBackward::Split || tiling.plain {
            return None;
        }
        let parts = super::parts(problem.heads, problem.kv_heads);
        let blocks = tiling.keys.count as u64 * u64::from(problem.kv_heads * parts);
        let keys = tiling.keys.rows as usize;
        Some(Self {
            blocks: i32::try_from(blocks).ok()?.unsigned_abs(),
            adds: lengths(problem).any(|(q, k)| q > 0 && k > keys),
            clears: lengths(problem).any(|(q, k)| q > 0 && (k == 0 || problem.causal && q > k)),
        })
    }
}

impl Plan {
    /// Queries of a tile, as `FUSED_ROWS` of attention.cu.
    const fn fused_rows(&self) -> u32 {
        if self.head_dim <= 80 { 64 } else { 32 }
    }

    /// Scratch memory of the fused kernel, behind that of the split ones.
    pub(super) const fn fused_bytes(&self) -> u64 {
        match self.fused {
            Some(fused) => self.dq_sum_bytes(fused) + 4 * self.turns(),
            None => 0,
        }
    }

    const fn dq_sum_bytes(&self, fused: Fused) -> u64 {
        4 * self.q_elements() * fused.adds as u64
    }

    const fn q_elements(&self) -> u64 {
        self.queries * self.heads as u64 * self.head_dim as u64
    }

    /// The ticket, and a turn per tile of queries and head. A sequence has at most one tile more than its rows fill.
    const fn turns(&self) -> u64 {
        let tiles = self.queries / self.fused_rows() as u64 + self.sequences as u64;
        1 + tiles * self.heads as u64
    }

    /// All gradients: two products compute the weights once, three give `dv`, `dk` and `dq`.
    pub(super) fn fused_backward(
        &self,
        fused: Fused,
        inputs: Inputs,
        outputs: Outputs,
        gradients: Gradients,
    ) -> Vec<Launch> {
        let dq_sums = Address(gradients.workspace.0 + self.split_bytes());
        let turns = Address(dq_sums.0 + self.dq_sum_bytes(fused));
        let mut launches = Vec::from_iter(self.output_products(outputs, gradients));
        if fused.clears {
            launches.push(self.clear(gradients.dq, self.q_elements() / 2));
        }
        if fused.blocks > 0 {
            launches.push(self.clear(turns, self.turns()));
            let mut args = self.backward_args(inputs, outputs, gradients);
            args.extend(addresses([
                gradients.dq,
                gradients.dk,
                gradients.dv,
                dq_sums,
            ]));
            args.extend(addresses(self.part_addresses(gradients)));
            args.extend([Arg::Address(turns), Arg::U64(self.part_elements())]);
            args.extend(self.sequences(inputs.table, self.tiling.keys.offset));
            args.push(int(self.parts()));
            let (keys, queries) = (self.tiling.keys.rows, self.fused_rows());
            // Keys and values, two stages of queries, gradients of outputs, ds, two stages of lse and delta.
            let shared_bytes = rows_bytes(self.head_dim, 2 * keys + 3 * queries)
                + 2 * keys * queries
                + 2 * 2 * 4 * queries;
            let launch = self.launch("gradients", [fused.blocks, 1, 1], shared_bytes, args);
            launches.push(Launch {
                threads: THREADS,
                ..launch
            });
        }
        launches.extend(self.sum_parts(gradients));
        launches
    }

    /// `words` words of 4 bytes become zero.
    fn clear(&self, at: Address, words: u64) -> Launch {
        let args = vec![Arg::Address(at), Arg::U64(words)];
        #[expect(clippy::cast_possible_truncation, reason = "fewer than 2^32 elements")]
        let blocks = words.div_ceil(u64::from(THREADS)) as u32;
        let launch = self.launch("clear_words", [blocks, 1, 1], 0, args);
        Launch {
            threads: THREADS,
            ..launch
        }
    }
}
