//! Consequences of the facts for a run: a verdict, and findings with next steps.

mod gpu;
mod host;

use std::fmt::Display;

use serde::Serialize;

use super::facts::{Facts, Gpu};
use crate::lang::{Text, both, text};
use crate::units::bytes;
use kernels::{Codebook, Quantization, Shape};

/// Minimum compute capability that the kernels need.
const MINIMUM_CAPABILITY: (u32, u32) = (8, 0);

/// Verdict of the survey: the device that a run with `--device auto` would use on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// Kind of device: `cpu` or `cuda`.
    pub device: &'static str,
    /// CUDA ordinals of the GPUs that such a run would use; empty if it would use the CPU.
    pub gpus: Vec<u32>,
    /// Size of the frozen weights that the smallest of these GPUs could store. `None` without GPUs.
    pub frozen_params: Option<FrozenParams>,
    /// The verdict in words, one line for the terminal.
    #[serde(serialize_with = "Text::english")]
    pub summary: Text,
}

/// Largest number of frozen parameters whose weights alone fill a GPU's memory, by the format of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct FrozenParams {
    /// In bf16 or fp16.
    pub in_16_bits: u64,
    /// With `--quantize nf4 --quantize-double`.
    pub in_4_bits: u64,
}

impl FrozenParams {
    fn of(memory_bytes: u64) -> Self {
        let shape = Shape::new(&[1 << 12, 1 << 12]);
        let bytes = Quantization::four_bit(Codebook::Nf4, true).bytes(shape);
        let in_4_bits = u128::from(memory_bytes) * shape.elems() as u128 / bytes as u128;
        Self {
            in_16_bits: memory_bytes / 2,
            in_4_bits: in_4_bits as u64,
        }
    }
}

/// One finding of the survey of a machine, with next steps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable identifier for programs, such as `memory-low`.
    pub id: &'static str,
    /// How much the finding matters for a run.
    pub severity: Severity,
    /// What was found, in one sentence without a final period.
    #[serde(serialize_with = "Text::english")]
    pub title: Text,
    /// Next steps for the user, one line each.
    #[serde(serialize_with = "Text::english_list")]
    pub next: Vec<Text>,
}

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Something cannot work.
    Problem,
    /// Something works worse than it could.
    Warning,
    /// Information only.
    Note,
}

/// Judges the facts: the most important findings first.
pub(crate) fn judge(facts: &Facts) -> (Verdict, Vec<Finding>) {
    let mut findings = Findings::default();
    host::launch(facts, &mut findings);
    gpu::driver(facts, &mut findings);
    gpu::devices(facts, &mut findings);
    gpu::together(facts, &mut findings);
    gpu::libraries(facts, &mut findings);
    host::memory(facts, &mut findings);
    host::storage(facts, &mut findings);
    host::environment(facts, &mut findings);
    let mut findings = findings.0;
    findings.sort_by_key(|finding| finding.severity);
    (verdict(facts), findings)
}

/// The findings about GPUs, driver and libraries alone.
pub(crate) fn of_gpus(facts: &Facts) -> Vec<Finding> {
    let mut findings = Findings::default();
    gpu::driver(facts, &mut findings);
    gpu::devices(facts, &mut findings);
    gpu::together(facts, &mut findings);
    gpu::libraries(facts, &mut findings);
    let mut findings = findings.0;
    findings.sort_by_key(|finding| finding.severity);
    findings
}

/// Whether all GPUs that runs could use are of one kind; unknown for fewer than two.
pub(crate) fn are_equal(facts: &Facts) -> Option<bool> {
    let gpus: Vec<&Gpu> = facts.gpus.iter().filter(|gpu| is_usable(gpu)).collect();
    let (first, rest) = gpus.split_first()?;
    (!rest.is_empty()).then(|| rest.iter().all(|gpu| gpu::is_alike(first, gpu)))
}

fn verdict(facts: &Facts) -> Verdict {
    let usable: Vec<&Gpu> = facts.gpus.iter().filter(|gpu| is_usable(gpu)).collect();
    let version = facts.cuda.cuda_version;
    let is_new_enough = version.is_none() || version >= facts.cuda.minimum_cuda_version;
    let could_use = !usable.is_empty() && is_new_enough;
    if !could_use {
        let cores = facts.cpu.usable_cores;
        let memory = bytes(facts.memory.usable_bytes);
        let summary = match cores {
            1 => text!(
                "runs use the CPU: 1 core, {memory} of host memory",
                "运行使用 CPU：1 个核心，主机内存 {memory}"
            ),
            _ => text!(
                "runs use the CPU: {cores} cores, {memory} of host memory",
                "运行使用 CPU：{cores} 个核心，主机内存 {memory}"
            ),
        };
        return Verdict {
            device: "cpu",
            gpus: Vec::new(),
            frozen_params: None,
            summary,
        };
    }
    let names: Vec<Text> = usable
        .iter()
        .map(|gpu| {
            let memory = gpu
                .free_bytes
                .or(gpu.memory_bytes)
                .map(bytes)
                .unwrap_or_default();
            text!(
                "{} {}, {memory} free",
                "{} {}，空闲 {memory}",
                gpu.label(),
                gpu.product()
            )
        })
        .collect();
    let smallest = usable.iter().filter_map(|gpu| gpu.memory_bytes).min();
    Verdict {
        device: "cuda",
        gpus: usable.iter().filter_map(|gpu| gpu.ordinal).collect(),
        frozen_params: smallest.map(FrozenParams::of),
        summary: text!(
            "runs with --device cuda or auto use {}; without it the CPU",
            "带 --device cuda 或 auto 的运行使用 {}；否则使用 CPU",
            Text::each(|| {
                let separator = both("; ", "；").to_string();
                Text::join(&names, &separator).to_string()
            })
        ),
    }
}

/// Whether the GPU is visible to CUDA and the kernels run on it.
pub(crate) fn is_usable(gpu: &Gpu) -> bool {
    gpu.ordinal.is_some() && gpu.compute_capability >= Some(MINIMUM_CAPABILITY)
}

#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn problem(&mut self, id: &'static str, title: impl Into<Text>, next: Next<'_>) {
        self.add(Severity::Problem, id, title.into(), next);
    }

    fn warning(&mut self, id: &'static str, title: impl Into<Text>, next: Next<'_>) {
        self.add(Severity::Warning, id, title.into(), next);
    }

    fn note(&mut self, id: &'static str, title: impl Into<Text>, next: Next<'_>) {
        self.add(Severity::Note, id, title.into(), next);
    }

    fn add(&mut self, severity: Severity, id: &'static str, title: Text, next: Next<'_>) {
        self.0.push(Finding {
            id,
            severity,
            title,
            next: next
                .iter()
                .map(|step| Text::each(|| step.to_string()))
                .collect(),
        });
    }
}

/// Next steps of a finding.
type Next<'a> = &'a [&'a dyn Display];
