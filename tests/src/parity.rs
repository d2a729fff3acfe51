//! Compares one pack with what this project computes: every case, quantity and trajectory.

use crate::golden::{
    Case, Comparison, Pack, compare_inputs, compare_ints, compare_run, compare_trajectory,
};
use crate::tolerance;
use crate::world::{Layout, adapter_after, run_case, run_trajectory};
use anyhow::{Context, Result};
use models::minicpm::config::MiniCpmConfig;
use models::minicpm::config::SlicingConfig;
use models::minicpm::positions::position_buckets;
use models::minicpm::processor::ProcessorConfig;
use models::minicpm::slicing::SlicePlan;
use models::{Processor, open_processor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Comparisons of one case or trajectory, under its title.
pub type Section = (String, Vec<Comparison>);

/// Everything a pack stores.
///
/// # Errors
/// When the pack cannot be read.
pub fn check_pack(dir: &Path) -> Result<Vec<Section>> {
    let pack = Pack::read(dir)?;
    let processor = open_processor(dir)?;
    let mut sections = tables(dir)?;
    for case in &pack.cases {
        sections.push((
            format!("case {}", case.name),
            check_case(&pack, case, &*processor)?,
        ));
    }
    for name in pack.trajectory.runs.keys() {
        let section = check_trajectory(&pack, name, Layout::SINGLE)?;
        sections.push((format!("trajectory {name}"), section));
    }
    Ok(sections)
}

fn check_case(pack: &Pack, case: &Case, processor: &dyn Processor) -> Result<Vec<Comparison>> {
    let samples = case.encode(processor)?;
    let config = MiniCpmConfig::load(&pack.dir)?;
    let normalization = ProcessorConfig::load(&pack.dir, &config)?.normalization;
    let grid_side = config.vision.grid_side;
    let mut all = compare_inputs(case, &samples, &normalization, grid_side)?;
    if !case.is_batch {
        let (ours, theirs) = case.rendered(processor)?;
        let bytes = |text: &str| text.bytes().map(i64::from).collect::<Vec<_>>();
        all.push(compare_ints("prompt.txt", &bytes(&ours), &bytes(&theirs)));
    }
    let run = run_case(pack, &samples, Layout::SINGLE)?;
    all.extend(compare_run(case, &run)?);
    Ok(all)
}

/// One trajectory in one layout.
///
/// # Errors
/// When the pack cannot be read or the run fails.
pub fn check_trajectory(pack: &Pack, name: &str, layout: Layout) -> Result<Vec<Comparison>> {
    let expected = pack.trajectory.runs.get(name).context("no such run")?;
    let (losses, weights) = run_trajectory(pack, name, expected, layout)?;
    let bound = tolerance::trajectory(&pack.model_type);
    let mut all = vec![compare_trajectory("losses", &losses, expected, bound)];
    if let ("lora", Some(after)) = (name, adapter_after(pack)?) {
        for (tensor, stored) in &after.0 {
            all.push(adapter(tensor, weights.get(tensor), stored.floats()?));
        }
    }
    Ok(all)
}

/// Relative L2 distance of a trained adapter tensor.
fn adapter(name: &str, got: Option<&Vec<f32>>, want: &[f32]) -> Comparison {
    let distance = match got {
        Some(got) if got.len() == want.len() => {
            let pairs = got.iter().zip(want);
            let apart: f64 = pairs
                .map(|(g, w)| (f64::from(*g) - f64::from(*w)).powi(2))
                .sum();
            let size: f64 = want.iter().map(|w| f64::from(*w).powi(2)).sum();
            (apart / size).sqrt()
        }
        _ => f64::INFINITY,
    };
    Comparison {
        quantity: format!("adapter_after8 {name}"),
        max_abs_diff: distance,
        tolerance: tolerance::ADAPTER_L2,
        note: Some("relative L2".into()),
    }
}

/// The optional tables of a pack: slice plans and position buckets at real settings.
fn tables(dir: &Path) -> Result<Vec<Section>> {
    let mut all = Vec::new();
    let slicing = dir.join("slicing_448.json");
    if slicing.is_file() {
        let rows: Vec<Value> = serde_json::from_slice(&std::fs::read(&slicing)?)?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for row in &rows {
            slice_row(row, &mut ours, &mut theirs).context("slicing_448.json")?;
        }
        all.push(compare_ints("slicing_448.json", &ours, &theirs));
    }
    let buckets = dir.join("position_buckets_70.safetensors");
    if buckets.is_file() {
        let stored = crate::golden::Expected::read(&buckets)?;
        let want = stored.get("buckets")?.ints()?;
        let ours: Vec<i64> = (1..=280)
            .flat_map(|n| position_buckets(n, 70))
            .map(|b| b as i64)
            .collect();
        all.push(compare_ints("position_buckets_70", &ours, want));
    }
    Ok(if all.is_empty() {
        Vec::new()
    } else {
        vec![("tables".into(), all)]
    })
}

fn slice_row(row: &Value, ours: &mut Vec<i64>, theirs: &mut Vec<i64>) -> Result<()> {
    let number = |v: &Value| v.as_i64().context("not a number");
    let pair = |v: &Value| -> Result<[i64; 2]> {
        if v.is_null() {
            Ok([-1, -1])
        } else {
            Ok([number(&v[0])?, number(&v[1])?])
        }
    };
    let config = SlicingConfig {
        max_slice_nums: number(&row[2])? as usize,
        scale_resolution: 448,
        patch_size: 14,
    };
    let plan = SlicePlan::new(
        number(&row[0])? as usize,
        number(&row[1])? as usize,
        &config,
    );
    let wide = |p: Option<(usize, usize)>| p.map_or([-1, -1], |(a, b)| [a as i64, b as i64]);
    ours.extend(wide(plan.cells.map(|c| (c.cols, c.rows))));
    ours.extend(wide(Some(plan.overview)));
    ours.extend(wide(plan.cells.map(|c| c.refined())));
    ours.push(plan.slices() as i64 * 64);
    theirs.extend(pair(&row[3])?);
    theirs.extend(pair(&row[4])?);
    theirs.extend(pair(&row[5])?);
    theirs.push(number(&row[6])?);
    Ok(())
}

/// Comparisons and failures over all sections.
#[must_use]
pub fn count(sections: &[Section]) -> (usize, usize) {
    let all = sections.iter().flat_map(|(_, c)| c);
    (all.clone().count(), all.filter(|c| !c.ok()).count())
}

/// The largest share of its tolerance that any comparison of a kind used, by kind.
#[must_use]
pub fn margins(sections: &[Section]) -> BTreeMap<String, f64> {
    let mut margins = BTreeMap::new();
    for c in sections
        .iter()
        .flat_map(|(_, c)| c)
        .filter(|c| c.tolerance > 0.0)
    {
        let kind = c
            .quantity
            .split(['.', ' '])
            .next()
            .unwrap_or_default()
            .to_owned();
        let share: &mut f64 = margins.entry(kind).or_default();
        *share = share.max(c.max_abs_diff / c.tolerance);
    }
    margins
}
