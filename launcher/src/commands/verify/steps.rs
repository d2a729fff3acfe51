//! Two training steps of a tiny model of the run's family on its GPUs, compared with the CPU. They go through real
//! ranks, with the run's transport, tiers, number formats, quantized weights and adapters.

use crate::commands::synth;
use crate::config::words::value_name;
use crate::config::{CudaGraph, PrecisionChoice, Products, RunConfig};
use crate::device::checks;
use crate::error::Failure;
use crate::launch::supervisor::own_program;
use crate::model::quantize;
use crate::rank_env::MATMUL;
use kernels::{DType, Quantization};
use models::Family;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Longest time of the steps on a device, kernels included.
const DEADLINE: Duration = Duration::from_secs(600);
/// Time between two looks at a process.
const LOOK: Duration = Duration::from_millis(20);
/// Samples and their length.
const SAMPLES: (usize, usize) = (8, 96);

/// Least rank of adapters whose moments have 8 bits: with fewer elements they would be f32, since tiny models are narrow.
const BLOCKWISE_RANK: usize = 96;

/// The tiny configuration of a family.
const fn tiny(family: Family) -> &'static str {
    match family {
        Family::MiniCpm => include_str!("tiny/minicpm.json"),
        Family::Glm4v => include_str!("tiny/glm4v.json"),
        Family::Glm41v => include_str!("tiny/glm41v.json"),
        Family::CogVlm => include_str!("tiny/cogvlm.json"),
        Family::CogVlm2 => include_str!("tiny/cogvlm2.json"),
        Family::CogAgent => include_str!("tiny/cogagent.json"),
    }
}

/// Losses and gradient norms of the steps.
type Numbers = Vec<f64>;

/// The tiny model of a run in a directory, with the CPU's numbers.
pub(super) struct Steps<'a> {
    config: &'a RunConfig,
    directory: &'a Path,
    want: Numbers,
}

impl<'a> Steps<'a> {
    /// Makes the model and trains it on the CPU.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub(super) fn begin(
        config: &'a RunConfig,
        directory: &'a Path,
    ) -> Result<Result<Self, String>, Failure> {
        let family = Family::of(&config.model_dir());
        let Ok(family) = family else {
            return Ok(Err("the model is of no known family".to_owned()));
        };
        let model = directory.join("model");
        let (count, tokens) = SAMPLES;
        synth::seeded(tiny(family), &model, count, tokens)?;
        let steps = Self {
            config,
            directory,
            want: Vec::new(),
        };
        let cpu = steps.train("cpu", &["--device", "cpu"], None);
        Ok(cpu.map(|want| Self { want, ..steps }))
    }

    /// Trains on the GPUs with these choices and returns the difference, if any.
    pub(super) fn differ(
        &self,
        products: Products,
        graphs: CudaGraph,
        collectives: &str,
    ) -> Option<String> {
        let (graphs, offload) = (value_name(graphs), self.config.offload.to_string());
        let device = [
            "--device",
            "cuda",
            "--cuda-graph",
            &graphs,
            "--collectives",
            collectives,
            "--offload",
            &offload,
        ];
        let name = format!("{products:?}-{graphs}-{collectives}");
        let got = match self.train(&name, &device, Some(products)) {
            Ok(got) => got,
            Err(why) => return Some(why),
        };
        difference(&got, &self.want, dtype(self.config.precision))
    }

    fn train(
        &self,
        name: &str,
        device: &[&str],
        products: Option<Products>,
    ) -> Result<Numbers, String> {
        let config = self.config;
        let output = self.directory.join(name);
        let model = self.directory.join("model");
        let mut words: Vec<String> = [
            "--verify-gpu off --max-steps 2 --logging-steps 1 --lr-scheduler-type constant",
            "--eval-strategy no --save-strategy no --per-device-train-batch-size 2",
            "--gradient-accumulation-steps 1 --error-format json",
        ]
        .iter()
        .flat_map(|words| words.split(' '))
        .map(str::to_owned)
        .collect();
        let ranks = config.world_size.min(2);
        for (flag, value) in [
            ("--model", model.display().to_string()),
            ("--data", model.join(synth::SAMPLES).display().to_string()),
            ("--output", output.display().to_string()),
            ("--precision", value_name(config.precision)),
            ("--zero", config.zero.to_string()),
            ("--nproc", ranks.to_string()),
        ] {
            words.extend([flag.to_owned(), value]);
        }
        words.extend(formats(config));
        words.extend(device.iter().map(|word| (*word).to_owned()));
        let program = own_program().map_err(|failure| failure.to_string())?;
        let log = self.directory.join(format!("{name}.log"));
        let screen = fs::File::create(&log).map_err(|error| error.to_string())?;
        let mut command = Command::new(program);
        command.args(&words).stdin(Stdio::null());
        let errors = screen.try_clone().map_err(|error| error.to_string())?;
        command.stdout(screen).stderr(errors);
        if let Some(products) = products {
            command.env(
                MATMUL,
                match products {
                    Products::Own => "own",
                    Products::CublasLt => "cublaslt",
                },
            );
        }
        let said = |why: String| {
            let text = fs::read_to_string(&log).unwrap_or_default();
            let end: Vec<&str> = text.lines().rev().take(4).collect();
            let end: Vec<&str> = end.into_iter().rev().map(str::trim).collect();
            format!("two steps of a tiny model: {why} {}", end.join(" "))
        };
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let end = Instant::now() + DEADLINE;
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if Instant::now() < end => thread::sleep(LOOK),
                _ => {
                    drop(child.kill());
                    drop(child.wait());
                    return Err(said("no end in time".to_owned()));
                }
            }
        };
        if !status.success() {
            return Err(said(status.to_string()));
        }
        numbers(&output).ok_or_else(|| said("no losses".to_owned()))
    }
}

/// Flags of the run's adapters, quantized weights and moments, for a tiny model.
pub(super) fn formats(config: &RunConfig) -> Vec<String> {
    let mut words = Vec::new();
    let mut add = |flag: &str, value: &str| words.extend([flag.to_owned(), value.to_owned()]);
    let eight_bit = config.numbers.eight_bit;
    if let Some(lora) = &config.trainable.lora {
        let least = if eight_bit { BLOCKWISE_RANK } else { 0 };
        add("--lora-rank", &lora.lora_rank.max(least).to_string());
    }
    if let Some(quantization) = quantize::quantization(config) {
        add("--quantize", quantization.name());
        if matches!(quantization, Quantization::FourBit { double: true, .. }) {
            add("--quantize-double", "true");
        }
        // Modules of the run need not exist in the tiny model.
        if config
            .quantize
            .as_ref()
            .is_some_and(|own| own.modules.is_some())
        {
            add("--quantize-modules", "all");
        }
    }
    if eight_bit {
        add("--moments", "8bit");
    }
    words
}

fn numbers(output: &Path) -> Option<Numbers> {
    let log = fs::read_to_string(output.join(crate::report::TRAINER_LOG)).ok()?;
    let rows = log.lines().map(serde_json::from_str::<Value>);
    let rows: Vec<Value> = rows.collect::<Result<_, _>>().ok()?;
    let all = rows
        .iter()
        .flat_map(|row| [row["loss"].as_f64(), row["grad_norm"].as_f64()]);
    let all: Numbers = all.flatten().collect();
    (all.len() >= 4).then_some(all)
}

const fn dtype(precision: PrecisionChoice) -> DType {
    match precision {
        PrecisionChoice::F32 => DType::F32,
        PrecisionChoice::Fp16 => DType::F16,
        PrecisionChoice::Bf16 | PrecisionChoice::PureBf16 => DType::BF16,
    }
}

fn difference(got: &[f64], want: &[f64], dtype: DType) -> Option<String> {
    let near = |(g, w): (&f64, &f64)| (g - w).abs() <= checks::allowed(dtype, w.abs());
    let is_near = got.len() == want.len() && got.iter().zip(want).all(near);
    (!is_near).then(|| {
        format!(
            "two steps of a tiny model: losses and gradient norms are {got:?} instead of {want:?}"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{self, Command as Subcommand, resolve};
    use crate::rank_env::Env;

    /// Flags of the steps before a run with these flags.
    fn formats_of(line: &str) -> String {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let Subcommand::Train { args, .. } = cli::parse(&words).expect("parses") else {
            panic!("a training line");
        };
        let env = Env::from_lookup(&|_| None).expect("an environment");
        let config = resolve(&args, &env).expect("resolves").config;
        formats(&config).join(" ")
    }

    #[test]
    fn steps_have_the_formats_of_the_run() {
        for (line, words) in [
            ("--lora-rank 8", "--lora-rank 8"),
            (
                "--lora-rank 8 --quantize nf4 --quantize-double --quantize-modules layers.30",
                "--lora-rank 8 --quantize nf4 --quantize-double true --quantize-modules all",
            ),
            (
                "--lora-rank 8 --quantize int8 --moments 8bit",
                "--lora-rank 96 --quantize int8 --moments 8bit",
            ),
            ("--moments 8bit", "--moments 8bit"),
        ] {
            assert_eq!(formats_of(line), words, "{line}");
        }
        // The directory decides without a flag.
        let directory = tempfile::tempdir().expect("temp dir");
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/minicpm-v-nf4");
        fs::copy(
            golden.join("config.json"),
            directory.path().join("config.json"),
        )
        .expect("copied");
        let of = format!(
            "--model {} --data d --output o --lora-rank 4",
            directory.path().display()
        );
        assert_eq!(
            formats_of(&of),
            "--lora-rank 4 --quantize nf4 --quantize-double true"
        );
    }

    #[test]
    fn numbers_that_are_not_near_differ() {
        let want = [7.0, 30.0];
        assert_eq!(difference(&[7.000_01, 30.0], &want, DType::F32), None);
        for got in [&[7.1, 30.0][..], &[7.0], &[f64::NAN, 30.0]] {
            assert!(difference(got, &want, DType::F32).is_some(), "{got:?}");
        }
        assert_eq!(difference(&[7.1, 30.0], &want, DType::BF16), None);
    }
}
