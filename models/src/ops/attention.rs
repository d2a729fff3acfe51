//! Attention over packed sequences.

use crate::autograd::{Scope, Var};
use crate::error::Result;
use kernels::{AttentionArgs, AttentionOut, Tensor};
use std::sync::Arc;

/// Boundaries of packed sequences, for queries and for keys (cumulative lengths, as `cu_seqlens` of
/// FlashAttention). Sequences are stored one after the other without padding.
#[derive(Clone, Debug)]
pub struct Sequences {
    /// First query row of each sequence, then the number of all query rows: sequence `i` has the rows
    /// `q_starts[i]..q_starts[i + 1]`.
    pub q_starts: Arc<[usize]>,
    /// First key row of each sequence, then the number of all key rows: sequence `i` has the rows
    /// `k_starts[i]..k_starts[i + 1]`.
    pub k_starts: Arc<[usize]>,
    /// Whether attention is causal: query `i` of `n` attends to the keys `0..=i + (keys - n)` of its
    /// sequence.
    pub causal: bool,
}

impl Sequences {
    /// Boundaries for self-attention: queries and keys have the same boundaries `starts`, from 0 to the
    /// number of rows.
    #[must_use]
    pub fn own(starts: Arc<[usize]>, causal: bool) -> Self {
        Self {
            q_starts: starts.clone(),
            k_starts: starts,
            causal,
        }
    }

    fn args<'a>(
        &'a self,
        q: &'a Tensor,
        k: &'a Tensor,
        v: &'a Tensor,
        scale: f32,
    ) -> AttentionArgs<'a> {
        AttentionArgs {
            q,
            k,
            v,
            q_starts: &self.q_starts,
            k_starts: &self.k_starts,
            causal: self.causal,
            scale,
        }
    }
}

impl Scope<'_> {
    /// Softmax attention of the queries `q [t, h, d]` to the keys `k` and values `v`, `[s, g, d]`, within
    /// each of `sequences`. The scores are multiplied by `scale`. The result is `[t, h, d]`. See
    /// [`AttentionArgs`](kernels::AttentionArgs).
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn attention(
        &self,
        q: &Var,
        k: &Var,
        v: &Var,
        sequences: &Sequences,
        scale: f32,
    ) -> Result<Var> {
        let (qt, kt, vt) = (q.value().clone(), k.value().clone(), v.value().clone());
        let saved = self
            .backend()
            .attention(sequences.args(&qt, &kt, &vt, scale))?;
        let AttentionOut { out, lse } = saved;
        let slots = [q.slot(), k.slot(), v.slot()];
        let sequences = sequences.clone();
        let kept = out.clone();
        self.record("attention", out, &[q, k, v], &[], move |sweep, dy| {
            let saved = AttentionOut { out: kept, lse };
            let args = sequences.args(&qt, &kt, &vt, scale);
            let grads = sweep.backend().attention_backward(args, &saved, &dy)?;
            for (slot, grad) in slots.into_iter().zip([grads.dq, grads.dk, grads.dv]) {
                sweep.add(slot, grad)?;
            }
            Ok(())
        })
    }
}
