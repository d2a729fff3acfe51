//! Saving and loading a [`ShardedOptimizer`], with any number of ranks on either side.
//!
//! Ranks tell each other whether a part succeeded before they go on. So either all of them return a result, or all
//! return an error, and none waits for a rank that failed.

use super::bridge::TensorBridge;
use super::optimizer::ShardedOptimizer;
use crate::checkpoint::{Checkpoint, Writer};
use crate::comm::{Communicator, Tag as CommTag};
use crate::error::EngineError;
use crate::spec::ParamId;
use kernels::DType;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

type Result<T, E = EngineError> = std::result::Result<T, E>;

impl ShardedOptimizer {
    /// Saves weights and optimizer states of all ranks as `checkpoint-<updates>` in the directory `output`, which all
    /// ranks must reach, and returns its path. Every rank writes its own part. All ranks must call it, after a step.
    ///
    /// `meta` is a value of the caller, such as a position in the data; [`ShardedOptimizer::load`] returns it. The
    /// update rule, its numbers and the learning rate are the caller's, and not part of a checkpoint. The oldest
    /// checkpoints beyond `save_total_limit` are removed (0: removes none).
    ///
    /// ```
    /// # use engine::comm::threads;
    /// # use engine::sharded::{BridgeError, ShardedOptimizer, TensorBridge, TensorGroup, TensorInfo};
    /// # use engine::{EngineError, Stage, ZeroConfig};
    /// # use std::path::Path;
    /// # use std::sync::Arc;
    /// # struct Model { weights: Vec<f32>, gradients: Vec<f32> }
    /// # impl Model {
    /// #     fn new() -> Self { Self { weights: vec![3.0; 6], gradients: vec![0.0; 6] } }
    /// #     fn backward(&mut self) -> f64 {
    /// #         self.gradients = self.weights.iter().map(|w| 2.0 * w).collect();
    /// #         self.weights.iter().map(|w| f64::from(w * w)).sum()
    /// #     }
    /// # }
    /// # impl TensorBridge for Model {
    /// #     fn groups(&self) -> Vec<TensorGroup> {
    /// #         vec![TensorGroup { name: "model".into(), tensors: vec![TensorInfo::new("weight", 6, 0.0)] }]
    /// #     }
    /// #     fn read_weight(&self, _: usize, out: &mut [f32]) -> Result<(), BridgeError> {
    /// #         out.copy_from_slice(&self.weights);
    /// #         Ok(())
    /// #     }
    /// #     fn read_gradient(&self, _: usize, out: &mut [f32]) -> Result<(), BridgeError> {
    /// #         out.copy_from_slice(&self.gradients);
    /// #         Ok(())
    /// #     }
    /// #     fn write_weight(&mut self, _: usize, values: &[f32]) -> Result<(), BridgeError> {
    /// #         self.weights.copy_from_slice(values);
    /// #         Ok(())
    /// #     }
    /// # }
    /// /// Trains on `ranks` threads: from the checkpoint in `output`, if any, up to `until` updates.
    /// fn train(ranks: usize, output: &Path, until: u64) -> Result<Vec<f32>, EngineError> {
    ///     let rank = |comm| -> Result<Vec<f32>, EngineError> {
    ///         let mut model = Model::new(); // implements `TensorBridge`
    ///         let config = ZeroConfig { stage: Stage::Zero2, ..ZeroConfig::default() };
    ///         let rule = Arc::new(optim::AdamW::default());
    ///         let mut optimizer = ShardedOptimizer::new(&model, comm, rule, config)?;
    ///         if let Some(checkpoint) = engine::checkpoint::find_latest(output)? {
    ///             let meta = optimizer.load(&checkpoint, &mut model)?;
    ///             assert_eq!(meta["epoch"], 1);
    ///         }
    ///         while optimizer.zero().step_count() < until {
    ///             let loss = model.backward();
    ///             optimizer.accumulate(&model, loss, 1)?;
    ///             optimizer.step(&mut model, 0.1)?;
    ///         }
    ///         optimizer.save(output, serde_json::json!({ "epoch": 1 }), 2)?;
    ///         Ok(model.weights)
    ///     };
    ///     let worlds = threads::world(ranks, 1 << 20)?;
    ///     std::thread::scope(|scope| {
    ///         let ranks: Vec<_> = worlds.into_iter().map(|comm| scope.spawn(|| rank(comm))).collect();
    ///         ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).last().expect("a rank")
    ///     })
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let (first, second) = (tempfile::tempdir()?, tempfile::tempdir()?);
    /// # let (first, second) = (first.path(), second.path());
    /// let whole = train(2, first, 10)?;
    /// train(2, second, 4)?;
    /// assert_eq!(train(3, second, 10)?, whole); // three ranks continue what two saved
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`EngineError::GradientsPending`] between a micro-batch and its step; errors of the disk and of communication;
    /// [`EngineError::OtherRank`] when another rank failed. Then the previous checkpoint stays the latest.
    pub fn save(&mut self, output: &Path, meta: Value, save_total_limit: usize) -> Result<PathBuf> {
        let comm = self.zero.comm().clone();
        let (world, step) = (comm.world(), self.zero.step_count());
        let begun = match self.accumulated {
            true => Err(EngineError::GradientsPending),
            false => Writer::begin(output, step, world.rank as u32, world.size as u32)
                .map_err(EngineError::from),
        };
        let mut writer = together(&*comm, "begin-save", begun)?;
        let written = self.zero.write_state(&mut writer);
        let written = written.and_then(|()| Ok(writer.finish_rank()?));
        let written = together(&*comm, "write-save", written);
        let is_first = world.rank == 0;
        if let Err(error) = written {
            if is_first {
                writer.abandon()?;
            }
            return Err(error);
        }
        let committed = match is_first {
            true => writer.commit(meta, save_total_limit).map(drop),
            false => Ok(()),
        };
        together(&*comm, "commit-save", committed.map_err(EngineError::from))?;
        Ok(output.join(format!("checkpoint-{step}")))
    }

    /// Loads the checkpoint in the directory `checkpoint`, which [`ShardedOptimizer::save`] wrote, and writes its
    /// weights into the bridge. The number of ranks, the stage and the tiers may differ from those that saved it. The
    /// run continues with the same bits. Gradients accumulated before are dropped. Returns the caller's value. All
    /// ranks must call it; rank 0 compares all hashes.
    ///
    /// # Errors
    /// When the checkpoint is damaged, has other tensors or states than this optimizer, or differs between ranks; when
    /// the bridge or communication fails. If one rank fails, all do, and the optimizer cannot be used any more.
    pub fn load(&mut self, checkpoint: &Path, bridge: &mut dyn TensorBridge) -> Result<Value> {
        let meta = self.load_sharded(checkpoint)?;
        self.write_weights(bridge)?;
        Ok(meta)
    }

    /// Loads as [`ShardedOptimizer::load`] does, without writing whole weights anywhere.
    ///
    /// # Errors
    /// As [`ShardedOptimizer::load`].
    pub fn load_sharded(&mut self, checkpoint: &Path) -> Result<Value> {
        let comm = self.zero.comm().clone();
        let opened = self.open(checkpoint, comm.world().rank == 0);
        let checkpoint = together(&*comm, "open-checkpoint", opened)?;
        same_on_all_ranks(&*comm, &checkpoint)?;
        let restored = self.zero.restore(&checkpoint, checkpoint.step());
        together(&*comm, "restore", restored)?;
        self.accumulated = false;
        Ok(checkpoint.meta().clone())
    }

    /// Opens a checkpoint and checks that its tensors are exactly this optimizer's.
    fn open(&mut self, directory: &Path, verifies: bool) -> Result<Checkpoint> {
        let checkpoint = Checkpoint::open(directory)?;
        crate::zero::check_trained(self.zero.plan(), &checkpoint)?;
        let params = 0..self.zero.plan().spec().params.len() as u32;
        let expected: Vec<_> = params
            .map(|param| self.zero.state_tensors(ParamId(param)))
            .collect();
        let names: BTreeSet<&str> = expected.iter().flatten().map(|(name, ..)| *name).collect();
        let differs = |kind: &str, name: &str, expected, found| EngineError::CheckpointTensor {
            kind: kind.to_owned(),
            name: name.to_owned(),
            expected,
            found,
        };
        if let Some(other) = checkpoint
            .tensors()
            .iter()
            .find(|t| !names.contains(&*t.kind))
        {
            let found = described(other.dtype, &other.shape);
            return Err(differs(&other.kind, &other.name, "nothing".into(), found));
        }
        for (param, tensors) in self.zero.plan().spec().params.iter().zip(&expected) {
            for (kind, dtype, shape) in tensors {
                let shape: Vec<u64> = shape.iter().map(|dim| *dim as u64).collect();
                let tensor = checkpoint.tensor(kind, &param.name);
                let found = tensor.map(|t| described(t.dtype, &t.shape));
                let expected = described(*dtype, &shape);
                if found.as_ref() != Some(&expected) {
                    let found = found.unwrap_or_else(|| "nothing".into());
                    return Err(differs(kind, &param.name, expected, found));
                }
            }
        }
        if verifies {
            checkpoint.verify()?;
        }
        Ok(checkpoint)
    }
}

fn described(dtype: DType, shape: &[u64]) -> String {
    format!("{dtype} {shape:?}")
}

/// Exchanges whether this rank succeeded. Every rank returns its own result, or an error if any rank failed.
fn together<T>(comm: &dyn Communicator, doing: &'static str, own: Result<T>) -> Result<T> {
    let cause = own.as_ref().err().map(ToString::to_string);
    let said = cause.as_deref().map(str::as_bytes).unwrap_or_default();
    let all = comm.all_gather_bytes(said, CommTag::new(doing, 0))?;
    let own = own?;
    match all.iter().position(|cause| !cause.is_empty()) {
        Some(rank) => Err(EngineError::OtherRank {
            rank,
            cause: String::from_utf8_lossy(&all[rank]).into_owned(),
        }),
        None => Ok(own),
    }
}

/// Compares the checkpoints that the ranks opened, by the hashes of all files.
fn same_on_all_ranks(comm: &dyn Communicator, checkpoint: &Checkpoint) -> Result<()> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&checkpoint.step().to_le_bytes());
    for file in checkpoint.files() {
        hasher.update(file.blake3.as_bytes());
    }
    let ours = hasher.finalize();
    let all = comm.all_gather_bytes(ours.as_bytes(), CommTag::new("checkpoint", 0))?;
    match all.iter().position(|theirs| theirs != ours.as_bytes()) {
        Some(rank) => Err(EngineError::CheckpointsDiffer { rank }),
        None => Ok(()),
    }
}
