//! What is checked of every kernel family.

use anyhow::{Context, Result};
use kernels::cuda::module::Family;

use crate::machine::Machine;

pub mod adamw;
pub mod cast;
pub mod grad_norm;
pub mod norm;
pub mod primitives_check;

/// How large operands may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effort {
    /// Seconds on an emulated device.
    Emulated,
    /// Sizes of real models.
    Gpu,
}

/// One check: draws operands, launches, compares with a reference.
pub struct Case {
    /// What it checks, with the sizes.
    pub name: String,
    run: Box<dyn Fn(&mut dyn Machine) -> Result<()> + Send + Sync>,
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Case").field(&self.name).finish()
    }
}

impl Case {
    /// A named check.
    pub fn new(
        name: impl Into<String>,
        run: impl Fn(&mut dyn Machine) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            run: Box::new(run),
        }
    }

    /// Runs it and checks that no kernel wrote outside its buffers.
    ///
    /// # Errors
    /// What failed, with the case's name.
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
        Family::AdamW => adamw::cases(effort),
        Family::GradNorm => grad_norm::cases(effort),
        Family::Norm => norm::cases(effort),
        Family::PrimitivesCheck => primitives_check::cases(effort),
        other => vec![Case::new(format!("{other:?}"), move |_| {
            anyhow::bail!("the family {other:?} has no checks")
        })],
    }
}
