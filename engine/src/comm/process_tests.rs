//! Tests of shared memory between real processes. This test binary runs itself again as the ranks.

use super::{
    Collective, CollectiveKind, CommError, Communicator, DEFAULT_DEADLINE, Tag, World, shm,
};
use kernels::DType;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Environment variable with `case rank size dir` of a child.
const ROLE: &str = "COMM_TEST_ROLE";
const TAG: Tag = Tag::new("process", 0);
const REGION_BYTES: usize = 1 << 20;

fn options(world: World, dir: &Path, deadline: Duration) -> shm::ShmOptions {
    let dirs = vec![dir.to_owned()];
    let name = "processes".to_owned();
    shm::ShmOptions {
        name,
        world,
        region_bytes: REGION_BYTES,
        deadline,
        dirs,
        stop: Arc::default(),
    }
}

fn spawn(case: &str, size: usize, dir: &Path) -> Vec<Child> {
    (0..size)
        .map(|rank| spawn_rank(case, rank, size, dir))
        .collect()
}

fn spawn_rank(case: &str, rank: usize, size: usize, dir: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "comm::process_tests::child", "--nocapture"])
        .env(ROLE, format!("{case} {rank} {size} {}", dir.display()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Body of a child process. It returns at once unless the environment names a case.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let [case, rank, size, dir] = role.splitn(4, ' ').collect::<Vec<_>>()[..] else {
        panic!("{role}")
    };
    let world = World {
        rank: rank.parse().unwrap(),
        size: size.parse().unwrap(),
    };
    let dir = PathBuf::from(dir);
    let deadline = if case == "kill" {
        Duration::from_millis(500)
    } else {
        DEFAULT_DEADLINE
    };
    let mut options = options(world, &dir, deadline);
    if case == "kill" {
        // Processes start slowly on a busy machine, so joining has the default deadline.
        options.deadline = DEFAULT_DEADLINE;
        let gate = shm::join(&shm::ShmOptions {
            name: "gate".to_owned(),
            ..options.clone()
        });
        gate.unwrap().barrier(TAG).unwrap();
        options.deadline = deadline;
    }
    let comm = shm::join(&options).unwrap();
    match case {
        "work" => work(&*comm),
        "kill" => lose_a_rank(&*comm),
        _ => panic!("{case}"),
    }
}

fn reduce_round(comm: &dyn Communicator, round: usize) -> Result<(), CommError> {
    let World { rank, size } = comm.world();
    let op = Collective::new(CollectiveKind::AllReduce, DType::F32, TAG);
    let mut buffer = comm.alloc(4 * 5000)?;
    buffer.as_mut_slice::<f32>().fill((rank + round) as f32);
    let ticket = comm.start(op, buffer)?;
    let expected = (0..size).map(|r| (r + round) as f32).sum::<f32>();
    assert!(
        ticket
            .wait_read()?
            .as_slice::<f32>()
            .iter()
            .all(|&x| x == expected)
    );
    Ok(())
}

#[test]
fn the_window_file_is_private_to_its_owner() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let seen = std::thread::scope(|scope| {
        let deadline = Duration::from_secs(60);
        let join = |rank| {
            let options = options(World { rank, size: 2 }, dir.path(), deadline);
            scope.spawn(move || shm::join(&options).unwrap())
        };
        let first = join(0);
        // The file has a name until the last rank has joined.
        let path = dir.path().join("processes");
        let mode = loop {
            match std::fs::metadata(&path) {
                Ok(found) => break found.permissions().mode() & 0o777,
                Err(_) => std::thread::yield_now(),
            }
        };
        let second = join(1);
        drop((first.join().unwrap(), second.join().unwrap()));
        mode
    });
    assert_eq!(seen, 0o600);
}

fn work(comm: &dyn Communicator) {
    (0..300)
        .try_for_each(|round| reduce_round(comm, round))
        .unwrap();
    let all = comm
        .all_gather_bytes(std::process::id().to_string().as_bytes(), TAG)
        .unwrap();
    let distinct: std::collections::BTreeSet<_> = all.iter().collect();
    assert_eq!(
        distinct.len(),
        comm.world().size,
        "every rank is a process of its own"
    );
}

fn lose_a_rank(comm: &dyn Communicator) {
    (0..10)
        .try_for_each(|round| reduce_round(comm, round))
        .unwrap();
    if comm.world().rank == 1 {
        let op = Collective::new(CollectiveKind::AllGather, DType::U8, Tag::new("fatal", 1));
        let _ticket = comm.start(op, comm.alloc(3).unwrap()).unwrap();
        let this = rustix::process::getpid();
        rustix::process::kill_process(this, rustix::process::Signal::KILL).unwrap();
    }
    let op = Collective::new(CollectiveKind::AllGather, DType::U8, Tag::new("fatal", 1));
    // The dead rank published its data before it died.
    comm.start(op, comm.alloc(3).unwrap())
        .unwrap()
        .wait_read()
        .unwrap();
    let error = comm.barrier(Tag::new("after", 2)).unwrap_err();
    let CommError::Timeout { ranks, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(ranks[1].last.as_ref().unwrap().tag_name, "fatal");
}

fn is_empty(dir: &Path) -> bool {
    std::fs::read_dir(dir).unwrap().next().is_none()
}

#[test]
fn processes_work_together_and_leave_no_file() {
    let dir = tempfile::tempdir().unwrap();
    for mut child in spawn("work", 3, dir.path()) {
        assert!(child.wait().unwrap().success());
    }
    assert!(is_empty(dir.path()));
}

#[test]
fn a_killed_process_is_a_timeout_for_the_others_and_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    for (rank, mut child) in spawn("kill", 3, dir.path()).into_iter().enumerate() {
        let status = child.wait().unwrap();
        match rank {
            1 => assert_eq!(status.signal(), Some(9)),
            _ => assert!(status.success(), "rank {rank}: {status}"),
        }
    }
    assert!(is_empty(dir.path()));
}

/// Waits until rank 1 of a window in `dir` has joined and waits for the others.
fn until_rank_1_waits(dir: &Path) {
    let path = dir.join("processes");
    loop {
        let file = std::fs::File::open(&path).ok();
        if file.is_some_and(|file| !shm::is_free(&file, 1..2).unwrap()) {
            return;
        }
        std::thread::yield_now();
    }
}

/// Leaves the window of a world of `size` ranks in `dir`, in which rank 1 waited for the others and was killed.
fn kill_waiting_rank_1(size: usize, dir: &Path) {
    let mut waiting = spawn_rank("work", 1, size, dir);
    until_rank_1_waits(dir);
    waiting.kill().unwrap();
    waiting.wait().unwrap();
    assert!(!is_empty(dir));
}

#[test]
fn the_file_of_a_job_whose_ranks_were_killed_while_they_waited_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    for size in [3, 2] {
        kill_waiting_rank_1(3, dir.path());
        for mut child in spawn("work", size, dir.path()) {
            assert!(child.wait().unwrap().success());
        }
        assert!(is_empty(dir.path()));
    }
}

#[test]
fn a_rank_that_was_killed_while_it_waited_starts_again_beside_ranks_that_wait() {
    let dir = tempfile::tempdir().unwrap();
    let mut lost = spawn_rank("work", 1, 3, dir.path());
    until_rank_1_waits(dir.path());
    let mut first = spawn_rank("work", 0, 3, dir.path());
    let path = dir.path().join("processes");
    while shm::is_free(&std::fs::File::open(&path).unwrap(), 0..1).unwrap() {
        std::thread::yield_now();
    }
    lost.kill().unwrap();
    lost.wait().unwrap();
    for mut child in [1, 2].map(|rank| spawn_rank("work", rank, 3, dir.path())) {
        assert!(child.wait().unwrap().success());
    }
    assert!(first.wait().unwrap().success());
    assert!(is_empty(dir.path()));
}

#[test]
fn a_stop_flag_ends_the_wait_for_other_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let patient = Duration::from_secs(60);
    let waiting = options(World { rank: 1, size: 2 }, dir.path(), patient);
    let stop = waiting.stop.clone();
    std::thread::scope(|scope| {
        let joined = scope.spawn(move || shm::join(&waiting).map(drop).unwrap_err());
        until_rank_1_waits(dir.path());
        stop.store(true, std::sync::atomic::Ordering::SeqCst);
        assert!(matches!(joined.join().unwrap(), CommError::Stopped));
    });
    assert!(is_empty(dir.path()));
}

#[test]
fn missing_ranks_are_named_and_the_file_is_unlinked() {
    let dir = tempfile::tempdir().unwrap();
    let deadline = Duration::from_millis(100);
    let errors: Vec<CommError> = std::thread::scope(|scope| {
        let join = |rank| {
            let options = options(World { rank, size: 4 }, dir.path(), deadline);
            scope.spawn(move || shm::join(&options).unwrap_err())
        };
        [join(0), join(2)]
            .into_iter()
            .map(|handle| handle.join().unwrap())
            .collect()
    });
    for error in errors {
        let CommError::Rendezvous {
            arrived, missing, ..
        } = error
        else {
            panic!("{error}")
        };
        assert!(missing.contains(&1) && missing.contains(&3) && !arrived.is_empty());
    }
    assert!(is_empty(dir.path()));
}

#[test]
fn the_second_directory_is_used_when_the_first_cannot_be() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let comms: Vec<Arc<dyn Communicator>> = std::thread::scope(|scope| {
        let join = |rank| {
            let mut options = options(World { rank, size: 2 }, dir.path(), Duration::from_secs(60));
            options.dirs.insert(0, missing.clone());
            scope.spawn(move || shm::join(&options).unwrap())
        };
        [join(1), join(0)]
            .into_iter()
            .map(|handle| handle.join().unwrap())
            .collect()
    });
    assert_eq!(comms.len(), 2);
    assert!(is_empty(dir.path()));
}

#[test]
fn a_window_larger_than_the_file_system_is_refused_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(World::SINGLE, dir.path(), DEFAULT_DEADLINE);
    options.dirs.push(dir.path().to_owned());
    options.region_bytes = 1 << 60;
    let error = shm::join(&options).unwrap_err();
    assert!(
        matches!(&error, CommError::NoSpace { tried, .. } if tried.len() == 2),
        "{error}"
    );
    options.dirs.truncate(1);
    assert!(shm::join(&options).is_err());
    assert!(is_empty(dir.path()));
}

#[test]
fn foreign_files_and_ranks_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let deadline = Duration::from_millis(50);
    let first = options(World { rank: 0, size: 2 }, dir.path(), deadline);

    // A file that is no window stays unchanged.
    let path = dir.path().join("processes");
    std::fs::write(&path, "letters").unwrap();
    let error = shm::join(&first).unwrap_err();
    assert!(
        matches!(
            error,
            CommError::WindowConflict {
                what: "file size",
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(std::fs::read(&path).unwrap(), b"letters");
    std::fs::remove_file(&path).unwrap();

    // A symbolic link is not followed.
    let target = dir.path().join("target");
    std::fs::write(&target, "").unwrap();
    std::os::unix::fs::symlink(&target, &path).unwrap();
    let error = shm::join(&first).unwrap_err();
    assert!(
        matches!(
            error,
            CommError::Io {
                action: "create",
                ..
            }
        ),
        "{error}"
    );
    shm::remove("processes", &[dir.path().to_owned()]).unwrap();
    shm::remove("processes", &[dir.path().to_owned()]).unwrap();
    assert_eq!(std::fs::metadata(&target).unwrap().len(), 0);
    std::fs::remove_file(&target).unwrap();

    for name in ["", ".", "..", "a/b", ".hidden"] {
        let error = shm::join(&shm::ShmOptions {
            name: name.to_owned(),
            ..first.clone()
        });
        assert!(matches!(error.unwrap_err(), CommError::InvalidName { .. }));
    }
}

#[test]
fn a_rank_that_joins_twice_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let patient = options(
        World { rank: 0, size: 2 },
        dir.path(),
        Duration::from_secs(60),
    );
    std::thread::scope(|scope| {
        // Two processes claim rank 0. One is refused, and the other waits for rank 1.
        let claims = [0, 1].map(|_| {
            let options = patient.clone();
            let dir = dir.path();
            scope.spawn(move || {
                let result = shm::join(&options);
                if matches!(result, Err(CommError::AlreadyJoined { rank: 0, .. })) {
                    let world = World { rank: 1, size: 2 };
                    let other = self::options(world, dir, options.deadline);
                    shm::join(&other).unwrap();
                }
                result
            })
        });
        let joined = claims.map(|claim| claim.join().unwrap());
        assert_eq!(joined.iter().filter(|joined| joined.is_err()).count(), 1);
    });
    assert!(is_empty(dir.path()));
}

#[test]
fn a_directory_that_cannot_hold_the_file_is_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let (file, good) = (dir.path().join("file"), dir.path().join("good"));
    std::fs::write(&file, "").unwrap();
    std::fs::create_dir(&good).unwrap();
    let world = World { rank: 0, size: 1 };
    let mut options = options(world, &good, Duration::from_secs(60));
    options.dirs.insert(0, file.clone());
    shm::join(&options).unwrap();
    assert!(is_empty(&good));
    options.dirs.pop();
    options.dirs.push(file);
    let error = shm::join(&options).unwrap_err();
    assert!(matches!(error, CommError::NoSpace { .. }), "{error}");
}
