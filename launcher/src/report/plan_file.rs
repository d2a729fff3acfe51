//! `plan.json`: what was known before the first weight was read.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Failure;
use crate::ui::{DataEvent, Event, PlanEvent, TrainRow};

/// File name in the run's folder.
const FILE: &str = "plan.json";

/// The memory plan, what trains, and the data.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PlanFile {
    /// Bytes by kind, and what the machine has.
    pub plan: Option<PlanEvent>,
    /// Tensors that train, by part of the model.
    #[serde(default)]
    pub trains: Vec<TrainRow>,
    /// What the data holds.
    pub data: Option<DataEvent>,
}

impl PlanFile {
    /// Keeps what an event of the preparation tells.
    pub fn note(&mut self, event: &Event) {
        match event {
            Event::Plan(plan) => self.plan = Some(plan.clone()),
            Event::Trains(rows) => self.trains.clone_from(rows),
            Event::Data(data) => self.data = Some(data.clone()),
            _ => {}
        }
    }

    /// Writes `plan.json` into the run's folder.
    ///
    /// # Errors
    /// The file cannot be written (exit 16).
    pub fn save(&self, output: &Path) -> Result<(), Failure> {
        super::write_json(&output.join(FILE), self)
    }

    /// Reads it from there, if it is there.
    pub fn load(output: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(output.join(FILE)).ok()?).ok()
    }
}
