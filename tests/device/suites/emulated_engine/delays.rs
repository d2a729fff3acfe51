//! Copies beside the queue at every time that events allow. Any timing of the device must give the same bits. With a
//! missing event it must not.

use std::sync::Arc;

use anyhow::Result;
use device_tests::emulator::Order;
use device_tests::executor::{Delays, EmulatedGpu, Lost};
use engine::{Precision, Tier};
use kernels::cuda::CudaBackend;

use crate::setup::{ARENA_BYTES, Updates, Weights, every, pack, revealed};
use crate::training::{How, Left, train};

/// Timings per family; more in the nightly run.
fn seeds() -> u64 {
    if every() { 4 } else { 1 }
}

/// Timings of the family that is fastest to emulate: one for each time of an update, and more in the nightly run.
fn many_seeds() -> u64 {
    if every() { 8 } else { 4 }
}

fn on(
    gpu: EmulatedGpu,
    family: &str,
    precision: Precision,
    activation: Tier,
    updates: Updates,
) -> Result<Left> {
    let how = How {
        activation,
        updates,
        ..How::new(precision)
    };
    trained(gpu, family, how)
}

fn trained(gpu: EmulatedGpu, family: &str, how: How) -> Result<Left> {
    let device = CudaBackend::new(Arc::new(gpu), ARENA_BYTES)?;
    let how = How {
        check: false,
        ..how
    };
    let (left, _) = train(&pack(family), how, Arc::new(device))?;
    Ok(left)
}

fn day(seed: u64, lost: Option<Lost>) -> EmulatedGpu {
    EmulatedGpu::delayed(Order::Ascending, Delays { seed, lost })
}

fn agree(family: &str, precision: Precision, activation: Tier, seeds: u64) -> Result<()> {
    let want = on(
        EmulatedGpu::new(Order::Ascending),
        family,
        precision,
        activation,
        Updates::Behind,
    )?;
    // Each timing updates units in another part of the step.
    let updates = [
        Updates::Late,
        Updates::Consumed,
        Updates::Early,
        Updates::Behind,
    ];
    for (seed, updates) in (0..seeds).zip(updates.into_iter().cycle()) {
        let got = on(day(seed, None), family, precision, activation, updates)?;
        assert!(got.same_bits(&want), "{family}, seed {seed}, {updates:?}");
    }
    Ok(())
}

/// Compares prefetched weights, including those of a skipped unit, with weights copied at their lease.
fn agree_ahead(family: &str, precision: Precision, activation: Tier, seeds: u64) -> Result<()> {
    let mut how = How {
        activation,
        text_pass: Some(1),
        skipped: Some(2),
        passes: 4,
        ..How::new(precision)
    };
    let want = trained(EmulatedGpu::new(Order::Ascending), family, how)?;
    assert_eq!(want.applied, [true, true, false]);
    how.weights = Weights::Prefetched;
    how.updates = Updates::Late;
    let got = trained(EmulatedGpu::new(Order::Descending), family, how)?;
    assert!(got.same_bits(&want), "{family}");
    // A rolled-back update of a skipped step leaves no trace.
    let updates = [Updates::Early, Updates::Consumed, Updates::Late];
    for (seed, updates) in (0..seeds).zip(updates.into_iter().cycle()) {
        how.updates = updates;
        let got = trained(day(seed, None), family, how)?;
        assert!(got.same_bits(&want), "{family}, seed {seed}, {updates:?}");
    }
    Ok(())
}

/// A step that clips redoes its updates in backward, and one that does not commits them. Both have the bits of an
/// update after the pass.
#[test]
fn steps_that_clip_have_the_same_bits_under_any_delays() -> Result<()> {
    for (max_grad_norm, clips) in [(1e-3, true), (1e9, false)] {
        let mut how = How {
            max_grad_norm: Some(max_grad_norm),
            passes: 3,
            ..How::new(Precision::Bf16)
        };
        let family = "glm-4v-9b";
        let want = trained(EmulatedGpu::new(Order::Ascending), family, how)?;
        assert!(
            want.norms
                .iter()
                .all(|norm| (*norm > f64::from(max_grad_norm)) == clips)
        );
        for (seed, updates) in [Updates::Early, Updates::Late].into_iter().enumerate() {
            how.updates = updates;
            let got = trained(day(seed as u64, None), family, how)?;
            assert!(got.same_bits(&want), "{max_grad_norm:e}: {updates:?}");
        }
    }
    Ok(())
}

/// Weights resident on the device, updated during its compute under many timings. One update is skipped.
#[test]
fn resident_weights_have_the_same_bits_under_many_delays() -> Result<()> {
    let mut how = How {
        weights: Weights::Kept,
        skipped: Some(2),
        passes: 4,
        ..How::new(Precision::PureBf16)
    };
    let family = "glm-4v-9b";
    let want = trained(EmulatedGpu::new(Order::Ascending), family, how)?;
    let updates = [Updates::Late, Updates::Early, Updates::Consumed];
    for (seed, updates) in (0..many_seeds()).zip(updates.into_iter().cycle()) {
        how.updates = updates;
        let got = trained(day(seed, None), family, how)?;
        assert!(got.same_bits(&want), "seed {seed}, {updates:?}");
    }
    // Compute that does not wait for delivered weights uses old ones.
    how.updates = Updates::Late;
    let shows = |seed| {
        let lost = trained(day(seed, Some(Lost::Deliveries)), family, how);
        lost.map_or(true, |got| !got.same_bits(&want))
    };
    assert!(revealed(0, shows));
    Ok(())
}

#[test]
fn minicpm_has_the_same_bits_under_any_delays_with_prefetch() -> Result<()> {
    agree_ahead("minicpm-v-2_6", Precision::Bf16, Tier::Device, seeds())
}

#[test]
fn cogvlm_has_the_same_bits_under_any_delays_with_prefetch() -> Result<()> {
    agree_ahead("cogvlm-chat-hf", Precision::PureBf16, Tier::Host, seeds())
}

#[test]
fn glm_4v_has_the_same_bits_under_many_delays_with_prefetch() -> Result<()> {
    agree_ahead("glm-4v-9b", Precision::F32, Tier::Host, many_seeds())
}

#[test]
fn minicpm_has_the_same_bits_under_any_delays() -> Result<()> {
    agree("minicpm-v-2_6", Precision::F32, Tier::Device, seeds())
}

#[test]
fn minicpm_o_in_pure_bf16_has_the_same_bits_under_any_delays() -> Result<()> {
    agree("minicpm-o-2_6", Precision::PureBf16, Tier::Host, seeds())
}

#[test]
fn cogvlm_in_bf16_has_the_same_bits_under_any_delays() -> Result<()> {
    agree("cogvlm-chat-hf", Precision::Bf16, Tier::Device, seeds())
}

#[test]
fn cogagent_has_the_same_bits_under_any_delays() -> Result<()> {
    agree("cogagent-chat-hf", Precision::F32, Tier::Host, seeds())
}

#[test]
fn cogvlm2_has_the_same_bits_under_any_delays() -> Result<()> {
    agree(
        "cogvlm2-llama3-chat-19B",
        Precision::F32,
        Tier::Device,
        seeds(),
    )
}

#[test]
fn glm_41v_has_the_same_bits_under_any_delays() -> Result<()> {
    agree("glm-4.1v-9b-thinking", Precision::F32, Tier::Host, seeds())
}

#[test]
fn glm_4v_has_the_same_bits_under_many_delays() -> Result<()> {
    agree("glm-4v-9b", Precision::F32, Tier::Host, many_seeds())
}

/// Each kind of event is necessary, and the timings above would reveal its absence.
#[test]
fn a_lost_event_changes_the_bits() -> Result<()> {
    let family = "glm-4v-9b";
    let mut how = How {
        activation: Tier::Host,
        ..How::new(Precision::F32)
    };
    let want = trained(EmulatedGpu::new(Order::Ascending), family, how)?;
    for (weights, lost, known) in [
        (Weights::Leased, Lost::Uploads, 0),
        (Weights::Leased, Lost::Joins, 0),
        (Weights::Leased, Lost::Fetches, 2),
        (Weights::Prefetched, Lost::Uploads, 1),
        (Weights::Prefetched, Lost::Joins, 0),
        (Weights::Prefetched, Lost::Fetches, 2),
    ] {
        how.weights = weights;
        // Memory that nobody wrote may also end a launch of the emulator.
        let shows = |seed| {
            trained(day(seed, Some(lost)), family, how).map_or(true, |got| !got.same_bits(&want))
        };
        assert!(revealed(known, shows), "{weights:?}, {lost:?}");
    }
    Ok(())
}
