//! Handshake of two ranks over one connection: they prove the job's secret to each other and exchange their numbers.

use super::MeetError;
use super::frame::{self, MAX_RENDEZVOUS, Timed};
use super::secret::{FrameSeals, NONCE_BYTES, Secret, nonce};
use super::wire::Link;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Start of every greeting: this protocol and its version.
const MAGIC: &str = "tessera-ranks-2";

/// Largest number of bytes of a greeting, which arrives before any proof of the secret.
const MAX_GREETING: usize = 512;

#[derive(Debug, Serialize, Deserialize)]
struct Greeting {
    magic: String,
    nonce: [u8; NONCE_BYTES],
    rank: usize,
    size: usize,
}

/// What a rank sends after both greetings.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// Proof that the rank knows the secret.
    Proof([u8; 32]),
    /// The other rank's proof is wrong.
    Refused,
}

/// A connection between two ranks that have proved the secret to each other.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) stream: TcpStream,
    pub(super) rank: usize,
    /// World size according to the other rank.
    pub(super) size: usize,
    secret: Secret,
    stop: Arc<AtomicBool>,
    /// Numbers of frames sent and received, so that no seal is valid twice.
    counts: [u64; 2],
    is_caller: bool,
}

/// Identity with which this rank enters handshakes: its number, its world size and the secret of its job.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub(super) rank: usize,
    /// World size according to this rank.
    pub(super) size: usize,
    pub(super) secret: Secret,
    /// Ends the handshake and later waits once it is set.
    pub(super) stop: Arc<AtomicBool>,
}

/// Runs the handshake with the rank that this one has called.
///
/// # Errors
/// [`MeetError::Broken`] if the connection ends before the other side has judged this rank's proof.
pub(super) fn call(stream: TcpStream, own: &Identity, until: Instant) -> Result<Peer, MeetError> {
    shake(stream, own, true, until, || true)
}

/// Runs the handshake with a rank that has called this one. After the caller's proof, `admit` says whether the connection
/// is still wanted.
pub(super) fn answer(
    stream: TcpStream,
    own: &Identity,
    until: Instant,
    admit: impl FnOnce() -> bool,
) -> Result<Peer, MeetError> {
    shake(stream, own, false, until, admit)
}

/// The handshake of both sides. The caller proves the secret first, so a caller that does not know it gets no proof from
/// others.
fn shake(
    stream: TcpStream,
    own: &Identity,
    is_caller: bool,
    until: Instant,
    admit: impl FnOnce() -> bool,
) -> Result<Peer, MeetError> {
    let from = address(&stream);
    stream.set_nodelay(true).map_err(|e| broken(&from, e))?;
    let mut timed = Timed {
        stream: &stream,
        until,
        stop: &own.stop,
    };
    let greeting = Greeting {
        magic: MAGIC.to_owned(),
        nonce: nonce().map_err(|e| broken(&from, e))?,
        rank: own.rank,
        size: own.size,
    };
    send(&mut timed, &greeting).map_err(|e| broken(&from, e))?;
    let theirs: Greeting = receive(&mut timed, MAX_GREETING).map_err(|e| broken(&from, e))?;
    if theirs.magic != MAGIC {
        return Err(MeetError::Stranger {
            from,
            what: "speaks another protocol, or another version of it".to_owned(),
        });
    }
    let (caller, callee) = if is_caller {
        (&greeting, &theirs)
    } else {
        (&theirs, &greeting)
    };
    let seal = |role: &[u8]| {
        let claims = [caller.rank, caller.size, callee.rank, callee.size]
            .map(|number| (number as u64).to_le_bytes())
            .concat();
        own.secret
            .seal(&[role, &caller.nonce, &callee.nonce, &claims])
    };
    let show = |timed: &mut Timed<'_>, role: &[u8]| {
        let seal = *seal(role).as_bytes();
        send(timed, &Answer::Proof(seal)).map_err(|e| broken(&from, e))
    };
    let check = |timed: &mut Timed<'_>, role: &[u8]| {
        let answer: Answer = receive(timed, MAX_GREETING).map_err(|e| broken(&from, e))?;
        match answer {
            Answer::Proof(shown) if blake3::Hash::from_bytes(shown) == seal(role) => Ok(()),
            Answer::Proof(_) => {
                // The other side learns the reason, if it still reads.
                send(timed, &Answer::Refused).ok();
                Err(MeetError::Stranger {
                    from: from.clone(),
                    what: "does not know the secret of this job".to_owned(),
                })
            }
            Answer::Refused => Err(MeetError::Refused { from: from.clone() }),
        }
    };
    if is_caller {
        show(&mut timed, b"caller")?;
        check(&mut timed, b"callee")?;
    } else {
        check(&mut timed, b"caller")?;
        if !admit() {
            return Err(broken(&from, io::ErrorKind::ConnectionAborted.into()));
        }
        show(&mut timed, b"callee")?;
    }
    let secret = own.secret.of_connection(&[&caller.nonce, &callee.nonce]);
    Ok(Peer {
        rank: theirs.rank,
        size: theirs.size,
        stream,
        secret,
        stop: own.stop.clone(),
        counts: [0; 2],
        is_caller,
    })
}

impl Peer {
    /// Sends a message with the connection's seal.
    pub(super) fn send(
        &mut self,
        message: &impl Serialize,
        until: Instant,
    ) -> Result<(), MeetError> {
        let bytes = serde_json::to_vec(message).map_err(|e| self.broken(e.into()))?;
        let seal = self.seal(self.is_caller, self.counts[0], &bytes);
        self.counts[0] += 1;
        let mut whole = seal.as_bytes().to_vec();
        whole.extend(bytes);
        let mut timed = Timed {
            stream: &self.stream,
            until,
            stop: &self.stop,
        };
        frame::write(&mut timed, &whole).map_err(|e| self.broken(e))
    }

    /// Receives a message and checks its seal.
    pub(super) fn receive<T: DeserializeOwned>(&mut self, until: Instant) -> Result<T, MeetError> {
        let mut whole = Vec::new();
        let mut timed = Timed {
            stream: &self.stream,
            until,
            stop: &self.stop,
        };
        frame::read(&mut timed, MAX_RENDEZVOUS, &mut whole).map_err(|e| self.broken(e))?;
        let stranger = || MeetError::Stranger {
            from: address(&self.stream),
            what: "sent a message without the seal of its connection".to_owned(),
        };
        let (seal, bytes) = parts(&whole).ok_or_else(stranger)?;
        let expected = self.seal(!self.is_caller, self.counts[1], bytes);
        if blake3::Hash::from_bytes(*seal) != expected {
            return Err(stranger());
        }
        self.counts[1] += 1;
        serde_json::from_slice(bytes).map_err(|e| self.broken(e.into()))
    }

    /// The connection after the rendezvous. Its later waits have deadlines of their own.
    pub(super) fn into_link(self) -> Result<Link, MeetError> {
        let endless = self.stream.set_read_timeout(None);
        endless.map_err(|e| self.broken(e))?;
        Ok(Link {
            sent: FrameSeals::new(&self.secret, self.is_caller),
            received: FrameSeals::new(&self.secret, !self.is_caller),
            stream: self.stream,
        })
    }

    fn seal(&self, by_caller: bool, count: u64, bytes: &[u8]) -> blake3::Hash {
        self.secret
            .seal(&[&[u8::from(by_caller)], &count.to_le_bytes(), bytes])
    }

    fn broken(&self, source: io::Error) -> MeetError {
        broken(&address(&self.stream), source)
    }
}

fn send(timed: &mut Timed<'_>, message: &impl Serialize) -> io::Result<()> {
    frame::write(timed, &serde_json::to_vec(message)?)
}

fn receive<T: DeserializeOwned>(stream: &mut impl io::Read, limit: usize) -> io::Result<T> {
    let mut bytes = Vec::new();
    frame::read(stream, limit, &mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

/// Parses a peer's first two messages to [`shake`], a greeting and a proof, and discards them. For fuzzing.
pub(super) fn read_greeting(stream: &mut impl io::Read) -> io::Result<()> {
    receive::<Greeting>(stream, MAX_GREETING)?;
    receive::<Answer>(stream, MAX_GREETING).map(drop)
}

/// Seal and content of a sealed message.
fn parts(whole: &[u8]) -> Option<(&[u8; 32], &[u8])> {
    whole.split_first_chunk()
}

/// Parses a message for [`Peer::receive`], without a check of its seal.
pub(super) fn read_message<T: DeserializeOwned>(whole: &[u8]) -> io::Result<T> {
    let (_, bytes) = parts(whole).ok_or(io::ErrorKind::InvalidData)?;
    Ok(serde_json::from_slice(bytes)?)
}

/// Address of the other side, for messages.
pub(super) fn address(stream: &TcpStream) -> String {
    stream.peer_addr().map_or_else(
        |_| "a closed connection".to_owned(),
        |addr| addr.to_string(),
    )
}

fn broken(from: &str, source: io::Error) -> MeetError {
    MeetError::Broken {
        from: from.to_owned(),
        source,
    }
}
