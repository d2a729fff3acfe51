//! Compiled modules loaded into this process.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use kernels::cuda::module::Module;
use libloading::Library;

use super::compile::{self, Watch};

const MESSAGE_BYTES: usize = 4096;

/// `Buffer` of `emulator.h`.
#[repr(C)]
pub(super) struct RawBuffer {
    pub(super) address: u64,
    pub(super) len: u64,
}

/// `Launch` of `emulator.h`.
#[repr(C)]
pub(super) struct RawLaunch {
    pub(super) grid: [u32; 3],
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
    pub(super) order: u32,
    pub(super) seed: u64,
    pub(super) words: *const u64,
    pub(super) kinds: *const u8,
    pub(super) buffers: *const RawBuffer,
    pub(super) buffer_count: u64,
}

type Run = unsafe extern "C" fn(*const RawLaunch, *mut c_char, u64) -> c_int;

/// A loaded module, never unloaded.
pub(super) struct Loaded {
    library: Library,
    path: PathBuf,
}

impl Loaded {
    /// Executes a launch.
    ///
    /// # Safety
    /// The launch's pointers are valid and its buffers are writable.
    pub(super) unsafe fn run(&self, kernel: &str, launch: &RawLaunch) -> Result<()> {
        let name = format!("emulator_run_{kernel}");
        // SAFETY: EMULATOR_EXPORT writes every symbol of this name with this signature.
        let run = unsafe { self.library.get::<Run>(name.as_bytes()) };
        let run = run.with_context(|| format!("the module has no kernel {kernel}"))?;
        let mut message = [0_u8; MESSAGE_BYTES];
        // SAFETY: the caller guarantees the launch; the message ends with zero.
        let failed = unsafe { run(launch, message.as_mut_ptr().cast(), MESSAGE_BYTES as u64) };
        if failed != 0 {
            let message = CStr::from_bytes_until_nul(&message)?;
            bail!("{}", self.with_line(message.to_string_lossy().into_owned()));
        }
        Ok(())
    }

    /// Replaces an address in the message by its source line, if the tool for that is installed.
    fn with_line(&self, message: String) -> String {
        const MARK: &str = "library+";
        let line = || {
            let (_, rest) = message.split_once(MARK)?;
            let (address, _) = rest.split_once(':')?;
            let mut tool = Command::new("addr2line");
            tool.arg("-ise").arg(&self.path).arg(address);
            let output = String::from_utf8(tool.output().ok()?.stdout).ok()?;
            // From the innermost function outwards. A remark may follow the line number.
            let mut lines = output.lines();
            let line = lines.find(|line| !line.starts_with("primitives.h"))?;
            let line = line.split(' ').next()?;
            (!line.starts_with('?')).then(|| message.replace(&format!("{MARK}{address}"), line))
        };
        line().unwrap_or(message)
    }
}

type Slot = Arc<Mutex<Option<Arc<Loaded>>>>;

/// The module, compiled and loaded at its first use in this process.
pub(super) fn of(module: &Module, watch: Watch, directory: Option<&Path>) -> Result<Arc<Loaded>> {
    static SLOTS: Mutex<Option<HashMap<PathBuf, Slot>>> = Mutex::new(None);
    let unit = compile::Unit::new(module, watch)?;
    let path = match directory {
        Some(directory) => unit.prebuilt_path(directory),
        None => unit.cached_path()?,
    };
    let slot = {
        let mut slots = SLOTS.lock().unwrap_or_else(PoisonError::into_inner);
        let slots = slots.get_or_insert_default();
        Slot::clone(slots.entry(path.clone()).or_default())
    };
    // Other threads that want the same module wait here.
    let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(loaded) = slot.as_ref() {
        return Ok(Arc::clone(loaded));
    }
    if !path.exists() {
        let prebuilt = directory.is_some();
        ensure!(!prebuilt, "there is no {}", path.display());
        unit.build(&path)?;
    }
    // SAFETY: the library was built from the emulator's runtime, which does nothing when it is loaded.
    let library = unsafe { Library::new(&path) };
    let library = library.with_context(|| format!("load {}", path.display()))?;
    let loaded = Arc::new(Loaded { library, path });
    *slot = Some(Arc::clone(&loaded));
    Ok(loaded)
}
