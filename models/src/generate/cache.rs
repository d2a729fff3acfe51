//! Cache of keys and values during a generation, so that a new token costs one row.
//!
//! Every prompt owns a range of rows, as long as its prompt and its longest answer. Nothing moves
//! while answers grow, and the bytes are known before the first pass. Unused rows are a sequence
//! without queries in the attention.

use crate::autograd::{Scope, Var};
use crate::batch::CrossRows;
use crate::error::Result;
use crate::ops::Sequences;
use kernels::{Backend, DType, Shape, Tag, Tensor};
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Sizes of the key/value cache of a decoder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheShape {
    /// Number of decoder layers.
    pub layers: usize,
    /// Number of key/value heads per layer.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Dtype in which keys and values are stored.
    pub dtype: DType,
    /// Number of learned prefix tokens (p-tuning) before each prompt.
    pub prefix_tokens: usize,
    /// Sizes of the image features that every layer reads by cross-attention; `None` in a model without it.
    pub cross: Option<CrossCacheShape>,
}

/// Sizes of the cached keys and values of an image, per layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CrossCacheShape {
    /// Number of features of one image.
    pub features: usize,
    /// Elements of one feature's key, and of its value.
    pub width: usize,
}

impl CacheShape {
    /// Bytes of the cache per token of a prompt or answer: keys and values of all layers.
    #[must_use]
    pub fn bytes_per_token(&self) -> u64 {
        let elems = 2 * self.layers * self.kv_heads * self.head_dim;
        (elems * self.dtype.size_bytes()) as u64
    }

    /// Bytes of the cache per prompt with `images` images, in addition to those of its tokens: learned
    /// prefix, and keys and values of the image features that cross-attention reads.
    #[must_use]
    pub fn bytes_per_prompt(&self, images: usize) -> u64 {
        let cross = self.cross.map_or(0, |cross| cross.features * cross.width);
        let elems = 2 * self.layers * images * cross;
        let prefix = self.prefix_tokens as u64 * self.bytes_per_token();
        (elems * self.dtype.size_bytes()) as u64 + prefix
    }
}

/// Keys and values `[rows, g, d]` of one layer.
type Pair = [Tensor; 2];

/// Key/value cache of one batch of prompts, for all decoder layers, in the device's memory pool under
/// [`Tag::Cache`].
#[derive(Debug)]
pub struct KvCache {
    /// A layer's tensors; absent only during a write, or after a failed one.
    layers: Vec<Mutex<Option<Pair>>>,
    /// For each prompt, its rows in the cache.
    ranges: Vec<Range<usize>>,
    /// Number of learned prefix rows before each prompt.
    prefix: usize,
    /// For each prompt, its image features among those of all prompts.
    features: Vec<Range<usize>>,
    /// Keys and values of all features by layer, once the first pass has made them.
    cross: Vec<OnceLock<Pair>>,
}

impl KvCache {
    /// Allocates a cache in which prompt `i` with its answer may grow to `capacities[i]` tokens, not counting
    /// its learned prefix. A capacity of 0 takes no memory.
    ///
    /// # Errors
    /// When the device's memory pool is full.
    pub fn new(backend: &dyn Backend, shape: CacheShape, capacities: &[usize]) -> Result<Self> {
        let mut rows = 0;
        let ranges = capacities.iter().map(|capacity| {
            let own = match capacity {
                0 => 0,
                tokens => shape.prefix_tokens + tokens,
            };
            rows += own;
            rows - own..rows
        });
        let ranges: Vec<Range<usize>> = ranges.collect();
        let extents = Shape::new(&[rows, shape.kv_heads, shape.head_dim]);
        let layer = |_| -> Result<Mutex<Option<Pair>>> {
            let k = backend.zeros(extents, shape.dtype, Tag::Cache)?;
            let v = backend.zeros(extents, shape.dtype, Tag::Cache)?;
            Ok(Mutex::new(Some([k, v])))
        };
        Ok(Self {
            layers: (0..shape.layers).map(layer).collect::<Result<_>>()?,
            ranges,
            prefix: shape.prefix_tokens,
            features: Vec::new(),
            cross: vec![OnceLock::new(); shape.layers],
        })
    }

    /// Sets, for each prompt, the range of its image features among those of all prompts. Cross-attention
    /// reads them in every pass.
    #[must_use]
    pub fn with_features(mut self, features: Vec<Range<usize>>) -> Self {
        self.features = features;
        self
    }

    /// Rows that attend to features when the prompts `open`, ascending, get one token each.
    ///
    /// # Errors
    /// When the device's memory pool is full.
    pub(crate) fn cross_rows(
        &self,
        open: &[usize],
        backend: &dyn Backend,
    ) -> Result<Option<CrossRows>> {
        let Some(all) = self.features.last() else {
            return Ok(None);
        };
        let own: Vec<_> = open
            .iter()
            .map(|i| (1, self.features[*i].clone()))
            .collect();
        CrossRows::new(&own, all.end, backend)
    }

    fn rows(&self) -> usize {
        self.ranges.last().map_or(0, |range| range.end)
    }

    /// Cache rows of the tokens `tokens` of prompt `i`, counted with its learned prefix.
    fn place(&self, i: usize, tokens: Range<usize>) -> impl Iterator<Item = i32> {
        let start = self.ranges[i].start;
        debug_assert!(start + tokens.end <= self.ranges[i].end);
        tokens.map(move |t| (start + t) as i32)
    }

    /// One query at the end of each of `lengths` (prompt, keys with its own), the prompts ascending.
    fn one_query_each(&self, lengths: &[(usize, usize)]) -> Sequences {
        let (mut queries, mut q_starts) = (0, vec![0]);
        let mut k_starts = vec![0];
        let mut close = |queries: usize, keys: usize| {
            if k_starts.last() != Some(&keys) {
                q_starts.push(queries);
                k_starts.push(keys);
            }
        };
        for (i, keys) in lengths {
            let start = self.ranges[*i].start;
            close(queries, start);
            queries += 1;
            close(queries, start + keys);
        }
        close(queries, self.rows());
        Sequences {
            q_starts: q_starts.into(),
            k_starts: k_starts.into(),
            // The one query is the last token and sees every key.
            causal: false,
        }
    }

    /// Writes the rows of a pass and returns all of the layer.
    fn write(
        &self,
        layer: usize,
        backend: &dyn Backend,
        rows: &Tensor,
        new: [&Tensor; 2],
    ) -> Result<Pair> {
        let mut slot = self.layers[layer]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Taken out, so that it is the only handle and is written in place.
        let [k, v] = slot.take().expect("a generation ends with its first error");
        let k = backend.write_rows(k, rows, new[0])?;
        let v = backend.write_rows(v, rows, new[1])?;
        let pair = [k, v];
        *slot = Some(pair.clone());
        Ok(pair)
    }
}

/// The key/value cache as one forward pass uses it: the cache rows that the pass writes, and those that its
/// queries read.
#[derive(Clone, Debug)]
pub struct CachePass {
    cache: Arc<KvCache>,
    /// i32 `[T]`: the cache row of every token of the batch.
    rows: Tensor,
    /// The batch's queries against the cache's rows; absent in the first pass, whose tokens attend
    /// to each other as in training.
    sequences: Option<Sequences>,
}

impl CachePass {
    /// The cache for the first pass, which stores the keys and values of whole prompts. `lengths` lists
    /// (index of the prompt, its number of tokens), ascending.
    ///
    /// # Errors
    /// When the device's memory pool is full.
    pub fn prefill(
        cache: Arc<KvCache>,
        lengths: &[(usize, usize)],
        backend: &dyn Backend,
    ) -> Result<Self> {
        let prefix = cache.prefix;
        let all = lengths
            .iter()
            .flat_map(|(i, n)| cache.place(*i, 0..prefix + *n));
        let rows: Vec<i32> = all.collect();
        Ok(Self {
            rows: upload(backend, &rows)?,
            sequences: None,
            cache,
        })
    }

    /// The cache for a later pass, with one new token per prompt. `cached` lists (index of the prompt, its
    /// number of tokens already cached), ascending.
    ///
    /// # Errors
    /// When the device's memory pool is full.
    pub fn decode(
        cache: Arc<KvCache>,
        cached: &[(usize, usize)],
        backend: &dyn Backend,
    ) -> Result<Self> {
        let before = |n: &usize| cache.prefix + n;
        let rows: Vec<i32> = cached
            .iter()
            .flat_map(|(i, n)| cache.place(*i, before(n)..before(n) + 1))
            .collect();
        let lengths: Vec<(usize, usize)> =
            cached.iter().map(|(i, n)| (*i, before(n) + 1)).collect();
        Ok(Self {
            rows: upload(backend, &rows)?,
            sequences: Some(cache.one_query_each(&lengths)),
            cache,
        })
    }

    /// The cache of the decoder layer with index `layer`, from 0, as this pass reads and writes it.
    #[must_use]
    pub fn layer(&self, layer: usize) -> CachedLayer<'_> {
        CachedLayer { pass: self, layer }
    }
}

fn upload(backend: &dyn Backend, rows: &[i32]) -> Result<Tensor> {
    let bytes = bytemuck::cast_slice(rows);
    Ok(backend.upload(
        bytes,
        Shape::new(&[rows.len()]),
        DType::I32,
        Tag::Activations,
    )?)
}

/// The cache of one decoder layer, as one [`CachePass`] reads and writes it.
#[derive(Clone, Copy, Debug)]
pub struct CachedLayer<'a> {
    pass: &'a CachePass,
    layer: usize,
}

impl CachedLayer<'_> {
    /// Keys and values of the prompts' features: `first` makes them in the first pass.
    pub(crate) fn cross(
        &self,
        scope: &Scope<'_>,
        first: impl FnOnce() -> Result<[Var; 2]>,
    ) -> Result<[Var; 2]> {
        let slot = &self.pass.cache.cross[self.layer];
        if let Some(pair) = slot.get() {
            return Ok(pair.clone().map(|value| scope.constant(value)));
        }
        let pair = first()?;
        slot.get_or_init(|| [pair[0].value().clone(), pair[1].value().clone()]);
        Ok(pair)
    }
}

impl Scope<'_> {
    /// Attention of `q` to `k` and `v`, as [`Scope::attention`] over `sequences`. With a cache, `k` and `v` are also
    /// stored in it, and the passes after the first attend to all rows cached so far. For generation only: no
    /// gradient reaches the cache.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn cached_attention(
        &self,
        [q, k, v]: [&Var; 3],
        sequences: &Sequences,
        cache: Option<CachedLayer<'_>>,
        scale: f32,
    ) -> Result<Var> {
        let Some(CachedLayer { pass, layer }) = cache else {
            return self.attention(q, k, v, sequences, scale);
        };
        let new = [k.value(), v.value()];
        let [all_k, all_v] = pass.cache.write(layer, self.backend(), &pass.rows, new)?;
        match &pass.sequences {
            None => self.attention(q, k, v, sequences, scale),
            Some(cached) => {
                let (k, v) = (self.constant(all_k), self.constant(all_v));
                self.attention(q, &k, &v, cached, scale)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::MetaBackend;

    const SHAPE: CacheShape = CacheShape {
        layers: 3,
        kv_heads: 2,
        head_dim: 32,
        dtype: DType::BF16,
        prefix_tokens: 0,
        cross: None,
    };

    #[test]
    fn a_cache_allocates_the_announced_bytes() {
        assert_eq!(SHAPE.bytes_per_token(), 2 * 3 * 2 * 32 * 2);
        let backend = MetaBackend::unlimited();
        let cache = KvCache::new(&backend, SHAPE, &[40, 24]).unwrap();
        let counted = backend.pool().stats().tag(Tag::Cache).in_use;
        assert_eq!(counted, 64 * SHAPE.bytes_per_token());
        drop(cache);
        assert_eq!(backend.pool().stats().in_use, 0);
    }

    #[test]
    fn unused_cache_rows_form_sequences_without_queries() {
        let backend = MetaBackend::unlimited();
        let cache = KvCache::new(&backend, SHAPE, &[5, 3, 4]).unwrap();
        let all = cache.one_query_each(&[(0, 5), (1, 2), (2, 3)]);
        assert_eq!(*all.q_starts, [0, 1, 2, 2, 3, 3]);
        assert_eq!(*all.k_starts, [0, 5, 7, 8, 11, 12]);
        let last = cache.one_query_each(&[(2, 4)]);
        assert_eq!(
            (&*last.q_starts, &*last.k_starts),
            (&[0, 0, 1][..], &[0, 8, 12][..])
        );
        assert_eq!(cache.place(1, 1..3).collect::<Vec<_>>(), [6, 7]);
    }
}
