//! Harness shared by the test suites.

pub mod golden;
pub mod tolerance;
