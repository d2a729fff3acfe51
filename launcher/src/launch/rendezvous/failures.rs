//! Conversion of a failed rendezvous to failures.

use engine::comm::tcp::{MeetError, TcpOptions};

use super::port;
use crate::error::failures::comm as comm_failure;
use crate::error::{ErrorCode, Failure, chain};
use crate::launch::hostfile::host_name;
use crate::rank_env::RankEnv;

const SAME_START: &str = "start all ranks from the same command line, files and build";

pub(super) fn rendezvous(error: &MeetError, env: &RankEnv, options: &TcpOptions) -> Failure {
    let place = format!("{}:{}", options.addr, options.port);
    let own = format!(
        "this is rank {} of {} on {}; numbers and address from {}",
        env.rank,
        env.world_size,
        host_name(),
        env.source
    );
    let failure = match error {
        MeetError::Missing {
            size,
            arrived,
            missing,
            turned_away,
            elapsed,
            ..
        } => {
            let came = arrived.iter().map(|(rank, host)| format!("{rank} ({host})"));
            Failure::new(
                ErrorCode::Rendezvous,
                format!(
                    "rendezvous incomplete after {:.0} s: {} of {size} ranks arrived",
                    elapsed.as_secs_f64(),
                    arrived.len()
                ),
                format!("ranks {missing:?} never connected to {place}"),
            )
            .evidence(format!("connected: {}", came.collect::<Vec<_>>().join(", ")))
            .evidence_lines(turned_away.iter().map(|line| format!("refused: {line}")))
            .next("read the logs of the missing ranks; raise --comm-timeout if a rank starts slowly")
            .next(format!("check on their machines that {place} can be reached and that no firewall blocks it"))
        }
        MeetError::Unreachable { elapsed, .. } => Failure::new(
            ErrorCode::Rendezvous,
            format!("rank {} could not connect to {place} in {:.0} s", env.rank, elapsed.as_secs_f64()),
            chain(error),
        )
        .next("check that rank 0 has started and that MASTER_ADDR names its machine")
        .next("check that this machine can reach it and that no firewall blocks the port"),
        MeetError::Address { .. } => Failure::new(
            ErrorCode::Rendezvous,
            format!("the rendezvous at {place} failed"),
            chain(error),
        )
        .next("set MASTER_ADDR to a name or address of the first machine"),
        MeetError::PortInUse { port } => port_in_use(*port),
        MeetError::Refused { .. } | MeetError::Stranger { .. } => Failure::new(
            ErrorCode::Rendezvous,
            "the ranks have different tokens",
            chain(error),
        )
        .next("use the same TESSERA_JOB_TOKEN, or the same content of TESSERA_JOB_TOKEN_FILE, on every machine")
        .next("use another MASTER_PORT if another job uses this one"),
        MeetError::Differs {
            rank,
            what,
            theirs,
            ours,
            ..
        } => differs(*rank, what, theirs, ours),
        MeetError::Twice { rank, .. } => Failure::new(
            ErrorCode::Rendezvous,
            format!("two processes are rank {rank}"),
            chain(error),
        )
        .next("number the machines differently, with NODE_RANK or with the launcher that sets RANK"),
        MeetError::Window(inner) => comm_failure(inner),
        _ => Failure::new(
            ErrorCode::Rendezvous,
            "the rendezvous failed",
            chain(error),
        )
        .next("the report of rank 0 has the cause"),
    };
    failure.evidence(own)
}

fn differs(rank: usize, what: &str, theirs: &str, ours: &str) -> Failure {
    Failure::new(
        ErrorCode::Rendezvous,
        format!("rank {rank} has another configuration: its {what} differs"),
        "ranks with different configurations would wait for each other forever",
    )
    .evidence(format!("rank 0 has {ours:?}"))
    .evidence(format!("rank {rank} has {theirs:?}"))
    .next(SAME_START)
}

/// Failure that names the first rank that differs from rank 0.
pub(super) fn first_difference(all: &[Vec<(String, String)>]) -> Failure {
    let value = |rank: usize, name: &str| {
        let found = all[rank].iter().find(|(known, _)| known == name);
        found.map_or("nothing", |(_, value)| value)
    };
    for (rank, facts) in all.iter().enumerate().skip(1) {
        for (name, _) in all[0].iter().chain(facts) {
            let (ours, theirs) = (value(0, name), value(rank, name));
            if ours != theirs {
                return differs(rank, name, theirs, ours);
            }
        }
    }
    Failure::new(
        ErrorCode::Rendezvous,
        "the ranks have different configurations",
        "their configurations have another order",
    )
    .next(SAME_START)
}

fn port_in_use(port: u16) -> Failure {
    let owner = port::owner(port);
    let who = owner.as_ref().map_or_else(
        || "a process that is not visible to this user".to_string(),
        |(pid, name)| format!("process {pid} ({name})"),
    );
    Failure::new(
        ErrorCode::PortInUse,
        format!("port {port} is in use on {}", host_name()),
        format!("{who} listens on it, and it is the rendezvous port of this run"),
    )
    .next(format!(
        "set MASTER_PORT to another port on every machine, such as {}",
        port.checked_add(1).unwrap_or(crate::rank_env::DEFAULT_PORT)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn the_process_that_listens_at_a_port_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listens");
        let port = listener.local_addr().expect("an address").port();
        let failure = port_in_use(port);
        assert_eq!((failure.code.as_str(), failure.code.status()), ("E14", 13));
        let own = format!("process {} (", std::process::id());
        assert!(failure.cause.starts_with(&own), "{failure}");
        assert!(failure.next[0].contains("MASTER_PORT"));
        drop(listener);
        assert_eq!(port::owner(port), None);
    }
}
