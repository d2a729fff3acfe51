//! Routes: how weights and gradients of a parameter group move, resolved once when the store is built.

use crate::plan::{GroupKind, Plan, Tier, UnitPlan};

/// Properties of the compute device on which routes depend.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Computes {
    /// Whether the device is discrete: the host cannot address its memory.
    pub(crate) discrete: bool,
    /// Whether states of the device tier are stored in that memory.
    pub(crate) stores: bool,
    /// Whether devices run collectives among themselves.
    pub(crate) collects: bool,
}

/// How a lease makes weights readable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WeightRoute {
    /// All-gathered by the communicator.
    Gathered,
    /// All-gathered by the devices.
    GatheredOnDevice,
    /// Views of a discrete device's memory, where they are stored.
    OnDevice,
    /// Views of memory that the host can address, where they are stored. All ranks may map it.
    InPlace,
    /// Views of a copy of the weights.
    Copied,
}

/// How a deposited gradient reaches its sum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GradientRoute {
    /// Added to the sum at each deposit.
    Added,
    /// Collected in a bucket.
    Bucketed,
    /// Added to the sum by the discrete device that stores it.
    AddedOnDevice,
    /// Reduce-scattered by the devices. The shard is fetched, or added on the device that stores the sum.
    ReducedOnDevice { stays: bool },
    /// Fetched from a discrete device, into a bucket or into the sum.
    Fetched { bucketed: bool },
}

/// How the gradients of a unit's trainable group are collected, reduced and used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gradients {
    pub(crate) route: GradientRoute,
    /// Whether the communicator or the devices reduce-scatter every micro-batch.
    pub(crate) reduced: bool,
    /// Whether an optimizer in backward consumes them, so that no sum is stored.
    pub(crate) consumed: bool,
    /// Whether the unit is updated in backward.
    pub(crate) updated_in_backward: bool,
}

/// Routes of one parameter group of one unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    /// Route of weights in a pass that computes.
    pub(crate) weights: WeightRoute,
    /// Route of weights in a pass that reads them into host memory, to save them.
    pub(crate) visited: WeightRoute,
    /// Route of gradients; `None` for a group that does not train.
    pub(crate) gradients: Option<Gradients>,
}

impl Route {
    pub(crate) fn new(plan: &Plan, unit: &UnitPlan, kind: GroupKind, device: Computes) -> Self {
        let weights = weights(plan, unit, kind, device);
        Self {
            weights,
            visited: match weights {
                WeightRoute::GatheredOnDevice => WeightRoute::Gathered,
                WeightRoute::OnDevice => WeightRoute::Copied,
                other => other,
            },
            gradients: (kind == GroupKind::Trainable && !unit.trainable.is_empty())
                .then(|| gradients(plan, unit, device)),
        }
    }
}

/// Routes that all units of a store share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flow {
    /// Whether weights are all-gathered from the ranks' shards.
    pub(crate) gathers: bool,
    /// Whether the devices gather weights, in passes that compute.
    pub(crate) gathers_on_device: bool,
    /// Whether the devices prefetch gathers by one unit.
    pub(crate) prefetches_gathers: bool,
    /// Whether weights are prefetched to the device by one unit.
    pub(crate) prefetch_weights: bool,
    /// Whether weights are stored on disk.
    pub(crate) weights_on_disk: bool,
    /// Whether weights are stored in a discrete device's memory.
    pub(crate) weights_on_device: bool,
    /// Whether the devices reduce-scatter gradients among themselves.
    pub(crate) reduces_on_device: bool,
    /// Whether gradients come from a discrete device. A unit's gradients are fetched after the next unit's backward is
    /// queued, so that the device stays busy.
    pub(crate) defers_gradients: bool,
    /// Whether updates may run during the next forward pass.
    pub(crate) updates_in_forward: bool,
}

impl Flow {
    pub(crate) fn new(plan: &Plan, device: Computes) -> Self {
        let param = plan.config().offload.param;
        Self {
            gathers: GroupKind::ALL.into_iter().any(|kind| plan.gathers(kind)),
            gathers_on_device: plan.gathers_parameters() && device.collects,
            prefetches_gathers: plan.prefetches_gathers(),
            prefetch_weights: plan.prefetch_weights(),
            weights_on_disk: param == Tier::Nvme,
            weights_on_device: param == Tier::Device && device.stores,
            reduces_on_device: plan.config().shards_gradients() && device.collects,
            defers_gradients: device.discrete,
            updates_in_forward: plan.updates_in_forward(),
        }
    }
}

fn weights(plan: &Plan, unit: &UnitPlan, kind: GroupKind, device: Computes) -> WeightRoute {
    if plan.gathers(kind) {
        return match device.collects {
            true => WeightRoute::GatheredOnDevice,
            false => WeightRoute::Gathered,
        };
    }
    match plan.config().offload.param {
        Tier::Device if device.stores => WeightRoute::OnDevice,
        Tier::Device => WeightRoute::InPlace,
        Tier::Host if plan.maps_files(unit.id, kind) => WeightRoute::InPlace,
        Tier::Host if plan.maps_shared(kind) => WeightRoute::InPlace,
        // Weights are copied to the device from where they are stored.
        Tier::Host if device.discrete => WeightRoute::InPlace,
        Tier::Host | Tier::Nvme => WeightRoute::Copied,
    }
}

fn gradients(plan: &Plan, unit: &UnitPlan, device: Computes) -> Gradients {
    let config = plan.config();
    let consumed = plan.consumes_gradients(unit.id);
    let reduced = config.shards_gradients();
    let sum_stays = device.stores && config.offload.optimizer == Tier::Device && !consumed;
    // A bucket is needed if gradients are reduced, if their sum is on disk, or if there is no sum.
    let bucketed = reduced || config.offload.optimizer == Tier::Nvme || consumed;
    let route = if device.collects && reduced {
        GradientRoute::ReducedOnDevice { stays: sum_stays }
    } else if sum_stays && !(plan.world_size() > 1 && reduced) {
        GradientRoute::AddedOnDevice
    } else if device.discrete {
        GradientRoute::Fetched { bucketed }
    } else if bucketed {
        GradientRoute::Bucketed
    } else {
        GradientRoute::Added
    };
    Gradients {
        route,
        reduced,
        consumed,
        updated_in_backward: plan.updates_in_backward(unit.id),
    }
}
