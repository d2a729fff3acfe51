//! A window for ranks without shared memory: each has a copy of it, and frames keep the copies equal.
//!
//! The protocol of the window does not change. A rank writes data for its peers into its own copy and sends it: first
//! the bytes that a peer will read, then the record or phase that announces them. Frames of one rank arrive in order,
//! so a peer that sees the record sees the bytes. A region is reused after all peers are done with it, which they also
//! announce in frames. So a frame never overwrites data that somebody reads.
#![expect(
    unsafe_code,
    reason = "writes what peers sent into the window, under the protocol"
)]

use super::arena::ALIGN;
use super::endpoint::{Endpoint, Member};
use super::fingerprint::{Fingerprint, WORDS};
use super::op::Op;
use super::window::{Failure, RING, RingPhase, Window};
use super::{Collective, CollectiveKind, CommError, Communicator, Participation, Tag, World};
use kernels::DType;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Largest number of data bytes in one frame.
const CHUNK: usize = 1 << 20;
/// Largest number of bytes of a frame, without its length.
pub(super) const MAX_FRAME: usize = CHUNK + 256;

const DATA: u8 = 1;
const PUBLISH: u8 = 2;
const PHASE: u8 = 3;
const FAIL: u8 = 4;
const BYE: u8 = 5;

/// Transport of frames between ranks: complete, and in order for every two ranks.
pub(super) trait Wire: Send + Sync + fmt::Debug {
    /// Starts to pass arriving frames to `inbox`.
    fn open(&self, inbox: Arc<Inbox>) -> io::Result<()>;
    /// Sends `frame` to `peer` without waiting. Its first four bytes are its length.
    fn send(&self, peer: usize, frame: Arc<Vec<u8>>);
    /// Sends the remaining frames and ends.
    fn close(&self, is_dead: bool);
}

/// The sending half of one rank's connection to ranks that do not share its memory.
#[derive(Debug)]
pub(super) struct Remote {
    world: World,
    wire: Box<dyn Wire>,
}

/// The receiving half of one rank's connection to ranks that do not share its memory.
#[derive(Debug)]
pub(super) struct Inbox {
    window: Weak<Window>,
    world: World,
}

/// Creates the communicator of one rank over its own copy of the window. `remote` connects it to the other ranks.
pub(super) fn member(
    window: Arc<Window>,
    world: World,
    deadline: Duration,
    remote: Option<Remote>,
) -> io::Result<Arc<dyn Communicator>> {
    if let Some(remote) = remote {
        let inbox = Arc::new(Inbox {
            window: Arc::downgrade(&window),
            world,
        });
        // Set before the first frame can arrive, so that every failure is sent to all peers.
        let remote = window.set_remote(remote);
        remote.wire.open(inbox)?;
    }
    let endpoint = Endpoint::new(window, world, deadline);
    Ok(Arc::new(Member(Arc::new(endpoint))))
}

/// A frame: its length, then `kind` and `parts`.
fn framed(kind: u8, parts: &[&[u8]]) -> Arc<Vec<u8>> {
    let length = 1 + parts.iter().map(|part| part.len()).sum::<usize>();
    debug_assert!(length <= MAX_FRAME);
    let mut frame = Vec::with_capacity(4 + length);
    frame.extend((length as u32).to_le_bytes());
    frame.push(kind);
    parts.iter().for_each(|part| frame.extend(*part));
    Arc::new(frame)
}

fn word(value: usize) -> [u8; 8] {
    (value as u64).to_le_bytes()
}

fn words(values: &[u64]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

impl Remote {
    pub(super) fn new(world: World, wire: Box<dyn Wire>) -> Self {
        Self { world, wire }
    }

    fn to_all(&self, frame: &Arc<Vec<u8>>) {
        for peer in self.world.peers() {
            self.wire.send(peer, frame.clone());
        }
    }

    /// The bytes `range` of the own buffer of `op`, as frames.
    fn data(&self, window: &Window, op: &Op, range: Range<usize>) -> Vec<Arc<Vec<u8>>> {
        // SAFETY: the caller owns the buffer or has just reduced this part of it. Nobody writes these bytes until the
        // caller announces them to its peers, which happens later.
        let bytes = unsafe { window.bytes(self.world.rank, op.offset, range.clone()) };
        let chunks = bytes.chunks(CHUNK).enumerate();
        chunks
            .map(|(i, chunk)| {
                let offset = op.offset + range.start + i * CHUNK;
                framed(DATA, &[&word(offset), chunk])
            })
            .collect()
    }

    /// Sends the data of `op` that peers will read, then its publication.
    pub(super) fn published(&self, window: &Window, op: &Op) {
        let World { rank, size } = self.world;
        match op.collective.kind {
            CollectiveKind::AllGather => {
                self.finished_part(window, op);
            }
            CollectiveKind::Broadcast { root } if root == rank => {
                let frames = self.data(window, op, 0..op.bytes);
                frames.iter().for_each(|frame| self.to_all(frame));
            }
            CollectiveKind::ReduceScatter | CollectiveKind::AllReduce => {
                for peer in self.world.peers() {
                    for frame in self.data(window, op, op.finished_part(peer, size)) {
                        self.wire.send(peer, frame);
                    }
                }
            }
            CollectiveKind::Broadcast { .. } | CollectiveKind::Barrier => {}
        }
        let record = [
            &op.sequence.to_le_bytes()[..],
            &word(op.offset),
            &words(&op.print.0),
        ];
        self.to_all(&framed(PUBLISH, &record));
    }

    /// Sends this rank's phase in `op`, and the sum if it has just finished it.
    pub(super) fn reached(&self, window: &Window, op: &Op, phase: RingPhase) {
        // A rank that only contributes sends no phase before it is done.
        let contributed = op.shares_sums(self.world)
            && op.collective.participation == Participation::ContributeOnly;
        if phase == RingPhase::Reduced || contributed {
            self.finished_part(window, op);
        }
        self.to_all(&framed(
            PHASE,
            &[&op.sequence.to_le_bytes(), &[phase as u8]],
        ));
    }

    /// Sends the own part to the peers that copy it.
    fn finished_part(&self, window: &Window, op: &Op) {
        let World { rank, size } = self.world;
        for frame in self.data(window, op, op.finished_part(rank, size)) {
            for peer in op.partners(self.world) {
                self.wire.send(peer, frame.clone());
            }
        }
    }

    /// Tells all peers that the world is dead.
    pub(super) fn failed(&self, failure: &Failure) {
        self.to_all(&encode(failure));
    }

    /// Announces the end of this rank and waits until everything is sent. In a dead world it sends the cause first. The
    /// rank that reported it may not have reached all others yet, and they would take the end of this rank for the
    /// cause.
    pub(super) fn close(&self, failure: Option<&Failure>) {
        if let Some(failure) = failure {
            self.failed(failure);
        }
        self.to_all(&framed(BYE, &[]));
        self.wire.close(failure.is_some());
    }
}

impl Inbox {
    /// Processes a frame of `peer` without its length. Returns false if nothing more is to be read.
    pub(super) fn take(&self, peer: usize, frame: &[u8]) -> bool {
        let Some(window) = self.window.upgrade() else {
            // This rank has ended. Its peers may still announce their end to it.
            return true;
        };
        let outcome = self.apply(&window, peer, frame);
        if let Err(what) = outcome {
            let reason = format!("it sent a frame that cannot be: {what}");
            window.fail(Failure::Abort {
                by_rank: peer,
                reason,
            });
        }
        outcome.is_ok()
    }

    /// Handles a frame of `peer` whose keyed hash is wrong.
    pub(super) fn altered(&self, peer: usize) {
        let Some(window) = self.window.upgrade() else {
            return;
        };
        // Nothing in the frame can be trusted. It precedes the peer's next publication.
        let sequence = window.started(peer);
        let published = window.published(self.world.rank, sequence);
        window.fail(Failure::Altered {
            ranks: [self.world.rank, peer],
            sequence,
            print: published.map(|(print, _)| print),
        });
    }

    /// Whether every peer has announced its end, or the world is dead.
    #[cfg(feature = "mpi")]
    pub(super) fn all_gone(&self) -> bool {
        let mut peers = self.world.peers();
        self.window.upgrade().is_none_or(|window| {
            let gone = window.gone();
            window.failure().is_some() || peers.all(|peer| gone >> peer & 1 == 1)
        })
    }

    /// Handles the end of the connection with `peer`.
    pub(super) fn lost(&self, peer: usize, why: &str) {
        let Some(window) = self.window.upgrade() else {
            return;
        };
        let expected = window.gone() >> peer & 1 == 1;
        if !expected && window.failure().is_none() {
            let reason = format!("the connection with it was lost ({why})");
            window.fail(Failure::Abort {
                by_rank: peer,
                reason,
            });
        }
    }

    fn apply(&self, window: &Window, peer: usize, frame: &[u8]) -> Result<(), &'static str> {
        let region_bytes = window.layout().region_bytes;
        let (&kind, rest) = frame.split_first().ok_or("an empty one")?;
        let mut reader = Reader(rest);
        match kind {
            DATA => {
                let offset = reader.size()?;
                let bytes = reader.0;
                let end = offset.checked_add(bytes.len());
                if end.is_none_or(|end| end > region_bytes) {
                    return Err("data outside of its region");
                }
                // SAFETY: the range is inside the region of `peer`, which only this thread writes. `peer` sends data
                // into a range only after this rank has finished reading its previous content.
                let place = unsafe { window.bytes_mut(peer, offset, 0..bytes.len()) };
                place.copy_from_slice(bytes);
            }
            PUBLISH => {
                let sequence = reader.word()?;
                let offset = reader.size()?;
                let print = reader.print()?;
                let bytes = print.describe().map_or(usize::MAX, |op| op.bytes);
                if sequence != window.started(peer) {
                    return Err("a collective out of order");
                }
                if offset
                    .checked_add(bytes)
                    .is_none_or(|end| end > region_bytes)
                {
                    return Err("a buffer outside of its region");
                }
                // Sums read the range as numbers.
                if !offset.is_multiple_of(ALIGN) {
                    return Err("a buffer that is not aligned");
                }
                window.publish(peer, sequence, print, offset);
            }
            PHASE => {
                let sequence = reader.word()?;
                let started = window.started(peer);
                if sequence >= started || sequence + RING < started {
                    return Err("a phase of no collective in flight");
                }
                let phase = match reader.0 {
                    [1] => RingPhase::Reduced,
                    [2] => RingPhase::Done,
                    _ => return Err("an unknown phase"),
                };
                window.set_phase(peer, sequence, phase);
            }
            FAIL => {
                let failure = decode(&mut reader, self.world)?;
                window.fail_silently(failure);
            }
            BYE => {
                window.set_gone(peer);
            }
            _ => return Err("an unknown kind"),
        }
        Ok(())
    }
}

/// Cursor over the bytes of a received frame that are not parsed yet.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn word(&mut self) -> Result<u64, &'static str> {
        let (word, rest) = self.0.split_first_chunk::<8>().ok_or("too short")?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*word))
    }

    fn size(&mut self) -> Result<usize, &'static str> {
        usize::try_from(self.word()?).map_err(|_| "too large")
    }

    fn print(&mut self) -> Result<Fingerprint, &'static str> {
        let mut words = [0; WORDS];
        for word in &mut words {
            *word = self.word()?;
        }
        let print = Fingerprint(words);
        print
            .describe()
            .map(|_| print)
            .ok_or("an unknown collective")
    }
}

/// Passes `feed` a consumer of rank 1's frames, beside collectives of rank 0. For [`crate::fuzzing`].
pub(super) fn take_frames(
    world: World,
    feed: impl FnOnce(&mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()>,
) -> io::Result<()> {
    let dead = |error: CommError| io::Error::other(error.to_string());
    let window = super::threads::window(world.size, 4096).map_err(dead)?;
    let inbox = Inbox {
        window: Arc::downgrade(&window),
        world,
    };
    let comm = member(window, world, Duration::from_secs(1), None)?;
    let start = |kind, index| {
        let buffer = comm.alloc(64).map_err(dead)?;
        let op = Collective::new(kind, DType::F32, Tag::new("fuzz", index));
        comm.start(op, buffer).map_err(dead)
    };
    let tickets = [
        start(CollectiveKind::ReduceScatter, 0)?,
        start(CollectiveKind::AllGather, 1)?,
    ];
    let outcome = feed(&mut |frame| {
        let goes_on = inbox.take(1, frame);
        let is_done = tickets.iter().all(super::Ticket::is_done);
        match comm.failure() {
            Some(error) => Err(dead(error)),
            None if goes_on || is_done => Ok(()),
            None => Err(io::ErrorKind::InvalidData.into()),
        }
    });
    drop(tickets);
    outcome
}

const ABORT: u64 = 1;
const MISMATCH: u64 = 2;
const TIMEOUT: u64 = 3;
const ALTERED: u64 = 4;

fn encode(failure: &Failure) -> Arc<Vec<u8>> {
    match failure {
        Failure::Abort { by_rank, reason } => {
            // Longer than the failure record allows.
            let reason = reason.as_bytes().get(..512).unwrap_or(reason.as_bytes());
            framed(FAIL, &[&words(&[ABORT, *by_rank as u64]), reason])
        }
        Failure::Mismatch {
            sequence,
            ranks,
            prints,
        } => {
            let mut numbers = vec![MISMATCH, ranks[0] as u64, ranks[1] as u64, *sequence];
            numbers.extend(prints[0].0);
            numbers.extend(prints[1].0);
            framed(FAIL, &[&words(&numbers)])
        }
        Failure::Timeout {
            by_rank,
            sequence,
            print,
            elapsed,
        } => {
            let nanoseconds = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
            let mut numbers = vec![TIMEOUT, *by_rank as u64, *sequence, nanoseconds];
            numbers.extend(print.0);
            framed(FAIL, &[&words(&numbers)])
        }
        Failure::Altered {
            ranks,
            sequence,
            print,
        } => {
            let mut numbers = vec![ALTERED, ranks[0] as u64, ranks[1] as u64, *sequence];
            numbers.extend(print.iter().flat_map(|print| print.0));
            framed(FAIL, &[&words(&numbers)])
        }
        Failure::Rendezvous { by_rank, .. } => {
            let reason = b"it did not meet the others";
            framed(FAIL, &[&words(&[ABORT, *by_rank as u64]), reason])
        }
    }
}

fn decode(reader: &mut Reader<'_>, world: World) -> Result<Failure, &'static str> {
    let rank = |reader: &mut Reader<'_>| {
        let rank = reader.size()?;
        (rank < world.size).then_some(rank).ok_or("an unknown rank")
    };
    Ok(match reader.word()? {
        ABORT => Failure::Abort {
            by_rank: rank(reader)?,
            reason: String::from_utf8_lossy(reader.0).into_owned(),
        },
        MISMATCH => Failure::Mismatch {
            ranks: [rank(reader)?, rank(reader)?],
            sequence: reader.word()?,
            prints: [reader.print()?, reader.print()?],
        },
        TIMEOUT => Failure::Timeout {
            by_rank: rank(reader)?,
            sequence: reader.word()?,
            elapsed: Duration::from_nanos(reader.word()?),
            print: reader.print()?,
        },
        ALTERED => Failure::Altered {
            ranks: [rank(reader)?, rank(reader)?],
            sequence: reader.word()?,
            print: match reader.0 {
                [] => None,
                _ => Some(reader.print()?),
            },
        },
        _ => return Err("an unknown failure"),
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::threads;
    use super::*;
    use proptest::prelude::*;

    const WORLD: World = World { rank: 0, size: 2 };

    /// The inbox of rank 0 of two, and its window.
    pub(in super::super) fn inbox() -> (Arc<Window>, Inbox) {
        let window = threads::window(2, 4096).unwrap();
        let inbox = Inbox {
            window: Arc::downgrade(&window),
            world: WORLD,
        };
        (window, inbox)
    }

    /// The last frame of a rank.
    pub(in super::super) fn goodbye() -> Arc<Vec<u8>> {
        framed(BYE, &[])
    }

    fn print() -> Fingerprint {
        let op = Collective::new(CollectiveKind::AllGather, DType::U8, Tag::new("t", 1));
        Fingerprint::new(&op, 8).unwrap()
    }

    fn body(frame: &Arc<Vec<u8>>) -> &[u8] {
        &frame[4..]
    }

    fn publish(sequence: u64, offset: usize) -> Arc<Vec<u8>> {
        framed(
            PUBLISH,
            &[&sequence.to_le_bytes(), &word(offset), &words(&print().0)],
        )
    }

    #[test]
    fn failures_survive_the_wire() {
        for failure in [
            Failure::Abort {
                by_rank: 1,
                reason: "disk full".to_owned(),
            },
            Failure::Mismatch {
                sequence: 9,
                ranks: [0, 1],
                prints: [print(), print()],
            },
            Failure::Timeout {
                by_rank: 1,
                sequence: 4,
                print: print(),
                elapsed: Duration::from_millis(1500),
            },
        ] {
            let (window, inbox) = inbox();
            assert!(inbox.take(1, body(&encode(&failure))));
            assert_eq!(window.failure(), Some(failure));
        }
    }

    #[test]
    fn impossible_frames_end_the_world_and_name_the_peer() {
        let far = threads::window(2, 4096).unwrap().layout().region_bytes;
        for (frame, words) in [
            (framed(9, &[]), "unknown kind"),
            (framed(DATA, &[&word(far), &[1]]), "outside of its region"),
            (
                framed(DATA, &[&word(usize::MAX), &[1]]),
                "outside of its region",
            ),
            (publish(1, 0), "out of order"),
            (publish(0, far), "a buffer outside"),
            (publish(0, 1), "not aligned"),
            (framed(PHASE, &[&word(0), &[2]]), "no collective in flight"),
            (framed(PUBLISH, &[&word(0)]), "too short"),
            (framed(FAIL, &[&words(&[ABORT, 7])]), "unknown rank"),
            (framed(FAIL, &[&words(&[8])]), "unknown failure"),
        ] {
            let (window, inbox) = inbox();
            assert!(!inbox.take(1, body(&frame)));
            let Some(Failure::Abort { by_rank: 1, reason }) = window.failure() else {
                panic!("{words}: {:?}", window.failure())
            };
            assert!(reason.contains(words), "{reason}");
        }
    }

    #[test]
    fn a_lost_connection_is_a_failure_unless_the_peer_said_goodbye() {
        let (window, inbox) = inbox();
        assert!(inbox.take(1, &[BYE]));
        inbox.lost(1, "end of file");
        assert_eq!(window.failure(), None);
        inbox.lost(0, "end of file");
        assert!(matches!(
            window.failure(),
            Some(Failure::Abort { by_rank: 0, .. })
        ));
    }

    fn frames() -> impl Strategy<Value = Vec<u8>> {
        let hostile = prop::collection::vec(any::<u8>(), 0..80);
        let number = prop_oneof![0u64..80, 4000u64..80_000, any::<u64>()];
        let near = (1u8..6, number, prop::collection::vec(any::<u8>(), 0..16)).prop_map(
            |(kind, number, rest)| body(&framed(kind, &[&number.to_le_bytes(), &rest])).to_vec(),
        );
        let sound = (0u64..3, 0usize..80_000).prop_map(|(s, o)| body(&publish(s, o)).to_vec());
        prop_oneof![hostile, near, sound]
    }

    proptest! {
        #[test]
        fn hostile_frames_never_panic_or_write_outside_their_region(
            frames in prop::collection::vec(frames(), 1..12),
        ) {
            let (window, inbox) = inbox();
            for frame in frames {
                if !inbox.take(1, &frame) {
                    prop_assert!(window.failure().is_some());
                    break;
                }
            }
            let own = window.layout().region_bytes;
            // SAFETY: no other thread knows this window.
            let own = unsafe { window.bytes(0, 0, 0..own) };
            prop_assert!(own.iter().all(|byte| *byte == 0));
        }
    }
}
