//! The GPUs of this machine.

use std::sync::Arc;

use kernels::Backend;

use super::Devices;
use crate::config::{CudaGraph, RunGpu};
use crate::device::survey::facts::{Cuda, Gpu};
use crate::device::survey::survey_gpus;
use crate::error::Failure;
use crate::rank_env::Variables;

/// Source of NVIDIA GPUs: finds and opens those of this machine, through the CUDA driver, which is loaded at
/// run time.
#[derive(Debug, Clone, Copy)]
pub struct Nvidia;

impl Devices for Nvidia {
    fn survey(&self, variables: &Variables) -> (Cuda, Vec<Gpu>) {
        survey_gpus(variables)
    }

    fn open(
        &self,
        gpu: &RunGpu,
        arena_bytes: u64,
        graphs: CudaGraph,
        variables: &Variables,
    ) -> Result<Arc<dyn Backend>, Failure> {
        driver::open(gpu, arena_bytes, graphs, variables)
    }

    fn free_bytes(&self, gpu: &RunGpu, variables: &Variables) -> Option<u64> {
        driver::free_bytes(gpu, variables)
    }
}

#[cfg(not(feature = "cuda"))]
mod driver {
    use super::{Arc, Backend, CudaGraph, Failure, Variables};
    use crate::config::RunGpu;
    use crate::error::ErrorCode;
    use crate::lang::{both, text};

    pub(super) fn open(
        gpu: &RunGpu,
        _arena_bytes: u64,
        _graphs: CudaGraph,
        _variables: &Variables,
    ) -> Result<Arc<dyn Backend>, Failure> {
        Err(Failure::new(
            ErrorCode::Cuda,
            text!("cannot open GPU {}", "无法打开 GPU {}", gpu.ordinal),
            both("this build has no CUDA support", "本构建不支持 CUDA"),
        )
        .next(both(
            "build without --no-default-features",
            "请不带 --no-default-features 构建",
        )))
    }

    pub(super) fn free_bytes(_gpu: &RunGpu, _variables: &Variables) -> Option<u64> {
        None
    }
}

#[cfg(feature = "cuda")]
mod driver {
    use super::{Arc, Backend, CudaGraph, Failure, Variables};
    use crate::config::{Products, RunGpu};
    use crate::device::survey::search;
    use crate::error::ErrorCode;
    use crate::lang::{Text, both, text};
    use crate::rank_env::{GpuCode, HostRegister};
    use crate::units::bytes;
    use kernels::cuda::CudaBackend;
    use kernels::cuda::backend::Executor;
    use kernels::cuda::backend::graphs::{Mode, Replaying};
    use kernels::cuda::gpu::Gpu;
    use kernels::cuda::image::{Cache, Code};
    use kernels::cuda::library::Search;
    use kernels::cuda::nvml;

    /// Directory of compiled kernels, inside the cache directory.
    const KERNELS: &str = "kernels";

    pub(super) fn open(
        gpu: &RunGpu,
        arena_bytes: u64,
        graphs: CudaGraph,
        variables: &Variables,
    ) -> Result<Arc<dyn Backend>, Failure> {
        let cache = Cache::new(variables.cache_dir().join(KERNELS));
        let search = search(variables);
        let code = match variables.gpu_code()? {
            GpuCode::Native => Code::Native,
            GpuCode::Sm80 => Code::Sm80,
        };
        let registers = variables.host_register()? == HostRegister::Auto;
        let opened = Gpu::open(gpu.ordinal, &search, Some(cache));
        let backward = gpu.kind().attention_backward;
        let opened = opened.map(|gpu| {
            gpu.with_code(code)
                .with_host_registration(registers)
                .with_attention_backward(backward)
        });
        // The plan contains scratch memory for the chosen library, so a missing library is an error, not a reason for
        // another.
        let opened = match gpu.products {
            Products::CublasLt => opened.and_then(|opened| opened.with_cublaslt(&search)),
            Products::Own => opened,
        };
        let opened = opened.map_err(|error| {
            Failure::new(
                ErrorCode::Cuda,
                text!(
                    "cannot open GPU {} ({})",
                    "无法打开 GPU {}（{}）",
                    gpu.ordinal,
                    gpu.name
                ),
                crate::error::chain(&error),
            )
            .next(both(
                "`launcher doctor` shows the driver, the GPUs and the libraries",
                "`launcher doctor` 会显示驱动、GPU 和各个库",
            ))
        })?;
        let free = opened.memory_info().ok().map(|(free, _)| free as u64);
        let opened = Arc::new(opened);
        let executor: Arc<dyn Executor> = match graphs {
            CudaGraph::Off => opened,
            CudaGraph::Auto => Arc::new(Replaying::new(opened, Mode::Auto)),
            CudaGraph::On => Arc::new(Replaying::new(opened, Mode::On)),
        };
        let backend = CudaBackend::new(executor, arena_bytes).map_err(|error| {
            crate::device::no_room(gpu, arena_bytes, free, others(gpu, &search), &error)
        })?;
        Ok(Arc::new(backend))
    }

    /// The GPU in NVML, which has its own indices.
    fn managed(gpu: &RunGpu, search: &Search) -> Option<nvml::NvmlGpu> {
        let own = gpu.uuid.as_ref()?.to_ascii_lowercase();
        let gpus = nvml::read(&search.directories).gpus.ok()?;
        gpus.into_iter().find(|other| {
            let uuid = other.uuid.as_ref().map(|uuid| uuid.to_ascii_lowercase());
            uuid.is_ok_and(|uuid| uuid == own)
        })
    }

    pub(super) fn free_bytes(gpu: &RunGpu, variables: &Variables) -> Option<u64> {
        Some(managed(gpu, &search(variables))?.memory.ok()?.free_bytes)
    }

    /// Processes on the GPU, with the memory that each uses.
    fn others(gpu: &RunGpu, search: &Search) -> Option<Text> {
        let processes = managed(gpu, search)?.processes.ok()?;
        let own = std::process::id();
        let shown: Vec<Text> = processes
            .iter()
            .filter(|process| process.pid != own)
            .map(|process| {
                let held = process.used_bytes.map_or_else(|| "?".to_owned(), bytes);
                text!("process {} uses {held}", "进程 {} 占用 {held}", process.pid)
            })
            .collect();
        (!shown.is_empty()).then(|| Text::list(&shown))
    }
}
