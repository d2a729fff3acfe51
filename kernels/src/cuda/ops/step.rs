//! Steps of an adapted layer: launches, and wide products that a library may compute.

use super::product::Product;
use super::workspace::Workspace;
use crate::cuda::launch::{Address, Launch};
use crate::cuda::matmul::{Multiply, WORKSPACE_BYTES};

/// Step of an operation. A list of [`Launch`]es has our kernels only; [`LibraryStep`] also has library products.
pub trait Step: From<Launch> {
    /// Steps of a wide product of an adapted layer: its output, or the gradient of its input. `None` when the dtype has
    /// no kernel.
    fn wide(product: &Product, multiprocessors: u32, space: &mut Workspace) -> Option<Vec<Self>>;
}

impl Step for Launch {
    fn wide(product: &Product, multiprocessors: u32, space: &mut Workspace) -> Option<Vec<Self>> {
        product.launches(product.choose(multiprocessors), multiprocessors, space)
    }
}

/// Step of an operation on a device with a library.
#[derive(Clone, PartialEq, Debug)]
pub enum LibraryStep {
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
