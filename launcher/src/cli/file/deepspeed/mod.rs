//! Files of DeepSpeed: every key is honoured, refused, or said to have no effect.
//!
//! `keys.rs` is the table of all keys, `check.rs` goes through a file with it, `mapping.rs` turns what is honoured into
//! flags.

mod check;
mod keys;
mod mapping;
mod schema;
#[cfg(test)]
mod tests;

use super::given::Given;
use super::report::Report;
use super::value::{Entry, Value};
use std::path::Path;

/// Whether a file looks like one of DeepSpeed rather than like flags of a trainer.
pub(crate) fn is_deepspeed(file: &Value) -> bool {
    let Some(entries) = file.entries() else {
        return false;
    };
    let own = [
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "zero_optimization",
    ];
    entries.iter().any(|entry| {
        let section = ["fp16", "bf16", "optimizer", "scheduler"].contains(&&*entry.key);
        own.contains(&&*entry.key) || (section && entry.value.entries().is_some())
    })
}

/// Reads `file`, called `name`, beside what is `given`.
pub(crate) fn report(file: &Value, name: &Path, given: &Given) -> Report {
    let file = &with_one_name_for_bf16(file);
    let mut report = check::check(file);
    mapping::map(file, name, given, &mut report);
    report
}

/// DeepSpeed also reads the section `bfloat16`.
fn with_one_name_for_bf16(file: &Value) -> Value {
    let mut file = file.clone();
    let both = file.get("bf16").is_some();
    if let Value::Map(entries) = &mut file
        && !both
    {
        let other = |entry: &&mut Entry| entry.key == "bfloat16";
        if let Some(entry) = entries.iter_mut().find(other) {
            entry.key = "bf16".to_owned();
        }
    }
    file
}
