//! Harness shared by the test suites.

pub mod drift;
pub mod golden;
pub mod memory;
pub mod pairwise;
pub mod parity;
pub mod pure_bf16;
pub mod sixteen_bits;
pub mod tolerance;
pub mod world;

#[cfg(test)]
mod documents;
#[cfg(test)]
mod eight_bits;
#[cfg(test)]
mod glossary;
#[cfg(test)]
mod structure;
