//! GPUs of ranks that another launcher started. Such a launcher may show each rank other GPUs, so only the ranks
//! together know which of them share one.

use std::collections::BTreeMap;

use engine::comm::{Communicator, Tag};

use crate::config::RunConfig;
use crate::device::gpu_of;
use crate::error::Failure;
use crate::error::failures::comm as comm_failure;

/// Most ranks on one GPU, if the plan of `config` assumed another number. Every rank gets the same answer.
///
/// # Errors
/// Another rank is lost (exit 13).
pub(crate) fn ranks_per_gpu(
    config: &RunConfig,
    local_rank: usize,
    comm: &dyn Communicator,
) -> Result<Option<usize>, Failure> {
    let own = gpu_of(config, local_rank).and_then(|gpu| gpu.uuid.as_deref());
    let all = comm
        .all_gather_bytes(own.unwrap_or_default().as_bytes(), Tag::new("gpus", 0))
        .map_err(|error| comm_failure(&error))?;
    // Without UUIDs the assumption stays.
    if all.iter().any(Vec::is_empty) {
        return Ok(None);
    }
    let mut ranks: BTreeMap<Vec<u8>, usize> = BTreeMap::new();
    for uuid in all {
        *ranks.entry(uuid.to_ascii_lowercase()).or_default() += 1;
    }
    let most = ranks.into_values().max().unwrap_or(1);
    Ok((most != config.ranks_per_gpu()).then_some(most))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{self, Command, resolve_on};
    use crate::config::{Products, RunGpu};
    use crate::device::{Chosen, one_gpu_each};
    use crate::rank_env::Env;

    /// Configuration of four ranks, each of which sees one GPU.
    fn sees(uuid: Option<&str>) -> RunConfig {
        let gpu = RunGpu {
            ordinal: 0,
            name: "RTX 3090".into(),
            uuid: uuid.map(str::to_owned),
            multiprocessors: 82,
            compute_capability: Some((8, 6)),
            memory_bytes: 24 << 30,
            free_bytes: 23 << 30,
            peers: Vec::new(),
            products: Products::Own,
            fused_attention_backward: false,
        };
        let words = ["--nproc", "4"].map(str::to_owned);
        let Ok(Command::Train { args, .. }) = cli::parse(&words) else {
            panic!("a training line");
        };
        let env = Env::from_lookup(&|_| None).expect("an environment");
        let chosen = Chosen::described(vec![gpu]);
        resolve_on(&args, &env, &chosen).expect("resolved").config
    }

    fn found(
        uuids: [Option<&str>; 4],
        assumed: impl Fn(RunConfig) -> RunConfig + Sync,
    ) -> Vec<Option<usize>> {
        crate::launch::rendezvous::tests::on_ranks(4, |comm| {
            let rank = comm.world().rank;
            let config = assumed(sees(uuids[rank]));
            ranks_per_gpu(&config, rank, comm).expect("all ranks are here")
        })
    }

    #[test]
    fn ranks_that_see_one_gpu_each_count_the_ranks_of_each_gpu() {
        let own = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"].map(Some);
        assert_eq!(found(own, one_gpu_each), [None; 4]);
        // The ranks take one GPU in turn, unless each has its own.
        assert_eq!(found(own, |config| config), [Some(1); 4]);
        let shared = ["GPU-a", "GPU-b", "gpu-A", "GPU-a"].map(Some);
        assert_eq!(found(shared, one_gpu_each), [Some(3); 4]);
        let unknown = [None, Some("GPU-b"), Some("GPU-b"), Some("GPU-b")];
        assert_eq!(found(unknown, one_gpu_each), [None; 4]);
    }
}
