//! Test that the cases of `scripts/gpu-check.sh --stages headline` fit their caps, by plans of published
//! configurations. A case that exceeds a cap states the reason. The statement must be removed when the case fits.

use super::configuration;
use super::nearest::nearest;
use super::planner::Planner;
use crate::cli::{self, Command};
use crate::config::RunConfig;
use crate::device::Nvidia;
use crate::model::optimizer::rule;
use crate::plan::backward_share;
use crate::rank_env::Env;
use crate::units::parse_bytes;
use optim::Optimizer as _;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Host memory of a machine without a practical limit.
const AMPLE: &str = "4TiB";

/// Fields of a case that a plan needs. `scripts/gpu_headline.py` reads the others.
#[derive(Debug, Deserialize)]
pub(super) struct Case {
    pub(super) name: String,
    model: String,
    ranks: usize,
    device_cap: String,
    host_cap: Option<String>,
    flags: Vec<String>,
    saves: Option<bool>,
    /// Number of layers, if the machine's disk or memory limits it.
    layers: Option<Layers>,
    /// Fields that the case changes in the published configuration.
    #[serde(default)]
    model_config: serde_json::Map<String, Value>,
    /// Caps that the plan exceeds (`device`, `host`), with the reason.
    #[serde(default)]
    beyond: BTreeMap<String, String>,
}

/// Number of layers of a model, and the smallest number that a check may run.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Layers {
    all: u64,
    least: u64,
    /// Smallest fraction of elements that must be updated during backward.
    early: Option<f64>,
}

impl Case {
    /// Writes the configuration of the case into `directory` and returns its path.
    fn config(&self, directory: &Path) -> PathBuf {
        let published = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("src/commands/synth/configs")
            .join(format!("{}.json", self.model));
        let text = std::fs::read(published).expect("a published configuration");
        let mut config: Value = serde_json::from_slice(&text).expect("JSON");
        for (field, value) in &self.model_config {
            config[field] = value.clone();
        }
        let path = directory.join("config.json");
        std::fs::write(&path, config.to_string()).expect("written");
        path
    }
}

pub(super) fn cases() -> Vec<Case> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/headline.json");
    let text = std::fs::read(file).expect("the cases");
    serde_json::from_slice(&text).expect("a list of cases")
}

impl Case {
    /// Whether the cases differ in nothing that a plan depends on, but for instance in a variable.
    pub(super) fn plans_as(&self, other: &Self) -> bool {
        let key = |case: &Self| (case.model.clone(), case.ranks, case.device_cap.clone());
        key(self) == key(other) && self.flags == other.flags
    }

    /// The case with its layers on `stages` pipeline stages.
    pub(super) fn in_stages(mut self, stages: usize, micro_batches: usize) -> Self {
        self.ranks = stages;
        let flags = format!("--mp-size {stages} --gradient-accumulation-steps {micro_batches}");
        self.flags.extend(flags.split(' ').map(str::to_owned));
        self
    }

    /// Planner and configuration of the case, on a described machine with the case's caps.
    pub(super) fn planner(&self, directory: &Path) -> (Planner, RunConfig) {
        let config = self.config(directory);
        let mut words = vec!["plan".to_owned(), "--model".to_owned()];
        words.push(config.display().to_string());
        let hw = format!("{}x{}", self.ranks, self.device_cap);
        // The cap is what a run may take, as a container's limit.
        let cap = self.host_cap.as_deref().unwrap_or(AMPLE);
        let save = match self.saves {
            Some(true) => "steps",
            _ => "no",
        };
        let machine = format!(
            "--no-weights true --device cuda --hw {hw} --ram {AMPLE} --host-memory-limit {cap} --save-strategy {save} --eval-strategy no"
        );
        words.extend(machine.split(' ').map(str::to_owned));
        words.extend(self.flags.iter().cloned());
        let parsed = cli::parse(&words).expect("parses");
        let Command::Plan { args, .. } = parsed else {
            panic!("a line of `launcher plan`");
        };
        let env = Env::from_lookup(&|_| None).expect("an environment");
        let config = configuration(&args, &env, false, &Nvidia).expect("resolves");
        let planner = Planner::new(&config, &args, false).expect("a planner");
        (planner, config)
    }
}

#[test]
fn every_headline_case_fits_its_caps_or_says_why_not() {
    let cases = cases();
    assert!(cases.len() >= 7);
    let temp = tempfile::tempdir().expect("temp dir");
    let mut wrong = Vec::new();
    for case in cases {
        let (planner, config) = case.planner(temp.path());
        let planned = planner.plan(&config).expect("a plan");
        let needs = planned.fit.needs();
        let cap = parse_bytes(&case.device_cap).expect("bytes");
        assert_eq!(planned.fit.device_limit(), Some(cap), "{}", case.name);
        let exceeds = [
            ("device", planned.fit.exceeds_device()),
            ("host", planned.fit.exceeds_host()),
        ];
        for (what, exceeds) in exceeds {
            if exceeds != case.beyond.contains_key(what) {
                let name = &case.name;
                wrong.push(format!(
                    "{name}, {what}: {needs}, stated: {:?}",
                    case.beyond
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "not as the caps say: {wrong:#?}");
}

/// The plan of a quantized base has the largest layer in bf16: the weights that one lease dequantizes.
#[test]
fn quantized_headline_cases_plan_their_largest_layer_in_bf16() {
    let temp = tempfile::tempdir().expect("temp dir");
    let cases = cases()
        .into_iter()
        .filter(|case| case.name.ends_with("-qlora"));
    let mut seen = Vec::new();
    for case in cases {
        let (planner, config) = case.planner(temp.path());
        let planned = planner.plan(&config).expect("a plan");
        let report = planned
            .plan
            .memory(rule(&config).slots(planned.plan.config().precision));
        seen.push((case.name, report.gathered));
    }
    // Both have two experts per layer. Those of CogVLM: query, key, value, output, and three projections of the MLP.
    // Those of CogVLM2 share a smaller number of keys and values among queries.
    let layer = |kv: u64, inner: u64| 2 * 2 * (2 * 4096 * 4096 + 2 * 4096 * kv + 3 * 4096 * inner);
    let expected = [
        ("cogvlm-qlora".to_owned(), layer(4096, 11_008)),
        ("cogvlm2-qlora".to_owned(), layer(1024, 14_336)),
    ];
    assert_eq!(seen, expected);
}

/// If the disk limits the number of layers, the run fits the host cap scaled by parameters, as the check scales it.
#[test]
fn fewer_layers_fit_a_cap_scaled_by_parameters() {
    let temp = tempfile::tempdir().expect("temp dir");
    let mut seen = 0;
    for mut case in cases() {
        let (Some(Layers { all, least, .. }), Some(cap)) = (case.layers, &case.host_cap) else {
            continue;
        };
        seen += 1;
        let cap = parse_bytes(cap).expect("bytes");
        let mut of = |layers: u64, cap: u64| {
            let field = "num_hidden_layers".to_owned();
            case.model_config.insert(field, layers.into());
            case.host_cap = Some(cap.to_string());
            let (planner, config) = case.planner(temp.path());
            let planned = planner.plan(&config).expect("a plan");
            (planned.plan.spec().elems().0 as u128, planned.fit)
        };
        let (parameters, _) = of(all, cap);
        for layers in [all, 24, 16, 8, least] {
            let (n, _) = of(layers, cap);
            let scaled = (u128::from(cap) * n / parameters) as u64;
            let (_, fit) = of(layers, scaled);
            assert!(
                !fit.exceeds_host(),
                "{layers} layers, {scaled} bytes: {}",
                fit.needs()
            );
        }
    }
    assert!(seen > 0, "no case has layers to choose");
}

/// Number of layers that the check runs on a machine of 128 GiB. They fit the GPU cap. With one more layer, too
/// little host memory would remain for updates in backward.
#[test]
fn fewer_layers_leave_memory_for_the_optimizer_in_backward() {
    let temp = tempfile::tempdir().expect("temp dir");
    let mut seen = 0;
    for mut case in cases() {
        let (layers, early) = match case.layers {
            Some(layers) if layers.early.is_some() => (layers, layers.early.unwrap_or(1.0)),
            _ => continue,
        };
        seen += 1;
        assert!(case.host_cap.is_none(), "{}", case.name);
        case.host_cap = Some("128GiB".to_owned());
        let mut fits = |layers: u64| {
            let field = "num_hidden_layers".to_owned();
            case.model_config.insert(field, layers.into());
            let (planner, config) = case.planner(temp.path());
            let planned = planner.plan(&config).expect("a plan");
            let share = backward_share(&planned.plan);
            (planned.fit.fits() && share >= early, share, planned.fit)
        };
        let choices: Vec<u64> = (layers.least..=layers.all).collect();
        let room = choices.partition_point(|layers| fits(*layers).0);
        assert!((1..choices.len()).contains(&room), "{room} choices");
        let most = choices[room - 1];
        let (_, share, fit) = fits(most);
        assert!(
            share < early + 0.1,
            "{most} layers, {share} of the elements"
        );
        assert!(!fit.exceeds_device(), "{most} layers: {}", fit.needs());
    }
    assert!(seen > 0, "no case has early updates to make room for");
}

/// If GPUs lack memory for peer-access collectives, collectives through host memory are suggested.
#[test]
fn collectives_through_the_host_are_suggested_where_gpus_lack_memory() {
    let mut cases = cases();
    let case = cases.iter_mut().find(|case| case.name == "minicpm-v-lora");
    let case = case.expect("the case");
    let temp = tempfile::tempdir().expect("temp dir");
    let mut device_need = |how: &str, cap: Option<u64>| {
        let flag = case.flags.iter().position(|word| word == "--collectives");
        case.flags[flag.expect("its collectives") + 1] = how.to_owned();
        case.device_cap = cap.map_or_else(|| "80GiB".to_owned(), |cap| cap.to_string());
        let (planner, config) = case.planner(temp.path());
        let config = config.without_spare();
        let fit = planner.plan(&config).expect("a plan").fit;
        (fit.need.device, fit, planner, config)
    };
    let (mapped, ..) = device_need("ipc", None);
    let (staged, ..) = device_need("shm", None);
    assert!(
        staged < mapped,
        "shards that GPUs map stay on them: {staged} {mapped}"
    );
    let (_, fit, planner, config) = device_need("ipc", Some(staged.midpoint(mapped)));
    assert!(fit.exceeds_device(), "{}", fit.needs());
    let found = nearest(&planner, &config).expect("candidates");
    let flags = &found.first().expect("one that fits").flags;
    assert_eq!(*flags, [("collectives", "shm".to_owned())]);
}
