//! Names of a model's parts in reports and tables: the modules that tensors belong to.

use models::params::ADAPTER_PREFIX;

/// Name of a tensor without peft's prefix, as a user writes it.
pub(crate) fn base_name(name: &str) -> &str {
    name.strip_prefix(ADAPTER_PREFIX).unwrap_or(name)
}

/// Part of the model that the tensor `name` belongs to, as in the table of trainable parts.
pub(crate) fn part_of(name: &str) -> String {
    part(base_name(name))
}

/// Up to three first modules of the path, before a numbered one. MiniCPM's tower and resampler are one part each.
pub(crate) fn part(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').collect();
    let modules = parts.split_last().map_or(&[][..], |(_, modules)| modules);
    let depth = match parts[0] {
        "vpm" | "resampler" => 1,
        _ => 3,
    };
    let named = modules
        .iter()
        .take_while(|part| part.parse::<usize>().is_err());
    let named: Vec<&str> = named.take(depth).copied().collect();
    if named.is_empty() {
        name.to_owned()
    } else {
        named.join(".")
    }
}
