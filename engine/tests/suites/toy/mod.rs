//! A residual network with an optional "vision" half, written directly against `ParamAccess`, and
//! worlds of threads that train it: the smallest thing that exercises every path of the engine.

pub mod hooked;

use engine::comm::mesh::Mesh;
use engine::comm::{Communicator, World, threads};
use engine::spill::{IoPath, SpillDirectory, SpillFile, SpillIo};
use engine::{
    EngineError, ModelSpec, Offload, OptimizerConfig, ParamAccess, ParamId, ParamSpec, PassKind,
    Phase, Plan, Precision, Spill, Stage, StateKind, StepReport, Tier, Tiers, UnitId, UnitSpec,
    Zero, ZeroConfig,
};
use kernels::{Backend, CpuBackend, Pool, Quantization, Tag, Tensor};
use optim::{AdamW, GroupOptions};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub const WIDTH: usize = 5;
/// The learning rate of every step.
pub const RATE: f64 = 1e-2;
pub const VISION_UNITS: usize = 2;
pub const UNITS: usize = 5;

/// One training sample of the toy: an input, a target, perhaps an image, perhaps no supervision.
#[derive(Clone, Debug)]
pub struct Sample {
    pub x: [f32; WIDTH],
    pub target: [f32; WIDTH],
    pub image: Option<[f32; WIDTH]>,
    pub supervised: bool,
}

/// Deterministic samples; every third has no image, every fourth no supervised token.
pub fn samples(step: usize, count: usize) -> Vec<Sample> {
    let value = |a: usize, b: usize| ((a * 7919 + b * 104_729 + 13) % 1009) as f32 / 504.5 - 1.0;
    (0..count)
        .map(|i| {
            let seed = step * 100 + i;
            let row = |k: usize| std::array::from_fn(|j| value(seed * 3 + k, j));
            Sample {
                x: row(0),
                target: row(1),
                image: (i % 3 != 2).then(|| row(2)),
                supervised: i % 4 != 3,
            }
        })
        .collect()
}

/// Units `0..VISION_UNITS` see the image, the rest the sum of its features and the input. Each
/// unit has a matrix and a bias; odd sizes so that nothing divides evenly.
pub fn spec(trainable: impl Fn(usize, &str) -> bool) -> ModelSpec {
    let mut spec = ModelSpec::default();
    for u in 0..UNITS {
        spec.units.push(UnitSpec {
            name: format!("units.{u}"),
        });
        for (name, shape) in [("weight", vec![WIDTH, WIDTH]), ("bias", vec![WIDTH])] {
            spec.params.push(ParamSpec {
                name: format!("units.{u}.{name}"),
                shape: shape.as_slice().into(),
                unit: UnitId(u as u32),
                trainable: trainable(u, name),
                quantization: None,
            });
        }
    }
    spec
}

pub fn initial(id: ParamId, element: usize) -> f32 {
    let i = id.index() * 1000 + element;
    ((i * 2_654_435_761usize) % 10_007) as f32 / 10_007.0 - 0.5
}

/// Settings of one world.
#[derive(Clone, Debug)]
pub struct Case {
    pub world: usize,
    pub config: ZeroConfig,
    pub accumulation: usize,
    pub steps: usize,
    pub samples: usize,
    pub frozen_units: Vec<usize>,
    /// Quantization of the matrices of frozen units.
    pub quantization: Option<Quantization>,
}

impl Case {
    pub fn new(world: usize, stage: u8) -> Self {
        Self {
            world,
            config: ZeroConfig {
                stage: Stage::try_from(stage).unwrap(),
                ..Default::default()
            },
            accumulation: 1,
            steps: 6,
            samples: 12,
            frozen_units: Vec::new(),
            quantization: None,
        }
    }
    pub fn offload(mut self, offload: Offload) -> Self {
        self.config.offload = offload;
        self
    }
    pub fn precision(mut self, precision: Precision) -> Self {
        self.config.precision = precision;
        self
    }
}

/// Spill files beside the test binary, whose disk has direct I/O more often than the system's temporary directory.
fn spill(rank: usize) -> Result<Spill, EngineError> {
    static JOBS: AtomicUsize = AtomicUsize::new(0);
    let exe = std::env::current_exe().unwrap();
    let job = JOBS.fetch_add(1, Ordering::Relaxed);
    let job = format!("{}-{job}", std::process::id());
    let directory = Arc::new(SpillDirectory::join(exe.parent().unwrap(), &job)?);
    let io = SpillIo::new(0, &Pool::new("buffers", None))?;
    let way = if rank.is_multiple_of(2) {
        IoPath::Mapped
    } else {
        IoPath::Direct
    };
    let files = [StateKind::Param, StateKind::Optimizer].map(|kind| {
        let file = SpillFile::create(&directory, rank, kind.name(), way)
            .or_else(|_| SpillFile::create(&directory, rank, kind.name(), IoPath::Mapped));
        (kind, file.unwrap())
    });
    Ok(Spill::new(io, files))
}

pub fn engine_for(case: &Case, comm: Arc<dyn Communicator>) -> Result<Zero, EngineError> {
    engine_in(case, comm.into())
}

/// The engine of a rank of a mesh of pipeline stages.
pub fn engine_in(case: &Case, mesh: Mesh) -> Result<Zero, EngineError> {
    let rank = mesh.world().world().rank;
    let mut spec = spec(|u, _| !case.frozen_units.contains(&u));
    for param in spec.params.iter_mut().step_by(2) {
        param.quantization = case.quantization;
    }
    let groups = spec
        .params
        .iter()
        .map(|p| GroupOptions {
            weight_decay: if p.name.ends_with("bias") { 0.0 } else { 0.1 },
            lr_scale: 1.0,
        })
        .collect();
    let plan = Plan::new(spec, case.config.clone(), case.world)?;
    let pool = Pool::new("device", None);
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(pool.clone()));
    let mut tiers = Tiers::new(pool, Pool::new("host", None));
    let offload = case.config.offload;
    if [offload.param, offload.optimizer].contains(&Tier::Nvme) {
        tiers = tiers.with_spill(spill(rank)?);
    }
    let disk = tiers.spill().cloned();
    let optimizer = OptimizerConfig {
        rule: Arc::new(AdamW {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            ..AdamW::default()
        }),
        groups,
    };
    let slots = optimizer.rule.slots(case.config.precision);
    let zero = Zero::in_mesh(Arc::new(plan), mesh, backend, tiers, optimizer)?;
    if let Some(disk) = disk {
        // Of a kind that is elsewhere the file has its header only.
        let planned = [StateKind::Param, StateKind::Optimizer]
            .map(|kind| zero.plan().spill_file_bytes(rank, kind, slots).max(4096));
        assert_eq!(disk.file_bytes(), planned.iter().sum::<u64>());
    }
    Ok(zero)
}

pub fn load_initial(zero: &mut Zero) {
    zero.load(|id, range, out| {
        for (o, e) in out.iter_mut().zip(range) {
            *o = initial(id, e);
        }
        Ok::<_, std::io::Error>(())
    })
    .unwrap();
}

fn ids(unit: usize) -> (ParamId, ParamId) {
    (ParamId(2 * unit as u32), ParamId(2 * unit as u32 + 1))
}

fn layer(w: &[f32], b: &[f32], x: &[f32; WIDTH]) -> [f32; WIDTH] {
    std::array::from_fn(|o| (0..WIDTH).map(|i| w[o * WIDTH + i] * x[i]).sum::<f32>() + b[o])
}

fn forward_unit(
    zero: &dyn ParamAccess,
    unit: usize,
    xs: &mut [[f32; WIDTH]],
) -> Result<(), EngineError> {
    let lease = zero.lease(UnitId(unit as u32), Phase::Forward)?;
    let (w, b) = ids(unit);
    let (w, b) = (lease.param(w)?.to_f32_vec()?, lease.param(b)?.to_f32_vec()?);
    for x in xs.iter_mut() {
        let y = layer(&w, &b, x);
        *x = std::array::from_fn(|i| x[i] + y[i].tanh());
    }
    lease.end()
}

/// Replays a unit on its saved inputs, deposits its gradients and turns output gradients into
/// input gradients.
fn backward_unit(
    zero: &dyn ParamAccess,
    pool: &Pool,
    unit: usize,
    xs: &[[f32; WIDTH]],
    gs: &mut [[f32; WIDTH]],
) -> Result<(), EngineError> {
    let id = UnitId(unit as u32);
    if !zero.needs_backward(id) {
        return Ok(());
    }
    let lease = zero.lease(id, Phase::Backward)?;
    let (wid, bid) = ids(unit);
    let (w, b) = (
        lease.param(wid)?.to_f32_vec()?,
        lease.param(bid)?.to_f32_vec()?,
    );
    let (mut dw, mut db) = ([0f32; WIDTH * WIDTH], [0f32; WIDTH]);
    for (x, g) in xs.iter().zip(gs.iter_mut()) {
        let y = layer(&w, &b, x);
        let dy: [f32; WIDTH] = std::array::from_fn(|o| g[o] * (1.0 - y[o].tanh().powi(2)));
        for o in 0..WIDTH {
            db[o] += dy[o];
            for i in 0..WIDTH {
                dw[o * WIDTH + i] += dy[o] * x[i];
            }
        }
        let dx: [f32; WIDTH] =
            std::array::from_fn(|i| (0..WIDTH).map(|o| dy[o] * w[o * WIDTH + i]).sum());
        *g = std::array::from_fn(|i| g[i] + dx[i]);
    }
    if zero.is_trainable(wid) {
        zero.deposit(
            wid,
            &Tensor::from_slice(pool, Tag::Workspace, [WIDTH, WIDTH], &dw)?,
        )?;
        zero.deposit(
            bid,
            &Tensor::from_slice(pool, Tag::Workspace, [WIDTH], &db)?,
        )?;
    }
    lease.end()
}

/// One micro-batch: returns the loss sum and the number of supervised samples. A batch without
/// images never touches the vision units.
pub fn micro_batch(
    zero: &mut Zero,
    batch: &[Sample],
    poison: f32,
) -> Result<(f64, u64), EngineError> {
    let pool = Pool::new("toy", None);
    zero.begin_pass(PassKind::Train);
    let with_image: Vec<usize> = (0..batch.len())
        .filter(|i| batch[*i].image.is_some())
        .collect();
    let mut features: Vec<[f32; WIDTH]> =
        with_image.iter().filter_map(|i| batch[*i].image).collect();
    let mut saved = Vec::new();
    for u in 0..VISION_UNITS {
        saved.push(features.clone());
        if !features.is_empty() {
            forward_unit(zero, u, &mut features)?;
        }
    }
    let mut xs: Vec<[f32; WIDTH]> = batch.iter().map(|s| s.x).collect();
    for (f, i) in features.iter().zip(&with_image) {
        xs[*i] = std::array::from_fn(|j| xs[*i][j] + f[j]);
    }
    for u in VISION_UNITS..UNITS {
        saved.push(xs.clone());
        forward_unit(zero, u, &mut xs)?;
    }
    let (mut loss, mut supervised) = (0f64, 0u64);
    let mut gs = vec![[0f32; WIDTH]; batch.len()];
    for (i, s) in batch.iter().enumerate().filter(|(_, s)| s.supervised) {
        supervised += 1;
        for j in 0..WIDTH {
            let d = xs[i][j] - s.target[j];
            loss += 0.5 * f64::from(d) * f64::from(d);
            gs[i][j] = d + poison;
        }
    }
    for u in (VISION_UNITS..UNITS).rev() {
        backward_unit(zero, &pool, u, &saved[u], &mut gs)?;
    }
    let mut feature_gs: Vec<[f32; WIDTH]> = with_image.iter().map(|i| gs[*i]).collect();
    for u in (0..VISION_UNITS).rev() {
        if !feature_gs.is_empty() {
            backward_unit(zero, &pool, u, &saved[u], &mut feature_gs)?;
        }
    }
    zero.end_micro_batch(loss, supervised)?;
    Ok((loss, supervised))
}

/// A training pass that ends in the middle of backward.
pub fn abandoned_pass(zero: &mut Zero, batch: &[Sample]) {
    let pool = Pool::new("toy", None);
    zero.begin_pass(PassKind::Train);
    let mut xs: Vec<[f32; WIDTH]> = batch.iter().map(|s| s.x).collect();
    for u in VISION_UNITS..UNITS {
        forward_unit(zero, u, &mut xs).unwrap();
    }
    let mut gs = xs.clone();
    for u in (VISION_UNITS + 1..UNITS).rev() {
        backward_unit(zero, &pool, u, &xs, &mut gs).unwrap();
    }
    drop(
        zero.lease(UnitId(VISION_UNITS as u32), Phase::Backward)
            .unwrap(),
    );
}

/// This rank's part of a step's samples.
pub fn own_samples(case: &Case, world: World, step: usize) -> Vec<Sample> {
    let all = samples(step, case.samples);
    all.into_iter()
        .skip(world.rank)
        .step_by(world.size)
        .collect()
}

pub fn train_step(case: &Case, zero: &mut Zero, step: usize) -> Result<StepReport, EngineError> {
    let own = own_samples(case, zero.comm().world(), step);
    let per_micro = own.len().div_ceil(case.accumulation);
    for micro in 0..case.accumulation {
        let from = (micro * per_micro).min(own.len());
        let to = ((micro + 1) * per_micro).min(own.len());
        if micro + 1 == case.accumulation {
            announce(zero, &own[from..to])?;
        }
        micro_batch(zero, &own[from..to], 0.0)?;
    }
    zero.step(RATE)
}

/// Says that the pass over `batch` is the update's last.
pub fn announce(zero: &mut Zero, batch: &[Sample]) -> Result<(), EngineError> {
    let supervised = batch.iter().filter(|sample| sample.supervised).count();
    zero.announce_update(RATE, 1.0, supervised as u64)
}

/// Bits of every weight, in parameter order.
pub fn weight_bits(zero: &Zero) -> Vec<Vec<u32>> {
    let mut out = Vec::new();
    zero.visit_weights(|_, w| {
        out.push(w.to_f32_vec()?.iter().map(|v| v.to_bits()).collect());
        Ok::<_, EngineError>(())
    })
    .unwrap();
    out
}

/// Runs one closure per rank, each on its own thread, and collects the results in rank order.
pub fn run_world<T: Send>(
    size: usize,
    body: impl Fn(Arc<dyn Communicator>) -> T + Send + Sync,
) -> Vec<T> {
    let comms = threads::world(size, 1 << 24).unwrap();
    std::thread::scope(|scope| {
        let body = &body;
        let handles: Vec<_> = comms
            .into_iter()
            .map(|comm| scope.spawn(move || body(comm)))
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

/// Trains from the initial weights and returns rank 0's final weights and losses; asserts that all
/// ranks ended with the same weights.
pub fn train(case: &Case) -> (Vec<Vec<u32>>, Vec<f64>) {
    let mut results = run_world(case.world, |comm| {
        let mut zero = engine_for(case, comm).unwrap();
        load_initial(&mut zero);
        let losses = (0..case.steps)
            .map(|s| train_step(case, &mut zero, s).unwrap().loss)
            .collect();
        (weight_bits(&zero), losses)
    });
    let first: (Vec<Vec<u32>>, Vec<f64>) = results.remove(0);
    for other in &results {
        assert_eq!(other.0, first.0, "ranks disagree");
    }
    first
}

pub fn floats(bits: &[Vec<u32>]) -> Vec<f32> {
    bits.iter().flatten().map(|b| f32::from_bits(*b)).collect()
}

/// Relative L2 distance.
pub fn distance(a: &[Vec<u32>], b: &[Vec<u32>]) -> f64 {
    let (a, b) = (floats(a), floats(b));
    let num: f64 = a
        .iter()
        .zip(&b)
        .map(|(x, y)| f64::from(x - y).powi(2))
        .sum();
    let den: f64 = b.iter().map(|y| f64::from(*y).powi(2)).sum();
    (num / den).sqrt()
}
