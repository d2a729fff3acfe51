//! Conversion of per-projection adapters of a fused layer to peft's format.
//!
//! For `p` projections with `n_i` rows, training has A `[p r, k]` and B `[n, r]`. The rows of B of projection `i`
//! multiply rows `i r..(i + 1) r` of A only. This equals one adapter of rank `p r` with a block-diagonal B
//! `[n, p r]`, which peft can load.

use engine::EngineError;
use kernels::Tensor;
use models::VisionLanguageModel;
use models::params::ADAPTER_PREFIX;
use std::collections::BTreeMap;

/// Rows of the projections of the layer whose B is `name`; `None` for other tensors.
fn parts<'m>(model: &'m dyn VisionLanguageModel, name: &str) -> Option<&'m [usize]> {
    let path = name.strip_prefix(ADAPTER_PREFIX)?;
    let parts = model
        .split_adapters()
        .get(path.strip_suffix(".lora_B.weight")?)?;
    Some(parts)
}

/// Shape in which the tensor `name` of shape `dims` is written.
pub(crate) fn shape(model: &dyn VisionLanguageModel, name: &str, dims: &[usize]) -> Vec<usize> {
    match (parts(model, name), dims) {
        (Some(parts), &[n, r]) => vec![n, parts.len() * r],
        _ => dims.to_vec(),
    }
}

/// Values to write for the tensor `name`, if they differ from the values of `tensor`; otherwise `None`.
pub(crate) fn joined(
    model: &dyn VisionLanguageModel,
    name: &str,
    tensor: &Tensor,
) -> Result<Option<Vec<f32>>, EngineError> {
    match parts(model, name) {
        Some(parts) => Ok(Some(block_diagonal(&tensor.to_f32_vec()?, parts))),
        None => Ok(None),
    }
}

/// Block-diagonal `[n, p r]` of B `[n, r]`: each row is in the columns of its projection.
fn block_diagonal(b: &[f32], parts: &[usize]) -> Vec<f32> {
    let n: usize = parts.iter().sum();
    let (r, p) = (b.len() / n.max(1), parts.len());
    let mut joined = vec![0.0; n * p * r];
    let owners = parts
        .iter()
        .enumerate()
        .flat_map(|(i, rows)| vec![i; *rows]);
    for (row, owner) in owners.enumerate() {
        let start = (row * p + owner) * r;
        joined[start..start + r].copy_from_slice(&b[row * r..][..r]);
    }
    joined
}

/// `value` of the number of projections of each layer, by the last component of the layers' paths.
pub(crate) fn patterns<T>(
    model: &dyn VisionLanguageModel,
    value: impl Fn(usize) -> T,
) -> BTreeMap<&str, T> {
    let layers = model.split_adapters().iter();
    layers
        .map(|(path, parts)| {
            let last = path.rsplit('.').next().unwrap_or(path);
            (last, value(parts.len()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_in_the_columns_of_their_projection() {
        let b = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let wanted = [1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 5.0, 6.0];
        assert_eq!(block_diagonal(&b, &[2, 1]), wanted);
    }
}
