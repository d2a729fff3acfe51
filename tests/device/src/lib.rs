//! GPU kernels compared with references. A *machine* executes launches. It is a GPU, or the emulator, which compiles
//! the same source as C++ and runs it on a CPU. A *case* draws operands, launches, and compares. Every case runs on
//! both.
#![deny(unsafe_code)]

pub mod cases;
mod clock;
pub mod compile;
mod draws;
pub mod emulator;
#[expect(unsafe_code, reason = "implements what a backend trusts")]
pub mod executor;
pub mod fake_driver;
pub mod gpu;
#[expect(unsafe_code, reason = "implements what a backend trusts")]
pub mod linked;
pub mod machine;
pub mod model;
pub mod numbers;
pub mod paired;
pub mod random;
pub mod recording;
#[allow(
    dead_code,
    clippy::unwrap_used,
    reason = "test code of the CPU, which uses more of it"
)]
#[path = "../../../kernels/tests/common/reference.rs"]
pub(crate) mod reference;
pub mod seeded;
pub mod stages;
#[allow(dead_code, clippy::unwrap_used, reason = "shared with the CPU's tests")]
pub mod tolerance;
