//! Steps of an adapted layer: launches, or whatever a backend makes of its wide products.

use super::product::Product;
use super::workspace::Workspace;
use crate::cuda::launch::Launch;

/// Step of an operation. A list of [`Launch`]es has our kernels only; a backend with a library has its own steps.
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
