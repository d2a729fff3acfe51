//! DeepSpeed configuration files: every key is honored, refused, or reported as having no effect.
//!
//! `keys.rs` is the table of all keys. `check.rs` checks a file against it. `mapping` turns keys into flags.

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

/// Checks and maps `file`, called `name`, in view of the flags that are already `given`.
pub(crate) fn report(file: &Value, name: &Path, given: &Given) -> Report {
    let file = &with_one_name_for_bf16(file);
    let mut report = check::check(file);
    mapping::map(file, name, given, &mut report);
    report
}

/// Renames the section `bfloat16`, which DeepSpeed also reads, to `bf16`.
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
