//! What one pass computes on: packed samples, without padding.
//!
//! Shapes: `T` tokens of all samples, `P` patches of all slices, `N` slices, `Q` features per
//! slice, `M` spliced rows.

use crate::cogvlm::{CogAgentTables, Experts, PrefixTables};
use crate::data::Slice;
use crate::eva::EvaTables;
use crate::generate::CachePass;
use crate::glm41v::Glm41vTables;
use crate::nn::Rotary;
use crate::ops::Sequences;
use crate::processor::Normalization;
use crate::{ModelError, Result, SampleInput};
use kernels::{Backend, DType, IGNORED_LABEL, Shape, Tag, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// Where features of pictures stand among the tokens.
#[derive(Clone, Debug)]
pub struct Splice {
    /// i32 `[M]`: token rows that features replace.
    pub rows: Tensor,
    /// i32 `[M]`: the features that replace them.
    pub sources: Tensor,
}

/// Pictures of a batch: the slices of all samples, one behind the other.
#[derive(Clone, Debug)]
pub struct VisionBatch {
    /// `[P, 3 * patch * patch]` in the compute dtype: channel, pixel row, pixel column.
    pub patches: Tensor,
    /// The patches of a slice attend to each other.
    pub sequences: Sequences,
    /// Where the features go.
    pub splice: Splice,
    /// What only one family's tower needs.
    pub tables: VisionTables,
}

/// Index tables that one family's vision tower needs.
#[derive(Clone, Debug)]
pub enum VisionTables {
    /// MiniCPM.
    MiniCpm(MiniCpmTables),
    /// CogVLM, CogVLM2 and GLM-4V.
    Eva(Box<EvaTables>),
    /// GLM-4.1V.
    Glm41v(Glm41vTables),
    /// CogAgent.
    CogAgent(Box<CogAgentTables>),
}

impl VisionTables {
    /// The tables of MiniCPM's tower.
    ///
    /// # Errors
    /// [`ModelError::ForeignBatch`] for those of another tower.
    pub fn minicpm(&self) -> Result<&MiniCpmTables> {
        match self {
            Self::MiniCpm(tables) => Ok(tables),
            _ => Err(ModelError::ForeignBatch {
                expected: "MiniCPM",
            }),
        }
    }

    /// The tables of EVA's tower.
    ///
    /// # Errors
    /// [`ModelError::ForeignBatch`] for those of another tower.
    pub fn eva(&self) -> Result<&EvaTables> {
        match self {
            Self::Eva(tables) => Ok(tables),
            Self::CogAgent(tables) => Ok(&tables.eva),
            _ => Err(ModelError::ForeignBatch { expected: "EVA" }),
        }
    }

    /// The tables of CogAgent's towers.
    ///
    /// # Errors
    /// [`ModelError::ForeignBatch`] for those of other towers.
    pub fn cogagent(&self) -> Result<&CogAgentTables> {
        match self {
            Self::CogAgent(tables) => Ok(tables),
            _ => Err(ModelError::ForeignBatch {
                expected: "CogAgent",
            }),
        }
    }

    /// The tables of GLM-4.1V's tower.
    ///
    /// # Errors
    /// [`ModelError::ForeignBatch`] for those of another tower.
    pub fn glm41v(&self) -> Result<&Glm41vTables> {
        match self {
            Self::Glm41v(tables) => Ok(tables),
            _ => Err(ModelError::ForeignBatch {
                expected: "GLM-4.1V",
            }),
        }
    }
}

/// Tables of MiniCPM's tower and resampler.
#[derive(Clone, Debug)]
pub struct MiniCpmTables {
    /// i32 `[P]`: row of the learned position table.
    pub position_ids: Tensor,
    /// i32 `[P]`: patch row and patch column inside the slice.
    pub patch_coords: [Tensor; 2],
    /// Largest patch row and column plus one.
    pub grid: [usize; 2],
    /// The queries of a slice attend to its patches.
    pub resample: Sequences,
    /// i32 `[N * Q]`: `0..Q` for every slice.
    pub query_index: Tensor,
}

/// Tokens that attend to features beside their own sequence.
#[derive(Clone, Debug)]
pub struct CrossRows {
    /// i32: their rows; all rows when absent.
    pub rows: Option<Tensor>,
    /// These rows against the features of their sample.
    pub sequences: Sequences,
    /// Each sample's features, among all; empty for a sample without.
    pub features: Vec<Range<usize>>,
}

impl CrossRows {
    /// For samples of a number of tokens and their ascending ranges of `features` features; `None` when no sample has
    /// any. Features of no sample lie between the sequences as a sequence without queries.
    ///
    /// # Errors
    /// When memory runs out.
    pub(crate) fn new(
        samples: &[(usize, Range<usize>)],
        features: usize,
        backend: &dyn Backend,
    ) -> Result<Option<Self>> {
        let (mut tokens, mut rows): (usize, Vec<i32>) = (0, Vec::new());
        let (mut q_starts, mut k_starts) = (vec![0], vec![0]);
        let mut close = |queries: usize, keys: usize| {
            if k_starts.last() != Some(&keys) {
                q_starts.push(queries);
                k_starts.push(keys);
            }
        };
        for (count, own) in samples {
            if !own.is_empty() {
                close(rows.len(), own.start);
                rows.extend((tokens..tokens + count).map(|row| row as i32));
                close(rows.len(), own.end);
            }
            tokens += count;
        }
        if rows.is_empty() {
            return Ok(None);
        }
        close(rows.len(), features);
        let some = rows.len() < tokens;
        Ok(Some(Self {
            rows: some
                .then(|| upload(backend, &rows, &[rows.len()]))
                .transpose()?,
            sequences: Sequences {
                q_starts: q_starts.into(),
                k_starts: k_starts.into(),
                causal: false,
            },
            features: samples.iter().map(|(_, own)| own.clone()).collect(),
        }))
    }
}

/// One pass: the tokens of all samples, one sample behind the other.
#[derive(Clone, Debug)]
pub struct Batch {
    /// i32 `[T]`.
    pub input_ids: Tensor,
    /// i32 `[T]`, already shifted.
    pub labels: Tensor,
    /// Number of supervised rows.
    pub supervised: usize,
    /// Positions of the tokens within their samples.
    pub positions: Arc<[i32]>,
    /// Their angles.
    pub rotary: Rotary,
    /// Samples, causal.
    pub sequences: Sequences,
    /// i32, one per sample: its last row.
    pub last_rows: Tensor,
    /// Which rows which expert computes; absent when all rows are text.
    pub experts: Option<Experts>,
    /// i32: rows of padding in the text, whose embedding gets no gradient.
    pub padding_rows: Option<Tensor>,
    /// Learned keys and values before those of each sample.
    pub prefix: Option<PrefixTables>,
    /// Which rows attend to features beside their sample.
    pub cross: Option<CrossRows>,
    /// Absent when no row is replaced by a feature.
    pub vision: Option<VisionBatch>,
    /// Where the decoder keeps keys and values, while generating.
    pub cache: Option<CachePass>,
}

impl Batch {
    /// Tokens of all samples.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.positions.len()
    }

    /// Rows of sample `i`: `starts[i]..starts[i + 1]`.
    #[must_use]
    pub fn starts(&self) -> &[usize] {
        &self.sequences.q_starts
    }

    /// Number of samples.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.starts().len() - 1
    }
}

/// Packs what all families pack alike. `positions` has one entry per token of all samples.
///
/// # Errors
/// When a sample has no token or other numbers of tokens and labels, or memory runs out.
pub(crate) fn pack(
    samples: &[SampleInput<'_>],
    positions: Vec<i32>,
    rotary: Rotary,
    vision: Option<VisionBatch>,
    backend: &dyn Backend,
) -> Result<Batch> {
    check_lengths(samples)?;
    let starts = starts_of(samples.iter().map(|s| s.input_ids.len()));
    let tokens = starts.last().copied().unwrap_or(0);
    let input_ids: Vec<i32> = samples.iter().flat_map(|s| s.input_ids).copied().collect();
    let labels: Vec<i32> = samples.iter().flat_map(labels).collect();
    let last_rows: Vec<i32> = starts[1..].iter().map(|end| *end as i32 - 1).collect();
    Ok(Batch {
        input_ids: upload(backend, &input_ids, &[tokens])?,
        labels: upload(backend, &labels, &[tokens])?,
        supervised: labels.iter().filter(|l| **l != IGNORED_LABEL).count(),
        rotary,
        positions: positions.into(),
        last_rows: upload(backend, &last_rows, &[last_rows.len()])?,
        vision,
        sequences: Sequences::own(starts, true),
        experts: None,
        padding_rows: None,
        prefix: None,
        cross: None,
        cache: None,
    })
}

/// Packs one token per sample, each at its position.
///
/// # Errors
/// When memory runs out.
pub(crate) fn pack_next(
    tokens: &[i32],
    positions: &[i32],
    rotary: Rotary,
    backend: &dyn Backend,
) -> Result<Batch> {
    let count = tokens.len();
    let rows: Vec<i32> = (0..count as i32).collect();
    Ok(Batch {
        input_ids: upload(backend, tokens, &[count])?,
        labels: upload(backend, &vec![IGNORED_LABEL; count], &[count])?,
        supervised: 0,
        rotary,
        positions: positions.into(),
        last_rows: upload(backend, &rows, &[count])?,
        vision: None,
        sequences: Sequences::own((0..=count).collect(), true),
        experts: None,
        padding_rows: None,
        prefix: None,
        cross: None,
        cache: None,
    })
}

fn check_lengths(samples: &[SampleInput<'_>]) -> Result<()> {
    for (i, s) in samples.iter().enumerate() {
        let labelled = s.labels.is_empty() || s.labels.len() == s.input_ids.len();
        if s.input_ids.is_empty() || !labelled {
            let (ids, labels) = (s.input_ids.len(), s.labels.len());
            return Err(ModelError::Sample {
                sample: i,
                reason: format!("{ids} tokens, {labels} labels"),
            });
        }
    }
    Ok(())
}

/// The labels of a sample, all ignored when it has none.
fn labels<'a>(sample: &SampleInput<'a>) -> impl Iterator<Item = i32> + use<'a> {
    let missing = sample.input_ids.len() - sample.labels.len();
    let none = std::iter::repeat_n(IGNORED_LABEL, missing);
    sample.labels.iter().copied().chain(none)
}

/// Fails unless a sample's slices are whole, of patches of `side` x `side` pixels.
///
/// # Errors
/// Names the sample.
pub(crate) fn check_slices(index: usize, sample: &SampleInput<'_>, side: usize) -> Result<()> {
    let whole =
        |s: &&Slice| s.rows * s.cols > 0 && s.patches.len() == s.rows * s.cols * 3 * side * side;
    match sample.slices.iter().find(|s| !whole(s)) {
        Some(s) => Err(ModelError::Sample {
            sample: index,
            reason: format!(
                "a slice of {} x {} patches has {} bytes",
                s.rows,
                s.cols,
                s.patches.len()
            ),
        }),
        None => Ok(()),
    }
}

/// The patches of all slices as pixel values `[P, 3 * side * side]` in `dtype`.
///
/// # Errors
/// When memory runs out.
pub(crate) fn pixel_values(
    slices: &[&Slice],
    side: usize,
    normalization: &Normalization,
    dtype: DType,
    backend: &dyn Backend,
) -> Result<Tensor> {
    let values: Vec<f32> = slices
        .iter()
        .flat_map(|s| normalization.normalize_patches(&s.patches, side))
        .collect();
    upload_as(backend, &values, 3 * side * side, dtype)
}

/// `values` as rows of `inner` numbers in `dtype`.
///
/// # Errors
/// When memory runs out.
pub(crate) fn upload_as(
    backend: &dyn Backend,
    values: &[f32],
    inner: usize,
    dtype: DType,
) -> Result<Tensor> {
    let wide = upload(backend, values, &[values.len() / inner, inner])?;
    if dtype == DType::F32 {
        return Ok(wide);
    }
    Ok(backend.cast(&wide, dtype)?)
}

/// `0`, then the running sum of `lengths`.
pub(crate) fn starts_of(lengths: impl Iterator<Item = usize>) -> Arc<[usize]> {
    let mut sum = 0;
    let running = lengths.map(|n| {
        sum += n;
        sum
    });
    std::iter::once(0).chain(running).collect()
}

/// A small table of a batch on the device.
///
/// # Errors
/// When memory runs out.
pub(crate) fn upload<T: kernels::Element>(
    backend: &dyn Backend,
    values: &[T],
    shape: &[usize],
) -> Result<Tensor> {
    let bytes = bytemuck::cast_slice(values);
    Ok(backend.upload(bytes, Shape::new(shape), T::DTYPE, Tag::Activations)?)
}
