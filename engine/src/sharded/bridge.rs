//! Interface to tensors of another library.

use optim::GroupOptions;

/// Error of the library that owns the tensors.
pub type BridgeError = Box<dyn std::error::Error + Send + Sync>;

/// A trainable tensor.
#[derive(Clone, PartialEq, Debug)]
pub struct TensorInfo {
    /// Its unique name, for messages and checkpoints.
    pub name: String,
    /// Its number of elements.
    pub elems: usize,
    /// Weight decay, and factor on the learning rate.
    pub options: GroupOptions,
}

impl TensorInfo {
    /// A tensor with this weight decay and a learning-rate factor of 1.
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

/// Tensors whose gradients are reduced together, such as a layer. A tensor group is the unit of communication, so a
/// single bias is too small and the whole model too large.
#[derive(Clone, PartialEq, Debug)]
pub struct TensorGroup {
    /// Its name, in messages.
    pub name: String,
    /// Its tensors.
    pub tensors: Vec<TensorInfo>,
}

/// Trainable tensors of a foreign model. Tensors are numbered from 0 through all tensor groups. Values are row-major
/// f32, whatever the library stores.
pub trait TensorBridge {
    /// All trainable tensors. The result must be equal on every rank and in every call.
    fn groups(&self) -> Vec<TensorGroup>;

    /// Copies the weights of a tensor to `out`, which has its number of elements.
    ///
    /// # Errors
    /// When the library fails.
    fn read_weight(&self, tensor: usize, out: &mut [f32]) -> Result<(), BridgeError>;

    /// Copies the gradient of a tensor to `out`. `out` is zero before; a tensor without a gradient leaves it so.
    ///
    /// # Errors
    /// When the library fails.
    fn read_gradient(&self, tensor: usize, out: &mut [f32]) -> Result<(), BridgeError>;

    /// Replaces the weights of a tensor.
    ///
    /// # Errors
    /// When the library fails.
    fn write_weight(&mut self, tensor: usize, values: &[f32]) -> Result<(), BridgeError>;
}
