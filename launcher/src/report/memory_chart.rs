//! Charts of rank 0's memory: the peak of every logged row by kind, and the phases of the last rows side by side.

use std::collections::BTreeMap;

use super::chart::{Chart, Layer, Line, Look, WIDTH, colour, legend, open, push};
use super::{PlanFile, RunFiles};
use crate::memory::{Kinds, PARTS, Phase};
use crate::report::monitor::memory::{MemoryRow, PhasePeak, PoolPeak};

/// Kinds of bytes, from the bottom of the stack up. The index is the color.
const KINDS: [&str; 7] = [
    "parameters",
    "optimizer",
    "gradients",
    "gathered",
    "communication",
    "activations",
    "workspace",
];
/// Index of the color in which planned bytes are drawn.
const PLANNED: usize = 7;
/// Maximum ranks drawn as separate lines.
const MOST_RANKS: usize = 6;
/// Number of last rows whose phases are drawn.
const LAST_ROWS: usize = 4;
const MIB: f64 = (1u64 << 20) as f64;

/// Height of the chart of phases.
const HEIGHT: f64 = 270.0;
const LEFT: f64 = 54.0;
const RIGHT: f64 = 12.0;
/// Margin for the names of phases, which are written vertically below their bars.
const BOTTOM: f64 = 80.0;

/// Bytes of both pools by kind, each pool at its own peak.
fn stacked(peak: &PhasePeak) -> Kinds {
    let mut kinds = Kinds::new();
    for pool in [&peak.device, &peak.host] {
        for (kind, bytes) in &pool.at_peak {
            *kinds.entry(kind.clone()).or_default() += bytes;
        }
    }
    kinds
}

fn total(peak: &PhasePeak) -> u64 {
    peak.device.bytes + peak.host.bytes
}

/// Phase of a row with the most bytes.
fn highest(row: &MemoryRow) -> Option<&PhasePeak> {
    row.phases.values().max_by_key(|peak| total(peak))
}

/// Bytes that the plan predicted for both pools of a rank.
fn predicted(plan: Option<&PlanFile>) -> Option<u64> {
    let plan = plan?.plan.as_ref()?;
    let parts = plan.per_rank.iter();
    Some(parts.map(|part| part.device_bytes + part.host_bytes).sum())
}

/// Chart of the peak of every logged row, by kind, with the plan's prediction.
pub(super) fn by_step(files: &RunFiles) -> Chart {
    let mut rows: Vec<(&MemoryRow, &PhasePeak)> = Vec::new();
    for row in &files.memory {
        let Some(peak) = highest(row) else {
            continue;
        };
        // An evaluation or a checkpoint after the last logged row has the same step.
        match rows.last_mut().filter(|(last, _)| last.step == row.step) {
            Some(last) if total(last.1) < total(peak) => *last = (row, peak),
            Some(_) => {}
            None => rows.push((row, peak)),
        }
    }
    let Some((last, _)) = rows.last() else {
        return Chart::default();
    };
    let stacks: Vec<Kinds> = rows.iter().map(|(_, peak)| stacked(peak)).collect();
    let layers = KINDS.iter().enumerate().map(|(index, kind)| Layer {
        name: (*kind).to_owned(),
        colour: index,
        values: stacks
            .iter()
            .map(|kinds| kinds.get(*kind).copied().unwrap_or(0) as f64 / MIB)
            .collect(),
    });
    let used = |layer: &Layer| layer.values.iter().any(|value| *value > 0.0);
    let lines = planned_line(predicted(files.plan.as_ref()), last.step);
    Chart {
        unit: "MiB".into(),
        at: rows.iter().map(|(row, _)| row.step as f64).collect(),
        layers: layers.filter(used).collect(),
        lines: lines.into_iter().collect(),
    }
}

/// Dashed horizontal line at the planned `bytes`, in MiB. `None` if they are unknown.
fn planned_line(bytes: Option<u64>, last_step: u64) -> Option<Line> {
    let height = bytes? as f64 / MIB;
    Some(Line {
        name: "planned (dashed)".into(),
        colour: PLANNED,
        look: Look::Dashed,
        points: vec![(0.0, height), (last_step.max(1) as f64, height)],
    })
}

/// Chart of the resident memory of the first ranks' processes, with the planned memory of one process.
pub(super) fn resident(files: &RunFiles) -> Chart {
    let rows = || files.memory.iter().filter(|row| !row.ranks.is_empty());
    let ranks = rows().map(|row| row.ranks.len()).max().unwrap_or(0);
    let of_rank = |rank: usize| Line {
        name: format!("rank {rank}"),
        colour: rank,
        look: Look::Plain,
        points: rows()
            .filter_map(|row| Some((row.step as f64, row.ranks.get(rank)?.rss as f64 / MIB)))
            .collect(),
    };
    let mut lines: Vec<Line> = (0..ranks.min(MOST_RANKS)).map(of_rank).collect();
    let plan = files.plan.as_ref().and_then(|plan| plan.plan.as_ref());
    if let Some(row) = rows().next_back() {
        let need = plan.map(|plan| plan.host_need_bytes / plan.ranks.max(1) as u64);
        lines.extend(planned_line(need, row.step));
    }
    Chart {
        unit: "MiB".into(),
        lines,
        ..Chart::default()
    }
}

/// One bar of the chart of phases: the peak of one phase in one row of the memory log.
struct Bar<'a> {
    step: u64,
    phase: &'static str,
    peak: &'a PhasePeak,
}

fn bars(rows: &[MemoryRow]) -> Vec<Bar<'_>> {
    let last = &rows[rows.len().saturating_sub(LAST_ROWS)..];
    let mut bars = Vec::new();
    for row in last {
        for phase in Phase::ALL {
            if let Some(peak) = row.phases.get(phase.name()) {
                let (step, phase) = (row.step, phase.name());
                bars.push(Bar { step, phase, peak });
            }
        }
    }
    bars
}

/// Chart of the phases of the last logged rows as bars, in chronological order. `None` before the first row.
pub(super) fn by_phase(files: &RunFiles) -> Option<String> {
    let bars = bars(&files.memory);
    let most = bars.iter().map(|bar| total(bar.peak)).max()?;
    let mut kinds: BTreeMap<usize, &str> = BTreeMap::new();
    for bar in &bars {
        let used = stacked(bar.peak);
        let index = |kind: &str| KINDS.iter().position(|other| *other == kind);
        kinds.extend(
            used.keys()
                .filter_map(|kind| Some((index(kind)?, KINDS[index(kind)?]))),
        );
    }
    let mut svg = open("memory by phase in the last logged rows", HEIGHT);
    let top = legend(&mut svg, kinds.iter().map(|(index, kind)| (*kind, *index)));
    let axis = super::axis::Axis::nice(0.0, most as f64 / MIB, 5.0, false);
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let at = |mib: f64| bottom - axis.share(mib) * (bottom - top);
    for value in axis.marks() {
        let (y, digits) = (at(value), axis.digits());
        push(
            &mut svg,
            format_args!(
                "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"currentColor\" stroke-opacity=\"0.15\"/>\n<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" fill-opacity=\"0.75\">{value:.digits$}</text>\n",
                LEFT - 6.0,
                y + 4.0
            ),
        );
    }
    let width = (right - LEFT) / bars.len() as f64;
    for (place, bar) in bars.iter().enumerate() {
        let x = LEFT + place as f64 * width;
        draw_bar(&mut svg, bar, x, width, &at);
        // A new step starts with a vertical line and its number.
        if place == 0 || bars[place - 1].step != bar.step {
            push(
                &mut svg,
                format_args!(
                    "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{}\" stroke=\"currentColor\" stroke-opacity=\"0.4\"/>\n<text x=\"{:.1}\" y=\"{}\" fill-opacity=\"0.75\">to step {}</text>\n",
                    HEIGHT - 4.0,
                    x + 4.0,
                    HEIGHT - 4.0,
                    bar.step
                ),
            );
        }
    }
    push(
        &mut svg,
        format_args!(
            "<text x=\"4\" y=\"{}\" fill-opacity=\"0.75\">MiB</text>\n</svg>\n",
            HEIGHT - 4.0
        ),
    );
    Some(svg)
}

fn draw_bar(svg: &mut String, bar: &Bar<'_>, x: f64, width: f64, at: &dyn Fn(f64) -> f64) {
    let kinds = stacked(bar.peak);
    let gap = (0.12 * width).min(4.0);
    let mut below = 0.0;
    for (index, kind) in KINDS.iter().enumerate() {
        let Some(bytes) = kinds.get(*kind) else {
            continue;
        };
        let above = below + *bytes as f64 / MIB;
        push(
            svg,
            format_args!(
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\" fill-opacity=\"0.8\"/>\n",
                x + gap,
                at(above),
                width - 2.0 * gap,
                at(below) - at(above),
                colour(index)
            ),
        );
        below = above;
    }
    let (x, y) = (x + width / 2.0 + 4.0, at(0.0) + 6.0);
    push(
        svg,
        format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"end\" font-size=\"10\" transform=\"rotate(-90 {x:.1} {y:.1})\">{}</text>\n",
            bar.phase
        ),
    );
}

/// SVG document with two charts side by side: memory of rank 0 over the steps, and peaks of each phase.
pub(super) fn document(files: &RunFiles) -> String {
    const GAP: f64 = 30.0;
    let (width, height) = (2.0 * WIDTH + GAP, HEIGHT + GAP);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" color=\"#333\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#333\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let titles = [
        (0.0, "memory of rank 0: highest of each logged row"),
        (WIDTH + GAP, "phases of the last logged rows"),
    ];
    for (x, title) in titles {
        push(
            &mut svg,
            format_args!(
                "<text x=\"{}\" y=\"18\" font-size=\"14\">{title}</text>\n",
                x + LEFT
            ),
        );
    }
    let drawing = by_step(files).drawing();
    push(
        &mut svg,
        format_args!(
            "<g transform=\"translate(0 {})\">\n{drawing}</g>\n",
            GAP - 4.0
        ),
    );
    if let Some(phases) = by_phase(files) {
        let inner = phases.split_once('\n').map_or("", |(_, rest)| rest);
        let inner = inner.trim_end().trim_end_matches("</svg>");
        push(
            &mut svg,
            format_args!(
                "<g transform=\"translate({} {})\">\n{inner}</g>\n",
                WIDTH + GAP,
                GAP - 4.0
            ),
        );
    }
    svg += "</svg>\n";
    svg
}

/// Planned and measured bytes of one kind, each as (device, host tier).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Compared {
    pub(super) name: String,
    pub(super) planned: (u64, u64),
    pub(super) measured: (u64, u64),
}

/// Planned and measured bytes of each part of memory. Empty if the run has no plan. Both are the highest sum of the
/// part's kinds at the peak of a phase: kinds reach their own maxima at different times, so a sum of those exceeds what
/// was ever in use.
pub(super) fn compared(files: &RunFiles) -> Vec<Compared> {
    let Some(plan) = files.plan.as_ref().and_then(|plan| plan.plan.as_ref()) else {
        return Vec::new();
    };
    let phases = || files.memory.iter().flat_map(|row| row.phases.values());
    let most = |kinds: &[&str], pool: fn(&PhasePeak) -> &PoolPeak| -> u64 {
        let of = |peak: &PhasePeak| -> u64 {
            let found = kinds
                .iter()
                .filter_map(|kind| pool(peak).at_peak.get(*kind));
            found.sum()
        };
        phases().map(of).max().unwrap_or(0)
    };
    let row = |planned: &crate::ui::PlanPart| {
        let part = PARTS.iter().find(|part| part.name == planned.name);
        let (device, host) = part.map_or((&[][..], &[][..]), |part| (part.device, part.host));
        Compared {
            name: planned.name.clone(),
            planned: (planned.device_bytes, planned.host_bytes),
            measured: (most(device, |p| &p.device), most(host, |p| &p.host)),
        }
    };
    plan.per_rank.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(pairs: &[(&str, u64)]) -> Kinds {
        pairs
            .iter()
            .map(|(k, b)| ((*k).to_owned(), b << 20))
            .collect()
    }

    fn peak(device: &[(&str, u64)], host: &[(&str, u64)]) -> PhasePeak {
        let pool = |pairs: &[(&str, u64)]| PoolPeak {
            bytes: pairs.iter().map(|p| p.1 << 20).sum(),
            at_peak: kinds(pairs),
            by_kind: kinds(pairs),
        };
        PhasePeak {
            device: pool(device),
            host: pool(host),
            rss: 100 << 20,
        }
    }

    fn row(step: u64, phases: &[(&str, PhasePeak)]) -> MemoryRow {
        MemoryRow {
            step,
            phases: phases
                .iter()
                .map(|(n, p)| ((*n).to_owned(), p.clone()))
                .collect(),
            ranks: Vec::new(),
        }
    }

    fn files() -> RunFiles {
        let load = peak(&[], &[("parameters", 8)]);
        let forward = peak(
            &[("activations", 20), ("gathered", 4)],
            &[("parameters", 8)],
        );
        let backward = peak(
            &[("activations", 30), ("workspace", 9)],
            &[("parameters", 8)],
        );
        RunFiles {
            memory: vec![
                row(1, &[("load", load), ("forward", forward.clone())]),
                row(10, &[("forward", forward), ("backward", backward)]),
            ],
            ..RunFiles::default()
        }
    }

    #[test]
    fn a_memory_row_shows_its_highest_phase() {
        let chart = by_step(&files());
        assert_eq!(chart.at, [1.0, 10.0]);
        let of = |name: &str| {
            let layer = chart.layers.iter().find(|layer| layer.name == name);
            layer.map(|layer| layer.values.clone())
        };
        assert_eq!(of("activations"), Some(vec![20.0, 30.0]));
        assert_eq!(of("gathered"), Some(vec![4.0, 0.0]));
        assert_eq!(of("parameters"), Some(vec![8.0, 8.0]));
        assert_eq!(of("optimizer"), None, "nothing of it was there");
        assert!(chart.lines.is_empty(), "nothing was planned");
        assert_eq!(by_phase(&RunFiles::default()), None);
        assert!(by_step(&RunFiles::default()).is_empty());
    }

    #[test]
    fn parts_are_measured_as_planned_at_the_peak_of_a_phase() {
        let plan = serde_json::json!({"plan": {
            "model": "m", "params": 1, "trainable": 1, "ranks": 1, "device": "cpu", "stage": 3, "precision": "f32",
            "offload": "none", "host_total_bytes": 1, "host_free_bytes": 1, "host_need_bytes": 1,
            "per_rank": [{"name": "activations", "device_bytes": 39 << 20, "host_bytes": 0}],
        }});
        let mut files = files();
        files.plan = Some(serde_json::from_value(plan).expect("a plan"));
        // A larger maximum of one kind at another time than the peak's.
        let forward = files.memory[0].phases.get_mut("forward").expect("measured");
        forward.device.by_kind.insert("workspace".into(), 20 << 20);
        let rows = compared(&files);
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].measured, (39 << 20, 0));
    }

    #[test]
    fn memory_rows_of_one_step_are_one_point() {
        let mut files = files();
        let small = peak(&[("gathered", 1)], &[("parameters", 8)]);
        files.memory.push(row(10, &[("save", small)]));
        assert_eq!(by_step(&files).at, [1.0, 10.0]);
        let large = peak(&[("activations", 90)], &[]);
        files.memory.push(row(10, &[("eval", large)]));
        let chart = by_step(&files);
        assert_eq!(chart.at, [1.0, 10.0]);
        let layer = chart.layers.iter().find(|l| l.name == "activations");
        assert_eq!(layer.map(|l| l.values.clone()), Some(vec![20.0, 90.0]));
    }

    #[test]
    fn phases_are_listed_in_their_order() {
        let files = files();
        let order: Vec<_> = bars(&files.memory)
            .iter()
            .map(|b| (b.step, b.phase))
            .collect();
        let expected = [
            (1, "load"),
            (1, "forward"),
            (10, "forward"),
            (10, "backward"),
        ];
        assert_eq!(order, expected);
        let svg = document(&files);
        assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n"));
        assert_eq!(svg.matches("<svg").count(), svg.matches("</svg>").count());
        assert_eq!(svg.matches("<g ").count(), svg.matches("</g>").count());
        assert!(svg.contains("to step 10") && !svg.contains("NaN"), "{svg}");
    }
}
