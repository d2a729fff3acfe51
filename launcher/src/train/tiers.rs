//! Output lines about the memory that this rank's states actually use in each tier.

use super::replica::OwnGpu;
use crate::units::{bytes, seconds};
use engine::Zero;
use kernels::{Pool, Tag};

/// Tags of the states that exist between updates.
const STATES: [Tag; 3] = [Tag::Parameters, Tag::Gradients, Tag::Optimizer];

/// Line with the bytes of each kind of state in each tier.
pub(crate) fn line(zero: &Zero) -> String {
    let tiers = [
        ("device", Some(zero.device_pool())),
        ("host", Some(zero.host_pool())),
        ("nvme", zero.spill_pool()),
    ];
    let tiers = tiers.iter().filter_map(|(name, pool)| tier(name, (*pool)?));
    let tiers: Vec<String> = tiers.collect();
    format!("rank 0 stores {}", tiers.join(" · "))
}

/// Line with rank 0's use of its GPU: own count, times, and the driver's count.
pub(crate) fn gpu_line(zero: &Zero, arena_bytes: u64, own: &OwnGpu<'_>) -> String {
    let gpu = own.gpu;
    let stats = zero.device_pool().stats();
    let mut text = format!(
        "rank 0 used {} of the {} it reserved on GPU {}",
        bytes(stats.touched),
        bytes(arena_bytes),
        gpu.ordinal,
    );
    let times = zero.device_times();
    text += &format!(
        " · compute {}, waits for copies {}, copies to the GPU {}, from the GPU {}, from other ranks {}, updates beside them {}",
        seconds(times.compute.as_secs_f64()),
        seconds(times.waits.as_secs_f64()),
        seconds(times.inward.as_secs_f64()),
        seconds(times.outward.as_secs_f64()),
        seconds(times.communication.as_secs_f64()),
        seconds(times.updates.as_secs_f64()),
    );
    if stats.strays > 0 {
        text += &format!(
            " · {} micro-batches used other offsets than planned",
            stats.strays
        );
    }
    if let Some(free) = own.free_bytes() {
        let taken = gpu.free_bytes.saturating_sub(free);
        text += &format!(" · the driver counts {taken} bytes more in use than before the run");
    }
    text
}

fn tier(name: &str, pool: &Pool) -> Option<String> {
    let stats = pool.stats();
    let kinds = STATES.iter().filter_map(|tag| {
        let held = stats.tag(*tag).in_use;
        (held > 0).then(|| format!("{tag} {}", bytes(held)))
    });
    let kinds: Vec<String> = kinds.collect();
    (!kinds.is_empty()).then(|| format!("{name}: {}", kinds.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_states_and_only_tiers_with_states_are_listed() {
        let pool = Pool::new("host", None);
        assert_eq!(tier("host", &pool), None);
        let workspace = pool.reserve(900, Tag::Workspace).expect("unlimited");
        assert_eq!(tier("host", &pool), None);
        let state = pool.reserve(2 << 20, Tag::Optimizer).expect("unlimited");
        let weights = pool.reserve(1 << 20, Tag::Parameters).expect("unlimited");
        let line = tier("host", &pool).expect("holds states");
        assert_eq!(line, "host: parameters 1.0M, optimizer 2.0M");
        drop((workspace, state, weights));
    }
}
