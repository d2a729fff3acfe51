//! Output lines about the memory that this rank's states actually use in each tier.

use super::replica::OwnGpu;
use crate::lang::{Both, Text, both, text};
use crate::memory::kind_name;
use crate::units::{bytes, seconds};
use engine::Zero;
use kernels::{Pool, Tag};

/// Tags of the states that exist between updates.
const STATES: [Tag; 3] = [Tag::Parameters, Tag::Gradients, Tag::Optimizer];

/// Line with the bytes of each kind of state in each tier.
pub(crate) fn line(zero: &Zero) -> Text {
    let tiers = [
        (both("device", "设备内存"), Some(zero.device_pool())),
        (both("host", "主机内存"), Some(zero.host_pool())),
        (both("nvme", "nvme"), zero.spill_pool()),
    ];
    let tiers = tiers
        .iter()
        .filter_map(|(name, pool)| tier(*name, (*pool)?));
    let tiers: Vec<Text> = tiers.collect();
    text!(
        "rank 0 stores {}",
        "rank 0 存放 {}",
        Text::join(&tiers, " · ")
    )
}

/// Line with rank 0's use of its GPU: own count, times, and the driver's count.
pub(crate) fn gpu_line(zero: &Zero, arena_bytes: u64, own: &OwnGpu<'_>) -> Text {
    let gpu = own.gpu;
    let stats = zero.device_pool().stats();
    let mut text = text!(
        "rank 0 used {} of the {} it reserved on GPU {}",
        "rank 0 在 GPU {2} 上使用了 {0}，共预留 {1}",
        bytes(stats.touched),
        bytes(arena_bytes),
        gpu.ordinal,
    );
    let times = zero.device_times();
    text += text!(
        " · compute {}, waits for copies {}, copies to the GPU {}, from the GPU {}, from other ranks {}, updates beside them {}",
        " · 计算 {}，等待复制 {}，复制到 GPU {}，从 GPU 复制 {}，来自其他 rank {}，同时进行的更新 {}",
        seconds(times.compute.as_secs_f64()),
        seconds(times.waits.as_secs_f64()),
        seconds(times.inward.as_secs_f64()),
        seconds(times.outward.as_secs_f64()),
        seconds(times.communication.as_secs_f64()),
        seconds(times.updates.as_secs_f64()),
    );
    if stats.strays > 0 {
        text += text!(
            " · {} micro-batches used other offsets than planned",
            " · {} 个微批使用了与计划不同的偏移",
            stats.strays
        );
    }
    if let Some(free) = own.free_bytes() {
        let taken = gpu.free_bytes.saturating_sub(free);
        text += text!(
            " · the driver counts {taken} bytes more in use than before the run",
            " · 驱动统计的占用比运行前多 {taken} 字节"
        );
    }
    text
}

fn tier(name: Both, pool: &Pool) -> Option<Text> {
    let stats = pool.stats();
    let kinds = STATES.iter().filter_map(|tag| {
        let held = stats.tag(*tag).in_use;
        (held > 0).then(|| {
            text!(
                "{tag} {}",
                "{tag} {}",
                bytes(held),
                tag = kind_name(tag.name())
            )
        })
    });
    let kinds: Vec<Text> = kinds.collect();
    (!kinds.is_empty()).then(|| text!("{name}: {}", "{name}：{}", Text::list(&kinds)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_states_and_only_tiers_with_states_are_listed() {
        let pool = Pool::new("host", None);
        assert_eq!(tier(both("host", "主机内存"), &pool), None);
        let workspace = pool.reserve(900, Tag::Workspace).expect("unlimited");
        assert_eq!(tier(both("host", "主机内存"), &pool), None);
        let state = pool.reserve(2 << 20, Tag::Optimizer).expect("unlimited");
        let weights = pool.reserve(1 << 20, Tag::Parameters).expect("unlimited");
        let line = tier(both("host", "主机内存"), &pool).expect("holds states");
        assert_eq!(line, "host: parameters 1.0M, optimizer 2.0M");
        drop((workspace, state, weights));
    }
}
