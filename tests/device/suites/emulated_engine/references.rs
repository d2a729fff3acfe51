//! A golden case in 16 bits on the emulated GPU: beside what the pack stores, and beside the CPU in the same precision.

use std::sync::Arc;

use anyhow::{Result, ensure};
use device_tests::emulator::Order;
use device_tests::executor::EmulatedGpu;
use engine::Precision;
use kernels::cuda::CudaBackend;
use models::open_processor;
use tests::golden::Pack;
use tests::sixteen_bits::check_case;
use tests::world::compute_on;

use crate::setup::ARENA_BYTES;

#[test]
fn a_golden_case_in_16_bits_keeps_its_tolerances() -> Result<()> {
    let gpu = Arc::new(EmulatedGpu::new(Order::Ascending));
    compute_on(Arc::new(CudaBackend::new(gpu, ARENA_BYTES)?));
    let dir = Pack::beside("cogvlm2-llama3-chat-19B");
    let (pack, processor) = (Pack::read(&dir)?, open_processor(&dir)?);
    let case = &pack.cases[0];
    for precision in [Precision::Bf16, Precision::Fp16] {
        let all = check_case(&pack, case, &*processor, precision)?;
        let beside_cpu = all.iter().filter(|c| c.quantity.starts_with("cpu "));
        ensure!(beside_cpu.count() > 10, "the CPU is compared with");
        for comparison in all {
            ensure!(comparison.ok(), "{} {precision:?}: {comparison}", case.name);
        }
    }
    Ok(())
}
