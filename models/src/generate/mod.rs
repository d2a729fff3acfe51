//! Answers of any model with a decoder: a first pass over whole packed prompts, then passes of one
//! token per prompt whose attention reads cached keys and values.
//!
//! Ranks that share a model's parameters run in lock step: see [`generate`].

mod cache;
mod sampling;

pub use cache::{CachePass, CacheShape, CachedLayer, CrossCacheShape, KvCache};
pub use sampling::Sampling;

use crate::batch::Batch;
use crate::error::Result;
use crate::pipeline;
use crate::{SampleInput, VisionLanguageModel};
use engine::ParamAccess;
use kernels::{Backend, Tensor};
use std::num::NonZeroUsize;
use std::sync::Arc;

/// A tokenized prompt, with its images, for which an answer is generated.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Tokens and images of the prompt; labels are ignored.
    pub input: SampleInput<'a>,
    /// Index of the sample in its data set. Random draws depend on it, not on the batch.
    pub index: u64,
    /// Largest number of tokens that are generated for this prompt.
    pub max_new_tokens: usize,
}

impl Prompt<'_> {
    /// Largest number of tokens, of prompt and answer together, in the cache. The last token of an answer is
    /// never fed back.
    #[must_use]
    pub fn cached_tokens(&self) -> usize {
        (self.input.input_ids.len() + self.max_new_tokens).saturating_sub(1)
    }
}

/// How tokens are sampled and computed, and which tokens end an answer.
#[derive(Clone, PartialEq, Debug)]
pub struct GenerateOptions {
    /// How the next token is chosen from the logits.
    pub sampling: Sampling,
    /// Ids of the tokens that end an answer; they are not part of it.
    pub stop_ids: Vec<i32>,
    /// Rows of the tiles of feed-forward layers ([`Tape::with_mlp_tiles`](crate::Tape::with_mlp_tiles)).
    pub mlp_tiles: Option<NonZeroUsize>,
}

/// Bytes of device memory that the key/value cache of [`generate`] takes for `prompts`, before the memory
/// pool rounds allocations up to its size classes.
#[must_use]
pub fn cache_bytes(shape: CacheShape, prompts: &[Prompt<'_>]) -> u64 {
    let of = |prompt: &Prompt<'_>| {
        let tokens = prompt.cached_tokens() as u64 * shape.bytes_per_token();
        tokens + shape.bytes_per_prompt(prompt.input.image_bounds.len())
    };
    prompts.iter().map(of).sum()
}

/// Continues every prompt until a stop token or its own limit, and returns the new tokens of each.
///
/// Ranks that share the model's parameters run the same number of passes. Before each pass, `anyone_left` is
/// told whether this rank still decodes, and answers whether any rank does. The generation ends when it
/// answers no. A rank that is done, or has no prompt, runs a pass of one token meanwhile. Lengths and
/// contents of the answers may differ between ranks.
///
/// # Errors
/// When a prompt does not fit the model, the engine or the device fails, or `anyone_left` does.
pub fn generate(
    model: &dyn VisionLanguageModel,
    access: &dyn ParamAccess,
    prompts: &[Prompt<'_>],
    options: &GenerateOptions,
    anyone_left: &mut dyn FnMut(bool) -> Result<bool>,
) -> Result<Vec<Vec<i32>>> {
    generate_watched(model, access, prompts, options, anyone_left, &mut |_| ())
}

/// As [`generate`]. `after_pass` is called after each pass with the new tokens of each prompt so far.
///
/// # Errors
/// As [`generate`].
pub fn generate_watched(
    model: &dyn VisionLanguageModel,
    access: &dyn ParamAccess,
    prompts: &[Prompt<'_>],
    options: &GenerateOptions,
    anyone_left: &mut dyn FnMut(bool) -> Result<bool>,
    after_pass: &mut dyn FnMut(&[Vec<i32>]),
) -> Result<Vec<Vec<i32>>> {
    options.sampling.check()?;
    let mut decoder = Decoder::new(model, access, prompts, options);
    while anyone_left(!decoder.open.is_empty())? {
        decoder.step()?;
        after_pass(&decoder.answers);
    }
    Ok(decoder.answers)
}

/// Dry run of [`generate`] on the meta device, which has no values: the pass over all prompts, and then a
/// single decoding pass with one new token for each prompt. `mlp_tiles` is as in [`GenerateOptions`]. `begin` runs before
/// each pass and `end` after it.
///
/// # Errors
/// As [`generate`], except for those of sampling.
pub fn dry_run_answers(
    model: &dyn VisionLanguageModel,
    access: &dyn ParamAccess,
    prompts: &[Prompt<'_>],
    mlp_tiles: Option<NonZeroUsize>,
    begin: &dyn Fn(),
    end: &dyn Fn() -> Result<()>,
) -> Result<()> {
    let options = GenerateOptions {
        sampling: Sampling::GREEDY,
        stop_ids: Vec::new(),
        mlp_tiles,
    };
    let mut decoder = Decoder::new(model, access, prompts, &options);
    for _ in 0..2 {
        begin();
        let batch = decoder.batch()?;
        drop(pipeline::next_token_logits(
            model, access, &batch, mlp_tiles,
        )?);
        decoder.answers.iter_mut().for_each(|answer| answer.push(0));
        let answers = &decoder.answers;
        let grows = |i: &usize| answers[*i].len() < prompts[*i].max_new_tokens;
        decoder.open.retain(grows);
        end()?;
    }
    Ok(())
}

/// State of one generation of answers for a batch of prompts.
struct Decoder<'a> {
    model: &'a dyn VisionLanguageModel,
    access: &'a dyn ParamAccess,
    prompts: &'a [Prompt<'a>],
    options: &'a GenerateOptions,
    answers: Vec<Vec<i32>>,
    /// Indices of the prompts whose answers are not finished, ascending.
    open: Vec<usize>,
    /// The key/value cache of the batch; present after the first pass.
    cache: Option<Arc<KvCache>>,
    /// Position of each prompt's last token. It may differ from the length, since an image may take fewer
    /// positions than tokens.
    last_positions: Vec<i32>,
}

impl<'a> Decoder<'a> {
    fn new(
        model: &'a dyn VisionLanguageModel,
        access: &'a dyn ParamAccess,
        prompts: &'a [Prompt<'a>],
        options: &'a GenerateOptions,
    ) -> Self {
        let wants = |i: &usize| prompts[*i].max_new_tokens > 0;
        Self {
            model,
            access,
            prompts,
            options,
            answers: vec![Vec::new(); prompts.len()],
            open: (0..prompts.len()).filter(wants).collect(),
            cache: None,
            last_positions: Vec::new(),
        }
    }

    fn backend(&self) -> &'a dyn Backend {
        &**self.access.backend()
    }

    /// Runs one pass, which adds a token to the answer of every open prompt.
    fn step(&mut self) -> Result<()> {
        let batch = self.batch()?;
        let logits =
            pipeline::next_token_logits(self.model, self.access, &batch, self.options.mlp_tiles)?;
        let tokens = pipeline::chosen(self.access, || self.choose(&logits))?;
        let mut still = Vec::with_capacity(self.open.len());
        for (i, token) in self.open.iter().zip(tokens) {
            let (answer, prompt) = (&mut self.answers[*i], &self.prompts[*i]);
            if self.options.stop_ids.contains(&token) {
                continue;
            }
            answer.push(token);
            if answer.len() < prompt.max_new_tokens {
                still.push(*i);
            }
        }
        self.open = still;
        Ok(())
    }

    /// The next token of every open prompt.
    fn choose(&self, logits: &Tensor) -> Result<Vec<i32>> {
        let vocabulary = logits.shape().last();
        let rows = logits.to_f32_vec()?;
        let rows = self.open.iter().zip(rows.chunks_exact(vocabulary));
        let tokens = rows.map(|(i, row)| {
            let (token, prompt) = (self.answers[*i].len(), &self.prompts[*i]);
            if row.iter().any(|score| !score.is_finite()) {
                return Err(crate::ModelError::NotFinite { prompt: *i, token });
            }
            let sampling = &self.options.sampling;
            Ok(sampling.next(row, prompt.index, token as u64))
        });
        tokens.collect()
    }

    /// Packs the inputs of the next pass.
    fn batch(&mut self) -> Result<Batch> {
        match &self.cache {
            _ if self.open.is_empty() => self.idle(),
            Some(cache) => self.decode(cache.clone()),
            None => self.prefill(),
        }
    }

    /// A pass without results, to keep other ranks in lock step.
    fn idle(&self) -> Result<Batch> {
        let any = SampleInput {
            input_ids: &[0],
            labels: &[],
            image_bounds: &[],
            slices: &[],
        };
        self.model.collate(&[any], self.backend())
    }

    fn prefill(&mut self) -> Result<Batch> {
        let inputs: Vec<SampleInput<'_>> = self
            .open
            .iter()
            .map(|i| SampleInput {
                labels: &[],
                ..self.prompts[*i].input
            })
            .collect();
        let mut batch = self.model.collate(&inputs, self.backend())?;
        // A prompt that wants no token is not in the batch and owns no row.
        let mut capacities = vec![0; self.prompts.len()];
        self.last_positions = vec![0; self.prompts.len()];
        for (n, i) in self.open.iter().enumerate() {
            capacities[*i] = self.prompts[*i].cached_tokens();
            self.last_positions[*i] = batch.positions[batch.starts()[n + 1] - 1];
        }
        let shape = self.model.cache_shape();
        let mut cache = KvCache::new(self.backend(), shape, &capacities)?;
        if let Some(cross) = &batch.cross {
            let mut features = vec![0..0; self.prompts.len()];
            let mut end = 0;
            for (i, features) in features.iter_mut().enumerate() {
                if let Ok(n) = self.open.binary_search(&i) {
                    *features = cross.features[n].clone();
                    end = features.end;
                } else {
                    *features = end..end;
                }
            }
            cache = cache.with_features(features);
        }
        let cache = Arc::new(cache);
        let lengths: Vec<(usize, usize)> = self
            .open
            .iter()
            .map(|i| (*i, self.prompts[*i].input.input_ids.len()))
            .collect();
        batch.cache = Some(CachePass::prefill(cache.clone(), &lengths, self.backend())?);
        self.cache = Some(cache);
        Ok(batch)
    }

    fn decode(&self, cache: Arc<KvCache>) -> Result<Batch> {
        let (mut tokens, mut positions, mut cached) = (Vec::new(), Vec::new(), Vec::new());
        for i in &self.open {
            let answer = &self.answers[*i];
            tokens.extend(answer.last());
            positions.push(self.last_positions[*i] + answer.len() as i32);
            let before = self.prompts[*i].input.input_ids.len() + answer.len() - 1;
            cached.push((*i, before));
        }
        let mut batch = self
            .model
            .collate_next(&tokens, &positions, self.backend())?;
        batch.cross = cache.cross_rows(&self.open, self.backend())?;
        batch.cache = Some(CachePass::decode(cache, &cached, self.backend())?);
        Ok(batch)
    }
}
