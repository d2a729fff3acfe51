//! Transformer block of a Llama-like decoder: Qwen2, Qwen3, GLM-4 and GLM-4.1V.

use super::{DecoderLayer, GatedMlp, RmsNorm, SelfAttention, SelfAttentionConfig};
use crate::autograd::{Scope, Var};
use crate::batch::Batch;
use crate::error::Result;
use crate::generate::CachedLayer;
use crate::params::ParamScope;

/// Sizes of a [`DecoderBlock`], and the names of its modules in the checkpoint.
#[derive(Clone, PartialEq, Debug)]
pub struct DecoderBlockConfig {
    /// Width of the residual stream: elements of one token's hidden state.
    pub width: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Elements of one attention head.
    pub head_dim: usize,
    /// Inner width of the gated MLP.
    pub inner: usize,
    /// Epsilon that the block's RMSNorms add to the mean square.
    pub eps: f32,
    /// Whether q, k and v have a bias (Qwen2 does, Llama does not).
    pub qkv_bias: bool,
    /// Whether query and key heads have RMSNorms of their own (Qwen3 has, Qwen2 has not).
    pub head_norms: bool,
    /// Names of the block's modules in the checkpoint.
    pub names: BlockNames,
}

/// Names of a decoder block's modules in the checkpoint, and which of them it fuses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockNames {
    /// Name of the block's attention module.
    pub attention: &'static str,
    /// Name of the one module that projects to q, k and v; `None` if the checkpoint has separate modules
    /// `q_proj`, `k_proj` and `v_proj`.
    pub fused_qkv: Option<&'static str>,
    /// Name of the attention's output projection.
    pub out: &'static str,
    /// Name of the one module that projects to gate and up; `None` if the checkpoint has separate modules
    /// `gate_proj` and `up_proj`.
    pub fused_gate_up: Option<&'static str>,
    /// Name of the MLP's output projection.
    pub down: &'static str,
    /// Names of two additional norms, on the outputs of attention and MLP; `None` if the block does not have
    /// them.
    pub output_norms: Option<[&'static str; 2]>,
}

impl BlockNames {
    /// Module names in checkpoints of Llama and Qwen2.
    pub const LLAMA: Self = Self {
        attention: "self_attn",
        fused_qkv: None,
        out: "o_proj",
        fused_gate_up: None,
        down: "down_proj",
        output_norms: None,
    };
}

/// Transformer block of a decoder: `x += attention(norm(x)); x += mlp(norm(x))` with rotary positions. Some
/// families norm the outputs of attention and MLP as well.
#[derive(Clone, PartialEq, Debug)]
pub struct DecoderBlock {
    norm1: RmsNorm,
    attention: SelfAttention,
    norm2: RmsNorm,
    mlp: GatedMlp,
    output_norms: Option<[RmsNorm; 2]>,
}

impl DecoderBlock {
    /// Declares the block's parameters. A block with output norms declares all norms first.
    pub fn new(params: &mut ParamScope<'_, '_>, config: &DecoderBlockConfig) -> Self {
        const NORM2: &str = "post_attention_layernorm";
        let (c, names) = (config.width, config.names);
        let norm =
            |params: &mut ParamScope<'_, '_>, name| RmsNorm::new(params, name, c, config.eps);
        let norm1 = norm(params, "input_layernorm");
        let first = names.output_norms.map(|[attention, mlp]| {
            let attention = norm(params, attention);
            let norm2 = norm(params, NORM2);
            (norm2, [attention, norm(params, mlp)])
        });
        let attention = SelfAttentionConfig {
            width: c,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            fused: names.fused_qkv,
            qkv_bias: config.qkv_bias,
            out_bias: false,
            out_name: names.out,
            head_norms: config.head_norms.then_some(config.eps),
        };
        let attention = SelfAttention::new(params, names.attention, attention);
        let (norm2, output_norms) = match first {
            Some((norm2, outputs)) => (norm2, Some(outputs)),
            None => (norm(params, NORM2), None),
        };
        let mlp = match names.fused_gate_up {
            Some(gate_up) => GatedMlp::fused(params, "mlp", [gate_up, names.down], c, config.inner),
            None => GatedMlp::new(params, "mlp", c, config.inner, false),
        };
        Self {
            norm1,
            attention,
            norm2,
            mlp,
            output_norms,
        }
    }
}

impl DecoderLayer for DecoderBlock {
    fn forward(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        batch: &Batch,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Var> {
        let output = |y: Var, norm: usize| match &self.output_norms {
            Some(norms) => norms[norm].forward(scope, &y),
            None => Ok(y),
        };
        let normed = self.norm1.forward(scope, x)?;
        let rotary = Some(&batch.rotary);
        let mixed = self
            .attention
            .forward(scope, &normed, &batch.sequences, rotary, cache)?;
        let x = scope.add(x, &output(mixed, 0)?)?;
        let normed = self.norm2.forward(scope, &x)?;
        let inner = self.mlp.forward(scope, &normed)?;
        scope.add(&x, &output(inner, 1)?)
    }
}
