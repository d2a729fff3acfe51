//! A kernel launch as a value: what a GPU executes and what the emulator of the tests executes.

use super::module::Module;

/// An address in the memory of the executing device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Address(pub u64);

impl Address {
    /// No memory: an optional operand that is absent.
    pub const NULL: Self = Self(0);
}

/// One argument, with the width its kernel declares.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Arg {
    /// A pointer.
    Address(Address),
    /// `int`.
    I32(i32),
    /// `u32`.
    U32(u32),
    /// `u64`.
    U64(u64),
    /// `float`.
    F32(f32),
}

impl Arg {
    /// The argument's bytes, in the first `size` bytes of the word.
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

/// A grid of blocks of one kernel.
#[derive(Clone, PartialEq, Debug)]
pub struct Launch {
    /// The module that holds the kernel.
    pub module: Module,
    /// The kernel's name.
    pub kernel: &'static str,
    /// Blocks along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// In the order of the kernel's parameters.
    pub args: Vec<Arg>,
}
