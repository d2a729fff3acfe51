//! Comparison of one pack with this project: every case, quantity and trajectory.

use crate::golden::{Case, Comparison, Pack, Section, Trajectory, compare_floats, packs_of};
use crate::tolerance;
use crate::world::{Layout, Setup, Travelled, run_case_with, run_trajectory};
use anyhow::Result;
use models::{Processor, open_processor};
use std::collections::BTreeMap;
use std::path::Path;

/// Compares every stored quantity of a pack.
///
/// # Errors
/// When the pack cannot be read.
pub fn check_pack(dir: &Path) -> Result<Vec<Section>> {
    let pack = Pack::read(dir)?;
    let processor = open_processor(dir)?;
    let family = packs_of(pack.family);
    let mut sections = family.tables(&pack, &*processor)?;
    for case in &pack.cases {
        sections.push((
            format!("case {}", case.name),
            check_case(&pack, case, &*processor)?,
        ));
    }
    for trajectory in family.trajectories(&pack, &*processor)? {
        let section = check_trajectory(&pack, &trajectory, Layout::SINGLE)?;
        sections.push((format!("trajectory {}", trajectory.name), section));
    }
    Ok(sections)
}

fn check_case(pack: &Pack, case: &Case, processor: &dyn Processor) -> Result<Vec<Comparison>> {
    let family = packs_of(pack.family);
    let samples = family.samples(pack, case, processor)?;
    let mut all = family.compare_inputs(pack, case, processor, &samples)?;
    // Without stored gradients, a large model needs no memory for those of all weights.
    let stores_gradients = case.expected.0.keys().any(|name| name.starts_with("grad"));
    let setup = match stores_gradients {
        true => Setup::full(),
        false => Setup::norms()?,
    };
    let run = run_case_with(pack, &samples, Layout::SINGLE, &setup)?;
    all.extend(family.compare_run(case, &samples, &run)?);
    Ok(all)
}

/// Runs and compares one trajectory in one layout.
///
/// # Errors
/// When the run fails.
pub fn check_trajectory(
    pack: &Pack,
    expected: &Trajectory,
    layout: Layout,
) -> Result<Vec<Comparison>> {
    Ok(compare_trajectory(
        expected,
        &run_trajectory(pack, expected, layout)?,
    ))
}

/// Compares a trajectory with a run of it.
#[must_use]
pub fn compare_trajectory(expected: &Trajectory, run: &Travelled) -> Vec<Comparison> {
    let narrow = |values: &[f64]| values.iter().map(|v| *v as f32).collect::<Vec<f32>>();
    let losses = (narrow(&run.losses), narrow(&expected.losses));
    let mut all = vec![compare_floats(
        "losses",
        &losses.0,
        &losses.1,
        expected.tolerance,
    )];
    if !expected.grad_norms.is_empty() {
        let (got, want) = (narrow(&run.grad_norms), narrow(&expected.grad_norms));
        let largest = expected.grad_norms.iter().fold(0.0f64, |m, n| m.max(*n));
        let bound = tolerance::GRAD_NORM * largest * expected.growth;
        all.push(compare_floats("grad_norms", &got, &want, bound));
    }
    for (tensor, want) in &expected.after {
        all.push(adapter(tensor, run.weights.get(tensor), want));
    }
    for (tensor, want) in &expected.norms_after {
        let length = |values: &Vec<f32>| {
            let square: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
            square.sqrt() as f32
        };
        let got: Vec<f32> = run.weights.get(tensor).map(length).into_iter().collect();
        let bound = tolerance::ADAPTER_L2 * f64::from(*want);
        all.push(compare_floats(
            &format!("after {tensor}"),
            &got,
            &[*want],
            bound,
        ));
    }
    all
}

/// Compares a trained adapter tensor by relative L2 distance.
fn adapter(name: &str, got: Option<&Vec<f32>>, want: &[f32]) -> Comparison {
    let distance = match got {
        Some(got) if got.len() == want.len() => {
            let pairs = got.iter().zip(want);
            let apart: f64 = pairs
                .map(|(g, w)| (f64::from(*g) - f64::from(*w)).powi(2))
                .sum();
            let size: f64 = want.iter().map(|w| f64::from(*w).powi(2)).sum();
            // A tensor without influence on the loss stays zero: the last layer's output for image rows, which nothing
            // reads.
            if size > 0.0 { apart / size } else { apart }.sqrt()
        }
        _ => f64::INFINITY,
    };
    Comparison {
        quantity: format!("after {name}"),
        max_abs_diff: distance,
        tolerance: tolerance::ADAPTER_L2,
        note: Some("relative L2".into()),
    }
}

/// Number of comparisons and of failures over all sections.
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
