//! A decoder over packed samples: token embedding with the splice, layers, and the head with the loss.
//!
//! Shapes: `T` tokens of all samples, `D` width.

use super::{DecoderBlock, DecoderBlockConfig, LmHead, LmHeadConfig, TokenEmbedding};
use crate::autograd::{Scope, Tape, Var};
use crate::batch::Batch;
use crate::error::Result;
use crate::generate::{CacheShape, CachedLayer};
use crate::params::{ParamBuilder, ParamScope};
use engine::UnitId;
use kernels::DType;

/// One layer of a language decoder. [`Decoder`] runs it while the weights of the layer's unit (parameters
/// gathered together) are readable.
pub trait DecoderLayer: std::fmt::Debug {
    /// Applies the layer to `x`: `[T, D]` to `[T, D]`. With `cache`, keys and values are stored in it and read from
    /// it.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    fn forward(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        batch: &Batch,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Var>;
}

/// The layers of a decoder, all of type `L`. Each is a unit of its own: the engine gathers and releases its
/// parameters together.
#[derive(Debug)]
pub struct DecoderLayers<L> {
    layers: Vec<(UnitId, L)>,
}

impl<L: DecoderLayer> DecoderLayers<L> {
    /// Declares `count` layers, each by a call of `layer`. Layer N is the unit `unit.N`, and the names of its
    /// parameters begin with `module.N`.
    pub fn new(
        params: &mut ParamBuilder<'_>,
        count: usize,
        [unit, module]: [&str; 2],
        layer: impl Fn(&mut ParamScope<'_, '_>) -> L,
    ) -> Self {
        let layers = (0..count).map(|i| {
            let mut unit = params.unit(&format!("{unit}.{i}"));
            let mut scope = unit.at(&format!("{module}.{i}"));
            (scope.id(), layer(&mut scope))
        });
        Self {
            layers: layers.collect(),
        }
    }
}

/// A whole language decoder: token embedding, layers of type `L`, last norm and output head.
#[derive(Debug)]
pub struct Decoder<L> {
    /// The token embedding, which is the decoder's first unit (parameters gathered together).
    pub embed: TokenEmbedding,
    /// The decoder layers, each a unit (parameters gathered together).
    pub layers: DecoderLayers<L>,
    /// The last norm and the output head, which together are the decoder's last unit (parameters gathered
    /// together).
    pub head: LmHead,
}

/// Sizes of a decoder of [`DecoderBlock`]s, and the names of its units and modules.
#[derive(Clone, PartialEq, Debug)]
pub struct DecoderConfig {
    /// Name of the token embedding's unit (parameters gathered together), and path of its module in the
    /// checkpoint.
    pub embed: [&'static str; 2],
    /// Name of the layers' units and path of their modules, both without the layer's number, which is
    /// appended as `.N`.
    pub layers: [&'static str; 2],
    /// Number of decoder layers.
    pub num_layers: usize,
    /// Path, in the checkpoint, of the module of the norm before the output head.
    pub norm: &'static str,
    /// Name of the last unit (parameters gathered together), which consists of norm and output head, and path
    /// of the head's module in the checkpoint.
    pub head: [&'static str; 2],
    /// Number of token ids: rows of the weights of embedding and output head.
    pub vocabulary: usize,
    /// Sizes of each layer, and the names of its modules.
    pub block: DecoderBlockConfig,
}

impl DecoderConfig {
    /// Sizes of the keys and values that a cache of `dtype` holds per token.
    #[must_use]
    pub fn cache_shape(&self, dtype: DType) -> CacheShape {
        CacheShape {
            layers: self.num_layers,
            kv_heads: self.block.kv_heads,
            head_dim: self.block.head_dim,
            dtype,
            prefix_tokens: 0,
            cross: None,
        }
    }
}

impl Decoder<DecoderBlock> {
    /// Declares the parameters of the whole decoder.
    ///
    /// # Errors
    /// When the embedding or the output head is a LoRA target; neither can take an adapter.
    pub fn new(params: &mut ParamBuilder<'_>, config: &DecoderConfig) -> Result<Self> {
        let (block, vocabulary) = (&config.block, config.vocabulary);
        let [unit, module] = config.embed;
        let embed = TokenEmbedding::new(params, unit, module, [vocabulary, block.width])?;
        let layers = DecoderLayers::new(params, config.num_layers, config.layers, |scope| {
            DecoderBlock::new(scope, block)
        });
        let [unit, head] = config.head;
        let head = LmHeadConfig {
            unit,
            norm: config.norm,
            head,
            vocabulary,
            width: block.width,
            eps: block.eps,
        };
        let head = LmHead::new(params, head)?;
        Ok(Self {
            embed,
            layers,
            head,
        })
    }
}

impl<L: DecoderLayer> Decoder<L> {
    /// Hidden states `[T, D]` of the batch's tokens before the last norm: embeds the tokens, replaces the
    /// rows of images by `features`, and runs all layers.
    ///
    /// # Errors
    /// When the engine or the device fails.
    pub fn hidden<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        batch: &'m Batch,
        features: Option<&Var>,
    ) -> Result<Var> {
        let mut x = self.embed.forward(tape, batch, features)?;
        for (i, (unit, layer)) in self.layers.layers.iter().enumerate() {
            [x] = tape.segment(*unit, [&x], move |scope, [x]| {
                let cache = batch.cache.as_ref().map(|pass| pass.layer(i));
                Ok([layer.forward(scope, x, batch, cache)?])
            })?;
            tape.observe(format_args!("hidden.{i}"), &x);
        }
        Ok(x)
    }
}
