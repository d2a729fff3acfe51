//! Facts about this machine, and findings on what they mean for a run.
//!
//! [`gather`] collects facts, [`findings`] judges them. Neither fails: a value that cannot be read is absent, or a
//! finding.

mod cuda;
pub mod environment;
pub mod facts;
pub mod findings;
mod host;
mod python;

use crate::rank_env::{CudaSearchPaths, Variables};
use facts::Facts;
use findings::Finding;

pub(crate) use host::{instruction_sets, libc};

/// Collects all facts about this machine and its environment variables. It never fails: a value that cannot
/// be read is absent.
pub fn gather(variables: &Variables) -> Facts {
    let (cuda, gpus) = cuda::gather(&search_paths(variables), cuda::Libraries::All);
    facts(variables, cuda, gpus)
}

/// Collects facts about GPUs, driver and the libraries that a run may need before ranks meet: all but NCCL, which
/// only a rank of its process group opens.
pub(crate) fn survey_gpus(variables: &Variables) -> (facts::Cuda, Vec<facts::Gpu>) {
    cuda::gather(&search_paths(variables), cuda::Libraries::OfRuns)
}

/// Search path for CUDA's libraries, with the directories that the environment `variables` name.
#[cfg(feature = "cuda")]
pub(crate) fn search(variables: &Variables) -> kernels::cuda::library::Search {
    cuda::search(&search_paths(variables))
}

fn search_paths(variables: &Variables) -> CudaSearchPaths {
    let lookup = |name: &str| variables.get(name).map(ToOwned::to_owned);
    CudaSearchPaths::from_lookup(&lookup)
}

/// Findings about these GPUs and this driver, the most important first.
pub(crate) fn gpu_findings(
    cuda: &facts::Cuda,
    gpus: &[facts::Gpu],
    variables: &Variables,
) -> Vec<Finding> {
    findings::of_gpus(&facts(variables, cuda.clone(), gpus.to_vec()))
}

fn facts(variables: &Variables, cuda: facts::Cuda, gpus: Vec<facts::Gpu>) -> Facts {
    Facts {
        program: host::program(),
        system: host::system(),
        cpu: host::cpu(),
        memory: host::memory(),
        limits: host::limits(),
        storage: host::storage(variables),
        launch: host::launch(variables),
        cuda,
        gpus,
        environment: environment::table(variables),
    }
}
