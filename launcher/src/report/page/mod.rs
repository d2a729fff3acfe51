//! `report.html`: a run on one page without network access, scripts or other files.
//!
//! The page is a pure function of the run directory. So it can be written again at any time, also for a run that
//! failed or was interrupted. Missing parts are left out.

mod answers;
mod charts;
mod html;
mod tables;
#[cfg(test)]
mod tests;

use std::path::Path;

use super::directory::number;
use super::{MEMORY_CHART, RunFiles, memory_chart, write_whole};
use crate::error::Failure;
use crate::units::{bytes, count, seconds};
pub(super) use html::escape;

/// File name of the report page in the run directory.
pub const REPORT: &str = "report.html";

/// Writes `report.html` and `memory.svg` from the other files of the run directory. Without a memory log
/// there is no `memory.svg`.
///
/// # Errors
/// When a file cannot be written (exit 16).
pub fn write_pages(directory: &Path) -> Result<(), Failure> {
    let files = RunFiles::read(directory);
    if !files.memory.is_empty() {
        let chart = memory_chart::document(&files);
        write_whole(&directory.join(MEMORY_CHART), chart.as_bytes())?;
    }
    write_whole(&directory.join(REPORT), page(&files).as_bytes())
}

/// The page of a run whose `state` is known, which loads itself again after `seconds` if there are any.
pub(crate) fn live(directory: &Path, state: &str, seconds: Option<u64>) -> String {
    let again = seconds.map_or_else(String::new, |seconds| {
        format!("<meta http-equiv=\"refresh\" content=\"{seconds}\" />\n")
    });
    let files = RunFiles::read(directory);
    let (done, total) = files.progress();
    let state = format!(
        "<p class=\"soft\">{}, step {done} of {total}</p>\n",
        escape(state)
    );
    whole(&files, &again, &state)
}

/// HTML of the whole page.
fn page(files: &RunFiles) -> String {
    whole(files, "", &outcome(files))
}

/// HTML of the page with more lines in its head, and the state of the run.
fn whole(files: &RunFiles, head: &str, state: &str) -> String {
    let name = files
        .directory
        .file_name()
        .unwrap_or(files.directory.as_os_str());
    let name = escape(&name.to_string_lossy());
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\" />\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\" />\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\" />\n\
         {head}<title>{name}</title>\n<style>\n{}</style>\n</head>\n<body>\n<header>\n<h1>{name}</h1>\n",
        html::STYLE
    );
    out += state;
    out += &summary(files);
    out += "</header>\n";
    out += &tables::failures(files).unwrap_or_default();
    out += &charts::training(files);
    out += &charts::time(files).unwrap_or_default();
    out += &memory(files);
    out += &answers::section(files).unwrap_or_default();
    out += &tables::trains(files).unwrap_or_default();
    out += &tables::stages(files).unwrap_or_default();
    out += &tables::config(files).unwrap_or_default();
    out + "</body>\n</html>\n"
}

/// How the run ended, by its files.
fn outcome(files: &RunFiles) -> String {
    let (done, total) = files.progress();
    let (class, state) = if !files.failures.is_empty() {
        ("bad", format!("failed after step {done} of {total}"))
    } else if files.is_complete() {
        ("good", format!("finished, {total} steps"))
    } else {
        ("soft", format!("stopped after step {done} of {total}"))
    };
    format!("<p class=\"{class}\">{state}</p>\n")
}

/// Section with the run's most important numbers.
fn summary(files: &RunFiles) -> String {
    let mut out = String::new();
    if let Some(plan) = files.plan.as_ref().and_then(|plan| plan.plan.as_ref()) {
        let offload = match &*plan.offload {
            "none" => String::new(),
            tiers => format!(" · offload {}", escape(tiers)),
        };
        out += &format!(
            "<p class=\"soft\">{} · {} parameters, {} trainable · {} × {} · ZeRO-{} · {}{offload}</p>\n",
            escape(&plan.model),
            count(plan.params),
            count(plan.trainable),
            plan.ranks,
            escape(&plan.device),
            plan.stage,
            escape(&plan.precision),
        );
    }
    let last = files.steps().next_back();
    let of = |name: &str| last.and_then(|row| number(row, name));
    let result = |name: &str| files.results.as_ref().and_then(|r| number(r, name));
    let mut facts: Vec<(&str, Option<String>)> = vec![
        ("last loss", of("loss").map(|v| format!("{v:.4}"))),
        (
            "held-out loss",
            result("eval_loss").map(|v| format!("{v:.4}")),
        ),
        (
            "exact match",
            result("exact_match").map(|v| format!("{v:.2}")),
        ),
        (
            "exact match before",
            result("exact_match_before").map(|v| format!("{v:.2}")),
        ),
        ("step time", of("step_seconds").map(seconds)),
        (
            "tokens per second",
            of("tokens_per_second").map(|v| count(v as u64)),
        ),
        (
            "waiting for data",
            of("data_wait").map(|v| format!("{:.1} %", 100.0 * v)),
        ),
    ];
    let resident = files
        .memory
        .iter()
        .flat_map(|row| &row.ranks)
        .map(|rank| rank.rss)
        .max();
    facts.push(("resident memory, one rank", resident.map(bytes)));
    let elapsed = files
        .rows
        .last()
        .and_then(|row| row["elapsed_time"].as_str());
    facts.push(("time", elapsed.map(escape)));
    out += "<div class=\"facts\">\n";
    for (name, value) in facts {
        if let Some(value) = value {
            out += &format!("<div><span class=\"soft\">{name}</span><b>{value}</b></div>\n");
        }
    }
    out + "</div>\n"
}

fn memory(files: &RunFiles) -> String {
    let tables = [tables::planned(files), tables::peaks(files)];
    if files.memory.is_empty() && tables[0].is_none() {
        return String::new();
    }
    let mut out = String::from("<section id=\"memory\">\n<h2>Memory</h2>\n");
    if !files.memory.is_empty() {
        out += &charts::memory(files);
    }
    let titles = ["Planned and measured", "Highest memory of every phase"];
    for (title, table) in titles.into_iter().zip(tables) {
        if let Some(table) = table {
            out += &format!("<h3 style=\"margin-top:16px\">{title}</h3>\n{table}");
        }
    }
    out + "</section>\n"
}
