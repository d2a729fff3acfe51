//! Transfers between pipeline stages.

use crate::toy::{Case, UNITS, engine_in};
use engine::comm::CommError;
use engine::comm::mesh::{MAX_VALUES, Mesh, Neighbor, Regions};
use engine::{BoundaryTensor, EngineError, ParamAccess, PipelineStage, Slice, Zero};
use kernels::{DType, Shape, Tag};
use std::sync::Barrier;
use std::time::Duration;

/// Elements of a transferred value: more bytes than a small message has.
const ELEMS: usize = 2048;

/// Runs both stages of a model, each in a thread. Their links have space for one transfer.
fn on_stages(first: impl FnOnce(Zero) + Send, last: impl FnOnce(Zero) + Send) {
    let regions = Regions {
        data: 1 << 16,
        link: 4 * ELEMS,
    };
    let deadline = Duration::from_secs(20);
    let meshes = Mesh::threads_with_deadline(2, 2, 1 << 16, regions, deadline).unwrap();
    let open = |mesh: Mesh| {
        let mut case = Case::new(1, 0);
        case.config.slice = Some(Slice {
            counts: vec![2, UNITS as u32 - 2],
            stage: mesh.coordinates().stage,
        });
        engine_in(&case, mesh).unwrap()
    };
    let mut meshes = meshes.into_iter();
    let [one, two] = std::array::from_fn(|_| meshes.next().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(move || first(open(one)));
        scope.spawn(move || last(open(two)));
    });
}

fn value(stage: &Zero, elems: usize, content: f32) -> [BoundaryTensor; 1] {
    let values = vec![content; elems];
    let bytes = bytemuck::cast_slice(&values);
    let backend = stage.backend();
    let value = backend.upload(bytes, Shape::new(&[elems]), DType::F32, Tag::Activations);
    [BoundaryTensor {
        index: 1,
        wants_gradient: true,
        value: value.unwrap(),
    }]
}

/// First element of the values that a neighbor sends next.
fn received(stage: &Zero, from: Neighbor) -> f32 {
    stage.receive(from).unwrap()[0].value.to_f32_vec().unwrap()[0]
}

/// Neither stage receives anything before both have sent twice.
#[test]
fn a_stage_computes_while_its_values_are_sent() {
    let both = Barrier::new(2);
    let run = |stage: Zero, to: Neighbor, [own, other]: [f32; 2]| {
        for turn in [1.0, 2.0] {
            stage.send(to, &value(&stage, ELEMS, own * turn)).unwrap();
        }
        both.wait();
        for turn in [1.0, 2.0] {
            assert_eq!(received(&stage, to), other * turn);
        }
    };
    on_stages(
        |first| run(first, Neighbor::Next, [1.0, -1.0]),
        |last| run(last, Neighbor::Previous, [-1.0, 1.0]),
    );
}

/// The stage whose transfer fails reports the cause, and the other one does not wait for the values.
#[test]
fn a_transfer_that_fails_ends_both_stages() {
    for receives in [true, false] {
        on_stages(
            |mut first| {
                let [one] = value(&first, 1, 1.0);
                let sent = first.send(Neighbor::Next, &vec![one; MAX_VALUES + 1]);
                sent.unwrap();
                let error = match receives {
                    true => first.receive(Neighbor::Next).unwrap_err(),
                    false => first.step(0.1).unwrap_err(),
                };
                assert!(
                    matches!(&error, EngineError::Comm(CommError::TooManyValues { .. })),
                    "{error}"
                );
            },
            |last| {
                let error = last.receive(Neighbor::Previous).unwrap_err();
                assert!(
                    matches!(&error, EngineError::Comm(CommError::Aborted { .. })),
                    "{error}"
                );
            },
        );
    }
}
