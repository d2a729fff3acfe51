//! `launcher plan --matrix`: plans of every ZeRO stage and offload on one machine.

use super::needs;
use super::planner::Planner;
use crate::config::{Offload, RunConfig, Tier};
use crate::error::Failure;
use crate::lang::{both, text};
use crate::plan::Settled;
use crate::plan::suggestion::changed;
use crate::units::bytes;
use serde_json::{Value, json};

/// Offloads to compare: tiers of optimizer states and weights. The tier of activations is unchanged.
fn offloads(planner: &Planner, config: &RunConfig) -> Vec<Offload> {
    let disk = planner.disk(config).map(Tier::Nvme);
    let mut all = Vec::new();
    for tier in [Some(Tier::Cpu), disk].into_iter().flatten() {
        for param in [Tier::None, tier.clone()] {
            all.push(Offload {
                optimizer: tier.clone(),
                param,
                activation: config.offload.activation.clone(),
            });
        }
    }
    all.insert(
        0,
        Offload {
            activation: config.offload.activation.clone(),
            ..Offload::default()
        },
    );
    all
}

/// Plans the run for every ZeRO stage and, within each, for every offload. Invalid combinations are left out.
pub(super) fn rows(planner: &Planner, config: &RunConfig) -> Result<Vec<Settled>, Failure> {
    let mut rows = Vec::new();
    for stage in 0..=3u8 {
        for offload in offloads(planner, config) {
            let flags = vec![
                ("zero", stage.to_string()),
                ("offload", offload.to_string()),
            ];
            if let Some(config) = changed(config, &flags) {
                rows.push(planner.plan(&config.without_spare())?);
            }
        }
    }
    Ok(rows)
}

/// The plans as a JSON list.
pub(super) fn as_json(rows: &[Settled]) -> Value {
    let rows = rows.iter().map(|planned| {
        json!({
            "stage": planned.run.zero,
            "offload": planned.run.offload.to_string(),
            "need_bytes": needs(planned),
            "peak_bytes_per_rank": planned.memory.peak,
            "fits": planned.fit.fits(),
        })
    });
    Value::Array(rows.collect())
}

/// The plans as a text table: one row per plan with its stage and offload, the bytes needed per tier, and whether
/// they fit.
pub(super) fn as_text(config: &RunConfig, rows: &[Settled]) -> String {
    let [stage, offload, device, host, fits] = [
        both("stage", "阶段"),
        both("offload", "卸载"),
        both("device/rank", "设备/rank"),
        both("host", "主机"),
        both("fits", "放得下"),
    ];
    let ranks = text!("{} ranks", "{} 个 rank", config.world_size);
    let mut text = format!(
        "{} · {ranks}\n{stage:<7}{offload:<40}{device:>12}{host:>11}{:>11}  {fits}\n",
        config.name(),
        "nvme",
    );
    for planned in rows {
        let need = planned.fit.need;
        let verdict = if planned.fit.fits() {
            both("yes", "是")
        } else {
            both("no", "否")
        };
        text += &format!(
            "{:<7}{:<40}{:>12}{:>11}{:>11}  {verdict}\n",
            planned.run.zero,
            planned.run.offload.to_string(),
            bytes(need.device),
            bytes(need.host),
            bytes(need.nvme),
        );
    }
    text
}
