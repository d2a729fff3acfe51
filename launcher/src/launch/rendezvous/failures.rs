//! Conversion of a failed rendezvous to failures.

use crate::lang::{Both, both, text};
use engine::comm::tcp::{MeetError, TcpOptions};

use super::port;
use crate::error::failures::comm as comm_failure;
use crate::error::{ErrorCode, Failure, chain};
use crate::launch::hostfile::host_name;
use crate::rank_env::RankEnv;

const SAME_START: Both = both(
    "start all ranks from the same command line, files and build",
    "请用相同的命令行、文件和构建启动所有 rank",
);

pub(super) fn rendezvous(error: &MeetError, env: &RankEnv, options: &TcpOptions) -> Failure {
    let place = format!("{}:{}", options.addr, options.port);
    let own = text!(
        "this is rank {} of {} on {}; numbers and address from {}",
        "本 rank 为 {}，共 {} 个，位于 {}；编号和地址来自 {}",
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
            let came: Vec<String> = came.collect();
            Failure::new(
                ErrorCode::Rendezvous,
                text!("rendezvous incomplete after {:.0} s: {} of {size} ranks arrived", "会合未完成：{:.0} 秒后只有 {} 个 rank 到达，共 {size} 个",
                    elapsed.as_secs_f64(),
                    arrived.len()
                ),
                text!("ranks {missing:?} never connected to {place}", "rank {missing:?} 始终没有连接到 {place}"),
            )
            .evidence(text!("connected: {}", "已连接：{}", came.join(", ")))
            .evidence_lines(turned_away.iter().map(|line| text!("refused: {line}", "已拒绝：{line}")))
            .next(both("read the logs of the missing ranks; raise --comm-timeout if a rank starts slowly", "请查看缺失 rank 的日志；如果某个 rank 启动较慢，请提高 --comm-timeout"))
            .next(text!("check on their machines that {place} can be reached and that no firewall blocks it", "请在这些机器上检查能否访问 {place}，以及是否有防火墙阻挡"))
        }
        MeetError::Unreachable { elapsed, .. } => Failure::new(
            ErrorCode::Rendezvous,
            text!("rank {} could not connect to {place} in {:.0} s", "rank {} 在 {1:.0} 秒内无法连接到 {place}", env.rank, elapsed.as_secs_f64()),
            chain(error),
        )
        .next(both("check that rank 0 has started and that MASTER_ADDR names its machine", "请检查 rank 0 是否已启动，以及 MASTER_ADDR 是否指向它所在的机器"))
        .next(both("check that this machine can reach it and that no firewall blocks the port", "请检查本机能否访问它，以及是否有防火墙阻挡该端口")),
        MeetError::Address { .. } => Failure::new(
            ErrorCode::Rendezvous,
            text!("the rendezvous at {place} failed", "在 {place} 的会合失败"),
            chain(error),
        )
        .next(both("set MASTER_ADDR to a name or address of the first machine", "请把 MASTER_ADDR 设为第一台机器的名称或地址")),
        MeetError::PortInUse { port } => port_in_use(*port),
        MeetError::Refused { .. } | MeetError::Stranger { .. } => Failure::new(
            ErrorCode::Rendezvous,
            both("the ranks have different tokens", "各 rank 的令牌不同"),
            chain(error),
        )
        .next(both("use the same TESSERA_JOB_TOKEN, or the same content of TESSERA_JOB_TOKEN_FILE, on every machine", "请在每台机器上使用相同的 TESSERA_JOB_TOKEN，或内容相同的 TESSERA_JOB_TOKEN_FILE"))
        .next(both("use another MASTER_PORT if another job uses this one", "如果另一个作业占用了该 MASTER_PORT，请换一个")),
        MeetError::Differs {
            rank,
            what,
            theirs,
            ours,
            ..
        } => differs(*rank, what, theirs, ours),
        MeetError::Twice { rank, .. } => Failure::new(
            ErrorCode::Rendezvous,
            text!("two processes are rank {rank}", "有两个进程都是 rank {rank}"),
            chain(error),
        )
        .next(both("number the machines differently, with NODE_RANK or with the launcher that sets RANK", "请用 NODE_RANK 或设置 RANK 的启动器为各机器分配不同的编号")),
        MeetError::Window(inner) => comm_failure(inner),
        _ => Failure::new(
            ErrorCode::Rendezvous,
            both("the rendezvous failed", "会合失败"),
            chain(error),
        )
        .next(both("the report of rank 0 has the cause", "原因见 rank 0 的报告")),
    };
    failure.evidence(own)
}

fn differs(rank: usize, what: &str, theirs: &str, ours: &str) -> Failure {
    Failure::new(
        ErrorCode::Rendezvous,
        text!(
            "rank {rank} has another configuration: its {what} differs",
            "rank {rank} 的配置不同：{what}不一致"
        ),
        both(
            "ranks with different configurations would wait for each other forever",
            "配置不同的 rank 会永远互相等待",
        ),
    )
    .evidence(text!("rank 0 has {ours:?}", "rank 0 为 {ours:?}"))
    .evidence(text!(
        "rank {rank} has {theirs:?}",
        "rank {rank} 为 {theirs:?}"
    ))
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
        both(
            "the ranks have different configurations",
            "各 rank 的配置不同",
        ),
        both(
            "their configurations have another order",
            "它们的配置顺序不同",
        ),
    )
    .next(SAME_START)
}

fn port_in_use(port: u16) -> Failure {
    let owner = port::owner(port);
    let who = owner.as_ref().map_or_else(
        || {
            both(
                "a process that is not visible to this user",
                "对当前用户不可见的某个进程",
            )
            .into()
        },
        |(pid, name)| text!("process {pid} ({name})", "进程 {pid}（{name}）"),
    );
    Failure::new(
        ErrorCode::PortInUse,
        text!(
            "port {port} is in use on {}",
            "{} 上的端口 {port} 已被占用",
            host_name()
        ),
        text!(
            "{who} listens on it, and it is the rendezvous port of this run",
            "{who} 正在监听它，而它是本次运行的会合端口"
        ),
    )
    .next(text!(
        "set MASTER_PORT to another port on every machine, such as {}",
        "请在每台机器上把 MASTER_PORT 设为另一个端口，例如 {}",
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
        crate::lang::assert_chinese(&failure);
        drop(listener);
        assert_eq!(port::owner(port), None);
    }
}
