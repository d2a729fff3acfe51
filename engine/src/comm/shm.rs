//! Ranks that are processes of one machine, over a memory-mapped file.
//!
//! The last rank to join unlinks the file, or a rank that gives up. So no file remains, however the processes end
//! afterwards. Only a job killed before all ranks had joined can leave a file. A rank holds a lock on the file until all
//! have joined, so the next job with the same name tells the file of a dead job from one in use and takes it over.
//! [`remove`] deletes it.
#![expect(
    unsafe_code,
    reason = "locks of parts of a file have no safe interface in the libraries at hand"
)]

use super::endpoint::{Endpoint, Member};
use super::window::{Failure, Layout, Window};
use super::{CommError, Communicator, DEFAULT_DEADLINE, MAX_RANKS, World};
use memmap2::MmapRaw;
use rustix::fs::{FallocateFlags, FlockOperation, OFlags};
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Pause between looks for the file that rank 0 creates.
const POLL: Duration = Duration::from_millis(1);
/// Time between looks at [`ShmOptions::stop`].
const STOP_POLL: Duration = Duration::from_millis(100);

/// Options for joining a communicator of processes on one machine, which share memory through a file. All but
/// the rank are the same on every rank.
#[derive(Clone, Debug)]
pub struct ShmOptions {
    /// Name of the file through which the ranks share memory, unique to the job: letters, digits, `-`, `_`
    /// and `.`.
    pub name: String,
    /// Index of this rank, and the number of ranks.
    pub world: World,
    /// Size in bytes of each rank's part of the shared memory, reserved when joining.
    pub region_bytes: usize,
    /// Longest time for all ranks to join, and for any later wait in a collective.
    pub deadline: Duration,
    /// Directories for the shared file. Rank 0 takes the first one with enough free space.
    pub dirs: Vec<PathBuf>,
    /// Ends joining with [`CommError::Stopped`] once it is set.
    pub stop: Arc<AtomicBool>,
}

impl ShmOptions {
    /// A window in `/dev/shm`, or, if that is too small or cannot be written, in the directory for temporary files
    /// (`TMPDIR`) or `/tmp`, with [`DEFAULT_DEADLINE`].
    #[must_use]
    pub fn new(name: impl Into<String>, world: World, region_bytes: usize) -> Self {
        Self {
            name: name.into(),
            world,
            region_bytes,
            deadline: DEFAULT_DEADLINE,
            dirs: directories(),
            stop: Arc::default(),
        }
    }

    fn layout(&self) -> Layout {
        Layout::new(self.world.size, self.region_bytes)
    }

    fn check_stop(&self) -> Result<(), CommError> {
        match self.stop.load(Ordering::SeqCst) {
            true => Err(CommError::Stopped),
            false => Ok(()),
        }
    }

    fn check(&self) -> Result<(), CommError> {
        self.world.check()?;
        check_name(&self.name)
    }
}

/// Directories for shared files, in the order in which they are tried.
pub(super) fn directories() -> Vec<PathBuf> {
    vec!["/dev/shm".into(), std::env::temp_dir(), "/tmp".into()]
}

fn check_name(name: &str) -> Result<(), CommError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let valid = (1..=200).contains(&name.len()) && name.chars().all(plain);
    let valid = valid && !name.starts_with('.');
    valid.then_some(()).ok_or_else(|| CommError::InvalidName {
        name: name.to_owned(),
    })
}

/// Joins the communicator of processes on one machine, and returns after every rank has joined.
///
/// # Errors
/// [`CommError::Rendezvous`] when ranks are missing at the deadline, [`CommError::NoSpace`],
/// [`CommError::AlreadyJoined`], [`CommError::WindowConflict`], [`CommError::Stopped`], invalid options, or a failed
/// system call. A rank that fails tells the others.
pub fn join(options: &ShmOptions) -> Result<Arc<dyn Communicator>, CommError> {
    options.check()?;
    let started = Instant::now();
    let (path, file, window) = loop {
        let (path, file) = open(options, started)?;
        // Without a window, the file was that of a dead job, or was unlinked meanwhile.
        if let Some(window) = enter(options, &path, &file).transpose() {
            break (path, file, window);
        }
    };
    let window = window.and_then(|window| {
        wait_for_all(options, &path, &window, started)?;
        Ok(window)
    });
    // Its lock has told the others that this rank lives. From now on they see what it publishes.
    drop(file);
    let window = window.inspect_err(|error| {
        // A file that another job uses, or that belongs to another job, is not ours to delete.
        if !matches!(
            error,
            CommError::AlreadyJoined { .. } | CommError::WindowConflict { .. }
        ) {
            unlink(&path).unwrap_or(());
        }
    })?;
    let endpoint = Endpoint::new(Arc::new(window), options.world, options.deadline);
    Ok(Arc::new(Member(Arc::new(endpoint))))
}

/// Deletes the shared file `name` from the directories `dirs`. It is left by a job that was killed before all
/// of its ranks had joined.
///
/// # Errors
/// [`CommError::InvalidName`] or a failed system call; a missing file is fine.
pub fn remove(name: &str, dirs: &[PathBuf]) -> Result<(), CommError> {
    check_name(name)?;
    dirs.iter()
        .map(|dir| dir.join(name))
        .try_for_each(|path| unlink(&path))
}

pub(super) fn unlink(path: &Path) -> Result<(), CommError> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(failed("unlink", path, source))
        }
        _ => Ok(()),
    }
}

pub(super) fn failed(action: &'static str, path: &Path, source: impl Into<io::Error>) -> CommError {
    CommError::Io {
        action,
        path: path.to_owned(),
        source: source.into(),
    }
}

/// Opens the file that all ranks share. With several candidate directories only rank 0 chooses, since free space
/// changes while ranks check it. The others look for its file.
fn open(options: &ShmOptions, started: Instant) -> Result<(PathBuf, File), CommError> {
    let total_bytes = options.layout().total_bytes() as u64;
    let create = |dir: &Path| {
        let path = dir.join(&options.name);
        let file = open_file(&path, true).map_err(|source| failed("create", &path, source))?;
        Ok((path, file))
    };
    if let [dir] = &options.dirs[..] {
        return create(dir);
    }
    if options.world.rank == 0 {
        let first = first_with_room(&options.dirs, total_bytes)?;
        // A sandbox may refuse files in a directory that looks writable.
        return create(first).or_else(|error| {
            let others = options.dirs.iter().filter(|dir| *dir != first);
            let others: Vec<PathBuf> = others.cloned().collect();
            match first_with_room(&others, total_bytes) {
                Ok(second) => create(second),
                Err(_) => Err(error),
            }
        });
    }
    loop {
        for path in options.dirs.iter().map(|dir| dir.join(&options.name)) {
            match open_file(&path, false) {
                // A file that rank 0 does not hold is that of a dead job, or rank 0 is about to enter it.
                Ok(file) if is_free(&file, 0..1).map_err(|e| failed("lock", &path, e))? => {}
                Ok(file) => return Ok((path, file)),
                Err(source) if source.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(failed("open", &path, source)),
            }
        }
        options.check_stop()?;
        let elapsed = started.elapsed();
        if elapsed >= options.deadline {
            let (arrived, missing) =
                (0..options.world.size).partition(|&rank| rank == options.world.rank);
            return Err(CommError::Rendezvous {
                arrived,
                missing,
                elapsed,
            });
        }
        std::thread::sleep(POLL);
    }
}

pub(super) fn open_file(path: &Path, create: bool) -> io::Result<File> {
    let flags = (OFlags::NOFOLLOW | OFlags::CLOEXEC).bits() as i32;
    let mut options = OpenOptions::new();
    let file = options
        .read(true)
        .write(true)
        .create(create)
        .mode(0o600)
        .custom_flags(flags);
    let file = file.open(path)?;
    let metadata = file.metadata()?;
    if metadata.uid() != rustix::process::geteuid().as_raw() || !metadata.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "file of another user",
        ));
    }
    Ok(file)
}

/// Bytes free in `dir`; none if it cannot be written.
pub(super) fn free_bytes(dir: &Path) -> u64 {
    use rustix::fs::Access;
    if rustix::fs::access(dir, Access::WRITE_OK | Access::EXEC_OK).is_err() {
        return 0;
    }
    rustix::fs::statvfs(dir).map_or(0, |fs| fs.f_bavail.saturating_mul(fs.f_frsize))
}

/// The first directory with `bytes` bytes free.
pub(super) fn first_with_room(dirs: &[PathBuf], bytes: u64) -> Result<&Path, CommError> {
    let tried: Vec<(PathBuf, u64)> = dirs
        .iter()
        .map(|dir| (dir.clone(), free_bytes(dir)))
        .collect();
    match tried.iter().position(|&(_, free)| free >= bytes) {
        Some(fit) => Ok(&dirs[fit]),
        None => Err(CommError::NoSpace {
            asked_bytes: bytes,
            tried,
        }),
    }
}

/// Sizes, reserves and maps the file and checks that its header agrees. It holds a file lock, so that ranks with
/// different options cannot resize each other's map. Returns `None` if the file had to be, or was, unlinked.
fn enter(options: &ShmOptions, path: &Path, file: &File) -> Result<Option<Window>, CommError> {
    let layout = options.layout();
    let rank = options.world.rank;
    let total_bytes = layout.total_bytes() as u64;
    let lock_failed = |e: io::Error| failed("lock", path, e);
    rustix::fs::flock(file, FlockOperation::LockExclusive).map_err(|e| failed("lock", path, e))?;
    if !lock(file, rank).map_err(lock_failed)? {
        let path = path.to_owned();
        return Err(CommError::AlreadyJoined { rank, path });
    }
    let metadata = file.metadata().map_err(|e| failed("inspect", path, e))?;
    if metadata.nlink() == 0 {
        return Ok(None);
    }
    let found = metadata.len();
    let is_dead = is_free(file, 0..MAX_RANKS).map_err(lock_failed)?;
    if found > 0 && is_dead && Window::is_in(file).map_err(|e| failed("read", path, e))? {
        unlink(path)?;
        return Ok(None);
    }
    if found == 0 {
        file.set_len(total_bytes)
            .map_err(|e| failed("size", path, e))?;
    } else if found != total_bytes {
        let what = "file size";
        let path = path.to_owned();
        return Err(CommError::WindowConflict {
            path,
            what,
            found,
            expected: total_bytes,
        });
    }
    reserve(path, file, 0, Layout::control_bytes())?;
    let map = MmapRaw::map_raw(file).map_err(|e| failed("map", path, e))?;
    let window = Window::new(map, layout);
    window
        .check_header()
        .map_err(|(what, found, expected)| CommError::WindowConflict {
            path: path.to_owned(),
            what,
            found,
            expected,
        })?;
    // Ranks that arrived and died before all had arrived start again and arrive once more.
    for dead in 0..layout.ranks {
        if is_free(file, dead..dead + 1).map_err(lock_failed)? || dead == rank {
            window.forget(dead);
        }
    }
    rustix::fs::flock(file, FlockOperation::Unlock).map_err(|e| failed("unlock", path, e))?;
    let region = layout.region(rank);
    reserve(path, file, region.start, region.len()).inspect_err(|error| {
        window.fail(Failure::Abort {
            by_rank: rank,
            reason: error.to_string(),
        });
    })?;
    Ok(Some(window))
}

/// Takes the lock of `rank` in the file, which ends with `file` or with the process. Returns whether it was free.
fn lock(file: &File, rank: usize) -> io::Result<bool> {
    match record_lock(file, rank..rank + 1, libc::F_OFD_SETLK) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether nobody but the owner of `file` holds a lock of `ranks`.
pub(super) fn is_free(file: &File, ranks: Range<usize>) -> io::Result<bool> {
    let found = record_lock(file, ranks, libc::F_OFD_GETLK)?;
    Ok(found.l_type == libc::F_UNLCK as libc::c_short)
}

/// Calls `fcntl` for an exclusive lock of the bytes `ranks`, one byte per rank. The locks belong to the open file, not to
/// the process, so ranks in threads of one process exclude each other too.
fn record_lock(file: &File, ranks: Range<usize>, command: libc::c_int) -> io::Result<libc::flock> {
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: ranks.start as libc::off_t,
        l_len: ranks.len() as libc::off_t,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open while `file` is borrowed, and both commands take a pointer to a `flock`, which they
    // use during the call only.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(lock),
    }
}

/// Reserves pages now, so a full file system is an error here and not a signal later.
pub(super) fn reserve(
    path: &Path,
    file: &File,
    start: usize,
    bytes: usize,
) -> Result<(), CommError> {
    if bytes == 0 {
        return Ok(());
    }
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), start as u64, bytes as u64) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::NOSPC) => {
                let tried = vec![(path.to_owned(), path.parent().map_or(0, free_bytes))];
                return Err(CommError::NoSpace {
                    asked_bytes: bytes as u64,
                    tried,
                });
            }
            Err(source) => return Err(failed("reserve space in", path, source)),
        }
    }
}

/// Announces this rank and waits for the others. The last one unlinks the file.
fn wait_for_all(
    options: &ShmOptions,
    path: &Path,
    window: &Window,
    started: Instant,
) -> Result<(), CommError> {
    let World { rank, size } = options.world;
    let everyone = u64::MAX >> (64 - size);
    let before = window.arrive(rank);
    if before | 1 << rank == everyone {
        unlink(path)?;
    }
    loop {
        let seen = window.bell().events();
        let arrived = window.arrived();
        if arrived == everyone {
            return Ok(());
        }
        if let Some(failure) = window.failure() {
            return Err(failure.error(window));
        }
        options.check_stop()?;
        let elapsed = started.elapsed();
        if elapsed >= options.deadline {
            let failure = Failure::Rendezvous {
                by_rank: rank,
                arrived,
                elapsed,
            };
            return Err(window.fail(failure).error(window));
        }
        let longest = STOP_POLL.min(options.deadline - elapsed);
        window.bell().wait(seen, longest, false);
    }
}
