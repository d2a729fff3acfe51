//! Comparison of 16-bit runs with golden packs, and of a device's 16-bit runs with those of the CPU.
//!
//! Tolerances are not constants but follow from the pack. They are the change of its quantities in f32 when its weights
//! are perturbed by as much as all roundings together. [`tolerance`] derives the perturbation.

use crate::drift;
use crate::golden::{
    Case, CaseRun, Comparison, Pack, Section, Trajectory, compare_floats, largest_gradient,
    packs_of, quantized,
};
use crate::parity::compare_trajectory;
use crate::tolerance::{self, Roundings, Shake};
use crate::world::{Layout, Setup, Travelled, on_a_device, roundings, run_case, run_trajectory};
use anyhow::{Context, Result, anyhow};
use engine::Precision;
use kernels::{CpuMath, DType};
use models::data::EncodedSample;
use models::{Processor, open_processor};
use std::path::Path;

/// Compares every stored result of a pack's model. Inputs and tables are the same in every precision.
///
/// # Errors
/// When the pack cannot be read or the engine fails.
pub fn check_pack(dir: &Path, precision: Precision) -> Result<Vec<Section>> {
    let pack = Pack::read(dir)?;
    let processor = open_processor(dir)?;
    let mut sections = Vec::new();
    for case in &pack.cases {
        let section = check_case(&pack, case, &*processor, precision)?;
        sections.push((
            format!("case {} in {}", case.name, precision.name()),
            section,
        ));
    }
    let trajectories = match quantized::is_quantized(&pack) {
        true => quantized::trajectories(&pack, &*processor)?,
        false => packs_of(pack.family).trajectories(&pack, &*processor)?,
    };
    for trajectory in trajectories {
        let section = check_trajectory(&pack, &trajectory, precision)?;
        let name = &trajectory.name;
        sections.push((
            format!("trajectory {name} in {}", precision.name()),
            section,
        ));
    }
    Ok(sections)
}

/// Compares one case with the pack, on the CPU with both orders of sums. On a device it is also compared with the CPU.
///
/// # Errors
/// When a file is missing or the engine fails.
pub fn check_case(
    pack: &Pack,
    case: &Case,
    processor: &dyn Processor,
    precision: Precision,
) -> Result<Vec<Comparison>> {
    let judge = CaseJudge::new(pack, case, processor, precision)?;
    let layout = Layout::SINGLE.in_precision(precision);
    let run = run_case(pack, &judge.samples, layout)?;
    let mut all = judge.beside_stored(&run)?;
    if let Some(layout) = other_sums(layout) {
        let run = run_case(pack, &judge.samples, layout)?;
        all.extend(judge.beside_stored(&run)?);
    }
    if on_a_device() {
        let cpu = run_case(pack, &judge.samples, layout.on_cpu())?;
        all.extend(judge.beside_other(&run, &cpu)?);
    }
    Ok(all)
}

/// The layout with the sums of AMX, where it computes products of bf16 on the CPU.
fn other_sums(layout: Layout) -> Option<Layout> {
    let on_cpu = layout.precision.weight_dtype() == DType::BF16 && !on_a_device();
    on_cpu.then(|| layout.with_math(CpuMath::Amx))
}

/// f32 runs that give the tolerances of a 16-bit run.
#[derive(Debug)]
struct Draws<R> {
    precision: Precision,
    rounded: Roundings,
    updates: usize,
    /// The run with the stored weights.
    exact: R,
    /// The runs with perturbed weights.
    moved: Vec<R>,
}

impl<R> Draws<R> {
    fn new(
        layout: Layout,
        rounded: Roundings,
        updates: usize,
        run: impl Fn(Layout) -> Result<R> + Sync,
    ) -> Result<Self>
    where
        R: Send,
    {
        let precision = layout.precision;
        let exact = layout.in_precision(Precision::F32).on_cpu();
        let most = rounded.shake(precision, updates);
        let layouts = Shake::all(most).map(|shake| exact.shaken(shake));
        let mut runs = std::thread::scope(|scope| {
            let run = &run;
            let threads = layouts.chain([exact]).map(|l| scope.spawn(move || run(l)));
            let threads: Vec<_> = threads.collect();
            let runs = threads.into_iter().map(|thread| thread.join());
            let runs = runs.map(|run| run.map_err(|_| anyhow!("a run panicked"))?);
            runs.collect::<Result<Vec<R>>>()
        })?;
        let exact = runs.pop().context("the run that nothing moves")?;
        Ok(Self {
            precision,
            rounded,
            updates,
            exact,
            moved: runs,
        })
    }

    /// Compares a run with the stored values, with tolerances from the draws.
    fn beside_stored(
        &self,
        run: &R,
        compare: impl Fn(&R) -> Result<Vec<Comparison>>,
        noise: impl Fn(&str) -> f64,
    ) -> Result<Vec<Comparison>> {
        let moved = self
            .moved
            .iter()
            .map(&compare)
            .collect::<Result<Vec<_>>>()?;
        Ok(covered(compare(run)?, &moved, 1.0, noise))
    }

    /// Compares the runs of two devices, with tolerances from the draws.
    fn beside_other(
        &self,
        [run, other]: [&R; 2],
        compare: impl Fn(&R, &R) -> Result<Vec<Comparison>>,
        noise: impl Fn(&str) -> f64,
    ) -> Result<Vec<Comparison>> {
        let moved = self.moved.iter().map(|run| compare(run, &self.exact));
        let moved = moved.collect::<Result<Vec<_>>>()?;
        let times = self.rounded.between_devices(self.precision, self.updates);
        let mut all = covered(compare(run, other)?, &moved, times, noise);
        for comparison in &mut all {
            comparison.quantity.insert_str(0, "cpu ");
        }
        Ok(all)
    }
}

/// Gives each comparison the tolerance that follows from the perturbed runs.
fn covered(
    mut compared: Vec<Comparison>,
    moved: &[Vec<Comparison>],
    times: f64,
    noise: impl Fn(&str) -> f64,
) -> Vec<Comparison> {
    for (at, comparison) in compared.iter_mut().enumerate() {
        let distances = moved.iter().map(|all| all[at].max_abs_diff);
        comparison.tolerance = times * tolerance::covering(distances) + noise(&comparison.quantity);
    }
    compared
}

/// Judge of runs of one case in one precision.
pub struct CaseJudge<'a> {
    pack: &'a Pack,
    case: &'a Case,
    /// The samples of the case.
    pub samples: Vec<EncodedSample>,
    draws: Draws<CaseRun>,
}

impl std::fmt::Debug for CaseJudge<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CaseJudge").finish_non_exhaustive()
    }
}

impl<'a> CaseJudge<'a> {
    /// Runs the draws.
    ///
    /// # Errors
    /// When a file is missing or the engine fails.
    pub fn new(
        pack: &'a Pack,
        case: &'a Case,
        processor: &dyn Processor,
        precision: Precision,
    ) -> Result<Self> {
        let samples = packs_of(pack.family).samples(pack, case, processor)?;
        let rounded = roundings(pack, &samples, &Setup::full())?;
        let layout = Layout::SINGLE.in_precision(precision);
        let draws = Draws::new(layout, rounded, 0, |l| run_case(pack, &samples, l))?;
        Ok(Self {
            pack,
            case,
            samples,
            draws,
        })
    }

    /// Compares a run with the stored values of the case.
    ///
    /// # Errors
    /// When a stored tensor has the wrong kind.
    pub fn beside_stored(&self, run: &CaseRun) -> Result<Vec<Comparison>> {
        let family = packs_of(self.pack.family);
        let compare = |run: &CaseRun| family.compare_run(self.case, &self.samples, run);
        self.draws.beside_stored(run, compare, self.noise(run))
    }

    /// Compares every observed value of a run with that of another device. Both runs have this judge's precision.
    ///
    /// # Errors
    /// When two runs cannot be compared.
    pub fn beside_other(&self, run: &CaseRun, other: &CaseRun) -> Result<Vec<Comparison>> {
        let compare = |run: &CaseRun, other: &CaseRun| Ok(compare_runs(run, other));
        self.draws
            .beside_other([run, other], compare, self.noise(run))
    }

    fn noise<'r>(&self, run: &'r CaseRun) -> impl Fn(&str) -> f64 + 'r {
        let dtype = self.draws.precision.weight_dtype();
        let entry = tolerance::cancelled_gradient(dtype, largest_gradient(run));
        move |quantity| match quantity.split_once('.') {
            Some(("gradnorm", param)) => {
                let elems = run.grads.get(param).map_or(0, Vec::len);
                entry * (elems as f64).sqrt()
            }
            Some(("grad" | "gradsub", _)) => entry,
            _ => 0.0,
        }
    }
}

/// Compares two runs of a case. The caller sets the tolerances.
fn compare_runs(got: &CaseRun, want: &CaseRun) -> Vec<Comparison> {
    let value = |name: &str, got: Option<&Vec<f32>>, want: &[f32]| match got {
        Some(got) => compare_floats(name, got, want, 0.0),
        None => Comparison::failed(name, "not computed"),
    };
    let taps = want
        .taps
        .iter()
        .map(|(name, want)| value(name, got.taps.get(name), want));
    let logits = want.logits.iter();
    let logits = logits.map(|want| value("logits", got.logits.as_ref(), want));
    let grads = want
        .grads
        .iter()
        .map(|(param, want)| value(&format!("grad.{param}"), got.grads.get(param), want));
    let mean = |run: &CaseRun| Vec::from_iter(run.loss.map(|loss| loss as f32));
    let loss = value("loss", Some(&mean(got)), &mean(want));
    taps.chain(logits).chain(grads).chain([loss]).collect()
}

/// Compares one trajectory with the pack, on the CPU with both orders of sums. On a device it is also compared with the
/// CPU.
///
/// # Errors
/// When a file is missing or the engine fails.
pub fn check_trajectory(
    pack: &Pack,
    expected: &Trajectory,
    precision: Precision,
) -> Result<Vec<Comparison>> {
    let updates = expected.losses.len() - 1;
    let layout = Layout::SINGLE.in_precision(precision);
    let rounded = roundings(pack, &expected.micro_batches[0], &expected.into())?;
    let run = |layout| run_trajectory(pack, expected, layout);
    let draws = Draws::new(layout, rounded, updates, run)?;
    let got = run(layout)?;
    let walk = tolerance::cancelled_walk(expected.optimizer.lr, updates);
    let noise = |quantity: &str| match quantity.strip_prefix("after ") {
        Some(param) if keys_bias(param) && expected.norms_after.contains_key(param) => walk,
        _ => 0.0,
    };
    let compare = |run: &Travelled| Ok(compare_trajectory(expected, run));
    let mut all = draws.beside_stored(&got, compare, noise)?;
    if let Some(layout) = other_sums(layout) {
        all.extend(draws.beside_stored(&run(layout)?, compare, noise)?);
    }
    if on_a_device() {
        let cpu = run(layout.on_cpu())?;
        let compare = |run: &Travelled, other: &Travelled| Ok(compare_travelled(run, other));
        all.extend(draws.beside_other([&got, &cpu], compare, |_| 0.0)?);
    }
    Ok(all)
}

/// Whether a bias includes that of the keys.
fn keys_bias(param: &str) -> bool {
    param.ends_with("query_key_value.bias")
}

/// Compares two runs of a trajectory. The caller sets the tolerances.
fn compare_travelled(got: &Travelled, want: &Travelled) -> Vec<Comparison> {
    let narrow = |values: &[f64]| values.iter().map(|v| *v as f32).collect::<Vec<f32>>();
    let numbers = |name: &str, got: &[f64], want: &[f64]| {
        compare_floats(name, &narrow(got), &narrow(want), 0.0)
    };
    vec![
        numbers("losses", &got.losses, &want.losses),
        numbers("grad_norms", &got.grad_norms, &want.grad_norms),
    ]
}

/// Compares the trajectory of 200 steps. On a device it is also compared with the CPU.
///
/// # Errors
/// When a file is missing or the engine fails.
pub fn check_drift(precision: Precision) -> Result<Vec<Comparison>> {
    let layout = drift::LAYOUT.in_precision(precision);
    let rounded = drift::roundings()?;
    let draws = Draws::new(layout, rounded, drift::STEPS as usize, drift::run)?;
    let got = drift::run(layout)?;
    let compare = |run: &drift::Trajectory| Ok(vec![drift::compare(run, 0.0)?]);
    let mut all = draws.beside_stored(&got, compare, |_| 0.0)?;
    if on_a_device() {
        let cpu = drift::run(layout.on_cpu())?;
        let compare = |run: &_, other: &_| Ok(vec![drift::compare_runs(run, other, 0.0)?]);
        all.extend(draws.beside_other([&got, &cpu], compare, |_| 0.0)?);
    }
    Ok(all)
}
