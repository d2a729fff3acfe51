//! `gpu_check`: all checks and measurements on a GPU in one program, which needs only a driver. `scripts/gpu-check.sh`
//! runs its stages. A stage exits with 0 only when all of it passed.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::{Parser, Subcommand};
use device_tests::stages::{
    Report, Setting, ceilings, conformance, copies, footprint, graphs, processes, show, survey,
    table,
};
use device_tests::{compile, model};
use kernels::cuda::image::Code;
use kernels::cuda::library::Search;

#[derive(Parser)]
#[command(
    name = "gpu_check",
    about = "Checks and measures the GPU kernels, stage by stage"
)]
struct Arguments {
    /// Directories with NVIDIA's libraries, searched before all others [default: those of TESSERA_CUDA_LIBS].
    #[arg(long, value_delimiter = ':', global = true)]
    libraries: Vec<PathBuf>,
    /// Python's package directories (with `nvidia/*/lib` inside).
    #[arg(long, value_delimiter = ':', global = true)]
    python_packages: Vec<PathBuf>,
    /// Directory of the reports.
    #[arg(long, default_value = "gpu-check", global = true)]
    out: PathBuf,
    /// Directory of precompiled emulated kernels, for the calibration.
    #[arg(long, global = true)]
    emulated: Option<PathBuf>,
    /// The script that times the same operations in PyTorch, for the table.
    #[arg(long, global = true)]
    peers: Option<PathBuf>,
    /// Small sizes and no judgment of rates, for the fake driver.
    #[arg(long, global = true)]
    small: bool,
    /// Seconds after which a stage starts no more measurements.
    #[arg(long, default_value_t = 120, global = true)]
    seconds: u64,
    #[command(subcommand)]
    stage: Stage,
}

#[derive(Subcommand)]
enum Stage {
    /// The driver, the libraries, the GPUs.
    Probe,
    /// Copies, matrix products and the bus, by NVIDIA's own code.
    Ceilings,
    /// Weights in and gradients out during compute.
    Copies,
    /// Device memory of one process read by another.
    Ipc,
    /// Two NCCL ranks on one GPU.
    Nccl,
    /// The emulator compared with the GPU.
    Calibration,
    /// Every kernel compared with its reference.
    Conformance,
    /// The same with machine code for this GPU.
    Native,
    /// Every backend operation compared with the CPU.
    Backend,
    /// Small operations queued one by one and as graphs.
    Graphs,
    /// The time of every kernel, with shares of ceilings and PyTorch's times.
    Table,
    /// Products compared with cuBLASLt, two layers with one, adapted layers with plain ones.
    Products,
    /// Compiles the built-in PTX; give the directory of the NVRTC to use.
    BuildPtx {
        /// The bundle to write.
        file: PathBuf,
    },
    /// Compiles the emulator's form of every module, to be copied to a machine with a GPU.
    BuildEmulated {
        /// The directory to fill.
        directory: PathBuf,
    },
    /// Builds the fake driver, which a program takes through `TESSERA_CUDA_LIBS`.
    BuildFakeDriver {
        /// The directory to fill.
        directory: PathBuf,
    },
    /// Writes the table of registers, threads and shared memory of every kernel.
    BuildTable {
        /// The table to write.
        file: PathBuf,
        /// Only these families; the lines of the others stay as they are.
        #[arg(long, value_delimiter = ',')]
        families: Vec<String>,
    },
    /// Prints the static model: instructions per mma, resident blocks and share of peak on every kind of card. It needs
    /// NVRTC and no GPU.
    Model {
        /// The table of `build-table`.
        #[arg(default_value = "tests/device/kernel_resources.csv")]
        resources: PathBuf,
    },
    /// Loads every module in several processes, so that later stages find translated code in the driver's cache.
    WarmUp {
        /// Number of processes.
        #[arg(long, default_value_t = 16)]
        processes: usize,
    },
    /// One process of the stage `warm-up`.
    #[command(hide = true)]
    WarmUpProcess { index: usize, of: usize },
    /// One process whose memory the stage `probe` measures.
    #[command(hide = true)]
    FootprintProcess { directory: PathBuf },
    /// One process of the stage `ipc`.
    #[command(hide = true)]
    IpcRank { rank: u32, rendezvous: PathBuf },
    /// One process of the stage `nccl`.
    #[command(hide = true)]
    NcclRank { rank: u32, rendezvous: PathBuf },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let setting = Setting {
        search: Search {
            directories: with_environment(arguments.libraries),
            cuda_home: std::env::var_os("CUDA_HOME").map(PathBuf::from),
            python_packages: arguments.python_packages,
        },
        code: match code() {
            Ok(code) => code,
            Err(value) => {
                show(&format!(
                    "TESSERA_CUDA_ARCH={value}: native and sm_80 are understood"
                ));
                return ExitCode::FAILURE;
            }
        },
        out: arguments.out,
        emulated: arguments.emulated,
        peers: arguments.peers,
        small: arguments.small,
        deadline: Instant::now() + Duration::from_secs(arguments.seconds),
    };
    match run(&arguments.stage, &setting) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            show(&format!("FAILED {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// The code variant, read as the launcher reads it.
fn code() -> Result<Code, String> {
    match std::env::var("TESSERA_CUDA_ARCH").as_deref() {
        Err(_) | Ok("" | "native") => Ok(Code::Native),
        Ok("sm_80") => Ok(Code::Sm80),
        Ok(other) => Err(other.to_owned()),
    }
}

fn with_environment(mut libraries: Vec<PathBuf>) -> Vec<PathBuf> {
    if let Some(directories) = std::env::var_os("TESSERA_CUDA_LIBS") {
        libraries.extend(std::env::split_paths(&directories));
    }
    libraries
}

fn run(stage: &Stage, setting: &Setting) -> Result<bool> {
    let finish = |report: Report| -> Result<bool> {
        report.save(&setting.out)?;
        Ok(report.failures.is_empty())
    };
    match stage {
        Stage::Probe => finish(survey::run(setting)),
        Stage::Ceilings => finish(ceilings::run(setting)),
        Stage::Copies => finish(copies::run(setting)),
        Stage::Ipc => finish(processes::ipc(setting)),
        Stage::Nccl => finish(processes::nccl(setting)),
        Stage::Calibration => finish(conformance::calibrate(setting)),
        Stage::Table => finish(table::run(setting)),
        Stage::Products => finish(table::products::run(setting)),
        Stage::Conformance => finish(conformance::run(setting, "conformance")),
        Stage::Native => {
            let native = Setting {
                code: Code::Native,
                ..setting.clone()
            };
            finish(conformance::run(&native, "native"))
        }
        Stage::Backend => finish(conformance::backend(setting)),
        Stage::Graphs => finish(graphs::run(setting)),
        Stage::BuildTable { file, families } => {
            compile::build_table(setting, file, families).map(|()| true)
        }
        Stage::BuildEmulated { directory } => {
            device_tests::emulator::build_all(directory).map(|()| true)
        }
        Stage::BuildFakeDriver { directory } => {
            device_tests::fake_driver::build(directory).map(|()| true)
        }
        Stage::Model { resources } => {
            let text = std::fs::read_to_string(resources)?;
            show(&model::table(setting, &compile::parse_table(&text)?)?);
            Ok(true)
        }
        Stage::WarmUp { processes } => finish(processes::warm_up(setting, *processes)),
        Stage::WarmUpProcess { index, of } => {
            processes::load_share(setting, *index, *of).map(|()| true)
        }
        Stage::BuildPtx { file } => compile::build_ptx(setting, file).map(|()| true),
        Stage::FootprintProcess { directory } => {
            footprint::in_process(setting, directory).map(|()| true)
        }
        Stage::IpcRank { rank, rendezvous } => {
            processes::ipc_rank(setting, *rank, rendezvous).map(|()| true)
        }
        Stage::NcclRank { rank, rendezvous } => {
            processes::nccl_rank(setting, *rank, rendezvous).map(|()| true)
        }
    }
}
