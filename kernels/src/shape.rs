//! Shapes of contiguous row-major tensors.

/// Most axes a tensor has (a convolution weight needs four).
pub const MAX_RANK: usize = 5;

/// Extent of each axis, outermost first. A scalar has none.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_RANK],
    rank: u8,
}

impl Shape {
    /// A shape of at most [`MAX_RANK`] axes.
    ///
    /// # Panics
    /// When there are more; shapes are written in code or checked by their reader.
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

    /// The extents.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.dims[..usize::from(self.rank)]
    }

    /// Number of axes.
    #[must_use]
    pub fn rank(&self) -> usize {
        usize::from(self.rank)
    }

    /// Number of elements.
    #[must_use]
    pub fn elems(&self) -> usize {
        self.dims().iter().product()
    }

    /// Extent of the last axis (1 for a scalar).
    #[must_use]
    pub fn last(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }

    /// Elements divided by the last axis: the rows of the tensor seen as a matrix.
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
