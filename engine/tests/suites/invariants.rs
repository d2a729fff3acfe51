//! Invariants of the sharded engine on worlds of threads (I1, I2, I5, I6, I7, I8).

use crate::toy;
use crate::toy::{
    Case, distance, engine_for, load_initial, micro_batch, run_world, train, weight_bits,
};
use engine::access::LeaseOwner;
use engine::{EngineError, Offload, ParamAccess, PassKind, Phase, Precision, Tier, UnitId};
use kernels::{Codebook, Quantization, Shape};
use std::time::{Duration, Instant};

/// Relative L2 of f32 weights after six Adam steps when the summation order differs between world
/// sizes: each gradient differs by a few units in the last place (2^-24 each), Adam's first steps
/// have unit size, so the relative change of a weight is of the order steps * lr * 2^-20.
const ACROSS_WORLDS: f64 = 1e-6;

const fn offload(param: Tier, optimizer: Tier) -> Offload {
    Offload {
        param,
        optimizer,
        activation: Tier::Device,
    }
}

const OFFLOADS: [Offload; 6] = [
    Offload::states(Tier::Device),
    offload(Tier::Device, Tier::Host),
    offload(Tier::Host, Tier::Device),
    Offload::CPU,
    offload(Tier::Host, Tier::Nvme),
    Offload::states(Tier::Nvme),
];

#[test]
fn weights_are_bit_identical_across_stages_and_tiers() {
    for precision in [Precision::F32, Precision::Bf16, Precision::PureBf16] {
        for world in 1..=4 {
            let (reference, losses) = train(&Case::new(world, 0).precision(precision));
            assert!(
                losses[5] < losses[0],
                "{precision:?}: the toy learns: {losses:?}"
            );
            for stage in 0..=3 {
                for offload in OFFLOADS {
                    let case = Case::new(world, stage)
                        .precision(precision)
                        .offload(offload);
                    let (weights, case_losses) = train(&case);
                    assert_eq!(
                        weights, reference,
                        "world {world} stage {stage} {offload:?}"
                    );
                    assert_eq!(case_losses, losses);
                }
            }
        }
    }
}

/// Frozen units whose matrices are quantized, in every precision, stage and tier, have the bits of frozen units with the
/// values that the quantized ones stand for. The ranks share them where the tier allows.
#[test]
fn quantized_weights_train_as_the_values_that_they_stand_for() {
    let shape = Shape::new(&[toy::WIDTH, toy::WIDTH]);
    let quantizations = [
        Quantization::four_bit(Codebook::Nf4, true),
        Quantization::four_bit(Codebook::Fp4, false),
        Quantization::Int8,
    ];
    let precisions = [
        Precision::F32,
        Precision::Bf16,
        Precision::Fp16,
        Precision::PureBf16,
    ];
    let run = |case: &Case, quantization: Quantization| {
        let mut results = run_world(case.world, |comm| {
            let mut zero = engine_for(case, comm).unwrap();
            zero.load(|id, range, out| {
                let whole: Vec<f32> = (0..shape.elems()).map(|i| toy::initial(id, i)).collect();
                let mut values = whole.clone();
                let unit = id.index() / 2;
                if id.index() % 2 == 0
                    && case.frozen_units.contains(&unit)
                    && case.quantization.is_none()
                {
                    let mut bytes = vec![0; quantization.bytes(shape)];
                    quantization.quantize(&whole, shape, &mut bytes);
                    quantization.dequantize(&bytes, shape, &mut values);
                }
                out.copy_from_slice(&values[range]);
                Ok::<_, std::io::Error>(())
            })
            .unwrap();
            let steps = (0..case.steps).map(|s| toy::train_step(case, &mut zero, s).unwrap().loss);
            let losses: Vec<f64> = steps.collect();
            let mut weights = Vec::new();
            zero.visit_weights(|id, w| {
                let bits = w.to_f32_vec()?.into_iter().map(f32::to_bits);
                weights.push((id, bits.collect::<Vec<u32>>()));
                Ok::<_, EngineError>(())
            })
            .unwrap();
            weights.sort();
            (weights, losses)
        });
        results.remove(0)
    };
    for (precision, quantization) in precisions
        .into_iter()
        .zip(quantizations.into_iter().cycle())
    {
        for world in [1, 3] {
            let mut plain = Case::new(world, 0).precision(precision);
            (plain.frozen_units, plain.steps) = (vec![0, 1, 3], 2);
            let reference = run(&plain, quantization);
            for stage in 0..=3 {
                for offload in OFFLOADS {
                    let mut case = Case::new(world, stage).precision(precision);
                    (case.frozen_units, case.steps) = (vec![0, 1, 3], 2);
                    case = case.offload(offload);
                    case.quantization = Some(quantization);
                    case.config.shares_host_memory = true;
                    let name = format!(
                        "{quantization} {precision:?} world {world} stage {stage} {offload:?}"
                    );
                    assert_eq!(run(&case, quantization), reference, "{name}");
                }
            }
        }
    }
}

/// Sums run over all ranks in rank order, whoever holds the shards.
#[test]
fn shard_groups_have_the_bits_of_one_group() {
    for precision in [Precision::F32, Precision::Bf16, Precision::PureBf16] {
        for stage in 1..=3 {
            let flat = Case::new(4, stage).precision(precision);
            let (reference, losses) = train(&flat);
            for group in [1, 2, 4] {
                for offload in OFFLOADS {
                    let mut case = flat.clone().offload(offload);
                    case.config.shard_group = Some(group);
                    let (weights, case_losses) = train(&case);
                    let what = format!("stage {stage} groups of {group} {offload:?}");
                    assert_eq!(weights, reference, "{what}");
                    assert_eq!(case_losses, losses, "{what}");
                }
            }
        }
    }
}

/// The norm adds up shards in another order: its last bits, and no more.
#[test]
fn clipped_steps_in_shard_groups_follow_one_group() {
    let clipped = |group, accumulation| {
        let mut case = Case::new(4, 3);
        case.config.max_grad_norm = Some(0.01);
        case.config.shard_group = group;
        case.accumulation = accumulation;
        train(&case).0
    };
    for accumulation in [1, 2] {
        let flat = clipped(None, accumulation);
        for group in [1, 2] {
            assert!(distance(&clipped(Some(group), accumulation), &flat) < ACROSS_WORLDS);
        }
    }
}

#[test]
fn weights_are_bit_identical_across_prefetch_buckets_and_sub_groups() {
    let (reference, _) = train(&Case::new(3, 3).offload(Offload::CPU));
    for prefetch in [0, 1, 3, 20] {
        for buckets in [1, 2, 5] {
            for sub_group in [1, 7, 1 << 20] {
                let mut case = Case::new(3, 3).offload(Offload::CPU);
                case.config.prefetch_units = prefetch;
                case.config.buckets_in_flight = buckets;
                case.config.sub_group_elems = sub_group;
                assert_eq!(
                    train(&case).0,
                    reference,
                    "{prefetch} {buckets} {sub_group}"
                );
            }
        }
    }
}

#[test]
fn with_accumulation_stages_0_and_1_and_stages_2_and_3_agree() {
    let run = |stage, accumulation| {
        let mut case = Case::new(2, stage);
        case.accumulation = accumulation;
        train(&case).0
    };
    for accumulation in [2, 3] {
        assert_eq!(run(0, accumulation), run(1, accumulation));
        assert_eq!(run(2, accumulation), run(3, accumulation));
        assert!(distance(&run(0, accumulation), &run(3, accumulation)) < ACROSS_WORLDS);
        assert!(distance(&run(0, accumulation), &run(0, 1)) < ACROSS_WORLDS);
    }
}

#[test]
fn worlds_agree_with_one_process() {
    let (one, losses) = train(&Case::new(1, 0));
    for world in 2..=4 {
        for stage in [1, 3] {
            let (weights, case_losses) = train(&Case::new(world, stage));
            assert!(distance(&weights, &one) < ACROSS_WORLDS, "world {world}");
            for (a, b) in case_losses.iter().zip(&losses) {
                assert!(
                    (a / b - 1.0).abs() < ACROSS_WORLDS,
                    "world {world}: {a} {b}"
                );
            }
        }
    }
}

#[test]
fn a_rank_without_samples_or_supervised_tokens_trains_along() {
    // Four ranks, three samples: rank 3 has none; sample 3 of the larger case has no supervision.
    for samples in [3, 4, 5] {
        let mut case = Case::new(4, 3);
        case.samples = samples;
        let mut one = Case::new(1, 3);
        one.samples = samples;
        let ((a, la), (b, lb)) = (train(&case), train(&one));
        assert!(distance(&a, &b) < ACROSS_WORLDS, "{samples}: {la:?} {lb:?}");
    }
}

#[test]
fn the_loss_is_the_mean_over_tokens_of_all_ranks_and_micro_batches() {
    let mut case = Case::new(2, 2);
    case.accumulation = 3;
    let reports = run_world(2, |comm| {
        let mut zero = engine_for(&case, comm).unwrap();
        load_initial(&mut zero);
        let own = toy::own_samples(&case, zero.comm().world(), 0);
        let mut sums = (0.0, 0);
        for batch in own.chunks(2) {
            let (loss, supervised) = micro_batch(&mut zero, batch, 0.0).unwrap();
            sums = (sums.0 + loss, sums.1 + supervised);
        }
        (sums, zero.step(0.0).unwrap())
    });
    let loss: f64 = reports.iter().map(|(s, _)| s.0).sum();
    let tokens: u64 = reports.iter().map(|(s, _)| s.1).sum();
    assert!(tokens < 12, "some samples are unsupervised");
    for (_, report) in &reports {
        assert_eq!(report.supervised_tokens, tokens);
        assert!((report.loss - loss / tokens as f64).abs() < 1e-15);
    }
}

#[test]
fn a_non_finite_gradient_on_one_rank_skips_the_step_everywhere() {
    for stage in 0..=3 {
        for precision in [Precision::F32, Precision::Bf16, Precision::PureBf16] {
            for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let case = Case::new(3, stage)
                    .precision(precision)
                    .offload(Offload::CPU);
                let finals = run_world(3, |comm| {
                    let mut zero = engine_for(&case, comm.clone()).unwrap();
                    load_initial(&mut zero);
                    toy::train_step(&case, &mut zero, 0).unwrap();
                    let before = (weight_bits(&zero), zero.state_bytes().unwrap());
                    let own = toy::own_samples(&case, comm.world(), 1);
                    let value = if comm.world().rank == 1 { poison } else { 0.0 };
                    micro_batch(&mut zero, &own, value).unwrap();
                    let report = zero.step(1e-2).unwrap();
                    assert!(!report.applied && report.step == 1);
                    assert_eq!((weight_bits(&zero), zero.state_bytes().unwrap()), before);
                    // The next step runs as if the poisoned one had not been.
                    toy::train_step(&case, &mut zero, 1).unwrap();
                    weight_bits(&zero)
                });
                let mut clean = case.clone();
                clean.steps = 2;
                assert_eq!(finals[0], train(&clean).0);
            }
        }
    }
}

#[test]
fn clipping_scales_to_the_global_norm() {
    let mut case = Case::new(2, 3);
    case.config.max_grad_norm = Some(0.1);
    let (clipped, _) = train(&case);
    let (free, _) = train(&Case::new(2, 3));
    assert_ne!(clipped, free);
    case.config.max_grad_norm = Some(1e9);
    assert_eq!(train(&case).0, free);
}

#[test]
fn frozen_units_own_no_training_state_and_do_not_move() {
    for stage in 0..=3 {
        let mut case = Case::new(2, stage);
        case.frozen_units = vec![0, 1, 3];
        let (weights, _) = train(&case);
        let initial = {
            let mut still = case.clone();
            still.steps = 0;
            train(&still).0
        };
        for (i, (w, first)) in weights.iter().zip(&initial).enumerate() {
            assert_eq!(w == first, [0, 1, 3].contains(&(i / 2)), "parameter {i}");
        }
        let zero = run_world(2, |comm| {
            let zero = engine_for(&case, comm).unwrap();
            let memory = zero.plan().memory(optim::Optimizer::slots(
                &optim::AdamW::default(),
                case.config.precision,
            ));
            let trained = zero
                .plan()
                .units()
                .iter()
                .map(|u| u.trainable.padded_elems as u64);
            (
                memory,
                trained.sum::<u64>(),
                zero.state_bytes().unwrap().len() as u64,
            )
        });
        let (memory, trained, state) = zero[0];
        let part = if stage > 0 { trained / 2 } else { trained };
        assert_eq!(memory.optimizer.device, part * 8);
        assert_eq!(state, part * 8);
    }
}

#[test]
fn leases_out_of_plan_order_or_outside_a_pass_are_errors() {
    let case = Case::new(1, 3);
    run_world(1, |comm| {
        let mut zero = engine_for(&case, comm).unwrap();
        load_initial(&mut zero);
        zero.begin_pass(PassKind::Train);
        zero.lease(UnitId(3), Phase::Forward)
            .unwrap()
            .end()
            .unwrap();
        let error = zero.lease(UnitId(2), Phase::Forward).unwrap_err();
        assert!(matches!(error, EngineError::LeaseOrder { .. }), "{error}");
        let error = zero.lease(UnitId(3), Phase::Forward).unwrap_err();
        assert!(matches!(error, EngineError::LeaseOrder { .. }), "{error}");
        zero.end_pass().unwrap();
        assert!(
            zero.lease(UnitId(0), Phase::Forward).is_err(),
            "no pass is open"
        );
    });
}

#[test]
fn a_panic_inside_a_lease_leaves_a_usable_engine() {
    let case = Case::new(1, 3);
    run_world(1, |comm| {
        let mut zero = engine_for(&case, comm).unwrap();
        load_initial(&mut zero);
        zero.begin_pass(PassKind::Train);
        drop(zero.lease(UnitId(0), Phase::Forward).unwrap());
        zero.end_lease(UnitId(0), Phase::Forward, false).unwrap();
        toy::train_step(&case, &mut zero, 0).unwrap();
    });
}

#[test]
fn gathered_weights_never_exceed_the_plan() {
    for prefetch in [0, 1, 2] {
        let mut case = Case::new(2, 3).offload(Offload::CPU);
        case.config.prefetch_units = prefetch;
        run_world(2, |comm| {
            let mut zero = engine_for(&case, comm).unwrap();
            load_initial(&mut zero);
            toy::train_step(&case, &mut zero, 0).unwrap();
            let peak = zero.device_pool().stats().tag(kernels::Tag::Gathered).peak;
            assert_eq!(peak, zero.plan().memory(&[]).gathered);
            assert_eq!(
                zero.device_pool()
                    .stats()
                    .tag(kernels::Tag::Gathered)
                    .in_use,
                0
            );
        });
    }
}

#[test]
fn counted_collective_and_copy_times_fit_into_the_step() {
    for (world, offload) in [
        (1, Offload::default()),
        (1, Offload::CPU),
        (3, Offload::default()),
        (3, Offload::CPU),
    ] {
        for stage in 0..=3 {
            let case = Case::new(world, stage).offload(offload);
            run_world(world, |comm| {
                let mut zero = engine_for(&case, comm).unwrap();
                load_initial(&mut zero);
                let before = zero.times();
                let started = Instant::now();
                toy::train_step(&case, &mut zero, 0).unwrap();
                let (spent, elapsed) = (zero.times().since(before), started.elapsed());
                let case = format!("world {world} stage {stage} {offload:?}: {spent:?}");
                assert!(spent.communication + spent.offload <= elapsed, "{case}");
                assert_eq!(
                    spent.offload > Duration::ZERO,
                    offload == Offload::CPU,
                    "{case}"
                );
                assert!(spent.communication > Duration::ZERO, "{case}");
            });
        }
    }
}
