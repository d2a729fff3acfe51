//! Groups of ranks of a world that TCP connects. Each group has connections and a window of its own.

use super::{MeetError, TcpOptions, is_loopback, join_at, meet};
use crate::comm::mesh::Group;
use crate::comm::{CommError, Communicator, Tag};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::sync::Arc;

/// Rendezvous of the groups that one rank joins. The first rank of each group listens.
#[derive(Debug)]
pub struct Groups {
    options: TcpOptions,
    addresses: Vec<Option<IpAddr>>,
    listeners: HashMap<String, TcpListener>,
    /// Ports of all groups by name.
    ports: HashMap<String, u16>,
}

impl Groups {
    /// Listens for those of `groups` whose first rank is this one, and exchanges the ports over `world`. All ranks call it.
    /// `options` are those of the world, `addresses` come from [`super::join_world`].
    ///
    /// # Errors
    /// [`MeetError::Broken`] if this rank cannot listen, [`MeetError::Window`] if the exchange fails.
    pub fn announce(
        options: &TcpOptions,
        addresses: Vec<Option<IpAddr>>,
        world: &dyn Communicator,
        groups: &[Group],
    ) -> Result<Self, MeetError> {
        let own = groups
            .iter()
            .filter(|group| group.world.rank == 0 && group.world.size > 1);
        let mut listeners = HashMap::new();
        let mut ports = Vec::new();
        for group in own {
            let listener = meet::listen(own_address(&addresses), 0);
            let port = listener
                .as_ref()
                .map_or(Ok(0), |l| l.local_addr().map(|addr| addr.port()));
            let broken = |source| MeetError::Broken {
                from: "this machine's own network".to_owned(),
                source,
            };
            ports.push((group.name.clone(), port.map_err(broken)?));
            listeners.insert(group.name.clone(), listener.map_err(broken)?);
        }
        let bytes = serde_json::to_vec(&ports).unwrap_or_default();
        let all = world.all_gather_bytes(&bytes, Tag::new("group ports", 0))?;
        let read = |bytes: &Vec<u8>| serde_json::from_slice::<Vec<(String, u16)>>(bytes).ok();
        Ok(Self {
            options: options.clone(),
            addresses,
            listeners,
            ports: all.iter().filter_map(read).flatten().collect(),
        })
    }

    /// Joins `group`, and returns after all its ranks have.
    ///
    /// # Errors
    /// As [`super::join`].
    pub fn join(&mut self, group: &Group) -> Result<Arc<dyn Communicator>, MeetError> {
        let (rank, size) = (self.options.world.rank, self.options.world.size);
        let address = group
            .ranks
            .first()
            .and_then(|first| self.addresses.get(*first));
        let address = address.copied().flatten();
        let port = self.ports.get(&group.name);
        let port = port.ok_or(CommError::InvalidWorld { rank, size })?;
        let options = TcpOptions {
            world: group.world,
            region_bytes: group.region_bytes,
            addr: address.unwrap_or(Ipv4Addr::LOCALHOST.into()).to_string(),
            port: *port,
            facts: vec![("group".to_owned(), group.name.clone())],
            ..self.options.clone()
        };
        join_at(&options, self.listeners.remove(&group.name))
    }
}

/// Address at which a rank with peers at `addresses` listens: the loopback interface if all are on this machine.
fn own_address(addresses: &[Option<IpAddr>]) -> IpAddr {
    let mut known = addresses.iter().flatten();
    match known.clone().find(|ip| !is_loopback(**ip)) {
        None => known.next().copied().unwrap_or(Ipv4Addr::LOCALHOST.into()),
        Some(IpAddr::V4(_)) => Ipv4Addr::UNSPECIFIED.into(),
        Some(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
    }
}
