//! What the CUDA driver tells of the machine.

use super::library::{Attempt, Found, Library, Search};

/// The CUDA version the driver must support.
pub const MINIMUM_DRIVER: (u32, u32) = (12, 8);

/// One GPU as CUDA numbers it.
#[derive(Clone, Debug)]
pub struct DeviceFacts {
    /// CUDA's number.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// `GPU-…`.
    pub uuid: String,
    /// `0000:01:00.0`.
    pub pci_bus_id: String,
    /// Major and minor.
    pub compute_capability: (u32, u32),
    /// All of its memory.
    pub memory_bytes: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Ordinals with peer access.
    pub peers: Vec<u32>,
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Probe {
    /// The CUDA version of the driver.
    pub driver_version: Option<(u32, u32)>,
    /// Every library.
    pub libraries: Vec<Found>,
    /// Every GPU.
    pub devices: Vec<DeviceFacts>,
    /// Why there are none.
    pub problem: Option<String>,
}

/// Looks at the machine.
#[must_use]
pub fn probe(search: &Search) -> Probe {
    let mut folders = search.directories.clone();
    folders.extend(search.cuda_home.iter().map(|home| home.join("lib64")));
    folders.push("/usr/local/cuda/lib64".into());
    for package in &search.python_packages {
        let inside = std::fs::read_dir(package.join("nvidia"))
            .into_iter()
            .flatten();
        folders.extend(inside.flatten().map(|entry| entry.path().join("lib")));
    }
    let find = |library: Library| {
        let mut found = Found {
            library,
            path: None,
            version: None,
            attempts: Vec::new(),
        };
        for folder in &folders {
            let path = folder.join(library.name());
            let there = path.exists();
            found.attempts.push(Attempt {
                place: path.display().to_string(),
                outcome: if there { "found" } else { "no such file" }.to_owned(),
            });
            if there {
                found.path = Some(path);
                break;
            }
        }
        found
    };
    Probe {
        driver_version: None,
        libraries: Library::ALL.map(find).into(),
        devices: Vec::new(),
        problem: Some("the CUDA driver library was not found".to_owned()),
    }
}
