//! Bugs inserted into correct kernels. The emulator must report each of them.

use anyhow::Result;
use device_tests::cases::attention::check_turns;
use device_tests::emulator::{Emulator, Order};
use device_tests::machine::Machine as _;
use device_tests::seeded::{GEMM, SUM, check_gemm, check_sum};

/// Sizes with remainders in every direction, and with more steps than stages.
const SHAPE: [usize; 3] = [70, 136, 200];

#[test]
fn the_correct_gemm_passes_in_every_order() {
    let orders = [Order::Random(1), Order::Random(2)];
    for order in Order::BOTH.into_iter().chain(orders) {
        for shape in [SHAPE, [64, 64, 128], [1, 8, 8]] {
            check_gemm(&mut Emulator::new(order), GEMM, shape).unwrap();
        }
    }
}

#[test]
fn a_fault_does_not_affect_the_next_launch() {
    let mut machine = Emulator::new(Order::Ascending);
    for _ in 0..3 {
        // Rows of 120 bytes cannot be copied in units of 16, and the first row is already in flight.
        let fault = check_gemm(&mut machine, GEMM, [64, 64, 60]).expect_err("not aligned");
        assert!(format!("{fault:#}").contains("aligned"), "{fault:#}");
        machine.reset().unwrap();
        check_gemm(&mut machine, GEMM, SHAPE).unwrap();
    }
}

/// A check of a kernel text on a machine.
type Check = fn(&mut Emulator, &str) -> Result<()>;

/// Replaces each `from` by `to` and expects a report with these words in both orders.
fn reported(correct: &str, check: Check, replacements: &[(&str, &str)], words: &str) {
    let mut text = correct.to_owned();
    for (from, to) in replacements {
        assert_eq!(text.matches(from).count(), 1, "the text has '{from}' once");
        text = text.replace(from, to);
    }
    for order in Order::BOTH {
        let result = check(&mut Emulator::new(order), &text);
        let report = format!("{:#}", result.expect_err("the bug was not seen"));
        assert!(report.contains(words), "{report}");
    }
}

fn caught(replacements: &[(&str, &str)], words: &str) {
    let check = |machine: &mut Emulator, text: &str| check_gemm(machine, text, SHAPE);
    reported(GEMM, check, replacements, words);
}

const WAIT: &str = "copy_async_wait<STAGES - 2>();";
const BARRIER: &str = "block_barrier();  // this step's stage has landed";
const IN_FLIGHT: &str = "while an asynchronous copy";
const NO_BARRIER: &str = "without a barrier after";

#[test]
fn a_missing_wait_is_reported() {
    caught(&[(WAIT, "")], IN_FLIGHT);
}

#[test]
fn a_wait_for_one_group_too_few_is_reported() {
    caught(&[(WAIT, "copy_async_wait<STAGES - 1>();")], IN_FLIGHT);
}

#[test]
fn a_missing_commit_is_reported() {
    caught(
        &[("copy_async_commit();  // also when empty", "//")],
        IN_FLIGHT,
    );
}

#[test]
fn a_missing_barrier_after_the_wait_is_reported() {
    caught(&[(BARRIER, "//")], NO_BARRIER);
}

#[test]
fn a_stage_overwritten_before_it_is_read_is_reported() {
    let copy = "if (step + STAGES - 1 < steps) copy_stage(step + STAGES - 1);";
    caught(&[(copy, ""), (WAIT, &format!("{WAIT} {copy}"))], NO_BARRIER);
}

#[test]
fn one_stage_too_few_in_shared_memory_is_reported() {
    caught(
        &[(
            "step % STAGES * STAGE_BYTES;\n    UNROLL for (int i",
            "step % (STAGES + 1) * STAGE_BYTES;\n    UNROLL for (int i",
        )],
        "of shared memory, which has",
    );
}

#[test]
fn a_wrong_row_for_a_matrix_is_reported() {
    caught(
        &[("i * 16 + (lane & 15)", "i * 16 + (lane & 7)")],
        "instead of",
    );
}

#[test]
fn an_unaligned_row_for_a_matrix_is_reported() {
    caught(&[("return row * 64 +", "return row * 66 +")], "aligned");
}

#[test]
fn a_missing_bounds_check_of_the_store_is_reported() {
    caught(
        &[("if (row_c < m && column_c < n)", "if (column_c < n)")],
        "bytes at byte",
    );
    caught(&[("if (row_c < m && column_c < n)", "")], "a write");
}

#[test]
fn a_copy_without_bounds_check_along_k_is_reported() {
    caught(&[("row_a < m && column < k", "row_a < m")], "");
}

#[test]
fn a_copy_without_bounds_check_along_n_is_reported() {
    caught(
        &[("row_b < n && column < k", "column < k")],
        "copy_async_16 of 16 bytes at byte",
    );
}

#[test]
fn a_barrier_that_some_warps_skip_is_reported() {
    caught(
        &[(BARRIER, "if (warp != 1 || step != 2) block_barrier(); //")],
        NO_BARRIER,
    );
}

#[test]
fn a_shuffle_by_a_single_thread_is_reported() {
    let alone = "u16* part = (lane == 0 ? shuffle(shared, 0) : shared, (u16*)memory)";
    caught(
        &[("u16* part = (u16*)memory", alone)],
        "other lanes of its warp wait at",
    );
}

#[test]
fn a_barrier_in_a_divergent_branch_is_reported() {
    caught(
        &[(
            BARRIER,
            "if (warp == 1)\n block_barrier();\n else\n block_barrier(); //",
        )],
        "different barriers",
    );
}

#[test]
fn a_warp_barrier_in_a_divergent_branch_is_reported() {
    caught(
        &[(
            "float sums[2]",
            "if (lane < 16) warp_barrier();\nfloat sums[2]",
        )],
        "deadlock",
    );
}

#[test]
fn a_missing_warp_barrier_is_reported() {
    caught(&[("warp_barrier();", "")], NO_BARRIER);
}

#[test]
fn a_missing_barrier_before_shared_memory_is_reused_is_reported() {
    caught(
        &[("block_barrier();  // all stages have been read", "")],
        NO_BARRIER,
    );
}

#[test]
fn undefined_behavior_is_reported() {
    let steps = "const int steps = divide_up(k, 32)";
    let overflow = format!("{steps} + (0x7fffff00 + 4 * thread) / 0x7fffffff");
    caught(&[(steps, &overflow)], "overflows");
    let division = format!("{steps} + 1 / (thread - m)");
    caught(&[(steps, &division)], "division");
    caught(
        &[("sums[i][j], left[i]", "sums[i][j + lane / 31 * 9], left[i]")],
        "outside its array",
    );
}

#[test]
fn races_between_blocks_are_reported() {
    let check = |machine: &mut Emulator, text: &str| check_sum(machine, text, 1000);
    for order in [Order::Ascending, Order::Descending, Order::Random(3)] {
        check(&mut Emulator::new(order), SUM).unwrap();
    }
    let caught = |from, to, words| reported(SUM, check, &[(from, to)], words);
    let unordered = "without a fence and a counter after the write by another block";
    caught("device_fence();", "", unordered);
    caught(
        "partial[blockIdx.x] =",
        "arrived[0] = 0; partial[blockIdx.x] =",
        "",
    );
    // The last block may overwrite data that all blocks have read; an earlier block may not.
    let all_read = SUM.replace("total = 0.0f", "total = x[0] - x[0]");
    let overwrite = "((float*)x)[0] = 0.0f;";
    let late = all_read.replace("*y = all;", &format!("*y = all; {overwrite}"));
    check(&mut Emulator::new(Order::Ascending), &late).unwrap();
    let early = format!("if (blockIdx.x == 2) {overwrite} device_fence();");
    let replacements = [("device_fence();", &*early)];
    reported(&all_read, check, &replacements, "which several blocks read");
    // The last block of the grid need not run last.
    let last_in_grid = "if (blockIdx.x != gridDim.x - 1) return;";
    caught(
        "if (atomic_increment(arrived) != gridDim.x - 1) return;",
        last_in_grid,
        "without a fence and a counter after the",
    );
    caught(
        "if (atomic_increment(arrived) != gridDim.x - 1) return;",
        "atomic_increment(arrived);",
        "",
    );
    caught("block_barrier();  // the warps' sums", "//", NO_BARRIER);
    caught(
        "device_fence();",
        "while (load_volatile(arrived) < blockIdx.x + 1);",
        "volatile loads",
    );
    caught(
        "i < n; i += gridDim",
        "i <= n; i += gridDim",
        "a read of 4 bytes",
    );
}

/// The blocks of the fused attention backward add to `dq` in turns.
#[test]
fn broken_turns_are_reported() {
    let fused = include_str!("../../../kernels/src/cuda/source/attention.cu");
    let orders = [Order::Ascending, Order::Descending, Order::Random(5)];
    // Blocks start in other orders, and add in the same one.
    let all = orders.map(|order| check_turns(&mut Emulator::new(order), fused).unwrap());
    assert!(
        all.iter().all(|other| *other == all[0]),
        "other bits in another order"
    );
    let check = |machine: &mut Emulator, text: &str| check_turns(machine, text).map(drop);
    let caught_all =
        |replacements: &[(&str, &str)], words| reported(fused, check, replacements, words);
    let caught = |from, to, words| caught_all(&[(from, to)], words);
    let unordered = "without a fence and a counter after the write by another block";
    // The loop alone would not be missed: blocks run one after the other here, so the first read sees the turn.
    let wait = "while (turns_taken != (u32)tile[1])";
    let read = "turns_taken = thread == 0 && !is_first ? load_volatile(turns + turn) : 0;";
    caught_all(
        &[(read, "turns_taken = 0;"), (wait, "while (false)")],
        unordered,
    );
    caught(
        "if (added_to) atomic_increment(turns + added_to);",
        "",
        "volatile loads",
    );
    caught("(u32)tile[1])", "(u32)tile[1] + 1)", "volatile loads");
    let fence = "device_fence();\n        if (added_to)";
    caught(fence, "if (added_to)", unordered);
    let last = "device_fence();\n      atomic_increment(turns + added_to);";
    caught(last, "atomic_increment(turns + added_to);", unordered);
    // Tickets that begin with the last tile of keys.
    let pair = "all.tiles + 2 * (ticket / heads_of_tile)";
    let reversed = "all.tiles + 2 * ((int)gridDim.x / heads_of_tile - 1 - ticket / heads_of_tile)";
    caught(pair, reversed, "volatile loads");
    // Turns by the number of the block, which runs in any order.
    let ticket = "const int ticket = (int)*(u32*)statistics";
    let caught_in = |order, words: &str| {
        let text = fused.replace(ticket, "const int ticket = (int)blockIdx.x");
        let report = check_turns(&mut Emulator::new(order), &text).expect_err("the order");
        assert!(format!("{report:#}").contains(words), "{report:#}");
    };
    caught_in(Order::Descending, "volatile loads");
    // The first tile of keys stores its sum over what the memory contained.
    caught("is_first = block_key == 0", "is_first = false", "");
    caught(
        "is_last = block_key + KEYS >= visible",
        "is_last = false",
        "",
    );
}

#[test]
fn launches_that_do_not_match_the_kernel_are_reported() {
    let check = |machine: &mut Emulator, text: &str| check_sum(machine, text, 1000);
    let caught = |from, to, words| reported(SUM, check, &[(from, to)], words);
    caught("KERNEL(64, 1)", "KERNEL(32, 1)", "bound to 32");
    caught(
        "float* y, int n",
        "float* y, u64 n",
        "the parameters are 'ppppl'",
    );
    caught("int n)", "int n, int m)", "arguments 'ppppi'");
    caught(") sum(", ") total(", "has no KERNEL(...) sum");
    caught("float total = 0.0f;", "float total = nothing;", "nothing");
}
