//! A disk that fails at a chosen call. A save must survive each of these faults with the previous or the new
//! checkpoint intact. Tests use it, and [`Writer::begin_faulty`](super::Writer::begin_faulty) for whole
//! programs.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::fs::{Disk, FileHandle, FileSystem};

/// Fault that a test injects into a save, at a chosen call to the disk. Calls are counted from 0.
#[derive(Clone, Copy, Debug)]
pub enum DiskFault {
    /// No fault.
    None,
    /// The process dies: a write writes half of its bytes, and every later call fails.
    Kill,
    /// The machine dies: as `Kill`, and files that were not synced are empty afterwards.
    PowerLoss,
    /// The disk is full from then on.
    NoSpace,
    /// One write takes half of its bytes, which is no error.
    ShortWrite,
    /// Calls a function for faults that a disk does not have. It may end or suspend the process.
    Act(fn()),
}

#[derive(Debug)]
struct State {
    calls: u64,
    fail_at: u64,
    fault: DiskFault,
    unsynced: Vec<(u64, File)>,
    next_file: u64,
}

/// A [`FileSystem`] that has a [`DiskFault`] at a chosen call.
#[derive(Clone, Debug)]
pub(super) struct FaultyDisk {
    state: Arc<Mutex<State>>,
    can_exchange: bool,
}

/// What happens in the current call to the disk.
enum Verdict {
    Proceed,
    Half,
    HalfThenFail,
}

impl FaultyDisk {
    pub(super) fn new(fault: DiskFault, fail_at: u64, can_exchange: bool) -> Self {
        let state = State {
            calls: 0,
            fail_at,
            fault,
            unsynced: Vec::new(),
            next_file: 0,
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            can_exchange,
        }
    }

    /// Number of calls to the disk.
    #[cfg(test)]
    pub(super) fn calls(&self) -> u64 {
        self.state().calls
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // After a panic of another thread the value is still a valid count.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self, allocates: bool) -> io::Result<Verdict> {
        let mut state = self.state();
        let call = state.calls;
        state.calls += 1;
        let died = || io::Error::other("killed");
        if call < state.fail_at {
            return Ok(Verdict::Proceed);
        }
        match state.fault {
            DiskFault::Act(act) if call == state.fail_at => {
                // The lock is free meanwhile, since the call may not return or may unwind.
                drop(state);
                act();
                Ok(Verdict::Proceed)
            }
            DiskFault::None | DiskFault::Act(_) => Ok(Verdict::Proceed),
            DiskFault::ShortWrite if call == state.fail_at => Ok(Verdict::Half),
            DiskFault::ShortWrite => Ok(Verdict::Proceed),
            DiskFault::NoSpace if allocates => Err(ErrorKind::StorageFull.into()),
            DiskFault::NoSpace => Ok(Verdict::Proceed),
            DiskFault::Kill | DiskFault::PowerLoss if call > state.fail_at => Err(died()),
            DiskFault::PowerLoss => {
                for (_, file) in &state.unsynced {
                    file.set_len(0)?;
                }
                Err(died())
            }
            DiskFault::Kill if allocates => Ok(Verdict::HalfThenFail),
            DiskFault::Kill => Err(died()),
        }
    }
}

impl FileSystem for FaultyDisk {
    fn create(&self, path: &Path, _bytes: u64) -> io::Result<Box<dyn FileHandle>> {
        self.call(true)?;
        let file = File::create(path)?;
        let mut state = self.state();
        let id = state.next_file;
        state.next_file += 1;
        state.unsynced.push((id, file.try_clone()?));
        Ok(Box::new(FaultyFile {
            disk: self.clone(),
            file,
            id,
        }))
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.call(false)?;
        Disk.create_dir_all(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.call(false)?;
        Disk.rename(from, to)
    }

    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()> {
        self.call(false)?;
        if self.can_exchange {
            Disk.exchange(a, b)
        } else {
            Err(ErrorKind::Unsupported.into())
        }
    }

    fn sync_file(&self, path: &Path) -> io::Result<()> {
        self.call(false)?;
        Disk.sync_file(path)
    }

    fn sync_dir(&self, _path: &Path) -> io::Result<()> {
        self.call(false)?;
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.call(false)?;
        Disk.remove_file(path)
    }

    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        // A kill in the middle leaves part of the content.
        if let Err(error) = self.call(false) {
            let victim = path.join("trainer_state.json");
            if victim.exists() {
                std::fs::remove_file(victim)?;
            }
            return Err(error);
        }
        Disk.remove_dir_all(path)
    }
}

#[derive(Debug)]
struct FaultyFile {
    disk: FaultyDisk,
    file: File,
    id: u64,
}

impl Write for FaultyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.disk.call(true)? {
            Verdict::Proceed => self.file.write(bytes),
            Verdict::Half => self.file.write(&bytes[..bytes.len().div_ceil(2)]),
            Verdict::HalfThenFail => {
                self.file.write_all(&bytes[..bytes.len() / 2])?;
                Err(io::Error::other("killed"))
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl FileHandle for FaultyFile {
    fn sync(&mut self) -> io::Result<()> {
        self.disk.call(false)?;
        self.disk.state().unsynced.retain(|(id, _)| *id != self.id);
        Ok(())
    }
}
