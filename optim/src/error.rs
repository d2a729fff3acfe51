//! Errors of this crate.

/// Error of an optimizer, schedule or parameter group that was called wrongly. The call changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// Two chunks of one step differ in length.
    #[error("the {window} chunk has {got} elements, the gradient has {expected}")]
    LengthMismatch {
        /// Name of the chunk whose length differs, e.g. `weight`.
        window: &'static str,
        /// Length of the gradient in elements.
        expected: usize,
        /// Length of that chunk in elements.
        got: usize,
    },
    /// The rule has no update for this combination of weight and state element types.
    #[error("{optimizer} cannot step {weight} weights with the given state chunks: {expected}")]
    UnsupportedWindows {
        /// Name of the update rule.
        optimizer: &'static str,
        /// Kind of the weight chunk, e.g. `mixed bf16`.
        weight: &'static str,
        /// State that the rule needs with such weights.
        expected: &'static str,
    },
    /// The step number is 0; steps count from 1.
    #[error("step 0 does not exist: optimizer steps count from 1")]
    StepZero,
    /// A learning-rate pattern is not a regular expression.
    #[error("learning-rate pattern `{pattern}` is not a regular expression")]
    BadPattern {
        /// The pattern as given.
        pattern: String,
        /// The parser's error.
        #[source]
        source: regex::Error,
    },
    /// A number is outside its range.
    #[error("{what} must be {expected}, got {got}")]
    OutOfRange {
        /// Name of the number that is outside its range.
        what: &'static str,
        /// The valid range, in words.
        expected: &'static str,
        /// The rejected value.
        got: f64,
    },
    /// An unknown word, e.g. of a precision or schedule.
    #[error("unknown {what} `{got}`, expected one of {expected}")]
    UnknownWord {
        /// Kind of the word, e.g. `precision`.
        what: &'static str,
        /// The rejected word.
        got: String,
        /// The valid words.
        expected: &'static str,
    },
}
