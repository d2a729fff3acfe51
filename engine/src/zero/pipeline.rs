//! Pipeline stages: transfers to the neighbors, and results of all stages in the order of an undivided model.

use super::device_transfers::DeviceTransfers;
use super::senders::Senders;
use super::{Result, Zero};
use crate::access::{BoundaryTensor, PipelineStage};
use crate::comm::Tag as CommTag;
use crate::comm::mesh::{Coordinates, Neighbor};
use crate::error::EngineError;
use crate::plan::{GroupKind, PassKind, Phase, Visit};
use crate::spec::{ParamId, UnitId};
use kernels::{Tag, Tensor, TensorMut};

/// Transfers of a pipeline stage to its neighbors.
#[derive(Debug)]
pub(super) enum Transfers {
    ThroughHost(Senders),
    BetweenDevices(DeviceTransfers),
}

impl Transfers {
    /// Waits until nothing reads the values of transfers that were started.
    pub(super) fn wait(&mut self) -> Result<()> {
        match self {
            Self::ThroughHost(senders) => senders.wait(),
            Self::BetweenDevices(transfers) => transfers.wait(),
        }
    }
}

impl Zero {
    /// Ends the backward pass of one micro-batch and counts it. [`Zero::add_losses`] adds its loss.
    fn end_backward(&self) -> Result<()> {
        self.end_pass()?;
        self.store.borrow_mut().count_micro_batch();
        Ok(())
    }

    /// Counts losses for the next [`Zero::step`]: the sum of token losses on this rank, and the number of its tokens that
    /// have a loss. Only the last pipeline stage has any.
    pub fn add_losses(&mut self, loss_sum: f64, supervised: u64) {
        self.totals.loss_sum += loss_sum;
        self.totals.supervised += supervised;
    }

    /// Sum of the squares of all gradients, from this rank's sums by unit. They are added over units and then over shards,
    /// which is the order of an undivided model.
    pub(super) fn sum_over_stages(&self, own: &[(UnitId, f64)]) -> Result<f64> {
        let mut squares = vec![0.0; self.plan.units().len()];
        for (unit, sum) in own {
            squares[unit.index()] = *sum;
        }
        let world = self.mesh.world();
        let all = world.all_gather_f64(&squares, CommTag::new("norm", 0))?;
        let at = self.mesh.coordinates();
        let of_shard = |shard: usize| {
            let units = self.plan.units().iter();
            units.fold(0.0, |sum, unit| {
                let rank = at.rank(shard, self.plan.stage_of(unit.id));
                sum + all[rank][unit.id.index()]
            })
        };
        Ok((0..self.plan.shards()).map(of_shard).sum())
    }

    /// Calls `visit` with every whole weight, in forward order of all pipeline stages, on every rank.
    pub(super) fn visit_stages<E: From<EngineError>>(
        &self,
        visits: Visit,
        mut visit: impl FnMut(ParamId, &Tensor) -> Result<(), E>,
    ) -> Result<(), E> {
        self.leased.set(None);
        self.trains.set(false);
        let mut store = self.store.borrow_mut();
        store.begin_pass(PassKind::Infer, Some(visits));
        drop(store);
        let own = self.plan.own_units();
        let dtype = self.plan.config().precision.weight_dtype();
        let params = self.plan.spec().params.iter().enumerate();
        let params = params.map(|(i, param)| (ParamId(i as u32), param));
        for unit in self.plan.units() {
            let members = params
                .clone()
                .filter(|(_, param)| param.unit == unit.id && visits.reads(GroupKind::of(param)));
            let members: Vec<_> = members.collect();
            if members.is_empty() {
                continue;
            }
            let stage = self.plan.stage_of(unit.id);
            let lease = match own.contains(&unit.id.0) {
                true => Some(self.lease_on_host(unit.id, Phase::Forward)?),
                false => None,
            };
            for (id, param) in members {
                let host = &self.tiers.host;
                let values = TensorMut::new(host, Tag::Workspace, param.shape, dtype);
                let mut values = values.map_err(EngineError::from)?;
                if let Some(lease) = &lease {
                    let weight = lease.param(id)?;
                    let bytes = weight.host_bytes().map_err(EngineError::from)?;
                    values.as_bytes_mut().copy_from_slice(&bytes);
                }
                let sent = self.mesh.broadcast(stage, values.as_bytes_mut(), unit.id.0);
                sent.map_err(EngineError::from)?;
                visit(id, &values.freeze())?;
            }
            if let Some(lease) = lease {
                lease.end()?;
            }
        }
        Ok(self.end_pass()?)
    }
}

impl PipelineStage for Zero {
    fn coordinates(&self) -> Coordinates {
        self.mesh.coordinates()
    }

    fn begin(&self, kind: PassKind) {
        self.begin_pass(kind);
    }

    fn end(&self, kind: PassKind) -> Result<()> {
        match kind {
            PassKind::Backward => self.end_backward(),
            _ => self.end_pass(),
        }
    }

    fn send(&self, to: Neighbor, values: &[BoundaryTensor]) -> Result<()> {
        match &mut *self.transfers.borrow_mut() {
            Transfers::ThroughHost(senders) => senders.send(to, values),
            Transfers::BetweenDevices(transfers) => transfers.send(to, values),
        }
    }

    fn receive(&self, from: Neighbor) -> Result<Vec<BoundaryTensor>> {
        let mut transfers = self.transfers.borrow_mut();
        let senders = match &mut *transfers {
            Transfers::ThroughHost(senders) => senders,
            Transfers::BetweenDevices(transfers) => return transfers.receive(from),
        };
        let mut received = Vec::new();
        let outcome = self.mesh.receive(from, |sent, bytes| {
            let backend = &self.backend;
            received.push(BoundaryTensor {
                index: sent.index,
                wants_gradient: sent.wants_gradient,
                value: backend.upload(bytes, sent.shape, sent.dtype, Tag::Activations)?,
            });
            Ok::<_, EngineError>(())
        });
        match outcome {
            Ok(()) => Ok(received),
            Err(error) => Err(senders.cause_of(error)),
        }
    }
}
