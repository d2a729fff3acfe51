//! Memory of micro-batches other than the planned one. None may exceed an arena of the planned size, whatever ran
//! before it.

use super::headline::{Case, cases};
use super::planner::made_up_sample;
use crate::device::counting_of;
use crate::model::optimizer::rule;
use crate::model::setup::shapes;
use crate::plan::Settled;
use crate::plan::dry_run::micro_batch;
use crate::plan::memory_plans::{MemoryPlans, margin};
use engine::DryRun;
use kernels::PoolStats;
use kernels::cuda::CudaBackend;
use models::data::EncodedSample;
use models::{VisionLanguageModel, largest_sample};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use std::sync::Arc;

/// Number of micro-batches that run one after the other in each case.
const BATCHES: usize = 4;

/// Sample relative to the largest one: percent of its tokens, slices, whether it has an image, whether half of its
/// tokens are not supervised.
type Smaller = (usize, usize, bool, bool);

fn smaller() -> impl Strategy<Value = Smaller> {
    let tokens = prop_oneof![80usize..=100, 1usize..=100];
    (
        tokens,
        1usize..=10,
        prop::bool::weighted(0.7),
        any::<bool>(),
    )
}

struct Arena {
    planned: Settled,
    model: Arc<dyn VisionLanguageModel>,
    /// Dry run of a rank with exactly the planned memory.
    dry_run: DryRun,
    memory_plans: MemoryPlans,
}

impl Arena {
    fn new(case: &Case, directory: &std::path::Path) -> Self {
        let (planner, config) = case.planner(directory);
        let planned = planner.plan(&config).expect("a plan");
        let (config, plan) = (&planned.run, &planned.plan);
        let (model, _) = shapes(config).expect("shapes");
        let gpu = &config.gpus[0];
        let bytes = planned.memory.peak.device;
        let device = CudaBackend::counting_within(gpu.kind(), bytes);
        let rule = Arc::new(rule(config));
        let dry_run = DryRun::on_discrete_device(plan.clone(), rule, Arc::new(device));
        let counting = counting_of(gpu).expect("CUDA");
        let memory_plans = MemoryPlans::new(config, plan, counting);
        Self {
            dry_run: dry_run.expect("room for the states"),
            memory_plans: memory_plans.expect("counts"),
            model,
            planned,
        }
    }

    fn sample(&self, (tokens, slices, image, masked): Smaller) -> EncodedSample {
        let (config, batch) = (&self.planned.run, &self.planned.run.batch);
        let tokens = (batch.model_max_length * tokens / 100).max(8);
        let slices = slices.min(batch.max_slice_nums);
        let mut sample =
            largest_sample(&config.model_dir(), tokens, slices, None).expect("a sample");
        if !image {
            sample.image_bounds.clear();
            sample.slices.clear();
        }
        // Every slice needs image positions among the tokens. CogAgent has two slices for each.
        let most = made_up_sample(config, None).expect("a sample");
        let each = most.slices.len() / most.image_bounds.len().max(1);
        sample
            .slices
            .truncate(each.max(1) * sample.image_bounds.len());
        if masked {
            sample.labels[..tokens / 2].fill(-100);
        }
        sample
    }

    /// Runs a micro-batch at the offsets of its memory plan.
    fn run(&mut self, samples: &[EncodedSample]) -> Result<PoolStats, String> {
        let config = &self.planned.run;
        let memory_plan = self.memory_plans.of(config, &*self.model, samples);
        let memory_plan = memory_plan.map_err(|e| e.to_string())?;
        let pool = self.dry_run.device_pool();
        let follow = &mut || pool.follow(Some(memory_plan.clone()));
        micro_batch(
            config,
            &*self.model,
            &self.dry_run,
            samples,
            follow,
            &mut || (),
        )
        .map_err(|e| {
            format!(
                "{e}: a memory plan of {} for {}",
                memory_plan.bytes(),
                pool.stats().touched
            )
        })?;
        pool.follow(None);
        self.dry_run.take_step().map_err(|e| e.to_string())?;
        Ok(self.dry_run.device_pool().stats())
    }
}

#[test]
fn no_batch_exceeds_the_planned_memory_1_of_2() {
    no_batch_exceeds_the_planned_memory(0);
}

#[test]
fn no_batch_exceeds_the_planned_memory_2_of_2() {
    no_batch_exceeds_the_planned_memory(1);
}

/// Checks every other case, so that two tests run in parallel. A case with the plan of an earlier one is left out.
fn no_batch_exceeds_the_planned_memory(part: usize) {
    let temp = tempfile::tempdir().expect("temp dir");
    let mut cases = cases();
    cases.dedup_by(|case, before| case.plans_as(before));
    for case in cases.iter().skip(part).step_by(2) {
        let mut arena = Arena::new(case, temp.path());
        let config = &arena.planned.run;
        let sample = made_up_sample(config, None).expect("a sample");
        let most = vec![sample; config.batch.micro_batch];
        is_little_larger_than_its_live_bytes(case, &mut arena, &most);
        let before = arena.run(&most).expect("the largest batch fits");
        let arena = std::cell::RefCell::new(arena);
        let batch = prop::collection::vec(smaller(), 1..=most.len());
        let order = prop::collection::vec(batch, BATCHES);
        let config = Config {
            cases: 1,
            failure_persistence: None,
            ..Config::default()
        };
        let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let mut runner = TestRunner::new_with_rng(config, rng);
        let ran = runner.run(&order, |order| {
            let mut arena = arena.borrow_mut();
            for batch in &order {
                let samples: Vec<_> = batch.iter().map(|of| arena.sample(*of)).collect();
                let stats = arena.run(&samples);
                let stats = stats.map_err(|e| TestCaseError::fail(format!("{batch:?}: {e}")))?;
                prop_assert_eq!(stats.strays, 0, "{:?}", batch);
                // After a step, only the resident states are in use.
                prop_assert_eq!(stats.in_use, before.in_use, "{:?}", batch);
            }
            Ok(())
        });
        if let Err(error) = ran {
            panic!("{}: {error}", case.name);
        }
    }
}

/// For a device of any size, the plan is little larger than the blocks alive at one time.
fn is_little_larger_than_its_live_bytes(case: &Case, arena: &mut Arena, most: &[EncodedSample]) {
    let config = &arena.planned.run;
    let memory_plan = arena.memory_plans.of(config, &*arena.model, most);
    let memory_plan = memory_plan.expect("a memory plan");
    let rests = arena.dry_run.device_pool().stats().in_use;
    let live = rests + memory_plan.live_bytes();
    let bytes = rests + memory_plan.bytes();
    let planned = arena.planned.memory.peak.device;
    assert!(bytes * 100 <= live * 103, "{}: {bytes} {live}", case.name);
    let needed = bytes + margin(&memory_plan);
    assert!(planned >= needed, "{}: {planned}", case.name);
}

/// An update of smaller micro-batches on a pipeline stage takes at most the margin more than one of the largest.
#[test]
fn no_update_of_a_stage_exceeds_the_planned_memory() {
    let temp = tempfile::tempdir().expect("temp dir");
    let (stages, micro_batches) = (2, 4);
    let case = cases().into_iter().find(|case| case.name == "glm-4v-lora");
    let case = case.expect("the case").in_stages(stages, micro_batches);
    let arena = Arena::new(&case, temp.path());
    let (config, model) = (&arena.planned.run, &*arena.model);
    let most = [made_up_sample(config, None).expect("a sample")];
    let order = prop::collection::vec(smaller(), micro_batches);
    for stage in 0..stages {
        let plan = Arc::new(arena.planned.plan.at_stage(stage).expect("a stage"));
        let counting = counting_of(&config.gpus[0]).expect("CUDA");
        let memory_plans = MemoryPlans::new(config, &plan, counting.clone());
        let mut memory_plans = memory_plans.expect("counts");
        let states = counting.pool().stats().touched;
        let largest = vec![&most[..]; micro_batches];
        let largest = memory_plans.of_stage(config, model, &largest);
        let largest = largest.expect("a memory plan");
        let limit = largest.bytes() + margin(&largest);
        // The device of a later stage has the states of the earlier ones, too.
        assert!(stage > 0 || arena.planned.memory.peak.device >= states + largest.bytes());
        let memory_plans = std::cell::RefCell::new(memory_plans);
        let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let config_of_test = Config {
            cases: 6,
            failure_persistence: None,
            ..Config::default()
        };
        let ran = TestRunner::new_with_rng(config_of_test, rng).run(&order, |order| {
            let samples: Vec<_> = order.iter().map(|of| [arena.sample(*of)]).collect();
            let samples: Vec<_> = samples.iter().map(|sample| &sample[..]).collect();
            let memory_plan = memory_plans
                .borrow_mut()
                .of_stage(config, model, &samples)
                .map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert!(
                memory_plan.bytes() <= limit,
                "stage {}: {} of {}",
                stage,
                memory_plan.bytes(),
                limit
            );
            Ok(())
        });
        if let Err(error) = ran {
            panic!("{error}");
        }
    }
}

/// The memory of a batch depends on its shape, not on what ran before it.
#[test]
fn offsets_do_not_depend_on_earlier_batches() {
    let temp = tempfile::tempdir().expect("temp dir");
    let cases = cases();
    let case = cases.iter().find(|case| case.name == "minicpm-v-lora");
    let case = case.expect("the case");
    let of = |order: &[Smaller]| {
        let mut arena = Arena::new(case, temp.path());
        let mut last = None;
        for of in order {
            let sample = [arena.sample(*of)];
            arena.run(&sample).expect("fits");
            let config = &arena.planned.run;
            last = arena.memory_plans.of(config, &*arena.model, &sample).ok();
        }
        last.expect("a memory plan")
    };
    let short = (40, 2, true, false);
    let alone = of(&[short]);
    let behind = of(&[(100, 9, true, false), (70, 1, false, true), short]);
    assert!(alone.blocks() > 1000);
    assert_eq!(alone, behind);
}
