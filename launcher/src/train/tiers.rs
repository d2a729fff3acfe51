//! Output lines about the memory that states actually use in each tier.

use super::replica::OwnGpu;
use crate::lang::{Both, Text, both, text};
use crate::memory::kind_name;
use crate::units::{bytes, seconds};
use engine::Zero;
use engine::comm::{CommError, Tag as CommTag};
use kernels::{Pool, Tag};

/// Tags of the states that exist between updates.
const STATES: [Tag; 3] = [Tag::Parameters, Tag::Gradients, Tag::Optimizer];

/// Number of memory tiers.
const TIERS: usize = 3;

/// Bytes of each kind of state in each tier of one rank.
type Stored = [[u64; STATES.len()]; TIERS];

/// Lines with the bytes of each kind of state in each tier: of rank 0, and of one rank of every other pipeline stage.
///
/// # Errors
/// The exchange with the other stages fails.
pub(crate) fn lines(zero: &Zero) -> Result<Vec<Text>, CommError> {
    let own = stored([
        Some(zero.device_pool()),
        Some(zero.host_pool()),
        zero.spill_pool(),
    ]);
    let strays = zero.device_pool().stats().strays;
    let mesh = zero.mesh();
    let stages = mesh.coordinates().stages;
    if stages == 1 {
        return Ok(vec![line(0, None, own, strays)]);
    }
    let sent = own.iter().flatten().chain([&strays]);
    // Counts below 2^53 are exact.
    let sent: Vec<f64> = sent.map(|count| *count as f64).collect();
    let all = mesh
        .world()
        .all_gather_f64(&sent, CommTag::new("tiers", 0))?;
    let of_stage = |(stage, got): (usize, &Vec<f64>)| {
        let mut got = got.iter().map(|count| *count as u64);
        let mut next = || got.next().unwrap_or_default();
        let stored = own.map(|tier| tier.map(|_| next()));
        line(stage, Some(stage), stored, next())
    };
    // The first data-parallel rank of each stage.
    Ok(all.iter().take(stages).enumerate().map(of_stage).collect())
}

fn line(rank: usize, stage: Option<usize>, stored: Stored, strays: u64) -> Text {
    let names = [
        both("device", "设备内存"),
        both("host", "主机内存"),
        both("nvme", "nvme"),
    ];
    let tiers = names.into_iter().zip(stored);
    let tiers: Vec<Text> = tiers.filter_map(|(name, held)| tier(name, held)).collect();
    let tiers = Text::join(&tiers, " · ");
    let mut text = match stage {
        None => text!("rank {rank} stores {tiers}", "rank {rank} 存放 {tiers}"),
        Some(stage) => text!(
            "rank {rank} (stage {stage}) stores {tiers}",
            "rank {rank}（段 {stage}）存放 {tiers}"
        ),
    };
    if strays > 0 {
        text += text!(
            " · {strays} micro-batches used other offsets than planned",
            " · {strays} 个微批使用了与计划不同的偏移"
        );
    }
    text
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
    if let Some(free) = own.free_bytes() {
        let taken = gpu.free_bytes.saturating_sub(free);
        text += text!(
            " · the driver counts {taken} bytes more in use than before the run",
            " · 驱动统计的占用比运行前多 {taken} 字节"
        );
    }
    text
}

fn stored(pools: [Option<&Pool>; TIERS]) -> Stored {
    pools.map(|pool| {
        let stats = pool.map(Pool::stats);
        STATES.map(|tag| stats.as_ref().map_or(0, |stats| stats.tag(tag).in_use))
    })
}

fn tier(name: Both, held: [u64; STATES.len()]) -> Option<Text> {
    let kinds = STATES.iter().zip(held).filter(|(_, held)| *held > 0);
    let kinds = kinds.map(|(tag, held)| {
        text!(
            "{tag} {}",
            "{tag} {}",
            bytes(held),
            tag = kind_name(tag.name())
        )
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
        let line = || line(2, Some(1), stored([None, Some(&pool), None]), 0);
        assert_eq!(line(), "rank 2 (stage 1) stores ");
        let workspace = pool.reserve(900, Tag::Workspace).expect("unlimited");
        assert_eq!(line(), "rank 2 (stage 1) stores ");
        let state = pool.reserve(2 << 20, Tag::Optimizer).expect("unlimited");
        let weights = pool.reserve(1 << 20, Tag::Parameters).expect("unlimited");
        assert_eq!(
            line(),
            "rank 2 (stage 1) stores host: parameters 1.0M, optimizer 2.0M"
        );
        drop((workspace, state, weights));
    }
}
