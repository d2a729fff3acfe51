//! The checks of every kernel family.

use anyhow::{Context, Result};
use kernels::cuda::module::Family;

use crate::machine::Machine;

pub mod accumulate;
pub mod adamw;
mod adamw_blocks;
pub mod attention;
pub mod cast;
pub mod grad_norm;
mod grouped;
mod host;
mod layer;
pub mod linear_parts;
pub mod lora_gradients;
pub mod lora_linear;
pub mod loss;
pub mod matmul_plain;
pub mod multiply;
pub mod norm;
mod operand;
pub mod pointwise;
pub mod primitives_check;
mod product;
pub mod rows;
pub mod unpack;

/// Size of the operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effort {
    /// Small enough for seconds on an emulated device.
    Emulated,
    /// Sizes of real models.
    Gpu,
}

/// One check: draws operands, launches, compares with a reference.
pub struct Case {
    /// Name of the check, with the sizes.
    pub name: String,
    run: Box<dyn Fn(&mut dyn Machine) -> Result<()> + Send + Sync>,
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Case").field(&self.name).finish()
    }
}

impl Case {
    /// A check with a name.
    pub fn new(
        name: impl Into<String>,
        run: impl Fn(&mut dyn Machine) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            run: Box::new(run),
        }
    }

    /// Runs the check, and verifies that no kernel wrote outside its buffers.
    ///
    /// # Errors
    /// The failure, with the case's name.
    pub fn run(&self, machine: &mut dyn Machine) -> Result<()> {
        let result = (self.run)(machine);
        let guards = machine.reset();
        result.and(guards).with_context(|| self.name.clone())
    }
}

/// The checks of a family.
#[must_use]
pub fn of(family: Family, effort: Effort) -> Vec<Case> {
    match family {
        Family::Cast => cast::cases(effort),
        Family::Unpack => unpack::cases(effort),
        Family::PrimitivesCheck => primitives_check::cases(effort),
        Family::AdamW => adamw::cases(effort),
        Family::Accumulate => accumulate::cases(effort),
        Family::GradNorm => grad_norm::cases(effort),
        Family::Norm => norm::cases(effort),
        Family::Attention => attention::cases(effort),
        Family::AttentionPlain => attention::plain_cases(effort),
        Family::LinearParts => linear_parts::cases(effort),
        Family::LoraGradients => lora_gradients::cases(effort),
        Family::LoraLinear => lora_linear::cases(effort),
        Family::MatmulPlain => matmul_plain::cases(effort),
        Family::Pointwise => pointwise::cases(effort),
        Family::Rows => rows::cases(effort),
        Family::RowSums => rows::sum_cases(effort),
        Family::Loss => loss::cases(effort),
        other => vec![Case::new(format!("{other:?}"), move |_| {
            anyhow::bail!("the family {other:?} has no checks")
        })],
    }
}
