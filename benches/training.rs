//! Benchmark of optimizer, training step and collectives: `cargo bench -p benches --bench training`.
#![allow(missing_docs, reason = "criterion's macros define public functions")]
#![allow(clippy::unwrap_used, reason = "a benchmark may panic")]

use benches::adam::{Buffers, Variant};
use benches::train::{Setting, TOKENS, run};
use benches::{Work, config, measure};
use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use engine::Stage;
use engine::comm::{Collective, CollectiveKind, Communicator, Tag, threads};
use kernels::DType;
use optim::Precision;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const ELEMS: usize = 16 << 20;

/// Every variant of the step, beside the in-place read-modify-write that bounds it. Bytes per element count each
/// buffer once per read and once per write.
fn adamw(c: &mut Criterion) {
    let mut group = c.benchmark_group("adamw");
    let mut buffers = Buffers::new(ELEMS);
    for variant in Variant::ALL {
        let name = format!("{} 16M ({} B)", variant.name, variant.bytes);
        let work = Work::bytes((variant.bytes * ELEMS) as f64);
        // Allocates the buffers.
        buffers.run(variant);
        measure(&mut group, &name, work, || buffers.run(variant));
    }
    group.finish();
}

/// Decoder with 110 M parameters, one text of 512 tokens per rank.
fn train_step(c: &mut Criterion) {
    let mut group = c.benchmark_group("train_step");
    group.sampling_mode(SamplingMode::Flat);
    let cores = rayon::current_num_threads();
    for (ranks, threads, stage) in [
        (1, 1, Stage::Zero0),
        (1, cores, Stage::Zero0),
        (2, 1, Stage::Zero3),
    ] {
        let setting = Setting {
            ranks,
            threads,
            stage,
            precision: Precision::F32,
        };
        group.throughput(Throughput::Elements((ranks * TOKENS) as u64));
        group.bench_function(
            format!("f32 {ranks} ranks of {threads} threads, {stage:?}"),
            |b| {
                b.iter_custom(|iterations| {
                    let total = Mutex::new(Duration::ZERO);
                    let count = AtomicUsize::new(0);
                    // The first step allocates the buffers.
                    run(setting, 1 + iterations as usize, |time| {
                        if count.fetch_add(1, Ordering::Relaxed) > 0 {
                            *total.lock().unwrap() += time.total();
                        }
                    })
                    .unwrap();
                    total.into_inner().unwrap()
                });
            },
        );
    }
    group.finish();
}

/// Two ranks as threads. Per rank, an all-gather reads and writes the peer's half; a reduce-scatter reads both ranks'
/// halves and writes one.
fn collectives(c: &mut Criterion) {
    let mut group = c.benchmark_group("collectives");
    for mib in [1usize, 16, 64] {
        let bytes = mib << 20;
        for (name, kind, moved) in [
            ("all-gather", CollectiveKind::AllGather, 1.0),
            ("reduce-scatter", CollectiveKind::ReduceScatter, 1.5),
        ] {
            let comms = threads::world(2, 4 * bytes + (1 << 20)).unwrap();
            // Both ranks move their share at the same time.
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
    targets = adamw, collectives, train_step
}
criterion_main!(optimizer_and_exchange);
