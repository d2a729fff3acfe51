//! What a run trains on, as far as its results depend on it.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Identity of a run's base weights and data, stored in its checkpoints and compared when it continues.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Origin {
    /// Hash of the frozen base weights, or `random`.
    pub(crate) base: String,
    /// Hash of the samples in their order, and of their images.
    pub(crate) data: String,
    /// Settings and small files of the model that change what is computed: flag or file name, and value or hash.
    pub(crate) settings: BTreeMap<String, String>,
}
