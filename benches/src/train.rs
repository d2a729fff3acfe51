//! One training step of a decoder with 110 M parameters: hidden size 768, 12 layers, vocabulary 32000, untied head
//! (134 M in total). Each rank has one text of 512 tokens, and every block is recomputed in the backward pass.

use crate::{Result, decoder};
use engine::comm::{Communicator, threads};
use engine::{Offload, OptimizerConfig, ParamId, PassKind, Plan, Stage, Tiers, Zero, ZeroConfig};
use kernels::{Backend, CpuBackend, CpuMath, Pool};
use models::autograd::Tape;
use models::config::LanguageConfig;
use models::minicpm::MiniCpm;
use models::{SampleInput, VisionLanguageModel};
use optim::{AdamW, GroupOptions, Precision};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokens per rank.
pub const TOKENS: usize = 512;
const VOCABULARY: usize = 32_000;
/// Output and input features of the linear layers: those of attention, the first two and the last of the MLP, the head.
pub const LAYERS: [(usize, usize); 4] = [(768, 768), (2048, 768), (768, 2048), (VOCABULARY, 768)];

/// Settings of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setting {
    /// Number of ranks, each a thread with its own pool.
    pub ranks: usize,
    /// Threads per rank.
    pub threads: usize,
    /// ZeRO stage.
    pub stage: Stage,
    /// Precision.
    pub precision: Precision,
}

/// Time of the parts of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepTime {
    /// Forward pass.
    pub forward: Duration,
    /// Backward pass.
    pub backward: Duration,
    /// Rest of the gradient reduction, norm and update.
    pub optimizer: Duration,
}

impl StepTime {
    /// Sum of all parts.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.forward + self.backward + self.optimizer
    }
}

/// Model and states of one rank.
struct Rank {
    model: MiniCpm,
    zero: Zero,
    backend: Arc<dyn Backend>,
    ids: Vec<i32>,
}

impl Rank {
    fn new(setting: Setting, comm: Arc<dyn Communicator>) -> Result<Self> {
        let language = LanguageConfig {
            hidden_size: 768,
            intermediate_size: 2048,
            num_layers: 12,
            num_heads: 12,
            num_kv_heads: 12,
            head_dim: 64,
            vocab_size: VOCABULARY,
            rms_norm_eps: 1e-6,
            rope_theta: 1e4,
            initializer_range: 0.02,
        };
        let model = decoder(language, setting.precision.weight_dtype())?;
        let config = ZeroConfig {
            stage: setting.stage,
            precision: setting.precision,
            offload: Offload::states(engine::Tier::Device),
            max_grad_norm: Some(1.0),
            ..ZeroConfig::default()
        };
        let rank = comm.world().rank;
        let plan = Arc::new(Plan::new(model.spec().clone(), config, setting.ranks)?);
        let device = Pool::new("device", None);
        let backend: Arc<dyn Backend> =
            Arc::new(CpuBackend::new(device.clone()).with_math(CpuMath::native()));
        let group = GroupOptions {
            weight_decay: 0.01,
            lr_scale: 1.0,
        };
        let optimizer = OptimizerConfig {
            rule: Arc::new(AdamW::default()),
            groups: vec![group; model.spec().params.len()],
        };
        let tiers = Tiers::new(device, Pool::new("host", None));
        let mut zero = Zero::new(plan, comm, backend.clone(), tiers, optimizer)?;
        zero.load(|id: ParamId, elements, out| {
            model.init(id, 1, elements, out);
            Ok::<_, Infallible>(())
        })?;
        let next = |i: usize| ((rank * 7919 + i * i * 31 + i * 17) % VOCABULARY) as i32;
        Ok(Self {
            model,
            zero,
            backend,
            ids: (0..TOKENS).map(next).collect(),
        })
    }

    fn step(&mut self) -> Result<StepTime> {
        let input = SampleInput {
            input_ids: &self.ids,
            labels: &self.ids,
            image_bounds: &[],
            slices: &[],
        };
        let start = Instant::now();
        self.zero.begin_pass(PassKind::Train);
        let batch = self.model.collate(&[input], &*self.backend)?;
        let tape = Tape::training(&self.zero);
        let loss = self.model.forward(&tape, &batch)?;
        let sums = (loss.sum()?, loss.supervised as u64);
        let forward = start.elapsed();
        tape.backward(&loss, 1.0)?;
        self.zero.end_micro_batch(sums.0, sums.1)?;
        let backward = start.elapsed();
        let report = self.zero.step(1e-4)?;
        if !report.applied {
            return Err("a gradient was not finite".into());
        }
        Ok(StepTime {
            forward,
            backward: backward - forward,
            optimizer: start.elapsed() - backward,
        })
    }
}

/// Runs `steps` steps on every rank and calls `each` with the times of rank 0.
///
/// # Errors
/// The first rank's error, or a panic of a rank.
pub fn run(setting: Setting, steps: usize, each: impl Fn(StepTime) + Sync) -> Result<()> {
    let comms = threads::world(setting.ranks, 1 << 29)?;
    let work = |comm: Arc<dyn Communicator>| -> Result<()> {
        let body = || -> Result<()> {
            let first = comm.world().rank == 0;
            let mut rank = Rank::new(setting, comm.clone())?;
            for _ in 0..steps {
                let time = rank.step()?;
                if first {
                    each(time);
                }
            }
            Ok(())
        };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(setting.threads);
        let result = in_pool(pool.build()?, body);
        if let Err(error) = &result {
            comm.abort(&error.to_string());
        }
        result
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = comms
            .into_iter()
            .map(|comm| scope.spawn(|| work(comm)))
            .collect();
        for rank in ranks {
            rank.join().map_err(|_| "a rank panicked")??;
        }
        Ok(())
    })
}

/// Runs all of a rank inside its pool, so its communicator and tape stay on one thread.
fn in_pool(pool: rayon::ThreadPool, body: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    pool.install(body)
}
