//! Memory that all ranks of one machine map: one file without a name.
//!
//! Each rank writes its own part while the maps are open, and all ranks read everything while they are closed. Opening
//! and closing are collectives, so no rank reads what another one writes. Leases of frozen weights read it in place.
#![expect(
    unsafe_code,
    reason = "memory that other ranks map is reached through pointers"
)]

use super::shm::{directories, failed, first_with_room, free_bytes, open_file, reserve, unlink};
use super::{CommError, Communicator, Tag, World};
use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const SHARE: Tag = Tag::new("share", 0);
const OPEN: Tag = Tag::new("share-open", 0);
const CLOSE: Tag = Tag::new("share-close", 0);
/// Name of the memory in `/proc/PID/maps`, and start of the names of files.
const NAME: &str = "tessera-frozen";
/// Minimal size in bytes of a map that asks for huge pages.
const HUGE_BYTES: usize = 4 << 20;

/// Where a shared file is created.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Medium {
    /// Memory of no file system. The size of `/dev/shm` does not limit it.
    Memory,
    /// The first of these directories with enough space. The file has a name until all ranks have opened it.
    Directories(Vec<PathBuf>),
}

impl Medium {
    /// All media, in the order in which they are tried.
    pub(crate) fn all() -> [Self; 2] {
        [Self::Memory, Self::Directories(directories())]
    }

    /// The medium and the bytes free there, for errors.
    fn tried(&self) -> Vec<(PathBuf, u64)> {
        match self {
            Self::Memory => vec![("memory".into(), available_bytes().unwrap_or(0))],
            Self::Directories(dirs) => {
                let free = |dir: &PathBuf| (dir.clone(), free_bytes(dir));
                dirs.iter().map(free).collect()
            }
        }
    }
}

/// The file as rank 0 created it, and what identifies it.
struct Created {
    file: File,
    path: PathBuf,
    /// Whether the path is a name in a directory.
    is_named: bool,
}

/// Creates zeroed memory of `bytes` bytes that all ranks can map. Every rank must call it and gets the same memory. Its
/// pages are reserved, so full memory or a full disk is an error here.
///
/// # Errors
/// The last medium's error on this rank, or [`CommError::NoSpace`] if another rank failed there.
pub(crate) fn create(
    comm: &dyn Communicator,
    bytes: u64,
    media: &[Medium],
) -> Result<File, CommError> {
    let mut last = None;
    for medium in media {
        match create_in(comm, bytes, medium)? {
            Ok(file) => return Ok(file),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| no_space(bytes, Vec::new())))
}

/// As [`create`], in one medium. The inner error means that every rank tries the next one.
fn create_in(
    comm: &dyn Communicator,
    bytes: u64,
    medium: &Medium,
) -> Result<Result<File, CommError>, CommError> {
    let is_first = comm.world().rank == 0;
    let created = is_first.then(|| create_file(bytes, medium));
    let message = match &created {
        Some(Ok(created)) => announcement(created).unwrap_or_default(),
        _ => String::new(),
    };
    let all = comm.all_gather_bytes(message.as_bytes(), SHARE)?;
    let announced = String::from_utf8_lossy(&all[0]).into_owned();
    let opened = match &created {
        Some(Ok(created)) => created
            .file
            .try_clone()
            .map_err(|e| io_error(&created.path, e)),
        _ => open(&announced).unwrap_or_else(|| Err(no_space(bytes, medium.tried()))),
    };
    let opened = opened.and_then(|file| {
        let part = part_of(comm.world(), bytes);
        let path = Path::new(NAME);
        reserve(
            path,
            &file,
            part.start as usize,
            (part.end - part.start) as usize,
        )?;
        Ok(file)
    });
    let all = comm.all_gather_f64(&[f64::from(u8::from(opened.is_ok()))], SHARE)?;
    let everyone = all.iter().all(|ok| ok[0] == 1.0);
    if let Some(Ok(created)) = &created
        && created.is_named
    {
        unlink(&created.path)?;
    }
    let own = match created {
        Some(Err(error)) => Err(error),
        _ => opened,
    };
    Ok(match own {
        Ok(_) if !everyone => Err(no_space(bytes, medium.tried())),
        own => own,
    })
}

fn no_space(asked_bytes: u64, tried: Vec<(PathBuf, u64)>) -> CommError {
    CommError::NoSpace { asked_bytes, tried }
}

/// Bytes of memory that can be allocated without swapping. `None` if the system does not say.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}

fn io_error(path: &Path, source: io::Error) -> CommError {
    failed("share", path, source)
}

fn create_file(bytes: u64, medium: &Medium) -> Result<Created, CommError> {
    let created = match medium {
        Medium::Memory => {
            // Pages beyond this memory would be reserved at the cost of other processes.
            if available_bytes().is_some_and(|free| free < bytes) {
                return Err(no_space(bytes, medium.tried()));
            }
            let path = Path::new(NAME);
            let file = rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC);
            let file = File::from(file.map_err(|e| io_error(path, e.into()))?);
            let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
            Created {
                path: path.into(),
                file,
                is_named: false,
            }
        }
        Medium::Directories(dirs) => {
            static FILES: AtomicU64 = AtomicU64::new(0);
            let number = FILES.fetch_add(1, Ordering::Relaxed);
            let name = format!("{NAME}-{}-{number}", std::process::id());
            let path = first_with_room(dirs, bytes)?.join(name);
            // A process with the same number may have been killed here.
            unlink(&path)?;
            let file = open_file(&path, true).map_err(|e| io_error(&path, e))?;
            Created {
                path,
                file,
                is_named: true,
            }
        }
    };
    let sized = created.file.set_len(bytes);
    sized.map_err(|e| io_error(&created.path, e))?;
    Ok(created)
}

/// Path of the file, and its identity: in another PID namespace the path may name another file.
fn announcement(created: &Created) -> Option<String> {
    let path = created.path.to_str()?;
    Some(format!("{} {path}", identity(&created.file).ok()?))
}

fn identity(file: &File) -> io::Result<String> {
    let metadata = file.metadata()?;
    Ok(format!(
        "{}:{}:{}",
        metadata.dev(),
        metadata.ino(),
        metadata.len()
    ))
}

/// Opens the announced file; `None` if rank 0 has none.
fn open(announced: &str) -> Option<Result<File, CommError>> {
    let (expected, path) = announced.split_once(' ')?;
    let path = Path::new(path);
    let file = File::options().read(true).write(true).open(path);
    let checked = file.and_then(|file| match identity(&file)? {
        found if found == expected => Ok(file),
        _ => Err(io::Error::other("it is not the file of rank 0")),
    });
    Some(checked.map_err(|e| io_error(path, e)))
}

/// The bytes whose pages `world.rank` reserves.
fn part_of(world: World, bytes: u64) -> Range<u64> {
    let end = |ranks: usize| bytes * ranks as u64 / world.size as u64;
    end(world.rank)..end(world.rank + 1)
}

/// A range of a shared file, mapped by one rank. The rank writes its own part while the map is open.
#[derive(Debug)]
pub struct SharedMap {
    map: MmapRaw,
    len: usize,
    own: Range<usize>,
    is_open: bool,
}

impl SharedMap {
    /// Maps the bytes `range` of `file`, whose start is a multiple of the page size. `own` is this rank's part of them. Parts of
    /// different ranks are disjoint.
    pub(crate) fn new(
        file: &File,
        range: Range<u64>,
        own: Range<usize>,
    ) -> Result<Self, CommError> {
        let len = (range.end - range.start) as usize;
        let map = MmapOptions::new()
            .offset(range.start)
            .len(len)
            .map_raw(file);
        let map = map.map_err(|e| failed("map", Path::new(NAME), e))?;
        if len >= HUGE_BYTES {
            // Only a hint: the map also works without huge pages.
            map.advise(Advice::HugePage).ok();
        }
        assert!(own.start <= own.end && own.end <= len, "{own:?} of {len}");
        Ok(Self {
            map,
            len,
            own,
            is_open: false,
        })
    }

    /// Length of this rank's own part in bytes.
    pub(crate) fn own_len(&self) -> usize {
        self.own.len()
    }

    /// All ranks' bytes; `None` while the map is open.
    pub(crate) fn whole(&self) -> Option<&[u8]> {
        if self.is_open {
            return None;
        }
        // SAFETY: the map has `len` initialized bytes and lives as long as `self`. Ranks write only while their maps are
        // open. They open and close them together, and this one is closed.
        Some(unsafe { std::slice::from_raw_parts(self.map.as_ptr(), self.len) })
    }

    /// This rank's own bytes.
    pub(crate) fn own(&self) -> &[u8] {
        // SAFETY: as in `whole`. Only this rank writes its own part, through `own_mut`, which borrows `self`.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.own.start), self.own.len()) }
    }

    /// This rank's own bytes, writable; empty unless the map is open.
    pub(crate) fn own_mut(&mut self) -> &mut [u8] {
        if !self.is_open {
            return &mut [];
        }
        let start = self.own.start;
        // SAFETY: the part is inside the map. Other ranks' parts are disjoint from it, and nobody reads this one: every
        // rank's map is open, and this rank's views borrow `self`.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(start), self.own.len()) }
    }
}

/// Read-only map of a range of a file, such as a weight in a safetensors file. Processes that map it share its pages.
#[derive(Debug)]
pub(crate) struct FileMap {
    map: MmapRaw,
    len: usize,
}

impl FileMap {
    /// Maps the bytes `range` of `file`, which must not change while the map exists.
    pub(crate) fn new(file: &File, range: Range<u64>) -> io::Result<Self> {
        let len = (range.end - range.start) as usize;
        // Beyond the end of the file a map can be made, but not read.
        if file.metadata()?.len() < range.end {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut map = MmapOptions::new();
        let map = map.offset(range.start).len(len).map_raw_read_only(file)?;
        Ok(Self { map, len })
    }
}

impl AsRef<[u8]> for FileMap {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the map has `len` readable bytes and lives as long as `self`. Weight files do not change during a run.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr(), self.len) }
    }
}

/// Lets this rank write its part of the maps, once no rank reads them any more. Every rank must call it with all its maps
/// of one file.
///
/// # Errors
/// Those of a dead communicator.
pub(crate) fn open_maps(
    comm: &dyn Communicator,
    maps: Vec<&mut SharedMap>,
) -> Result<(), CommError> {
    comm.barrier(OPEN)?;
    maps.into_iter().for_each(|map| map.is_open = true);
    Ok(())
}

/// Ends writing: after all ranks have written, all may read. Every rank must call it, as [`open_maps`].
///
/// # Errors
/// Those of a dead communicator.
pub(crate) fn close_maps(
    comm: &dyn Communicator,
    maps: Vec<&mut SharedMap>,
) -> Result<(), CommError> {
    comm.barrier(CLOSE)?;
    maps.into_iter().for_each(|map| map.is_open = false);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::threads;
    use super::*;
    use std::sync::Arc;

    fn on_ranks<T: Send>(size: usize, body: impl Fn(Arc<dyn Communicator>) -> T + Sync) -> Vec<T> {
        let comms = threads::world(size, 1 << 16).unwrap();
        std::thread::scope(|scope| {
            let ranks = comms.into_iter().map(|comm| scope.spawn(|| body(comm)));
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Every rank writes its number to its part and returns what it then sees.
    fn exchanged(media: &[Medium]) -> Vec<Vec<u8>> {
        const PART: usize = 5000;
        on_ranks(3, |comm| {
            let rank = comm.world().rank;
            let file = create(&*comm, 3 * PART as u64, media).unwrap();
            let own = rank * PART..(rank + 1) * PART;
            let mut map = SharedMap::new(&file, 0..3 * PART as u64, own).unwrap();
            assert!(map.own_mut().is_empty() && map.whole() == Some(&[0; 3 * PART][..]));
            open_maps(&*comm, vec![&mut map]).unwrap();
            assert!(map.whole().is_none());
            map.own_mut().fill(rank as u8 + 1);
            close_maps(&*comm, vec![&mut map]).unwrap();
            map.whole().unwrap().to_vec()
        })
    }

    fn expected() -> Vec<u8> {
        [1, 2, 3].map(|rank| vec![rank; 5000]).concat()
    }

    #[test]
    fn every_rank_reads_what_each_wrote() {
        for seen in exchanged(&Medium::all()) {
            assert_eq!(seen, expected());
        }
    }

    /// A directory without space, or none at all, is passed over. The file that is used has no name afterwards.
    #[test]
    fn a_place_without_space_is_passed_over() {
        let full = Medium::Directories(vec!["/nowhere".into(), "/proc".into()]);
        let directory = tempfile::tempdir().unwrap();
        let spare = Medium::Directories(vec!["/nowhere".into(), directory.path().into()]);
        for seen in exchanged(&[full.clone(), spare]) {
            assert_eq!(seen, expected());
        }
        assert_eq!(directory.path().read_dir().unwrap().count(), 0);
        for error in on_ranks(2, |comm| {
            create(&*comm, 100, std::slice::from_ref(&full)).unwrap_err()
        }) {
            assert!(matches!(error, CommError::NoSpace { .. }), "{error}");
        }
    }

    /// The system would end other processes if it had to provide such memory. Ranks agree on the next medium.
    #[test]
    fn memory_that_the_machine_lacks_is_passed_over() {
        // More than any file can have.
        const LACKING: u64 = 1 << 63;
        let refused = create_file(LACKING, &Medium::Memory).err();
        assert!(
            matches!(refused, Some(CommError::NoSpace { .. })),
            "{refused:?}"
        );
        for error in on_ranks(2, |comm| {
            create(&*comm, LACKING, &Medium::all()).unwrap_err()
        }) {
            assert!(matches!(error, CommError::NoSpace { .. }), "{error}");
        }
    }

    #[test]
    fn a_path_that_names_another_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let [own, other] = ["own", "other"].map(|name| directory.path().join(name));
        let file = open_file(&own, true).unwrap();
        open_file(&other, true).unwrap();
        let identity = identity(&file).unwrap();
        let opened = |path: &Path| open(&format!("{identity} {}", path.display())).unwrap();
        assert!(opened(&own).is_ok() && opened(&other).is_err());
    }
}
