//! Conformance cases of every transport, run over threads, shared memory and connections.

use super::dry::DryWindow;
use super::{
    Collective, CollectiveKind, CommError, Communicator, Tag, Ticket, World, shm, tcp, threads,
};
use half::bf16;
use kernels::{DType, Element};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const KIB: usize = 1024;
const TAG: Tag = Tag::new("test", 7);
const PATIENCE: Duration = Duration::from_secs(60);

/// Ends the world of a failed test at once, so that its other ranks do not wait for the deadline.
struct AbortOnPanic(Arc<dyn Communicator>);

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort("test failed");
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Transport {
    Threads,
    Shm,
    Tcp,
    #[cfg(feature = "mpi")]
    Mpi,
    /// Ranks distributed over the processes that mpirun started.
    #[cfg(feature = "mpi")]
    Processes,
}

impl Transport {
    /// Whether ranks have connections instead of shared memory. Messages of two connections have no order.
    fn has_connections(self) -> bool {
        !matches!(self, Self::Threads | Self::Shm)
    }

    /// Number of ranks of a world of `size` in this process.
    fn ranks_here(self, size: usize) -> usize {
        match self {
            #[cfg(feature = "mpi")]
            Self::Processes => super::mpi::ranks_here(size).count(),
            _ => size,
        }
    }

    /// A gate that holds ranks 0 and 1 until both have come, without a collective of their world.
    fn gate(self) -> impl Fn() + Sync {
        let threads = Barrier::new(2);
        #[cfg(feature = "mpi")]
        let processes = match self {
            Self::Processes => super::mpi::dealt(2, KIB, PATIENCE),
            _ => Vec::new(),
        };
        move || match self {
            #[cfg(feature = "mpi")]
            Self::Processes => processes[0].barrier(TAG).unwrap(),
            _ => drop(threads.wait()),
        }
    }

    /// Runs `rank` on every rank of a world. Returns the results of this process's ranks in rank order.
    fn run<R: Send>(
        self,
        size: usize,
        region_bytes: usize,
        deadline: Duration,
        rank: impl Fn(Arc<dyn Communicator>) -> R + Sync,
    ) -> Vec<R> {
        let rank = &|comm: Arc<dyn Communicator>| {
            let _guard = AbortOnPanic(comm.clone());
            rank(comm)
        };
        let dir = tempfile::tempdir().unwrap();
        let join = |world| {
            let dirs = vec![dir.path().to_owned()];
            let name = "conformance".to_owned();
            shm::join(&shm::ShmOptions {
                name,
                world,
                region_bytes,
                deadline,
                dirs,
                stop: Arc::default(),
            })
            .unwrap()
        };
        let results = std::thread::scope(|scope| {
            let handles: Vec<_> = match self {
                Self::Threads => threads::world_with_deadline(size, region_bytes, deadline)
                    .unwrap()
                    .into_iter()
                    .map(|comm| scope.spawn(move || rank(comm)))
                    .collect(),
                Self::Shm => (0..size)
                    .map(|r| scope.spawn(move || rank(join(World { rank: r, size }))))
                    .collect(),
                #[cfg(feature = "mpi")]
                Self::Mpi => super::mpi::worlds(size, region_bytes, deadline)
                    .into_iter()
                    .map(|comm| scope.spawn(move || rank(comm)))
                    .collect(),
                #[cfg(feature = "mpi")]
                Self::Processes => super::mpi::dealt(size, region_bytes, deadline)
                    .into_iter()
                    .map(|comm| scope.spawn(move || rank(comm)))
                    .collect(),
                Self::Tcp => tcp::tests::worlds(size, region_bytes, deadline)
                    .into_iter()
                    .map(|comm| scope.spawn(move || rank(comm)))
                    .collect(),
            };
            handles
                .into_iter()
                .map(|handle| handle.join().unwrap())
                .collect()
        });
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            0,
            "the window file is gone"
        );
        // A rank may have returned its communicator, which the others still need.
        #[cfg(feature = "mpi")]
        if matches!(self, Self::Processes) {
            processes::meet();
        }
        results
    }

    fn run_all(self, rank: impl Fn(Arc<dyn Communicator>) + Sync) {
        for size in 1..=4 {
            self.run(size, 256 * KIB, PATIENCE, &rank);
        }
    }
}

fn op(kind: CollectiveKind, dtype: DType) -> Collective {
    Collective::new(kind, dtype, TAG)
}

fn start<T: Element>(comm: &dyn Communicator, op: Collective, values: &[T]) -> Ticket {
    let mut buffer = comm.alloc(size_of_val(values)).unwrap();
    buffer.as_mut_slice().copy_from_slice(values);
    comm.start(op, buffer).unwrap()
}

/// A value whose f32 sums depend on the order of additions.
fn operand(rank: usize, i: usize) -> f32 {
    ((i * 31 + rank * 17) % 101) as f32 * [1.0, -3e7, 2e-6, 3e7][rank % 4] + 0.1
}

fn operands(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| operand(rank, i)).collect()
}

fn ordered_sum(size: usize, i: usize) -> f32 {
    (1..size).fold(operand(0, i), |sum, rank| sum + operand(rank, i))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn all_gather_puts_every_part_in_its_place(transport: Transport) {
    fn case<T: Element>(comm: &dyn Communicator, per_rank: usize, value: impl Fn(usize) -> T) {
        let World { rank, size } = comm.world();
        let all: Vec<T> = (0..size * per_rank).map(value).collect();
        let own = rank * per_rank..(rank + 1) * per_rank;
        let mut buffer = comm.alloc(size_of_val(&all[..])).unwrap();
        assert_eq!(buffer.as_bytes().as_ptr().align_offset(64), 0);
        buffer.as_mut_slice()[own.clone()].copy_from_slice(&all[own]);
        let ticket = comm
            .start(op(CollectiveKind::AllGather, T::DTYPE), buffer)
            .unwrap();
        assert_eq!(ticket.wait().unwrap().as_slice::<T>(), all);
    }
    transport.run_all(|comm| {
        for per_rank in [0, 1, 3, 17, 1000] {
            case(&*comm, per_rank, |i| i as f32);
            case(&*comm, per_rank, |i| bf16::from_f32(i as f32));
            case(&*comm, per_rank, |i| i as u8);
        }
    });
}

fn reduce_scatter_sums_in_rank_order(transport: Transport) {
    transport.run_all(|comm| {
        let World { rank, size } = comm.world();
        for per_rank in [0, 1, 5, 2049] {
            let count = size * per_rank;
            let own = rank * per_rank..(rank + 1) * per_rank;
            let reduce = op(CollectiveKind::ReduceScatter, DType::F32);
            let sum = start(&*comm, reduce, &operands(rank, count))
                .wait()
                .unwrap();
            let expected: Vec<f32> = own.clone().map(|i| ordered_sum(size, i)).collect();
            assert_eq!(bits(&sum.as_slice::<f32>()[own.clone()]), bits(&expected));

            let wide: Vec<f64> = (0..count).map(|i| (rank + i) as f64).collect();
            let reduce = op(CollectiveKind::ReduceScatter, DType::F64);
            let sum = start(&*comm, reduce, &wide).wait_read().unwrap();
            let expected: Vec<f64> = own
                .clone()
                .map(|i| (0..size).map(|r| (r + i) as f64).sum())
                .collect();
            assert_eq!(sum.as_slice::<f64>()[own], expected);
        }
    });
}

fn shard_groups_hold_copies_and_sum_over_all_ranks(transport: Transport) {
    for (size, group) in [(2, 1), (2, 2), (4, 1), (4, 2), (6, 2), (6, 3)] {
        transport.run(size, 256 * KIB, PATIENCE, |comm| {
            let place = comm.world().in_group(Some(group));
            let first = comm.world().rank - place.rank;
            for (round, per_part) in [0, 1, 5, 2049].into_iter().cycle().take(12).enumerate() {
                let count = group * per_part;
                let own = place.rank * per_part..(place.rank + 1) * per_part;
                let reduce = op(CollectiveKind::ReduceScatter, DType::F32).in_groups(Some(group));
                let ticket = start(&*comm, reduce, &operands(comm.world().rank, count));
                if (round + comm.world().rank).is_multiple_of(5) {
                    // The others still need this rank's part of the sum.
                    drop(ticket);
                } else {
                    let sum = ticket.wait().unwrap();
                    let expected: Vec<f32> = own.clone().map(|i| ordered_sum(size, i)).collect();
                    assert_eq!(bits(&sum.as_slice::<f32>()[own.clone()]), bits(&expected));
                }

                let mut values = vec![-1.0; count];
                let value = |i: usize| (first * 10_000 + i + round) as f32;
                own.for_each(|i| values[i] = value(i));
                let gather = op(CollectiveKind::AllGather, DType::F32).in_groups(Some(group));
                let all = start(&*comm, gather, &values).wait_read().unwrap();
                assert_eq!(
                    all.as_slice::<f32>(),
                    (0..count).map(value).collect::<Vec<_>>()
                );
            }
            comm.barrier(TAG).unwrap();
        });
    }
}

fn all_reduce_gives_every_rank_the_same_bits_at_any_length(transport: Transport) {
    transport.run_all(|comm| {
        let World { rank, size } = comm.world();
        for count in [0, 1, 2, 3, 7, 4097] {
            let reduce = op(CollectiveKind::AllReduce, DType::F32);
            let sum = start(&*comm, reduce, &operands(rank, count))
                .wait()
                .unwrap();
            let expected: Vec<f32> = (0..count).map(|i| ordered_sum(size, i)).collect();
            assert_eq!(bits(sum.as_slice()), bits(&expected));
        }
    });
}

fn broadcast_copies_the_root(transport: Transport) {
    transport.run_all(|comm| {
        let World { rank, size } = comm.world();
        for root in 0..size {
            let value = if rank == root { 100 + root as i32 } else { -1 };
            let broadcast = op(CollectiveKind::Broadcast { root }, DType::I32);
            let buffer = start(&*comm, broadcast, &[value; 33]).wait().unwrap();
            assert_eq!(buffer.as_slice::<i32>(), [100 + root as i32; 33]);
        }
    });
}

fn barrier_holds_until_all_have_come(transport: Transport) {
    // One clock for all processes of the machine.
    let now = || {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        since.as_secs_f64()
    };
    for size in 1..=4 {
        let arrived = AtomicUsize::new(0);
        transport.run(size, KIB, PATIENCE, |comm| {
            for round in 1..=50 {
                arrived.fetch_add(1, Ordering::SeqCst);
                let came = now();
                comm.barrier(TAG).unwrap();
                let left = now();
                assert!(arrived.load(Ordering::SeqCst) >= round * transport.ranks_here(size));
                let times = comm.all_gather_f64(&[came, left], TAG).unwrap();
                for [came, left] in times.iter().map(|times| [times[0], left]) {
                    assert!(came <= left, "{came} {left}");
                }
            }
        });
    }
}

fn helpers_return_values_in_rank_order(transport: Transport) {
    transport.run_all(|comm| {
        let World { rank, size } = comm.world();
        let all = comm.all_gather_f64(&[rank as f64, 0.5], TAG).unwrap();
        assert_eq!(
            all,
            (0..size).map(|r| vec![r as f64, 0.5]).collect::<Vec<_>>()
        );
        let message = |r: usize| vec![r as u8; r * 37];
        let all = comm.all_gather_bytes(&message(rank), TAG).unwrap();
        assert_eq!(all, (0..size).map(message).collect::<Vec<_>>());
        let nothing = comm.all_gather_bytes(&[], TAG).unwrap();
        assert_eq!(nothing, vec![Vec::<u8>::new(); size]);
    });
}

fn a_contributing_rank_serves_the_others_and_copies_nothing(transport: Transport) {
    transport.run_all(|comm| {
        let World { rank, size } = comm.world();
        let mut gather = op(CollectiveKind::AllGather, DType::I32);
        if rank == 0 {
            gather = gather.contribute_only();
        }
        let mut values = vec![-1; size];
        values[rank] = rank as i32;
        let result = start(&*comm, gather, &values).wait().unwrap();
        let expected = if rank == 0 {
            values
        } else {
            (0..size as i32).collect()
        };
        assert_eq!(result.as_slice::<i32>(), expected);

        let mut reduce = op(CollectiveKind::AllReduce, DType::F64);
        if rank == 0 {
            reduce = reduce.contribute_only();
        }
        let sum = start(&*comm, reduce, &[1.0f64; 9]).wait().unwrap();
        if rank > 0 {
            assert_eq!(sum.as_slice::<f64>(), [size as f64; 9]);
        }
    });
}

fn tickets_may_be_waited_for_in_any_order(transport: Transport) {
    transport.run_all(|comm| {
        let World { rank, size } = comm.world();
        for round in 0..20 {
            let mut tickets: Vec<(usize, Ticket)> = (0..6)
                .map(|i| {
                    let reduce = op(CollectiveKind::AllReduce, DType::F32);
                    let count = [1, 100, 3000][i % 3];
                    (i, start(&*comm, reduce, &vec![(i + rank) as f32; count]))
                })
                .collect();
            tickets.rotate_left((rank * 2 + round) % 6);
            if rank % 2 == 1 {
                tickets.reverse();
            }
            for (i, ticket) in tickets {
                let sum: usize = (0..size).map(|r| i + r).sum();
                let buffer = ticket.wait().unwrap();
                assert!(buffer.as_slice::<f32>().iter().all(|&x| x == sum as f32));
            }
        }
    });
}

fn more_tickets_than_records_may_be_held(transport: Transport) {
    transport.run_all(|comm| {
        let World { rank, size } = comm.world();
        let gather = op(CollectiveKind::AllGather, DType::I32);
        let start = |i: i32| {
            let mut values = vec![0; size];
            values[rank] = i + rank as i32;
            start(&*comm, gather, &values)
        };
        let tickets: Vec<Ticket> = (0..200).map(start).collect();
        for (i, ticket) in (0..).zip(tickets) {
            let expected: Vec<i32> = (0..size as i32).map(|r| i + r).collect();
            assert_eq!(ticket.wait_read().unwrap().as_slice::<i32>(), expected);
        }
    });
}

fn dropped_tickets_harm_nobody(transport: Transport) {
    let kinds = [
        CollectiveKind::AllGather,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllReduce,
        CollectiveKind::Broadcast { root: 0 },
        CollectiveKind::Barrier,
    ];
    transport.run_all(|comm| {
        let World { rank, size } = comm.world();
        for round in 0..40 {
            for kind in kinds {
                let values = vec![1.0f32; 60 * size];
                let ticket = start(&*comm, op(kind, DType::F32), &values);
                if round % size == rank {
                    drop(ticket);
                    continue;
                }
                let result = ticket.wait().unwrap();
                let own = &result.as_slice::<f32>()[rank * 60..][..60];
                let sums = matches!(
                    kind,
                    CollectiveKind::ReduceScatter | CollectiveKind::AllReduce
                );
                assert_eq!(own, [if sums { size as f32 } else { 1.0 }; 60]);
            }
        }
        comm.barrier(TAG).unwrap();
        assert_eq!(comm.memory().in_use_bytes, 0);
    });
}

fn a_buffer_can_be_overwritten_as_soon_as_it_is_back(transport: Transport) {
    transport.run_all(|comm| {
        let World { rank, size } = comm.world();
        let mut buffer = comm.alloc(size * 4096).unwrap();
        for round in 0..500u32 {
            let value = |r: usize| round * 8 + r as u32;
            buffer.as_mut_slice::<u32>()[rank * 1024..][..1024].fill(value(rank));
            let ticket = comm
                .start(op(CollectiveKind::AllGather, DType::I32), buffer)
                .unwrap();
            buffer = ticket.wait().unwrap();
            for (r, part) in buffer.as_slice::<u32>().chunks(1024).enumerate() {
                assert!(part.iter().all(|&x| x == value(r)));
            }
            buffer.as_mut_slice::<u32>().fill(u32::MAX);
        }
    });
}

fn memory_is_reused_only_after_the_last_reader(transport: Transport) {
    transport.run_all(|comm| {
        let World { rank, size } = comm.world();
        for round in 0..500u32 {
            let value = |r: usize| round * 8 + r as u32;
            let mut buffer = comm.alloc(size * 8192).unwrap();
            buffer.as_mut_slice::<u32>().fill(u32::MAX);
            buffer.as_mut_slice::<u32>()[rank * 2048..][..2048].fill(value(rank));
            let ticket = comm
                .start(op(CollectiveKind::AllGather, DType::I32), buffer)
                .unwrap();
            let result = ticket.wait_read().unwrap();
            for (r, part) in result.as_slice::<u32>().chunks(2048).enumerate() {
                assert!(part.iter().all(|&x| x == value(r)));
            }
        }
        assert_eq!(
            comm.memory().peak_bytes,
            size * 8192,
            "one region serves all rounds"
        );
    });
}

fn buffers_of_all_sizes_lie_where_a_dry_run_says(transport: Transport) {
    transport.run_all(|comm| {
        let World { rank, size } = comm.world();
        let dry = DryWindow::new(comm.world(), comm.world().size);
        let mut held = VecDeque::new();
        for round in 0..400usize {
            let per_rank = 4 + 4 * ((round * 7919) % 1700);
            let value = |r: usize| (round * 8 + r) as u32;
            let mut buffer = comm.alloc(size * per_rank).unwrap();
            let counted = dry.alloc(size * per_rank).unwrap();
            buffer.as_mut_slice::<u32>().fill(u32::MAX);
            let words = per_rank / 4;
            buffer.as_mut_slice::<u32>()[rank * words..][..words].fill(value(rank));
            let gather = op(CollectiveKind::AllGather, DType::I32);
            let result = comm.start(gather, buffer).unwrap().wait_read().unwrap();
            for (r, part) in result.as_slice::<u32>().chunks(words).enumerate() {
                assert!(part.iter().all(|&x| x == value(r)), "round {round}");
            }
            held.push_back((result, counted));
            // Not in first-in, first-out order, so that remaining buffers leave free ranges between them.
            if held.len() > 3 {
                held.remove(round % 3);
            }
            assert_eq!(comm.memory().peak_bytes as u64, dry.bytes().region);
        }
    });
}

fn ten_thousand_collectives_leak_nothing(transport: Transport) {
    transport.run(2, 64 * KIB, PATIENCE, |comm| {
        let World { rank, size } = comm.world();
        for round in 0..10_000 {
            let per_rank = 1 + (round * 7) % 600;
            let gather = op(CollectiveKind::AllGather, DType::I32);
            let values = vec![rank as i32; size * per_rank];
            let result = start(&*comm, gather, &values).wait_read().unwrap();
            assert_eq!(result.as_slice::<i32>()[per_rank], 1);
        }
        assert_eq!(comm.memory().in_use_bytes, 0);
        assert_eq!(
            comm.alloc(64 * KIB).unwrap().len(),
            64 * KIB,
            "the whole region is free"
        );
    });
}

fn different_collectives_are_an_error_on_every_rank(transport: Transport) {
    let gather = op(CollectiveKind::AllGather, DType::F32);
    let other_tag = Collective {
        tag: Tag::new("other", 7),
        ..gather
    };
    let other_index = Collective {
        tag: Tag::new("test", 8),
        ..gather
    };
    let cases = [
        (op(CollectiveKind::ReduceScatter, DType::F32), 240),
        (op(CollectiveKind::Barrier, DType::F32), 240),
        (op(CollectiveKind::AllGather, DType::I32), 240),
        (gather, 480),
        (other_tag, 240),
        (other_index, 240),
    ];
    for size in 2..=4 {
        for (other, other_bytes) in cases {
            let errors = transport.run(size, 64 * KIB, PATIENCE, |comm| {
                match comm.barrier(TAG) {
                    Ok(()) => {}
                    // A message of one connection may overtake that of another.
                    Err(error) if transport.has_connections() => return error,
                    Err(error) => panic!("{error}"),
                }
                let odd = comm.world().rank == size - 1;
                let (op, bytes) = if odd {
                    (other, other_bytes)
                } else {
                    (gather, 240)
                };
                let result = comm
                    .start(op, comm.alloc(bytes).unwrap())
                    .and_then(Ticket::wait);
                let error = result.unwrap_err();
                let later = comm.barrier(TAG).unwrap_err();
                assert_eq!(later.to_string(), error.to_string(), "the world stays dead");
                error
            });
            for error in errors {
                let CommError::Mismatch {
                    sequence,
                    first,
                    second,
                } = error
                else {
                    panic!("{error}")
                };
                assert_eq!((sequence, second.rank), (1, size - 1));
                assert_eq!((first.op.kind, first.op.bytes), (gather.kind, 240));
                assert_eq!((second.op.kind, second.op.bytes), (other.kind, other_bytes));
                assert_eq!(second.op.tag_name, other.tag.name);
            }
        }
    }
}

fn a_missing_rank_is_a_timeout_with_the_table_of_ranks(transport: Transport) {
    for size in 2..=4 {
        let errors = transport.run(size, KIB, Duration::from_millis(100), |comm| {
            comm.barrier(Tag::new("first", 0)).unwrap();
            if comm.world().rank == size - 1 {
                // The rank is alive but does not start the collective.
                return Err(comm);
            }
            Ok(comm.barrier(Tag::new("second", 3)).unwrap_err())
        });
        for error in errors.iter().filter_map(|result| result.as_ref().ok()) {
            let text = error.to_string();
            let CommError::Timeout {
                sequence,
                op,
                elapsed,
                ranks,
                ..
            } = error
            else {
                panic!("{text}")
            };
            assert_eq!(
                (*sequence, op.tag_name.as_str(), op.tag_index),
                (1, "second", 3)
            );
            assert!(*elapsed >= Duration::from_millis(100));
            let started: Vec<u64> = ranks.iter().map(|status| status.started).collect();
            assert_eq!(started[size - 1], 1);
            assert!(started[..size - 1].contains(&2));
            assert_eq!(ranks[size - 1].last.as_ref().unwrap().tag_name, "first");
            assert!(
                text.contains(&format!("rank {}: #0 barrier first[0]", size - 1)),
                "{text}"
            );
        }
    }
}

fn an_abort_wakes_every_waiting_rank(transport: Transport) {
    for size in 2..=4 {
        let errors = transport.run(size, KIB, PATIENCE, |comm| {
            if comm.world().rank == 1 {
                comm.abort("disk full");
            }
            comm.barrier(TAG).unwrap_err()
        });
        for error in errors {
            assert_eq!(error.to_string(), "rank 1 aborted: disk full");
        }
    }
}

fn a_full_window_is_an_error_until_memory_comes_back(transport: Transport) {
    transport.run_all(|comm| {
        let half = 128 * KIB;
        let first = comm.alloc(half).unwrap();
        let second = comm.alloc(half).unwrap();
        assert_eq!(comm.memory().in_use_bytes, 2 * half);
        let error = comm.alloc(5000).unwrap_err();
        let CommError::WindowFull {
            asked_bytes,
            in_use_bytes,
            capacity_bytes,
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!(
            (asked_bytes, in_use_bytes, capacity_bytes),
            (5000, 2 * half, 2 * half)
        );
        drop((first, second));
        assert_eq!(comm.alloc(2 * half).unwrap().len(), 2 * half);
        assert!(comm.alloc(usize::MAX).is_err());
    });
}

fn wrong_arguments_are_errors_before_anything_is_published(transport: Transport) {
    transport.run_all(|comm| {
        let size = comm.world().size;
        let start = |kind, dtype, bytes| comm.start(op(kind, dtype), comm.alloc(bytes).unwrap());
        let error = start(CollectiveKind::AllGather, DType::F32, size * 4 + 2).unwrap_err();
        assert!(matches!(error, CommError::Indivisible { .. }), "{error}");
        let error = start(CollectiveKind::ReduceScatter, DType::BF16, size * 4).unwrap_err();
        assert!(
            matches!(error, CommError::UnsupportedDType { .. }),
            "{error}"
        );
        let error = start(CollectiveKind::Broadcast { root: size }, DType::U8, 1).unwrap_err();
        assert!(matches!(error, CommError::InvalidRoot { .. }), "{error}");
        let error = comm
            .barrier(Tag::new("a name that is far too long", 0))
            .unwrap_err();
        assert!(matches!(error, CommError::TagTooLong { .. }), "{error}");
        let stranger = threads::world(1, KIB).unwrap();
        let gather = op(CollectiveKind::AllGather, DType::U8);
        let error = comm
            .start(gather, stranger[0].alloc(size).unwrap())
            .unwrap_err();
        assert!(matches!(error, CommError::ForeignBuffer { .. }), "{error}");
        comm.barrier(TAG).unwrap();
    });
}

fn a_result_can_back_a_shared_tensor(transport: Transport) {
    transport.run_all(|comm| {
        let size = comm.world().size;
        let gather = op(CollectiveKind::AllGather, DType::U8);
        let result = start(&*comm, gather, &vec![5u8; size * 64])
            .wait_read()
            .unwrap();
        let shared: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(result);
        let reader = shared.clone();
        let sum = std::thread::spawn(move || {
            (*reader)
                .as_ref()
                .iter()
                .map(|&x| usize::from(x))
                .sum::<usize>()
        });
        assert_eq!(sum.join().unwrap(), 5 * 64 * size);
        drop(shared);
        assert_eq!(comm.memory().in_use_bytes, 0);
    });
}

fn threads_of_one_rank_wait_at_the_same_time(transport: Transport) {
    transport.run_all(|comm| {
        let World { rank, size } = comm.world();
        for _ in 0..20 {
            let reduce = op(CollectiveKind::AllReduce, DType::F32);
            let tickets: Vec<Ticket> = (0..4)
                .map(|i| start(&*comm, reduce, &vec![(i + rank) as f32; 500]))
                .collect();
            std::thread::scope(|scope| {
                for (i, ticket) in tickets.into_iter().enumerate() {
                    scope.spawn(move || {
                        let sum: usize = (0..size).map(|r| i + r).sum();
                        assert_eq!(ticket.wait().unwrap().as_slice::<f32>(), [sum as f32; 500]);
                    });
                }
            });
        }
    });
}

fn is_done_turns_true_without_waiting(transport: Transport) {
    let gate = transport.gate();
    transport.run(2, KIB, PATIENCE, |comm| {
        let gather = op(CollectiveKind::AllGather, DType::U8);
        if comm.world().rank == 0 {
            let ticket = start(&*comm, gather, &[1u8; 2]);
            assert!(!ticket.is_done());
            gate();
            comm.barrier(TAG).unwrap();
            assert!(ticket.is_done());
        } else {
            gate();
            let ticket = start(&*comm, gather, &[1u8; 2]);
            comm.barrier(TAG).unwrap();
            ticket.wait().unwrap();
        }
    });
}

macro_rules! conformance {
    ($($case:ident)*) => {
        #[cfg(feature = "mpi")]
        const CASES: &[(&str, fn(Transport))] = &[$((stringify!($case), $case)),*];
        mod over_threads {
            $(#[test] fn $case() { super::$case(super::Transport::Threads); })*
        }
        mod over_shm {
            $(#[test] fn $case() { super::$case(super::Transport::Shm); })*
        }
        #[cfg(feature = "mpi")]
        mod over_mpi {
            $(#[test] fn $case() { super::$case(super::Transport::Mpi); })*
        }
        mod over_tcp {
            $(#[test] fn $case() { super::$case(super::Transport::Tcp); })*
        }
    };
}

conformance! {
    all_gather_puts_every_part_in_its_place
    reduce_scatter_sums_in_rank_order
    shard_groups_hold_copies_and_sum_over_all_ranks
    all_reduce_gives_every_rank_the_same_bits_at_any_length
    broadcast_copies_the_root
    barrier_holds_until_all_have_come
    helpers_return_values_in_rank_order
    a_contributing_rank_serves_the_others_and_copies_nothing
    tickets_may_be_waited_for_in_any_order
    more_tickets_than_records_may_be_held
    dropped_tickets_harm_nobody
    a_buffer_can_be_overwritten_as_soon_as_it_is_back
    memory_is_reused_only_after_the_last_reader
    buffers_of_all_sizes_lie_where_a_dry_run_says
    ten_thousand_collectives_leak_nothing
    different_collectives_are_an_error_on_every_rank
    a_missing_rank_is_a_timeout_with_the_table_of_ranks
    an_abort_wakes_every_waiting_rank
    a_full_window_is_an_error_until_memory_comes_back
    wrong_arguments_are_errors_before_anything_is_published
    a_result_can_back_a_shared_tensor
    threads_of_one_rank_wait_at_the_same_time
    is_done_turns_true_without_waiting
}

/// The same suite with ranks in several processes: `mpirun -np 2 <this test binary> comm::conformance::processes`.
#[cfg(feature = "mpi")]
mod processes {
    use super::{CASES, Communicator, KIB, PATIENCE, TAG, Transport};
    use crate::comm::mpi;
    use std::sync::{Arc, Mutex, PoisonError};

    /// A world of one rank per process for setup and cleanup. MPI ends with it.
    static ALL: Mutex<Option<Arc<dyn Communicator>>> = Mutex::new(None);

    fn all() -> std::sync::MutexGuard<'static, Option<Arc<dyn Communicator>>> {
        ALL.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns after every process has called it.
    pub(super) fn meet() {
        let all = all().clone();
        all.expect("under mpirun").barrier(TAG).unwrap();
    }

    /// Returns at once unless mpirun started several processes. All cases are in one test, since processes must run
    /// them in the same order.
    #[test]
    fn every_case() {
        let processes = std::env::var("OMPI_COMM_WORLD_SIZE").map_or(1, |n| n.parse().unwrap());
        if processes < 2 {
            return;
        }
        *all() = Some(mpi::join(64 * KIB, PATIENCE).unwrap());
        for (name, case) in CASES {
            println!("{name}");
            case(Transport::Processes);
        }
        println!("{} cases in {processes} processes", CASES.len());
        drop(all().take());
    }
}

#[test]
fn a_world_outside_the_limits_is_refused() {
    for size in [0, super::MAX_RANKS + 1] {
        let error = threads::world(size, KIB).unwrap_err();
        assert!(matches!(error, CommError::InvalidWorld { .. }), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn reduce_scatter_then_all_gather_is_the_naive_ordered_sum(
        size in 1usize..=4,
        per_rank in 0usize..700,
        transport in prop_oneof![Just(Transport::Threads), Just(Transport::Shm), Just(Transport::Tcp)],
        seed in any::<u32>(),
    ) {
        let count = size * per_rank;
        let operand = |rank: usize, i: usize| {
            let hash = (seed ^ (rank * 7919 + i) as u32).wrapping_mul(0x9e37_79b9).rotate_left(11);
            (hash as f32 - 2e9) * 10f32.powi((hash % 13) as i32 - 20)
        };
        let results = transport.run(size, 64 * KIB, PATIENCE, |comm| {
            let World { rank, .. } = comm.world();
            let own: Vec<f32> = (0..count).map(|i| operand(rank, i)).collect();
            let reduced =
                start(&*comm, op(CollectiveKind::ReduceScatter, DType::F32), &own).wait().unwrap();
            let gathered = comm.start(op(CollectiveKind::AllGather, DType::F32), reduced).unwrap();
            bits(gathered.wait().unwrap().as_slice())
        });
        let naive: Vec<f32> = (0..count)
            .map(|i| (1..size).fold(operand(0, i), |sum, rank| sum + operand(rank, i)))
            .collect();
        for result in results {
            prop_assert_eq!(result, bits(&naive));
        }
    }
}
