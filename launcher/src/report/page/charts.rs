//! Charts of the page.

use serde_json::Value;

use super::html::escape;
use crate::report::chart::{Chart, Layer, Line, Look};
use crate::report::curve::{Point, smoothed};
use crate::report::directory::number;
use crate::report::monitor::split::StepSplit;
use crate::report::{RunFiles, memory_chart};

/// Maximum ranks drawn as separate lines.
const MOST_RANKS: usize = 8;

/// HTML figure with a title.
fn figure(id: &str, title: &str, drawing: &str) -> String {
    format!(
        "<figure class=\"card\" id=\"{id}\" style=\"margin:0\">\n<h3>{title}</h3>\n{drawing}</figure>\n"
    )
}

fn points<'r>(rows: impl Iterator<Item = &'r Value>, name: &str) -> Vec<(f64, f64)> {
    rows.filter_map(|row| Some((row["current_steps"].as_f64()?, number(row, name)?)))
        .collect()
}

fn single(name: &str, points: Vec<(f64, f64)>) -> Chart {
    Chart {
        lines: vec![Line {
            name: name.to_owned(),
            colour: 0,
            look: Look::Plain,
            points,
        }],
        ..Chart::default()
    }
}

fn loss(files: &RunFiles) -> Chart {
    let raw = points(files.steps(), "loss");
    let finite: Vec<Point> = raw
        .iter()
        .filter(|(_, loss)| loss.is_finite())
        .map(|(step, loss)| Point {
            step: *step as u64,
            loss: *loss,
        })
        .collect();
    let average = smoothed(&finite)
        .into_iter()
        .map(|p| (p.step as f64, p.loss));
    let mut lines = vec![
        Line {
            name: String::new(),
            colour: 0,
            look: Look::Faint,
            points: raw,
        },
        Line {
            name: "loss and moving average".into(),
            colour: 0,
            look: Look::Strong,
            points: average.collect(),
        },
    ];
    let held_out = points(files.evaluations(), "eval_loss");
    if !held_out.is_empty() {
        lines.push(Line {
            name: "held out".into(),
            colour: 1,
            look: Look::Dashed,
            points: held_out,
        });
    }
    Chart {
        lines,
        ..Chart::default()
    }
}

/// Stacked chart of the parts of a step's time, in milliseconds.
fn step_time(files: &RunFiles) -> Chart {
    let rows: Vec<&Value> = files
        .steps()
        .filter(|row| row["seconds"].is_object())
        .collect();
    let layer = |(index, name): (usize, &str)| Layer {
        name: name.to_owned(),
        colour: index,
        values: rows
            .iter()
            .map(|row| 1e3 * number(&row["seconds"], name).unwrap_or(0.0))
            .collect(),
    };
    let used = |layer: &Layer| layer.values.iter().any(|value| *value > 0.0);
    let layers = StepSplit::NAMES.into_iter().enumerate().map(layer);
    Chart {
        unit: "ms".into(),
        at: rows
            .iter()
            .filter_map(|row| row["current_steps"].as_f64())
            .collect(),
        layers: layers.filter(used).collect(),
        lines: Vec::new(),
    }
}

/// Chart of each rank's own time per step. For many ranks only minimum and maximum are drawn.
fn own_time(files: &RunFiles) -> Chart {
    let rows = files.steps().filter_map(|row| {
        let own = row["rank_seconds"].as_array()?.iter();
        let own: Vec<f64> = own.filter_map(|v| Some(1e3 * v.as_f64()?)).collect();
        Some((row["current_steps"].as_f64()?, own))
    });
    let rows: Vec<(f64, Vec<f64>)> = rows.collect();
    let ranks = rows.iter().map(|(_, own)| own.len()).max().unwrap_or(0);
    let line = |index: usize, name: String, read: &dyn Fn(&[f64]) -> Option<f64>| Line {
        name,
        colour: index,
        look: Look::Plain,
        points: rows
            .iter()
            .filter_map(|(step, own)| Some((*step, read(own)?)))
            .collect(),
    };
    let lines = if ranks < 2 {
        Vec::new()
    } else if ranks <= MOST_RANKS {
        let of_rank =
            |rank: usize| line(rank, format!("rank {rank}"), &|own| own.get(rank).copied());
        (0..ranks).map(of_rank).collect()
    } else {
        let bound = |pick: fn(f64, f64) -> f64| move |own: &[f64]| own.iter().copied().reduce(pick);
        vec![
            line(0, "fastest rank".into(), &bound(f64::min)),
            line(1, "slowest rank".into(), &bound(f64::max)),
        ]
    };
    Chart {
        unit: "ms".into(),
        lines,
        ..Chart::default()
    }
}

/// Sentence that names the rank whose own time deviates most from the mean, over the logged rows.
fn slowest(files: &RunFiles) -> Option<String> {
    let rows = files.steps().filter_map(|row| {
        let rank = row["slowest_rank"].as_u64()?;
        Some((
            rank,
            number(row, "imbalance")?,
            row["slowest_part"].as_str()?,
        ))
    });
    let (rank, share, part) = rows.max_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(format!(
        "<p class=\"soft\">Largest difference: rank {rank}, own time {:+.0} % of the mean, most of it in {}.</p>\n",
        100.0 * share,
        escape(part)
    ))
}

/// Charts of loss, learning rate, gradient norm and throughput.
pub(super) fn training(files: &RunFiles) -> String {
    let series = [
        ("lr", "Learning rate", "lr"),
        (
            "gradient-norm",
            "Gradient norm before clipping",
            "grad_norm",
        ),
        ("throughput", "Tokens per second", "tokens_per_second"),
    ];
    let mut out =
        String::from("<section id=\"training\">\n<h2>Training</h2>\n<div class=\"grid\">\n");
    out += &figure("loss", "Loss", &loss(files).to_svg("loss by step"));
    for (id, title, name) in series {
        let chart = single("", points(files.steps(), name));
        out += &figure(id, title, &chart.to_svg(title));
    }
    out + "</div>\n</section>\n"
}

/// Charts of memory over steps and phases.
pub(super) fn memory(files: &RunFiles) -> String {
    let mut out = String::from("<div class=\"grid\">\n");
    let by_step = memory_chart::by_step(files);
    let title = "Highest memory of each logged row, rank 0";
    out += &figure("memory-by-step", title, &by_step.to_svg("memory by step"));
    if let Some(phases) = memory_chart::by_phase(files) {
        out += &figure(
            "memory-by-phase",
            "Memory by phase in the last logged rows, rank 0",
            &phases,
        );
    }
    let resident = memory_chart::resident(files);
    if !resident.is_empty() {
        let drawing = resident.to_svg("resident memory of the ranks by step");
        out += &figure("resident", "Resident memory of the processes", &drawing);
    }
    out + "</div>\n"
}

/// Section on the parts of a step's time and the slowest rank.
pub(super) fn time(files: &RunFiles) -> Option<String> {
    let split = step_time(files);
    if split.is_empty() {
        return None;
    }
    let mut out = String::from("<section id=\"time\">\n<h2>Step time</h2>\n<div class=\"grid\">\n");
    let title = "By part, mean of all ranks";
    out += &figure(
        "step-time",
        title,
        &split.to_svg("parts of the step by step"),
    );
    let ranks = own_time(files);
    if !ranks.is_empty() {
        let drawing =
            ranks.to_svg("own time of the ranks by step") + &slowest(files).unwrap_or_default();
        out += &figure(
            "imbalance",
            "Own time of each rank, without waits for other ranks",
            &drawing,
        );
    }
    Some(out + "</div>\n</section>\n")
}
