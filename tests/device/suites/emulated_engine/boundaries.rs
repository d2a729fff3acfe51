//! Transfers between pipeline stages whose emulated GPUs read each other's memory.

use std::sync::{Arc, Barrier};

use anyhow::{Result, ensure};
use device_tests::emulator::Order;
use device_tests::linked::{Copies, LinkedGpu, Lost};
use engine::comm::mesh::{Mesh, Neighbor, Regions};
use engine::{
    BoundaryTensor, DeviceTransport, ParamAccess, PipelineStage, Plan, Slice, Tiers, Zero,
    ZeroConfig,
};
use kernels::cuda::CudaBackend;
use kernels::{Backend, DType, Lane, Pool, Shape, Tag, Tensor};
use models::{ModelOptions, open_model};

use crate::setup::{self, ARENA_BYTES, pack};

const ELEMS: usize = 64;
const TRANSFERS: u16 = 4;
const REGION_BYTES: usize = 1 << 20;

fn stage(mesh: Mesh, gpu: LinkedGpu) -> Result<Zero> {
    let model = open_model(&pack("glm-4v-9b"), ModelOptions::new(DType::F32))?;
    let units = model.spec().units.len() as u32;
    let config = ZeroConfig {
        device_transport: DeviceTransport::Peers,
        slice: Some(Slice {
            counts: vec![1, units - 1],
            stage: mesh.coordinates().stage,
        }),
        ..ZeroConfig::default()
    };
    let plan = Arc::new(Plan::new(model.spec().clone(), config, 1)?);
    let backend = Arc::new(CudaBackend::new(Arc::new(gpu), ARENA_BYTES)?);
    let [device, host] = ["device", "host"].map(|name| Pool::new(name, None));
    let tiers = Tiers::new(device, host);
    Ok(Zero::in_mesh(
        plan,
        mesh,
        backend,
        tiers,
        setup::optimizer(&*model),
    )?)
}

fn filled(backend: &dyn Backend, value: f32) -> Result<Tensor> {
    let bytes = bytemuck::cast_slice(&[value; ELEMS]).to_vec();
    let shape = Shape::new(&[ELEMS]);
    Ok(backend.upload(&bytes, shape, DType::F32, Tag::Activations)?)
}

/// Sends twice the number of each transfer to the last stage. The first stage waits for no work until the last one has queued
/// its copies, and reuses the memory of each value after its next transfer, before the last stage reads what it received.
/// Returns that.
fn cross(gpus: Vec<LinkedGpu>) -> Result<Vec<Vec<f32>>> {
    let regions = Regions {
        data: REGION_BYTES,
        link: REGION_BYTES,
    };
    let meshes = Mesh::threads(2, 2, REGION_BYTES, regions)?;
    let [first, last] = <[Mesh; 2]>::try_from(meshes).expect("two stages");
    let mut gpus = gpus.into_iter();
    let [one, two] = std::array::from_fn(|_| gpus.next().expect("two GPUs"));
    let both = Arc::new(Barrier::new(2));
    let sent = both.clone();
    let sender = std::thread::spawn(move || -> Result<()> {
        let zero = stage(first, one)?;
        let backend = zero.backend();
        let none = filled(&**backend, 0.0)?;
        let offer = |number: f32| -> Result<Tensor> {
            let source = filled(&**backend, number)?;
            let value = backend.add(&source, &source)?;
            let passed = BoundaryTensor {
                index: 1,
                wants_gradient: true,
                value,
            };
            zero.send(Neighbor::Next, &[passed])?;
            Ok(source)
        };
        let mut outcome = Ok(());
        for number in (1..=TRANSFERS).map(f32::from) {
            let source = offer(number);
            // Nothing ran yet that was not waited for.
            sent.wait();
            let read = source.and_then(|source| Ok(backend.add(&source, &none)?.to_f32_vec()?));
            outcome = outcome.and(read.and_then(|read| {
                ensure!(read == [number; ELEMS]);
                Ok(())
            }));
        }
        sent.wait();
        outcome
    });
    let zero = stage(last, two)?;
    let received: Vec<_> = (0..TRANSFERS)
        .map(|_| {
            let passed = zero.receive(Neighbor::Previous);
            both.wait();
            passed
        })
        .collect();
    both.wait();
    let mut values = Vec::new();
    for passed in received {
        values.push(passed?[0].value.to_f32_vec()?);
    }
    match sender.join() {
        Ok(outcome) => outcome?,
        Err(_) => anyhow::bail!("the first stage panicked"),
    }
    Ok(values)
}

fn want() -> Vec<Vec<f32>> {
    let twice = |number| vec![2.0 * f32::from(number); ELEMS];
    (1..=TRANSFERS).map(twice).collect()
}

#[test]
fn stages_copy_values_from_their_neighbor() -> Result<()> {
    for copies in [Copies::Early, Copies::Late, Copies::Drawn(0)] {
        let gpus = LinkedGpu::node(2, Order::Ascending, copies);
        ensure!(cross(gpus)? == want(), "{copies:?} copies");
    }
    Ok(())
}

/// Both waits are necessary: a timing reveals the absence of each.
#[test]
fn a_lost_wait_between_stages_changes_values() -> Result<()> {
    for lane in [Lane::Communication, Lane::Compute] {
        let lost = Lost::Marks(lane, Lane::Boundary);
        let shows = [Copies::Early, Copies::Late].into_iter().any(|copies| {
            let gpus = LinkedGpu::node(2, Order::Ascending, copies);
            let gpus = gpus.into_iter().map(|gpu| gpu.without(lost)).collect();
            cross(gpus).map_or(true, |values| values != want())
        });
        ensure!(shows, "{lost:?}");
    }
    Ok(())
}
