//! Hostfiles in the format of mpirun and DeepSpeed: one machine per line, `host slots=N`, comments after `#`.
//!
//! Nothing is started on other machines. The same command line runs on each of them, finds its own line in the file,
//! and starts the ranks of that machine. The program prints what to run where.

mod choose;
#[cfg(test)]
mod tests;

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
            format!("{} has more than {MAX_BYTES} bytes", path.display()),
            "a hostfile is a short list of machines",
        ));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        let what = format!("{}: line {line} is not UTF-8 text", path.display());
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
        let bad = |what: String| {
            Failure::usage(format!("{}: line {number}: {what}", path.display()), FORM)
                .evidence(line.trim().chars().take(200).collect::<String>())
        };
        let mut words = line.split('#').next().unwrap_or("").split_whitespace();
        let Some(name) = words.next() else {
            continue;
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:[]".contains(c);
        if name.contains('=') || !name.chars().all(plain) {
            return Err(bad(format!("'{name}' is not a machine name")));
        }
        let mut slots = None;
        for word in words {
            let count = match word.split_once('=') {
                Some(("slots", count)) => count,
                // A limit of mpirun beyond the slots; ignored.
                Some(("max_slots" | "max-slots", _)) => continue,
                _ => return Err(bad(format!("'{word}' is not understood"))),
            };
            let parsed = count.parse().ok().filter(|n| (1..=MAX_SLOTS).contains(n));
            let parsed = parsed.ok_or_else(|| {
                bad(format!(
                    "slots={count} is not a number from 1 to {MAX_SLOTS}"
                ))
            })?;
            if slots.replace(parsed).is_some() {
                return Err(bad("slots are given twice".to_string()));
            }
        }
        if let Some(first) = lines.insert(name, number) {
            return Err(
                bad(format!("{name} is already on line {first}")).next(format!(
                    "use one line for {name}, with the sum of its slots"
                )),
            );
        }
        let slots = slots.unwrap_or(1);
        all_slots += slots;
        if all_slots > MAX_ALL_SLOTS {
            return Err(bad(format!(
                "there are more than {MAX_ALL_SLOTS} slots up to this line"
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
            format!("{} lists no machine", path.display()),
            FORM,
        ));
    }
    Ok(hosts)
}

const FORM: &str = "a hostfile has one machine on each line, for example: gpu01 slots=4";

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
            "--hostfile and the environment contradict each other",
            format!(
                "{} already makes this process rank {}",
                rank.source, rank.rank
            ),
        )
        .next("omit --hostfile if mpirun, srun or torchrun starts the ranks"));
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
            label: "hosts".into(),
            text: format!("{} · this is {}", names.join(", "), hosts[own].name),
        });
        for (_, host) in hosts.iter().enumerate().filter(|(index, _)| *index != own) {
            show(Event::Info {
                label: "hosts".into(),
                text: format!("on {}: {}", host.name, command(argv)),
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
                text: format!(
                    "the hostfile {} does not exist: all ranks run on this machine",
                    path.display()
                ),
            });
            return Ok(None);
        }
        None if !chooses => {
            if let Some(path) = usual() {
                let text = format!(
                    "{} is ignored: --hostfile {0} runs on its machines",
                    path.display()
                );
                show(Event::Info {
                    label: "hosts".into(),
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
        .map_err(|error| Failure::io(ErrorCode::Usage, "read", &path, &error))?;
    Ok(Some((path, bytes)))
}

fn no_file(places: &str) -> Failure {
    Failure::usage(
        "--include and --exclude need a hostfile",
        format!("{places} does not exist"),
    )
    .next("--hostfile FILE")
}

/// Number of ranks to start on `host`: `asked` (from `--nproc`) if given, otherwise one for each of its slots.
fn ranks_of(host: &Host, asked: Option<usize>, path: &Path) -> Result<usize, Failure> {
    match asked {
        Some(asked) if asked > host.slots.len() => Err(Failure::usage(
            format!(
                "--nproc {asked} is more than the {} slots of {}",
                host.slots.len(),
                host.name
            ),
            "each rank needs a slot",
        )
        .evidence(format!("{}: line {}", path.display(), host.line))
        .next(format!(
            "--nproc {}, or more slots on that line",
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
                format!(
                    "{} has {} machines, the environment says {}",
                    path.display(),
                    hosts.len(),
                    node.nodes
                ),
                "both set the number of machines",
            )
            .next("unset NNODES, or select the same number of machines with --include"));
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
            format!("{} does not name this machine, {name}", path.display()),
            "the program starts nothing on other machines: run the command on each of them",
        )
        .next("set NNODES and NODE_RANK if machines have other names in the file");
        for host in hosts {
            failure = failure.next(format!("on {}: {}", host.name, command(argv)));
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
