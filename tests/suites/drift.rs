//! The 200-step trajectory against its committed losses.
#![allow(clippy::unwrap_used, reason = "a test binary")]

use tests::drift::{LAYOUT, STEPS, Trajectory, path, run, value};
use tests::tolerance::DRIFT_RELATIVE;

#[test]
fn two_hundred_steps_give_the_committed_losses() {
    let committed: Trajectory = serde_json::from_slice(&std::fs::read(path()).unwrap()).unwrap();
    assert_eq!(committed.losses.len(), STEPS as usize);
    let first = value(&committed.losses[0]).unwrap();
    let last = value(committed.losses.last().unwrap()).unwrap();
    assert!(last < first / 2.0, "the model learns: {first} -> {last}");
    let now = run(LAYOUT).unwrap();
    if now.processor == committed.processor {
        let rows = now.losses.iter().zip(&committed.losses);
        let step = rows.clone().position(|(a, b)| a != b);
        assert_eq!(
            step, None,
            "the first step that differs; `cargo run -p tests --bin drift` writes the file anew"
        );
        assert_eq!(now.grad_norms, committed.grad_norms);
        return;
    }
    for (step, (a, b)) in now.losses.iter().zip(&committed.losses).enumerate() {
        let (a, b) = (value(a).unwrap(), value(b).unwrap());
        assert!(
            (a - b).abs() <= DRIFT_RELATIVE * first,
            "step {step}: {a} against {b}"
        );
    }
}
