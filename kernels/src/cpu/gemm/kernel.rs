//! Common part of the kernels of all instruction sets.

use super::super::simd::Level;

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

/// Kernel function `to = from + factor * a @ b` of one tile. Arguments: rows and columns (at most those of a panel),
/// depth, panel of `a`, panel of `b`, factor, place.
type Tile = unsafe fn(usize, usize, usize, *const f32, *const f32, f32, TileIo);

/// Matrix-product kernel for one CPU instruction set, with the size of its tile.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub(super) level: Level,
    /// Rows per tile, and per panel of `a`.
    pub(super) rows: usize,
    /// Columns per tile, and per panel of `b`.
    pub(super) cols: usize,
    tile: Tile,
}

impl Kernel {
    pub(super) fn of(level: Level) -> Self {
        match level {
            Level::Portable => Self {
                level,
                rows: super::portable::ROWS,
                cols: super::portable::COLS,
                tile: super::portable::tile,
            },
            #[cfg(target_arch = "x86_64")]
            Level::V3 => Self {
                level,
                rows: super::x86::avx2::ROWS,
                cols: super::x86::avx2::COLS,
                tile: super::x86::avx2::tile,
            },
            #[cfg(target_arch = "x86_64")]
            Level::V4 => Self {
                level,
                rows: super::x86::avx512::ROWS,
                cols: super::x86::avx512::COLS,
                tile: super::x86::avx512::tile,
            },
        }
    }

    /// `to = from + factor * a @ b` for the `cols` columns of one panel of `b` and `rows` rows of consecutive panels
    /// of `a`.
    ///
    /// # Safety
    /// The processor has the instructions of the level. `a` and `b` point to panels of depth `depth`. The rows of the
    /// place exist, with `cols` elements each, and only this thread accesses those that are written.
    pub(super) unsafe fn column(
        &self,
        (rows, cols, depth): (usize, usize, usize),
        a: *const f32,
        b: *const f32,
        factor: f32,
        place: TileIo,
    ) {
        for row in (0..rows).step_by(self.rows) {
            let height = self.rows.min(rows - row);
            // SAFETY: the caller's promises; a panel of `a` has `self.rows * depth` elements.
            unsafe {
                let (a, place) = (a.add(row * depth), place.down(row));
                (self.tile)(height, cols, depth, a, b, factor, place);
            }
        }
    }
}
