//! A kernel launch as a value, executed by a GPU or by the emulator of the tests.

use super::module::Module;

/// Address in the memory of the device that executes a launch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Address(pub u64);

impl Address {
    /// Null address. It stands for an optional operand that is absent.
    pub const NULL: Self = Self(0);
}

/// One argument of a kernel launch, with the type that the kernel declares for it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Arg {
    /// Pointer into device memory.
    Address(Address),
    /// Value of a parameter of type `int`.
    I32(i32),
    /// Value of a parameter of type `u32`.
    U32(u32),
    /// Value of a parameter of type `u64`.
    U64(u64),
    /// Value of a parameter of type `float`.
    F32(f32),
}

impl Arg {
    /// Size of the argument in bytes.
    const fn size(self) -> usize {
        match self {
            Self::Address(_) | Self::U64(_) => 8,
            Self::I32(_) | Self::U32(_) | Self::F32(_) => 4,
        }
    }

    /// Bits of the argument as a 64-bit word. A narrower type fills the low bytes, the others are zero.
    #[must_use]
    pub const fn word(self) -> u64 {
        match self {
            Self::Address(Address(x)) | Self::U64(x) => x,
            #[expect(clippy::cast_sign_loss, reason = "the bits are what is passed")]
            Self::I32(x) => x as u32 as u64,
            Self::U32(x) => x as u64,
            Self::F32(x) => x.to_bits() as u64,
        }
    }
}

/// Description of one kernel launch: the kernel, its grid of thread blocks, and its arguments.
#[derive(Clone, PartialEq, Debug)]
pub struct Launch {
    /// Module (CUDA source with defines) that contains the kernel.
    pub module: Module,
    /// Name of the kernel in its module.
    pub kernel: &'static str,
    /// Number of thread blocks along x, y, z.
    pub grid: [u32; 3],
    /// Number of threads per block.
    pub threads: u32,
    /// Dynamic shared memory per block in bytes.
    pub shared_bytes: u32,
    /// Arguments of the kernel, in the order of its parameters. For a parameter that is a struct: its members.
    pub args: Vec<Arg>,
}

impl Launch {
    /// The arguments as a kernel's parameters lie in memory: one behind the other, each at a multiple of its size.
    #[must_use]
    pub fn parameters(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(8 * self.args.len());
        for arg in &self.args {
            let size = arg.size();
            bytes.resize(bytes.len().next_multiple_of(size), 0);
            bytes.extend(&arg.word().to_le_bytes()[..size]);
        }
        bytes
    }
}
