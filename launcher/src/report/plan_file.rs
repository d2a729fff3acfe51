//! `plan.json`: what was known before the first weight was read.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Failure;
use crate::ui::{DataEvent, Event, PlanEvent, QuantizedEvent, StagesEvent, TrainRow};

/// File name in the run directory.
const FILE: &str = "plan.json";

/// Content of `plan.json`: memory plan, trainable parameters and data of a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PlanFile {
    /// Memory plan: planned peak bytes of one rank by kind, and the machine's host memory.
    pub plan: Option<PlanEvent>,
    /// Trainable tensors by part of the model.
    #[serde(default)]
    pub trains: Vec<TrainRow>,
    /// Quantized weights of the base, if it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantized: Option<QuantizedEvent>,
    /// Pipeline stages, if there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stages: Option<StagesEvent>,
    /// Summary of the data: numbers of samples, tokens and images.
    pub data: Option<DataEvent>,
}

impl PlanFile {
    /// Stores the content of `event` if it is the memory plan, the trainable tensors, the quantized
    /// weights, the pipeline stages or the summary of the data. Ignores all other events.
    pub fn note(&mut self, event: &Event) {
        match event {
            Event::Plan(plan) => self.plan = Some(plan.clone()),
            Event::Trains(rows) => self.trains.clone_from(rows),
            Event::Quantized(weights) => self.quantized = Some(weights.clone()),
            Event::Stages(stages) => self.stages = Some(stages.clone()),
            Event::Data(data) => self.data = Some(data.clone()),
            _ => {}
        }
    }

    /// Writes `plan.json` into the run directory `output`.
    ///
    /// # Errors
    /// When the file cannot be written (exit 16).
    pub fn save(&self, output: &Path) -> Result<(), Failure> {
        super::write_json(&output.join(FILE), self)
    }

    /// Reads `plan.json` from the run directory `output`. `None` if it is missing or unreadable.
    pub fn load(output: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(output.join(FILE)).ok()?).ok()
    }
}
