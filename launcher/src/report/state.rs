//! `trainer_state.json` with the fields of Hugging Face's `Trainer`.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{EvalResults, StepRecord, write_json};
use crate::config::BestSoFar;
use crate::error::Failure;

const FILE: &str = "trainer_state.json";

/// Values of `trainer_state.json` that are constant during a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainerStateConfig {
    /// Number of optimizer steps of the whole run.
    pub max_steps: u64,
    /// Number of passes over the training data in the whole run, rounded up.
    pub num_train_epochs: u64,
    /// Number of samples in a micro-batch of one rank.
    pub train_batch_size: usize,
    /// Number of steps between two rows of the training log; `max_steps` if logging does not follow a number
    /// of steps.
    pub logging_steps: u64,
    /// Number of steps between two evaluations; `max_steps` if evaluation does not follow a number of steps.
    pub eval_steps: u64,
    /// Number of steps between two checkpoints; `max_steps` if saving does not follow a number of steps.
    pub save_steps: u64,
}

/// Content of `trainer_state.json`, which has the fields of Hugging Face's `Trainer` and grows with the run.
#[derive(Debug, Clone)]
pub struct TrainerState {
    config: TrainerStateConfig,
    global_step: u64,
    epoch: f64,
    tokens: u64,
    best: Option<(f64, u64)>,
    /// Directory of the best checkpoint, if the run keeps it.
    best_checkpoint: Option<String>,
    /// Whether the run names the best evaluation itself.
    has_rule: bool,
    history: Vec<Value>,
}

impl TrainerState {
    /// State of a run after `done_steps` completed steps. Keeps the rows up to that step from an existing
    /// `trainer_state.json` in the run directory `output`.
    pub fn open(output: &Path, config: TrainerStateConfig, done_steps: u64) -> Self {
        let old: Value = fs::read(output.join(FILE))
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default();
        let history: Vec<Value> = old["log_history"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|row| row["step"].as_u64().is_some_and(|step| step <= done_steps))
            .cloned()
            .collect();
        let mut state = Self {
            config,
            global_step: done_steps,
            epoch: 0.0,
            tokens: 0,
            best: None,
            best_checkpoint: None,
            has_rule: false,
            history,
        };
        let evals: Vec<(f64, u64)> = state
            .history
            .iter()
            .filter_map(|row| Some((row["eval_loss"].as_f64()?, row["step"].as_u64()?)))
            .collect();
        for (loss, step) in evals {
            state.note_best(loss, step);
        }
        state.epoch = state
            .history
            .last()
            .and_then(|row| row["epoch"].as_f64())
            .unwrap_or(0.0);
        state
    }

    pub(super) fn on_step(&mut self, record: &StepRecord) {
        self.global_step = record.step;
        self.epoch = record.epoch;
        self.tokens = record.total_tokens;
        self.history.push(json!({
            "epoch": record.epoch,
            "grad_norm": record.grad_norm,
            "learning_rate": record.lr,
            "loss": record.loss,
            "step": record.step,
        }));
    }

    pub(super) fn on_eval(&mut self, results: &EvalResults) {
        self.global_step = results.step;
        self.note_best(results.eval_loss, results.step);
        self.history.push(json!({
            "epoch": results.epoch,
            "eval_loss": results.eval_loss,
            "eval_exact_match": results.exact_match,
            "eval_runtime": results.eval_runtime,
            "eval_samples_per_second": results.eval_samples_per_second,
            "step": results.step,
        }));
    }

    /// Takes the best evaluation by the run's own rule, and the directory of its checkpoint.
    pub(super) fn set_best(&mut self, best: BestSoFar, checkpoint: Option<String>) {
        self.best = Some((best.value, best.step));
        self.best_checkpoint = checkpoint;
        self.has_rule = true;
    }

    fn note_best(&mut self, loss: f64, step: u64) {
        if !self.has_rule && self.best.is_none_or(|(best, _)| loss < best) {
            self.best = Some((loss, step));
        }
    }

    pub(super) fn save(&self, directory: &Path) -> Result<(), Failure> {
        let config = &self.config;
        let state = json!({
            "best_global_step": self.best.map(|(_, step)| step),
            "best_metric": self.best.map(|(loss, _)| loss),
            "best_model_checkpoint": self.best_checkpoint,
            "epoch": self.epoch,
            "eval_steps": config.eval_steps,
            "global_step": self.global_step,
            "is_hyper_param_search": false,
            "is_local_process_zero": true,
            "is_world_process_zero": true,
            "log_history": self.history,
            "logging_steps": config.logging_steps,
            "max_steps": config.max_steps,
            "num_input_tokens_seen": self.tokens,
            "num_train_epochs": config.num_train_epochs,
            "save_steps": config.save_steps,
            "stateful_callbacks": {},
            "total_flos": 0.0,
            "train_batch_size": config.train_batch_size,
            "trial_name": null,
            "trial_params": null,
        });
        write_json(&directory.join(FILE), &state)
    }
}
