//! Ranks on several machines. Their rendezvous is at rank 0 over TCP, and every two ranks keep a connection.
//!
//! Rank 0 listens at an address that all ranks know. Every rank proves that it knows the job's secret ([`Secret`]),
//! sends its facts about the run ([`TcpOptions::facts`]), and receives the addresses of the others. `README.md` of the
//! communicators describes the later exchange. Every frame carries a keyed hash, so changed, repeated and missing frames
//! end the job. Nothing is encrypted: others on the network can read the data.

mod frame;
mod greetings;
mod groups;
mod handshake;
mod meet;
mod secret;
mod wire;

#[cfg(test)]
pub(super) mod tests;

pub use groups::Groups;
pub use secret::{MIN_SECRET_BYTES, Secret};

use super::mirror::Remote;
use super::{CommError, Communicator, World};
use std::io;
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Options for joining a communicator of processes on several machines. The rank, the facts and the host name
/// are those of this process; all others are the same on every rank.
#[derive(Clone, Debug)]
pub struct TcpOptions {
    /// Index of this rank, and the number of ranks.
    pub world: World,
    /// Size in bytes of each rank's part of the window (memory with the data of all ranks, of which every
    /// process has a copy).
    pub region_bytes: usize,
    /// Longest time for the rendezvous, and for any later wait in a collective.
    pub deadline: Duration,
    /// Host name or IP address of rank 0.
    pub addr: String,
    /// TCP port on which rank 0 listens.
    pub port: u16,
    /// Secret of the job, by which its ranks recognize each other.
    pub secret: Secret,
    /// Names and values of facts about this rank's run, e.g. versions or the plan. Joining fails if a value
    /// differs from that of rank 0.
    pub facts: Vec<(String, String)>,
    /// Name of this machine, shown in error messages.
    pub host: String,
    /// Ends the rendezvous with [`CommError::Stopped`] once it is set.
    pub stop: Arc<AtomicBool>,
}

/// Error of the rendezvous, in which ranks of several machines connect to each other.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeetError {
    /// Not every rank came to the rendezvous in time.
    #[error("{} of {size} ranks came to {addr} within {:.1} s", arrived.len(), elapsed.as_secs_f64())]
    Missing {
        /// Address of rank 0.
        addr: String,
        /// Number of ranks in the world.
        size: usize,
        /// Ranks that came, each with the name of its machine.
        arrived: Vec<(usize, String)>,
        /// Ranks that did not come.
        missing: Vec<usize>,
        /// Rejected connections: their address and the reason.
        turned_away: Vec<String>,
        /// Time that rank 0 waited.
        elapsed: Duration,
    },
    /// Nobody answers at the address of rank 0.
    #[error("rank {rank} reached nobody at {addr} within {:.1} s", elapsed.as_secs_f64())]
    Unreachable {
        /// The rank that could not connect.
        rank: usize,
        /// Address that this rank tried.
        addr: String,
        /// Time for which this rank tried.
        elapsed: Duration,
        /// Error of the last attempt to connect.
        source: io::Error,
    },
    /// The address of rank 0 does not resolve, or rank 0 cannot listen there.
    #[error("{addr} is no address")]
    Address {
        /// The address.
        addr: String,
        /// The error of the resolver or of the listener.
        source: io::Error,
    },
    /// Another program listens at the port of rank 0.
    #[error("port {port} is in use")]
    PortInUse {
        /// The port of rank 0.
        port: u16,
    },
    /// Rank 0 rejected this rank, since their secrets differ.
    #[error("{from} hung up: it has another secret")]
    Refused {
        /// Address of the other side.
        from: String,
    },
    /// The other side is no rank of this job.
    #[error("{from} {what}")]
    Stranger {
        /// Address of the other side.
        from: String,
        /// What the other side did, in words.
        what: String,
    },
    /// A rank has another value of a fact.
    #[error("rank {rank} on {host} has {what} {theirs:?}, rank 0 has {ours:?}")]
    Differs {
        /// The rank with the other value.
        rank: usize,
        /// Machine of that rank.
        host: String,
        /// Name of the fact that differs.
        what: String,
        /// The fact's value on that rank.
        theirs: String,
        /// The fact's value on rank 0.
        ours: String,
    },
    /// Two processes claim the same rank.
    #[error("two processes are rank {rank}: on {} and on {}", hosts[0], hosts[1])]
    Twice {
        /// The rank that both processes claim.
        rank: usize,
        /// Machines of the two processes.
        hosts: [String; 2],
    },
    /// A connection to another rank failed.
    #[error("the connection with {from} failed")]
    Broken {
        /// Name or address of the other side.
        from: String,
        /// The error of the connection.
        source: io::Error,
    },
    /// Rank 0 ended the rendezvous because of another rank.
    #[error("{reason}")]
    Ended {
        /// The reason that rank 0 reported.
        reason: String,
    },
    /// The window cannot be created, or the rendezvous was stopped ([`CommError::Stopped`]).
    #[error(transparent)]
    Window(#[from] CommError),
}

/// Joins the communicator of processes on several machines: connects to the other ranks, and returns after
/// every rank has joined.
///
/// # Errors
/// One variant of [`MeetError`] per cause. Every wait ends at the deadline.
pub fn join(options: &TcpOptions) -> Result<Arc<dyn Communicator>, MeetError> {
    join_at(options, None)
}

/// As [`join`]. Also returns the address at which this rank reaches each rank; `None` for itself.
///
/// # Errors
/// As [`join`].
pub fn join_world(
    options: &TcpOptions,
) -> Result<(Arc<dyn Communicator>, Vec<Option<IpAddr>>), MeetError> {
    join_with(options, None, options.deadline)
}

/// As [`join`], where rank 0 may pass a `listener` that is already open.
pub(super) fn join_at(
    options: &TcpOptions,
    listener: Option<TcpListener>,
) -> Result<Arc<dyn Communicator>, MeetError> {
    Ok(join_with(options, listener, options.deadline)?.0)
}

/// As [`join_world`], with `deadline` as the limit of each later wait.
fn join_with(
    options: &TcpOptions,
    listener: Option<TcpListener>,
    deadline: Duration,
) -> Result<(Arc<dyn Communicator>, Vec<Option<IpAddr>>), MeetError> {
    options.world.check()?;
    let until = Instant::now() + options.deadline;
    let links = meet::meet(options, listener, until).map_err(|error| {
        // The flag ends waits like a lost connection.
        match options.stop.load(Ordering::SeqCst) {
            true => MeetError::Window(CommError::Stopped),
            false => error,
        }
    })?;
    let address = |link: &wire::Link| link.stream.peer_addr().ok().map(|addr| addr.ip());
    let addresses = links.iter().map(|link| link.as_ref().and_then(address));
    let addresses = addresses.collect();
    let window = super::threads::window(options.world.size, options.region_bytes)?;
    let remote = (options.world.size > 1).then(|| {
        let wires = wire::Wires::new(links, deadline);
        Remote::new(options.world, Box::new(wires))
    });
    let comm =
        super::mirror::member(window, options.world, deadline, remote).map_err(|source| {
            MeetError::Broken {
                from: "this machine's own network".to_owned(),
                source,
            }
        })?;
    Ok((comm, addresses))
}

/// Reads a peer's message of the rendezvous. For [`crate::fuzzing`].
pub(crate) fn read_rendezvous(bytes: &[u8]) -> io::Result<()> {
    let mut stream = bytes;
    handshake::read_greeting(&mut stream)?;
    let mut message = Vec::new();
    loop {
        frame::read(&mut stream, frame::MAX_RENDEZVOUS, &mut message)?;
        meet::read_message(&message)?;
    }
}

/// Processes a peer's frames after the rendezvous. For [`crate::fuzzing`].
pub(crate) fn take_frames(bytes: &[u8]) -> io::Result<()> {
    let world = World { rank: 0, size: 2 };
    super::mirror::take_frames(world, |take| {
        let mut stream = bytes;
        let mut bytes = Vec::new();
        loop {
            frame::read(&mut stream, super::mirror::MAX_FRAME, &mut bytes)?;
            take(&bytes)?;
        }
    })
}

/// Whether an address belongs to the loopback interface.
pub(super) fn is_loopback(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(addr) => addr.is_loopback(),
        IpAddr::V6(addr) => {
            addr.is_loopback() || addr.to_ipv4_mapped().is_some_and(|addr| addr.is_loopback())
        }
    }
}
