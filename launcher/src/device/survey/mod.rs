//! Facts about this machine, and what they mean for a run.
//!
//! [`gather`] collects facts, [`findings`] judges them. Nothing here fails: what cannot be read is absent, or a finding.

mod cuda;
pub mod environment;
pub mod facts;
pub mod findings;
mod host;
mod python;

use crate::rank_env::{CudaPlaces, Variables};
use facts::Facts;
use findings::Finding;

pub(crate) use host::{instruction_sets, libc};

/// Collects everything about this machine and this environment.
pub fn gather(variables: &Variables) -> Facts {
    let (cuda, gpus) = survey_gpus(variables);
    facts(variables, cuda, gpus)
}

/// Driver, libraries and GPUs alone.
pub(crate) fn survey_gpus(variables: &Variables) -> (facts::Cuda, Vec<facts::Gpu>) {
    cuda::gather(&places(variables))
}

/// Where CUDA's libraries are looked for.
#[cfg(feature = "cuda")]
pub(crate) fn search(variables: &Variables) -> kernels::cuda::library::Search {
    cuda::search(&places(variables))
}

fn places(variables: &Variables) -> CudaPlaces {
    let lookup = |name: &str| variables.get(name).map(ToOwned::to_owned);
    CudaPlaces::from_lookup(&lookup)
}

/// What these GPUs and this driver mean for a run, the most important first.
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
