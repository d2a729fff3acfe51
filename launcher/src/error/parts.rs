//! Parts of a model, as reports and tables name them: the modules that a tensor belongs to.

use models::params::ADAPTER_PREFIX;

/// The path that a user writes: of the module, also for its adapter.
pub(crate) fn base_name(name: &str) -> &str {
    name.strip_prefix(ADAPTER_PREFIX).unwrap_or(name)
}

/// The part of the model that the tensor `name` belongs to, as in the table of what trains.
pub(crate) fn part_of(name: &str) -> String {
    part(base_name(name))
}

/// The first modules of the path down to numbered ones: MiniCPM's tower and resampler whole, everything else by its
/// parts.
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
