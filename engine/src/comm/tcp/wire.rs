//! Frames between ranks over their connections, with one writing and one reading thread per peer.
//!
//! After the content of each frame comes its keyed hash ([`FrameSeals`]), which the reader checks before it uses a byte.

use super::frame;
use super::secret::FrameSeals;
use crate::comm::mirror::{Inbox, MAX_FRAME, Wire};
use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Longest time for sending the cause of a dead world.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A connection to another rank, with the keyed hashes of the frames in both directions.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) stream: TcpStream,
    pub(super) sent: FrameSeals,
    pub(super) received: FrameSeals,
}

/// The TCP connections of one rank to the other ranks.
#[derive(Debug)]
pub(super) struct Wires {
    streams: Vec<Option<TcpStream>>,
    /// Taken when the exchange starts.
    seals: Mutex<Vec<Option<[FrameSeals; 2]>>>,
    lanes: Mutex<Vec<Option<Lane>>>,
    deadline: Duration,
}

#[derive(Debug)]
struct Lane {
    frames: Sender<Arc<Vec<u8>>>,
    /// Closed after the writer has ended.
    ended: Receiver<()>,
    writer: JoinHandle<()>,
}

impl Wires {
    /// Connections in rank order. A write that takes longer than `deadline` fails.
    pub(super) fn new(links: Vec<Option<Link>>, deadline: Duration) -> Self {
        let lanes = Mutex::new(links.iter().map(|_| None).collect());
        let (streams, seals) = links
            .into_iter()
            .map(|link| {
                link.map(|link| (link.stream, [link.sent, link.received]))
                    .unzip()
            })
            .unzip();
        Self {
            streams,
            seals: Mutex::new(seals),
            lanes,
            deadline,
        }
    }
}

fn write(
    mut stream: TcpStream,
    mut seals: FrameSeals,
    frames: &Receiver<Arc<Vec<u8>>>,
    inbox: &Inbox,
    peer: usize,
) {
    let mut whole = Vec::new();
    for bytes in frames {
        // One call, so a small frame is one packet.
        whole.clear();
        whole.extend(&*bytes);
        whole.extend(seals.next(&bytes[4..]).as_bytes());
        if let Err(error) = stream.write_all(&whole) {
            // The peer closed the connection. The reader thread finds this out too, after it has read the frames that
            // arrived before. One of them may be the peer's goodbye, so the reader decides whether this is a failure.
            if !matches!(
                error.kind(),
                ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
            ) {
                inbox.lost(peer, &error.to_string());
            }
            return;
        }
    }
    // The other side reads to the end.
    stream.shutdown(Shutdown::Write).ok();
}

fn read(mut stream: TcpStream, mut seals: FrameSeals, inbox: &Inbox, peer: usize) {
    let mut bytes = Vec::new();
    loop {
        match read_sealed(&mut stream, &mut seals, &mut bytes) {
            Ok(true) if inbox.take(peer, &bytes) => {}
            Ok(true) => return,
            Ok(false) => return inbox.altered(peer),
            Err(error) => return inbox.lost(peer, &error.to_string()),
        }
    }
}

/// Reads one frame's content into `into`. Returns whether its keyed hash is right.
fn read_sealed(
    stream: &mut impl Read,
    seals: &mut FrameSeals,
    into: &mut Vec<u8>,
) -> io::Result<bool> {
    frame::read(stream, MAX_FRAME, into)?;
    let mut seal = [0; FrameSeals::BYTES];
    stream.read_exact(&mut seal)?;
    // This comparison takes constant time.
    Ok(blake3::Hash::from_bytes(seal) == seals.next(into))
}

impl Wire for Wires {
    fn open(&self, inbox: Arc<Inbox>) -> io::Result<()> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seals = self.seals.lock().unwrap_or_else(PoisonError::into_inner);
        for (peer, stream) in self.streams.iter().enumerate() {
            let (Some(stream), Some([sent, received])) = (stream, seals[peer].take()) else {
                continue;
            };
            stream.set_write_timeout(Some(self.deadline))?;
            let (out, into) = (stream.try_clone()?, stream.try_clone()?);
            let (frames, queue) = unbounded();
            let (ends, ended) = unbounded::<()>();
            let (for_writer, for_reader) = (inbox.clone(), inbox.clone());
            let thread = |side: &str| Builder::new().name(format!("{side} of rank {peer}"));
            let writer = thread("writer").spawn(move || {
                let _ends = ends;
                write(out, sent, &queue, &for_writer, peer);
            })?;
            thread("reader").spawn(move || read(into, received, &for_reader, peer))?;
            lanes[peer] = Some(Lane {
                frames,
                ended,
                writer,
            });
        }
        Ok(())
    }

    fn send(&self, peer: usize, frame: Arc<Vec<u8>>) {
        let lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lane) = &lanes[peer] {
            // A writer that ended has reported the cause.
            lane.frames.send(frame).ok();
        }
    }

    fn close(&self, is_dead: bool) {
        // A writer that fails meanwhile reports it to the others through the lanes.
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let taken: Vec<Option<Lane>> = lanes.iter_mut().map(Option::take).collect();
        drop(lanes);
        for (peer, lane) in taken.into_iter().enumerate() {
            let Some(Lane {
                frames,
                ended,
                writer,
            }) = lane
            else {
                continue;
            };
            drop(frames);
            let patience = if is_dead { LAST_WORDS } else { self.deadline };
            // Nothing is ever sent on this channel. The call returns when the writer ends, or after the time.
            let still_writes = ended.recv_timeout(patience) == Err(RecvTimeoutError::Timeout);
            if let Some(stream) = self.streams[peer].as_ref().filter(|_| still_writes) {
                // The connection is cut. Bytes already written are delivered.
                stream.shutdown(Shutdown::Both).ok();
            }
            writer.join().ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Secret;
    use super::*;
    use crate::comm::mirror::tests::{goodbye, inbox};
    use std::net::TcpListener;

    #[test]
    fn a_goodbye_counts_although_the_connection_broke_while_frames_were_sent() {
        let secret = Secret::new(b"the secret of this test").unwrap();
        for says_goodbye in [true, false] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (mut peer, _) = listener.accept().unwrap();
            let seals = || FrameSeals::new(&secret, true);
            if says_goodbye {
                let frame = goodbye();
                peer.write_all(&frame).unwrap();
                let seal = seals().next(&frame[4..]);
                peer.write_all(seal.as_bytes()).unwrap();
            }
            drop(peer);
            let (frames, queue) = unbounded();
            let large = Arc::new(vec![0; 1 << 20]);
            (0..64).for_each(|_| frames.send(large.clone()).unwrap());
            drop(frames);
            let (window, inbox) = inbox();
            write(own.try_clone().unwrap(), seals(), &queue, &inbox, 1);
            assert!(!queue.is_empty(), "the connection did not break");
            assert_eq!(window.failure(), None);
            read(own, seals(), &inbox, 1);
            assert_eq!(window.failure().is_none(), says_goodbye);
        }
    }
}
