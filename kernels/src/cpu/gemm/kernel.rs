//! Common part of the kernels of all instruction sets.

use super::super::simd::Level;
use super::tiles;
use super::{CpuMath, Method, Product};
use crate::DType;

/// Multiple of the panel height (rows of `a`) of every instruction set.
pub(super) const ROW_STEP: usize = 24;
/// Multiple of the panel width (columns of `b`) of every instruction set.
pub(super) const COL_STEP: usize = 48;

/// Values that the sums of an output start from, before products are added.
#[derive(Clone, Copy)]
pub(super) enum Start<'a> {
    Zero,
    /// One row of values, repeated for each row of the output.
    Row(&'a [f32]),
    /// The current values of the output.
    Out,
}

static ZEROS: [f32; COL_STEP] = [0.0; COL_STEP];

/// Source and destination of a tile of sums: f32 rows, each with a stride.
#[derive(Clone, Copy)]
pub(super) struct TileIo {
    pub(super) from: *const f32,
    pub(super) from_stride: usize,
    pub(super) to: *mut f32,
    pub(super) to_stride: usize,
}

impl TileIo {
    /// Tile at `to`, whose first column is column `col` of the output. `first` says that no product was added to it
    /// yet.
    pub(super) fn new(
        to: *mut f32,
        to_stride: usize,
        start: Start<'_>,
        first: bool,
        col: usize,
    ) -> Self {
        let (from, from_stride) = match start {
            Start::Zero if first => (ZEROS.as_ptr(), 0),
            Start::Row(row) if first => (row[col..].as_ptr(), 0),
            _ => (to.cast_const(), to_stride),
        };
        Self {
            from,
            from_stride,
            to,
            to_stride,
        }
    }

    /// The part of the tile from this row and column on, which may be its end.
    #[inline(always)]
    pub(super) fn at(self, row: usize, col: usize) -> Self {
        Self {
            from: self.from.wrapping_add(row * self.from_stride + col),
            to: self.to.wrapping_add(row * self.to_stride + col),
            ..self
        }
    }

    /// Tile with the same columns, `rows` rows further down in source and destination.
    ///
    /// # Safety
    /// These rows exist.
    unsafe fn down(self, rows: usize) -> Self {
        // SAFETY: the caller's promise.
        let (from, to) = unsafe {
            (
                self.from.add(rows * self.from_stride),
                self.to.add(rows * self.to_stride),
            )
        };
        Self { from, to, ..self }
    }
}

/// Form of the packed operands of one product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Form {
    /// One f32 for each `k`.
    Single,
    /// One f32 for each `k`, already rounded to bf16. The kernel adds the products in the order of [`CpuMath::Amx`].
    Grouped,
    /// Two bf16 in 32 bits, those of two consecutive `k`. The first is in the upper half, because `vdpbf16ps` adds the
    /// product of the upper halves first.
    Pair,
    /// Tiles of AMX: see [`tiles`].
    Tiles,
}

/// Operand of a product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    /// `a`, whose lanes are rows.
    Left,
    /// `b`, whose lanes are columns.
    Right,
}

impl Form {
    /// Elements of 32 bits that one lane of a panel of this depth has.
    pub(super) fn steps(self, depth: usize) -> usize {
        match self {
            Self::Single | Self::Grouped => depth,
            Self::Pair => depth.div_ceil(2),
            Self::Tiles => depth.div_ceil(tiles::GROUP) * tiles::PAIRS,
        }
    }

    /// Elements of a lane in front of the stretch that begins at `first`, if stretches have this length.
    pub(super) fn before(self, first: usize, stretch: usize) -> usize {
        first.checked_div(stretch).unwrap_or(0) * self.steps(stretch)
    }

    /// Multiple of rows that parts of the left operand have.
    pub(super) fn row_step(self) -> usize {
        match self {
            Self::Tiles => 2 * ROW_STEP,
            _ => ROW_STEP,
        }
    }

    /// Lanes of a packed left operand of `rows` rows: whole panels.
    pub(super) fn lanes(self, rows: usize) -> usize {
        match self {
            Self::Tiles => rows.next_multiple_of(tiles::SIDE),
            _ => rows.next_multiple_of(ROW_STEP),
        }
    }
}

/// Smallest magnitude among the nonzero elements of a packed bf16 operand: its bits without the sign, minus one. A zero
/// wraps around to the largest number, so zeros do not count.
///
/// It decides between two kernels. `vdpbf16ps` takes subnormal operands as zero and rounds subnormal results to zero.
/// Otherwise it is two fused multiply-adds in a row, which is the definition of a product here. So its bits are right
/// where no subnormal number can arise. The same holds for AMX and its definition.
pub(super) type Least = u16;

/// [`Least`] of an operand that has only zeros.
pub(super) const NO_LEAST: Least = Least::MAX;

/// Whether no subnormal number can arise in a chain: neither as an operand nor as a partial sum.
///
/// An operand of exponent field `e >= 1` is a multiple of `2^(e - 134)`, since bf16 has seven bits of fraction. So
/// partial sums are multiples of the product of two of these powers, and stay so when they are rounded. They are zero
/// or at least as large, and `2^-126` is the least normal number.
fn all_normal(a: Least, b: Least) -> bool {
    let exponent = |least: Least| i32::from(least.saturating_add(1) >> 7);
    let (a, b) = (exponent(a), exponent(b));
    a > 0 && b > 0 && a - 134 + b - 134 >= -126
}

/// Kernel function `to = from + factor * a @ b` of one tile. Arguments: rows and columns (at most those of a panel),
/// steps, panel of `a`, panel of `b`, factor, place.
pub(super) type Tile = unsafe fn(usize, usize, usize, *const f32, *const f32, f32, TileIo);

/// Matrix-product kernel for one CPU instruction set, with the size of its tile.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub(super) level: Level,
    /// Rows per tile, and per panel of `a`.
    pub(super) rows: usize,
    /// Columns per tile, and per panel of `b`.
    pub(super) cols: usize,
    tile: Tile,
    /// [`Form::Grouped`].
    grouped: Tile,
    /// Functions for operands of pairs: with dot products, and with f32 arithmetic.
    pairs: Option<[Tile; 2]>,
    /// Functions for tiles: with AMX, and with f32 arithmetic.
    tiles: Option<[Tile; 2]>,
    math: CpuMath,
}

/// Packed panels of both operands of one product.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    pub(super) form: Form,
    /// Length of `k`.
    pub(super) depth: usize,
    pub(super) a: *const f32,
    pub(super) b: *const f32,
    /// Bounds of both operands. Only pairs and tiles use them.
    pub(super) least: [Least; 2],
    pub(super) factor: f32,
}

impl Kernel {
    pub(super) fn of(method: Method) -> Self {
        let Method { level, math, .. } = method;
        match level {
            Level::Portable => Self {
                level,
                rows: super::portable::ROWS,
                cols: super::portable::COLS,
                tile: super::portable::tile,
                grouped: tiles::grouped,
                pairs: None,
                tiles: None,
                math,
            },
            #[cfg(target_arch = "x86_64")]
            Level::V3 => Self {
                level,
                rows: super::x86::avx2::ROWS,
                cols: super::x86::avx2::COLS,
                tile: super::x86::avx2::tile,
                grouped: super::x86::grouped::tile_v3,
                pairs: None,
                tiles: None,
                math,
            },
            #[cfg(target_arch = "x86_64")]
            Level::V4 | Level::V4Bf16 => Self {
                level,
                rows: super::x86::avx512::ROWS,
                cols: super::x86::avx512::COLS,
                tile: super::x86::avx512::tile::<super::x86::avx512::Single>,
                grouped: super::x86::grouped::tile,
                pairs: (level == Level::V4Bf16).then_some([
                    super::x86::avx512::tile::<super::x86::avx512::Dot>,
                    super::x86::avx512::tile::<super::x86::avx512::Widened>,
                ]),
                tiles: match method.tiles {
                    tiles::Tiles::None => None,
                    tiles::Tiles::Software => Some([super::x86::grouped::tile_of_pairs; 2]),
                    tiles::Tiles::Amx => {
                        Some([super::x86::amx::tile, super::x86::grouped::tile_of_pairs])
                    }
                },
                math,
            },
        }
    }

    /// Form in which the operands of a product are packed.
    pub(super) fn form(&self, p: &Product<'_>) -> Form {
        let dtypes = [p.a.data().dtype(), p.b.data().dtype()];
        if self.math == CpuMath::Amx && tiles::defines(dtypes) {
            return match self.tiles {
                Some(_) if p.a.cols >= tiles::LEAST_DEPTH => Form::Tiles,
                _ => Form::Grouped,
            };
        }
        match self.pairs {
            Some(_) if dtypes == [DType::BF16; 2] => Form::Pair,
            _ => Form::Single,
        }
    }

    /// Lanes per panel of an operand.
    pub(super) fn width(&self, form: Form, side: Side) -> usize {
        match (form, side) {
            (Form::Tiles, _) => tiles::SIDE,
            (_, Side::Left) => self.rows,
            (_, Side::Right) => self.cols,
        }
    }

    /// `to = from + factor * a @ b` for the `cols` columns of one panel of `b` and `rows` rows of consecutive panels
    /// of `a`.
    ///
    /// # Safety
    /// The processor has the instructions of the level. The panels have the form and depth they claim. The rows of
    /// the place exist, with `cols` elements each, and only this thread accesses those that are written.
    pub(super) unsafe fn column(
        &self,
        (rows, cols): (usize, usize),
        panels: Panels,
        place: TileIo,
    ) {
        let steps = panels.form.steps(panels.depth);
        let exact = || usize::from(!all_normal(panels.least[0], panels.least[1]));
        let (tile, step) = match (panels.form, self.pairs, self.tiles) {
            (Form::Pair, Some(pairs), _) => (pairs[exact()], self.rows),
            (Form::Tiles, _, Some(tiles)) => (tiles[exact()], tiles::ROWS),
            (Form::Grouped, ..) => (self.grouped, self.rows),
            _ => (self.tile, self.rows),
        };
        for row in (0..rows).step_by(step) {
            let height = step.min(rows - row);
            // SAFETY: the caller's promises; `step` lanes of `a` have `step * steps` elements.
            unsafe {
                let (a, place) = (panels.a.add(row * steps), place.down(row));
                tile(height, cols, steps, a, panels.b, panels.factor, place);
            }
        }
    }
}
