//! Hostfiles in the format of mpirun and DeepSpeed: one machine per line, `host slots=N`, comments after `#`.
//!
//! Nothing is started on other machines. The same command line runs on each of them, finds its own line in the file,
//! and starts the ranks of that machine. The program prints what to run where.

mod choose;
#[cfg(test)]
mod tests;

use crate::lang::{Both, Text, both, text};
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use crate::cli::Args;
use crate::error::{ErrorCode, Failure};
use crate::rank_env::Env;
use crate::rank_env::identity::{Master, NodeAssignment};
use crate::ui::Event;

/// Conventional paths of hostfiles: DeepSpeed's, and that of Kubeflow's MPIJob.
pub const PLACES: [&str; 2] = ["/job/hostfile", "/etc/mpi/hostfile"];
/// Maximal size of a hostfile in bytes.
const MAX_BYTES: u64 = 1 << 20;
/// Maximal number of slots in one line.
const MAX_SLOTS: usize = 4096;
/// Maximal number of slots of all machines. Each takes memory, and a short line can declare thousands.
const MAX_ALL_SLOTS: usize = 1 << 16;

/// One machine of a hostfile, with the slots in which ranks run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Host name or address of the machine.
    pub name: String,
    /// Indices of the machine's slots in which ranks may run. A slot is room for one rank. The parser gives
    /// all slots; `--include` and `--exclude` may remove some.
    pub slots: Vec<usize>,
    /// Number of the machine's line in the hostfile, from 1.
    pub line: usize,
}

/// Machines of a hostfile in file order, from its content `bytes`. `path` only appears in error messages.
///
/// # Errors
/// As [`parse`], and if it is not text or too long (exit 2).
pub fn parse_bytes(bytes: &[u8], path: &Path) -> Result<Vec<Host>, Failure> {
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Failure::usage(
            text!(
                "{} has more than {MAX_BYTES} bytes",
                "{} 超过 {MAX_BYTES} 字节",
                path.display()
            ),
            both(
                "a hostfile is a short list of machines",
                "hostfile 是一份简短的机器列表",
            ),
        ));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        let what = text!(
            "{}: line {line} is not UTF-8 text",
            "{}：第 {line} 行不是 UTF-8 文本",
            path.display()
        );
        Failure::usage(what, FORM)
    })?;
    parse(text, path)
}

/// Machines of a hostfile in file order, from its content `text`. `path` only appears in error messages.
///
/// # Errors
/// A line is not of the form `host slots=N`, a host occurs twice, there are too many slots, or no host (exit 2). The
/// message names the line.
pub fn parse(text: &str, path: &Path) -> Result<Vec<Host>, Failure> {
    let mut hosts: Vec<Host> = Vec::new();
    let mut lines: HashMap<&str, usize> = HashMap::new();
    let mut all_slots = 0;
    for (number, line) in (1..).zip(text.lines()) {
        let bad = |what: Text| {
            Failure::usage(
                text!(
                    "{}: line {number}: {what}",
                    "{}：第 {number} 行：{what}",
                    path.display()
                ),
                FORM,
            )
            .evidence(Text::literal(
                line.trim().chars().take(200).collect::<String>(),
            ))
        };
        let mut words = line.split('#').next().unwrap_or("").split_whitespace();
        let Some(name) = words.next() else {
            continue;
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:[]".contains(c);
        if name.contains('=') || !name.chars().all(plain) {
            return Err(bad(text!(
                "'{name}' is not a machine name",
                "'{name}' 不是机器名"
            )));
        }
        let mut slots = None;
        for word in words {
            let count = match word.split_once('=') {
                Some(("slots", count)) => count,
                // A limit of mpirun beyond the slots; ignored.
                Some(("max_slots" | "max-slots", _)) => continue,
                _ => {
                    return Err(bad(text!(
                        "'{word}' is not understood",
                        "无法理解 '{word}'"
                    )));
                }
            };
            let parsed = count.parse().ok().filter(|n| (1..=MAX_SLOTS).contains(n));
            let parsed = parsed.ok_or_else(|| {
                bad(text!(
                    "slots={count} is not a number from 1 to {MAX_SLOTS}",
                    "slots={count} 不是 1 到 {MAX_SLOTS} 的数"
                ))
            })?;
            if slots.replace(parsed).is_some() {
                return Err(bad(both("slots are given twice", "slots 给出了两次").into()));
            }
        }
        if let Some(first) = lines.insert(name, number) {
            return Err(bad(text!(
                "{name} is already on line {first}",
                "{name} 已经在第 {first} 行出现"
            ))
            .next(text!(
                "use one line for {name}, with the sum of its slots",
                "请为 {name} 只写一行，slots 为其总和"
            )));
        }
        let slots = slots.unwrap_or(1);
        all_slots += slots;
        if all_slots > MAX_ALL_SLOTS {
            return Err(bad(text!(
                "there are more than {MAX_ALL_SLOTS} slots up to this line",
                "到该行为止 slot 超过 {MAX_ALL_SLOTS} 个"
            )));
        }
        hosts.push(Host {
            name: name.to_string(),
            slots: (0..slots).collect(),
            line: number,
        });
    }
    if hosts.is_empty() {
        return Err(Failure::usage(
            text!("{} lists no machine", "{} 中没有机器", path.display()),
            FORM,
        ));
    }
    Ok(hosts)
}

const FORM: Both = both(
    "a hostfile has one machine on each line, for example: gpu01 slots=4",
    "hostfile 每行一台机器，例如：gpu01 slots=4",
);

/// Number of this machine in the hostfile, and the ranks of every machine. `None` if no hostfile applies.
/// Messages for the user go to `show`.
///
/// The hostfile is that of `--hostfile`, or one at a conventional path if `--include` or `--exclude` selects
/// machines.
///
/// # Errors
/// All with exit 2: the file cannot be read or parsed, does not name this machine, or contradicts the
/// environment; no machine is selected; or a machine has fewer slots than `--nproc` asks for.
pub fn place(
    args: &Args,
    argv: &[String],
    env: &Env,
    show: &mut dyn FnMut(Event),
) -> Result<Option<NodeAssignment>, Failure> {
    let chooses = args.include.is_some() || args.exclude.is_some();
    let is_numbered = env.rank.is_some() || env.node.is_some();
    if is_numbered && !chooses && args.hostfile.is_none() {
        return Ok(None);
    }
    let Some((path, bytes)) = find(args.hostfile.as_deref(), chooses, show)? else {
        return Ok(None);
    };
    if let Some(rank) = &env.rank {
        return Err(Failure::usage(
            both(
                "--hostfile and the environment contradict each other",
                "--hostfile 与环境变量互相矛盾",
            ),
            text!(
                "{} already makes this process rank {}",
                "{} 已经使本进程成为 rank {}",
                rank.source,
                rank.rank
            ),
        )
        .next(both(
            "omit --hostfile if mpirun, srun or torchrun starts the ranks",
            "如果由 mpirun、srun 或 torchrun 启动各 rank，请去掉 --hostfile",
        )));
    }
    let (hosts, ranks) = selected(args, &bytes, &path)?;
    let own = own_place(&hosts, env, &path, argv)?;
    let port = env.node.as_ref().and_then(|node| node.master.port);
    let told = env.node.as_ref().and_then(|node| node.master.addr.clone());
    if hosts.len() > 1 {
        let names: Vec<String> = hosts
            .iter()
            .zip(&ranks)
            .map(|(host, ranks)| format!("{} {ranks}", host.name))
            .collect();
        show(Event::Info {
            label: both("hosts", "机器").into(),
            text: text!(
                "{} · this is {}",
                "{} · 本机是 {}",
                names.join(", "),
                hosts[own].name
            ),
        });
        for (_, host) in hosts.iter().enumerate().filter(|(index, _)| *index != own) {
            show(Event::Info {
                label: both("hosts", "机器").into(),
                text: text!("on {}: {}", "在 {} 上：{}", host.name, command(argv)),
            });
        }
    }
    Ok(Some(assignment(&hosts, ranks, own, told, port)))
}

/// The machine with the most ranks of the hostfile that `args` name, for planning without starting anything. `None` if
/// no hostfile is named. Messages for the user go to `show`.
///
/// # Errors
/// As [`place`], except that the file need not name this machine.
pub fn planned(
    args: &Args,
    show: &mut dyn FnMut(Event),
) -> Result<Option<NodeAssignment>, Failure> {
    let chooses = args.include.is_some() || args.exclude.is_some();
    if !chooses && args.hostfile.is_none() {
        return Ok(None);
    }
    let Some((path, bytes)) = find(args.hostfile.as_deref(), chooses, show)? else {
        return Ok(None);
    };
    let (hosts, ranks) = selected(args, &bytes, &path)?;
    // Of equal machines the first, which is that of rank 0.
    let most = ranks.iter().max().copied();
    let fullest = ranks.iter().position(|ranks| Some(*ranks) == most);
    Ok(Some(assignment(
        &hosts,
        ranks,
        fullest.unwrap_or(0),
        None,
        None,
    )))
}

/// The selected machines of a hostfile, and the ranks of each.
fn selected(args: &Args, bytes: &[u8], path: &Path) -> Result<(Vec<Host>, Vec<usize>), Failure> {
    let hosts = parse_bytes(bytes, path)?;
    let hosts = choose::choose(hosts, args.include.as_deref(), args.exclude.as_deref())?;
    let ranks = hosts.iter().map(|host| ranks_of(host, args.nproc, path));
    let ranks = ranks.collect::<Result<_, _>>()?;
    Ok((hosts, ranks))
}

/// Assignment of the machine `own` among `hosts` with their `ranks`. `addr` and `port` are those that the environment
/// tells for the rendezvous.
fn assignment(
    hosts: &[Host],
    ranks: Vec<usize>,
    own: usize,
    addr: Option<String>,
    port: Option<u16>,
) -> NodeAssignment {
    let named = format!("{}\n{}", hosts[0].name, ranks.len());
    NodeAssignment {
        node_rank: own,
        nodes: hosts.len(),
        ranks: None,
        counts: Some(ranks),
        master: Master {
            addr: addr.or_else(|| Some(hosts[0].name.clone())),
            port,
        },
        job: blake3::hash(named.as_bytes()).to_hex()[..24].to_string(),
    }
}

/// Path and content of the hostfile; `None` if there is none.
fn find(
    given: Option<&Path>,
    chooses: bool,
    show: &mut dyn FnMut(Event),
) -> Result<Option<(PathBuf, Vec<u8>)>, Failure> {
    let usual = || PLACES.iter().map(PathBuf::from).find(|path| path.exists());
    let path = match given {
        Some(path) if path.exists() => path.to_path_buf(),
        // DeepSpeed scripts name a hostfile that does not exist on a single machine.
        Some(path) if !chooses => {
            show(Event::Warning {
                text: text!(
                    "the hostfile {} does not exist: all ranks run on this machine",
                    "hostfile {} 不存在：所有 rank 都在本机运行",
                    path.display()
                ),
            });
            return Ok(None);
        }
        None if !chooses => {
            if let Some(path) = usual() {
                let text = text!(
                    "{} is ignored: --hostfile {0} runs on its machines",
                    "{} 被忽略：--hostfile {0} 会在其中的机器上运行",
                    path.display()
                );
                show(Event::Info {
                    label: both("hosts", "机器").into(),
                    text,
                });
            }
            return Ok(None);
        }
        Some(path) => return Err(no_file(&path.display().to_string())),
        None => usual().ok_or_else(|| no_file(&PLACES.join(" or ")))?,
    };
    let mut bytes = Vec::new();
    // One byte more than the limit shows that the file is too long, even for a pipe.
    File::open(&path)
        .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|error| Failure::io(ErrorCode::Usage, both("read", "读取"), &path, &error))?;
    Ok(Some((path, bytes)))
}

fn no_file(places: &str) -> Failure {
    Failure::usage(
        both(
            "--include and --exclude need a hostfile",
            "--include 和 --exclude 需要 hostfile",
        ),
        text!("{places} does not exist", "{places} 不存在"),
    )
    .next(Text::literal("--hostfile FILE"))
}

/// Number of ranks to start on `host`: `asked` (from `--nproc`) if given, otherwise one for each of its slots.
fn ranks_of(host: &Host, asked: Option<usize>, path: &Path) -> Result<usize, Failure> {
    match asked {
        Some(asked) if asked > host.slots.len() => Err(Failure::usage(
            text!(
                "--nproc {asked} is more than the {} slots of {}",
                "--nproc {asked} 超过了 {1} 的 {0} 个 slot",
                host.slots.len(),
                host.name
            ),
            both("each rank needs a slot", "每个 rank 需要一个 slot"),
        )
        .evidence(text!(
            "{}: line {}",
            "{}：第 {} 行",
            path.display(),
            host.line
        ))
        .next(text!(
            "--nproc {}, or more slots on that line",
            "--nproc {}，或在该行增加 slot",
            host.slots.len()
        ))),
        Some(asked) => Ok(asked),
        None => Ok(host.slots.len()),
    }
}

/// Index of this machine in `hosts`.
fn own_place(hosts: &[Host], env: &Env, path: &Path, argv: &[String]) -> Result<usize, Failure> {
    if let Some(node) = env.node.as_ref().filter(|node| node.nodes > 1) {
        if node.nodes != hosts.len() {
            return Err(Failure::usage(
                text!(
                    "{} has {} machines, the environment says {}",
                    "{} 中有 {} 台机器，环境变量给出的是 {}",
                    path.display(),
                    hosts.len(),
                    node.nodes
                ),
                both("both set the number of machines", "两者都设定机器的数量"),
            )
            .next(both(
                "unset NNODES, or select the same number of machines with --include",
                "请取消设置 NNODES，或用 --include 选择相同数量的机器",
            )));
        }
        return Ok(node.node_rank);
    }
    let name = host_name();
    if let Some(own) = hosts.iter().position(|host| same_name(&host.name, &name)) {
        return Ok(own);
    }
    // This machine can listen on its own addresses only.
    let is_here = |host: &Host| TcpListener::bind((&*host.name, 0)).is_ok();
    hosts.iter().position(is_here).ok_or_else(|| {
        let mut failure = Failure::usage(
            text!(
                "{} does not name this machine, {name}",
                "{} 中没有本机 {name}",
                path.display()
            ),
            both(
                "the program starts nothing on other machines: run the command on each of them",
                "程序不会在其他机器上启动任何进程：请在每台机器上运行该命令",
            ),
        )
        .next(both(
            "set NNODES and NODE_RANK if machines have other names in the file",
            "如果机器在文件中使用其他名称，请设置 NNODES 和 NODE_RANK",
        ));
        for host in hosts {
            failure = failure.next(text!("on {}: {}", "在 {} 上：{}", host.name, command(argv)));
        }
        failure
    })
}

/// Whether two names mean the same machine; either may lack its domain.
fn same_name(a: &str, b: &str) -> bool {
    let (a, b) = (a.to_ascii_lowercase(), b.to_ascii_lowercase());
    let first = |name: &str| name.split('.').next().unwrap_or_default().to_string();
    let is_address = |name: &str| name.parse::<std::net::IpAddr>().is_ok();
    a == b
        || !is_address(&a)
            && !is_address(&b)
            && (!a.contains('.') || !b.contains('.'))
            && first(&a) == first(&b)
}

/// Host name of this machine; `localhost` if it cannot be read.
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "localhost".to_string(),
        name => name.to_string(),
    }
}

/// The command line `argv` as one line of text, quoted for a shell.
fn command(argv: &[String]) -> String {
    let quoted = |word: &String| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@+%".contains(c);
        if !word.is_empty() && word.chars().all(plain) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', r"'\''"))
        }
    };
    let words: Vec<String> = argv.iter().map(quoted).collect();
    format!("launcher {}", words.join(" "))
}
