//! Comparing a run with what a pack stores.

use super::pack::{Case, Expected, Run, Stored};
use crate::tolerance;
use anyhow::Result;
use models::data::{EncodedSample, IGNORED};
use models::minicpm::positions::position_ids;
use models::processor::Normalization;
use std::collections::BTreeMap;
use std::fmt;

/// One compared quantity.
#[derive(Clone, PartialEq, Debug)]
pub struct Comparison {
    /// Its name in the pack.
    pub quantity: String,
    /// Largest absolute difference; infinite when sizes differ or nothing was computed.
    pub max_abs_diff: f64,
    /// The bound it must keep; zero where equality is asked for.
    pub tolerance: f64,
    /// What is odd about it, if anything.
    pub note: Option<String>,
}

impl Comparison {
    /// Whether the difference keeps the bound.
    #[must_use]
    pub fn ok(&self) -> bool {
        self.max_abs_diff <= self.tolerance
    }

    fn failed(quantity: &str, note: impl Into<String>) -> Self {
        Self {
            quantity: quantity.to_owned(),
            max_abs_diff: f64::INFINITY,
            tolerance: 0.0,
            note: Some(note.into()),
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.ok() { "ok" } else { "FAIL" };
        write!(
            f,
            "{:<72} {:>9.2e}  tolerance {:>8.1e}  {verdict}",
            self.quantity, self.max_abs_diff, self.tolerance
        )?;
        match &self.note {
            Some(note) => write!(f, "  ({note})"),
            None => Ok(()),
        }
    }
}

/// What a run of a case computed, whoever ran it.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CaseRun {
    /// Observed values by name (`vision.embed`, `vision_features`, `hidden.0`, ...), rows packed.
    pub taps: BTreeMap<String, Vec<f32>>,
    /// f32 logits of all rows.
    pub logits: Option<Vec<f32>>,
    /// The mean loss.
    pub loss: Option<f64>,
    /// Gradients of the mean loss, by parameter.
    pub grads: BTreeMap<String, Vec<f32>>,
}

/// Compares floats entry by entry.
#[must_use]
pub fn compare_floats(quantity: &str, got: &[f32], want: &[f32], tolerance: f64) -> Comparison {
    if got.len() != want.len() {
        let note = format!("{} values, expected {}", got.len(), want.len());
        return Comparison::failed(quantity, note);
    }
    let difference = got
        .iter()
        .zip(want)
        .map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs())
        // A NaN must not pass as "not larger".
        .fold(
            0.0f64,
            |m, d| if d.is_nan() { f64::INFINITY } else { m.max(d) },
        );
    Comparison {
        quantity: quantity.to_owned(),
        max_abs_diff: difference,
        tolerance,
        note: None,
    }
}

/// Compares integers, which must be equal.
#[must_use]
pub fn compare_ints(quantity: &str, got: &[i64], want: &[i64]) -> Comparison {
    if got.len() != want.len() {
        let note = format!("{} values, expected {}", got.len(), want.len());
        return Comparison::failed(quantity, note);
    }
    let pairs = got.iter().zip(want);
    let difference = pairs.map(|(a, b)| a.abs_diff(*b)).max().unwrap_or(0);
    Comparison {
        quantity: quantity.to_owned(),
        max_abs_diff: difference as f64,
        tolerance: 0.0,
        note: None,
    }
}

/// Compares the losses along a trajectory.
#[must_use]
pub fn compare_trajectory(
    quantity: &str,
    losses: &[f64],
    want: &Run,
    tolerance: f64,
) -> Comparison {
    let narrow = |values: &[f64]| values.iter().map(|v| *v as f32).collect::<Vec<f32>>();
    compare_floats(quantity, &narrow(losses), &narrow(&want.losses), tolerance)
}

/// Compares everything a case stores that a run of the model computes.
///
/// # Errors
/// When a stored tensor has the wrong kind.
pub fn compare_run(case: &Case, run: &CaseRun) -> Result<Vec<Comparison>> {
    let expected = &case.expected;
    let largest = run
        .grads
        .values()
        .flatten()
        .fold(0f32, |m, g| m.max(g.abs()));
    let mut all = Vec::new();
    for (name, stored) in &expected.0 {
        let comparison = match name.split_once('.').map_or(name.as_str(), |(kind, _)| kind) {
            "input_ids" | "labels" | "position_ids" | "image_bound" | "tgt_sizes"
            | "pixel_values" | "pixel_u8" => continue,
            _ if name == "vision.pos_ids" => continue,
            "loss" => loss(run, stored)?,
            "logits" => match &run.logits {
                Some(logits) => {
                    compare_floats(name, logits, stored.floats()?, tolerance::ACTIVATION)
                }
                None => Comparison::failed(name, "not computed"),
            },
            "logits_labelled" => labelled(expected, run, stored)?,
            "vision" => vision(expected, run, name, stored)?,
            "vision_features" | "inputs_embeds" | "hidden" => match run.taps.get(name) {
                Some(got) => compare_floats(name, got, stored.floats()?, tolerance::ACTIVATION),
                None => Comparison::failed(name, "not computed"),
            },
            "grad" | "gradnorm" | "gradsub" => gradient(run, name, stored, f64::from(largest))?,
            _ => Comparison::failed(name, "not a known quantity"),
        };
        all.push(comparison);
    }
    Ok(all)
}

fn loss(run: &CaseRun, stored: &Stored) -> Result<Comparison> {
    Ok(match run.loss {
        Some(loss) => compare_floats("loss", &[loss as f32], stored.floats()?, tolerance::LOSS),
        None => Comparison::failed("loss", "not computed"),
    })
}

/// The logits of the supervised rows, in order.
fn labelled(expected: &Expected, run: &CaseRun, stored: &Stored) -> Result<Comparison> {
    const NAME: &str = "logits_labelled";
    let labels = expected.get("labels")?.ints()?;
    let Some(logits) = &run.logits else {
        return Ok(Comparison::failed(NAME, "not computed"));
    };
    let vocab = stored.shape.last().copied().unwrap_or(1);
    let supervised = |(_, label): &(_, &i64)| **label != i64::from(IGNORED);
    let rows = logits.chunks(vocab).zip(labels).filter(supervised);
    let got: Vec<f32> = rows.flat_map(|(row, _)| row).copied().collect();
    Ok(compare_floats(
        NAME,
        &got,
        stored.floats()?,
        tolerance::ACTIVATION,
    ))
}

/// A value of the vision tower, stored `[N, longest, c]` with meaningless rows behind each slice.
fn vision(expected: &Expected, run: &CaseRun, name: &str, stored: &Stored) -> Result<Comparison> {
    let Some(got) = run.taps.get(name) else {
        return Ok(Comparison::failed(name, "not computed"));
    };
    let sizes = expected.get("tgt_sizes")?.ints()?;
    let (want, per_slice) = (stored.floats()?, stored.shape[1..].iter().product());
    let width = stored.shape.last().copied().unwrap_or(1);
    let valid = want.chunks(per_slice).zip(sizes.chunks(2));
    let want: Vec<f32> = valid
        .flat_map(|(slice, size)| &slice[..(size[0] * size[1]) as usize * width])
        .copied()
        .collect();
    Ok(compare_floats(name, got, &want, tolerance::ACTIVATION))
}

/// A gradient in one of its three stored forms: in full, its L2 norm, or every n-th entry.
fn gradient(run: &CaseRun, name: &str, stored: &Stored, largest: f64) -> Result<Comparison> {
    let (form, param) = name.split_once('.').unwrap_or((name, ""));
    let Some(got) = run.grads.get(param) else {
        return Ok(Comparison::failed(name, "not computed"));
    };
    let own = got.iter().fold(0f64, |m, g| m.max(f64::from(g.abs())));
    let bound = tolerance::gradient(own, largest);
    let want = stored.floats()?;
    Ok(match form {
        "gradnorm" => {
            let square: f64 = got.iter().map(|g| f64::from(*g).powi(2)).sum();
            let norm = square.sqrt();
            // What the bound on single entries allows for the norm of so many of them, where the
            // share of the own size is taken of the norm itself.
            let noise = tolerance::GRADIENT_OF_MODEL * largest * (got.len() as f64).sqrt();
            let bound = tolerance::GRADIENT_OF_OWN * norm + noise;
            compare_floats(name, &[norm as f32], want, bound)
        }
        "gradsub" => {
            let step = got.len().div_ceil(192).max(1);
            let sampled: Vec<f32> = got.iter().step_by(step).copied().collect();
            compare_floats(name, &sampled, want, bound)
        }
        _ => compare_floats(name, got, want, bound),
    })
}

/// Compares everything a case stores about the inputs: ids, labels, positions, places of pictures,
/// sizes, learned positions and pixels, all exactly.
///
/// # Errors
/// When a stored tensor has the wrong kind.
pub fn compare_inputs(
    case: &Case,
    samples: &[EncodedSample],
    normalization: &Normalization,
    grid_side: usize,
) -> Result<Vec<Comparison>> {
    let mut all = Vec::new();
    let longest = samples.iter().map(|s| s.input_ids.len()).max().unwrap_or(0);
    for (name, stored) in &case.expected.0 {
        let got = match name.as_str() {
            "input_ids" => padded(samples, longest, 0, |s| &s.input_ids),
            "labels" => padded(samples, longest, i64::from(IGNORED), |s| &s.labels),
            "position_ids" => {
                let row = |s: &EncodedSample| {
                    let len = s.input_ids.len();
                    (0..longest).map(move |i| if i < len { i as i64 } else { 0 })
                };
                samples.iter().flat_map(row).collect()
            }
            "tgt_sizes" => {
                let slices = samples.iter().flat_map(|s| &s.slices);
                slices
                    .flat_map(|s| [s.rows as i64, s.cols as i64])
                    .collect()
            }
            "vision.pos_ids" => slice_rows(samples, &stored.shape, |slice, row| {
                let ids = position_ids(slice.rows, slice.cols, grid_side);
                row.iter_mut()
                    .zip(ids)
                    .for_each(|(to, id)| *to = i64::from(id));
            }),
            "pixel_u8" | "pixel_values" => {
                all.push(pixels(name, samples, stored, normalization)?);
                continue;
            }
            _ => match name.strip_prefix("image_bound") {
                Some(row) => bounds(samples, row),
                None => continue,
            },
        };
        all.push(compare_ints(name, &got, stored.ints()?));
    }
    Ok(all)
}

fn padded<'a>(
    samples: &'a [EncodedSample],
    longest: usize,
    filler: i64,
    field: impl Fn(&'a EncodedSample) -> &'a [i32],
) -> Vec<i64> {
    let row = |s: &'a EncodedSample| {
        let values = field(s);
        (0..longest).map(move |i| values.get(i).map_or(filler, |v| i64::from(*v)))
    };
    samples.iter().flat_map(row).collect()
}

/// Bounds of the row in `.r`, of the only row without it.
fn bounds(samples: &[EncodedSample], row: &str) -> Vec<i64> {
    let row = row.trim_start_matches('.').parse().unwrap_or(0);
    let bounds = samples
        .get(row)
        .map_or(&[][..], |s: &EncodedSample| &s.image_bounds);
    bounds
        .iter()
        .flat_map(|(a, b)| [*a as i64, *b as i64])
        .collect()
}

/// One padded row of zeros per slice, filled by `fill`.
fn slice_rows(
    samples: &[EncodedSample],
    shape: &[usize],
    fill: impl Fn(&models::data::Slice, &mut [i64]),
) -> Vec<i64> {
    let width: usize = shape[1..].iter().product();
    let slices: Vec<_> = samples.iter().flat_map(|s| &s.slices).collect();
    let mut all = vec![0; slices.len() * width];
    for (slice, row) in slices.iter().zip(all.chunks_mut(width.max(1))) {
        fill(slice, row);
    }
    all
}

/// Pixels of the real patches; what lies behind a shorter slice is not compared.
fn pixels(
    name: &str,
    samples: &[EncodedSample],
    stored: &Stored,
    normalization: &Normalization,
) -> Result<Comparison> {
    let slices: Vec<_> = samples.iter().flat_map(|s| &s.slices).collect();
    let &[count, channels, side, width] = &stored.shape[..] else {
        return Ok(Comparison::failed(name, "not [N, 3, side, side * L]"));
    };
    if count != slices.len() {
        let note = format!("{} slices, expected {count}", slices.len());
        return Ok(Comparison::failed(name, note));
    }
    let mut difference = 0f64;
    for (n, slice) in slices.iter().enumerate() {
        let per_patch = channels * side * side;
        for (i, byte) in slice.patches.iter().enumerate() {
            let (patch, within) = (i / per_patch, i % per_patch);
            let (c, row, col) = (within / (side * side), within / side % side, within % side);
            let at = ((n * channels + c) * side + row) * width + side * patch + col;
            let apart = if name == "pixel_u8" {
                stored.ints()?[at].abs_diff(i64::from(*byte)) as f64
            } else {
                let value = normalization.normalize(c, *byte);
                (f64::from(value) - f64::from(stored.floats()?[at])).abs()
            };
            difference = difference.max(apart);
        }
    }
    Ok(Comparison {
        quantity: name.to_owned(),
        max_abs_diff: difference,
        tolerance: 0.0,
        note: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden::Data;

    fn stored(values: &[f32]) -> Stored {
        Stored {
            shape: vec![values.len()],
            data: Data::Floats(values.to_vec()),
        }
    }

    #[test]
    fn a_nan_or_a_missing_value_never_passes() {
        assert!(!compare_floats("x", &[f32::NAN], &[0.0], 1.0).ok());
        assert!(!compare_floats("x", &[0.0], &[0.0, 0.0], 1.0).ok());
        assert!(compare_floats("x", &[0.5], &[0.0], 0.5).ok());
        assert!(!compare_ints("x", &[1], &[2]).ok());
        assert!(!loss(&CaseRun::default(), &stored(&[1.0])).unwrap().ok());
    }

    #[test]
    fn gradients_compare_in_all_three_forms() {
        let grad: Vec<f32> = (0..400).map(|i| i as f32 / 400.0).collect();
        let run = CaseRun {
            grads: [("w".to_owned(), grad.clone())].into(),
            ..CaseRun::default()
        };
        let sub: Vec<f32> = grad.iter().step_by(3).copied().collect();
        let norm = grad.iter().map(|g| g * g).sum::<f32>().sqrt();
        let check =
            |name: &str, values: &[f32]| gradient(&run, name, &stored(values), 1.0).unwrap().ok();
        assert!(check("grad.w", &grad) && check("gradsub.w", &sub));
        assert!(check("gradnorm.w", &[norm]) && !check("gradnorm.w", &[norm * 1.001]));
        let mut wrong = grad;
        wrong[7] += 2e-4;
        assert!(!check("grad.w", &wrong));
        assert!(!check("grad.other", &sub));
    }
}
