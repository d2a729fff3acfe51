//! Comparison of a run with the values of a pack.

use super::pack::Stored;
use crate::tolerance::{self, Roundings};
use anyhow::Result;
use std::collections::BTreeMap;
use std::fmt;

/// One compared quantity.
#[derive(Clone, PartialEq, Debug)]
pub struct Comparison {
    /// Its name in the pack.
    pub quantity: String,
    /// Largest absolute difference; infinite when sizes differ or nothing was computed.
    pub max_abs_diff: f64,
    /// Largest allowed difference; zero requires equality.
    pub tolerance: f64,
    /// What is odd about it, if anything.
    pub note: Option<String>,
}

impl Comparison {
    /// Whether the difference is within the tolerance.
    #[must_use]
    pub fn ok(&self) -> bool {
        self.max_abs_diff <= self.tolerance
    }

    /// A quantity that cannot be compared.
    #[must_use]
    pub fn failed(quantity: &str, note: impl Into<String>) -> Self {
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

/// Results of a run of a case.
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
    /// Number of roundings of a forward pass, counted where it was observed.
    pub roundings: Roundings,
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
        // `f64::max` would ignore a NaN.
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

/// Compares the mean loss.
///
/// # Errors
/// When the stored tensor holds integers.
pub fn compare_loss(run: &CaseRun, stored: &Stored) -> Result<Comparison> {
    Ok(match run.loss {
        Some(loss) => compare_floats("loss", &[loss as f32], stored.floats()?, tolerance::LOSS),
        None => Comparison::failed("loss", "not computed"),
    })
}

/// Compares stored activations with computed ones, relative to the magnitude of the stored ones.
///
/// # Errors
/// When the stored tensor holds integers.
pub fn compare_activation(
    name: &str,
    got: Option<&Vec<f32>>,
    stored: &Stored,
) -> Result<Comparison> {
    let bound = tolerance::activation(stored.floats()?);
    compare_computed(name, got, stored, bound)
}

/// Compares a stored value with a computed one. A missing computed value is a failure.
///
/// # Errors
/// When the stored tensor holds integers.
pub fn compare_computed(
    name: &str,
    got: Option<&Vec<f32>>,
    stored: &Stored,
    bound: f64,
) -> Result<Comparison> {
    Ok(match got {
        Some(got) => compare_floats(name, got, stored.floats()?, bound),
        None => Comparison::failed(name, "not computed"),
    })
}

/// Largest entry of all gradients of a run.
#[must_use]
pub fn largest_gradient(run: &CaseRun) -> f64 {
    let entries = run.grads.values().flatten();
    f64::from(entries.fold(0f32, |m, g| m.max(g.abs())))
}

/// Compares a gradient in one of its three stored forms: in full (`grad.`), its L2 norm (`gradnorm.`), or every n-th
/// entry (`gradsub.`). `largest` is the largest gradient entry of the whole model.
///
/// # Errors
/// When the stored tensor holds integers.
pub fn compare_gradient(
    run: &CaseRun,
    name: &str,
    stored: &Stored,
    largest: f64,
) -> Result<Comparison> {
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
            // Tolerance of the norm: the bound on single entries, summed over all entries, plus a share of the norm
            // itself.
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
    fn nan_and_missing_values_never_pass() {
        assert!(!compare_floats("x", &[f32::NAN], &[0.0], 1.0).ok());
        assert!(!compare_floats("x", &[0.0], &[0.0, 0.0], 1.0).ok());
        assert!(compare_floats("x", &[0.5], &[0.0], 0.5).ok());
        assert!(!compare_ints("x", &[1], &[2]).ok());
        assert!(
            !compare_loss(&CaseRun::default(), &stored(&[1.0]))
                .unwrap()
                .ok()
        );
    }

    #[test]
    fn large_activations_are_judged_relative_to_their_magnitude() {
        let off = |largest: f32, error: f32| {
            let got = vec![largest + error, 0.0];
            let compared = compare_activation("x", Some(&got), &stored(&[largest, 0.0]));
            compared.unwrap().ok()
        };
        assert!(off(10.0, 6e-5) && !off(10.0, 1.5e-4));
        assert!(off(-10.0, 6e-5) && !off(1.0, 6e-5));
    }

    #[test]
    fn gradients_are_compared_in_all_three_stored_forms() {
        let grad: Vec<f32> = (0..400).map(|i| i as f32 / 400.0).collect();
        let run = CaseRun {
            grads: [("w".to_owned(), grad.clone())].into(),
            ..CaseRun::default()
        };
        let sub: Vec<f32> = grad.iter().step_by(3).copied().collect();
        let norm = grad.iter().map(|g| g * g).sum::<f32>().sqrt();
        let check = |name: &str, values: &[f32]| {
            compare_gradient(&run, name, &stored(values), 1.0)
                .unwrap()
                .ok()
        };
        assert!(check("grad.w", &grad) && check("gradsub.w", &sub));
        assert!(check("gradnorm.w", &[norm]) && !check("gradnorm.w", &[norm * 1.001]));
        let mut wrong = grad;
        wrong[7] += 2e-4;
        assert!(!check("grad.w", &wrong));
        assert!(!check("grad.other", &sub));
    }
}
