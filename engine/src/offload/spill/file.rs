//! Spill files and the extents in them.
#![expect(
    unsafe_code,
    reason = "memory maps of files, and telling the kernel to forget their pages"
)]

use super::Result;
use super::directory::SpillDirectory;
use super::queue::Writes;
use crate::error::SpillError;
use crate::plan::blocks::{BLOCK_BYTES, extent_bytes};
use memmap2::{MmapMut, MmapOptions, UncheckedAdvice};
use rustix::fs::{FallocateFlags, OFlags};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

/// Maximal number of bytes that the kernel maps around one page fault.
const FAULT_BYTES: usize = 64 << 10;
const MAGIC: &[u8; 8] = b"TESSPILL";

/// I/O path of spill files: direct I/O or a memory map.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IoPath {
    /// Direct I/O (`O_DIRECT`): bypasses the page cache and saves a copy.
    Direct,
    /// Shared memory map of the file, through the page cache.
    Mapped,
}

impl IoPath {
    /// Name of the I/O path: `direct` or `mapped`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Mapped => "mapped",
        }
    }
}

/// Content of a spill file's first block.
#[derive(Serialize)]
struct Header<'a> {
    version: u32,
    job: &'a Path,
    rank: usize,
    kind: &'a str,
    process: u32,
}

#[derive(Debug)]
struct Backing {
    path: PathBuf,
    file: File,
    io: IoPath,
    /// Keeps the directory locked.
    _directory: Arc<SpillDirectory>,
}

/// Spill file: one kind of state of one rank, on disk. It consists of a header block and extents (byte
/// ranges).
#[derive(Debug)]
pub struct SpillFile {
    backing: Arc<Backing>,
    end: u64,
}

impl SpillFile {
    /// Creates the spill file of `rank` for the kind of state `kind`. An existing file is never opened, since
    /// a living job may use it.
    ///
    /// # Errors
    /// [`SpillError::Taken`] if the name exists. Other errors if the file system refuses, e.g. direct I/O on tmpfs
    /// and some network file systems.
    pub fn create(
        directory: &Arc<SpillDirectory>,
        rank: usize,
        kind: &str,
        io: IoPath,
    ) -> Result<Self> {
        let path = directory.path().join(format!("rank-{rank}.{kind}"));
        let mut options = OpenOptions::new();
        options.create_new(true).read(true).write(true);
        options
            .mode(0o600)
            .custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
        // The header is written through the page cache, before direct I/O begins.
        let plain = options.open(&path).map_err(|e| match e.kind() {
            ErrorKind::AlreadyExists => SpillError::Taken { path: path.clone() },
            _ => SpillError::io("create", &path)(e),
        })?;
        let header = Header {
            version: 1,
            job: directory.path(),
            rank,
            kind,
            process: std::process::id(),
        };
        let file = begin(plain, &path, &header, io).inspect_err(|_| {
            // Frees the name for a second attempt, e.g. with the other I/O path.
            std::fs::remove_file(&path).ok();
        })?;
        Ok(Self {
            backing: Arc::new(Backing {
                path,
                file,
                io,
                _directory: directory.clone(),
            }),
            end: BLOCK_BYTES,
        })
    }

    /// Allocates an extent (a contiguous byte range of the file) of `len` zeroed bytes. Its byte 0 is `phase`
    /// bytes after a block boundary, so that callers can align extents of different element sizes.
    ///
    /// # Errors
    /// [`SpillError::NoSpace`] when the disk is too small.
    pub fn allocate(&mut self, len: u64, phase: u64) -> Result<Extent> {
        let lead = phase % BLOCK_BYTES;
        let bytes = extent_bytes(len, phase);
        let offset = self.end;
        self.reserve(offset, bytes)?;
        self.end += bytes;
        let map = match self.backing.io {
            IoPath::Direct => None,
            IoPath::Mapped => {
                let mut options = MmapOptions::new();
                let options = options.offset(offset).len(bytes as usize);
                // SAFETY: the file belongs to this job's locked directory and nobody shortens it.
                let map = unsafe { options.map_mut(&self.backing.file) }
                    .map_err(SpillError::io("map", &self.backing.path))?;
                Some(RwLock::new(map))
            }
        };
        Ok(Extent(Arc::new(ExtentInner {
            backing: self.backing.clone(),
            offset,
            lead,
            len,
            map,
            writes: Writes::new(),
        })))
    }

    fn reserve(&self, offset: u64, bytes: u64) -> Result<()> {
        let Backing { path, file, .. } = &*self.backing;
        match rustix::fs::fallocate(file, FallocateFlags::empty(), offset, bytes) {
            Ok(()) => Ok(()),
            // Without support for preallocation, enough free space must suffice.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS)
                if free_bytes(path) >= bytes =>
            {
                file.set_len(offset + bytes)
                    .map_err(SpillError::io("extend", path))
            }
            Err(
                rustix::io::Errno::NOSPC
                | rustix::io::Errno::DQUOT
                | rustix::io::Errno::OPNOTSUPP
                | rustix::io::Errno::NOSYS,
            ) => Err(SpillError::NoSpace {
                path: path.clone(),
                asked_bytes: bytes,
                free_bytes: free_bytes(path),
            }),
            Err(e) => Err(SpillError::io("extend", path)(e.into())),
        }
    }

    /// Waits until all writes so far are on disk.
    ///
    /// # Errors
    /// When the disk fails.
    pub(super) fn sync(&self) -> Result<()> {
        let Backing { path, file, .. } = &*self.backing;
        file.sync_data().map_err(SpillError::io("sync", path))
    }

    /// Drops the file from the page cache, so that reads come from the disk.
    pub(super) fn forget_cache(&self) -> Result<()> {
        let Backing { path, file, .. } = &*self.backing;
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)
            .map_err(|e| SpillError::io("advise on", path)(e.into()))
    }

    /// Size of the spill file in bytes: the header and all extents.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.end
    }
}

/// Writes the header of a new file and opens it with the I/O path `io`.
fn begin(plain: File, path: &Path, header: &Header<'_>, io: IoPath) -> Result<File> {
    let mut block = vec![0; BLOCK_BYTES as usize];
    let text = serde_json::to_vec(header).unwrap_or_default();
    block[..8].copy_from_slice(MAGIC);
    let len = text.len().min(block.len() - 8);
    block[8..8 + len].copy_from_slice(&text[..len]);
    plain
        .write_all_at(&block, 0)
        .and_then(|()| plain.sync_data())
        .map_err(SpillError::io("write", path))?;
    match io {
        IoPath::Mapped => Ok(plain),
        IoPath::Direct => OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags((OFlags::DIRECT | OFlags::NOFOLLOW).bits().cast_signed())
            .open(path)
            .map_err(SpillError::io("open for direct I/O", path)),
    }
}

impl Drop for SpillFile {
    fn drop(&mut self) {
        // The directory is removed with the job. It does not matter if the file is already gone.
        std::fs::remove_file(&self.backing.path).ok();
    }
}

fn free_bytes(path: &Path) -> u64 {
    rustix::fs::statvfs(path.parent().unwrap_or(path))
        .map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[derive(Debug)]
struct ExtentInner {
    backing: Arc<Backing>,
    /// Offset of the extent in the file.
    offset: u64,
    /// Bytes before the extent's byte 0 in its first block.
    lead: u64,
    len: u64,
    map: Option<RwLock<MmapMut>>,
    writes: Writes,
}

/// Extent: a contiguous byte range of a spill file. Clones refer to the same range.
#[derive(Clone, Debug)]
pub struct Extent(Arc<ExtentInner>);

impl Extent {
    /// Length of the extent in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.len
    }

    /// Whether the extent has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// I/O path (direct I/O or a memory map) of the spill file that contains the extent.
    #[must_use]
    pub fn io(&self) -> IoPath {
        self.0.backing.io
    }

    /// The blocks of `range`, as a range of bytes from the extent's first block, and the offset of `range` in them.
    pub(super) fn blocks(&self, range: &Range<u64>) -> (Range<u64>, usize) {
        let (start, end) = (range.start + self.0.lead, range.end + self.0.lead);
        let first = start / BLOCK_BYTES * BLOCK_BYTES;
        (
            first..end.next_multiple_of(BLOCK_BYTES),
            (start - first) as usize,
        )
    }

    /// Whether the blocks of `range` also hold other bytes of the extent.
    pub(super) fn shares_blocks(&self, range: &Range<u64>) -> bool {
        let aligned = |at: u64| (at + self.0.lead).is_multiple_of(BLOCK_BYTES);
        let start = range.start == 0 || aligned(range.start);
        let end = range.end == self.0.len || aligned(range.end);
        !(start && end)
    }

    /// End of the longest range from `start` whose blocks fit in `most` bytes, and that ends at a block boundary or
    /// at `end`.
    pub(super) fn piece_end(&self, start: u64, end: u64, most: u64) -> u64 {
        let first = (start + self.0.lead) / BLOCK_BYTES * BLOCK_BYTES;
        (first + most - self.0.lead).min(end)
    }

    /// Order of the extent's writes.
    pub(super) fn writes(&self) -> &Writes {
        &self.0.writes
    }

    /// Reads the whole blocks at bytes `blocks` of the extent into `out`.
    pub(super) fn read_blocks(&self, blocks: &Range<u64>, out: &mut [u8]) -> Result<()> {
        let ExtentInner { backing, map, .. } = &*self.0;
        match map {
            None => backing
                .file
                .read_exact_at(out, self.0.offset + blocks.start)
                .map_err(SpillError::io("read", &backing.path)),
            Some(map) => {
                let map = map.read().unwrap_or_else(PoisonError::into_inner);
                out.copy_from_slice(&map[blocks.start as usize..blocks.end as usize]);
                forget(&map, blocks);
                Ok(())
            }
        }
    }

    /// Writes `bytes` to the whole blocks at bytes `blocks` of the extent.
    pub(super) fn write_blocks(&self, blocks: &Range<u64>, bytes: &[u8]) -> Result<()> {
        let ExtentInner { backing, map, .. } = &*self.0;
        match map {
            None => backing
                .file
                .write_all_at(bytes, self.0.offset + blocks.start)
                .map_err(SpillError::io("write", &backing.path)),
            Some(map) => {
                let mut map = map.write().unwrap_or_else(PoisonError::into_inner);
                map[blocks.start as usize..blocks.end as usize].copy_from_slice(bytes);
                forget(&map, blocks);
                Ok(())
            }
        }
    }
}

/// Unmaps pages of a shared map from this process; the page cache may keep them. Otherwise all pages ever touched
/// would count as the process's resident memory.
fn forget(map: &MmapMut, blocks: &Range<u64>) {
    // A page fault also maps neighbors, even beyond the blocks. Other users of those pages get them mapped again.
    let start = (blocks.start as usize).saturating_sub(FAULT_BYTES);
    let end = (blocks.end as usize + FAULT_BYTES).min(map.len());
    // SAFETY: the map is shared with a file, so its pages return with their contents. A failure costs only memory.
    unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) }.ok();
}

#[cfg(test)]
mod tests {
    use super::super::SpillIo;
    use super::*;
    use kernels::Pool;

    /// Bytes of `path` that are mapped into this process and resident.
    fn resident(path: &Path) -> u64 {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let path = path.to_str().unwrap();
        let mut inside = false;
        let mut kib = 0;
        for line in text.lines() {
            // The line of a map begins with its addresses, those about it with a word.
            if line
                .split(' ')
                .next()
                .is_some_and(|word| !word.ends_with(':'))
            {
                inside = line.ends_with(path);
            } else if let Some(rest) = line.strip_prefix("Rss:").filter(|_| inside) {
                kib += rest.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
            }
        }
        kib << 10
    }

    #[test]
    fn pages_of_a_mapped_file_do_not_stay_in_the_process() {
        let exe = std::env::current_exe().unwrap();
        let parent = tempfile::tempdir_in(exe.parent().unwrap()).unwrap();
        let directory = Arc::new(SpillDirectory::join(parent.path(), "resident").unwrap());
        let io = SpillIo::new(0, &Pool::new("host", None)).unwrap();
        let mut file = SpillFile::create(&directory, 0, "resident", IoPath::Mapped).unwrap();
        let extent = file.allocate(24 << 20, 4096).unwrap();
        let path = file.backing.path.clone();
        let mut bytes = vec![5; 24 << 20];
        io.copy_in(&extent, 0, &bytes).unwrap();
        io.flush().unwrap();
        assert_eq!(resident(&path), 0, "after writing");
        io.copy_out(&extent, 0, &mut bytes).unwrap();
        assert_eq!(resident(&path), 0, "after reading");
        assert!(bytes.iter().all(|b| *b == 5));
    }
}
