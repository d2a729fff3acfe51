//! Steps of adapted layers on a device with a library, which computes their wide products.

use crate::cuda::launch::{Address, Launch};
use crate::cuda::matmul::{Multiply, WORKSPACE_BYTES};
use crate::cuda::ops::product::Product;
use crate::cuda::ops::step::Step;
use crate::cuda::ops::workspace::Workspace;

/// Step of an operation on a device with a library.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum LibraryStep {
    /// Launch of one of our kernels.
    Launch(Launch),
    /// Wide product.
    Product {
        /// Calls of the library, in order.
        calls: Vec<Multiply>,
        /// Scratch memory of each call, [`WORKSPACE_BYTES`] bytes.
        workspace: Address,
        /// Launches of the same product, for a shape that the library refuses. They share the scratch memory.
        own: Vec<Launch>,
    },
}

impl From<Launch> for LibraryStep {
    fn from(launch: Launch) -> Self {
        Self::Launch(launch)
    }
}

impl Step for LibraryStep {
    fn wide(product: &Product, multiprocessors: u32, space: &mut Workspace) -> Option<Vec<Self>> {
        let own = Launch::wide(product, multiprocessors, space)?;
        let Some(calls) = Multiply::of_adapted(product) else {
            return Some(own.into_iter().map(Self::Launch).collect());
        };
        let mark = space.mark();
        let workspace = space.take(WORKSPACE_BYTES);
        space.release(mark);
        Some(vec![Self::Product {
            calls,
            workspace,
            own,
        }])
    }
}
