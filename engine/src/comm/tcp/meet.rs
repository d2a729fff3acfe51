//! The rendezvous: a star around rank 0, then a connection between every two ranks.

use super::greetings::Greetings;
use super::handshake::{self, Identity, Peer};
use super::wire::Link;
use super::{MeetError, TcpOptions, is_loopback};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Pause between polls for a new connection.
const POLL: Duration = Duration::from_millis(2);
/// First and longest pause between attempts to reach rank 0, which may start later.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));
/// Longest time for one connection attempt.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Message in which a rank introduces itself to rank 0.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Report {
    host: String,
    facts: Vec<(String, String)>,
    /// Port at which this rank listens for higher ranks.
    port: u16,
}

/// Answer of rank 0 to a rank's report.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Verdict {
    /// Address and port of each rank; no address for ranks on the machine of rank 0.
    Go(Vec<(Option<IpAddr>, u16)>),
    /// The rendezvous has failed for this reason.
    End(Reason),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
enum Reason {
    Differs {
        rank: usize,
        host: String,
        what: String,
        theirs: String,
        ours: String,
    },
    Other(String),
}

/// Parses any message of the rendezvous.
pub(super) fn read_message(whole: &[u8]) -> io::Result<()> {
    let report = handshake::read_message::<Report>(whole).map(drop);
    let verdict = handshake::read_message::<Verdict>(whole).map(drop);
    report.or(verdict).or(handshake::read_message::<()>(whole))
}

fn own(options: &TcpOptions) -> Identity {
    Identity {
        rank: options.world.rank,
        size: options.world.size,
        secret: options.secret.clone(),
        stop: options.stop.clone(),
    }
}

/// Connects all ranks to each other by `until`. Returns one connection per rank, in rank order; `None` for this rank.
pub(super) fn meet(
    options: &TcpOptions,
    listener: Option<TcpListener>,
    until: Instant,
) -> Result<Vec<Option<Link>>, MeetError> {
    let size = options.world.size;
    let mut links: Vec<Option<Link>> = (0..size).map(|_| None).collect();
    if size == 1 {
        return Ok(links);
    }
    let peers = match options.world.rank {
        0 => host(options, listener, until)?,
        _ => visit(options, until)?,
    };
    for peer in peers {
        let rank = peer.rank;
        links[rank] = Some(peer.into_link()?);
    }
    Ok(links)
}

fn resolve(options: &TcpOptions) -> Result<Vec<SocketAddr>, MeetError> {
    let found = (&*options.addr, options.port).to_socket_addrs();
    let address = |source| MeetError::Address {
        addr: options.addr.clone(),
        source,
    };
    let found: Vec<SocketAddr> = found.map_err(address)?.collect();
    if found.is_empty() {
        return Err(address(io::ErrorKind::NotFound.into()));
    }
    Ok(found)
}

/// Whether the address of rank 0 is that of the loopback interface by its text. A machine's own name may resolve to a
/// loopback address on that machine, and to another one elsewhere.
fn is_one_machine(options: &TcpOptions) -> bool {
    ["localhost", "127.0.0.1", "::1"].contains(&&*options.addr)
}

/// Opens the listener of rank 0 at the first of its addresses that this machine has.
///
/// The name of this machine may resolve to an address that it does not have, such as that of a service or a translated
/// one. Rank 0 then listens on all interfaces.
fn open(options: &TcpOptions) -> Result<TcpListener, MeetError> {
    let found = resolve(options).unwrap_or_default();
    let is_one_machine = is_one_machine(options);
    let own = found.iter().map(SocketAddr::ip);
    let own = own.filter(|ip| is_one_machine || !is_loopback(*ip));
    let all: IpAddr = match !found.is_empty() && found.iter().all(SocketAddr::is_ipv6) {
        true => Ipv6Addr::UNSPECIFIED.into(),
        false => Ipv4Addr::UNSPECIFIED.into(),
    };
    let bind = |ip: IpAddr| match listen(ip, options.port) {
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => None,
        outcome => Some(outcome),
    };
    let listener = own.chain([all]).find_map(bind);
    let listener = listener.unwrap_or_else(|| Err(io::ErrorKind::AddrNotAvailable.into()));
    listener.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => MeetError::PortInUse { port: options.port },
        _ => MeetError::Address {
            addr: format!("{}:{}", options.addr, options.port),
            source,
        },
    })
}

pub(super) fn listen(ip: IpAddr, port: u16) -> io::Result<TcpListener> {
    let listener = TcpListener::bind((ip, port))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The rendezvous as rank 0 runs it.
fn host(
    options: &TcpOptions,
    listener: Option<TcpListener>,
    until: Instant,
) -> Result<Vec<Peer>, MeetError> {
    let started = Instant::now();
    let size = options.world.size;
    let listener = match listener {
        Some(listener) => listener,
        None => open(options)?,
    };
    let mut guests: BTreeMap<usize, (Peer, Report)> = BTreeMap::new();
    let mut turned_away = Vec::new();
    let own = own(options);
    let outcome = receive_guests(&listener, &own, until, |guest| {
        let (mut peer, report): (Peer, Report) = match guest {
            Ok(guest) => guest,
            Err(error) => {
                if turned_away.len() < 8 {
                    turned_away.push(error.to_string());
                }
                return Ok(guests.len() + 1 == size);
            }
        };
        let problem = if peer.size != size || peer.rank >= size || peer.rank == 0 {
            Some(MeetError::Differs {
                rank: peer.rank,
                host: report.host.clone(),
                what: "a world of".to_owned(),
                theirs: format!("{} ranks", peer.size),
                ours: format!("{size} ranks"),
            })
        } else if let Some((_, first)) = guests.get(&peer.rank) {
            Some(MeetError::Twice {
                rank: peer.rank,
                hosts: [first.host.clone(), report.host.clone()],
            })
        } else {
            difference(peer.rank, &report, &options.facts)
        };
        if let Some(problem) = problem {
            // A rank that has left needs no answer.
            peer.send(&Verdict::End(reason(&problem)), until).ok();
            return Err(problem);
        }
        guests.insert(peer.rank, (peer, report));
        Ok(guests.len() + 1 == size)
    });
    let problem = match outcome {
        Ok(true) => None,
        Ok(false) => Some(MeetError::Missing {
            addr: format!("{}:{}", options.addr, options.port),
            size,
            arrived: std::iter::once((0, options.host.clone()))
                .chain(
                    guests
                        .iter()
                        .map(|(rank, (_, report))| (*rank, report.host.clone())),
                )
                .collect(),
            missing: (1..size)
                .filter(|rank| !guests.contains_key(rank))
                .collect(),
            turned_away,
            elapsed: started.elapsed(),
        }),
        Err(problem) => Some(problem),
    };
    // The answer gets additional time, since the deadline is over if ranks are missing.
    let until = until.max(Instant::now() + Duration::from_secs(2));
    if let Some(problem) = problem {
        let verdict = Verdict::End(reason(&problem));
        for (peer, _) in guests.values_mut() {
            peer.send(&verdict, until).ok();
        }
        return Err(problem);
    }
    let place = |(peer, report): &(Peer, Report)| {
        let ip = peer.stream.peer_addr().ok().map(|addr| addr.ip());
        (ip.filter(|ip| !is_loopback(*ip)), report.port)
    };
    let mut places = vec![(None, options.port)];
    places.extend(guests.values().map(place));
    let verdict = Verdict::Go(places);
    let mut peers = Vec::with_capacity(size - 1);
    for (_, (mut peer, _)) in guests {
        peer.send(&verdict, until)?;
        peers.push(peer);
    }
    Ok(peers)
}

/// The first fact in which a rank differs from rank 0.
fn difference(rank: usize, report: &Report, facts: &[(String, String)]) -> Option<MeetError> {
    let names = facts.iter().chain(&report.facts).map(|(name, _)| name);
    let value = |facts: &[(String, String)], name: &str| {
        let found = facts.iter().find(|(known, _)| known == name);
        found.map_or("nothing", |(_, value)| value).to_owned()
    };
    names
        .map(|name| (name, value(&report.facts, name), value(facts, name)))
        .find(|(_, theirs, ours)| theirs != ours)
        .map(|(name, theirs, ours)| MeetError::Differs {
            rank,
            host: report.host.clone(),
            what: name.clone(),
            theirs,
            ours,
        })
}

fn reason(error: &MeetError) -> Reason {
    match error {
        MeetError::Differs {
            rank,
            host,
            what,
            theirs,
            ours,
        } => Reason::Differs {
            rank: *rank,
            host: host.clone(),
            what: what.clone(),
            theirs: theirs.clone(),
            ours: ours.clone(),
        },
        MeetError::Missing {
            addr,
            size,
            missing,
            ..
        } => Reason::Other(format!(
            "of {size} ranks {missing:?} did not come to {addr}"
        )),
        other => Reason::Other(other.to_string()),
    }
}

/// Greets connections until `take` reports that all ranks are there. Returns false if the time ends before.
fn receive_guests<T: DeserializeOwned + Send + 'static>(
    listener: &TcpListener,
    own: &Identity,
    until: Instant,
    mut take: impl FnMut(Result<(Peer, T), MeetError>) -> Result<bool, MeetError>,
) -> Result<bool, MeetError> {
    let mut greetings = Greetings::new(own.clone());
    loop {
        // A failed connection does not affect the others.
        if let Ok((stream, from)) = listener.accept() {
            greetings.start(stream, from.ip(), until);
            continue;
        }
        if let Some(guest) = greetings.next(POLL)
            && take(guest)?
        {
            return Ok(true);
        }
        if is_over(own, until, Duration::ZERO) {
            return Ok(false);
        }
    }
}

/// Whether no time is left after `pause`, or the caller wants to stop.
fn is_over(own: &Identity, until: Instant, pause: Duration) -> bool {
    Instant::now() + pause >= until || own.stop.load(Ordering::SeqCst)
}

/// The rendezvous as every rank but 0 runs it.
fn visit(options: &TcpOptions, until: Instant) -> Result<Vec<Peer>, MeetError> {
    let rank = options.world.rank;
    let own = own(options);
    let (mut first, found) = call(&own, until, || reach(options, until))?;
    let broken = |source| MeetError::Broken {
        from: "this machine's own network".to_owned(),
        source,
    };
    // The other ranks reach this one at the address from which it reached rank 0. If that is a loopback address, they
    // use the address of rank 0.
    let ip = first.stream.local_addr().map_err(broken)?.ip();
    let ip = match (is_loopback(ip) && !is_one_machine(options), ip) {
        (true, IpAddr::V4(_)) => Ipv4Addr::UNSPECIFIED.into(),
        (true, IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
        (false, ip) => ip,
    };
    let listener = listen(ip, 0).map_err(broken)?;
    let port = listener.local_addr().map_err(broken)?.port();
    if first.rank != 0 {
        return Err(MeetError::Stranger {
            from: found.to_string(),
            what: format!("is rank {}, not rank 0", first.rank),
        });
    }
    let report = Report {
        host: options.host.clone(),
        facts: options.facts.clone(),
        port,
    };
    first.send(&report, until)?;
    // Rank 0 waits for the slowest rank until its own deadline, and answers shortly afterwards.
    let patience = until + options.deadline;
    let places = match first.receive(patience)? {
        Verdict::Go(places) if places.len() == own.size => places,
        Verdict::Go(_) => {
            return Err(MeetError::Stranger {
                from: found.to_string(),
                what: "lists another number of ranks".to_owned(),
            });
        }
        Verdict::End(Reason::Differs {
            rank,
            host,
            what,
            theirs,
            ours,
        }) => {
            return Err(MeetError::Differs {
                rank,
                host,
                what,
                theirs,
                ours,
            });
        }
        Verdict::End(Reason::Other(reason)) => return Err(MeetError::Ended { reason }),
    };
    let until = Instant::now() + options.deadline;
    let mut peers = vec![first];
    for (other, (ip, port)) in places.iter().enumerate().take(rank).skip(1) {
        let addr = SocketAddr::new(ip.unwrap_or(found.ip()), *port);
        let connect = || {
            let left = until.saturating_duration_since(Instant::now());
            let stream = TcpStream::connect_timeout(&addr, left.max(POLL));
            let stream = stream.map_err(|source| MeetError::Unreachable {
                rank,
                addr: format!("{addr} of rank {other}"),
                elapsed: Duration::ZERO,
                source,
            })?;
            Ok((stream, addr))
        };
        let (mut peer, _) = call(&own, until, connect)?;
        peer.send(&(), until)?;
        peers.push(peer);
    }
    let mut above: BTreeMap<usize, Peer> = BTreeMap::new();
    let started = Instant::now();
    let expected = own.size - rank - 1;
    let mut turned_away = Vec::new();
    let complete = expected == 0
        || receive_guests(&listener, &own, until, |guest: Result<(Peer, ()), _>| {
            match guest {
                Ok((peer, ())) if peer.rank > rank && peer.rank < own.size => {
                    above.insert(peer.rank, peer);
                }
                Ok(_) => {}
                Err(error) => turned_away.push(error.to_string()),
            }
            Ok(above.len() == expected)
        })?;
    if !complete {
        return Err(MeetError::Missing {
            addr: format!("rank {rank} on {}", options.host),
            size: own.size,
            arrived: (0..=rank)
                .chain(above.keys().copied())
                .map(|rank| (rank, String::new()))
                .collect(),
            missing: (rank + 1..own.size)
                .filter(|rank| !above.contains_key(rank))
                .collect(),
            turned_away,
            elapsed: started.elapsed(),
        });
    }
    peers.extend(above.into_values());
    Ok(peers)
}

/// Connects to a rank and shakes hands with it. If the connection ends before that rank has judged the proof, it tries
/// again until the deadline: the other side may have had too many connections, or a proxy answers for it.
fn call(
    own: &Identity,
    until: Instant,
    mut connect: impl FnMut() -> Result<(TcpStream, SocketAddr), MeetError>,
) -> Result<(Peer, SocketAddr), MeetError> {
    let (mut pause, longest) = PAUSES;
    loop {
        let (stream, found) = connect()?;
        // A side that is silent must not take all of the time.
        let patience = until.min(Instant::now() + ATTEMPT);
        match handshake::call(stream, own, patience) {
            Err(MeetError::Broken { .. }) if !is_over(own, until, pause) => {}
            outcome => return Ok((outcome?, found)),
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(longest);
    }
}

/// Connects to rank 0, which may start later than this rank.
fn reach(options: &TcpOptions, until: Instant) -> Result<(TcpStream, SocketAddr), MeetError> {
    let started = Instant::now();
    let (mut pause, longest) = PAUSES;
    let mut last: io::Error = io::ErrorKind::TimedOut.into();
    loop {
        // Names of machines that are still starting may resolve later.
        match resolve(options) {
            Ok(addresses) => {
                for addr in addresses {
                    let left = until.saturating_duration_since(Instant::now()).min(ATTEMPT);
                    if left.is_zero() {
                        break;
                    }
                    match TcpStream::connect_timeout(&addr, left) {
                        Ok(stream) => return Ok((stream, addr)),
                        Err(error) => last = error,
                    }
                }
            }
            Err(MeetError::Address { source, .. }) => last = source,
            Err(error) => return Err(error),
        }
        if Instant::now() + pause >= until || options.stop.load(Ordering::SeqCst) {
            return Err(MeetError::Unreachable {
                rank: options.world.rank,
                addr: format!("{}:{}", options.addr, options.port),
                elapsed: started.elapsed(),
                source: last,
            });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(longest);
    }
}
