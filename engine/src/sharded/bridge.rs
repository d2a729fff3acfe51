//! What the optimizer asks of tensors it knows nothing about.

use optim::GroupOptions;

/// A failure of the library that owns the tensors.
pub type BridgeError = Box<dyn std::error::Error + Send + Sync>;

/// A tensor that is trained.
#[derive(Clone, PartialEq, Debug)]
pub struct TensorInfo {
    /// Its name, in messages and checkpoints; no two are alike.
    pub name: String,
    /// Its elements.
    pub elems: usize,
    /// Weight decay, and the factor on the learning rate.
    pub options: GroupOptions,
}

impl TensorInfo {
    /// A tensor with this weight decay and the plain learning rate.
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

/// Tensors whose gradients are reduced together: a layer, for example. A group is the unit of communication, so neither
/// a single bias nor the whole model makes a good one.
#[derive(Clone, PartialEq, Debug)]
pub struct TensorGroup {
    /// Its name, in messages.
    pub name: String,
    /// Its tensors.
    pub tensors: Vec<TensorInfo>,
}

/// Trained tensors of a foreign model. Tensors are numbered through all groups, from 0; values are row-major f32,
/// whatever the library stores.
pub trait TensorBridge {
    /// All trained tensors, equal on every rank and at every call.
    fn groups(&self) -> Vec<TensorGroup>;

    /// Copies the weights of a tensor into `out`, which has its elements.
    ///
    /// # Errors
    /// Whatever keeps the library from it.
    fn read_weight(&self, tensor: usize, out: &mut [f32]) -> Result<(), BridgeError>;

    /// Copies the gradient of a tensor into `out`, which is zero before; a tensor without a gradient leaves it so.
    ///
    /// # Errors
    /// Whatever keeps the library from it.
    fn read_gradient(&self, tensor: usize, out: &mut [f32]) -> Result<(), BridgeError>;

    /// Replaces the weights of a tensor.
    ///
    /// # Errors
    /// Whatever keeps the library from it.
    fn write_weight(&mut self, tensor: usize, values: &[f32]) -> Result<(), BridgeError>;
}
