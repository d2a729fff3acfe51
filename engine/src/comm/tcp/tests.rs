//! Tests of the rendezvous: success, and each kind of failure.

use super::handshake::{Identity, answer};
use super::{Groups, MeetError, Secret, TcpOptions, join, join_at};
use crate::comm::mesh::{Coordinates, Mesh, Neighbor, Regions, groups};
use crate::comm::{CommError, Communicator, Tag, World};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

fn secret(text: &str) -> Secret {
    Secret::new(format!("the secret of these tests {text}").as_bytes()).unwrap()
}

/// A listener for rank 0, so that no other test takes its port.
fn listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

fn options(rank: usize, size: usize, port: u16) -> TcpOptions {
    TcpOptions {
        world: World { rank, size },
        region_bytes: 1 << 16,
        deadline: PATIENCE,
        addr: "127.0.0.1".to_owned(),
        port,
        secret: secret("a"),
        facts: vec![("version".to_owned(), "1".to_owned())],
        host: format!("host{rank}"),
        stop: Arc::default(),
    }
}

fn own(rank: usize, text: &str) -> Identity {
    Identity {
        rank,
        size: 2,
        secret: secret(text),
        stop: Arc::default(),
    }
}

type Joined = Result<Arc<dyn Communicator>, MeetError>;

/// Joins with options that `change` edits for each rank. A rank for which it returns false does not join.
fn meet(size: usize, change: impl Fn(&mut TcpOptions) -> bool) -> Vec<Option<Joined>> {
    let (listener, port) = listener();
    let mut listener = Some(listener);
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..size)
            .map(|rank| {
                let mut options = options(rank, size, port);
                let comes = change(&mut options);
                let listener = listener.take().filter(|_| rank == 0);
                comes.then(|| scope.spawn(move || join_at(&options, listener)))
            })
            .collect();
        let joined = |handle: Option<std::thread::ScopedJoinHandle<'_, Joined>>| {
            handle.map(|handle| handle.join().unwrap())
        };
        handles.into_iter().map(joined).collect()
    })
}

#[test]
fn groups_of_a_world_have_connections_of_their_own() {
    let (listener, port) = listener();
    let mut listener = Some(listener);
    let regions = Regions {
        data: 1 << 16,
        link: 1 << 16,
    };
    let work = |options: TcpOptions, listener: Option<TcpListener>| {
        let (world, addresses) = super::join_with(&options, listener, PATIENCE).unwrap();
        let at = Coordinates::of(options.world, 2).unwrap();
        let all = groups(at, regions);
        let mut groups = Groups::announce(&options, addresses, &*world, &all).unwrap();
        let mesh = Mesh::join(world, 2, regions, |group| groups.join(group)).unwrap();
        let gathered = mesh
            .data()
            .all_gather_f64(&[at.stage as f64], Tag::new("data", 0));
        assert_eq!(gathered.unwrap(), vec![vec![at.stage as f64]; 2]);
        match at.is_last() {
            true => mesh.receive(Neighbor::Previous, |_, _| Ok::<_, CommError>(())),
            false => mesh.send(Neighbor::Next, &[], |_, _| Ok::<_, CommError>(())),
        }
        .unwrap();
        mesh.world().barrier(Tag::new("end", 0)).unwrap();
    };
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let listener = listener.take();
            scope.spawn(move || work(options(rank, 4, port), listener));
        }
    });
}

/// A world of threads with connections, for the conformance cases.
pub(in crate::comm) fn worlds(
    size: usize,
    region_bytes: usize,
    deadline: Duration,
) -> Vec<Arc<dyn Communicator>> {
    let (listener, port) = listener();
    let mut listener = Some(listener);
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..size)
            .map(|rank| {
                let mut options = options(rank, size, port);
                options.region_bytes = region_bytes;
                // The deadlines of the cases begin after the rendezvous.
                options.deadline = PATIENCE;
                let listener = listener.take().filter(|_| rank == 0);
                scope.spawn(move || super::join_with(&options, listener, deadline).unwrap().0)
            })
            .collect();
        let joined = handles.into_iter().map(|handle| handle.join().unwrap());
        joined.collect()
    })
}

fn error(joined: &Option<Joined>) -> &MeetError {
    match joined {
        Some(Err(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranks_join_and_exchange_bytes() {
    for size in [1, 2, 5] {
        let ranks: Vec<_> = meet(size, |_| true)
            .into_iter()
            .map(|joined| joined.unwrap().unwrap())
            .collect();
        std::thread::scope(|scope| {
            for comm in &ranks {
                scope.spawn(move || {
                    let own = vec![comm.world().rank as u8];
                    let all = comm.all_gather_bytes(&own, Tag::new("hello", 0)).unwrap();
                    let expected: Vec<Vec<u8>> = (0..size).map(|rank| vec![rank as u8]).collect();
                    assert_eq!(all, expected);
                });
            }
        });
    }
}

#[test]
fn a_rank_that_leaves_is_not_waited_for() {
    let ranks: Vec<_> = meet(3, |_| true)
        .into_iter()
        .map(|joined| joined.unwrap().unwrap())
        .collect();
    // A rank that learned of the end during its first barrier would fail.
    let all_behind = Barrier::new(ranks.len());
    std::thread::scope(|scope| {
        for comm in ranks {
            let all_behind = &all_behind;
            scope.spawn(move || {
                comm.barrier(Tag::new("before", 0)).unwrap();
                all_behind.wait();
                if comm.world().rank == 2 {
                    return;
                }
                let started = Instant::now();
                let error = comm.barrier(Tag::new("after", 1)).unwrap_err();
                assert_eq!(
                    error.to_string(),
                    "rank 2 aborted: it ended before collective #1"
                );
                assert!(started.elapsed() < PATIENCE);
            });
        }
    });
}

#[test]
fn missing_ranks_are_named_with_those_that_came() {
    let joined = meet(4, |options| {
        options.deadline = Duration::from_millis(300);
        ![1, 3].contains(&options.world.rank)
    });
    let MeetError::Missing {
        size: 4,
        arrived,
        missing,
        ..
    } = error(&joined[0])
    else {
        panic!("{joined:?}")
    };
    assert_eq!(missing, &[1, 3]);
    let came = [(0, "host0".to_owned()), (2, "host2".to_owned())];
    assert_eq!(arrived, &came);
    // The others learn it from rank 0.
    let told = error(&joined[2]).to_string();
    assert!(told.contains("[1, 3] did not come"), "{told}");
}

#[test]
fn a_rank_with_a_different_fact_is_named_on_every_rank() {
    let joined = meet(3, |options| {
        if options.world.rank == 2 {
            options.facts[0].1 = "2".to_owned();
        }
        true
    });
    for joined in &joined {
        let MeetError::Differs {
            rank: 2,
            host,
            what,
            theirs,
            ours,
        } = error(joined)
        else {
            // Rank 1 may come after the end of the rendezvous.
            assert!(
                matches!(
                    error(joined),
                    MeetError::Broken { .. }
                        | MeetError::Unreachable { .. }
                        | MeetError::Refused { .. }
                ),
                "{joined:?}"
            );
            continue;
        };
        assert_eq!(
            (&**host, &**what, &**theirs, &**ours),
            ("host2", "version", "2", "1")
        );
    }
    assert!(matches!(error(&joined[0]), MeetError::Differs { .. }));
    assert!(matches!(error(&joined[2]), MeetError::Differs { .. }));
}

#[test]
fn another_world_size_or_a_missing_fact_is_a_difference() {
    let joined = meet(2, |options| {
        if options.world.rank == 1 {
            options.world.size = 3;
        }
        true
    });
    let text = error(&joined[0]).to_string();
    assert!(
        text.contains("a world of \"3 ranks\"") && text.contains("\"2 ranks\""),
        "{text}"
    );
    let joined = meet(2, |options| {
        if options.world.rank == 0 {
            options.facts.clear();
        }
        true
    });
    let text = error(&joined[1]).to_string();
    assert!(
        text.contains("rank 1 on host1 has version \"1\", rank 0 has \"nothing\""),
        "{text}"
    );
}

#[test]
fn two_processes_with_one_rank_number_are_refused() {
    let (listener, port) = listener();
    let twice = std::thread::scope(|scope| {
        let first = scope.spawn(move || join_at(&options(0, 3, port), Some(listener)));
        for _ in 0..2 {
            scope.spawn(move || join(&options(1, 3, port)).map(drop));
        }
        first.join().unwrap().map(drop).unwrap_err()
    });
    assert!(
        matches!(&twice, MeetError::Twice { rank: 1, hosts } if hosts[0] == "host1"),
        "{twice}"
    );
}

#[test]
fn a_rank_with_another_secret_is_rejected_and_the_others_go_on() {
    let (listener, port) = listener();
    std::thread::scope(|scope| {
        let first = scope.spawn(move || join_at(&options(0, 2, port), Some(listener)));
        let mut stranger = options(1, 2, port);
        stranger.secret = secret("b");
        let refused = join(&stranger).map(drop).unwrap_err();
        assert!(matches!(refused, MeetError::Refused { .. }), "{refused}");
        // The real rank 1 can still join.
        let second = join(&options(1, 2, port)).unwrap();
        let first = first.join().unwrap().unwrap();
        drop((first, second));
    });
}

#[test]
fn connections_that_send_noise_or_nothing_are_dropped() {
    let (listener, port) = listener();
    std::thread::scope(|scope| {
        let mut waiting = options(0, 2, port);
        waiting.deadline = Duration::from_millis(600);
        let first = scope.spawn(move || join_at(&waiting, Some(listener)));
        let silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let mut loud = TcpStream::connect(("127.0.0.1", port)).unwrap();
        loud.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let mut claims_much = TcpStream::connect(("127.0.0.1", port)).unwrap();
        claims_much.write_all(&u32::MAX.to_le_bytes()).unwrap();
        let error = first.join().unwrap().map(drop).unwrap_err();
        let MeetError::Missing {
            missing,
            turned_away,
            ..
        } = &error
        else {
            panic!("{error}")
        };
        assert_eq!(missing, &[1]);
        assert!(turned_away.len() >= 2, "{turned_away:?}");
        drop(silent);
    });
}

#[test]
fn a_listener_that_does_not_know_the_secret_learns_nothing() {
    let impostor = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = impostor.local_addr().unwrap().port();
    let until = Instant::now() + PATIENCE;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (stream, _) = impostor.accept().unwrap();
            let error = answer(stream, &own(0, "b"), until, || true).unwrap_err();
            assert!(
                error.to_string().contains("does not know the secret"),
                "{error}"
            );
        });
        let error = join(&options(1, 2, port)).map(drop).unwrap_err();
        assert!(matches!(error, MeetError::Refused { .. }), "{error}");
    });
    // A listener that repeats the messages it receives learns nothing either.
    let mirror = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = mirror.local_addr().unwrap().port();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut stream, _) = mirror.accept().unwrap();
            let mut bytes = [0; 4096];
            while let Ok(read) = stream.read(&mut bytes) {
                if read == 0 || stream.write_all(&bytes[..read]).is_err() {
                    break;
                }
            }
        });
        let error = join(&options(1, 2, port)).map(drop).unwrap_err();
        assert!(matches!(error, MeetError::Stranger { .. }), "{error}");
    });
}

#[test]
fn a_port_in_use_and_an_absent_host_are_told_apart() {
    let (_taken, port) = listener();
    let error = join(&options(0, 2, port)).map(drop).unwrap_err();
    assert!(
        matches!(error, MeetError::PortInUse { port: found } if found == port),
        "{error}"
    );
    let (listener, port) = listener();
    drop(listener);
    let mut alone = options(1, 2, port);
    alone.deadline = Duration::from_millis(100);
    let error = join(&alone).map(drop).unwrap_err();
    assert!(
        matches!(error, MeetError::Unreachable { rank: 1, .. }),
        "{error}"
    );
}

/// A proxy in front of `port` for one connection. It copies both directions, and passes what the caller sends through
/// `change` as soon as `hostile` is set. Returns its port.
fn proxy(
    port: u16,
    hostile: &Arc<AtomicBool>,
    change: impl Fn(&[u8]) -> Vec<u8> + Send + 'static,
) -> u16 {
    let front = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = front.local_addr().unwrap().port();
    let hostile = hostile.clone();
    std::thread::spawn(move || {
        let (caller, _) = front.accept().unwrap();
        let callee = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let back = (callee.try_clone().unwrap(), caller.try_clone().unwrap());
        std::thread::spawn(move || copy(back.0, back.1, <[u8]>::to_vec));
        copy(caller, callee, |bytes| {
            match hostile.load(Ordering::SeqCst) {
                true => change(bytes),
                false => bytes.to_vec(),
            }
        });
    });
    own
}

fn copy(mut from: TcpStream, mut to: TcpStream, change: impl Fn(&[u8]) -> Vec<u8>) {
    let mut bytes = [0; 4096];
    while let Ok(read @ 1..) = from.read(&mut bytes) {
        if to.write_all(&change(&bytes[..read])).is_err() {
            break;
        }
    }
    to.shutdown(Shutdown::Write).ok();
}

/// What both ranks report when `change` alters the bytes that rank 1 sends to rank 0 after their first collective.
fn altered(change: impl Fn(&[u8]) -> Vec<u8> + Send + 'static) -> Vec<CommError> {
    let (listener, port) = listener();
    let hostile = Arc::new(AtomicBool::new(false));
    let front = proxy(port, &hostile, change);
    std::thread::scope(|scope| {
        let ranks = [(0, port, Some(listener)), (1, front, None)].map(|(rank, port, listener)| {
            scope.spawn(move || join_at(&options(rank, 2, port), listener).unwrap())
        });
        let ranks = ranks.map(|rank| rank.join().unwrap());
        let gather = |comm: &dyn Communicator, index| {
            comm.all_gather_bytes(&[comm.world().rank as u8; 99], Tag::new("bytes", index))
        };
        for is_hostile in [false, true] {
            hostile.store(is_hostile, Ordering::SeqCst);
            let index = u32::from(is_hostile);
            let runs = ranks
                .clone()
                .map(|comm| scope.spawn(move || gather(&*comm, index).map(drop).err()));
            let errors: Vec<_> = runs
                .into_iter()
                .flat_map(|run| run.join().unwrap())
                .collect();
            if is_hostile {
                return errors;
            }
            assert!(errors.is_empty(), "{errors:?}");
        }
        unreachable!("the second round returns")
    })
}

#[test]
fn altered_frames_end_the_job_and_name_peer_and_collective() {
    let flipped = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        // The content of a frame starts after its length.
        bytes[4 + 20] ^= 1;
        bytes
    };
    let errors = altered(flipped);
    assert!(!errors.is_empty());
    for error in errors {
        let text = error.to_string();
        let CommError::Altered {
            noticed_by: 0,
            from: 1,
            sequence,
            op,
        } = error
        else {
            panic!("{text}")
        };
        assert!(text.contains(&format!("collective #{sequence}")), "{text}");
        // The receiver may not have started the collective yet.
        assert!(op.is_none_or(|op| op.tag_name == "bytes"), "{text}");
    }
}

#[test]
fn frames_that_arrive_twice_end_the_job() {
    let errors = altered(|bytes| [bytes, bytes].concat());
    assert!(
        matches!(errors[..], [CommError::Altered { from: 1, .. }, ..]),
        "{errors:?}"
    );
}

#[test]
fn a_handshake_that_was_recorded_opens_no_other_connection() {
    let (listener, port) = listener();
    let recorded = Arc::new(Mutex::new(Vec::new()));
    let hostile = Arc::new(AtomicBool::new(true));
    let tape = recorded.clone();
    let front = proxy(port, &hostile, move |bytes| {
        tape.lock().unwrap().extend(bytes);
        bytes.to_vec()
    });
    let until = Instant::now() + PATIENCE;
    let accept = |listener: &TcpListener| {
        listener.set_nonblocking(false).unwrap();
        answer(listener.accept().unwrap().0, &own(0, "a"), until, || true)
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| accept(&listener).map(drop));
        let stream = TcpStream::connect(("127.0.0.1", front)).unwrap();
        super::handshake::call(stream, &own(1, "a"), until).unwrap();
        first.join().unwrap().unwrap();
        let again = scope.spawn(|| accept(&listener).map(drop));
        let mut replay = TcpStream::connect(("127.0.0.1", port)).unwrap();
        replay.write_all(&recorded.lock().unwrap()).unwrap();
        let error = again.join().unwrap().unwrap_err();
        assert!(
            error.to_string().contains("does not know the secret"),
            "{error}"
        );
    });
}

#[test]
fn silent_connections_do_not_keep_a_rank_out() {
    let (listener, port) = listener();
    std::thread::scope(|scope| {
        let first = scope.spawn(move || join_at(&options(0, 2, port), Some(listener)));
        let silent: Vec<_> = (0..300)
            .map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap())
            .collect();
        let second = join(&options(1, 2, port)).unwrap();
        let first = first.join().unwrap().unwrap();
        drop((first, second, silent));
    });
}

#[test]
fn a_rank_calls_again_after_a_connection_that_ended_before_the_greeting() {
    let port = listener().1;
    let closes = TcpListener::bind(("127.0.0.1", port)).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(move || join(&options(1, 2, port)).map(drop));
        for _ in 0..3 {
            drop(closes.accept().unwrap());
        }
        closes.set_nonblocking(true).unwrap();
        join_at(&options(0, 2, port), Some(closes))
            .map(drop)
            .unwrap();
        second.join().unwrap().unwrap();
    });
}

#[test]
fn a_stop_flag_ends_the_rendezvous_of_every_rank() {
    // Rank 0 waits for rank 2, and rank 1 for the verdict of rank 0.
    let (listener, port) = listener();
    let all = [0, 1].map(|rank| options(rank, 3, port));
    let stops = all.each_ref().map(|options| options.stop.clone());
    std::thread::scope(|scope| {
        let [first, second] = all;
        let first = scope.spawn(move || join_at(&first, Some(listener)).map(drop));
        let second = scope.spawn(move || join(&second).map(drop));
        for (stop, joined) in stops.into_iter().zip([first, second]).rev() {
            stop.store(true, Ordering::SeqCst);
            let error = joined.join().unwrap().unwrap_err();
            assert!(
                matches!(error, MeetError::Window(CommError::Stopped)),
                "{error}"
            );
        }
    });
}
