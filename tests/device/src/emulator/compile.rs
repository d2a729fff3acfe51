//! Compilation of a module to a shared library.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, OnceLock, PoisonError};
use std::{env, fs, process};

use anyhow::{Context, Result, anyhow, bail, ensure};
use kernels::cuda::module::{Family, Module, PRELUDE};
use kernels::cuda::ptx;

macro_rules! emulator_file {
    ($name:literal) => {
        (
            $name,
            include_str!(concat!("../../../../kernels/emulator/", $name)),
        )
    };
}

/// Headers before every kernel.
const HEADERS: [(&str, &str); 2] = [emulator_file!("emulator.h"), emulator_file!("primitives.h")];
/// The sources that execute launches, the same for all modules.
const RUNTIME: [(&str, &str); 9] = [
    emulator_file!("emulator.h"),
    emulator_file!("runtime.h"),
    emulator_file!("block.cpp"),
    emulator_file!("touch.cpp"),
    emulator_file!("shared.cpp"),
    emulator_file!("global.cpp"),
    emulator_file!("hooks.cpp"),
    emulator_file!("warp.cpp"),
    emulator_file!("launch.cpp"),
];

const COMMON_FLAGS: &[&str] = &[
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
];
/// The checks while a kernel runs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Watch {
    /// Every access and all arithmetic.
    Everything,
    /// Barriers, collectives and arguments of primitives: several times faster.
    Primitives,
}

impl Watch {
    /// What passes of whole models are checked for: primitives, or everything with `TESSERA_WATCH=1`.
    pub(super) fn of_passes() -> Self {
        static ASKED: LazyLock<bool> =
            LazyLock::new(|| env::var("TESSERA_WATCH").is_ok_and(|asked| asked == "1"));
        if *ASKED {
            Self::Everything
        } else {
            Self::Primitives
        }
    }

    const fn runtime_flags(self) -> &'static [&'static str] {
        match self {
            Self::Everything => &["-O3"],
            Self::Primitives => &["-O3", "-DEMULATOR_UNWATCHED"],
        }
    }

    /// Compiler flags. The hooks they call are in the runtime; no sanitizer library is linked.
    const fn kernel_flags(self) -> &'static [&'static str] {
        match self {
            Self::Everything => &[
                "-g1",
                "-fsanitize=thread",
                "-fsanitize=alignment,null,bounds,shift-exponent,signed-integer-overflow,integer-divide-by-zero,float-cast-overflow",
            ],
            Self::Primitives => &[],
        }
    }
}

const LINK_FLAGS: &[&str] = &["-shared", "-static-libgcc", "-static-libstdc++"];
const LIBRARIES: &[&str] = &["-lm", "-ldl"];

/// The compilation unit of a module.
pub(super) struct Unit {
    name: String,
    text: String,
    watch: Watch,
}

impl Unit {
    pub(super) fn new(module: &Module, watch: Watch) -> Result<Self> {
        let name = module.name();
        let mut text = joined(&HEADERS);
        section(&mut text, "prelude.cuh", PRELUDE);
        let body = module.body();
        section(&mut text, &format!("{name}.cu"), &body);
        text.push('\n');
        for kernel in module.kernels() {
            let bound = bound(&body, kernel)
                .with_context(|| format!("{name} has no KERNEL(...) {kernel}"))?;
            text += &format!("EMULATOR_EXPORT({kernel}, ({bound}))\n");
        }
        Ok(Self { name, text, watch })
    }

    /// Path of the cached library for this text, these flags and this compiler.
    pub(super) fn cached_path(&self) -> Result<PathBuf> {
        let hash = hash(&self.text, self.watch, compiler_version()?);
        Ok(cache()?.join(format!("{hash}.so")))
    }

    /// Path of the library that [`build_all`] writes. Any compiler may have made it, but from this exact text.
    pub(super) fn prebuilt_path(&self, directory: &Path) -> PathBuf {
        let hash = hash(&self.text, self.watch, "");
        directory.join(format!("{}-{hash}.so", self.name))
    }

    /// Compiles and links to `path`.
    pub(super) fn build(&self, path: &Path) -> Result<()> {
        let runtime = runtime(self.watch)?;
        let scratch = Scratch::new(path)?;
        let object = scratch.compile("kernel", &self.text, self.watch.kernel_flags());
        let object = object.with_context(|| format!("module {}", self.name))?;
        let library = scratch.0.join("library.so");
        let mut link = Command::new(compiler());
        link.args(LINK_FLAGS).arg("-o").arg(&library);
        link.arg(&object).arg(&runtime).args(LIBRARIES);
        execute(&mut link)?;
        // A second process replaces the file by an equal one.
        fs::rename(&library, path).with_context(|| format!("rename to {}", path.display()))
    }
}

/// Compiles every tested module of every family into `directory`, for [`super::Emulator::prebuilt`].
///
/// # Errors
/// When a module does not compile or the directory cannot be written.
pub fn build_all(directory: &Path) -> Result<()> {
    let modules: Vec<Module> = Family::ALL.into_iter().flat_map(Family::modules).collect();
    build_modules(directory, &modules)
}

/// Compiles some modules like [`build_all`].
///
/// # Errors
/// As [`build_all`].
pub fn build_modules(directory: &Path, modules: &[Module]) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    for module in modules {
        let unit = Unit::new(module, Watch::Everything)?;
        let cached = unit.cached_path()?;
        if !cached.exists() {
            unit.build(&cached)?;
        }
        let path = unit.prebuilt_path(directory);
        fs::copy(&cached, &path).with_context(|| format!("copy to {}", path.display()))?;
    }
    Ok(())
}

/// Writes what a fake driver in `directory` makes its objects of: the text of every built-in module, named by the hash of
/// its PTX, and a script that compiles one of them. Modules that are compiled already are copied.
///
/// # Errors
/// When a file cannot be written, or the emulator does not compile.
pub fn write_objects(directory: &Path) -> Result<()> {
    let objects = directory.join("objects");
    let watch = Watch::of_passes();
    let runtime = fs::read(runtime(watch)?)?;
    // Objects of another runtime are of no use.
    if fs::read(objects.join("runtime.o")).is_ok_and(|old| old != runtime) {
        fs::remove_dir_all(&objects)?;
    }
    fs::create_dir_all(&objects).with_context(|| format!("create {}", objects.display()))?;
    fs::write(objects.join("runtime.o"), runtime)?;
    for module in Family::ALL.into_iter().flat_map(Family::modules) {
        let ptx = ptx::built_in(&module).context("a module without PTX")?;
        let unit = Unit::new(&module, watch)?;
        let path = objects.join(object_name(ptx));
        let (source, object) = (path.with_extension("cpp"), path.with_extension("so"));
        let cached = unit.cached_path()?;
        if cached.exists() {
            fs::copy(&cached, &object)?;
        } else if fs::read(&source).is_ok_and(|old| old != unit.text.as_bytes()) && object.exists()
        {
            fs::remove_file(&object)?;
        }
        fs::write(&source, unit.text)?;
    }
    let flags = [COMMON_FLAGS, processor_flags(), watch.kernel_flags()].concat();
    let script = format!(
        "#!/bin/sh\nset -e\ncd \"$(dirname \"$0\")/objects\"\nwork=$(mktemp -d ./build.XXXXXX)\n\
         trap 'rm -r \"$work\"' EXIT\n{} {} -c \"$1.cpp\" -o \"$work/o\"\n\
         {0} {} -o \"$work/so\" \"$work/o\" runtime.o {}\nmv \"$work/so\" \"$1.so\"\n",
        compiler(),
        flags.join(" "),
        LINK_FLAGS.join(" "),
        LIBRARIES.join(" "),
    );
    let path = directory.join("build-object");
    fs::write(&path, script)?;
    Ok(fs::set_permissions(
        &path,
        fs::Permissions::from_mode(0o755),
    )?)
}

/// Name of the fake driver's object for this PTX, without extension: its FNV-1a hash.
#[must_use]
pub fn object_name(ptx: &str) -> String {
    let hash = ptx.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    format!("{hash:016x}")
}

fn section(text: &mut String, name: &str, part: &str) {
    *text += &format!("\n#line 1 \"{name}\"\n{part}");
}

fn joined(parts: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (name, part) in parts {
        section(&mut text, name, part);
    }
    text.push('\n');
    text
}

/// The first argument of the `KERNEL(...)` before a kernel's name.
fn bound<'t>(text: &'t str, kernel: &str) -> Option<&'t str> {
    text.split("KERNEL(").skip(1).find_map(|rest| {
        let (arguments, rest) = rest.split_once(')')?;
        let name = rest.trim_start().strip_prefix(kernel)?;
        let threads = arguments.split(',').next()?;
        name.trim_start().starts_with('(').then_some(threads.trim())
    })
}

fn compiler() -> String {
    env::var("CXX").unwrap_or_else(|_| "c++".to_owned())
}

fn compiler_version() -> Result<&'static str> {
    static VERSION: OnceLock<Result<String, String>> = OnceLock::new();
    let version = VERSION.get_or_init(|| {
        execute(Command::new(compiler()).arg("--version")).map_err(|error| format!("{error:#}"))
    });
    match version {
        Ok(version) => Ok(version),
        Err(error) => bail!("the emulator needs a C++17 compiler ($CXX or c++): {error}"),
    }
}

/// Flags for fused multiply-add: one instruction if the processor has it, else a call.
fn processor_flags() -> &'static [&'static str] {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("fma") {
        return &["-mfma"];
    }
    &[]
}

/// Hash of text, flags, compiler and runtime.
fn hash(text: &str, watch: Watch, compiler: &str) -> String {
    let flags = [
        COMMON_FLAGS,
        processor_flags(),
        watch.runtime_flags(),
        watch.kernel_flags(),
        LINK_FLAGS,
        LIBRARIES,
    ];
    let flags = flags.concat().join(" ");
    let mut hasher = blake3::Hasher::new();
    for part in [compiler, &flags, &joined(&RUNTIME), text] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

/// The directory of compiled modules, inside the target directory of the running program. Cargo marks that directory.
fn cache() -> Result<PathBuf> {
    let program = env::current_exe()?;
    let mut around = program.ancestors();
    let target = around.find(|path| path.join("CACHEDIR.TAG").exists());
    let directory = target.map_or_else(env::temp_dir, Path::to_owned);
    let directory = directory.join("emulator-cache");
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    Ok(directory)
}

/// The object file of the runtime.
fn runtime(watch: Watch) -> Result<PathBuf> {
    static BUSY: Mutex<()> = Mutex::new(());
    let _busy = BUSY.lock().unwrap_or_else(PoisonError::into_inner);
    let path = cache()?.join(format!("{}.o", hash("runtime", watch, compiler_version()?)));
    if !path.exists() {
        let scratch = Scratch::new(&path)?;
        let object = scratch.compile("runtime", &joined(&RUNTIME), watch.runtime_flags())?;
        fs::rename(&object, &path).with_context(|| format!("rename to {}", path.display()))?;
    }
    Ok(path)
}

/// A directory for the files of one build, next to its result.
struct Scratch(PathBuf);

impl Scratch {
    fn new(path: &Path) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let directory = path.with_extension(format!("build-{}-{count}", process::id()));
        fs::create_dir_all(&directory)
            .with_context(|| format!("create {}", directory.display()))?;
        Ok(Self(directory))
    }

    fn compile(&self, name: &str, text: &str, flags: &[&str]) -> Result<PathBuf> {
        let source = self.0.join(name).with_extension("cpp");
        let object = source.with_extension("o");
        fs::write(&source, text).with_context(|| format!("write {}", source.display()))?;
        let mut command = Command::new(compiler());
        command.args(COMMON_FLAGS).args(processor_flags());
        command.args(flags).arg("-c");
        execute(command.arg(&source).arg("-o").arg(&object))?;
        Ok(object)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A leftover directory does no harm.
        drop(fs::remove_dir_all(&self.0));
    }
}

/// Runs the command and returns its output.
fn execute(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .map_err(|error| anyhow!("cannot start {:?}: {error}", command.get_program()))?;
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{:?} failed:\n{messages}",
        command.get_program()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
