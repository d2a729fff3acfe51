//! What can be wrong with a call into this crate.

/// An optimizer, schedule or group was used wrongly; nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// Two windows of one step differ in length.
    #[error("the {window} chunk has {got} elements, the gradient has {expected}")]
    LengthMismatch {
        /// Which window.
        window: &'static str,
        /// Elements of the gradient.
        expected: usize,
        /// Elements of the window.
        got: usize,
    },
    /// The element types of weight and state windows do not go together.
    #[error("{optimizer} cannot step {weight} weights with the given state chunks: {expected}")]
    UnsupportedWindows {
        /// The update rule.
        optimizer: &'static str,
        /// Kind of the weight window.
        weight: &'static str,
        /// What the rule needs beside such weights.
        expected: &'static str,
    },
    /// Steps are counted from one.
    #[error("step 0 does not exist: optimizer steps count from 1")]
    StepZero,
    /// A name pattern is not a regular expression.
    #[error("learning-rate pattern `{pattern}` is not a regular expression")]
    BadPattern {
        /// The text given.
        pattern: String,
        /// Why it does not parse.
        #[source]
        source: regex::Error,
    },
    /// A number lies outside its range.
    #[error("{what} must be {expected}, got {got}")]
    OutOfRange {
        /// Which number.
        what: &'static str,
        /// The range.
        expected: &'static str,
        /// The value given.
        got: f64,
    },
    /// A word that names nothing.
    #[error("unknown {what} `{got}`, expected one of {expected}")]
    UnknownWord {
        /// What was to be named.
        what: &'static str,
        /// The word given.
        got: String,
        /// The words that exist.
        expected: &'static str,
    },
}
