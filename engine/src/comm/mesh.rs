//! Mesh of ranks: pipeline stages that divide the layers, and data-parallel ranks in each stage.
//!
//! Rank `data · stages + stage` is pipeline stage `stage` of the data-parallel rank `data`. Each group of ranks has a
//! window of its own, so its collectives have their own order:
//!
//! | group | ranks | transfers |
//! |---|---|---|
//! | world | all | norms, losses, saved weights |
//! | data group | those of one stage | ZeRO's collectives |
//! | link | two neighboring stages of one data-parallel rank, one link per direction | activations, gradients |

use super::{
    Collective, CollectiveKind, CommError, Communicator, DEFAULT_DEADLINE, Tag, Ticket, World,
    threads,
};
use kernels::{DType, Shape};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of the message that describes the values of one transfer.
const HEADER_BYTES: usize = 4096;
/// Number of 8-byte words for one value in that message: index, gradient flag, element type, axes and their extents.
const VALUE_WORDS: usize = 4 + MAX_AXES;
/// Largest number of axes of a transferred value.
const MAX_AXES: usize = 5;
/// Largest number of values in one transfer.
pub const MAX_VALUES: usize = (HEADER_BYTES / 8 - 1) / VALUE_WORDS;
/// Largest number of bytes of one broadcast from a stage to all ranks.
const CHUNK: usize = 1 << 20;
/// Bytes of the world's region of each rank that [`Mesh::broadcast`] uses.
pub const BROADCAST_BYTES: usize = CHUNK;

/// Coordinates of a rank in a [`Mesh`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// Data-parallel rank, and the number of data-parallel ranks.
    pub data: World,
    /// Index of the pipeline stage.
    pub stage: usize,
    /// Number of pipeline stages.
    pub stages: usize,
}

impl Coordinates {
    /// Coordinates of a rank of `world` in a mesh of `stages` pipeline stages.
    ///
    /// # Errors
    /// [`CommError::InvalidMesh`] if `stages` does not divide the world.
    pub fn of(world: World, stages: usize) -> Result<Self, CommError> {
        let World { rank, size } = world;
        if stages == 0 || !size.is_multiple_of(stages) {
            return Err(CommError::InvalidMesh { size, stages });
        }
        Ok(Self {
            data: World {
                rank: rank / stages,
                size: size / stages,
            },
            stage: rank % stages,
            stages,
        })
    }

    /// Rank in the world of pipeline stage `stage` of the data-parallel rank `data`.
    #[must_use]
    pub const fn rank(self, data: usize, stage: usize) -> usize {
        data * self.stages + stage
    }

    /// Whether this is the last pipeline stage, which computes the loss.
    #[must_use]
    pub const fn is_last(self) -> bool {
        self.stage + 1 == self.stages
    }
}

/// Neighbor of a pipeline stage of the same data-parallel rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neighbor {
    /// The stage with the earlier layers.
    Previous,
    /// The stage with the later layers.
    Next,
}

/// Bytes of the region that a rank contributes to the windows of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regions {
    /// Region in the window of the data group.
    pub data: usize,
    /// Region in the window of each link: those of the largest transfer.
    pub link: usize,
}

/// Window that a rank joins for a [`Mesh`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Name of the window, unique in the job.
    pub name: String,
    /// Number of the window, unique in the job, from 0.
    pub number: usize,
    /// This rank in the group, and the number of its ranks.
    pub world: World,
    /// Bytes of each rank's region.
    pub region_bytes: usize,
    /// The group's ranks in the world.
    pub ranks: Vec<usize>,
}

/// The groups that a rank joins: its data group, then both directions of the link with the previous stage, then of that
/// with the next one. Every rank has its groups in one order of all groups, so no two ranks wait for each other.
#[must_use]
pub fn groups(at: Coordinates, regions: Regions) -> Vec<Group> {
    let Coordinates { data, stage, .. } = at;
    let mut groups = vec![Group {
        name: format!("data-{stage}"),
        number: stage,
        world: data,
        region_bytes: regions.data,
        ranks: (0..data.size).map(|d| at.rank(d, stage)).collect(),
    }];
    for first in stage.saturating_sub(1)..=stage.min(at.stages - 2) {
        let link = data.rank * (at.stages - 1) + first;
        for (backward, direction) in ["forward", "backward"].into_iter().enumerate() {
            groups.push(Group {
                name: format!("link-{}-{first}-{direction}", data.rank),
                number: at.stages + 2 * link + backward,
                world: World {
                    rank: stage - first,
                    size: 2,
                },
                region_bytes: regions.link,
                ranks: vec![at.rank(data.rank, first), at.rank(data.rank, first + 1)],
            });
        }
    }
    groups
}

/// Description of a value that one pipeline stage sends to its neighbor: an activation, or the gradient of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Index of the value in its pass, equal on both stages.
    pub index: u32,
    /// Whether the receiver returns a gradient of the value.
    pub wants_gradient: bool,
    /// Shape of the value.
    pub shape: Shape,
    /// Element type of the value.
    pub dtype: DType,
}

impl Sent {
    /// Number of bytes of the value.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shape.elems() * self.dtype.size_bytes()
    }
}

/// Links of one stage with a neighbor.
#[derive(Clone, Debug)]
struct Link {
    /// From the earlier to the later stage.
    forward: Arc<dyn Communicator>,
    /// From the later to the earlier stage.
    backward: Arc<dyn Communicator>,
}

/// Communicators of one rank in a mesh of pipeline stages and data-parallel ranks.
#[derive(Clone, Debug)]
pub struct Mesh {
    coordinates: Coordinates,
    world: Arc<dyn Communicator>,
    data: Arc<dyn Communicator>,
    previous: Option<Link>,
    next: Option<Link>,
}

impl From<Arc<dyn Communicator>> for Mesh {
    /// The mesh of one pipeline stage: all ranks of `world` are data-parallel.
    fn from(world: Arc<dyn Communicator>) -> Self {
        let coordinates = Coordinates {
            data: world.world(),
            stage: 0,
            stages: 1,
        };
        Self {
            coordinates,
            data: world.clone(),
            world,
            previous: None,
            next: None,
        }
    }
}

impl Mesh {
    /// Joins the groups of this rank ([`groups`]). `open` joins one group, and returns after all its ranks have.
    ///
    /// # Errors
    /// [`CommError::InvalidMesh`] if `stages` does not divide the world, or an error of `open`.
    pub fn join<E: From<CommError>>(
        world: Arc<dyn Communicator>,
        stages: usize,
        regions: Regions,
        mut open: impl FnMut(&Group) -> Result<Arc<dyn Communicator>, E>,
    ) -> Result<Self, E> {
        let coordinates = Coordinates::of(world.world(), stages)?;
        if stages == 1 {
            return Ok(Self::from(world));
        }
        let groups = groups(coordinates, regions);
        let mut open = |group: &Group| match group.world.size {
            1 => Ok(threads::world(1, group.region_bytes)?.remove(0)),
            _ => open(group),
        };
        let data = open(&groups[0])?;
        let mut links = groups[1..].chunks(2).map(|directions| {
            Ok::<_, E>(Link {
                forward: open(&directions[0])?,
                backward: open(&directions[1])?,
            })
        });
        let mut link = |exists: bool| match exists {
            true => links.next().transpose(),
            false => Ok(None),
        };
        let previous = link(coordinates.stage > 0)?;
        let next = link(!coordinates.is_last())?;
        Ok(Self {
            coordinates,
            world,
            data,
            previous,
            next,
        })
    }

    /// The meshes of `ranks` ranks that are threads of this process, in rank order. `world_bytes` is the region of each
    /// rank in the window of the world.
    ///
    /// # Errors
    /// [`CommError::InvalidMesh`], [`CommError::InvalidWorld`] or a refused memory map.
    pub fn threads(
        ranks: usize,
        stages: usize,
        world_bytes: usize,
        regions: Regions,
    ) -> Result<Vec<Self>, CommError> {
        Self::threads_with_deadline(ranks, stages, world_bytes, regions, DEFAULT_DEADLINE)
    }

    /// As [`Mesh::threads`]. A wait fails after `deadline`.
    ///
    /// # Errors
    /// As [`Mesh::threads`].
    pub fn threads_with_deadline(
        ranks: usize,
        stages: usize,
        world_bytes: usize,
        regions: Regions,
        deadline: Duration,
    ) -> Result<Vec<Self>, CommError> {
        let worlds = threads::world_with_deadline(ranks, world_bytes, deadline)?;
        let mut groups = std::collections::BTreeMap::new();
        let mut join = |world: Arc<dyn Communicator>| {
            Self::join(world, stages, regions, |group| {
                if !groups.contains_key(&group.name) {
                    let (size, bytes) = (group.world.size, group.region_bytes);
                    let all = threads::world_with_deadline(size, bytes, deadline)?;
                    groups.insert(group.name.clone(), all);
                }
                Ok::<_, CommError>(groups[&group.name][group.world.rank].clone())
            })
        };
        worlds.into_iter().map(&mut join).collect()
    }

    /// Coordinates of this rank.
    #[must_use]
    pub const fn coordinates(&self) -> Coordinates {
        self.coordinates
    }

    /// Rank of a neighbor in the world.
    #[must_use]
    pub fn rank_of(&self, neighbor: Neighbor) -> usize {
        match neighbor {
            Neighbor::Previous => self.world.world().rank - 1,
            Neighbor::Next => self.world.world().rank + 1,
        }
    }

    /// Communicator of all ranks.
    #[must_use]
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.world
    }

    /// Communicator of the data-parallel ranks of this pipeline stage.
    #[must_use]
    pub fn data(&self) -> &Arc<dyn Communicator> {
        &self.data
    }

    fn links(&self) -> impl Iterator<Item = &Arc<dyn Communicator>> {
        let links = self.previous.iter().chain(&self.next);
        links.flat_map(|link| [&link.forward, &link.backward])
    }

    /// Total time that this rank has spent in collectives and in waits for values of its neighbors.
    #[must_use]
    pub fn time_spent(&self) -> Duration {
        let world = match self.coordinates.stages {
            1 => Duration::ZERO,
            _ => self.world.time_spent(),
        };
        let received = [
            self.previous.as_ref().map(|link| &link.forward),
            self.next.as_ref().map(|link| &link.backward),
        ];
        let received = received.into_iter().flatten().map(|c| c.time_spent());
        self.data.time_spent() + world + received.sum()
    }

    /// Tells every group of this rank that it cannot continue.
    pub fn abort(&self, reason: &str) {
        self.world.abort(reason);
        self.data.abort(reason);
        self.links().for_each(|link| link.abort(reason));
    }

    /// The reason why a group of this rank is dead; `None` while all work.
    #[must_use]
    pub fn failure(&self) -> Option<CommError> {
        let mut groups = [&self.world, &self.data].into_iter().chain(self.links());
        groups.find_map(|group| group.failure())
    }

    /// The communicator to a neighbor in one direction, and the sender's rank in it.
    fn channel(
        &self,
        neighbor: Neighbor,
        sends: bool,
    ) -> Result<(&dyn Communicator, usize), CommError> {
        let link = match neighbor {
            Neighbor::Previous => &self.previous,
            Neighbor::Next => &self.next,
        };
        let link = link.as_ref().ok_or(CommError::NoNeighbor {
            stage: self.coordinates.stage,
            stages: self.coordinates.stages,
        })?;
        Ok(match (neighbor, sends) {
            (Neighbor::Next, true) | (Neighbor::Previous, false) => (&*link.forward, 0),
            (Neighbor::Previous, true) | (Neighbor::Next, false) => (&*link.backward, 1),
        })
    }

    /// Sends values to a neighbor. `fill` writes the bytes of one of them, by its position in `values`. It returns when
    /// the values are in the link's window; it waits only while the previous transfer is still being read there. The
    /// region of a link must have space for all values of one transfer.
    ///
    /// # Errors
    /// [`CommError::TooManyValues`], [`CommError::WindowFull`], the error of a dead link, or an error of `fill`.
    pub fn send<E: From<CommError>>(
        &self,
        to: Neighbor,
        values: &[Sent],
        mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (comm, root) = self.channel(to, true)?;
        let kind = CollectiveKind::Broadcast { root };
        // The tickets keep their buffers until all values have one, so that no two values share memory.
        let mut started = vec![describe(comm, root, values)?];
        for (position, value) in values.iter().enumerate() {
            let mut buffer = comm.alloc(value.bytes())?;
            fill(position, buffer.as_bytes_mut())?;
            let op = Collective::new(kind, DType::U8, Tag::new("activation", value.index));
            started.push(comm.start(op, buffer)?);
        }
        drop(started);
        Ok(())
    }

    /// Receives the values that a neighbor sends next, and passes each with its bytes to `take`.
    ///
    /// # Errors
    /// [`CommError::WindowFull`], the error of a dead link, or an error of `take`.
    pub fn receive<E: From<CommError>>(
        &self,
        from: Neighbor,
        mut take: impl FnMut(Sent, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (comm, root) = self.channel(from, false)?;
        let kind = CollectiveKind::Broadcast { root };
        let described = described(comm, root)?;
        // All are started first, as the sender does.
        let mut started: Vec<Ticket> = Vec::new();
        for value in &described {
            let op = Collective::new(kind, DType::U8, Tag::new("activation", value.index));
            started.push(comm.start(op, comm.alloc(value.bytes())?)?);
        }
        for (value, ticket) in described.into_iter().zip(started) {
            take(value, ticket.wait_read()?.as_bytes())?;
        }
        Ok(())
    }

    /// Tells a neighbor where values are in this rank's device memory, so that its device can copy them. `words` are the
    /// offset of each value in bytes, then the number of the event after the work that writes them. The result waits for
    /// the neighbor's answer.
    ///
    /// # Errors
    /// [`CommError::TooManyValues`], [`CommError::WindowFull`], or the error of a dead link.
    pub fn offer(&self, to: Neighbor, values: &[Sent], words: &[u64]) -> Result<Answer, CommError> {
        let (comm, root) = self.channel(to, true)?;
        let _header = describe(comm, root, values)?;
        let mut places = comm.alloc(size_of_val(words))?;
        places.as_mut_slice::<u64>().copy_from_slice(words);
        let _places = comm.start(places_of(root), places)?;
        let answer = comm.alloc(size_of::<u64>())?;
        Ok(Answer(comm.start(answer_to(root), answer)?))
    }

    /// Descriptions of the values that a neighbor offers next, and the words of its [`Mesh::offer`]. [`Mesh::answer`] must
    /// follow.
    ///
    /// # Errors
    /// [`CommError::WindowFull`], or the error of a dead link.
    pub fn offered(&self, from: Neighbor) -> Result<(Vec<Sent>, Vec<u64>), CommError> {
        let (comm, root) = self.channel(from, false)?;
        let values = described(comm, root)?;
        let places = comm.alloc((values.len() + 1) * size_of::<u64>())?;
        let places = comm.start(places_of(root), places)?.wait_read()?;
        Ok((values, places.as_slice::<u64>().to_vec()))
    }

    /// Answers the last offer of a neighbor with the number of the event after the copies of its values.
    ///
    /// # Errors
    /// [`CommError::WindowFull`], or the error of a dead link.
    pub fn answer(&self, to: Neighbor, word: u64) -> Result<(), CommError> {
        let (comm, root) = self.channel(to, false)?;
        let mut answer = comm.alloc(size_of::<u64>())?;
        answer.as_mut_slice::<u64>()[0] = word;
        drop(comm.start(answer_to(root), answer)?);
        Ok(())
    }

    /// Sends `bytes` from the first data-parallel rank of pipeline stage `stage` to all ranks of the world. All ranks call
    /// it with the same number of bytes.
    ///
    /// # Errors
    /// [`CommError::WindowFull`], or the error of a dead world.
    pub fn broadcast(&self, stage: usize, bytes: &mut [u8], index: u32) -> Result<(), CommError> {
        let root = self.coordinates.rank(0, stage);
        let is_root = self.world.world().rank == root;
        for chunk in bytes.chunks_mut(CHUNK) {
            let mut buffer = self.world.alloc(chunk.len())?;
            if is_root {
                buffer.as_bytes_mut().copy_from_slice(chunk);
            }
            let kind = CollectiveKind::Broadcast { root };
            let op = Collective::new(kind, DType::U8, Tag::new("weights", index));
            let buffer = self.world.start(op, buffer)?.wait_read()?;
            if !is_root {
                chunk.copy_from_slice(buffer.as_bytes());
            }
        }
        Ok(())
    }
}

/// Answer to an offer ([`Mesh::offer`]).
#[derive(Debug)]
pub struct Answer(Ticket);

impl Answer {
    /// Waits for the number of the event after the neighbor's copies.
    ///
    /// # Errors
    /// The error of a dead link.
    pub fn wait(self) -> Result<u64, CommError> {
        Ok(self.0.wait_read()?.as_slice::<u64>()[0])
    }
}

/// Message of the rank `root` of a link.
const fn message(root: usize, name: &'static str) -> Collective {
    let kind = CollectiveKind::Broadcast { root };
    Collective::new(kind, DType::U8, Tag::new(name, 0))
}

/// Message with the places of values that the rank `root` of a link offers.
const fn places_of(root: usize) -> Collective {
    message(root, "places")
}

/// Message of the other rank of a link than `root`.
const fn answer_to(root: usize) -> Collective {
    message(1 - root, "answer")
}

/// Sends the description of a transfer's values.
fn describe(comm: &dyn Communicator, root: usize, values: &[Sent]) -> Result<Ticket, CommError> {
    if values.len() > MAX_VALUES {
        let (values, most) = (values.len(), MAX_VALUES);
        return Err(CommError::TooManyValues { values, most });
    }
    let mut header = comm.alloc(HEADER_BYTES)?;
    encode(values, header.as_mut_slice::<u64>());
    comm.start(message(root, "boundary"), header)
}

/// Description of the values of the next transfer of the rank `root` of a link.
fn described(comm: &dyn Communicator, root: usize) -> Result<Vec<Sent>, CommError> {
    let header = comm.alloc(HEADER_BYTES)?;
    let header = comm.start(message(root, "boundary"), header)?.wait_read()?;
    Ok(decode(header.as_slice::<u64>()))
}

const DTYPES: [DType; 7] = [
    DType::F32,
    DType::BF16,
    DType::F16,
    DType::F64,
    DType::I32,
    DType::U8,
    DType::I8,
];

fn encode(values: &[Sent], words: &mut [u64]) {
    words.fill(0);
    words[0] = values.len() as u64;
    for (value, words) in values.iter().zip(words[1..].chunks_mut(VALUE_WORDS)) {
        let dtype = DTYPES.iter().position(|dtype| *dtype == value.dtype);
        let dims = value.shape.dims();
        words[0] = u64::from(value.index);
        words[1] = u64::from(value.wants_gradient);
        words[2] = dtype.unwrap_or(0) as u64;
        words[3] = dims.len() as u64;
        for (word, dim) in words[4..].iter_mut().zip(dims) {
            *word = *dim as u64;
        }
    }
}

fn decode(words: &[u64]) -> Vec<Sent> {
    let count = (words[0] as usize).min(MAX_VALUES);
    let values = words[1..].chunks(VALUE_WORDS).take(count);
    values
        .map(|words| {
            let axes = (words[3] as usize).min(MAX_AXES);
            let dims: Vec<usize> = words[4..4 + axes].iter().map(|dim| *dim as usize).collect();
            Sent {
                index: words[0] as u32,
                wants_gradient: words[1] == 1,
                shape: Shape::new(&dims),
                dtype: DTYPES[(words[2] as usize).min(DTYPES.len() - 1)],
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGIONS: Regions = Regions {
        data: 1 << 16,
        link: 1 << 16,
    };

    fn sent(index: u32) -> Sent {
        Sent {
            index,
            wants_gradient: index == 3,
            shape: Shape::new(&[2, 2]),
            dtype: DType::F32,
        }
    }

    #[test]
    fn coordinates_enumerate_stages_first() {
        let of = |rank| Coordinates::of(World { rank, size: 6 }, 3).expect("a mesh");
        let at = of(4);
        assert_eq!((at.data.rank, at.data.size, at.stage), (1, 2, 1));
        assert!((0..6).all(|rank| of(rank).rank(of(rank).data.rank, of(rank).stage) == rank));
        assert!(Coordinates::of(World { rank: 0, size: 4 }, 3).is_err());
    }

    #[test]
    fn numbers_of_groups_are_unique() {
        let of = |rank| Coordinates::of(World { rank, size: 12 }, 3).expect("a mesh");
        let all = (0..12).flat_map(|rank| groups(of(rank), REGIONS));
        let named: std::collections::BTreeSet<_> = all.map(|g| (g.number, g.name)).collect();
        // 3 data groups, and both directions of 2 links of each of 4 data-parallel ranks.
        let numbers: Vec<usize> = named.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, (0..3 + 2 * 2 * 4).collect::<Vec<_>>());
    }

    #[test]
    fn values_cross_the_boundaries_in_both_directions_and_groups_are_independent() {
        let meshes = Mesh::threads(6, 3, 1 << 16, REGIONS).expect("meshes");
        std::thread::scope(|scope| {
            for mesh in meshes {
                scope.spawn(move || {
                    let at = mesh.coordinates();
                    let own = [at.data.rank as f32, 1.0, 2.0, 3.0];
                    let fill = |_: usize, bytes: &mut [u8]| {
                        bytes.copy_from_slice(bytemuck::cast_slice(&own));
                        Ok::<_, CommError>(())
                    };
                    // More transfers than a window holds.
                    for turn in 0..100 {
                        let mut seen = Vec::new();
                        if at.stage > 0 {
                            let take = |value: Sent, bytes: &[u8]| {
                                assert_eq!(bytes, bytemuck::cast_slice::<f32, u8>(&own));
                                assert_eq!(value.shape.dims(), [2, 2]);
                                seen.push((value.index, value.wants_gradient));
                                Ok::<_, CommError>(())
                            };
                            mesh.receive(Neighbor::Previous, take).expect("received");
                            assert_eq!(seen, [(3, true), (turn, turn == 3)]);
                            mesh.send(Neighbor::Previous, &[], fill).expect("sent");
                        }
                        if !at.is_last() {
                            let values = [sent(3), sent(turn)];
                            mesh.send(Neighbor::Next, &values, fill).expect("sent");
                            let nothing =
                                |_: Sent, _: &[u8]| -> Result<(), CommError> { panic!("a value") };
                            mesh.receive(Neighbor::Next, nothing).expect("received");
                        }
                        // Later stages run more collectives: each group has its own order of them.
                        for _ in 0..at.stage {
                            let tag = Tag::new("data", turn);
                            let all = mesh.data().all_gather_f64(&[at.stage as f64], tag);
                            assert_eq!(all.expect("gathered"), vec![vec![at.stage as f64]; 2]);
                        }
                    }
                    let mut bytes = [at.stage as u8; 5];
                    mesh.broadcast(2, &mut bytes, 0).expect("broadcast");
                    assert_eq!(bytes, [2; 5]);
                });
            }
        });
    }

    #[test]
    fn offers_are_answered_in_order() {
        let meshes = Mesh::threads(2, 2, 1 << 16, REGIONS).expect("meshes");
        std::thread::scope(|scope| {
            for mesh in meshes {
                scope.spawn(move || match mesh.coordinates().is_last() {
                    false => {
                        let offer = |turn: u32| {
                            let words = [7, u64::from(turn)];
                            mesh.offer(Neighbor::Next, &[sent(turn)], &words)
                        };
                        // The second offer does not wait for the first answer.
                        let answers = [0, 1].map(|turn| offer(turn).expect("offered"));
                        let words = answers.map(|answer| answer.wait().expect("answered"));
                        assert_eq!(words, [10, 11]);
                    }
                    true => {
                        for turn in 0..2 {
                            let offered = mesh.offered(Neighbor::Previous).expect("offered");
                            assert_eq!(offered, (vec![sent(turn)], vec![7, u64::from(turn)]));
                            let word = 10 + u64::from(turn);
                            mesh.answer(Neighbor::Previous, word).expect("answered");
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn the_end_of_a_rank_ends_all_its_groups() {
        let mut meshes = Mesh::threads(2, 2, 1 << 16, REGIONS).expect("meshes");
        let second = meshes.pop().expect("a stage");
        second.abort("gone");
        let waits = meshes[0].receive(Neighbor::Next, |_, _| Ok::<_, CommError>(()));
        assert!(matches!(waits, Err(CommError::Aborted { .. })), "{waits:?}");
        assert!(meshes[0].world().failure().is_some());
    }
}
