//! Errors of a model, its tape and its description.

use engine::{EngineError, UnitId};
use kernels::KernelError;

/// Error of building a model, of packing its inputs, or of running it forward and backward.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// An operation of the device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A call of the engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Weights could not be read.
    #[error(transparent)]
    Weights(#[from] crate::weights::WeightError),
    /// A value was used under a tape or scope that did not make it.
    #[error("{op}: the value belongs to another tape or scope; pass it as an input of the segment")]
    ForeignVar {
        /// Name of the operation that received the value.
        op: &'static str,
    },
    /// A unit was used out of the order in which the model declares its units, or twice in a pass.
    #[error("unit {unit:?} was requested after unit {after:?}")]
    UnitOrder {
        /// The unit that was requested.
        unit: UnitId,
        /// The last unit that was used before it.
        after: UnitId,
    },
    /// A segment's recompute gave other values than its first run.
    #[error("output {output} of unit {unit:?} differs between forward and recompute")]
    RecomputeDiffers {
        /// The segment's unit.
        unit: UnitId,
        /// Index of the segment's output that differs.
        output: usize,
    },
    /// A segment's input was not stored, and no earlier segment can recompute it.
    #[error("the input of unit {unit:?} was not stored, and no earlier unit recomputes it")]
    NotRecomputed {
        /// The segment's unit.
        unit: UnitId,
    },
    /// An operation inside a tile of rows has parameters whose gradients cannot be continued over tiles.
    #[error(
        "an operation in tiles of rows sums over rows for other gradients than those of linear layers"
    )]
    NotInTiles,
    /// The gradient of per-token losses is not one factor for all tokens, as it must be.
    #[error("{op}: the gradient of the losses must be one factor for all rows")]
    LossGradient {
        /// Name of the operation that computes the losses.
        op: &'static str,
    },
    /// Backward began at a value that depends on nothing trainable.
    #[error("the value does not depend on any trainable parameter or leaf")]
    NoGradient,
    /// The caller of a pipeline schedule has no further micro-batch.
    #[error("a micro-batch of the optimizer step is missing")]
    NoBatch,
    /// A segment reads a value of another pipeline stage that was not sent.
    #[error("unit {unit:?} reads output {output} of another pipeline stage, which was not sent")]
    NotReceived {
        /// The unit of the segment.
        unit: UnitId,
        /// Index of the value among the outputs of the pass's segments.
        output: u32,
    },
    /// A configuration field has a value this model cannot run with.
    #[error("model configuration: {field} is {value}: {reason}")]
    Config {
        /// Name of the configuration field.
        field: &'static str,
        /// Value of the field.
        value: String,
        /// Why the model cannot run with this value.
        reason: &'static str,
    },
    /// A pattern that selects parameters is not valid, or matches none.
    #[error("{word:?} in a list of parts: {reason}")]
    Selection {
        /// The word or expression.
        word: String,
        /// What is wrong with the word or expression.
        reason: String,
    },
    /// A weight that is quantized in the files would train. A quantized weight has no values that an update could change.
    #[error("{name} is quantized in 4 or 8 bits and cannot train")]
    QuantizedTrains {
        /// Name of the weight.
        name: String,
    },
    /// A run quantizes weights, but selects none that does not train.
    #[error("no linear layer that does not train is selected to be quantized")]
    NothingQuantized,
    /// An adapter target matches no adaptable layer, or one that cannot take an adapter.
    #[error("adapter target {target:?}: {reason}")]
    AdapterTarget {
        /// The regular expression or projection name.
        target: String,
        /// What is wrong with the target.
        reason: String,
    },
    /// A module to train in full beside adapters has no parameters.
    #[error("module to save {module:?}: the model has no such module")]
    SavedModule {
        /// The module, by the last parts of its path.
        module: String,
    },
    /// A batch was packed by a model of another family.
    #[error("the images of the batch are not those of {expected}")]
    ForeignBatch {
        /// Family of the expected images.
        expected: &'static str,
    },
    /// The scores of the next token are infinite or NaN.
    #[error("the scores of token {token} of the answer to prompt {prompt} are infinite or NaN")]
    NotFinite {
        /// Index of the prompt in its batch, from 0.
        prompt: usize,
        /// Number of tokens of the answer before it.
        token: usize,
    },
    /// An encoded sample does not fit the model.
    #[error("sample {sample}: {reason}")]
    Sample {
        /// Index of the sample in its batch, from 0.
        sample: usize,
        /// What does not fit the model.
        reason: String,
    },
}

/// Result of an operation of a model, with [`ModelError`] as its error.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;
