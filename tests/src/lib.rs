//! Harness shared by the test suites.
