//! Verification of this machine's GPUs on the operations of a run, before it is planned.
//!
//! A process for each GPU compares the operations that the run uses with the CPU. Then two ranks take two steps of a tiny
//! model of the run's family, and the losses are compared. What fails falls back where a switch exists: the other
//! products, no graphs, host memory between ranks. The choice is made once for all ranks. The result is kept for each
//! combination of GPU, driver, libraries, kernels and choices.

pub(super) mod child;
mod steps;

use super::{Hooks, demo, doctor};
use crate::cli::{Args, resolve_on};
use crate::config::words::value_name;
use crate::config::{
    Collectives, CudaGraph, Device, DeviceChoice, Products, RunConfig, RunGpu, Tier, VerifyGpu,
};
use crate::device;
use crate::device::checks::{self, Cover};
use crate::device::survey::facts::Cuda;
use crate::device::survey::gather;
use crate::error::{ErrorCode, Failure};
use crate::lang::{Text, both, text};
use crate::launch::supervisor::job::Job;
use crate::launch::supervisor::own_program;
use crate::plan::{check_kernels, kernels_of};
use crate::rank_env::{Env, Matmul, Variables};
use crate::ui::{Event, Screen};
use crate::units::{bytes, seconds};
use child::{Found, Request};
use kernels::footprint;
use models::Family;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

/// Directory of kept results, inside the cache directory.
const KEPT: &str = "verified";
/// File that `launcher doctor --verify-gpu` writes.
const REPORT: &str = "gpu-verification.json";
/// Most differences that a report shows.
const SHOWN: usize = 5;

/// A run on verified GPUs.
#[derive(Debug)]
pub(super) struct Proven {
    pub(super) config: RunConfig,
    /// Why ranks exchange through host memory, if the verification says so.
    pub(super) ipc_refused: Option<String>,
}

/// Result of a verification, as it is kept.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Verdict {
    /// Number of checks that passed on each GPU.
    checks: usize,
    /// Checks without kernels on this machine.
    no_kernel: Vec<String>,
    /// Kernels of the run that only the steps launched.
    uncovered: Vec<String>,
    /// Products that were right, if others were asked for.
    products: Option<Products>,
    /// Whether CUDA graphs are off.
    without_graphs: bool,
    /// Why ranks exchange through host memory.
    ipc_refused: Option<String>,
    /// Memory of a GPU that a process takes beyond the plan's assumption, in bytes.
    excess_bytes: u64,
    /// What failed before another choice was right.
    fell_back: Vec<String>,
    seconds: f64,
}

/// Verifies the GPUs of `config`, or reads the kept result. `with_steps` is false where another launcher started this
/// process as a rank: it then starts no ranks. Lines about it go to `show`.
///
/// # Errors
/// A kernel of the run is neither built in nor can it be compiled (exit 13), a GPU is wrong and no other choice is right
/// (exit 13), or a file cannot be written.
pub(super) fn prove(
    hooks: &Hooks,
    env: &Env,
    config: RunConfig,
    with_steps: bool,
    show: &mut dyn FnMut(Event),
) -> Result<Proven, Failure> {
    check_kernels(&config)?;
    if config.device == Device::Cpu || config.verify_gpu == VerifyGpu::Off {
        return Ok(Proven {
            config,
            ipc_refused: None,
        });
    }
    let variables = Variables::read();
    let run = Run {
        env,
        config: &config,
        with_steps,
        matmul: variables.matmul()?,
        covers: config
            .gpus
            .iter()
            .map(|gpu| cover(&config, gpu))
            .collect::<Result<_, _>>()?,
    };
    let file = run.file(&hooks.devices.survey(&variables).0, &variables);
    // Other ranks of this machine wait for the one that verifies.
    let _turn = turn(&file);
    let known = match config.verify_gpu {
        VerifyGpu::Full => None,
        _ => fs::read(&file).ok(),
    };
    let known = known.and_then(|text| serde_json::from_slice::<Verdict>(&text).ok());
    let verdict = match &known {
        Some(verdict) => verdict.clone(),
        None => run.verify()?,
    };
    if known.is_none() {
        // Without the file the next run verifies again.
        drop(fs::write(&file, json!(verdict).to_string()));
    }
    show(verdict.line(run.used().len(), known.is_some(), with_steps));
    verdict.warnings().into_iter().for_each(&mut *show);
    let ipc_refused = verdict.ipc_refused.clone();
    let config = verdict.applied(config);
    Ok(Proven {
        config,
        ipc_refused,
    })
}

/// Holds the right to verify until it is dropped. `None` where the cache directory cannot be written.
fn turn(file: &Path) -> Option<fs::File> {
    fs::create_dir_all(file.parent()?).ok()?;
    let lock = fs::File::create(file.with_extension("lock")).ok()?;
    lock.lock().ok()?;
    Some(lock)
}

/// Checks for a GPU of the run: of its operations, or of every operation.
fn cover(config: &RunConfig, gpu: &RunGpu) -> Result<Cover, Failure> {
    match config.verify_gpu {
        VerifyGpu::Full => Ok(checks::every()),
        _ => Ok(checks::cover(&kernels_of(&config.draft(), gpu)?, gpu)),
    }
}

struct Run<'a> {
    env: &'a Env,
    config: &'a RunConfig,
    with_steps: bool,
    matmul: Matmul,
    /// Checks for each GPU of the configuration.
    covers: Vec<Cover>,
}

impl Run<'_> {
    /// GPUs on which a rank computes.
    fn used(&self) -> &[RunGpu] {
        let gpus = &self.config.gpus;
        &gpus[..gpus.len().min(self.config.ranks_here())]
    }

    /// File of the result.
    fn file(&self, cuda: &Cuda, variables: &Variables) -> PathBuf {
        let config = self.config;
        let libraries = cuda.libraries.iter();
        let libraries: Vec<_> = libraries
            .map(|library| (&library.name, &library.version, library.path.is_some()))
            .collect();
        let gpus = self.used().iter();
        let gpus: Vec<_> = gpus
            .map(|gpu| (&gpu.name, gpu.multiprocessors, gpu.products))
            .collect();
        let tier = |tier: &Tier| match tier {
            Tier::Nvme(_) => "nvme".to_owned(),
            other => other.to_string(),
        };
        let offload = &config.offload;
        let family = Family::of(&config.model_dir()).ok();
        let key = json!({
            "program": env!("CARGO_PKG_VERSION"),
            "kernels": checks::sources(),
            "gpus": gpus,
            "driver": [&cuda.driver, &cuda.kernel_module],
            "cuda": cuda.cuda_version,
            "libraries": libraries,
            "code": variables.gpu_code().ok().map(|code| format!("{code:?}")),
            "checks": self.covers.iter().map(|cover| &cover.checks).collect::<Vec<_>>(),
            "steps": self.with_steps,
            "family": family.map(|family| format!("{family:?}")),
            "precision": value_name(config.precision),
            "zero": config.zero,
            "ranks": config.world_size.min(2),
            "offload": [tier(&offload.param), tier(&offload.optimizer), tier(&offload.activation)],
            "formats": steps::formats(config),
            "lora": config.trainable.lora.as_ref().map(|lora| lora.lora_rank),
            "graphs": value_name(config.cuda_graph),
            "collectives": config.resolved_collectives().name(),
        });
        let hash = blake3::hash(key.to_string().as_bytes()).to_hex();
        let directory = variables.cache_dir().join(KEPT);
        directory.join(format!("{}.json", &hash[..32]))
    }

    fn verify(&self) -> Result<Verdict, Failure> {
        let started = Instant::now();
        let job = Job::new(&self.env.temp_dir)?;
        let directory = job.directory();
        let mut verdict = Verdict::default();
        for place in 0..self.used().len() {
            self.operations(place, directory, &mut verdict)?;
        }
        if self.with_steps {
            self.steps(directory, &mut verdict)?;
        }
        verdict.seconds = started.elapsed().as_secs_f64();
        Ok(verdict)
    }

    /// Compares the operations of one GPU, and those with the other products where these are wrong.
    fn operations(
        &self,
        place: usize,
        directory: &Path,
        verdict: &mut Verdict,
    ) -> Result<(), Failure> {
        let chosen = &self.config.gpus[place];
        let gpu = RunGpu {
            products: verdict.products.unwrap_or(chosen.products),
            ..chosen.clone()
        };
        let found = self.found(&gpu, &self.covers[place], directory)?;
        verdict.read(&gpu, &found);
        if found.wrong.is_empty() {
            verdict.checks = verdict.checks.max(found.checks);
            verdict.no_kernel = found.no_kernel;
            verdict.uncovered.clone_from(&self.covers[place].uncovered);
            return Ok(());
        }
        let refusal = || refused(&gpu, &found);
        // Without a choice, own products mean that no library was found.
        if self.matmul != Matmul::Auto || gpu.products == Products::Own {
            return Err(refusal());
        }
        let other = RunGpu {
            products: Products::Own,
            ..gpu.clone()
        };
        let second = self.found(&other, &cover(self.config, &other)?, directory)?;
        if !second.wrong.is_empty() {
            return Err(refusal());
        }
        verdict.products = Some(other.products);
        verdict.checks = verdict.checks.max(second.checks);
        verdict.no_kernel = second.no_kernel;
        verdict.fell_back.extend(found.wrong);
        Ok(())
    }

    fn found(&self, gpu: &RunGpu, cover: &Cover, directory: &Path) -> Result<Found, Failure> {
        let path = directory.join("request.json");
        let request = Request {
            gpu: gpu.clone(),
            checks: cover.checks.clone(),
        };
        fs::write(&path, json!(request).to_string())
            .map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), &path, &error))?;
        let mut command = Command::new(own_program()?);
        command.arg("doctor").arg("--verify-request").arg(&path);
        Ok(child::collect(command, child::COMPILING, child::DEADLINE))
    }

    /// Takes the steps with the run's choices, then with those that `auto` may change.
    fn steps(&self, directory: &Path, verdict: &mut Verdict) -> Result<(), Failure> {
        let config = self.config;
        let gpu = &config.gpus[0];
        let products = verdict.products.unwrap_or(gpu.products);
        let failed = |wrong: Vec<String>| Found {
            wrong,
            ..Found::default()
        };
        let steps = match steps::Steps::begin(config, directory)? {
            Ok(steps) => steps,
            Err(why) => return Err(refused(gpu, &failed(vec![why]))),
        };
        let asked = config.collectives.name();
        let graphs = config.cuda_graph;
        let through_host = config.collectives == Collectives::Auto
            && config.resolved_collectives() == Collectives::Ipc;
        let may_stop = graphs == CudaGraph::Auto;
        let other = match products {
            Products::CublasLt if self.matmul == Matmul::Auto => Some(Products::Own),
            _ => None,
        };
        let shm = Collectives::Shm.name();
        let mut choices = vec![(products, graphs, asked)];
        choices.extend(through_host.then_some((products, graphs, shm)));
        choices.extend(may_stop.then_some((products, CudaGraph::Off, asked)));
        choices.extend(other.map(|other| (other, graphs, asked)));
        if may_stop && through_host {
            choices.push((other.unwrap_or(products), CudaGraph::Off, shm));
        }
        let mut wrong = Vec::new();
        for (by, with, over) in choices {
            let Some(why) = steps.differ(by, with, over) else {
                verdict.without_graphs = with != graphs;
                verdict.products = (by != gpu.products).then_some(by);
                if over != asked {
                    verdict.ipc_refused = wrong.first().cloned();
                }
                verdict.fell_back.extend(wrong);
                return Ok(());
            };
            wrong.push(why);
        }
        wrong.truncate(1);
        Err(refused(gpu, &failed(wrong)))
    }
}

/// Refusal of a GPU that is wrong.
fn refused(gpu: &RunGpu, found: &Found) -> Failure {
    let failure = Failure::new(
        ErrorCode::GpuVerification,
        text!(
            "GPU {} ({}) does not compute what the CPU computes",
            "GPU {}（{}）的计算结果与 CPU 不一致",
            gpu.ordinal,
            gpu.name
        ),
        text!(
            "{} of the comparisons before the run failed",
            "运行前的对比中有 {} 项失败",
            found.wrong.len()
        ),
    );
    let shown = found.wrong.iter().take(SHOWN);
    let failure = shown.fold(failure, |failure, wrong| {
        failure.evidence(Text::literal(wrong))
    });
    failure
        .next(both(
            "`launcher doctor --verify-gpu` checks every operation and writes a report to send",
            "`launcher doctor --verify-gpu` 会检查所有运算，并写出可以发送的报告",
        ))
        .next(both(
            "--device cpu trains on the CPU",
            "--device cpu 在 CPU 上训练",
        ))
        .next(both(
            "--verify-gpu off trains without this check; results may be wrong",
            "--verify-gpu off 跳过此检查直接训练，结果可能是错的",
        ))
}

impl Verdict {
    /// Takes the memory reading of a GPU.
    fn read(&mut self, gpu: &RunGpu, found: &Found) {
        let planned = footprint::device_bytes(gpu.multiprocessors);
        let taken = found.taken_bytes.unwrap_or(0);
        self.excess_bytes = self.excess_bytes.max(taken.saturating_sub(planned));
    }

    fn line(&self, gpus: usize, is_known: bool, with_steps: bool) -> Event {
        let steps = match with_steps {
            true => both(" and two steps of a tiny model", "以及微型模型的两步训练"),
            false => both("", ""),
        };
        let when = match is_known {
            true => both("verified before", "此前已验证").into(),
            false => Text::literal(seconds(self.seconds)),
        };
        let without = match self.no_kernel.len() {
            0 => Text::default(),
            count => text!(
                " · {count} more need NVRTC, which was not found",
                " · 另有 {count} 项需要 NVRTC，而未找到它"
            ),
        };
        Event::Info {
            label: both("verify", "验证").into(),
            text: text!(
                "{} operations{steps} on {gpus} GPUs agree with the CPU · {when}{without}",
                "{gpus} 个 GPU 上的 {} 项运算{steps}与 CPU 一致 · {when}{without}",
                self.checks
            ),
        }
    }

    /// What the run does otherwise than asked.
    fn warnings(&self) -> Vec<Event> {
        let why = || {
            self.fell_back
                .first()
                .map(Text::literal)
                .unwrap_or_default()
        };
        let mut lines = Vec::new();
        if let Some(products) = self.products {
            lines.push(text!(
                "matrix products by {products}, because the others differ from the CPU's: {}",
                "矩阵乘法由 {products} 完成，因为另一种实现与 CPU 不一致：{}",
                why()
            ));
        }
        if self.without_graphs {
            lines.push(text!(
                "CUDA graphs are off, because steps with them differ from the CPU's: {}",
                "不使用 CUDA 图，因为使用它的训练与 CPU 不一致：{}",
                why()
            ));
        }
        if self.ipc_refused.is_some() {
            lines.push(text!(
                "ranks exchange through host memory (shm), because steps over ipc differ from the CPU's: {}",
                "各 rank 经由主机内存（shm）交换，因为经由 ipc 的训练与 CPU 不一致：{}",
                why()
            ));
        }
        if self.excess_bytes > 0 {
            lines.push(text!(
                "a process takes {} more of the GPU than the plan assumes; the plan sets it aside",
                "每个进程占用的显存比计划假设的多 {}；计划会为它预留",
                bytes(self.excess_bytes)
            ));
        }
        lines
            .into_iter()
            .map(|text| Event::Warning { text })
            .collect()
    }

    /// The configuration with the choices of this verdict.
    fn applied(&self, config: RunConfig) -> RunConfig {
        let gpus = config.gpus.iter().map(|gpu| RunGpu {
            products: self.products.unwrap_or(gpu.products),
            free_bytes: gpu.free_bytes.saturating_sub(self.excess_bytes),
            ..gpu.clone()
        });
        RunConfig {
            gpus: gpus.collect(),
            cuda_graph: match self.without_graphs {
                true => CudaGraph::Off,
                false => config.cuda_graph,
            },
            ..config
        }
    }
}

/// Runs `launcher doctor --verify-gpu`: verifies every operation on all usable GPUs, and the steps on the first two, or
/// by two ranks on a single one. Writes a report into the working directory.
///
/// # Errors
/// No GPU can be used, one is wrong, or the report cannot be written.
pub(super) fn report(hooks: &Hooks) -> Result<ExitCode, Failure> {
    let env = Env::read_alone();
    let mut screen = Screen::on_stderr(env.no_color);
    let variables = Variables::read();
    let chosen = device::choose(DeviceChoice::Cuda, hooks.devices, &variables)?;
    let args = Args {
        nproc: Some(chosen.gpus.len().max(2)),
        verify_gpu: Some(VerifyGpu::Full),
        ..Args::default()
    };
    let config = resolve_on(&args, &env, &chosen)?.config;
    for event in chosen.events(&config) {
        screen.show(&event);
    }
    let config = demo::prepare(config, &env, &mut |event| screen.show(&event))?;
    let mut lines = Vec::new();
    let proven = prove(hooks, &env, config, true, &mut |event| {
        lines.extend(crate::ui::lines(&event));
        screen.show(&event);
    });
    let report = json!({
        "doctor": doctor::Report::new(gather(&variables)),
        "verification": lines,
        "refused": proven.as_ref().err().map(ToString::to_string),
    });
    let path = Path::new(REPORT);
    fs::write(path, format!("{report:#}\n"))
        .map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), path, &error))?;
    screen.show(&Event::Info {
        label: both("report", "报告").into(),
        text: text!(
            "{REPORT} describes it; send it with a question",
            "{REPORT} 记录了结果；提问时请一并发送"
        ),
    });
    proven.map(|_| ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Args, resolve};
    use crate::rank_env::Env;

    fn verdict() -> Verdict {
        Verdict {
            products: Some(Products::Own),
            without_graphs: true,
            ipc_refused: Some("loss 2 instead of 1".to_owned()),
            excess_bytes: 1 << 20,
            fell_back: vec!["loss 2 instead of 1".to_owned()],
            ..Verdict::default()
        }
    }

    #[test]
    fn a_verdict_changes_the_run_and_says_why() {
        let env = Env::from_lookup(&|_| None).expect("an environment");
        let mut config = resolve(&Args::default(), &env).expect("resolves").config;
        config.gpus = vec![RunGpu {
            ordinal: 0,
            name: "GPU".into(),
            uuid: None,
            multiprocessors: 4,
            compute_capability: None,
            memory_bytes: 8 << 20,
            free_bytes: 4 << 20,
            peers: Vec::new(),
            products: Products::CublasLt,
            fused_attention_backward: false,
        }];
        let run = verdict().applied(config.clone());
        assert_eq!(run.gpus[0].products, Products::Own);
        assert_eq!(
            (run.gpus[0].free_bytes, run.cuda_graph),
            (3 << 20, CudaGraph::Off)
        );
        assert_eq!(Verdict::default().applied(config.clone()), config);
        let warnings = verdict().warnings();
        assert_eq!(warnings.len(), 4);
        let shown: Vec<String> = warnings.iter().flat_map(crate::ui::lines).collect();
        assert!(shown[1].contains("loss 2 instead of 1"), "{shown:?}");
        assert!(Verdict::default().warnings().is_empty());
    }
}
