//! Compilation of modules at run time with NVRTC, and the resources that each kernel uses.
#![expect(unsafe_code, reason = "calls into NVRTC, which was found before")]

use std::ffi::{CStr, CString, c_char, c_int};

use cudarc::nvrtc::sys::nvrtcProgram;

use super::error::{CudaError, Result};
use super::library::{Found, Library, Search, find, functions};
use super::module::Module;

/// `nvrtcResult` as a number.
type Status = u32;
type SizeCall = unsafe extern "C" fn(nvrtcProgram, *mut usize) -> Status;
type ReadCall = unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> Status;

functions! {
    /// Functions of NVRTC that this crate calls.
    Functions:
    nvrtcVersion(*mut c_int, *mut c_int) -> Status;
    nvrtcGetErrorString(Status) -> *const c_char;
    nvrtcGetNumSupportedArchs(*mut c_int) -> Status;
    nvrtcGetSupportedArchs(*mut c_int) -> Status;
    nvrtcCreateProgram(
        *mut nvrtcProgram, *const c_char, *const c_char,
        c_int, *const *const c_char, *const *const c_char
    ) -> Status;
    nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char) -> Status;
    nvrtcDestroyProgram(*mut nvrtcProgram) -> Status;
    nvrtcGetProgramLogSize(nvrtcProgram, *mut usize) -> Status;
    nvrtcGetProgramLog(nvrtcProgram, *mut c_char) -> Status;
    nvrtcGetCUBINSize(nvrtcProgram, *mut usize) -> Status;
    nvrtcGetCUBIN(nvrtcProgram, *mut c_char) -> Status;
    nvrtcGetPTXSize(nvrtcProgram, *mut usize) -> Status;
    nvrtcGetPTX(nvrtcProgram, *mut c_char) -> Status;
}

impl Functions {
    /// The name of a failed call's result.
    fn check(&self, status: Status) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: returns a constant string for every number.
        let text = unsafe { CStr::from_ptr((self.nvrtcGetErrorString)(status)) };
        Err(text.to_string_lossy().into_owned())
    }

    /// Compute capabilities that this version compiles for, e.g. 86 for 8.6. Empty if it does not answer.
    fn architectures(&self) -> Vec<u32> {
        let mut count = 0;
        // SAFETY: one number is written.
        let status = unsafe { (self.nvrtcGetNumSupportedArchs)(&raw mut count) };
        let mut all: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        if status != 0 || all.is_empty() {
            return Vec::new();
        }
        // SAFETY: as many numbers are written as the call before told.
        let status = unsafe { (self.nvrtcGetSupportedArchs)(all.as_mut_ptr()) };
        match status {
            0 => all.into_iter().map(c_int::unsigned_abs).collect(),
            _ => Vec::new(),
        }
    }

    fn version(&self) -> Option<(u32, u32)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two numbers are written.
        let status = unsafe { (self.nvrtcVersion)(&raw mut major, &raw mut minor) };
        (status == 0).then_some((major.unsigned_abs(), minor.unsigned_abs()))
    }
}

/// Major and minor version of the library that was found. `None` if it does not answer.
pub(super) fn version(found: &Found) -> Option<(u32, u32)> {
    Functions::load(found).ok()?.version()
}

/// Resources that one kernel uses on one architecture, as the assembler (ptxas) reports them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resources {
    /// Name of the kernel that uses these resources.
    pub kernel: String,
    /// Number of registers per thread that the kernel uses.
    pub registers: u32,
    /// Bytes of stack per thread, for arrays that are not in registers.
    pub stack_bytes: u32,
    /// Bytes of spill stores plus spill loads per thread, for registers that did not suffice.
    pub spill_bytes: u32,
    /// Static shared memory per block in bytes. Dynamic shared memory is set by the launch.
    pub shared_bytes: u32,
}

/// Result of compiling a module with NVRTC for one architecture.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Machine code (cubin) of the module for the target architecture.
    pub cubin: Vec<u8>,
    /// PTX of the module, which the driver can translate for newer GPUs.
    pub ptx: String,
    /// Messages of compiler and assembler, including each kernel's resource use.
    pub log: String,
}

/// NVRTC, CUDA's run-time compiler, found and loaded.
#[derive(Clone, Copy, Debug)]
pub struct Compiler {
    functions: Functions,
    version: (u32, u32),
}

/// Compiler options: language and reports. Arithmetic follows the source (`*_rn`), so no option relaxes it.
const OPTIONS: [&str; 3] = [
    "-std=c++17",
    "--ptxas-options=-v",
    "--ptxas-options=--warn-on-spills",
];

impl Compiler {
    /// Finds and opens the NVRTC library.
    ///
    /// # Errors
    /// [`CudaError::LibraryMissing`] with the places tried, and [`CudaError::FunctionMissing`].
    pub fn find(search: &Search) -> Result<Self> {
        let found = find(Library::Nvrtc, search);
        let functions = Functions::load(&found)?;
        let version = functions.version().ok_or_else(|| CudaError::Driver {
            call: "NVRTC version".into(),
            code: found.tried(),
        })?;
        Ok(Self { functions, version })
    }

    /// Major and minor version of the loaded NVRTC.
    #[must_use]
    pub const fn version(self) -> (u32, u32) {
        self.version
    }

    /// Compute capabilities that the compiler knows, e.g. 86 for 8.6. Empty if it does not tell.
    #[must_use]
    pub fn architectures(&self) -> Vec<u32> {
        self.functions.architectures()
    }

    /// Text with the compiler's version and options: everything besides source and architecture that
    /// determines the machine code.
    #[must_use]
    pub fn identity(self) -> String {
        format!(
            "nvrtc {}.{} {}",
            self.version.0,
            self.version.1,
            OPTIONS.join(" ")
        )
    }

    /// Compiles a module for the architecture `arch`, e.g. `sm_86`, to a cubin and PTX.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's output.
    pub fn compile(self, module: &Module, arch: &str) -> Result<Compiled> {
        self.compile_text(&module.name(), &module.source(), arch)
    }

    /// Compiles any CUDA source text, as [`Compiler::compile`] does a module. `name` is the file name in
    /// messages.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's output.
    pub fn compile_text(self, name: &str, source: &str, arch: &str) -> Result<Compiled> {
        let failed = |log: String| CudaError::Compile {
            module: name.to_owned(),
            arch: arch.to_owned(),
            log,
        };
        let file = CString::new(format!("{name}.cu")).map_err(|error| failed(error.to_string()))?;
        let source = CString::new(source).map_err(|error| failed(error.to_string()))?;
        let program = Program::new(self.functions, &source, &file).map_err(failed)?;
        let mut options = vec![format!("--gpu-architecture={arch}")];
        options.extend(OPTIONS.map(str::to_owned));
        let options: std::result::Result<Vec<CString>, _> =
            options.into_iter().map(CString::new).collect();
        let options = options.map_err(|error| failed(error.to_string()))?;
        let outcome = program.compile(&options);
        let log = program.log();
        let describe = |error: String| failed(format!("{error}\n{log}"));
        outcome.map_err(describe)?;
        let Functions {
            nvrtcGetCUBINSize: cubin_size,
            nvrtcGetCUBIN: cubin,
            nvrtcGetPTXSize: ptx_size,
            nvrtcGetPTX: ptx,
            ..
        } = self.functions;
        let cubin = program.output(cubin_size, cubin).map_err(describe)?;
        let ptx = program.output(ptx_size, ptx).map_err(describe)?;
        let ptx = String::from_utf8_lossy(&ptx)
            .trim_end_matches('\0')
            .to_owned();
        Ok(Compiled { cubin, ptx, log })
    }
}

/// NVRTC program, destroyed on drop.
struct Program {
    functions: Functions,
    raw: nvrtcProgram,
}

impl Program {
    fn new(functions: Functions, source: &CStr, file: &CStr) -> Result<Self, String> {
        let mut raw = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: one handle is written; both texts end with a zero and are copied; there are no headers.
        let status = unsafe {
            (functions.nvrtcCreateProgram)(
                &raw mut raw,
                source.as_ptr(),
                file.as_ptr(),
                0,
                none,
                none,
            )
        };
        functions.check(status)?;
        Ok(Self { functions, raw })
    }

    fn compile(&self, options: &[CString]) -> Result<(), String> {
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = options.len() as c_int;
        // SAFETY: the program is alive; the texts of the options live until the call returns.
        let status =
            unsafe { (self.functions.nvrtcCompileProgram)(self.raw, count, options.as_ptr()) };
        self.functions.check(status)
    }

    fn log(&self) -> String {
        let Functions {
            nvrtcGetProgramLogSize: size,
            nvrtcGetProgramLog: log,
            ..
        } = self.functions;
        let log = self.output(size, log).unwrap_or_default();
        String::from_utf8_lossy(&log)
            .trim_end_matches('\0')
            .to_owned()
    }

    fn output(&self, size: SizeCall, read: ReadCall) -> Result<Vec<u8>, String> {
        let mut n = 0usize;
        // SAFETY: the program is alive; one number is written.
        let status = unsafe { size(self.raw, &raw mut n) };
        self.functions.check(status)?;
        let mut bytes = vec![0u8; n];
        // SAFETY: the buffer has the size that was asked for.
        let status = unsafe { read(self.raw, bytes.as_mut_ptr().cast()) };
        self.functions.check(status)?;
        Ok(bytes)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is alive and not used again. An error here leaves nothing to do.
        let _unused_outcome = unsafe { (self.functions.nvrtcDestroyProgram)(&raw mut self.raw) };
    }
}

impl Compiled {
    /// Resource use of every kernel in the module, read from the assembler's messages in the log.
    #[must_use]
    pub fn resources(&self) -> Vec<Resources> {
        let mut all: Vec<Resources> = Vec::new();
        for line in self.log.lines() {
            if let Some(rest) = line.split("Function properties for ").nth(1) {
                all.push(Resources {
                    kernel: rest.trim().to_owned(),
                    registers: 0,
                    stack_bytes: 0,
                    spill_bytes: 0,
                    shared_bytes: 0,
                });
            } else if let Some(last) = all.last_mut() {
                if let Some(bytes) = number_before(line, " bytes stack frame") {
                    last.stack_bytes = bytes;
                    last.spill_bytes = number_before(line, " bytes spill stores").unwrap_or(0)
                        + number_before(line, " bytes spill loads").unwrap_or(0);
                } else if let Some(registers) = number_before(line, " registers") {
                    last.registers = registers;
                    last.shared_bytes = number_before(line, " bytes smem").unwrap_or(0);
                }
            }
        }
        all
    }

    /// Lines of the log that warn of lost speed: spills, and the assembler's C75xx messages (serialized
    /// matrix instructions).
    #[must_use]
    pub fn warnings(&self) -> Vec<&str> {
        let suspicious = |line: &&str| line.contains("warning") || line.contains("C75");
        self.log.lines().filter(suspicious).collect()
    }
}

fn number_before(line: &str, unit: &str) -> Option<u32> {
    let before = line
        .split(unit)
        .next()
        .filter(|before| before.len() < line.len())?;
    let digits = before.rsplit(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resource_report_of_ptxas_is_parsed() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'a' for 'sm_80'\n\
            ptxas info    : Function properties for a\n\
            ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 26 registers, used 0 barriers, 376 bytes cmem[0]\n\
            ptxas info    : Function properties for b\n\
            ptxas         .     320 bytes stack frame, 592 bytes spill stores, 644 bytes spill loads\n\
            ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem\n\
            ptxas warning : Registers are spilled to local memory in function 'b'";
        let compiled = Compiled {
            cubin: Vec::new(),
            ptx: String::new(),
            log: log.to_owned(),
        };
        let of = |kernel: &str, registers, stack_bytes, spill_bytes, shared_bytes| Resources {
            kernel: kernel.to_owned(),
            registers,
            stack_bytes,
            spill_bytes,
            shared_bytes,
        };
        assert_eq!(
            compiled.resources(),
            [of("a", 26, 0, 0, 0), of("b", 255, 320, 1236, 1024)]
        );
        assert_eq!(compiled.warnings().len(), 1);
    }
}
