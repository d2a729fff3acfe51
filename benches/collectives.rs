//! Benchmark of collectives over shared memory: `cargo bench -p benches --bench collectives`.
//!
//! Two ranks join a window as processes do; each is a thread that lives as long as its measurement. Bandwidth is the
//! bus bandwidth of NCCL's tests: bytes of the whole buffer divided by the time, times (n - 1) / n. This is what each
//! rank must receive. Its ceiling, measured in the same run, is a copy of as many bytes by as many threads, each
//! copying for itself.
#![allow(missing_docs, reason = "criterion's macros define public functions")]
#![allow(clippy::unwrap_used, reason = "a benchmark may panic")]
#![allow(clippy::print_stdout, reason = "printing results is what this is for")]

use benches::config;
use criterion::measurement::WallTime;
use criterion::{
    BenchmarkGroup, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use engine::comm::shm::{self, ShmOptions};
use engine::comm::tcp::{self, Secret, TcpOptions};
use engine::comm::{Collective, CollectiveKind, Communicator, Tag, World};
use kernels::DType;
use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const RANKS: usize = 2;

/// Time of `iterations` calls of `body` on every rank of a world with `region` bytes each. The slower rank counts.
fn on_all_ranks(
    name: &str,
    region: usize,
    iterations: u64,
    body: impl Fn(&dyn Communicator) + Sync,
) -> Duration {
    let start = Barrier::new(RANKS);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let (start, body) = (&start, &body);
                let world = World { rank, size: RANKS };
                let name = format!("tessera-bench-{}-{name}", std::process::id());
                scope.spawn(move || {
                    let comm = shm::join(&ShmOptions::new(name, world, region)).unwrap();
                    // Touches the pages.
                    body(&*comm);
                    start.wait();
                    let begun = Instant::now();
                    for _ in 0..iterations {
                        body(&*comm);
                    }
                    begun.elapsed()
                })
            })
            .collect();
        let times = ranks.into_iter().map(|rank| rank.join().unwrap());
        times.max().unwrap_or_default()
    })
}

/// Time in which every rank copies, for itself, as many bytes as it receives in a collective.
fn copies(bytes: usize, iterations: u64) -> Duration {
    let start = Barrier::new(RANKS);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|_| {
                let start = &start;
                scope.spawn(move || {
                    let (from, mut to) = (vec![1u8; bytes], vec![0u8; bytes]);
                    // Touches the pages.
                    to.copy_from_slice(&from);
                    start.wait();
                    let begun = Instant::now();
                    for _ in 0..iterations {
                        to.copy_from_slice(black_box(&from));
                        black_box(&mut to);
                    }
                    begun.elapsed()
                })
            })
            .collect();
        let times = ranks.into_iter().map(|rank| rank.join().unwrap());
        times.max().unwrap_or_default()
    })
}

/// Measures `run`, which takes a number of iterations. Returns the shortest time per iteration in seconds.
fn least(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    run: impl Fn(u64) -> Duration,
) -> f64 {
    let mut best = f64::INFINITY;
    group.bench_function(name, |b| {
        b.iter_custom(|iterations| {
            let spent = run(iterations);
            best = best.min(spent.as_secs_f64() / iterations as f64);
            spent
        });
    });
    best
}

fn exchange(comm: &dyn Communicator, kind: CollectiveKind, bytes: usize) {
    let buffer = comm.alloc(bytes).unwrap();
    let op = Collective::new(kind, DType::F32, Tag::new("bench", 0));
    drop(comm.start(op, buffer).unwrap().wait_read().unwrap());
}

const KINDS: [(&str, CollectiveKind); 2] = [
    ("all-gather", CollectiveKind::AllGather),
    ("reduce-scatter", CollectiveKind::ReduceScatter),
];

fn bandwidth(c: &mut Criterion) {
    let mut group = c.benchmark_group("shm");
    group.sampling_mode(SamplingMode::Flat);
    for mib in [1usize, 16, 64] {
        let bytes = mib << 20;
        let received = bytes * (RANKS - 1) / RANKS;
        group.throughput(Throughput::Bytes(received as u64));
        let copy = least(&mut group, &format!("copy {mib} MiB"), |n| {
            copies(received, n)
        });
        for (name, kind) in KINDS {
            let seconds = least(&mut group, &format!("{name} {mib} MiB"), |n| {
                on_all_ranks(name, 4 * bytes + (1 << 20), n, |comm| {
                    exchange(comm, kind, bytes);
                })
            });
            println!(
                "    {name} {mib} MiB: bus bandwidth {:.1} GB/s, {:.0} % of the copy",
                received as f64 / seconds * 1e-9,
                100.0 * copy / seconds
            );
        }
    }
    group.finish();
}

/// Time of `iterations` all-gathers of `bytes` over TCP connections of this machine. The slower rank counts.
fn over_tcp(bytes: usize, iterations: u64) -> Duration {
    let start = Barrier::new(RANKS);
    let port = {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        free.local_addr().unwrap().port()
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let start = &start;
                let options = TcpOptions {
                    world: World { rank, size: RANKS },
                    region_bytes: 4 * bytes + (1 << 20),
                    deadline: Duration::from_secs(60),
                    addr: "127.0.0.1".to_owned(),
                    port,
                    secret: Secret::new(b"the secret of a benchmark").unwrap(),
                    facts: Vec::new(),
                    host: String::new(),
                    stop: Arc::default(),
                };
                scope.spawn(move || {
                    let comm = tcp::join(&options).unwrap();
                    // Touches the pages.
                    exchange(&*comm, CollectiveKind::AllGather, bytes);
                    start.wait();
                    let begun = Instant::now();
                    for _ in 0..iterations {
                        exchange(&*comm, CollectiveKind::AllGather, bytes);
                    }
                    begun.elapsed()
                })
            })
            .collect();
        let times = ranks.into_iter().map(|rank| rank.join().unwrap());
        times.max().unwrap_or_default()
    })
}

/// The keyed hashes of the frames of an all-gather, as a share of the all-gather over TCP. A rank hashes what it sends
/// and what it receives, on two threads.
fn seals(c: &mut Criterion) {
    let mut group = c.benchmark_group("tcp");
    group.sampling_mode(SamplingMode::Flat);
    let bytes = 16 << 20;
    let received = bytes * (RANKS - 1) / RANKS;
    group.throughput(Throughput::Bytes(received as u64));
    let gather = least(&mut group, "all-gather 16 MiB", |n| over_tcp(bytes, n));
    let data = vec![1u8; received];
    let hash = least(&mut group, "keyed hash of what a rank receives", |n| {
        let begun = Instant::now();
        for _ in 0..n {
            for frame in data.chunks(1 << 20) {
                black_box(blake3::keyed_hash(&[7; 32], black_box(frame)));
            }
        }
        begun.elapsed()
    });
    println!(
        "    keyed hashes: {:.1} GB/s on one thread, {:.0} % of the exchange",
        received as f64 / hash * 1e-9,
        100.0 * hash / gather
    );
    group.finish();
}

fn latency(c: &mut Criterion) {
    let mut group = c.benchmark_group("shm latency");
    group.sampling_mode(SamplingMode::Flat);
    for (name, kind) in KINDS {
        let seconds = least(&mut group, &format!("{name} 1 KiB"), |n| {
            on_all_ranks(name, 1 << 20, n, |comm| {
                exchange(comm, kind, 1 << 10);
            })
        });
        println!("    {name} 1 KiB: {:.1} us", seconds * 1e6);
    }
    group.finish();
}

criterion_group! {
    name = collectives;
    config = config();
    targets = latency, bandwidth, seals
}
criterion_main!(collectives);
