//! Golden packs in 16 bits: correct runs stay within the derived tolerances, defective ones do not.
#![allow(clippy::unwrap_used, reason = "a test binary")]

use engine::Precision;
use kernels::DType;
use models::{WeightSource, open_processor};
use std::collections::BTreeMap;
use tests::golden::{CaseRun, Comparison, Pack, packs_of};
use tests::sixteen_bits::{CaseJudge, check_case, check_trajectory};
use tests::world::{Layout, Setup, run_case_with};

const NARROW: [Precision; 3] = [Precision::Bf16, Precision::Fp16, Precision::PureBf16];
/// Name of the first layer's query projection.
const QUERIES: &str = "llm.model.layers.0.self_attn.q_proj";

fn failed(comparisons: &[Comparison]) -> Vec<String> {
    assert!(!comparisons.is_empty(), "nothing was compared");
    let failed = comparisons.iter().filter(|c| !c.ok());
    failed.map(ToString::to_string).collect()
}

#[test]
fn a_case_of_each_model_stays_within_its_tolerances() {
    for dir in Pack::built_in() {
        let (pack, processor) = (Pack::read(&dir).unwrap(), open_processor(&dir).unwrap());
        for precision in [Precision::Bf16, Precision::Fp16] {
            let all = check_case(&pack, &pack.cases[0], &*processor, precision).unwrap();
            let failed = failed(&all);
            assert!(failed.is_empty(), "{}: {failed:#?}", dir.display());
        }
    }
}

#[test]
fn trajectories_stay_within_their_tolerances() {
    let dir = Pack::beside("minicpm-v-2_6");
    let (pack, processor) = (Pack::read(&dir).unwrap(), open_processor(&dir).unwrap());
    let trajectories = packs_of(pack.family).trajectories(&pack, &*processor);
    for trajectory in trajectories.unwrap().iter().take(2) {
        for precision in NARROW {
            let all = check_trajectory(&pack, trajectory, precision).unwrap();
            let failed = failed(&all);
            assert!(
                failed.is_empty(),
                "{} {precision:?}: {failed:#?}",
                trajectory.name
            );
        }
    }
}

/// A case with deliberately defective runs.
struct Seeded<'a> {
    pack: &'a Pack,
    judge: CaseJudge<'a>,
    layout: Layout,
    weights: WeightSource,
}

impl<'a> Seeded<'a> {
    fn new(pack: &'a Pack, precision: Precision) -> Self {
        let processor = open_processor(&pack.dir).unwrap();
        let case = pack.case("wide_two_turns").unwrap();
        Self {
            pack,
            judge: CaseJudge::new(pack, case, &*processor, precision).unwrap(),
            layout: Layout::SINGLE.in_precision(precision),
            weights: WeightSource::open(&pack.dir).unwrap(),
        }
    }

    /// Runs the case with the weights that `change` returns.
    fn run(&self, change: impl Fn(&str, &[f32]) -> Option<Vec<f32>>) -> CaseRun {
        let start = self.weights.names().filter_map(|name| {
            let bytes = self.weights.read(name, DType::F32).unwrap();
            let stored: Vec<f32> = bytemuck::pod_collect_to_vec(&bytes);
            Some((name.to_owned(), change(name, &stored)?))
        });
        let start: BTreeMap<String, Vec<f32>> = start.collect();
        let setup = Setup {
            start: &start,
            ..Setup::full()
        };
        run_case_with(self.pack, &self.judge.samples, self.layout, &setup).unwrap()
    }

    fn failures(&self, run: &CaseRun) -> usize {
        failed(&self.judge.beside_stored(run).unwrap()).len()
    }
}

/// `values` rounded to `bits` significant bits fewer than the precision has.
fn coarser(precision: Precision, bits: i32, values: &[f32]) -> Vec<f32> {
    let kept = match precision {
        Precision::Fp16 => 11,
        _ => 8,
    } - bits;
    let coarse = |value: &f32| {
        let unit = 2f32.powi(value.abs().max(f32::MIN_POSITIVE).log2().floor() as i32 + 1 - kept);
        (value / unit).round() * unit
    };
    values.iter().map(coarse).collect()
}

/// Query weights or biases as if one position later: each pair of rows rotated by its angle.
fn one_further(values: &[f32], width: usize) -> Vec<f32> {
    const HEAD_DIM: usize = 32;
    const THETA: f32 = 1e6;
    let mut turned = values.to_vec();
    for (at, value) in values.iter().enumerate() {
        let row = at / width % HEAD_DIM;
        let half = HEAD_DIM / 2;
        let (sin, cos) = THETA.powf(-((row % half) as f32) / half as f32).sin_cos();
        turned[at] = match row < half {
            true => cos * value - sin * values[at + half * width],
            false => cos * value + sin * values[at - half * width],
        };
    }
    turned
}

#[test]
fn defects_exceed_the_tolerances() {
    let pack = Pack::read(&Pack::beside("minicpm-v-2_6")).unwrap();
    for precision in NARROW {
        let seeded = Seeded::new(&pack, precision);
        let mut right = seeded.run(|_, _| None);
        assert_eq!(seeded.failures(&right), 0, "{precision:?}");
        for grad in right.grads.values_mut().flatten() {
            *grad *= 1.05;
        }
        let defects = [
            ("gradients times 1.05", right),
            (
                "a layer without its MLP",
                seeded.run(|name, values| {
                    let dropped = name == "llm.model.layers.0.mlp.down_proj.weight";
                    dropped.then(|| vec![0.0; values.len()])
                }),
            ),
            (
                "queries one position further on than keys",
                seeded.run(|name, values| match name.strip_prefix(QUERIES)? {
                    ".weight" => Some(one_further(values, 128)),
                    _ => Some(one_further(values, 1)),
                }),
            ),
            (
                "the first weight rounded to four bits fewer",
                seeded.run(|name, values| {
                    let first = name == "vpm.embeddings.patch_embedding.weight";
                    first.then(|| coarser(precision, 4, values))
                }),
            ),
            (
                "all weights rounded to four bits fewer",
                seeded.run(|_, values| Some(coarser(precision, 4, values))),
            ),
        ];
        for (what, run) in defects {
            assert!(seeded.failures(&run) > 0, "{precision:?}: {what}");
        }
    }
}
