//! Resolved plan of a run: a [`RunConfig`] without `auto`, and the results of planning.

use super::{Collectives, OptimizerInBackward, Origin, PrefetchWeights, RunConfig, ZeroAuto};
use crate::error::{ErrorCode, Failure};
use crate::lang::{Text, both, text};
use serde::ser::{Error, SerializeMap};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};
use std::fs;
use std::ops::Deref;
use std::path::Path;

/// File name of a run's saved plan ([`RunPlan`]) inside the run directory.
pub const CONFIG_FILE: &str = "config.resolved.json";

/// Resolved plan of a run: the configuration with every choice made, and the results of planning. The
/// supervisor saves it; ranks read it and make no choices.
///
/// A plan is immutable: during planning, each choice creates a new plan.
#[derive(Debug, Clone, PartialEq)]
pub struct RunPlan {
    config: RunConfig,
    found: Found,
}

/// Results without a flag of their own, from the ranks, the data check or planning.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Found {
    /// Why a rank was refused access to another GPU's memory. If set, the ranks exchange through host memory.
    #[serde(default)]
    pub(crate) ipc_refused: Option<String>,
    /// Bytes of the arena that each rank allocates on its GPU at the start; 0 on the CPU.
    #[serde(default)]
    pub(crate) arena_bytes: u64,
    /// Indices of the samples of the first update. Empty: the shuffled order.
    pub(crate) first_samples: Vec<usize>,
    /// Peak bytes of activations in a rank's spill file.
    pub(crate) spilled_activation_bytes: u64,
    /// Most bytes that the decoding of one image takes; 0 without images. `None`: the images are not known.
    #[serde(default)]
    pub(crate) image_bytes: Option<u64>,
    /// Most bytes that cross each boundary between pipeline stages at once, in one direction. Empty without stages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) boundary_bytes: Vec<u64>,
    /// What the run trains on. `None` in plans of earlier versions.
    #[serde(default)]
    pub(crate) origin: Option<Origin>,
    /// Differences from its checkpoint that `--resume-anyway` accepted, now or earlier.
    #[serde(default)]
    pub(crate) resumed_anyway: Vec<String>,
}

impl Deref for RunPlan {
    type Target = RunConfig;

    fn deref(&self) -> &RunConfig {
        &self.config
    }
}

impl RunPlan {
    /// Draft of a run without results of planning. `ipc_refused` comes from the previous attempt.
    pub(crate) fn draft(config: RunConfig, ipc_refused: Option<String>) -> Self {
        let found = Found {
            ipc_refused,
            ..Found::default()
        };
        Self { config, found }
    }

    /// Configuration of the run, with the choices made so far.
    pub(crate) fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Results that have no flag of their own, from the ranks, the data check or planning.
    pub(crate) fn found(&self) -> &Found {
        &self.found
    }

    /// Copy of this plan with `config` as its configuration. The results of planning stay the same.
    pub(crate) fn with_config(&self, config: RunConfig) -> Self {
        let found = self.found.clone();
        Self { config, found }
    }

    /// Copy of this plan with `found` as its results. The configuration stays the same.
    pub(crate) fn with_found(&self, found: Found) -> Self {
        let config = self.config.clone();
        Self { config, found }
    }

    /// Copy of this plan with another setting of the optimizer in backward.
    pub(crate) fn with_optimizer_in_backward(
        &self,
        optimizer_in_backward: OptimizerInBackward,
    ) -> Self {
        self.with_config(RunConfig {
            optimizer_in_backward,
            ..self.config.clone()
        })
    }

    /// Copy of this plan with the stage `zero` that `--zero auto` took because of `why`.
    pub(crate) fn with_stage(&self, zero: u8, why: ZeroAuto) -> Self {
        self.with_config(RunConfig {
            zero,
            zero_auto: Some(why),
            ..self.config.clone()
        })
    }

    /// Copy of this plan with another setting of the weight prefetch.
    pub(crate) fn with_prefetch_weights(&self, prefetch_weights: PrefetchWeights) -> Self {
        self.with_config(RunConfig {
            prefetch_weights,
            ..self.config.clone()
        })
    }

    /// Transport of collectives between GPUs; never `Auto`.
    pub(crate) fn resolved_collectives(&self) -> Collectives {
        match (self.config.collectives, &self.found.ipc_refused) {
            (Collectives::Auto, Some(_)) => Collectives::Shm,
            _ => self.config.resolved_collectives(),
        }
    }

    /// JSON of all settings that must be equal on all ranks. Memory limits, reserve and GPUs of the machine are left out.
    pub(crate) fn common_part(&self) -> Vec<u8> {
        let config = RunConfig {
            ranks_here: None,
            ranks_per_gpu: None,
            host_memory_limit: None,
            host_reserve: None,
            device_memory_limit: None,
            gpus: Vec::new(),
            ..self.config.clone()
        };
        let found = Found {
            arena_bytes: 0,
            ..self.found.clone()
        };
        serde_json::to_vec(&Self { config, found }).unwrap_or_default()
    }

    /// Writes the plan to the file `path` as JSON.
    ///
    /// # Errors
    /// The file cannot be written (exit 16).
    pub fn save_to(&self, path: &Path) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(self).map_err(|error| {
            Failure::usage(
                both("the configuration cannot be saved", "无法保存配置"),
                Text::literal(&error),
            )
        })?;
        fs::write(path, text + "\n")
            .map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), path, &error))
    }

    /// Reads a plan that [`RunPlan::save_to`] wrote.
    ///
    /// # Errors
    /// The file cannot be read, or has unknown or missing keys (exit 2).
    pub fn load_from(path: &Path) -> Result<Self, Failure> {
        let text = fs::read_to_string(path)
            .map_err(|error| Failure::io(ErrorCode::Usage, both("read", "读取"), path, &error))?;
        let refused = |cause: Text| {
            Failure::usage(
                text!(
                    "{} is not a run configuration",
                    "{} 不是运行配置",
                    path.display()
                ),
                cause,
            )
        };
        let mut config: Map<String, Value> =
            serde_json::from_str(&text).map_err(|error| refused(Text::literal(&error)))?;
        let mut found = Map::new();
        for (_, key) in PLACES {
            found.extend(
                config
                    .shift_remove(key)
                    .map(|value| (key.to_owned(), value)),
            );
        }
        let found = serde_json::from_value(Value::Object(found))
            .map_err(|error| refused(Text::literal(&error)))?;
        let config = serde_path_to_error::deserialize(Value::Object(config)).map_err(|error| {
            refused(Text::literal(error.inner())).evidence(text!("at {}", "位置 {}", error.path()))
        })?;
        Ok(Self { config, found })
    }
}

/// Position of the fields of [`Found`] in the file, as (preceding key of the configuration, field), in file order.
const PLACES: [(&str, &str); 8] = [
    ("collectives", "ipc_refused"),
    ("upload_ahead", "arena_bytes"),
    ("seed", "first_samples"),
    ("seed", "spilled_activation_bytes"),
    ("seed", "image_bytes"),
    ("seed", "boundary_bytes"),
    ("resume_anyway", "origin"),
    ("resume_anyway", "resumed_anyway"),
];

impl Serialize for RunPlan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let object = |value: Result<Value, serde_json::Error>| match value {
            Ok(Value::Object(fields)) => Ok(fields),
            Ok(_) => Err(S::Error::custom("not an object")),
            Err(error) => Err(S::Error::custom(error)),
        };
        let found = object(serde_json::to_value(&self.found))?;
        let mut map = serializer.serialize_map(None)?;
        for (key, value) in &object(serde_json::to_value(&self.config))? {
            map.serialize_entry(key, value)?;
            for (_, own) in PLACES.iter().filter(|(before, _)| before == key) {
                if let Some(value) = found.get(*own) {
                    map.serialize_entry(own, value)?;
                }
            }
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Args, resolve};
    use crate::rank_env::Env;

    fn plan() -> RunPlan {
        let env = Env::from_lookup(&|_| None).expect("reads");
        let args = Args {
            output: Some("/runs/a".into()),
            ..Args::default()
        };
        let config = resolve(&args, &env).expect("resolves").config;
        RunPlan::draft(config, Some("rank 1 was refused".to_owned())).with_found(Found {
            ipc_refused: Some("rank 1 was refused".to_owned()),
            arena_bytes: 7,
            first_samples: vec![3, 1],
            spilled_activation_bytes: 9,
            image_bytes: Some(11),
            boundary_bytes: vec![13],
            origin: Some(Origin::default()),
            resumed_anyway: vec!["--lora-alpha".to_owned()],
        })
    }

    #[test]
    fn the_file_has_what_was_found_among_the_keys_of_the_configuration() {
        let value = serde_json::to_value(plan()).expect("serializes");
        let fields = value.as_object().expect("an object");
        let keys: Vec<&str> = fields.keys().map(String::as_str).collect();
        let all = keys.windows(3).collect::<Vec<_>>();
        for found in [
            ["collectives", "ipc_refused", "offload"],
            ["upload_ahead", "arena_bytes", "precision"],
            ["seed", "first_samples", "spilled_activation_bytes"],
            ["image_bytes", "boundary_bytes", "resume"],
        ] {
            assert!(all.contains(&&found[..]), "{found:?} in {keys:?}");
        }
        assert_eq!(value["nproc"], 2);
    }

    #[test]
    fn a_saved_plan_is_read_back() {
        let directory = tempfile::tempdir().expect("temp dir");
        let path = directory.path().join(CONFIG_FILE);
        plan().save_to(&path).expect("saved");
        assert_eq!(RunPlan::load_from(&path).expect("loaded"), plan());
    }

    #[test]
    fn ranks_that_were_refused_exchange_through_host_memory() {
        assert_eq!(plan().resolved_collectives(), Collectives::Shm);
    }
}
