//! Compilation of every module for every architecture, without stack frames or warnings, and within the checked-in
//! table of registers and spills.
//!
//! It needs NVRTC (Python package nvidia-cuda-nvrtc, found through TESSERA_CUDA_LIBS). Without NVRTC the suite reports
//! that it was skipped, or fails if TESSERA_REQUIRE_NVRTC is set, as in CI. TESSERA_COMPILE_FOR names some of the
//! architectures, separated by commas. The nightly run compiles for all.
#![allow(clippy::print_stdout, reason = "the suite's own report")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use device_tests::compile::{self, ARCHITECTURES, SHARED_LIMIT, Table};
use kernels::cuda::image::{Cache, Images, Origin};
use kernels::cuda::library::Search;
use kernels::cuda::module::Module;
use kernels::cuda::nvrtc::Compiler;

fn main() -> ExitCode {
    let directories = std::env::var_os("TESSERA_CUDA_LIBS");
    let directories = directories.map(|directories| std::env::split_paths(&directories).collect());
    let search = Search {
        directories: directories.unwrap_or_default(),
        cuda_home: std::env::var_os("CUDA_HOME").map(PathBuf::from),
        python_packages: Vec::new(),
    };
    let chosen = std::env::var("TESSERA_COMPILE_FOR").ok();
    let architectures: Vec<&str> = match &chosen {
        Some(names) => names.split(',').collect(),
        None => ARCHITECTURES.into(),
    };
    match Compiler::find(&search) {
        Ok(compiler) => {
            match compiled_ahead(&search).and_then(|()| check(compiler, &architectures)) {
                Ok(kernels) => {
                    println!(
                        "compiled_kernels: {kernels} kernels on {} ok",
                        architectures.join(", ")
                    );
                    ExitCode::SUCCESS
                }
                Err(error) => {
                    println!("compiled_kernels: FAILED: {error:#}");
                    ExitCode::FAILURE
                }
            }
        }
        Err(error) if std::env::var_os("TESSERA_REQUIRE_NVRTC").is_some() => {
            println!("compiled_kernels: FAILED: {error}");
            ExitCode::FAILURE
        }
        Err(error) => {
            println!("compiled_kernels: SKIPPED, no kernel was compiled: {error}");
            ExitCode::SUCCESS
        }
    }
}

/// Two ranks compile the kernels of a run ahead. A later process finds all of them in the cache.
fn compiled_ahead(search: &Search) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let images = || {
        let cache = Cache::new(directory.path());
        // A driver newer than any compiler.
        Images::new((8, 6), (99, 0), search, Some(cache))
    };
    let modules: Vec<Module> = compile::modules().into_iter().take(3).collect();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| images().compile_ahead(&modules));
        }
    });
    for module in &modules {
        let origin = images().get(module)?.origin;
        ensure!(
            matches!(origin, Origin::Cache(_)),
            "{} was not compiled ahead: {origin:?}",
            module.name()
        );
    }
    Ok(())
}

fn check(compiler: Compiler, architectures: &[&str]) -> Result<usize> {
    for name in architectures {
        ensure!(
            ARCHITECTURES.contains(name),
            "TESSERA_COMPILE_FOR names {name:?}: there are {}",
            ARCHITECTURES.join(", ")
        );
    }
    a_spilling_kernel_is_reported(compiler)?;
    let table = compile::parse_table(include_str!("../kernel_resources.csv"))?;
    let modules = compile::modules();
    let next = AtomicUsize::new(0);
    let problems = Mutex::new(Vec::new());
    let kernels = AtomicUsize::new(0);
    let workers = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(module) = modules.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match check_module(compiler, module, &table, architectures) {
                        Ok(n) => _ = kernels.fetch_add(n, Ordering::Relaxed),
                        Err(error) => problems
                            .lock()
                            .expect("no panic")
                            .push(format!("{error:#}")),
                    }
                }
            });
        }
    });
    let mut problems = problems.into_inner().expect("no panic");
    let listed = |name: &str| modules.iter().any(|module| module.name() == name);
    let stale = table.keys().filter(|(module, _)| !listed(module));
    problems
        .extend(stale.map(|(module, _)| format!("the table has {module}, which no family lists")));
    let hint = "the table is made by `gpu_check build-table`";
    ensure!(problems.is_empty(), "{}\n{hint}", problems.join("\n"));
    Ok(kernels.into_inner())
}

fn check_module(
    compiler: Compiler,
    module: &Module,
    table: &Table,
    architectures: &[&str],
) -> Result<usize> {
    let found = compile::registers(compiler, module, architectures)?;
    for (kernel, registers) in &found {
        let name = module.name();
        let limits = table.get(&(name.clone(), kernel.clone()));
        let limits = limits.with_context(|| format!("{name}: {kernel} is not in the table"))?;
        for ((arch, now), most) in ARCHITECTURES.iter().zip(registers).zip(limits.registers) {
            ensure!(
                now.count <= most.count && now.spill_bytes <= most.spill_bytes,
                "{name}: {kernel} takes {now} registers (+ bytes spilled) on {arch}, the table allows {most}"
            );
        }
        let shared = limits.shared_bytes;
        ensure!(
            shared <= SHARED_LIMIT,
            "{name}: {kernel} wants {shared} bytes of shared memory"
        );
    }
    Ok(found.len())
}

/// Shows that the check can fail: a kernel with more live values than registers.
fn a_spilling_kernel_is_reported(compiler: Compiler) -> Result<()> {
    let source = r#"extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x) {
        float v[96];
        #pragma unroll
        for (int i = 0; i < 96; i++) v[i] = x[i * 1024 + threadIdx.x];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 96; i++) x[(95 - i) * 1024 + threadIdx.x] = v[i] * v[(i * 7) % 96];
    }"#;
    let compiled = compiler.compile_text("spilling", source, "sm_80")?;
    let resources = compiled.resources();
    ensure!(
        resources.len() == 1 && resources[0].spill_bytes > 0 && !compiled.warnings().is_empty(),
        "a spilling kernel was not noticed: {}",
        compiled.log
    );
    Ok(())
}
