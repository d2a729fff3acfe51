//! Transport of the emulated collectives library. Every process of a group sends its bytes to rank 0, which sends all
//! of them to everybody. Ranks at different collectives and ranks that do not come in time are errors.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

use kernels::cuda::backend::Cause;

/// Listener of rank 0, at which the others connect.
#[derive(Debug)]
pub(crate) struct Door(TcpListener);

impl Door {
    pub(crate) fn open() -> Result<Self, Cause> {
        Ok(Self(TcpListener::bind("127.0.0.1:0")?))
    }

    /// Address for the other ranks.
    pub(crate) fn name(&self) -> Result<Vec<u8>, Cause> {
        Ok(self.0.local_addr()?.to_string().into_bytes())
    }

    fn wait_at_most(&self, deadline: Duration) -> Result<(), Cause> {
        // A read deadline also bounds `accept`, but only streams have a function to set it.
        let listener = TcpStream::from(OwnedFd::from(self.0.try_clone()?));
        Ok(listener.set_read_timeout(Some(deadline))?)
    }
}

/// A joined process group.
#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// Connections by rank on rank 0; the one to rank 0 on other ranks.
    lines: Vec<TcpStream>,
    sequence: u64,
}

impl Network {
    /// Joins the process group `name` and returns when all ranks have come.
    pub(crate) fn join(
        door: Option<Door>,
        name: &[u8],
        rank: usize,
        size: usize,
        deadline: Duration,
    ) -> Result<Self, Cause> {
        let mut lines = Vec::new();
        if rank == 0 {
            let door = door.ok_or("rank 0 has not named the group")?;
            door.wait_at_most(deadline)?;
            let mut come: Vec<Option<TcpStream>> = Vec::new();
            come.resize_with(size, || None);
            for _ in 1..size {
                let (mut line, _) = door.0.accept().map_err(|error| late(&error, deadline))?;
                let mut theirs = [0; 8];
                line.set_read_timeout(Some(deadline))?;
                line.read_exact(&mut theirs)?;
                let theirs = u64::from_le_bytes(theirs) as usize;
                let place = come.get_mut(theirs).ok_or("a rank of another group")?;
                *place = Some(line);
            }
            for line in come.into_iter().skip(1) {
                lines.push(line.ok_or("a rank has come twice")?);
            }
        } else {
            let mut line = TcpStream::connect(std::str::from_utf8(name)?)?;
            line.set_read_timeout(Some(deadline))?;
            line.write_all(&(rank as u64).to_le_bytes())?;
            lines.push(line);
        }
        for line in &lines {
            line.set_nodelay(true)?;
        }
        let mut joined = Self {
            rank,
            size,
            lines,
            sequence: 0,
        };
        joined.exchange("join", &[])?;
        Ok(joined)
    }

    /// Exchanges bytes; returns those of every rank in rank order.
    pub(crate) fn exchange(&mut self, what: &str, own: &[u8]) -> Result<Vec<Vec<u8>>, Cause> {
        self.sequence += 1;
        let head = format!("{} {what}", self.sequence);
        if self.rank > 0 {
            let line = &mut self.lines[0];
            send(line, &[head.as_bytes(), own])?;
            return receive(line, self.size);
        }
        let mut all = vec![own.to_vec()];
        for (peer, line) in (1..).zip(&mut self.lines) {
            let mut came = receive(line, 2)?.into_iter();
            let (theirs, bytes) = (came.next(), came.next());
            if theirs.as_deref() != Some(head.as_bytes()) {
                let theirs = String::from_utf8_lossy(&theirs.unwrap_or_default()).into_owned();
                return Err(format!("rank {peer} is at {theirs}, rank 0 at {head}").into());
            }
            all.push(bytes.unwrap_or_default());
        }
        let parts: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
        for line in &mut self.lines {
            send(line, &parts)?;
        }
        Ok(all)
    }
}

fn send(line: &mut TcpStream, parts: &[&[u8]]) -> Result<(), Cause> {
    for part in parts {
        line.write_all(&(part.len() as u64).to_le_bytes())?;
        line.write_all(part)?;
    }
    Ok(())
}

fn receive(line: &mut TcpStream, count: usize) -> Result<Vec<Vec<u8>>, Cause> {
    let part = |_| -> Result<Vec<u8>, Cause> {
        let mut len = [0; 8];
        line.read_exact(&mut len)?;
        let mut bytes = vec![0; u64::from_le_bytes(len) as usize];
        line.read_exact(&mut bytes)?;
        Ok(bytes)
    };
    (0..count).map(part).collect()
}

fn late(error: &std::io::Error, deadline: Duration) -> Cause {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            format!("a rank has not come after {deadline:?}").into()
        }
        _ => error.to_string().into(),
    }
}
