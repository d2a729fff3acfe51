//! `plan.json`: what was known before the first weight was read.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Failure;
use crate::ui::{DataEvent, Event, PlanEvent, TrainRow};

/// File name in the run directory.
const FILE: &str = "plan.json";

/// Memory plan, trainable parameters and data of a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PlanFile {
    /// Planned bytes by kind, and the machine's memory.
    pub plan: Option<PlanEvent>,
    /// Trainable tensors by part of the model.
    #[serde(default)]
    pub trains: Vec<TrainRow>,
    /// Number and size of the samples and images.
    pub data: Option<DataEvent>,
}

impl PlanFile {
    /// Stores the content of an event of the preparation, if it belongs to the file.
    pub fn note(&mut self, event: &Event) {
        match event {
            Event::Plan(plan) => self.plan = Some(plan.clone()),
            Event::Trains(rows) => self.trains.clone_from(rows),
            Event::Data(data) => self.data = Some(data.clone()),
            _ => {}
        }
    }

    /// Writes `plan.json` into the run directory.
    ///
    /// # Errors
    /// When the file cannot be written (exit 16).
    pub fn save(&self, output: &Path) -> Result<(), Failure> {
        super::write_json(&output.join(FILE), self)
    }

    /// Reads `plan.json` from the run directory, if it exists.
    pub fn load(output: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(output.join(FILE)).ok()?).ok()
    }
}
