//! The launcher as users run it: real processes on a complete tiny model directory.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test binary: a broken expectation should end the test where it stands"
)]

mod bad_input;
mod batches;
mod brought;
mod cells;
mod ckpt;
mod configs;
mod data_check;
mod doctor;
mod endings;
mod families;
mod faults;
mod foreign;
mod forms;
mod generate;
mod languages;
mod memory;
mod monitoring;
mod next_lines;
mod outputs;
mod precisions;
mod quantized;
mod reports;
mod restarts;
mod resume;
mod site;
mod stages;
mod synth;
mod tuning;
