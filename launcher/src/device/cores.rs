//! Processor cores of the ranks of a machine: `--bind-cores`.
//!
//! Memory is allocated on the NUMA node of the thread that first writes to it, so a rank that keeps to the cores of a
//! node has its memory there.

use crate::config::{BindCores, Device, core_list, core_ranges};
use crate::error::{ErrorCode, Failure};
use crate::lang::{Text, both, text};
use crate::rank_env::RankEnv;
use crate::rank_env::identity::Source;
use crate::ui::Event;
use engine::comm::cores_at_start;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeMap;

/// One logical processor. The order is by node, then by physical core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Core {
    /// NUMA node.
    node: usize,
    /// First of the logical processors that share the physical core.
    physical: usize,
    /// Number of the logical processor, as Linux counts.
    number: usize,
}

/// Numbers of the cores of each rank of this machine, in the order of the ranks.
type Shares = Vec<Vec<usize>>;

/// Cores of the ranks of this machine, and the number of threads of this rank.
#[derive(Debug)]
pub(crate) struct Bound {
    /// Number of compute threads of the rank.
    pub(crate) threads: usize,
    /// Cores of all ranks of this machine; `None` if the kernel places threads freely.
    shares: Option<Shares>,
}

impl Bound {
    /// Line that says which cores the ranks keep to.
    pub(crate) fn line(&self) -> Option<Event> {
        let lists = self.shares.as_ref()?.iter().map(|share| core_ranges(share));
        let lists = lists.collect::<Vec<_>>().join(" · ");
        Some(Event::Info {
            label: both("cores", "CPU 核").into(),
            text: text!(
                "the ranks keep to {lists}",
                "各 rank 固定在 CPU 核：{lists}"
            ),
        })
    }
}

/// Restricts this thread, and those that it starts later, to the rank's share of the cores.
///
/// # Errors
/// `choice` names cores that this process may not use (exit 2), or the kernel refuses them (exit 13).
pub(crate) fn bind(
    choice: Option<&BindCores>,
    device: Device,
    env: &RankEnv,
) -> Result<Bound, Failure> {
    let ranks = env.local_world_size.max(1);
    let free = Bound {
        threads: (cores_at_start() / ranks).max(1),
        shares: None,
    };
    let refused = |error: rustix::io::Errno| {
        Failure::new(
            ErrorCode::Rendezvous,
            both("bind a rank to its cores", "把 rank 绑定到 CPU 核"),
            Text::literal(error),
        )
    };
    let mask = match sched_getaffinity(None) {
        Ok(mask) => cores_of(&mask),
        Err(_) if choice.is_none() => return Ok(free),
        Err(error) => return Err(refused(error)),
    };
    let own_masks = matches!(
        env.source,
        Source::OpenMpi | Source::Pmi | Source::Mvapich | Source::Slurm
    );
    let shares = match choice {
        Some(BindCores::None) => None,
        Some(BindCores::Auto) => Some(divide(&mask, ranks)),
        Some(BindCores::List(numbers)) => Some(divide(&listed(numbers, &mask)?, ranks)),
        // Each task of an MPI or of Slurm may have a mask of its own.
        None if own_masks || ranks == 1 => None,
        None if online().is_some_and(|online| mask.len() < online) => Some(divide(&mask, ranks)),
        // A rank works best beside its GPU, which may be on any node.
        None if device == Device::Cuda => None,
        None => nodes(&mask, ranks),
    };
    let Some(shares) = shares else {
        return Ok(free);
    };
    let share = &shares[env.local_rank % ranks];
    let mut set = CpuSet::new();
    share.iter().for_each(|&core| set.set(core));
    sched_setaffinity(None, &set).map_err(refused)?;
    // Ranks with the same cores divide them.
    let sharing = shares.iter().filter(|other| *other == share).count();
    Ok(Bound {
        threads: (share.len() / sharing).max(1),
        shares: Some(shares),
    })
}

/// The cores of `numbers`.
fn listed(numbers: &[usize], mask: &[Core]) -> Result<Vec<Core>, Failure> {
    let missing: Vec<usize> = numbers
        .iter()
        .copied()
        .filter(|number| mask.iter().all(|core| core.number != *number))
        .collect();
    if missing.is_empty() {
        let chosen = mask.iter().filter(|core| numbers.contains(&core.number));
        return Ok(chosen.copied().collect());
    }
    let usable: Vec<usize> = mask.iter().map(|core| core.number).collect();
    let title = text!(
        "--bind-cores names cores that this process may not use: {}",
        "--bind-cores 指定了本进程不能使用的 CPU 核：{}",
        core_ranges(&missing)
    );
    let cause = text!("it may use {}", "它可以使用 {}", core_ranges(&usable));
    let next = both(
        "name some of these, or use --bind-cores auto",
        "请从中选择，或使用 --bind-cores auto",
    );
    Err(Failure::usage(title, cause).next(next))
}

/// Divides `cores` into parts of neighbors, one for each rank. Logical processors of one physical core stay together
/// while there are enough physical cores. With more ranks than cores, all ranks share all cores.
fn divide(cores: &[Core], ranks: usize) -> Shares {
    let mut sorted = cores.to_vec();
    sorted.sort_unstable();
    let mut groups: Vec<Vec<usize>> = sorted
        .chunk_by(|a, b| (a.node, a.physical) == (b.node, b.physical))
        .map(|group| group.iter().map(|core| core.number).collect())
        .collect();
    if groups.len() < ranks {
        groups = sorted.iter().map(|core| vec![core.number]).collect();
    }
    if groups.len() < ranks {
        return vec![groups.concat(); ranks];
    }
    let start = |rank: usize| rank * groups.len() / ranks;
    let share = |rank: usize| groups[start(rank)..start(rank + 1)].concat();
    (0..ranks).map(share).collect()
}

/// Whole NUMA nodes for each rank, where the ranks divide evenly over the nodes or the nodes over the ranks. `None`
/// otherwise, and on a machine with one node.
fn nodes(cores: &[Core], ranks: usize) -> Option<Shares> {
    let mut by_node: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for core in cores {
        by_node.entry(core.node).or_default().push(core.number);
    }
    let nodes: Vec<Vec<usize>> = by_node.into_values().collect();
    let even = nodes.iter().all(|node| node.len() == nodes[0].len());
    let divides = ranks.is_multiple_of(nodes.len()) || nodes.len().is_multiple_of(ranks);
    if nodes.len() < 2 || ranks < 2 || !even || !divides {
        return None;
    }
    let share = |rank: usize| -> Vec<usize> {
        let first = rank * nodes.len() / ranks;
        let end = ((rank + 1) * nodes.len() / ranks).max(first + 1);
        nodes[first..end].concat()
    };
    Some((0..ranks).map(share).collect())
}

/// The processors of `mask` with their place, as far as the kernel tells it.
fn cores_of(mask: &CpuSet) -> Vec<Core> {
    let read = |path: String| std::fs::read_to_string(path).ok();
    let list = |path: String| core_list(&read(path)?);
    let node_of: BTreeMap<usize, usize> = list("/sys/devices/system/node/online".to_owned())
        .unwrap_or_default()
        .into_iter()
        .flat_map(|node| {
            let of_node = list(format!("/sys/devices/system/node/node{node}/cpulist"));
            let of_node = of_node.unwrap_or_default().into_iter();
            of_node.map(move |number| (number, node))
        })
        .collect();
    (0..CpuSet::MAX_CPU)
        .filter(|&number| mask.is_set(number))
        .map(|number| {
            let siblings =
                format!("/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list");
            let first = list(siblings).and_then(|siblings| siblings.first().copied());
            Core {
                node: node_of.get(&number).copied().unwrap_or(0),
                physical: first.unwrap_or(number),
                number,
            }
        })
        .collect()
}

/// Number of processors that are online.
pub(crate) fn online() -> Option<usize> {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/online").ok()?;
    core_list(&list).map(|cores| cores.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two nodes of four physical cores with two logical processors each: 0-7 and their siblings 8-15.
    fn two_nodes() -> Vec<Core> {
        let core = |number: usize| Core {
            node: number % 8 / 4,
            physical: number % 8,
            number,
        };
        (0..16).map(core).collect()
    }

    fn lists(shares: &[Vec<usize>]) -> Vec<String> {
        shares.iter().map(|share| core_ranges(share)).collect()
    }

    #[test]
    fn cores_are_divided_by_node_and_physical_core() {
        let cores = two_nodes();
        assert_eq!(lists(&divide(&cores, 2)), ["0-3,8-11", "4-7,12-15"]);
        assert_eq!(
            lists(&divide(&cores, 4)),
            ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]
        );
        assert_eq!(
            lists(&divide(&cores, 3)),
            ["0-1,8-9", "2-4,10-12", "5-7,13-15"]
        );
        assert_eq!(lists(&divide(&cores, 16))[1], "8");
        assert_eq!(lists(&divide(&cores, 17))[16], "0-15");
    }

    #[test]
    fn ranks_keep_to_whole_nodes_where_they_divide_evenly() {
        let cores = two_nodes();
        assert_eq!(
            lists(&nodes(&cores, 2).expect("even")),
            ["0-3,8-11", "4-7,12-15"]
        );
        let four = ["0-3,8-11", "0-3,8-11", "4-7,12-15", "4-7,12-15"];
        assert_eq!(lists(&nodes(&cores, 4).expect("even")), four);
        assert_eq!(nodes(&cores, 3), None);
        assert_eq!(nodes(&cores, 1), None);
        assert_eq!(nodes(&cores[..4], 2), None, "one node");
        assert_eq!(nodes(&cores[..6], 2), None, "nodes of unlike size");
    }

    #[test]
    fn a_list_is_taken_from_the_cores_of_the_process() {
        let cores = two_nodes();
        let chosen = listed(&[0, 1, 8, 9], &cores).expect("all there");
        assert_eq!(lists(&divide(&chosen, 2)), ["0,8", "1,9"]);
        let failure = listed(&[3, 16, 17], &cores).expect_err("two are missing");
        assert_eq!(failure.code.status(), 2);
        assert!(failure.title.contains("16-17"), "{failure}");
    }

    #[test]
    fn a_bound_thread_keeps_to_its_share() {
        let bound = std::thread::spawn(|| {
            let mask = sched_getaffinity(None).expect("a mask");
            let first = cores_of(&mask)[0].number;
            let bound = bind(
                Some(&BindCores::List(vec![first])),
                Device::Cpu,
                &RankEnv::lone(String::new(), false),
            );
            let bound = bound.expect("bound");
            let now = sched_getaffinity(None).expect("a mask");
            (
                first,
                bound.threads,
                lists(&bound.shares.unwrap_or_default()),
                cores_of(&now),
            )
        });
        let (first, threads, shares, now) = bound.join().expect("no panic");
        assert_eq!((threads, shares), (1, vec![first.to_string()]));
        assert_eq!(
            now.iter().map(|core| core.number).collect::<Vec<_>>(),
            [first]
        );
    }
}
