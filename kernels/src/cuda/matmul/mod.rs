//! Matrix products by NVIDIA's library: the product as a value ([`Multiply`]) and the library ([`CublasLt`]).
//!
//! A [`Multiply`] is a [`Product`] that a library can compute: one sum, whole lines. As with launches, a GPU and the
//! emulator of the tests execute the same values.
//!
//! Sums are f32 for all operand types: no TF32, and parts of a split sum stay in f32. The library chooses the
//! algorithm for a [`Shape`]. So the last bits depend on shape, GPU and library version, not on the data. The GELU
//! epilogues apply the tanh form to an unrounded pre-activation. Models define GELU on a rounded one, so no model
//! uses these epilogues.

mod cublaslt;

pub use cublaslt::CublasLt;
pub(super) use cublaslt::version;

use super::launch::Address;
use super::ops::product::Product;
use crate::DType;

/// Size in bytes of the workspace of a cuBLASLt product: NVIDIA's recommendation for Hopper. All GPUs use the
/// same size, so a plan can count it.
pub const WORKSPACE_BYTES: u64 = 32 << 20;

/// Alignment in bytes of every address and every row of an operand, as vector loads and tile copies need it.
/// The library is never told of a higher alignment, so its choice of an algorithm does not depend on where a
/// tensor is located.
pub const ALIGNMENT: u64 = 16;

/// Products that a library computes. Our kernels compute the others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum LibraryUse {
    /// No product: the library is missing or was not chosen.
    Nothing,
    /// Products of one sum. An adapted layer is one product of our kernels.
    Products,
    /// Also the wide products of adapted layers in 16 bits: the base layer's, then the adapter's, added to it.
    AdaptedLayers,
}

impl LibraryUse {
    /// Use of a library that is present, on a GPU of this compute capability (`None` if unknown).
    ///
    /// `mma.sync`, which our kernels use, reaches 60 to 65 % of the tensor cores' peak on 9.x and 10.x. The library
    /// gains more there than the second pass over the output costs. On other GPUs `mma.sync` reaches the peak.
    #[must_use]
    pub const fn on(compute_capability: Option<(u32, u32)>) -> Self {
        match compute_capability {
            Some((9 | 10, _)) => Self::AdaptedLayers,
            _ => Self::Products,
        }
    }
}

/// Epilogue of a matrix product: the operation on each f32 sum before it is rounded to the dtype of the
/// result.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Epilogue {
    /// The sum is rounded as it is.
    None,
    /// Adds the bias to the sum.
    Bias,
    /// GELU in tanh form. With `aux`, its input is also stored.
    Gelu {
        /// Whether [`Multiply::aux`] is written.
        aux: bool,
    },
    /// Adds a bias, then GELU in tanh form.
    GeluBias {
        /// Whether [`Multiply::aux`] is written.
        aux: bool,
    },
}

impl Epilogue {
    /// Whether this epilogue adds a bias to the sum.
    #[must_use]
    pub const fn has_bias(self) -> bool {
        matches!(self, Self::Bias | Self::GeluBias { .. })
    }

    /// Whether this epilogue applies GELU.
    #[must_use]
    pub const fn has_gelu(self) -> bool {
        matches!(self, Self::Gelu { .. } | Self::GeluBias { .. })
    }

    /// Whether this epilogue stores the input of GELU in [`Multiply::aux`].
    #[must_use]
    pub const fn has_aux(self) -> bool {
        matches!(
            self,
            Self::Gelu { aux: true } | Self::GeluBias { aux: true }
        )
    }
}

/// Parameters of a matrix product on which cuBLASLt's choice of an algorithm depends.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Shape {
    /// Dtype of the operands: bf16, f16 or f32.
    pub dtype: DType,
    /// Dtype of the result `y`: `dtype` or f32.
    pub out: DType,
    /// Whether `a` is stored as `[k, m]` instead of `[m, k]`.
    pub transpose_a: bool,
    /// Whether `b` is stored as `[k, n]` instead of `[n, k]`. The weight `[n, k]` of a linear layer is *not*
    /// transposed.
    pub transpose_b: bool,
    /// Number of rows of the result `y`.
    pub m: usize,
    /// Number of columns of the result `y`.
    pub n: usize,
    /// Inner dimension of the product: number of products that are added for each element of `y`.
    pub k: usize,
    /// Leading dimension of `a`: elements from the start of one stored row to the next.
    pub a_line: usize,
    /// Leading dimension of `b`: elements from the start of one stored row to the next.
    pub b_line: usize,
    /// Leading dimension of `y`: elements from the start of one row to the next.
    pub y_line: usize,
    /// Operation on each f32 sum before it is rounded to `out`.
    pub epilogue: Epilogue,
}

/// Operands of a cuBLASLt product: `y[m, n] = epilogue(alpha * (sum of a b^T) + beta * y)`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Multiply {
    /// Dtypes, extents, strides and epilogue of the product.
    pub shape: Shape,
    /// Left operand, `[m, k]`, or `[k, m]` when `transpose_a`.
    pub a: Address,
    /// Right operand, `[n, k]`, or `[k, n]` when `transpose_b`.
    pub b: Address,
    /// Result, `[m, n]` in the dtype `out` of the shape. If `beta` is not 0, its old values are also read.
    pub y: Address,
    /// Bias, `[n]` in the dtype of `y` if the epilogue adds one, else [`Address::NULL`].
    pub bias: Address,
    /// Destination of GELU's input, dense `[m, n]` in the dtype of `y`, if the epilogue stores it. Else
    /// [`Address::NULL`].
    pub aux: Address,
    /// Factor on the matrix product `a b^T`.
    pub alpha: f32,
    /// Factor on the old values of `y`. With 0 they are not read.
    pub beta: f32,
}

impl Multiply {
    /// Converts a product to one that cuBLASLt can compute. `None` for two terms, a `b` with fewer than `n`
    /// rows, an address or an operand's leading dimension that is not a multiple of [`ALIGNMENT`] bytes, a
    /// bias of another dtype than `y`, unsupported dtypes, or an extent of zero. The answer depends on shapes
    /// and arena offsets only, so a plan and its run agree.
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

    /// Converts a wide product of an adapted layer in 16 bits to calls of the library: base weight and bias, then the
    /// adapter's term, if any, added to the rounded result. `None` for other dtypes, a factor, or where
    /// [`Multiply::of`] has none.
    #[must_use]
    pub fn of_adapted(product: &Product) -> Option<Vec<Self>> {
        let narrow = product.dtype != DType::F32 && product.out == product.dtype;
        if !narrow || product.scale.to_bits() != 1f32.to_bits() {
            return None;
        }
        let [base, adapter] = product.terms.map(|term| Product {
            terms: [term, None],
            ..*product
        });
        let mut calls = vec![Self::of(&base)?];
        if product.terms[1].is_some() {
            let added = Self::of(&Product {
                bias: Address::NULL,
                ..adapter
            })?;
            calls.push(Self { beta: 1.0, ..added });
        }
        Some(calls)
    }

    /// The same product, but added to the f32 values at `y` instead of overwriting its result. `None` if the
    /// dtype of the result is not f32 or the address `y` is not a multiple of [`ALIGNMENT`].
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
    fn an_adapted_layer_is_its_base_and_an_added_product() {
        let mut own = Product {
            scale: 1.0,
            ..product()
        };
        let term = own.terms[0].expect("a term");
        own.terms[1] = Some(Term {
            a: Address(5 << 20),
            k: 8,
            ..term
        });
        let [base, adapter] = Multiply::of_adapted(&own)
            .expect("two sums")
            .try_into()
            .expect("two calls");
        assert_eq!((base.a, base.shape.k, base.beta), (term.a, 33, 0.0));
        assert_eq!(base.bias, own.bias);
        assert_eq!(
            (adapter.a, adapter.shape.k, adapter.beta),
            (Address(5 << 20), 8, 1.0)
        );
        assert_eq!(
            (adapter.bias, adapter.shape.epilogue, adapter.y),
            (Address::NULL, Epilogue::None, base.y)
        );
        let scaled = Product { scale: 0.5, ..own };
        assert_eq!(Multiply::of_adapted(&scaled), None);
        let wide = Product {
            dtype: DType::F32,
            out: DType::F32,
            ..own
        };
        assert_eq!(Multiply::of_adapted(&wide), None);
    }

    #[test]
    fn the_library_computes_adapted_layers_where_mma_sync_is_slow() {
        for (capability, want) in [
            (Some((8, 0)), LibraryUse::Products),
            (Some((8, 9)), LibraryUse::Products),
            (Some((9, 0)), LibraryUse::AdaptedLayers),
            (Some((10, 3)), LibraryUse::AdaptedLayers),
            (Some((12, 0)), LibraryUse::Products),
            (None, LibraryUse::Products),
        ] {
            assert_eq!(LibraryUse::on(capability), want, "{capability:?}");
        }
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
