//! Connections of callers that have not proved the job's secret yet. Their number is bounded, in all and per address.

use super::MeetError;
use super::handshake::{self, Identity, Peer, address};
use serde::de::DeserializeOwned;
use std::collections::VecDeque;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

/// Longest time for the greeting of one connection.
const LONGEST: Duration = Duration::from_secs(10);
/// Largest number of concurrent greetings. A newer connection ends the oldest one.
const MOST: usize = 256;
/// Largest number of concurrent greetings of one address: more than the ranks of a world, fewer than all.
const MOST_OF_ONE: usize = 128;

/// States of a connection.
const UNPROVED: u8 = 0;
const PROVED: u8 = 1;
const CUT: u8 = 2;

/// Greetings in progress, each in a thread of its own. `T` is the message that a caller sends first.
#[derive(Debug)]
pub(super) struct Greetings<T> {
    own: Identity,
    /// Oldest first.
    open: VecDeque<Open>,
    started: u64,
    sender: Sender<Ended<T>>,
    ended: Receiver<Ended<T>>,
}

#[derive(Debug)]
struct Open {
    id: u64,
    from: IpAddr,
    stream: TcpStream,
    state: Arc<AtomicU8>,
}

#[derive(Debug)]
struct Ended<T> {
    id: u64,
    guest: Result<(Peer, T), MeetError>,
}

impl<T: DeserializeOwned + Send + 'static> Greetings<T> {
    pub(super) fn new(own: Identity) -> Self {
        let (sender, ended) = mpsc::channel();
        Self {
            own,
            open: VecDeque::new(),
            started: 0,
            sender,
            ended,
        }
    }

    /// Starts the greeting of a new connection, by `until` at the latest. Ends the oldest unproved one if there are too
    /// many. A connection for which the system has no thread or descriptor is closed.
    pub(super) fn start(&mut self, stream: TcpStream, from: IpAddr, until: Instant) {
        self.make_way(from);
        let Ok(handle) = stream.try_clone() else {
            return;
        };
        self.started += 1;
        let id = self.started;
        let state = Arc::new(AtomicU8::new(UNPROVED));
        let (sender, own) = (self.sender.clone(), self.own.clone());
        let shared = state.clone();
        let greeting = move || {
            // A connection that sends nothing must not delay the others.
            let patience = until.min(Instant::now() + LONGEST);
            let guest = greet(stream, &own, patience, &shared);
            // The rendezvous may be over.
            sender.send(Ended { id, guest }).ok();
        };
        let thread = std::thread::Builder::new().name("greeting".to_owned());
        if thread.spawn(greeting).is_ok() {
            self.open.push_back(Open {
                id,
                from,
                stream: handle,
                state,
            });
        }
    }

    /// The result of a greeting that has ended. Waits for one up to `longest`.
    pub(super) fn next(&mut self, longest: Duration) -> Option<Result<(Peer, T), MeetError>> {
        let Ended { id, guest } = self.ended.recv_timeout(longest).ok()?;
        self.open.retain(|open| open.id != id);
        Some(guest)
    }

    /// Closes the oldest connection that has not proved the secret, if a bound is reached: one of `from` at the bound
    /// per address, any at the bound of all.
    fn make_way(&mut self, from: IpAddr) {
        let of_one = self.open.iter().filter(|open| open.from == from).count();
        let is_full_for_one = of_one >= MOST_OF_ONE;
        if !is_full_for_one && self.open.len() < MOST {
            return;
        }
        let oldest = self.open.iter().position(|open| {
            (!is_full_for_one || open.from == from)
                && open
                    .state
                    .compare_exchange(UNPROVED, CUT, SeqCst, SeqCst)
                    .is_ok()
        });
        if let Some(open) = oldest.and_then(|oldest| self.open.remove(oldest)) {
            open.stream.shutdown(Shutdown::Both).ok();
        }
    }
}

fn greet<T: DeserializeOwned>(
    stream: TcpStream,
    own: &Identity,
    patience: Instant,
    state: &AtomicU8,
) -> Result<(Peer, T), MeetError> {
    let from = address(&stream);
    let blocking = stream.set_nonblocking(false);
    blocking.map_err(|source| MeetError::Broken {
        from: from.clone(),
        source,
    })?;
    let admit = || {
        let proved = state.compare_exchange(UNPROVED, PROVED, SeqCst, SeqCst);
        proved.is_ok()
    };
    let mut peer = handshake::answer(stream, own, patience, admit).map_err(|error| match state
        .load(SeqCst)
    {
        CUT => MeetError::Stranger {
            from,
            what: "had not proved the secret when too many newer connections came".to_owned(),
        },
        _ => error,
    })?;
    let report = peer.receive(patience)?;
    Ok((peer, report))
}
