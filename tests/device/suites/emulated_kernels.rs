//! Every kernel family on the emulated device.

use device_tests::cases::{self, Effort};
use device_tests::compile::{modules, parse_table};
use device_tests::emulator::{Emulator, Order, build_modules};
use device_tests::recording::Recording;
use kernels::cuda::module::Family;

/// Runs share number `part` of `parts` of a family's cases. The largest families are divided, so that their tests run
/// in parallel.
fn run(family: Family, part: usize, parts: usize) {
    let cases = cases::of(family, Effort::Emulated);
    let cases: Vec<_> = cases.iter().skip(part).step_by(parts).collect();
    assert!(!cases.is_empty(), "{family:?} has no cases");
    let mut failures = Vec::new();
    // Two cases of three in one order and the third in the other, which reveals a dependence on the order of warps. The
    // nightly run has all cases in both orders.
    let all = std::env::var("TESSERA_EVERY_PACK").is_ok_and(|asked| asked == "1");
    for (number, order) in Order::BOTH.into_iter().enumerate() {
        let mut machine = Recording::new(Emulator::new(order));
        let is_its = |i: &usize| all || usize::from(i % 3 == 1) == number;
        for case in (0..cases.len()).filter(is_its).map(|i| cases[i]) {
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

/// Compares threads and shared memory of launches with the checked-in table. Modules that no family lists (other head
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

/// The table records the launches of all cases. A kernel without threads was launched by none.
#[test]
fn every_kernel_of_the_table_has_a_case() {
    let table = parse_table(include_str!("../kernel_resources.csv")).expect("a table");
    let idle = table.iter().filter(|(_, limits)| limits.threads == 0);
    let idle: Vec<_> = idle.map(|(key, _)| key).collect();
    assert!(idle.is_empty(), "no case launches {idle:?}");
}

/// Defines a test for each part of a family, and one that fails if a family is missing here.
macro_rules! families {
    ($($test:ident: $family:ident $part:literal of $parts:literal),* $(,)?) => {
        $(
            #[test]
            fn $test() {
                run(Family::$family, $part, $parts);
            }
        )*

        #[test]
        fn every_family_has_a_test() {
            let (mut tested, mut all) = (vec![$(Family::$family),*], Family::ALL);
            tested.sort();
            tested.dedup();
            all.sort();
            assert_eq!(tested.as_slice(), all.as_slice());
            // Every part of a divided family is listed.
            let parts = [$((Family::$family, $part, $parts)),*];
            let whole = |(family, _, count): &(Family, usize, usize)| {
                let own = parts.iter().filter(|(other, ..)| other == family);
                own.map(|(_, part, _)| part).sum::<usize>() == count * (count - 1) / 2
            };
            assert!(parts.iter().all(whole));
        }
    };
}

families! {
    attention_matches_its_reference_1_of_2: Attention 0 of 2,
    attention_matches_its_reference_2_of_2: Attention 1 of 2,
    attention_plain_matches_its_reference_1_of_3: AttentionPlain 0 of 3,
    attention_plain_matches_its_reference_2_of_3: AttentionPlain 1 of 3,
    attention_plain_matches_its_reference_3_of_3: AttentionPlain 2 of 3,
    cast_matches_its_reference: Cast 0 of 1,
    primitives_match_their_definitions: PrimitivesCheck 0 of 1,
    lora_linear_matches_its_reference_1_of_2: LoraLinear 0 of 2,
    lora_linear_matches_its_reference_2_of_2: LoraLinear 1 of 2,
    lora_gradients_match_their_references: LoraGradients 0 of 1,
    linear_parts_match_their_references: LinearParts 0 of 1,
    matmul_plain_matches_its_reference: MatmulPlain 0 of 1,
    adamw_matches_its_reference: AdamW 0 of 1,
    accumulate_matches_its_reference: Accumulate 0 of 1,
    grad_norm_matches_its_reference: GradNorm 0 of 1,
    norm_matches_its_reference: Norm 0 of 1,
    pointwise_matches_its_reference: Pointwise 0 of 1,
    rows_match_their_references: Rows 0 of 1,
    row_sums_match_their_references: RowSums 0 of 1,
    loss_matches_its_reference: Loss 0 of 1,
    unpack_matches_the_cpu: Unpack 0 of 1,
}

/// Checks the emulator's own product, so that library products of a backend are executed as by cuBLASLt.
#[test]
fn emulated_library_products_match_their_reference() {
    let mut machine = Emulator::new(Order::Ascending);
    let cases = cases::multiply::cases(Effort::Emulated);
    let failures: Vec<_> = cases
        .iter()
        .filter_map(|case| case.run(&mut machine).err())
        .map(|error| format!("{error:#}"))
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Passes of models run without checks of memory accesses, which must not change the results of kernels.
#[test]
fn unchecked_kernels_leave_the_same_bits() {
    let families = [
        Family::Norm,
        Family::Pointwise,
        Family::LoraLinear,
        Family::Attention,
        Family::PrimitivesCheck,
    ];
    for family in families {
        let cases = cases::of(family, Effort::Emulated);
        let [watched, unwatched] = [Emulator::new, Emulator::of_passes].map(|emulator| {
            let mut machine = Recording::new(emulator(Order::Ascending));
            for case in cases.iter().step_by(5) {
                case.run(&mut machine).expect("a case that passes");
            }
            machine.digest()
        });
        assert_eq!(watched, unwatched, "{family:?}");
    }
}

#[test]
fn prebuilt_modules_run_without_a_compiler() {
    let directory = tempfile::tempdir().unwrap();
    let modules = Family::Cast.modules();
    build_modules(directory.path(), &modules[1..]).unwrap();
    let mut machine = Emulator::prebuilt(directory.path(), Order::Ascending);
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
