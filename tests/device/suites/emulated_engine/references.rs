//! Golden packs on the emulated GPU. In f32 the CPU's tolerances apply. In 16 bits results are compared with the pack
//! and with the CPU in the same precision.

use std::sync::Arc;

use anyhow::{Result, ensure};
use device_tests::emulator::Order;
use device_tests::executor::EmulatedGpu;
use engine::Precision;
use kernels::cuda::CudaBackend;
use models::open_processor;
use tests::golden::Pack;
use tests::parity::check_pack;
use tests::sixteen_bits::{self, check_case};
use tests::world::compute_on;
use tests::{drift, tolerance};

use crate::setup::{ARENA_BYTES, every};

/// Sets the emulator as the device of all worlds in this process.
fn compute_on_the_emulator() -> Result<()> {
    let gpu = Arc::new(EmulatedGpu::new(Order::Ascending));
    compute_on(Arc::new(CudaBackend::new(gpu, ARENA_BYTES)?));
    Ok(())
}

/// Every case, gradient and trajectory of one family. `TESSERA_EVERY_PACK=1` runs all families and the 200 steps.
#[test]
fn golden_packs_in_f32_stay_within_their_tolerances() -> Result<()> {
    compute_on_the_emulator()?;
    let every = every();
    let packs = match every {
        true => Pack::built_in(),
        false => vec![Pack::beside("glm-4v-9b")],
    };
    for dir in packs {
        for (title, comparisons) in check_pack(&dir)? {
            for comparison in comparisons {
                ensure!(comparison.ok(), "{}: {title}: {comparison}", dir.display());
            }
        }
    }
    if every {
        let run = drift::run(drift::LAYOUT)?;
        let comparison = drift::compare(&run, tolerance::DRIFT_RELATIVE)?;
        ensure!(comparison.ok(), "200 steps: {comparison}");
    }
    Ok(())
}

/// The checks of the stage `train` on a GPU. Without all packs, the single case below takes their place.
#[test]
#[ignore = "some ten minutes: the nightly run asks for it"]
fn golden_packs_in_16_bits_stay_within_their_tolerances() -> Result<()> {
    compute_on_the_emulator()?;
    for precision in [Precision::Bf16, Precision::Fp16, Precision::PureBf16] {
        for dir in Pack::built_in() {
            for (title, comparisons) in sixteen_bits::check_pack(&dir, precision)? {
                for comparison in comparisons {
                    ensure!(comparison.ok(), "{}: {title}: {comparison}", dir.display());
                }
            }
        }
    }
    Ok(())
}

/// The 200 steps of the stage `train` in 16 bits, on two ranks that share a GPU's queue.
#[test]
#[ignore = "some ten minutes: the nightly run asks for it"]
fn steps_in_16_bits_stay_within_their_tolerances() -> Result<()> {
    compute_on_the_emulator()?;
    for precision in [Precision::Bf16, Precision::Fp16, Precision::PureBf16] {
        for comparison in sixteen_bits::check_drift(precision)? {
            ensure!(comparison.ok(), "200 steps {precision:?}: {comparison}");
        }
    }
    Ok(())
}

#[test]
fn a_golden_case_in_16_bits_stays_within_its_tolerances() -> Result<()> {
    compute_on_the_emulator()?;
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
