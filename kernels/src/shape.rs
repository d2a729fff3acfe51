//! Shapes of contiguous row-major tensors.

/// Maximum number of axes of a tensor.
pub const MAX_RANK: usize = 5;

/// Extent of each axis of a contiguous tensor, outermost first. A scalar has no axes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_RANK],
    rank: u8,
}

impl Shape {
    /// Shape with the extents `dims`, outermost axis first; at most [`MAX_RANK`] axes.
    ///
    /// # Panics
    /// When `dims` has more axes. Shapes come from code, or their reader has checked them.
    #[must_use]
    pub fn new(dims: &[usize]) -> Self {
        assert!(
            dims.len() <= MAX_RANK,
            "a tensor has at most {MAX_RANK} axes"
        );
        let mut all = [1; MAX_RANK];
        all[..dims.len()].copy_from_slice(dims);
        Self {
            dims: all,
            rank: dims.len() as u8,
        }
    }

    /// Extent of each axis, as `Tensor.shape` in PyTorch.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.dims[..usize::from(self.rank)]
    }

    /// Number of axes; 0 for a scalar.
    #[must_use]
    pub fn rank(&self) -> usize {
        usize::from(self.rank)
    }

    /// Number of elements: the product of the extents, 1 for a scalar.
    #[must_use]
    pub fn elems(&self) -> usize {
        self.dims().iter().product()
    }

    /// Extent of the last axis (1 for a scalar).
    #[must_use]
    pub fn last(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }

    /// Number of elements divided by the last extent: the number of rows if the tensor is viewed as a matrix.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.dims()[..self.rank().saturating_sub(1)]
            .iter()
            .product()
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Self::new(&dims)
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        Self::new(dims)
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}
