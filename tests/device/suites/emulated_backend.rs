//! The GPU's backend on the emulated device: every operation of the trait beside the CPU.

use device_tests::backend_checks;
use device_tests::emulator::Order;
use device_tests::executor::emulated_backend;
use kernels::cuda::backend::LossCuts;
use kernels::{Backend, CpuBackend, DType, KernelError, NullBackend, Shape, Tag};

const ARENA_BYTES: u64 = 64 << 20;

/// The checks whose number leaves `part` when divided by `parts`, so that tests run beside each other.
fn run(part: usize, parts: usize) -> kernels::Result<()> {
    let device = emulated_backend(ARENA_BYTES, Order::Ascending)?;
    let checks = backend_checks::all();
    let own = checks.iter().skip(part).step_by(parts);
    let failures: Vec<String> = own
        .filter_map(|check| check.run(&device).err())
        .map(|error| format!("{error:#}"))
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    // Nothing is left but the table of the last attention.
    let left = device.pool().stats().in_use;
    assert!(left < 4096, "{left} bytes are left");
    Ok(())
}

#[test]
fn operations_agree_with_the_cpu_1() -> kernels::Result<()> {
    run(0, 2)
}

#[test]
fn operations_agree_with_the_cpu_2() -> kernels::Result<()> {
    run(1, 2)
}

#[test]
fn losses_in_small_pieces_agree_with_the_cpu() -> kernels::Result<()> {
    let cuts = LossCuts {
        logits: 80,
        weight_rows: 16,
    };
    let device = emulated_backend(ARENA_BYTES, Order::Descending)?.with_loss_cuts(cuts);
    let checks = backend_checks::all();
    let losses: Vec<_> = checks
        .iter()
        .filter(|check| check.name.starts_with("loss"))
        .collect();
    assert!(!losses.is_empty());
    let failures: Vec<_> = losses
        .iter()
        .filter_map(|check| check.run(&device).err())
        .collect();
    assert!(failures.is_empty(), "{failures:#?}");
    Ok(())
}

#[test]
fn operands_of_other_devices_are_refused() {
    let device = emulated_backend(1 << 20, Order::Ascending).unwrap();
    let other = emulated_backend(1 << 20, Order::Ascending).unwrap();
    let upload = |backend: &dyn Backend| {
        let bytes = [0; 16];
        let shape = Shape::new(&[4]);
        backend
            .upload(&bytes, shape, DType::F32, Tag::Activations)
            .unwrap()
    };
    let own = upload(&device);
    for strange in [upload(&CpuBackend::unlimited()), upload(&other)] {
        let error = device.add(&own, &strange).unwrap_err();
        assert!(
            matches!(error, KernelError::Elsewhere { op: "add", .. }),
            "{error}"
        );
    }
    let error = device
        .add(&own, &upload(&NullBackend::unlimited()))
        .unwrap_err();
    assert!(matches!(error, KernelError::NoValues { .. }), "{error}");
    let error = CpuBackend::unlimited().add(&own, &own).unwrap_err();
    assert!(matches!(error, KernelError::Elsewhere { .. }), "{error}");
}

#[test]
fn the_arena_is_the_limit() {
    let device = emulated_backend(1 << 20, Order::Ascending).unwrap();
    let zeros = |bytes: usize| device.zeros(Shape::new(&[bytes]), DType::U8, Tag::Activations);
    let half = zeros(1 << 19).unwrap();
    let error = zeros((1 << 19) + 1).unwrap_err();
    assert!(matches!(error, KernelError::OutOfMemory { .. }), "{error}");
    let other = zeros(1 << 19).unwrap();
    drop(half);
    // As large as what is free.
    let again = zeros(1 << 19).unwrap();
    assert!(again.to_bytes().unwrap().iter().all(|b| *b == 0));
    drop((other, again));
    let block = device.pool().take(64, Tag::Activations).unwrap_err();
    assert!(matches!(block, KernelError::Elsewhere { .. }), "{block}");
    assert_eq!(device.pool().stats().in_use, 0);
}
