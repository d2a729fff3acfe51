//! Inputs of one pass: packed samples, without padding.
//!
//! Shapes: `T` tokens of all samples, `P` patches of all slices, `N` slices, `Q` features per
//! slice, `M` spliced rows.

use crate::data::Slice;
use crate::generate::CachePass;
use crate::nn::{PrefixTables, Rotary};
use crate::ops::{RowGroups, Sequences};
use crate::processor::Normalization;
use crate::{ModelError, Result, SampleInput};
use kernels::{Backend, DType, IGNORED_LABEL, Shape, Tag, Tensor};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

/// Replacement of rows of the token embeddings `[T, D]` by image features: indices of the rows, and of the
/// features that take their place.
#[derive(Clone, Debug)]
pub struct Splice {
    /// Indices of the `M` token rows that are replaced, i32 `[M]`.
    pub rows: Tensor,
    /// For each of `rows`, the index of the image feature that replaces it, i32 `[M]`.
    pub sources: Tensor,
}

impl Splice {
    /// Replaces the token rows `rows` by the features in the order in which they come.
    ///
    /// # Errors
    /// When memory runs out.
    pub(crate) fn in_order(rows: &[i32], backend: &dyn Backend) -> Result<Self> {
        let sources: Vec<i32> = (0..rows.len() as i32).collect();
        Ok(Self {
            rows: upload(backend, rows, &[rows.len()])?,
            sources: upload(backend, &sources, &[sources.len()])?,
        })
    }
}

/// Indices of all token rows of the batch that image features replace, in order.
pub(crate) fn image_rows(samples: &[SampleInput<'_>]) -> Vec<i32> {
    let starts = starts_of(samples.iter().map(|s| s.input_ids.len()));
    let bounds = samples.iter().zip(starts.iter());
    let bounds = bounds.flat_map(|(s, first)| s.image_bounds.iter().map(move |b| (first, b)));
    let rows = bounds.flat_map(|(first, (start, end))| first + start..first + end);
    rows.map(|row| row as i32).collect()
}

/// Image inputs of a batch: the slices of all samples, one after the other. A slice is one input of the
/// vision tower, a whole image or a part of it.
#[derive(Clone, Debug)]
pub struct VisionBatch {
    /// Pixel values of all `P` patches, `[P, 3 * patch * patch]` in the compute dtype; a row is ordered by channel,
    /// pixel row, pixel column.
    pub patches: Tensor,
    /// Row range of each slice in `patches`: a patch attends to all patches of its own slice, in both
    /// directions.
    pub sequences: Sequences,
    /// Indices of the token rows that image features replace, and of those features.
    pub splice: Splice,
    /// Index tensors, such as position ids, in the form that the vision tower of the model's family needs.
    pub tables: Arc<dyn VisionTables>,
}

impl VisionBatch {
    /// Returns the index tensors as the type `T` of one family's vision tower.
    ///
    /// # Errors
    /// [`ModelError::ForeignBatch`] if the batch was packed for another tower.
    pub fn tables<T: VisionTables>(&self) -> Result<&T> {
        let tables: &dyn Any = &*self.tables;
        let expected = T::tower();
        tables
            .downcast_ref()
            .ok_or(ModelError::ForeignBatch { expected })
    }
}

/// Index tensors of a batch's images in the form that one family's vision tower needs.
pub trait VisionTables: Any + std::fmt::Debug + Send + Sync {
    /// Name of the vision tower, for error messages.
    fn tower() -> &'static str
    where
        Self: Sized;
}

/// Cross-attention of a batch: which token rows attend to image features, and to which ones.
#[derive(Clone, Debug)]
pub struct CrossRows {
    /// Indices of the token rows that attend to image features, i32; `None` means all rows of the batch.
    pub rows: Option<Tensor>,
    /// Query and key ranges of the cross-attention: the rows of a sample attend to the features of that
    /// sample's images.
    pub sequences: Sequences,
    /// For each sample, the range of its image features among those of all samples; empty for a sample
    /// without image.
    pub features: Vec<Range<usize>>,
}

impl CrossRows {
    /// For samples, each with its number of tokens and its range of the `features` features, ascending. `None` if no
    /// sample has features. Features of no sample become a sequence without queries.
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

/// Inputs of one forward pass: the tokens of all samples packed one after the other without padding, and
/// their images.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Token ids, i32 `[T]`.
    pub input_ids: Tensor,
    /// Target token ids, i32 `[T]`, already shifted: each row holds the id that it should predict, or the ignored
    /// label.
    pub labels: Tensor,
    /// Number of rows (tokens) whose label is not ignored.
    pub supervised: usize,
    /// Position of each token within its sample, `[T]`, as the rotary position embedding counts it.
    pub positions: Arc<[i32]>,
    /// Cosines and sines of the rotary position embedding, one row per token of the batch.
    pub rotary: Rotary,
    /// Row ranges of the samples: a token attends to itself and to earlier tokens of its own sample.
    pub sequences: Sequences,
    /// Index of each sample's last token row in the batch, i32 `[samples]`.
    pub last_rows: Tensor,
    /// Row indices of the text expert and of the vision expert, in this order, for a decoder that has both;
    /// `None` if the text expert computes all rows.
    pub experts: Option<RowGroups>,
    /// Indices of the text rows with the padding token, i32, whose embedding gets no gradient; `None` if
    /// there are none.
    pub padding_rows: Option<Tensor>,
    /// Index tables that place learned keys and values (p-tuning v2) before those of each sample; `None`
    /// without p-tuning.
    pub prefix: Option<PrefixTables>,
    /// Cross-attention of token rows to image features; `None` in families without it, or if no sample has
    /// features.
    pub cross: Option<CrossRows>,
    /// Image inputs of the batch; `None` if image features replace no token row.
    pub vision: Option<VisionBatch>,
    /// The key/value cache during generation; absent in training and evaluation.
    pub cache: Option<CachePass>,
}

impl Batch {
    /// Number of tokens of all samples together.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.positions.len()
    }

    /// First token row of each sample, then the number of all rows: sample `i` has the rows
    /// `starts[i]..starts[i + 1]`.
    #[must_use]
    pub fn starts(&self) -> &[usize] {
        &self.sequences.q_starts
    }

    /// Number of samples in the batch.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.starts().len() - 1
    }
}

/// Packs the inputs that all families share. `positions` has one entry per token of all samples.
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

/// Fails unless each image of a sample is one slice, and has a token range of as many rows as `rows` says of
/// the slice.
///
/// # Errors
/// Names the sample.
pub(crate) fn check_images(
    index: usize,
    sample: &SampleInput<'_>,
    rows: impl Fn(&Slice) -> Result<usize, String>,
) -> Result<()> {
    let fail = |reason: String| {
        Err(ModelError::Sample {
            sample: index,
            reason,
        })
    };
    let (bounds, slices) = (sample.image_bounds, sample.slices);
    if bounds.len() != slices.len() {
        let (bounds, slices) = (bounds.len(), slices.len());
        return fail(format!("{bounds} image positions, {slices} images"));
    }
    let (mut end_before, tokens) = (0, sample.input_ids.len());
    for ((start, end), slice) in bounds.iter().zip(slices) {
        let rows = match rows(slice) {
            Ok(rows) => rows,
            Err(reason) => return fail(reason),
        };
        if start + rows != *end || end_before > *start || *end > tokens {
            return fail(format!(
                "picture at {start}..{end}, expected {rows} of {tokens} tokens"
            ));
        }
        end_before = *end;
    }
    Ok(())
}

/// Fails unless a sample's slices are whole, of patches of `side` x `side` pixels.
///
/// # Errors
/// Names the sample.
pub(crate) fn check_slices(index: usize, sample: &SampleInput<'_>, side: usize) -> Result<()> {
    let whole = |s: &&Slice| {
        let patches = s.frames * s.rows * s.cols;
        patches > 0 && s.patches.len() == patches * 3 * side * side
    };
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

/// Cumulative sums of `lengths`, from 0.
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
