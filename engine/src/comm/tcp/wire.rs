//! Frames between ranks over their connections, with one writing and one reading thread per peer.

use super::frame;
use crate::comm::mirror::{Inbox, MAX_FRAME, Wire};
use crossbeam::channel::{Receiver, Sender, unbounded};
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest time for sending the cause of a dead world.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The TCP connections of one rank to the other ranks.
#[derive(Debug)]
pub(super) struct Wires {
    streams: Vec<Option<TcpStream>>,
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
    pub(super) fn new(streams: Vec<Option<TcpStream>>, deadline: Duration) -> Self {
        let lanes = Mutex::new(streams.iter().map(|_| None).collect());
        Self {
            streams,
            lanes,
            deadline,
        }
    }
}

fn write(mut stream: TcpStream, frames: &Receiver<Arc<Vec<u8>>>, inbox: &Inbox, peer: usize) {
    for bytes in frames {
        if let Err(error) = stream.write_all(&bytes) {
            inbox.lost(peer, &error.to_string());
            return;
        }
    }
    // The other side reads to the end.
    stream.shutdown(Shutdown::Write).ok();
}

fn read(mut stream: TcpStream, inbox: &Inbox, peer: usize) {
    let mut bytes = Vec::new();
    loop {
        match frame::read(&mut stream, MAX_FRAME, &mut bytes) {
            Ok(()) if inbox.take(peer, &bytes) => {}
            Ok(()) => return,
            Err(error) => return inbox.lost(peer, &error.to_string()),
        }
    }
}

impl Wire for Wires {
    fn open(&self, inbox: Arc<Inbox>) -> std::io::Result<()> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        for (peer, stream) in self.streams.iter().enumerate() {
            let Some(stream) = stream else { continue };
            stream.set_write_timeout(Some(self.deadline))?;
            let (out, into) = (stream.try_clone()?, stream.try_clone()?);
            let (frames, queue) = unbounded();
            let (ends, ended) = unbounded::<()>();
            let (for_writer, for_reader) = (inbox.clone(), inbox.clone());
            let writer = std::thread::spawn(move || {
                let _ends = ends;
                write(out, &queue, &for_writer, peer);
            });
            std::thread::spawn(move || read(into, &for_reader, peer));
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
            ended.recv_timeout(patience).ok();
            if let Some(stream) = &self.streams[peer] {
                // The connection of a writer that still waits is cut. Bytes already written are delivered.
                if !writer.is_finished() {
                    stream.shutdown(Shutdown::Both).ok();
                }
            }
            writer.join().ok();
        }
    }
}
