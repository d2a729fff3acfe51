//! Tables of the page: failures, memory, trainable parameters, configuration.

use crate::lang::Text;
use serde_json::Value;

use super::html::{escape, table};
use crate::memory::Phase;
use crate::report::monitor::memory::{PhasePeak, PoolPeak};
use crate::report::trainer_log::TierBytes;
use crate::report::{RunFiles, memory_chart};
use crate::units::{bytes, count, grouped};

/// Maximum kinds of bytes named as the cause of a peak.
const CAUSES: usize = 3;

/// Section with the failure that ended the run, if any.
pub(super) fn failures(files: &RunFiles) -> Option<String> {
    if files.failures.is_empty() {
        return None;
    }
    let mut out = String::from("<section id=\"failure\">\n<h2>Failure</h2>\n");
    for (rank, failure) in &files.failures {
        out += &format!(
            "<div class=\"card failure\">\n<h3>error[{}] {}</h3>\n<dl>\n<dt>rank</dt><dd>{rank}</dd>\n<dt>cause</dt><dd>{}</dd>\n",
            failure.code,
            escape(&failure.title),
            escape(&failure.cause)
        );
        for (label, lines) in [("evidence", &failure.evidence), ("next", &failure.next)] {
            if !lines.is_empty() {
                let lines = Text::join(lines, "\n");
                out += &format!("<dt>{label}</dt><dd>{}</dd>\n", escape(&lines));
            }
        }
        out += "</dl>\n</div>\n";
    }
    Some(out + "</section>\n")
}

/// Table of planned and measured bytes by kind.
pub(super) fn planned(files: &RunFiles) -> Option<String> {
    let rows = memory_chart::compared(files);
    if rows.is_empty() {
        return None;
    }
    let cell = |(device, host): (u64, u64)| match (device, host) {
        (device, 0) => bytes(device),
        (0, host) => format!("host {}", bytes(host)),
        (device, host) => format!("{} + host {}", bytes(device), bytes(host)),
    };
    let rows = rows.into_iter().map(|row| {
        let sum = |(device, host): (u64, u64)| (device + host) as f64;
        let share = if sum(row.planned) > 0.0 {
            format!("{:.0} %", 100.0 * sum(row.measured) / sum(row.planned))
        } else {
            "–".to_owned()
        };
        vec![
            escape(&row.name),
            cell(row.planned),
            cell(row.measured),
            share,
        ]
    });
    let head = [
        "kind, per rank",
        "planned",
        "measured, rank 0",
        "of the plan",
    ];
    Some(table(&head, rows))
}

/// Table of the peak memory of every phase over the whole run, and its causes.
pub(super) fn peaks(files: &RunFiles) -> Option<String> {
    let highest = |phase: Phase| -> Option<PhasePeak> {
        let mut whole: Option<PhasePeak> = None;
        for peak in files
            .memory
            .iter()
            .filter_map(|row| row.phases.get(phase.name()))
        {
            let whole = whole.get_or_insert_default();
            for (pool, other) in [
                (&mut whole.device, &peak.device),
                (&mut whole.host, &peak.host),
            ] {
                if other.bytes > pool.bytes {
                    *pool = other.clone();
                }
            }
            whole.rss = whole.rss.max(peak.rss);
        }
        whole
    };
    let cause = |pool: &PoolPeak| {
        let kinds = pool.causes(CAUSES).into_iter();
        let kinds: Vec<String> = kinds
            .map(|(kind, size)| format!("{} {}", escape(kind), bytes(size)))
            .collect();
        kinds.join(", ")
    };
    let rows: Vec<Vec<String>> = Phase::ALL
        .into_iter()
        .filter_map(|phase| {
            let peak = highest(phase)?;
            Some(vec![
                phase.name().to_owned(),
                bytes(peak.device.bytes),
                cause(&peak.device),
                bytes(peak.host.bytes),
                cause(&peak.host),
                bytes(peak.rss),
            ])
        })
        .collect();
    let head = [
        "phase",
        "device",
        "largest kinds",
        "host tier",
        "largest kinds",
        "resident",
    ];
    (!rows.is_empty()).then(|| table(&head, rows.into_iter()))
}

/// HTML table of trainable parameters by part of the model. `None` if the run directory does not tell them.
pub(super) fn trains(files: &RunFiles) -> Option<String> {
    let plan = files.plan.as_ref()?;
    if plan.trains.is_empty() {
        return None;
    }
    let rows = plan.trains.iter().map(|row| {
        vec![
            escape(&row.module),
            grouped(row.tensors as u64),
            count(row.params),
            escape(&row.dtype),
            format!("{:.1e}", row.lr),
        ]
    });
    let head = ["module", "tensors", "parameters", "dtype", "learning rate"];
    let mut out = String::from("<section id=\"trains\">\n<h2>Trainable parameters</h2>\n");
    if let Some(plan) = &plan.plan {
        out += &format!(
            "<p class=\"soft\">{} of {} parameters ({:.1} %)</p>\n",
            count(plan.trainable),
            count(plan.params),
            100.0 * plan.trainable as f64 / plan.params.max(1) as f64
        );
    }
    if let Some(weights) = &plan.quantized {
        out += &format!(
            "<p class=\"soft\">{} quantized layers of the base in {}: {} instead of {} in 16 bits</p>\n",
            grouped(weights.tensors as u64),
            escape(&weights.formats.join(" + ")),
            bytes(weights.bytes),
            bytes(2 * weights.params)
        );
    }
    Some(out + &table(&head, rows) + "</section>\n")
}

/// HTML table of the pipeline stages. `None` without stages.
pub(super) fn stages(files: &RunFiles) -> Option<String> {
    let stages = files.plan.as_ref()?.stages.as_ref()?;
    let rows = stages.units.iter().enumerate().map(|(stage, units)| {
        let share = |shares: &[f64]| {
            shares
                .get(stage)
                .map_or("–".into(), |s| format!("{s:.0} %"))
        };
        let sent = stages.boundary_bytes.get(stage);
        let peak = |of: fn(&TierBytes) -> u64| {
            let rows = files.memory.iter();
            let ranks =
                rows.flat_map(|row| row.ranks.iter().skip(stage).step_by(stages.units.len()));
            ranks.map(of).max().map_or("–".into(), bytes)
        };
        vec![
            stage.to_string(),
            units.to_string(),
            share(&stages.operations_percent),
            share(&stages.bytes_percent),
            sent.map_or("–".into(), |sent| bytes(*sent)),
            peak(|peak| peak.device),
            peak(|peak| peak.host),
        ]
    });
    let head = [
        "stage",
        "units",
        "operations",
        "bytes",
        "to the next stage",
        "peak device, largest rank",
        "host tier",
    ];
    Some(format!(
        "<section id=\"stages\">\n<h2>Pipeline stages</h2>\n<p class=\"soft\">a stage waits {:.0} % of a step with {} micro-batches</p>\n{}</section>\n",
        stages.waiting_percent,
        stages.micro_batches,
        table(&head, rows)
    ))
}

/// The resolved configuration, one value per line.
pub(super) fn config(files: &RunFiles) -> Option<String> {
    let mut rows = Vec::new();
    flatten("", files.config.as_ref()?, &mut rows);
    let rows = rows
        .into_iter()
        .map(|(name, value)| vec![escape(&name), format!("<code>{}</code>", escape(&value))]);
    let rows = table(&["setting", "value"], rows);
    Some(format!(
        "<section id=\"configuration\">\n<h2>Effective configuration</h2>\n<details open=\"open\"><summary>{}</summary>\n{rows}</details>\n</section>\n",
        crate::config::CONFIG_FILE
    ))
}

/// Leaves of a JSON tree with their paths.
fn flatten(path: &str, value: &Value, rows: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                let path = if path.is_empty() {
                    name.clone()
                } else {
                    format!("{path}.{name}")
                };
                flatten(&path, value, rows);
            }
        }
        Value::String(text) => rows.push((path.to_owned(), text.clone())),
        other => rows.push((path.to_owned(), other.to_string())),
    }
}
