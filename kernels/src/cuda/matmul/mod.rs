//! Matrix products by NVIDIA's library: what is multiplied, as a value; the library itself is [`CublasLt`].
//!
//! A [`Multiply`] says what our own [`Product`] says, for products that a library takes: one sum, whole lines. A GPU
//! and the emulator of the tests execute the same values, as with launches.
//!
//! Sums are f32 whatever the operands are: no TF32, and parts of a cut sum are kept in f32. Which algorithm runs is the
//! library's choice for a [`Shape`], so the last bits depend on shape, GPU and version, and not on the data. The GELU
//! epilogues are the tanh form of a pre-activation that was never rounded; models define it on a rounded one, so no
//! model uses them.

mod cublaslt;

pub use cublaslt::CublasLt;
pub(super) use cublaslt::version;

use super::launch::Address;
use super::ops::product::Product;
use crate::DType;

/// Scratch memory that a product may use, in bytes: what Hopper's kernels want. All have as much, so that a plan can
/// count it.
pub const WORKSPACE_BYTES: u64 = 32 << 20;

/// Every address, and every line of an operand, is a multiple of so many bytes: what vector loads and copies of tiles
/// want. More is never promised, so that the choice of an algorithm does not depend on where a tensor happens to lie.
pub const ALIGNMENT: u64 = 16;

/// What follows the sum, in f32, before the one rounding.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// `+ bias`.
    Bias,
    /// GELU in its tanh form; `aux`: what enters it is stored, too.
    Gelu {
        /// Whether [`Multiply::aux`] is written.
        aux: bool,
    },
    /// GELU in its tanh form of the sum with bias.
    GeluBias {
        /// Whether [`Multiply::aux`] is written.
        aux: bool,
    },
}

impl Epilogue {
    /// Whether a bias is read.
    #[must_use]
    pub const fn has_bias(self) -> bool {
        matches!(self, Self::Bias | Self::GeluBias { .. })
    }

    /// Whether a GELU follows.
    #[must_use]
    pub const fn has_gelu(self) -> bool {
        matches!(self, Self::Gelu { .. } | Self::GeluBias { .. })
    }

    /// Whether what enters a GELU is written.
    #[must_use]
    pub const fn has_aux(self) -> bool {
        matches!(
            self,
            Self::Gelu { aux: true } | Self::GeluBias { aux: true }
        )
    }
}

/// Everything of a product that an algorithm is chosen for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Shape {
    /// Of the operands: bf16, f16 or f32.
    pub dtype: DType,
    /// Of `y`: `dtype`, or f32.
    pub out: DType,
    /// The lines of `a` run along m, not k.
    pub transpose_a: bool,
    /// The lines of `b` run along n, not k: the weight `[n, k]` of a linear layer is *not* transposed.
    pub transpose_b: bool,
    /// Rows of `y`.
    pub m: usize,
    /// Columns of `y`.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// Elements from line to line of `a`.
    pub a_line: usize,
    /// Elements from line to line of `b`.
    pub b_line: usize,
    /// Elements from row to row of `y`.
    pub y_line: usize,
    /// What follows the sum.
    pub epilogue: Epilogue,
}

/// `y[m, n] = epilogue(alpha * (sum of a b^T) + beta * y)`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Multiply {
    /// Dtypes and extents.
    pub shape: Shape,
    /// `[m, k]`, or `[k, m]` when `transpose_a`.
    pub a: Address,
    /// `[n, k]`, or `[k, n]` when `transpose_b`.
    pub b: Address,
    /// `[m, n]` in `out`.
    pub y: Address,
    /// `[n]` in `out`, where the epilogue has one; else [`Address::NULL`].
    pub bias: Address,
    /// `[m, n]` dense in `out`, where the epilogue writes it; else [`Address::NULL`].
    pub aux: Address,
    /// Of the sums.
    pub alpha: f32,
    /// Of what `y` holds; with 0 it is not read.
    pub beta: f32,
}

impl Multiply {
    /// A product of ours as one that a library takes; `None` where it takes none such: two sums, missing columns, lines
    /// or addresses that are no multiples of [`ALIGNMENT`], a bias in another dtype than `y`, nothing to add. The answer
    /// is a function of shapes and of places in an arena, so that a plan and its run agree.
    #[must_use]
    pub fn of(product: &Product) -> Option<Self> {
        let [Some(term), None] = product.terms else {
            return None;
        };
        let has_bias = product.bias != Address::NULL;
        let epilogue = match has_bias {
            true => Epilogue::Bias,
            false => Epilogue::None,
        };
        let shape = Shape {
            dtype: product.dtype,
            out: product.out,
            transpose_a: product.transpose_a,
            transpose_b: product.transpose_b,
            m: product.m,
            n: product.n,
            k: term.k,
            a_line: term.a_line,
            b_line: term.b_line,
            y_line: product.y_line,
            epilogue,
        };
        let float = |dtype| matches!(dtype, DType::BF16 | DType::F16 | DType::F32);
        let dtypes = float(shape.dtype) && (shape.out == shape.dtype || shape.out == DType::F32);
        let whole = [shape.m, shape.n, shape.k].iter().all(|extent| *extent > 0)
            && product.b_rows == product.n
            && (!has_bias || shape.out == shape.dtype);
        let bytes = |line: usize| (line * shape.dtype.size_bytes()) as u64;
        let lines = [bytes(term.a_line), bytes(term.b_line)];
        let places = [term.a.0, term.b.0, product.y.0, product.bias.0];
        let aligned = lines
            .into_iter()
            .chain(places)
            .all(|x| x.is_multiple_of(ALIGNMENT));
        (dtypes && whole && aligned).then_some(Self {
            shape,
            a: term.a,
            b: term.b,
            y: product.y,
            bias: product.bias,
            aux: Address::NULL,
            alpha: product.scale,
            beta: 0.0,
        })
    }

    /// The same product added to what `y` of f32 at this address holds; `None` where it is not aligned.
    #[must_use]
    pub fn added_to(mut self, y: Address) -> Option<Self> {
        let fits = self.shape.out == DType::F32 && y.0.is_multiple_of(ALIGNMENT);
        (self.y, self.beta) = (y, 1.0);
        fits.then_some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::ops::product::Term;

    fn product() -> Product {
        Product {
            dtype: DType::BF16,
            out: DType::BF16,
            transpose_a: false,
            transpose_b: true,
            m: 5,
            n: 24,
            b_rows: 24,
            terms: [
                Some(Term {
                    a: Address(1 << 20),
                    a_line: 40,
                    b: Address(2 << 20),
                    b_line: 24,
                    k: 33,
                }),
                None,
            ],
            bias: Address(3 << 20),
            scale: 0.5,
            y: Address(4 << 20),
            y_line: 24,
        }
    }

    #[test]
    fn a_library_product_has_the_operands_of_its_kernel() {
        let own = product();
        let multiply = Multiply::of(&own).expect("one sum, whole lines");
        let shape = multiply.shape;
        assert_eq!((shape.m, shape.n, shape.k), (5, 24, 33));
        assert_eq!([shape.a_line, shape.b_line, shape.y_line], [40, 24, 24]);
        assert_eq!([shape.transpose_a, shape.transpose_b], [false, true]);
        assert_eq!((shape.epilogue, multiply.bias), (Epilogue::Bias, own.bias));
        assert_eq!((multiply.alpha, multiply.beta), (0.5, 0.0));
        assert_eq!(multiply.added_to(own.y), None, "y is no f32");
    }

    #[test]
    fn products_that_a_library_cannot_express_use_our_kernels() {
        let without = |change: &dyn Fn(&mut Product)| {
            let mut other = product();
            change(&mut other);
            Multiply::of(&other)
        };
        let changes: [&dyn Fn(&mut Product); 8] = [
            &|p| p.terms[1] = p.terms[0],
            &|p| p.terms = [None; 2],
            &|p| p.b_rows -= 1,
            &|p| p.out = DType::F32,
            &|p| p.bias = Address(p.bias.0 + 2),
            &|p| p.y = Address(p.y.0 + 8),
            &|p| p.terms[0].as_mut().expect("a term").a_line = 39,
            &|p| p.m = 0,
        ];
        for (i, change) in changes.into_iter().enumerate() {
            assert_eq!(without(change), None, "change {i}");
        }
        assert!(without(&|p| p.y_line = 25).is_some());
    }
}
