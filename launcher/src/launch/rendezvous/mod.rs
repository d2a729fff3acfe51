//! Rendezvous of the ranks of a run: over shared memory on one machine, TCP on several, or MPI.

mod cpu_math;
mod failures;
mod gpus;
mod machine;
mod port;
mod token;

use crate::lang::{Text, both, text};
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use engine::Plan;
use engine::comm::mesh::{self, Coordinates, Group, Mesh, Regions};
use engine::comm::shm::{self, ShmOptions};
use engine::comm::tcp::{self, MeetError, TcpOptions};
use engine::comm::{CommError, Communicator, Tag, World, threads};

use crate::config::RunPlan;
use crate::device::Devices;
use crate::error::failures::comm as comm_failure;
use crate::error::{ErrorCode, Failure};
use crate::launch::hostfile::host_name;
use crate::launch::rank::StopFlag;
use crate::launch::supervisor::job::fresh_token;
use crate::rank_env::{DEFAULT_PORT, RankEnv};
pub(crate) use cpu_math::{AgreedMath, CPU_MATH, cpu_math};
pub(crate) use gpus::ranks_per_gpu;
use machine::Machine;
use serde_json::Value;

/// Result of a rendezvous: the communicator that connects the ranks, and what they agreed on.
pub(crate) struct Met {
    pub(crate) comm: Arc<dyn Communicator>,
    /// Unique token of the job, part of the names of its files.
    pub(crate) token: String,
    /// Name of the transport, for output.
    pub(crate) transport: &'static str,
    /// Addresses of the ranks over TCP, from which groups of them join.
    pub(crate) addresses: Addresses,
    /// Warnings about harmless differences between ranks, equal on every rank.
    pub(crate) warnings: Vec<Text>,
}

/// Address at which this rank reaches each rank over TCP; `None` for itself. Empty with another transport.
pub(crate) type Addresses = Vec<Option<IpAddr>>;

/// Joins the other ranks of `env`. Each rank contributes `region` bytes of the window. All ranks must run the same
/// plan, with libraries and devices that give the same results. `noted` wraps the communicator before its first
/// collective.
///
/// # Errors
/// Ranks are missing, do not know the job's token, or differ (exit 13). The output directory is not shared (exit 16).
pub(crate) fn join(
    config: &RunPlan,
    env: &RankEnv,
    plan: &Plan,
    region: usize,
    devices: &dyn Devices,
    stop: &StopFlag,
    noted: impl Fn(Arc<dyn Communicator>) -> Arc<dyn Communicator>,
) -> Result<Met, Failure> {
    let (comm, transport, addresses) = connect(config, env, plan, region, stop, noted)?;
    let warnings = match env.world_size {
        1 => Vec::new(),
        _ => machine::compare(&Machine::of(config, env, devices), &*comm)?,
    };
    let token = job_token(env, &*comm)?;
    if env.has_peers_elsewhere() {
        shared_directory(&config.output, &*comm, &token)?;
    }
    Ok(Met {
        comm,
        token,
        transport,
        addresses,
        warnings,
    })
}

fn connect(
    config: &RunPlan,
    env: &RankEnv,
    plan: &Plan,
    region: usize,
    stop: &StopFlag,
    noted: impl FnOnce(Arc<dyn Communicator>) -> Arc<dyn Communicator>,
) -> Result<(Arc<dyn Communicator>, &'static str, Addresses), Failure> {
    let world = World {
        rank: env.rank,
        size: env.world_size,
    };
    let deadline = Duration::from_secs(config.comm_timeout_seconds);
    let facts = facts(config, plan);
    if world.size == 1 {
        let mut alone = threads::world(1, region).map_err(|e| comm_failure(&e))?;
        return Ok((noted(alone.remove(0)), "one process", Vec::new()));
    }
    #[cfg(feature = "mpi")]
    if env.is_under_mpi() {
        let comm = noted(over_mpi(env, world, region, deadline)?);
        compare(&facts, &*comm)?;
        return Ok((comm, "MPI", Vec::new()));
    }
    if env.has_peers_elsewhere() {
        let options = tcp_options(env, world, region, deadline, stop)?;
        let options = TcpOptions { facts, ..options };
        let joined = tcp::join_world(&options);
        let (comm, addresses) = joined.map_err(|e| failures::rendezvous(&e, env, &options))?;
        return Ok((noted(comm), "tcp", addresses));
    }
    let name = format!("tessera-window-{}", env.run_token);
    let mut options = ShmOptions::new(name, world, region);
    options.deadline = deadline;
    options.stop = stop.shared();
    let comm = noted(shm::join(&options).map_err(|e| comm_failure(&e))?);
    compare(&facts, &*comm)?;
    Ok((comm, "shared memory", Vec::new()))
}

/// Joins the groups of a mesh of pipeline stages: over MPI if it started the ranks, over TCP if `addresses` are known, else
/// through shared memory. `noted` wraps each communicator before its first collective.
///
/// # Errors
/// Ranks are missing (exit 13), or shared memory is (exit 16).
pub(crate) fn join_stages(
    config: &RunPlan,
    env: &RankEnv,
    (world, addresses): (Arc<dyn Communicator>, Addresses),
    regions: Regions,
    stop: &StopFlag,
    noted: impl Fn(Arc<dyn Communicator>) -> Arc<dyn Communicator>,
) -> Result<Mesh, Failure> {
    let deadline = Duration::from_secs(config.comm_timeout_seconds);
    #[cfg(feature = "mpi")]
    if env.is_under_mpi() {
        let open = |group: &Group| engine::comm::mpi::join_group(group, deadline).map(&noted);
        return Mesh::join(world, config.mp_size, regions, open)
            .map_err(|e: CommError| comm_failure(&e));
    }
    if addresses.is_empty() {
        let open = |group: &Group| {
            let name = format!("tessera-window-{}-{}", env.run_token, group.name);
            let mut options = ShmOptions::new(name, group.world, group.region_bytes);
            options.deadline = deadline;
            options.stop = stop.shared();
            shm::join(&options).map(&noted)
        };
        return Mesh::join(world, config.mp_size, regions, open)
            .map_err(|e: CommError| comm_failure(&e));
    }
    let options = tcp_options(env, world.world(), 0, deadline, stop)?;
    let join = || -> Result<Mesh, MeetError> {
        let at = Coordinates::of(world.world(), config.mp_size)?;
        let groups = mesh::groups(at, regions);
        let mut groups = tcp::Groups::announce(&options, addresses, &*world, &groups)?;
        let open = |group: &Group| groups.join(group).map(&noted);
        Mesh::join(world.clone(), config.mp_size, regions, open)
    };
    join().map_err(|error| failures::rendezvous(&error, env, &options))
}

/// Unique token for the job's files, equal on all ranks. Ranks of the supervisor use its token, whose directories it
/// holds. Otherwise rank 0 draws one.
fn job_token(env: &RankEnv, comm: &dyn Communicator) -> Result<String, Failure> {
    let own = match (env.is_supervised(), env.rank) {
        (true, _) => env.run_token.clone(),
        (false, 0) => fresh_token(),
        (false, _) => String::new(),
    };
    let all = comm
        .all_gather_bytes(own.as_bytes(), Tag::new("job token", 0))
        .map_err(|e| comm_failure(&e))?;
    if env.is_supervised() {
        return Ok(own);
    }
    let first = all.into_iter().next().unwrap_or_default();
    Ok(String::from_utf8_lossy(&first).into_owned())
}

/// Properties that must be equal on all ranks, as (name, value).
fn facts(config: &RunPlan, plan: &Plan) -> Vec<(String, String)> {
    let build = format!(
        "{} {}{}",
        std::env::consts::ARCH,
        if cfg!(debug_assertions) {
            "debug"
        } else {
            "release"
        },
        if cfg!(feature = "cuda") { " cuda" } else { "" },
    );
    let mut facts: Vec<(String, String)> = [
        ("program version", env!("CARGO_PKG_VERSION").to_owned()),
        ("build", build),
        ("device", config.device.name().to_owned()),
        ("seed", config.seed.to_string()),
        ("ZeRO stage", config.zero.to_string()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    let common = serde_json::from_slice(&config.common_part()).unwrap_or_default();
    add_settings("", &common, &mut facts);
    // Last, since another setting usually changes it.
    facts.push(("plan".to_owned(), plan.hash()));
    facts
}

/// Longest value of a setting that is compared as it is. Longer ones are compared by their hash.
const LONGEST_VALUE: usize = 200;

/// Adds the settings in `value`, each with the path of its key, such as `batch.micro_batch`.
fn add_settings(path: &str, value: &Value, facts: &mut Vec<(String, String)>) {
    if let Value::Object(fields) = value {
        for (key, value) in fields {
            let path = match path {
                "" => key.clone(),
                path => format!("{path}.{key}"),
            };
            add_settings(&path, value, facts);
        }
        return;
    }
    let mut text = value.to_string();
    if text.len() > LONGEST_VALUE {
        text = blake3::hash(text.as_bytes()).to_hex()[..16].to_string();
    }
    facts.push((path.to_owned(), text));
}

/// Options of a rendezvous over TCP, without facts.
fn tcp_options(
    env: &RankEnv,
    world: World,
    region_bytes: usize,
    deadline: Duration,
    stop: &StopFlag,
) -> Result<TcpOptions, Failure> {
    let addr = env.master.addr.clone().ok_or_else(|| {
        Failure::new(
            ErrorCode::Rendezvous,
            both("the ranks of several machines have no rendezvous address", "多台机器上的 rank 没有会合地址"),
            text!("{} give no address of rank 0's machine", "{} 没有给出 rank 0 所在机器的地址", env.source),
        )
        .evidence(text!("this is rank {} of {} on {}", "本 rank 为 {}，共 {} 个，位于 {}", env.rank, env.world_size, host_name()))
        .next(both("set MASTER_ADDR on every machine to a name or address of the first one, and MASTER_PORT to a free port of that machine", "请在每台机器上把 MASTER_ADDR 设为第一台机器的名称或地址，把 MASTER_PORT 设为该机器的空闲端口"))
    })?;
    Ok(TcpOptions {
        world,
        region_bytes,
        deadline,
        port: env.master.port.unwrap_or(DEFAULT_PORT),
        secret: token::secret(&env.token)?,
        facts: Vec::new(),
        host: host_name(),
        addr,
        stop: stop.shared(),
    })
}

/// Communicator over the MPI that started this rank. Its numbering must match the rank's environment variables.
#[cfg(feature = "mpi")]
fn over_mpi(
    env: &RankEnv,
    world: World,
    region_bytes: usize,
    deadline: Duration,
) -> Result<Arc<dyn Communicator>, Failure> {
    let found = engine::comm::mpi::world().map_err(|e| comm_failure(&e))?;
    if found != world {
        return Err(Failure::new(
            ErrorCode::Rendezvous,
            both(
                "the MPI that started this rank is not the one that this program was built with",
                "启动本 rank 的 MPI 不是构建本程序时使用的 MPI",
            ),
            text!(
                "it numbers this process {} of {}, the variables of {} say {} of {}",
                "它把本进程编号为 {}（共 {} 个），而 {} 的变量给出的是 {}（共 {} 个）",
                found.rank,
                found.size,
                env.source,
                world.rank,
                world.size
            ),
        )
        .next(both(
            "start with the mpirun of the MPI that was installed when the feature `mpi` was built",
            "请使用构建特性 `mpi` 时所安装的 MPI 的 mpirun 启动",
        ))
        .next(both(
            "a build without that feature exchanges over TCP under any mpirun",
            "不带该特性的构建在任何 mpirun 下都通过 TCP 交换",
        )));
    }
    engine::comm::mpi::join(region_bytes, deadline).map_err(|e| comm_failure(&e))
}

/// Compares the facts of all ranks. If they agree, only a hash is exchanged.
fn compare(facts: &[(String, String)], comm: &dyn Communicator) -> Result<(), Failure> {
    let own = encode(facts);
    let tag = Tag::new("facts", 0);
    let hashes = comm
        .all_gather_bytes(blake3::hash(own.as_bytes()).as_bytes(), tag)
        .map_err(|e| comm_failure(&e))?;
    if hashes.windows(2).all(|pair| pair[0] == pair[1]) {
        return Ok(());
    }
    let all = comm
        .all_gather_bytes(own.as_bytes(), Tag::new("facts", 1))
        .map_err(|e| comm_failure(&e))?;
    let all: Vec<Vec<(String, String)>> = all.iter().map(|bytes| decode(bytes)).collect();
    Err(failures::first_difference(&all))
}

fn encode(facts: &[(String, String)]) -> String {
    serde_json::to_string(facts).unwrap_or_default()
}

fn decode(bytes: &[u8]) -> Vec<(String, String)> {
    serde_json::from_slice(bytes).unwrap_or_default()
}

/// Checks that all ranks see the same output directory, into which all write checkpoints. Rank 0 creates a marker
/// file that every rank must find.
fn shared_directory(output: &Path, comm: &dyn Communicator, token: &str) -> Result<(), Failure> {
    let World { rank, .. } = comm.world();
    let mark = |token: &str| output.join(format!(".rendezvous-{token}"));
    let failed = |e: CommError| comm_failure(&e);
    let mut written = Ok(());
    if rank == 0 {
        let mark = mark(token);
        written = std::fs::create_dir_all(output)
            .and_then(|()| std::fs::write(&mark, token))
            .map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), &mark, &error));
    }
    // Exchanges the tokens. A rank that has received rank 0's token knows that the marker file was written before.
    let tokens = comm
        .all_gather_bytes(token.as_bytes(), Tag::new("shared folder", 0))
        .map_err(failed)?;
    let token = String::from_utf8_lossy(&tokens[0]).into_owned();
    let mark = mark(&token);
    let own = match std::fs::read(&mark) {
        Ok(bytes) if bytes == token.as_bytes() => String::new(),
        _ => host_name(),
    };
    let all = comm
        .all_gather_bytes(own.as_bytes(), Tag::new("shared folder", 1))
        .map_err(failed)?;
    if rank == 0 {
        std::fs::remove_file(&mark).ok();
    }
    written?;
    let blind = all.iter().enumerate().find(|(_, host)| !host.is_empty());
    let Some((rank, host)) = blind else {
        return Ok(());
    };
    Err(Failure::new(
        ErrorCode::Disk,
        text!(
            "rank {rank} does not see the output directory of rank 0",
            "rank {rank} 看不到 rank 0 的输出目录"
        ),
        both(
            "all ranks write their part of a checkpoint into one directory",
            "所有 rank 都把检查点中自己的部分写入同一个目录",
        ),
    )
    .evidence(text!(
        "{} on {} is another directory or does not exist",
        "{1} 上的 {0} 是另一个目录，或不存在",
        output.display(),
        String::from_utf8_lossy(host)
    ))
    .next(both(
        "put --output on a file system that all machines mount at the same path",
        "请把 --output 放在所有机器以相同路径挂载的文件系统上",
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(plan: &str) -> Vec<(String, String)> {
        [("program version", "1"), ("plan", plan)]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into()
    }

    pub(super) fn on_ranks<R: Send>(
        size: usize,
        run: impl Fn(&dyn Communicator) -> R + Sync,
    ) -> Vec<R> {
        let world = threads::world(size, 1 << 16).expect("a world");
        std::thread::scope(|scope| {
            let handles: Vec<_> = world
                .iter()
                .map(|comm| scope.spawn(|| run(&**comm)))
                .collect();
            let results = handles
                .into_iter()
                .map(|handle| handle.join().expect("a rank"));
            results.collect()
        })
    }

    #[test]
    fn the_rank_that_differs_is_named_on_every_rank() {
        let same = on_ranks(3, |comm| compare(&facts("a"), comm));
        assert!(same.iter().all(Result::is_ok));
        let results = on_ranks(3, |comm| {
            let plan = if comm.world().rank == 2 { "b" } else { "a" };
            compare(&facts(plan), comm)
        });
        for result in results {
            let failure = result.expect_err("differs");
            assert_eq!(failure.code, ErrorCode::Rendezvous);
            assert_eq!(
                failure.title,
                "rank 2 has another configuration: its plan differs"
            );
            assert_eq!(failure.evidence, ["rank 0 has \"a\"", "rank 2 has \"b\""]);
        }
    }

    #[test]
    fn settings_are_named_by_the_path_of_their_key() {
        let mut found = Vec::new();
        let long = "x".repeat(300);
        let settings = serde_json::json!({
            "seed": 3, "batch": {"micro_batch": 2, "files": ["a", "b"], "name": long},
        });
        add_settings("", &settings, &mut found);
        let names: Vec<&str> = found.iter().map(|(name, _)| &**name).collect();
        assert_eq!(
            names,
            ["seed", "batch.micro_batch", "batch.files", "batch.name"]
        );
        assert_eq!((&*found[1].1, &*found[2].1), ("2", r#"["a","b"]"#));
        assert_eq!(found[3].1.len(), 16);
    }

    #[test]
    fn jobs_with_equal_variables_have_different_tokens() {
        let env = |rank: usize, supervised: bool| {
            let rank = rank.to_string();
            let mut vars = vec![
                ("RANK", &*rank),
                ("LOCAL_RANK", &*rank),
                ("WORLD_SIZE", "3"),
            ];
            if supervised {
                vars.extend([("TESSERA_RUN_TOKEN", "abc"), ("TESSERA_JOB_DIR", "/job")]);
            }
            let env = crate::rank_env::Env::from_lookup(&|name| {
                let found = vars.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| value.into())
            });
            env.expect("reads").rank.expect("a rank")
        };
        let tokens = |supervised| {
            let found = on_ranks(3, |comm| {
                job_token(&env(comm.world().rank, supervised), comm).expect("a token")
            });
            assert!(found.iter().all(|token| *token == found[0]), "{found:?}");
            found[0].clone()
        };
        let (first, second) = (tokens(false), tokens(false));
        assert_ne!(first, second);
        assert!(first.len() >= 24 && first.bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert_eq!(tokens(true), "abc");
    }

    #[test]
    fn a_directory_that_a_rank_does_not_see_is_refused() {
        let shared = tempfile::tempdir().expect("temp dir");
        let other = tempfile::tempdir().expect("temp dir");
        let token = |comm: &dyn Communicator| format!("token{}", comm.world().rank);
        let seen = on_ranks(2, |comm| {
            shared_directory(shared.path(), comm, &token(comm))
        });
        assert!(seen.iter().all(Result::is_ok), "{seen:?}");
        assert_eq!(std::fs::read_dir(shared.path()).expect("listed").count(), 0);
        let seen = on_ranks(2, |comm| {
            let directories = [&shared, &other];
            shared_directory(directories[comm.world().rank].path(), comm, &token(comm))
        });
        for result in seen {
            let failure = result.expect_err("not shared");
            assert!(
                failure.title.starts_with("rank 1 does not see"),
                "{failure}"
            );
        }
    }
}
