//! Number format and tier of every kind of state, as a run prints them.

use super::{GroupKind, MASTER, Plan, Tier};
use crate::spec::ParamSpec;
use kernels::{DType, Quantization};
use optim::{Coverage, StateSlot};
use std::fmt;

/// Element types of one run's weights, gradients and optimizer states, and the memory tiers (device, host or
/// disk) that store them and saved activations.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Formats {
    /// Element type and tier of the weights.
    pub weights: (DType, Tier),
    /// How frozen weights are quantized, if any are.
    pub quantized: Option<Quantization>,
    /// Element type in which ranks reduce gradients.
    pub reduced: DType,
    /// Element type of gradients summed over micro-batches, and the tier that stores the sums.
    pub accumulated: (DType, Tier),
    /// Name and element type of each state that the optimizer stores per element, with f32 master weights
    /// first where they exist; and the tier that stores all of them.
    pub optimizer: (Vec<(&'static str, DType)>, Tier),
    /// Tier that stores saved activations: the inputs of checkpointed segments.
    pub activation: Tier,
}

impl Plan {
    /// Element types and tiers of this plan's states. `slots` are the states that the optimizer stores per
    /// element, e.g. `exp_avg`.
    #[must_use]
    pub fn formats(&self, slots: &[StateSlot]) -> Formats {
        let config = self.config();
        let master = config.precision.has_master();
        let master = master.then_some((MASTER, DType::F32));
        // Of parameters that differ in their states, those with blocks are named.
        let other = match config.states_in_blocks {
            true => Coverage::Elements,
            false => Coverage::Blocks,
        };
        let slots = slots.iter().filter(|slot| slot.coverage != other);
        let slots = slots.map(|slot| (slot.name, slot.dtype));
        Formats {
            weights: (self.dtype_of(GroupKind::Trainable), config.offload.param),
            quantized: self
                .spec()
                .params
                .iter()
                .find_map(ParamSpec::stored_quantization),
            reduced: DType::F32,
            accumulated: (config.grad_dtype(), config.offload.optimizer),
            optimizer: (
                master.into_iter().chain(slots).collect(),
                config.offload.optimizer,
            ),
            activation: config.offload.activation,
        }
    }
}

const fn place(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device",
        Tier::Host => "host",
        Tier::Nvme => "nvme",
    }
}

fn short(dtype: DType) -> String {
    dtype.to_string().to_lowercase()
}

impl fmt::Display for Formats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (weights, param) = self.weights;
        let quantized = self
            .quantized
            .map(|quantization| format!(" · quantized {quantization}"));
        let quantized = quantized.unwrap_or_default();
        let (accumulated, optimizer) = self.accumulated;
        let kept: Vec<String> = self
            .optimizer
            .0
            .iter()
            .map(|(name, dtype)| format!("{name} {}", short(*dtype)))
            .collect();
        write!(
            f,
            "weights {} ({}){quantized} · gradients reduced in {}, summed in {} ({}) · {} ({}) · saved activations ({})",
            short(weights),
            place(param),
            short(self.reduced),
            short(accumulated),
            place(optimizer),
            kept.join(", "),
            place(self.optimizer.1),
            place(self.activation)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{GradDtype, Offload, ZeroConfig};
    use crate::spec::ModelSpec;
    use optim::{AdamW, Optimizer, Precision};

    #[test]
    fn formats_follow_from_the_configuration() {
        let row = |precision, grad_dtype, offload| {
            let config = ZeroConfig {
                precision,
                grad_dtype,
                offload,
                ..ZeroConfig::default()
            };
            let spec = ModelSpec {
                units: Vec::new(),
                params: Vec::new(),
            };
            let plan = Plan::new(spec, config, 1).unwrap();
            plan.formats(AdamW::default().slots(precision)).to_string()
        };
        assert_eq!(
            row(Precision::Bf16, None, Offload::CPU),
            "weights bf16 (host) · gradients reduced in f32, summed in f32 (host) · master f32, exp_avg f32, \
             exp_avg_sq f32 (host) · saved activations (device)"
        );
        let pure = row(Precision::PureBf16, None, Offload::states(Tier::Nvme));
        assert!(
            pure.contains("summed in bf16 (nvme) · exp_avg bf16"),
            "{pure}"
        );
        let summed = row(
            Precision::PureBf16,
            Some(GradDtype::F32),
            Offload::default(),
        );
        assert!(summed.contains("summed in f32 (device)"), "{summed}");
    }
}
