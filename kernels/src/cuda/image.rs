//! Machine code of modules: from the cache on disk, from the compiler, or from the built-in PTX.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::error::{CudaError, Result};
use super::library::Search;
use super::module::Module;
use super::nvrtc::Compiler;
use super::ptx;
use crate::KernelList;
use rayon::prelude::*;

/// Distance between the first modules of processes with successive numbers.
const SPREAD: usize = 7919;
/// Prefix of an architecture that is compiled to PTX.
const PTX: &str = "compute_";
/// Bytes of the checksum at the start of a cached file.
const CHECKSUM_BYTES: usize = 32;

/// Source that the code of an [`Image`] came from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    /// Cached file that an earlier run compiled.
    Cache(PathBuf),
    /// Compiled now.
    Compiled,
    /// Built-in PTX.
    BuiltIn {
        /// Why no code was compiled for the GPU in use.
        reason: String,
    },
}

/// Compiled code of a module in the form that the driver loads.
#[derive(Clone, Debug)]
pub struct Image {
    /// The code: a cubin, or PTX text with a final zero byte.
    pub bytes: Vec<u8>,
    /// Source that the code came from: cache, compiler, or built-in PTX.
    pub origin: Origin,
}

/// Choice of the code that a GPU runs: compiled for this GPU, or PTX of the sm_80 family.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Code {
    /// Code that the compiler makes for the GPU in use.
    #[default]
    Native,
    /// PTX of the sm_80 family on every GPU, built in or compiled. The driver translates it.
    Sm80,
}

/// Directory on disk with compiled modules. Several processes may use it at the same time, because files
/// appear atomically.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cache {
    directory: PathBuf,
}

impl Cache {
    /// Cache in `directory`, which is created when the first file is written.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
        }
    }

    fn path(&self, module: &Module, arch: &str, compiler: &str) -> PathBuf {
        let mut hash = blake3::Hasher::new();
        for part in [&*module.source(), arch, compiler] {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        let hash = hash.finalize().to_hex();
        self.directory
            .join(format!("{}-{arch}-{}.cubin", module.name(), &hash[..16]))
    }

    /// Content of a file, or `None` if it is missing or damaged.
    fn read(path: &Path) -> Option<Vec<u8>> {
        let file = fs::read(path).ok()?;
        let (checksum, content) = file.split_at_checked(CHECKSUM_BYTES)?;
        (blake3::hash(content).as_bytes() == checksum).then(|| content.to_vec())
    }

    /// Waits until no other process compiles the module of this file. The turn ends when the value is dropped, or with
    /// the process. `None` on a file system without locks: several processes then compile the same.
    fn turn(path: &Path) -> Option<fs::File> {
        fs::create_dir_all(path.parent()?).ok()?;
        let file = fs::File::create(path.with_extension("lock")).ok()?;
        file.lock().ok()?;
        Some(file)
    }

    fn write(&self, path: &Path, content: &[u8]) -> Result<()> {
        let write = || {
            fs::create_dir_all(&self.directory)?;
            let partial = path.with_extension(format!("{}.partial", std::process::id()));
            let mut file = fs::File::create(&partial)?;
            file.write_all(blake3::hash(content).as_bytes())?;
            file.write_all(content)?;
            fs::rename(&partial, path)
        };
        let path = path.to_owned();
        write().map_err(|error| CudaError::Cache { path, error })
    }
}

/// Provider of compiled code for one GPU architecture: from the cache, the compiler, or the built-in PTX.
#[derive(Debug)]
pub struct Images {
    /// Architecture of the GPU.
    native: String,
    /// CUDA version of the driver.
    driver: (u32, u32),
    code: Code,
    cache: Option<Cache>,
    compiler: Result<Compiler, String>,
}

impl Images {
    /// Provider for a GPU with this compute capability and a driver of this CUDA version. Searches for the compiler
    /// NVRTC. Without it, only modules with built-in PTX can run.
    #[must_use]
    pub fn new(
        capability: (u32, u32),
        driver: (u32, u32),
        search: &Search,
        cache: Option<Cache>,
    ) -> Self {
        let compiler = Compiler::find(search).map_err(|error| error.to_string());
        let known = compiler.as_ref().map(Compiler::architectures);
        Self {
            native: target(capability, &known.unwrap_or_default()),
            driver,
            code: Code::Native,
            cache,
            compiler,
        }
    }

    /// Selects native code for the GPU, or PTX of the sm_80 family. The latter also changes the target
    /// architecture.
    #[must_use]
    pub const fn with_code(mut self, code: Code) -> Self {
        self.code = code;
        self
    }

    /// Architecture that modules are compiled for: `sm_86` for machine code, `compute_80` for PTX, which the driver
    /// translates.
    #[must_use]
    pub fn arch(&self) -> &str {
        match self.code {
            Code::Native => &self.native,
            Code::Sm80 => ptx::ARCH,
        }
    }

    /// Architecture that `compiler` compiles for: of the sm_80 family's PTX only if the driver reads it.
    fn target(&self, compiler: Compiler) -> &str {
        match self.code {
            Code::Sm80 if reads_ptx(compiler.version(), self.driver) => ptx::ARCH,
            Code::Sm80 | Code::Native => &self.native,
        }
    }

    /// The NVRTC compiler, which compiles modules for the GPU.
    ///
    /// # Errors
    /// The reason why NVRTC was not found, as text.
    pub fn compiler(&self) -> Result<Compiler, &str> {
        self.compiler
            .as_ref()
            .map(|compiler| *compiler)
            .map_err(|problem| &**problem)
    }

    /// Compiled code of a module, from the cache, the compiler or the built-in PTX. A cache that cannot be
    /// written costs only time and is not an error.
    ///
    /// # Errors
    /// When the module does not compile and has no built-in PTX.
    pub fn get(&self, module: &Module) -> Result<Image> {
        if let Some(reason) = self.prefers_built_in() {
            let built_in = built_in(module, &reason);
            if built_in.is_ok() {
                return built_in;
            }
        }
        let compiler = match &self.compiler {
            Ok(compiler) => compiler,
            Err(problem) => return built_in(module, problem),
        };
        let identity = compiler.identity();
        let arch = self.target(*compiler);
        let path = self
            .cache
            .as_ref()
            .map(|cache| cache.path(module, arch, &identity));
        let cached = || {
            let path = path.as_ref()?;
            let bytes = Cache::read(path)?;
            let origin = Origin::Cache(path.clone());
            Some(Image { bytes, origin })
        };
        if let Some(image) = cached() {
            return Ok(image);
        }
        // Other ranks of this machine wait for the one that compiles, and read its result.
        let _turn = path.as_ref().and_then(|path| Cache::turn(path));
        if let Some(image) = cached() {
            return Ok(image);
        }
        match compiler.compile(module, arch) {
            Ok(compiled) => {
                let bytes = match arch.starts_with(PTX) {
                    false => compiled.cubin,
                    true => with_final_zero(&compiled.ptx),
                };
                if let (Some(cache), Some(path)) = (&self.cache, &path) {
                    let _slower_next_time = cache.write(path, &bytes);
                }
                Ok(Image {
                    bytes,
                    origin: Origin::Compiled,
                })
            }
            // The driver compiles the PTX.
            Err(error) => built_in(module, &error.to_string()).map_err(|_| error),
        }
    }

    /// Why the built-in PTX comes before code of the compiler, if it does.
    fn prefers_built_in(&self) -> Option<String> {
        let compiler = self.compiler.as_ref().map(|compiler| compiler.version());
        preference(self.code, compiler.ok(), self.driver)
    }

    /// Compiles those of `modules` that the cache lacks, on the threads of the global pool. A module that does not
    /// compile fails at its first use. Without cache or compiler this does nothing.
    pub fn compile_ahead(&self, modules: &[Module]) {
        let (Some(cache), Ok(compiler)) = (&self.cache, &self.compiler) else {
            return;
        };
        let identity = compiler.identity();
        let arch = self.target(*compiler);
        let prefers_built_in = self.prefers_built_in().is_some();
        let is_missing = |module: &&Module| {
            let is_built_in = prefers_built_in && ptx::built_in(module).is_some();
            !is_built_in && !cache.path(module, arch, &identity).exists()
        };
        let mut missing: Vec<&Module> = modules.iter().filter(is_missing).collect();
        if missing.is_empty() {
            return;
        }
        // Ranks of a machine begin with different modules, so they share the work.
        let first = std::process::id() as usize * SPREAD % missing.len();
        missing.rotate_left(first);
        missing.into_par_iter().for_each(|module| {
            let _fails_at_its_first_use = self.get(module);
        });
    }

    /// Built-in PTX of a module, for a driver that refuses the compiler's machine code. `reason` says why and
    /// is stored in the image's [`Origin`].
    ///
    /// # Errors
    /// When the module has no built-in PTX.
    pub fn fallback(&self, module: &Module, reason: &str) -> Result<Image> {
        built_in(module, reason)
    }
}

/// A machine without NVRTC, where only modules with built-in PTX run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BuiltInOnly {
    /// Result of the search for NVRTC.
    reason: String,
}

impl BuiltInOnly {
    /// This machine, if NVRTC is in none of these places.
    #[must_use]
    pub fn here(search: &Search) -> Option<Self> {
        let problem = Compiler::find(search).err()?;
        let reason = problem.to_string();
        Some(Self { reason })
    }

    /// An error for each of these kernels' modules that is not built in.
    #[must_use]
    pub fn lacks(&self, of: &KernelList) -> Vec<CudaError> {
        let images = of.modules.iter();
        let images = images.map(|module| built_in(module, &self.reason));
        images.filter_map(Result::err).collect()
    }
}

/// Whether a driver of CUDA version `driver` reads PTX of a compiler of this version.
fn reads_ptx(compiler: (u32, u32), driver: (u32, u32)) -> bool {
    compiler <= driver
}

/// Why built-in PTX comes before code of a compiler of this CUDA version, if it does. A driver reads machine code of
/// compilers of its own major version.
fn preference(
    code: Code,
    compiler: Option<(u32, u32)>,
    (major, minor): (u32, u32),
) -> Option<String> {
    let newer = compiler.filter(|compiler| compiler.0 > major);
    match (code, newer) {
        (Code::Sm80, _) => Some("the code of sm_80 was asked for".to_owned()),
        (Code::Native, Some(newer)) => Some(format!(
            "NVRTC {}.{} is newer than the driver, which supports CUDA {major}.{minor}",
            newer.0, newer.1
        )),
        (Code::Native, None) => None,
    }
}

/// What a compiler that knows the architectures `known` compiles for a GPU: machine code, or the newest PTX that the GPU
/// runs if the GPU is newer than the compiler. The driver knows the GPU and translates it.
fn target((major, minor): (u32, u32), known: &[u32]) -> String {
    let own = 10 * major + minor;
    let older = known.iter().filter(|arch| **arch < own).max();
    match older {
        Some(older) if !known.contains(&own) => format!("{PTX}{older}"),
        // The kernels target sm_80; on Hopper the compiler may also use instructions of sm_90a.
        _ if own == 90 => "sm_90a".to_owned(),
        _ => format!("sm_{own}"),
    }
}

fn built_in(module: &Module, reason: &str) -> Result<Image> {
    let ptx = ptx::built_in(module).ok_or_else(|| CudaError::NoImage {
        module: module.name(),
        nvrtc: reason.to_owned(),
    })?;
    let bytes = with_final_zero(ptx);
    let reason = reason.to_owned();
    Ok(Image {
        bytes,
        origin: Origin::BuiltIn { reason },
    })
}

fn with_final_zero(ptx: &str) -> Vec<u8> {
    let mut bytes = ptx.as_bytes().to_vec();
    bytes.push(0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::module::Family;

    #[test]
    fn the_cache_returns_what_was_written_and_ignores_damaged_files() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(directory.path().join("deep/cache"));
        let module = &Family::Cast.modules()[0];
        let path = cache.path(module, "sm_86", "nvrtc 13.0");
        assert_ne!(path, cache.path(module, "sm_80", "nvrtc 13.0"));
        assert_ne!(path, cache.path(module, "sm_86", "nvrtc 13.1"));
        assert_ne!(
            path,
            cache.path(&Family::Cast.modules()[1], "sm_86", "nvrtc 13.0")
        );
        assert_eq!(Cache::read(&path), None);
        cache.write(&path, b"machine code").unwrap();
        assert_eq!(Cache::read(&path).unwrap(), b"machine code");
        let mut damaged = fs::read(&path).unwrap();
        *damaged.last_mut().unwrap() ^= 1;
        fs::write(&path, damaged).unwrap();
        assert_eq!(Cache::read(&path), None);
        let files: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(files.len(), 1, "no partial file remains");
    }

    #[test]
    fn one_process_at_a_time_compiles_a_module() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(directory.path().join("deep/cache"));
        let path = cache.path(&Family::Cast.modules()[0], "sm_86", "nvrtc 13.0");
        let turn = Cache::turn(&path).unwrap();
        let second = fs::File::create(path.with_extension("lock")).unwrap();
        assert!(second.try_lock().is_err(), "another one must wait");
        drop(turn);
        assert!(second.try_lock().is_ok());
        // A different module has its own lock.
        let other = cache.path(&Family::Cast.modules()[1], "sm_86", "nvrtc 13.0");
        assert!(Cache::turn(&other).is_some());
    }

    #[test]
    fn without_a_compiler_the_built_in_ptx_is_used_and_the_reason_recorded() {
        let module = &Family::Cast.modules()[0];
        let images = Images {
            native: "sm_86".into(),
            driver: (13, 0),
            code: Code::Native,
            cache: None,
            compiler: Err("nowhere".into()),
        };
        let image = images.get(module).unwrap();
        assert_eq!(
            image.origin,
            Origin::BuiltIn {
                reason: "nowhere".into()
            }
        );
        assert_eq!(image.bytes.last(), Some(&0));
        let foreign = Module::new(Family::Cast, [("FROM", 7)], &["cast"]);
        let error = images.get(&foreign).unwrap_err().to_string();
        assert!(
            error.contains("nvidia-cuda-nvrtc") && error.contains("nowhere"),
            "{error}"
        );
    }

    #[test]
    fn without_a_compiler_modules_that_are_not_built_in_have_no_code() {
        let foreign = Module::new(Family::Cast, [("FROM", 7)], &["cast"]);
        let alone = BuiltInOnly {
            reason: "nowhere".into(),
        };
        let mut list = KernelList {
            modules: Family::Cast.modules(),
        };
        assert!(alone.lacks(&list).is_empty());
        list.modules.push(foreign.clone());
        let missing = alone.lacks(&list);
        let [CudaError::NoImage { module, nvrtc }] = &missing[..] else {
            panic!("{missing:?}");
        };
        assert_eq!((module, &**nvrtc), (&foreign.name(), "nowhere"));
    }

    #[test]
    fn a_compiler_of_a_newer_cuda_than_the_drivers_gives_way_to_the_built_in_ptx() {
        let native = |compiler, driver| preference(Code::Native, Some(compiler), driver);
        assert_eq!(native((12, 9), (12, 2)), None);
        assert_eq!(native((12, 2), (13, 0)), None);
        assert_eq!(preference(Code::Native, None, (12, 2)), None);
        let reason = native((13, 0), (12, 9)).unwrap();
        assert!(
            reason.contains("13.0") && reason.contains("12.9"),
            "{reason}"
        );
        assert!(preference(Code::Sm80, Some((12, 2)), (13, 0)).is_some());
        assert!(reads_ptx((12, 2), (12, 2)) && !reads_ptx((12, 3), (12, 2)));
    }

    #[test]
    fn a_gpu_newer_than_the_compiler_gets_the_newest_ptx() {
        let known = [75, 80, 86, 89, 90];
        for (capability, known, want) in [
            ((8, 6), &known[..], "sm_86"),
            ((9, 0), &known, "sm_90a"),
            ((12, 0), &known, "compute_90"),
            ((8, 9), &known[..3], "compute_86"),
            // The compiler does not tell.
            ((12, 0), &[], "sm_120"),
            // Only newer ones: the built-in PTX follows.
            ((8, 0), &known[2..], "sm_80"),
        ] {
            assert_eq!(target(capability, known), want);
        }
    }

    #[test]
    fn sm_80_code_is_built_in_ptx_on_every_gpu() {
        let images = Images::new((9, 0), (13, 0), &Search::default(), None);
        assert_eq!(images.arch(), "sm_90a");
        let images = images.with_code(Code::Sm80);
        assert_eq!(images.arch(), ptx::ARCH);
        let image = images.get(&Family::Cast.modules()[0]).unwrap();
        assert!(matches!(image.origin, Origin::BuiltIn { .. }));
        let text = String::from_utf8(image.bytes).unwrap();
        assert!(text.contains(".target sm_80") && text.ends_with('\0'));
        // A module without built-in PTX is compiled for the same family.
        let foreign = "KERNEL(32, 1) nothing(int* x) { x[threadIdx.x] = 1; }";
        let foreign = Module::foreign("nothing", foreign, &["nothing"]);
        match images.get(&foreign) {
            Ok(image) => {
                let text = String::from_utf8(image.bytes).unwrap();
                assert!(text.contains(".target sm_80"), "{text}");
            }
            Err(error) => assert!(images.compiler().is_err(), "{error}"),
        }
    }
}
