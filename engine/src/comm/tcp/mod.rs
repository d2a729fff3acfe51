//! Ranks on several machines: they meet at rank 0 over TCP and keep a connection between every two.
//!
//! Rank 0 listens at an address that all know. Every rank shows that it knows the job's secret ([`Secret`]), says
//! what it is about to run ([`TcpOptions::facts`]), and learns where the others listen. What is exchanged afterwards
//! is described in `README.md` beside the communicators. Data is neither sealed nor encrypted: this is for a network
//! that belongs to the cluster.

mod frame;
mod handshake;
mod meet;
mod secret;
mod wire;

#[cfg(test)]
pub(super) mod tests;

pub use secret::{MIN_SECRET_BYTES, Secret};

use super::mirror::Remote;
use super::{CommError, Communicator, World};
use std::io;
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How to join a world of processes on several machines. Everything but the rank and the facts is the same on all.
#[derive(Clone, Debug)]
pub struct TcpOptions {
    /// This rank and the number of ranks.
    pub world: World,
    /// Bytes of each rank's part of the window.
    pub region_bytes: usize,
    /// Longest time for the rendezvous, and later for any single wait.
    pub deadline: Duration,
    /// Name or address of the machine of rank 0.
    pub addr: String,
    /// Port of rank 0.
    pub port: u16,
    /// What only ranks of this job know.
    pub secret: Secret,
    /// What must be the same on all ranks, by name: versions, the plan, devices.
    pub facts: Vec<(String, String)>,
    /// Name of this machine, for messages.
    pub host: String,
}

/// What can go wrong while ranks meet.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeetError {
    /// Not every rank came in time.
    #[error("{} of {size} ranks came to {addr} within {:.1} s", arrived.len(), elapsed.as_secs_f64())]
    Missing {
        /// Where rank 0 listens.
        addr: String,
        /// Number of ranks.
        size: usize,
        /// Ranks that came, with their machines.
        arrived: Vec<(usize, String)>,
        /// Ranks that did not.
        missing: Vec<usize>,
        /// Connections that were turned away: from where, and why.
        turned_away: Vec<String>,
        /// How long rank 0 waited.
        elapsed: Duration,
    },
    /// Nobody answers at the address of rank 0.
    #[error("rank {rank} reached nobody at {addr} within {:.1} s", elapsed.as_secs_f64())]
    Unreachable {
        /// The rank that tried.
        rank: usize,
        /// Where it tried.
        addr: String,
        /// How long.
        elapsed: Duration,
        /// The last attempt's failure.
        source: io::Error,
    },
    /// The address means nothing here.
    #[error("{addr} is no address")]
    Address {
        /// As given.
        addr: String,
        /// Why.
        source: io::Error,
    },
    /// Another program listens at the port of rank 0.
    #[error("port {port} is in use")]
    PortInUse {
        /// The port.
        port: u16,
    },
    /// Rank 0 turned this rank away, since their secrets differ.
    #[error("{from} hung up: it has another secret")]
    Refused {
        /// The other side.
        from: String,
    },
    /// The other side is no rank of this job.
    #[error("{from} {what}")]
    Stranger {
        /// The other side.
        from: String,
        /// What it did.
        what: String,
    },
    /// A rank is about to run something else.
    #[error("rank {rank} on {host} has {what} {theirs:?}, rank 0 has {ours:?}")]
    Differs {
        /// The differing rank.
        rank: usize,
        /// Its machine.
        host: String,
        /// What differs.
        what: String,
        /// Its value.
        theirs: String,
        /// That of rank 0.
        ours: String,
    },
    /// Two processes say that they are the same rank.
    #[error("two processes are rank {rank}: on {} and on {}", hosts[0], hosts[1])]
    Twice {
        /// The rank.
        rank: usize,
        /// Their machines.
        hosts: [String; 2],
    },
    /// A connection failed.
    #[error("the connection with {from} failed")]
    Broken {
        /// The other side.
        from: String,
        /// Why.
        source: io::Error,
    },
    /// Rank 0 ended the rendezvous for another rank's sake.
    #[error("{reason}")]
    Ended {
        /// What rank 0 found.
        reason: String,
    },
    /// The window cannot be made.
    #[error(transparent)]
    Window(#[from] CommError),
}

/// Joins a world and returns when every rank has.
///
/// # Errors
/// As [`MeetError`] says; every wait ends at the deadline.
pub fn join(options: &TcpOptions) -> Result<Arc<dyn Communicator>, MeetError> {
    join_at(options, None)
}

/// As [`join`]; rank 0 may listen already.
pub(super) fn join_at(
    options: &TcpOptions,
    listener: Option<TcpListener>,
) -> Result<Arc<dyn Communicator>, MeetError> {
    join_with(options, listener, options.deadline)
}

/// As [`join`]; later waits take at most `deadline`.
fn join_with(
    options: &TcpOptions,
    listener: Option<TcpListener>,
    deadline: Duration,
) -> Result<Arc<dyn Communicator>, MeetError> {
    options.world.check()?;
    let until = Instant::now() + options.deadline;
    let streams = meet::meet(options, listener, until)?;
    let window = super::threads::window(options.world.size, options.region_bytes)?;
    let remote = (options.world.size > 1).then(|| {
        let wires = wire::Wires::new(streams, deadline);
        Remote::new(options.world, Box::new(wires))
    });
    super::mirror::member(window, options.world, deadline, remote).map_err(|source| {
        MeetError::Broken {
            from: "this machine's own network".to_owned(),
            source,
        }
    })
}

/// Reads what a peer sends while ranks meet. For [`crate::fuzzing`].
pub(crate) fn read_rendezvous(bytes: &[u8]) -> io::Result<()> {
    let mut stream = bytes;
    handshake::read_greeting(&mut stream)?;
    let mut message = Vec::new();
    loop {
        frame::read(&mut stream, frame::MAX_MEETING, &mut message)?;
        meet::read_message(&message)?;
    }
}

/// Takes what a peer sends afterwards. For [`crate::fuzzing`].
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

/// Whether an address means this machine alone.
pub(super) fn is_loopback(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(addr) => addr.is_loopback(),
        IpAddr::V6(addr) => {
            addr.is_loopback() || addr.to_ipv4_mapped().is_some_and(|addr| addr.is_loopback())
        }
    }
}
