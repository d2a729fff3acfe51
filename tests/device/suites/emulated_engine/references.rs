//! Golden packs on the emulated GPU. In f32 the CPU's tolerances apply. In 16 bits results are compared with the pack
//! and with the CPU in the same precision.

use std::collections::BTreeSet;
use std::fs;
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

/// Every case and trajectory of a pack in each precision: the checks of the stage `train` on a GPU.
fn check_in_16_bits(pack: &str) -> Result<()> {
    compute_on_the_emulator()?;
    for precision in [Precision::Bf16, Precision::Fp16, Precision::PureBf16] {
        for (title, comparisons) in sixteen_bits::check_pack(&Pack::beside(pack), precision)? {
            for comparison in comparisons {
                ensure!(comparison.ok(), "{pack}: {title}: {comparison}");
            }
        }
    }
    Ok(())
}

macro_rules! packs_in_16_bits {
    ($($test:ident $pack:literal)*) => {
        /// Golden packs in 16 bits, one test for each. With every change the single case below takes their place.
        mod golden_packs_in_16_bits_stay_within_their_tolerances {
            use anyhow::Result;

            pub(super) const PACKS: &[&str] = &[$($pack),*];
            $(
                #[test]
                #[ignore = "minutes: the nightly run asks for it"]
                fn $test() -> Result<()> {
                    super::check_in_16_bits($pack)
                }
            )*
        }
    };
}

packs_in_16_bits! {
    minicpm_v_4_5 "minicpm-v-4_5"
    minicpm_o_4_5 "minicpm-o-4_5"
    minicpm_v_2_6 "minicpm-v-2_6"
    minicpm_o_2_6 "minicpm-o-2_6"
    minicpm_v_4_0 "minicpm-v-4_0"
    minicpm_v_nf4 "minicpm-v-nf4"
    cogvlm "cogvlm-chat-hf"
    cogvlm2 "cogvlm2-llama3-chat-19B"
    cogagent "cogagent-chat-hf"
    cogagent_9b "cogagent-9b-20241220"
    glm_4v "glm-4v-9b"
    glm_4_1v "glm-4.1v-9b-thinking"
    glm_4_1v_int8 "glm-4.1v-int8"
    glm_4_1v_nf4 "glm-4.1v-nf4"
    glm_4_1v_nf4_decoder "glm-4.1v-nf4-decoder"
    glm_4_6v_flash "glm-4.6v-flash"
    glm_ocr "glm-ocr"
}

#[test]
fn every_pack_has_its_test_in_16_bits() -> Result<()> {
    let golden = Pack::beside("");
    let mut packs = BTreeSet::new();
    for entry in fs::read_dir(&golden)? {
        let path = entry?.path();
        if path.join("cases").is_dir() {
            packs.extend(path.file_name().map(|name| name.display().to_string()));
        }
    }
    let tested = golden_packs_in_16_bits_stay_within_their_tolerances::PACKS.iter();
    let tested: BTreeSet<String> = tested.map(|name| (*name).to_owned()).collect();
    ensure!(tested == packs, "{tested:?} instead of {packs:?}");
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
