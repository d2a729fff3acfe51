//! Every kernel family on the emulated device.

use device_tests::cases::{self, Effort};
use device_tests::emulator::{Emulator, Order, build_modules};
use kernels::cuda::module::Family;

fn run(family: Family) {
    let cases = cases::of(family, Effort::Emulated);
    assert!(!cases.is_empty(), "{family:?} has no cases");
    let mut failures = Vec::new();
    for order in Order::BOTH {
        let mut machine = Emulator::new(order);
        for case in &cases {
            if let Err(error) = case.run(&mut machine) {
                failures.push(format!("{order:?}: {error:#}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// A test for each family, and one that fails when a family is missing here.
macro_rules! families {
    ($($test:ident: $family:ident),* $(,)?) => {
        $(
            #[test]
            fn $test() {
                run(Family::$family);
            }
        )*

        #[test]
        fn every_family_has_a_test() {
            assert_eq!([$(Family::$family),*].as_slice(), Family::ALL.as_slice());
        }
    };
}

families! {
    cast: Cast,
    adamw: AdamW,
    grad_norm: GradNorm,
    norm: Norm,
    primitives_check: PrimitivesCheck,
}

#[test]
fn prebuilt_modules_run_without_a_compiler() {
    let folder = tempfile::tempdir().unwrap();
    let modules = Family::Cast.modules();
    build_modules(folder.path(), &modules[1..]).unwrap();
    let mut machine = Emulator::prebuilt(folder.path(), Order::Ascending);
    let cases = cases::of(Family::Cast, Effort::Emulated);
    let results: Vec<_> = cases.iter().map(|case| case.run(&mut machine)).collect();
    let missing = |error: &anyhow::Error| format!("{error:#}").contains("there is no");
    assert!(results.iter().any(Result::is_ok));
    assert!(
        results
            .iter()
            .flat_map(|result| result.as_ref().err())
            .all(missing)
    );
    assert!(
        results.iter().any(Result::is_err),
        "one module was left out"
    );
}
