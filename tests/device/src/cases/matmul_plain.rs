//! Products and layers in f32, compared with f64.

use kernels::cuda::ops::grouped::plain_variants;
use kernels::cuda::ops::matmul_plain;

use super::{Case, Effort, grouped, lora_linear, product};

/// Both tiles in every orientation; layers with adapters.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let mut cases = product::cases(&matmul_plain::variants());
    cases.extend(grouped::cases(&plain_variants(), effort));
    cases.extend(lora_linear::plain_layers(effort));
    cases
}
