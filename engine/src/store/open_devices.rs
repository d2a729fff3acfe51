//! Opening of the devices of all ranks to each other (peer access).
//!
//! Every rank opens the other ranks' memory and reads a test pattern from each. A driver or container that forbids access is
//! detected here, on every rank.

use crate::comm::{Communicator, Tag as CommTag, World};
use crate::error::EngineError;
use kernels::{Backend, DType, KernelError, Lane, PeerAccess, Shape, Tag, Tensor};

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Number of bytes of each rank that all others read as a test of peer access.
const SIGHT: usize = 64;

/// Opens the devices of all ranks of `comm` to `backend`. From here on a rank's index in `comm` names its device.
///
/// # Errors
/// [`EngineError::NoPeerAccess`] on every rank if one rank's device shares no memory or cannot read another's.
pub(crate) fn open_devices(backend: &dyn Backend, comm: &dyn Communicator) -> Result<()> {
    let (world, peers) = (comm.world(), || peers_of(backend));
    let named = peers().and_then(|peers| Ok(peers.name()?));
    let names = agree(comm, 0, named)?;
    let mut shown = None;
    let opened = peers().and_then(|peers| {
        peers.join(world.rank, &names, comm.deadline())?;
        let (tensor, words) = show(peers, world.rank)?;
        shown = Some(tensor);
        Ok(bytemuck::cast_slice(&words).to_vec())
    });
    let places = agree(comm, 1, opened)?;
    let seen = peers().and_then(|peers| see(peers, world, &places));
    // No rank may free its pattern before all ranks have read it.
    agree(comm, 2, seen.map(|()| Vec::new()))?;
    Ok(())
}

/// Access of a device to the memory of other ranks' devices.
pub(crate) fn peers_of(backend: &dyn Backend) -> Result<&dyn PeerAccess> {
    let missing = || KernelError::Device {
        op: "share memory",
        cause: "the device shares no memory with other ranks".into(),
    };
    Ok(backend.peers().ok_or_else(missing)?)
}

/// Test pattern of a rank; patterns of two ranks differ in all bytes.
fn sight(rank: usize) -> [u8; SIGHT] {
    std::array::from_fn(|i| (i * 7 + rank * 31 + 1) as u8)
}

/// Exchanges the outcome of a step of [`open_devices`] among all ranks: bytes, or a failure. If one rank fails,
/// every rank fails. A rank that is out of memory returns its own error, which says nothing about the other ranks.
fn agree(comm: &dyn Communicator, step: u32, own: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
    const WELL: u8 = 0;
    let mut short = None;
    let own = match own {
        Ok(bytes) => [&[WELL], &*bytes].concat(),
        Err(EngineError::Kernel(KernelError::Device { op, cause })) => {
            format!("\u{1}cannot {op}: {cause}").into_bytes()
        }
        Err(error) => {
            let said = format!("\u{1}{error}").into_bytes();
            short = Some(error).filter(|error| {
                matches!(error, EngineError::Kernel(KernelError::OutOfMemory { .. }))
            });
            said
        }
    };
    let all = comm.all_gather_bytes(&own, CommTag::new("devices", step))?;
    if let Some(error) = short {
        return Err(error);
    }
    let failed = all.iter().enumerate().filter(|(_, said)| said[0] != WELL);
    let refusals: Vec<(usize, String)> = failed
        .map(|(rank, said)| (rank, String::from_utf8_lossy(&said[1..]).into_owned()))
        .collect();
    match refusals.is_empty() {
        true => Ok(all.into_iter().map(|said| said[1..].to_vec()).collect()),
        false => Err(EngineError::NoPeerAccess { refusals }),
    }
}

/// Writes this rank's test pattern. Returns its tensor, its offset in device memory, and the event after the write.
fn show(peers: &dyn PeerAccess, rank: usize) -> Result<(Tensor, [u64; 2])> {
    let own = peers.incoming(Shape::new(&[SIGHT]), DType::U8, Tag::Communication)?;
    peers.put(&own, 0, &sight(rank))?;
    let words = [peers.offset(&own)?, peers.mark(Lane::Communication)?];
    Ok((own, words))
}

/// Reads and checks the test patterns of the other ranks.
fn see(peers: &dyn PeerAccess, World { rank, size }: World, places: &[Vec<u8>]) -> Result<()> {
    let all = peers.incoming(Shape::new(&[size * SIGHT]), DType::U8, Tag::Communication)?;
    for (peer, words) in places.iter().enumerate().filter(|(peer, _)| *peer != rank) {
        let word = |at: usize| bytemuck::pod_read_unaligned::<u64>(&words[8 * at..8 * at + 8]);
        peers.await_mark(Lane::Communication, peer, Lane::Communication, word(1))?;
        peers.pull(peer, word(0), &all, peer * SIGHT..(peer + 1) * SIGHT)?;
    }
    peers.arrive()?;
    let bytes = all.to_bytes()?;
    let parts = bytes.chunks_exact(SIGHT).enumerate();
    let mut others = parts.filter(|(peer, _)| *peer != rank);
    let Some((peer, _)) = others.find(|(peer, part)| **part != sight(*peer)) else {
        return Ok(());
    };
    Err(EngineError::Kernel(KernelError::Device {
        op: "read memory of other ranks",
        cause: format!("rank {peer}: what is there is not what that rank wrote").into(),
    }))
}
