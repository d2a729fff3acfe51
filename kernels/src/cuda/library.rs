//! Search for NVIDIA's libraries at run time. Nothing is linked, and a missing library is a value, not a panic.
#![expect(unsafe_code, reason = "opening shared libraries")]

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::Library as Handle;

use super::error::{CudaError, Result};

/// A table of functions that is loaded from the file of a [`Found`]. Each function has its C name.
macro_rules! functions {
    (
        $(#[$attribute:meta])* $visibility:vis $table:ident:
        $($function:ident($($argument:ty),* $(,)?) -> $result:ty;)*
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy)]
        #[allow(non_snake_case, reason = "the library's own names")]
        $visibility struct $table {
            $($function: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $table {
            /// Loads every function from the file that was found.
            ///
            /// # Errors
            /// When no file was found, or it lacks a function.
            $visibility fn load(
                found: &$crate::cuda::library::Found,
            ) -> $crate::cuda::error::Result<Self> {
                Ok(Self {
                    // SAFETY: the types are those of the library's header, where a changed type gets a new name.
                    $($function: unsafe { found.function(stringify!($function)) }?,)*
                })
            }
        }

        impl std::fmt::Debug for $table {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($table)).finish_non_exhaustive()
            }
        }
    };
}
pub(super) use functions;

/// NVIDIA library that is opened at run time instead of linked.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Library {
    /// NVIDIA driver, `libcuda`. Without it no GPU can be used.
    Driver,
    /// NVRTC, the run-time compiler. Without it the built-in PTX is used.
    Nvrtc,
    /// cuBLASLt, for matrix products. Without it own kernels are used.
    CublasLt,
    /// NCCL, for collectives between GPUs without peer access, or on several nodes.
    Nccl,
}

impl Library {
    /// Every library that is searched for at run time.
    pub const ALL: [Self; 4] = [Self::Driver, Self::Nvrtc, Self::CublasLt, Self::Nccl];

    /// Name of the library in reports and error messages, e.g. `NVIDIA driver`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Driver => "NVIDIA driver",
            Self::Nvrtc => "NVRTC",
            Self::CublasLt => "cuBLASLt",
            Self::Nccl => "NCCL",
        }
    }

    /// File names that a search for the library tries in each directory, in order of preference.
    #[must_use]
    pub const fn files(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so.1"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12"],
            Self::Nccl => &["libnccl.so.2"],
        }
    }

    /// Function that every version of the library has. Its address tells which file was opened.
    const fn landmark(self) -> &'static str {
        match self {
            Self::Driver => "cuInit",
            Self::Nvrtc => "nvrtcVersion",
            Self::CublasLt => "cublasLtGetVersion",
            Self::Nccl => "ncclGetVersion",
        }
    }

    /// Prefix of files in the same directory that must be opened first. NVRTC 13.0 opens its own built-ins by bare
    /// name.
    const fn companions(self) -> &'static str {
        match self {
            Self::Nvrtc => "libnvrtc-builtins.so.",
            Self::Driver | Self::CublasLt | Self::Nccl => "",
        }
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where NVIDIA's libraries are searched for: in `directories`, then by the dynamic linker, then in
/// `cuda_home/lib64`, `/usr/local/cuda/lib64`, and the `nvidia/*/lib` directories of Python packages. For the
/// driver, the last three are replaced by two directories of containers and WSL.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Search {
    /// Directories named by the user, searched first.
    pub directories: Vec<PathBuf>,
    /// Root directory of a CUDA toolkit (`CUDA_HOME`), if one is known.
    pub cuda_home: Option<PathBuf>,
    /// Directories of installed Python packages (`site-packages`), whose `nvidia/*/lib` are searched last.
    pub python_packages: Vec<PathBuf>,
}

/// One place where the search for a library looked, and what it found there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Attempt {
    /// Path that was tried, or the file name given to the dynamic linker.
    pub place: String,
    /// Result of the attempt: `opened`, `no such file`, or the error of the dynamic linker.
    pub outcome: String,
}

/// Result of the search for one library: the file that was opened, if any, and the places tried.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// Library that was searched for.
    pub library: Library,
    /// Path of the opened file. `None` if no file opened.
    pub path: Option<PathBuf>,
    /// Version that the library reports. `None` if it was not asked or did not answer.
    pub version: Option<String>,
    /// Every place where the search looked for the library, in order. It stops at the first file that opens.
    pub attempts: Vec<Attempt>,
}

impl Found {
    /// The places tried, each with its result, as text for an error message.
    #[must_use]
    pub fn tried(&self) -> String {
        let places = self
            .attempts
            .iter()
            .map(|a| format!("{} ({})", a.place, a.outcome));
        places.collect::<Vec<_>>().join(", ")
    }

    /// Function of the opened file.
    ///
    /// # Safety
    /// `F` is the type of a pointer to that function.
    ///
    /// # Errors
    /// When no file was opened, or it lacks the function.
    pub(super) unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F> {
        let opened = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let file = self
            .path
            .as_ref()
            .and_then(|path| opened.get_key_value(path));
        let (path, handle) = file.ok_or_else(|| CudaError::LibraryMissing {
            library: self.library.name(),
            tried: self.tried(),
        })?;
        // SAFETY: the caller vouches for the type. The handle is never closed.
        let function = unsafe { handle.get::<F>(name) };
        let function = function.map_err(|_| CudaError::FunctionMissing {
            library: self.library.name(),
            path: path.clone(),
            function: name,
        })?;
        Ok(*function)
    }
}

/// Opened libraries by the path of their file. They stay open until the process ends, because their functions are
/// stored elsewhere.
static OPEN: Mutex<BTreeMap<PathBuf, Handle>> = Mutex::new(BTreeMap::new());

/// Searches for `library` and opens the first file that loads. It stays open. Every function of the library that this
/// crate calls is loaded from that file.
#[must_use]
pub fn find(library: Library, search: &Search) -> Found {
    let mut attempts = Vec::new();
    let path = candidates(library, search)
        .into_iter()
        .find_map(|place| attempt(library, place, &mut attempts));
    Found {
        library,
        path,
        version: None,
        attempts,
    }
}

/// Places to try, in order. A bare file name is for the dynamic linker.
fn candidates(library: Library, search: &Search) -> Vec<PathBuf> {
    let mut directories: Vec<PathBuf> = search.directories.clone();
    directories.push(PathBuf::new());
    if library == Library::Driver {
        // Containers and WSL put the driver's library outside the linker's directories.
        directories.extend(["/usr/lib/wsl/lib", "/usr/local/nvidia/lib64"].map(PathBuf::from));
    } else {
        directories.extend(search.cuda_home.iter().map(|home| home.join("lib64")));
        directories.push("/usr/local/cuda/lib64".into());
        for site in &search.python_packages {
            directories.extend(package_directories(&site.join("nvidia")));
        }
    }
    let files = library.files().iter();
    directories
        .iter()
        .flat_map(|directory| files.clone().map(move |file| directory.join(file)))
        .collect()
}

/// `nvidia/*/lib` directories in name order; newer layouts (`cu13`) come first.
fn package_directories(nvidia: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(nvidia) else {
        return Vec::new();
    };
    let mut directories: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path().join("lib")))
        .filter(|directory| directory.is_dir())
        .collect();
    directories.sort_by_key(|directory| {
        (
            !directory.to_string_lossy().contains("/cu1"),
            directory.clone(),
        )
    });
    directories
}

fn attempt(library: Library, place: PathBuf, attempts: &mut Vec<Attempt>) -> Option<PathBuf> {
    let is_file = place
        .parent()
        .is_some_and(|directory| !directory.as_os_str().is_empty());
    let outcome = if is_file && !place.exists() {
        Err("no such file".to_owned())
    } else {
        open(library, &place)
    };
    let place_name = place.display().to_string();
    let (outcome, opened) = match outcome {
        Ok(handle) => ("opened".to_owned(), Some(keep(library, handle, place))),
        Err(problem) => (problem, None),
    };
    attempts.push(Attempt {
        place: place_name,
        outcome,
    });
    opened
}

fn open(library: Library, place: &Path) -> Result<Handle, String> {
    let prefix = library.companions();
    if let (false, Some(directory)) = (prefix.is_empty(), place.parent()) {
        for companion in files_with_prefix(directory, prefix) {
            // A companion that does not open causes an error when the library is used. Not every version needs it.
            if let Ok(handle) = load(&companion) {
                keep_open(companion, handle);
            }
        }
    }
    load(place)
}

fn load(place: &Path) -> Result<Handle, String> {
    // SAFETY: NVIDIA's libraries may be opened by any thread at any time; the user chose the directories.
    unsafe { Handle::new(place) }.map_err(|error| reason(&error))
}

/// Keeps an opened library under the path of its file, which is returned.
fn keep(library: Library, handle: Handle, place: PathBuf) -> PathBuf {
    let path = file_of(&handle, library.landmark()).unwrap_or(place);
    keep_open(path.clone(), handle);
    path
}

fn keep_open(path: PathBuf, handle: Handle) {
    let mut opened = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    // A second handle of the same file is closed, the first one stays.
    opened.entry(path).or_insert(handle);
}

/// Error of the dynamic linker, without the name, which the report shows anyway.
pub(super) fn reason(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(cause) => cause.to_string(),
        None => error.to_string(),
    }
}

fn files_with_prefix(directory: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return Vec::new();
    };
    let names = entries.filter_map(|entry| Some(entry.ok()?.path()));
    names
        .filter(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(prefix))
        })
        .collect()
}

/// Path of the file that `function` of an opened library is in, from the process's memory map.
pub(super) fn file_of(handle: &Handle, function: &str) -> Option<PathBuf> {
    // SAFETY: only the address is used.
    let address = *unsafe { handle.get::<*const ()>(function) }.ok()?;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| {
        let range = line
            .split(' ')
            .next()
            .and_then(|range| range.split_once('-'));
        let number = |digits| usize::from_str_radix(digits, 16).ok();
        range
            .and_then(|(start, end)| Some(number(start)?..number(end)?))
            .is_some_and(|range| range.contains(&address.addr()))
    })?;
    let (_, path) = line.split_once('/')?;
    Some(PathBuf::from(format!("/{path}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_directories_are_searched_first_and_python_packages_last() {
        let site = tempfile::tempdir().unwrap();
        for package in ["cuda_nvrtc", "cu13"] {
            std::fs::create_dir_all(site.path().join("nvidia").join(package).join("lib")).unwrap();
        }
        let search = Search {
            directories: vec!["/mine".into()],
            cuda_home: Some("/toolkit".into()),
            python_packages: vec![site.path().to_owned()],
        };
        let places = candidates(Library::Nvrtc, &search);
        let shown: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
        let nvidia = site.path().join("nvidia").display().to_string();
        let expected = [
            "/mine/libnvrtc.so.13".to_owned(),
            "/mine/libnvrtc.so.12".into(),
            "libnvrtc.so.13".into(),
            "libnvrtc.so.12".into(),
            "/toolkit/lib64/libnvrtc.so.13".into(),
            "/toolkit/lib64/libnvrtc.so.12".into(),
            "/usr/local/cuda/lib64/libnvrtc.so.13".into(),
            "/usr/local/cuda/lib64/libnvrtc.so.12".into(),
            format!("{nvidia}/cu13/lib/libnvrtc.so.13"),
            format!("{nvidia}/cu13/lib/libnvrtc.so.12"),
            format!("{nvidia}/cuda_nvrtc/lib/libnvrtc.so.13"),
            format!("{nvidia}/cuda_nvrtc/lib/libnvrtc.so.12"),
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn an_absent_or_broken_library_lists_every_path_tried() {
        let directory = tempfile::tempdir().unwrap();
        let broken = directory.path().join("libnccl.so.2");
        std::fs::write(&broken, "not a library").unwrap();
        let search = Search {
            directories: vec!["/nowhere".into(), directory.path().to_owned()],
            ..Search::default()
        };
        let found = find(Library::Nccl, &search);
        assert_eq!(found.attempts[0].outcome, "no such file");
        assert_eq!(found.attempts[1].place, broken.display().to_string());
        assert!(found.attempts[1].outcome.len() > 5, "{}", found.tried());
    }
}
