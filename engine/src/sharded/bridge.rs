//! The interface between the optimizer and tensors of another library.

use kernels::Tensor;
use optim::GroupOptions;

/// Error of the library that owns the tensors, as a [`TensorBridge`] returns it.
pub type BridgeError = Box<dyn std::error::Error + Send + Sync>;

/// Description of one trainable tensor of another library's model.
#[derive(Clone, PartialEq, Debug)]
pub struct TensorInfo {
    /// Name of the tensor in messages and checkpoints; it must be unique.
    pub name: String,
    /// Number of elements of the tensor.
    pub elems: usize,
    /// Optimizer options of the tensor: its weight decay, and the factor on its learning rate.
    pub options: GroupOptions,
}

impl TensorInfo {
    /// Description of a tensor of `elems` elements with this weight decay and learning-rate factor 1.
    #[must_use]
    pub fn new(name: impl Into<String>, elems: usize, weight_decay: f32) -> Self {
        Self {
            name: name.into(),
            elems,
            options: GroupOptions {
                weight_decay,
                lr_scale: 1.0,
            },
        }
    }
}

/// Group of tensors whose gradients are reduced together, such as those of one layer. One collective
/// transfers a group, so neither a single bias nor the whole model is a good choice.
#[derive(Clone, PartialEq, Debug)]
pub struct TensorGroup {
    /// Name of the group of tensors, shown in messages.
    pub name: String,
    /// Tensors of the group. They are numbered in this order.
    pub tensors: Vec<TensorInfo>,
}

/// Access of the optimizer to the trainable tensors of another library's model. Tensors are numbered from 0
/// through all groups. Values are row-major f32, whatever dtype the library stores.
pub trait TensorBridge {
    /// The trainable tensors, equal on every rank and at every call.
    fn groups(&self) -> Vec<TensorGroup>;

    /// Copies the weights of a tensor into `out`, which has its length.
    ///
    /// # Errors
    /// Any error of the library.
    fn read_weight(&self, tensor: usize, out: &mut [f32]) -> Result<(), BridgeError>;

    /// Copies the gradient of a tensor into `out`, which is zero before. A tensor without a gradient leaves it
    /// unchanged.
    ///
    /// # Errors
    /// Any error of the library.
    fn read_gradient(&self, tensor: usize, out: &mut [f32]) -> Result<(), BridgeError>;

    /// Gradient of a tensor in the memory of the device that
    /// [`ShardedOptimizer::on_device`](super::ShardedOptimizer::on_device) was given: f32, bf16 or f16. The optimizer
    /// takes it from there. `None`, the default, makes it call [`TensorBridge::read_gradient`].
    ///
    /// # Errors
    /// Any error of the library.
    fn device_gradient(&self, _tensor: usize) -> Result<Option<Tensor>, BridgeError> {
        Ok(None)
    }

    /// Replaces the weights of a tensor.
    ///
    /// # Errors
    /// Any error of the library.
    fn write_weight(&mut self, tensor: usize, values: &[f32]) -> Result<(), BridgeError>;
}
