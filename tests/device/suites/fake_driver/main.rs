//! The unmodified launcher on the fake driver of `tests/fake_driver`, and the driver's own rules.
//!
//! This binary starts itself as the program under test, which is the launcher's own entry point: it finds the fake
//! driver through `TESSERA_CUDA_LIBS`, as it would find NVIDIA's.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of a test binary"
)]

mod answers;
mod compiling;
mod driver;
mod faults;
mod ranks;
mod refusals;
mod runs;
mod site;
mod updates;
mod verify;

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

fn main() -> ExitCode {
    if std::env::var_os(site::PROGRAM).is_some() {
        return launcher::run();
    }
    drive()
}

type Test = (&'static str, fn());

macro_rules! tests {
    ($($module:ident: $($test:ident)*;)*) => {
        /// All tests, the longest first.
        const TESTS: &[Test] = &[$($((stringify!($test), $module::$test),)*)*];
    };
}

tests! {
    updates:
        the_optimizer_runs_in_backward_where_host_memory_is_spare
        the_optimizer_runs_in_forward_with_the_same_bits;
    runs:
        a_run_in_f32_agrees_with_the_cpu_and_resumes_exactly
        a_run_in_bf16_agrees_with_the_cpu_and_resumes_exactly
        weights_are_prefetched_where_they_fit
        graphs_and_timing_change_neither_results_nor_memory
        products_of_a_run_use_the_library
        the_backward_of_attention_is_fused_by_request
        a_driver_of_cuda_12_trains
        the_demo_on_two_ranks_agrees_with_the_cpu
        families_agree_with_the_cpu
        quantized_directories_agree_with_the_cpu
        frozen_weights_are_registered_or_copied_through_pinned_chunks
        moments_of_8_bits_agree_with_the_cpu
        states_on_disk_agree_with_the_cpu;
    ranks:
        two_nodes_over_nccl_have_the_bits_of_one_node
        a_refused_ipc_falls_back_to_host_memory
        ranks_that_see_one_gpu_find_out_whether_they_share_it
        machines_with_different_libraries_are_named
        two_ranks_on_one_gpu_have_the_results_of_one_rank
        pipeline_stages_have_the_bits_of_one_gpu;
    answers:
        answers_agree_with_the_cpu;
    verify:
        wrong_peers_fall_back_to_host_memory
        doctor_reports_what_it_verified
        a_new_gpu_is_verified_once
        a_wrong_gpu_is_refused
        wrong_graphs_and_products_are_not_used
        adapters_of_answers_are_verified;
    compiling:
        the_kernels_of_a_run_are_compiled_once_on_a_machine_before_the_first_launch;
    faults:
        seeded_mistakes_are_caught
        failures_of_the_driver_are_named;
    driver:
        the_driver_keeps_its_rules
        doctor_reports_the_driver_and_its_gpus;
    refusals:
        a_rank_abandons_its_gpu_when_it_fails
        gpu_memory_taken_by_another_process_ends_the_run_and_names_it
        the_variable_that_hides_all_gpus_is_named
        a_plan_that_does_not_fit_is_refused
        a_kernel_that_is_not_built_in_is_refused_before_the_plan
        gpus_that_share_no_memory_are_refused_for_ipc;
}

/// Runs the tests that the words of the command line name, or all, one for each core at a time.
fn drive() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let filter: Vec<&String> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let is_wanted =
        |name: &str| filter.is_empty() || filter.iter().any(|part| name.contains(part.as_str()));
    if words.iter().any(|word| word == "--list") {
        TESTS.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let wanted: Vec<&Test> = TESTS.iter().filter(|(name, _)| is_wanted(name)).collect();
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let work = || {
        while let Some((name, test)) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
            let is_good = std::panic::catch_unwind(test).is_ok();
            println!("test {name} ... {}", if is_good { "ok" } else { "FAILED" });
            failed.fetch_or(!is_good, Ordering::Relaxed);
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(work);
        }
    });
    match failed.into_inner() {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    }
}
