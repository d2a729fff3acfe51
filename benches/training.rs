//! Optimizer and collectives: `cargo bench -p benches --bench training`.
#![allow(missing_docs, reason = "criterion's macros define public functions")]
#![allow(clippy::unwrap_used, reason = "a benchmark may panic")]

use benches::{Work, config, measure};
use criterion::{Criterion, criterion_group, criterion_main};
use engine::comm::{Collective, CollectiveKind, Communicator, Tag, threads};
use half::bf16;
use kernels::DType;
use optim::{AdamW, GradWindow, Optimizer, StateWindow, StepArgs, WeightWindow};
use std::sync::Arc;

const ELEMS: usize = 16 << 20;

fn args<'a>(
    grad: &'a [f32],
    weight: WeightWindow<'a>,
    state: Vec<StateWindow<'a>>,
) -> StepArgs<'a> {
    StepArgs {
        step: 10,
        lr: 1e-4,
        weight_decay: 0.1,
        grad_scale: 1.0,
        seed: 1,
        first_element: 0,
        grad: GradWindow::F32(grad),
        weight,
        state,
    }
}

/// Bytes per element count each buffer once for every read and once for every write.
fn adamw(c: &mut Criterion) {
    let mut group = c.benchmark_group("adamw");
    let rule = AdamW::default();
    let grad = vec![1e-3f32; ELEMS];
    let (mut master, mut m, mut v) = (vec![0.1f32; ELEMS], vec![0f32; ELEMS], vec![0f32; ELEMS]);
    measure(
        &mut group,
        "f32 16M (28 B)",
        Work::bytes(28.0 * ELEMS as f64),
        || {
            let state = vec![StateWindow::F32(&mut m), StateWindow::F32(&mut v)];
            rule.step(args(&grad, WeightWindow::F32(&mut master), state))
                .unwrap();
        },
    );
    let mut weight = vec![bf16::ZERO; ELEMS];
    measure(
        &mut group,
        "bf16 with f32 master 16M (30 B)",
        Work::bytes(30.0 * ELEMS as f64),
        || {
            let state = vec![StateWindow::F32(&mut m), StateWindow::F32(&mut v)];
            let window = WeightWindow::Mixed {
                master: &mut master,
                weight: &mut weight,
            };
            rule.step(args(&grad, window, state)).unwrap();
        },
    );
    let (mut m, mut v) = (vec![bf16::ZERO; ELEMS], vec![bf16::ZERO; ELEMS]);
    measure(
        &mut group,
        "pure bf16 16M (16 B)",
        Work::bytes(16.0 * ELEMS as f64),
        || {
            let state = vec![StateWindow::Bf16(&mut m), StateWindow::Bf16(&mut v)];
            rule.step(args(&grad, WeightWindow::PureBf16(&mut weight), state))
                .unwrap();
        },
    );
    group.finish();
}

/// Two ranks as threads; per rank an all-gather reads and writes the peer's half, a reduce-scatter
/// reads both ranks' halves and writes one.
fn collectives(c: &mut Criterion) {
    let mut group = c.benchmark_group("collectives");
    for mib in [1usize, 16, 64] {
        let bytes = mib << 20;
        for (name, kind, moved) in [
            ("all-gather", CollectiveKind::AllGather, 1.0),
            ("reduce-scatter", CollectiveKind::ReduceScatter, 1.5),
        ] {
            let comms = threads::world(2, 4 * bytes + (1 << 20)).unwrap();
            // Both ranks move their share at once.
            let work = Work::bytes(2.0 * moved * bytes as f64);
            measure(
                &mut group,
                &format!("{name} f32 {mib} MiB, 2 ranks"),
                work,
                || {
                    std::thread::scope(|scope| {
                        for comm in &comms {
                            scope.spawn(|| exchange(comm, kind, bytes));
                        }
                    });
                },
            );
        }
    }
    group.finish();
}

fn exchange(comm: &Arc<dyn Communicator>, kind: CollectiveKind, bytes: usize) {
    let buffer = comm.alloc(bytes).unwrap();
    let op = Collective::new(kind, DType::F32, Tag::new("bench", 0));
    drop(comm.start(op, buffer).unwrap().wait_read().unwrap());
}

criterion_group! {
    name = optimizer_and_exchange;
    config = config();
    targets = adamw, collectives
}
criterion_main!(optimizer_and_exchange);
