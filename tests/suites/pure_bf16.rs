//! Pure bf16 trains like f32, except with weights rounded to the nearest.
#![allow(clippy::unwrap_used, reason = "a test binary")]

use tests::pure_bf16::{BAND, Keeping, STALLED, Subject, progress};

/// A third of the steps of the published chart, enough to distinguish the ways.
const STEPS: u64 = 100;

#[test]
fn stochastic_and_kahan_rounding_follow_f32_and_plain_rounding_stalls() {
    let subject = Subject::pack().unwrap();
    let [in_f32, stochastic, kahan, nearest] =
        Keeping::ALL.map(|keeping| subject.train(keeping, STEPS).unwrap());
    let of = |losses: &[f64]| progress(losses, &in_f32);
    assert!((of(&stochastic) - 1.0).abs() <= BAND, "{}", of(&stochastic));
    assert!((of(&kahan) - 1.0).abs() <= BAND, "{}", of(&kahan));
    assert!(of(&nearest) < STALLED, "{}", of(&nearest));
}
