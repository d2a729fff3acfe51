//! Every kernel family on the emulated device.

use device_tests::cases::{self, Effort};
use device_tests::compile::{modules, parse_table};
use device_tests::emulator::{Emulator, Order, build_modules};
use device_tests::recording::Recording;
use kernels::cuda::module::Family;

fn run(family: Family) {
    let cases = cases::of(family, Effort::Emulated);
    assert!(!cases.is_empty(), "{family:?} has no cases");
    let mut failures = Vec::new();
    // Every case in one order; every third in the other as well, which shows what depends on the order of warps.
    for (order, every) in Order::BOTH.into_iter().zip([1, 3]) {
        let mut machine = Recording::new(Emulator::new(order));
        for case in cases.iter().step_by(every) {
            if let Err(error) = case.run(&mut machine) {
                failures.push(format!("{order:?}: {error:#}"));
            }
        }
        failures.extend(
            machine
                .into_seen()
                .into_iter()
                .filter_map(outside_the_table),
        );
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Threads and shared memory of launches stay within the checked-in table; modules that no family lists (other head
/// dims) are not in it.
fn outside_the_table(
    (key, (threads, shared_bytes)): ((String, String), (u32, u32)),
) -> Option<String> {
    let table = parse_table(include_str!("../kernel_resources.csv")).expect("a table");
    let listed = modules().iter().any(|module| module.name() == key.0);
    match table.get(&key) {
        Some(limits) if threads <= limits.threads && shared_bytes <= limits.shared_bytes => None,
        None if !listed => None,
        limits => Some(format!(
            "{key:?} was launched with {threads} threads and {shared_bytes} shared bytes, the table has {limits:?}"
        )),
    }
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
            let (mut tested, mut all) = ([$(Family::$family),*], Family::ALL);
            tested.sort();
            all.sort();
            assert_eq!(tested.as_slice(), all.as_slice());
        }
    };
}

families! {
    cast: Cast,
    primitives_check: PrimitivesCheck,
    lora_linear: LoraLinear,
    linear_parts: LinearParts,
    matmul_plain: MatmulPlain,
    attention: Attention,
    attention_plain: AttentionPlain,
    adamw: AdamW,
    grad_norm: GradNorm,
    norm: Norm,
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
