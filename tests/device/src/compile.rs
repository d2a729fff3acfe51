//! Compilation of every module without a GPU: the built-in PTX, and the table of each kernel's resources.

use std::collections::{BTreeMap, HashSet};
use std::fmt::{self, Write as _};
use std::num::ParseIntError;
use std::path::Path;
use std::str::FromStr;
use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow, bail, ensure};
use kernels::cuda::module::{Family, Module};
use kernels::cuda::nvrtc::Compiler;
use kernels::cuda::ptx::{ARCH, Bundle, Entry, built_in, records, source_hash};

use crate::cases::{self, Effort};
use crate::emulator::{Emulator, Order};
use crate::recording::{Recording, Seen};
use crate::stages::{Setting, show};

/// Number of [`ARCHITECTURES`].
pub const COUNT: usize = 6;
/// Architectures of supported GPUs: A100; RTX 3090 and A6000; RTX 4090 and L40; H100 and H200; B200; RTX 5090 and
/// RTX PRO 6000.
pub const ARCHITECTURES: [&str; COUNT] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"];
/// Shared memory per block that each of them has (sm_86, sm_89 and sm_120: 99 KiB).
pub const SHARED_LIMIT: u32 = 99 << 10;

/// Every listed module of every family.
#[must_use]
pub fn modules() -> Vec<Module> {
    Family::ALL
        .iter()
        .flat_map(|family| family.modules())
        .collect()
}

/// Whether a module of this crate is unlisted. Attention may be, for head dims of no supported model.
#[must_use]
pub fn is_unlisted(module: &Module) -> bool {
    static LISTED: OnceLock<HashSet<Module>> = OnceLock::new();
    let listed = LISTED.get_or_init(|| modules().into_iter().collect());
    let closed = module
        .family()
        .is_some_and(|family| family != Family::Attention);
    closed && !listed.contains(module)
}

/// Compiles modules to PTX and writes the uncompressed bundle. Modules whose sources did not change since the built-in
/// bundle keep its PTX.
///
/// # Errors
/// When NVRTC is missing or newer than the oldest driver, or a module does not compile.
pub fn build_ptx(setting: &Setting, file: &Path) -> Result<()> {
    let compiler = Compiler::find(&setting.search)?;
    let (oldest, version) = (kernels::cuda::probe::MINIMUM_DRIVER, compiler.version());
    ensure!(
        version <= oldest,
        "NVRTC {version:?} writes PTX that drivers of CUDA {oldest:?} do not read"
    );
    let mut bundle = Bundle::new();
    for module in modules() {
        let ptx = match built_in(&module) {
            Some(ptx) => ptx.to_owned(),
            None => compiler.compile(&module, ARCH)?.ptx,
        };
        let source_hash = source_hash(&module);
        bundle.insert(module.name(), Entry { source_hash, ptx });
    }
    let records = records(&bundle);
    let bytes = records.len();
    show(&format!("{} modules, {bytes} bytes", bundle.len()));
    std::fs::write(file, records).with_context(|| format!("write {}", file.display()))
}

/// Registers per thread on one architecture, and what did not fit into them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Registers {
    /// Registers per thread.
    pub count: u32,
    /// Bytes of spill stores and spill loads per thread.
    pub spill_bytes: u32,
}

impl fmt::Display for Registers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.count)?;
        match self.spill_bytes {
            0 => Ok(()),
            bytes => write!(f, "+{bytes}"),
        }
    }
}

impl FromStr for Registers {
    type Err = ParseIntError;

    /// Reads `registers` or `registers+bytes`.
    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        let (count, bytes) = text.split_once('+').unwrap_or((text, "0"));
        Ok(Self {
            count: count.parse()?,
            spill_bytes: bytes.parse()?,
        })
    }
}

/// Resources of one kernel: registers per architecture, threads and shared memory of its launches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Threads per block.
    pub threads: u32,
    /// Largest shared memory of a launch.
    pub shared_bytes: u32,
    /// Registers per thread, in the order of [`ARCHITECTURES`].
    pub registers: [Registers; COUNT],
}

/// The checked-in table by module and kernel.
pub type Table = BTreeMap<(String, String), Limits>;

const HEADER: &str = "module,kernel,threads,shared_bytes,sm_80,sm_86,sm_89,sm_90a,sm_100,sm_120";

/// Reads the table.
///
/// # Errors
/// The first malformed line.
pub fn parse_table(text: &str) -> Result<Table> {
    let mut lines = text.lines();
    ensure!(lines.next() == Some(HEADER), "the header is not {HEADER}");
    let mut table = Table::new();
    for line in lines {
        let words: Vec<&str> = line.split(',').collect();
        let [module, kernel, threads, shared_bytes, registers @ ..] = &*words else {
            bail!("a line without module, kernel, threads and shared memory: {line}");
        };
        let not_a_number = || format!("not a number in {line}");
        let threads = threads.parse().with_context(not_a_number)?;
        let shared_bytes = shared_bytes.parse().with_context(not_a_number)?;
        let registers: Result<Vec<Registers>, _> =
            registers.iter().map(|word| word.parse()).collect();
        let registers = registers.with_context(not_a_number)?;
        let Ok(registers) = registers.try_into() else {
            bail!("not {COUNT} architectures in {line}");
        };
        let limits = Limits {
            threads,
            shared_bytes,
            registers,
        };
        table.insert(((*module).to_owned(), (*kernel).to_owned()), limits);
    }
    Ok(table)
}

/// Writes the table.
#[must_use]
pub fn format_table(table: &Table) -> String {
    let mut text = format!("{HEADER}\n");
    for ((module, kernel), limits) in table {
        let registers = limits.registers.map(|registers| registers.to_string());
        // Writing to a string cannot fail.
        let _ok = writeln!(
            text,
            "{module},{kernel},{},{},{}",
            limits.threads,
            limits.shared_bytes,
            registers.join(",")
        );
    }
    text
}

/// Registers of every kernel of a module on these architectures (0 on others).
///
/// # Errors
/// When a module does not compile, has static shared memory or a stack frame for anything but spilled registers, or
/// makes the assembler print a warning about anything else.
pub fn registers(
    compiler: Compiler,
    module: &Module,
    architectures: &[&str],
) -> Result<BTreeMap<String, [Registers; COUNT]>> {
    let mut all: BTreeMap<String, [Registers; COUNT]> = BTreeMap::new();
    let places = ARCHITECTURES.into_iter().enumerate();
    for (place, arch) in places.filter(|(_, arch)| architectures.contains(arch)) {
        let compiled = compiler.compile(module, arch)?;
        let name = module.name();
        let mut warnings = compiled.warnings();
        // The table says which kernels may spill.
        warnings.retain(|line| !line.contains("Registers are spilled"));
        ensure!(
            warnings.is_empty(),
            "{name} on {arch}: {}",
            warnings.join("\n")
        );
        let resources = compiled.resources();
        let kernels: Vec<&str> = resources.iter().map(|kernel| &*kernel.kernel).collect();
        let mut declared = module.kernels().to_vec();
        let mut compiled_kernels = kernels.clone();
        declared.sort_unstable();
        compiled_kernels.sort_unstable();
        ensure!(
            declared == compiled_kernels,
            "{name} declares {declared:?} but has {kernels:?}"
        );
        for kernel in resources {
            ensure!(
                kernel.shared_bytes == 0 && (kernel.stack_bytes == 0 || kernel.spill_bytes > 0),
                "{name} on {arch}: {kernel:?}"
            );
            all.entry(kernel.kernel).or_default()[place] = Registers {
                count: kernel.registers,
                spill_bytes: kernel.spill_bytes,
            };
        }
    }
    Ok(all)
}

/// Compiles every module, runs every small case on the emulator, and writes the table. With names in `families`, only
/// their lines change.
///
/// # Errors
/// When NVRTC is missing, a name is no family, or a module or a case fails.
pub fn build_table(setting: &Setting, file: &Path, families: &[String]) -> Result<()> {
    let compiler = Compiler::find(&setting.search)?;
    let known = |name: &String| Family::ALL.iter().any(|family| family.name() == name);
    let stranger = families.iter().find(|name| !known(name));
    ensure!(stranger.is_none(), "{stranger:?} is the name of no family");
    let wanted =
        |family: &Family| families.is_empty() || families.iter().any(|name| name == family.name());
    let chosen: Vec<Family> = Family::ALL.into_iter().filter(wanted).collect();
    let modules: Vec<Module> = chosen.iter().flat_map(|family| family.modules()).collect();
    let (seen, compiled) = std::thread::scope(|scope| {
        let cases = scope.spawn(|| launched_by_cases(&chosen));
        let compiled = modules.iter();
        let compiled = compiled.map(|module| registers(compiler, module, &ARCHITECTURES));
        let compiled: Result<Vec<_>> = compiled.collect();
        let seen = cases.join().map_err(|_| anyhow!("a case panicked"));
        (seen, compiled)
    });
    let seen = seen??;
    let mut table = Table::new();
    if !families.is_empty() {
        table = parse_table(&std::fs::read_to_string(file)?)?;
        let belongs = |module: &String| chosen.iter().any(|family| is_of(module, family.name()));
        table.retain(|(module, _), _| !belongs(module));
    }
    for (module, kernels) in modules.iter().zip(compiled?) {
        for (kernel, registers) in kernels {
            let key = (module.name(), kernel);
            // Zeros: no small case launches this kernel, only a sibling with other dtypes.
            let (threads, shared_bytes) = seen.get(&key).copied().unwrap_or_default();
            let limits = Limits {
                threads,
                shared_bytes,
                registers,
            };
            table.insert(key, limits);
        }
    }
    std::fs::write(file, format_table(&table))?;
    show(&format!("{} kernels", table.len()));
    Ok(())
}

/// Whether a module's name begins with that of a family.
fn is_of(module: &str, family: &str) -> bool {
    let rest = module.strip_prefix(family);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// Threads and shared memory of the launches of the small cases of some families.
fn launched_by_cases(families: &[Family]) -> Result<Seen> {
    let mut machine = Recording::new(Emulator::new(Order::Ascending));
    for family in families {
        for case in cases::of(*family, Effort::Emulated) {
            case.run(&mut machine)?;
        }
    }
    Ok(machine.into_seen())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_matched_by_their_whole_name() {
        assert!(is_of("attention-type1", "attention") && is_of("adamw", "adamw"));
        assert!(!is_of("attention_plain-type1", "attention"));
    }

    #[test]
    fn the_table_round_trips_and_wrong_lines_are_named() {
        let limits = Limits {
            threads: 128,
            shared_bytes: 65536,
            registers: [200, 201, 202, 203, 204, 255].map(|count| Registers {
                count,
                spill_bytes: if count == 255 { 28 } else { 0 },
            }),
        };
        let table: Table = [(("a-type1".into(), "forward".into()), limits)].into();
        assert_eq!(parse_table(&format_table(&table)).unwrap(), table);
        for bad in [
            "module",
            &format!("{HEADER}\na,b,1"),
            &format!("{HEADER}\na,b,1,2"),
            &format!("{HEADER}\na,b,1,2,3,4,5,6,7,x"),
            &format!("{HEADER}\na,b,1,2,3,4,5,6,7,8+"),
        ] {
            assert!(parse_table(bad).is_err(), "{bad}");
        }
    }
}
