//! Operations on tables of rows: gather, replace, transpose, partition, and sums in a fixed order.

use crate::DType;
use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module, element_type};

const THREADS: u32 = 256;
const MAX_BLOCKS: u64 = 132 * 16;
/// Maximum blocks of a grid along y and z.
const MAX_GRID: u64 = 65_535;
/// Side of a transposition tile.
const TILE: u64 = 32;
/// Rows per partial sum of a column sum. Part of the result's definition.
const GROUP_ROWS: u64 = 256;

const ROW_KERNELS: &[&str] = &[
    "gather_rows",
    "put_rows",
    "transpose_each",
    "partition_rows",
];
const SUM_KERNELS: &[&str] = &["scatter_add_rows", "column_sums", "sum_groups"];

fn rows_module(unit: u64) -> Module {
    let kernels = match unit {
        1 => ROW_KERNELS,
        2 | 4 => &ROW_KERNELS[..3],
        _ => &ROW_KERNELS[..2],
    };
    Module::new(Family::Rows, [("UNIT", unit as u32)], kernels)
}

fn sums_module(x: DType, out: DType) -> Option<Module> {
    let defines = [("X", element_type(x)?), ("OUT", element_type(out)?)];
    Some(Module::new(Family::RowSums, defines, SUM_KERNELS))
}

/// Kernel modules that copy rows: one for each copy unit of 1, 2, 4 and 16 bytes.
#[must_use]
pub fn modules() -> Vec<Module> {
    [1, 2, 4, 16].into_iter().map(rows_module).collect()
}

/// Kernel modules that sum rows in each float dtype, with the result in the same dtype or in f32.
#[must_use]
pub fn sum_modules() -> Vec<Module> {
    let pairs = [
        (DType::F32, DType::F32),
        (DType::BF16, DType::BF16),
        (DType::BF16, DType::F32),
        (DType::F16, DType::F16),
        (DType::F16, DType::F32),
    ];
    let modules = pairs.into_iter().map(|(x, out)| sums_module(x, out));
    modules.flatten().collect()
}

/// Largest copy unit, in bytes, that divides the rows and their addresses.
fn unit(row_bytes: u64, addresses: &[Address]) -> u64 {
    let fits = |unit: &u64| {
        let starts = addresses.iter().all(|Address(a)| a.is_multiple_of(*unit));
        starts && row_bytes.is_multiple_of(*unit)
    };
    [16, 4, 2].into_iter().find(fits).unwrap_or(1)
}

fn blocks(threads: u64) -> u32 {
    threads.div_ceil(u64::from(THREADS)).clamp(1, MAX_BLOCKS) as u32
}

/// Launch of `y[i] = table[index[i]]` for `rows` rows of `row_bytes` bytes. `index` is i32, and each entry is
/// below the number of rows of the table.
#[must_use]
pub fn gather_rows(
    table: Address,
    index: Address,
    y: Address,
    rows: u64,
    row_bytes: u64,
) -> Launch {
    let unit = unit(row_bytes, &[table, y]);
    let units = row_bytes / unit;
    Launch {
        module: rows_module(unit),
        kernel: "gather_rows",
        grid: [blocks(rows * units), 1, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: vec![
            Arg::Address(table),
            Arg::Address(index),
            Arg::Address(y),
            Arg::U64(rows),
            Arg::U64(units),
        ],
    }
}

/// Launch that partitions the row numbers `0..n` into two groups, by one byte per row in `second`: 0 for the
/// first group, else the second. Writes `rows`, i32 `[n]`: the numbers of the first group, then those of the
/// second, both ascending. `first` must be the exact size of the first group, which is not checked. `None`
/// when `n` exceeds `i32`.
#[must_use]
pub fn partition_rows(second: Address, n: usize, first: usize, rows: Address) -> Option<Launch> {
    Some(Launch {
        module: rows_module(1),
        kernel: "partition_rows",
        grid: [1, 1, 1],
        threads: THREADS,
        shared_bytes: 4 * THREADS,
        args: vec![
            Arg::Address(second),
            Arg::I32(i32::try_from(n).ok()?),
            Arg::I32(i32::try_from(first).ok()?),
            Arg::Address(rows),
        ],
    })
}

/// Launch of `y[to[i]] = x[from[i]]` for `rows` rows of `row_bytes` bytes. If `x` is [`Address::NULL`], zeros
/// are written and `from` is not read. No row may occur twice in `to`.
#[must_use]
pub fn put_rows(
    x: Address,
    from: Address,
    to: Address,
    y: Address,
    rows: u64,
    row_bytes: u64,
) -> Launch {
    let unit = unit(row_bytes, &[x, y]);
    let units = row_bytes / unit;
    Launch {
        module: rows_module(unit),
        kernel: "put_rows",
        grid: [blocks(rows * units), 1, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: vec![
            Arg::Address(x),
            Arg::Address(from),
            Arg::Address(to),
            Arg::Address(y),
            Arg::U64(rows),
            Arg::U64(units),
        ],
    }
}

/// Launch that transposes each of the `n` matrices `[a, b]` of `x` into `y`, with elements of `size` bytes
/// (1, 2 or 4). `None` for other sizes and for extents beyond a grid's size.
#[must_use]
pub fn transpose_each(x: Address, y: Address, [n, a, b]: [u64; 3], size: u64) -> Option<Launch> {
    let rows = a.div_ceil(TILE).max(1);
    if !matches!(size, 1 | 2 | 4) || rows > MAX_GRID {
        return None;
    }
    Some(Launch {
        module: rows_module(size),
        kernel: "transpose_each",
        grid: [
            u32::try_from(b.div_ceil(TILE).max(1)).ok()?,
            rows as u32,
            n.clamp(1, MAX_GRID) as u32,
        ],
        threads: THREADS,
        shared_bytes: (TILE * (TILE + 1) * size) as u32,
        args: vec![
            Arg::Address(x),
            Arg::Address(y),
            Arg::U64(n),
            Arg::I32(a.try_into().ok()?),
            Arg::I32(b.try_into().ok()?),
        ],
    })
}

/// Plan of a scatter-add, in which row `t` of `y` becomes the sum of the rows `x[i]` with `index[i] = t`: the
/// rows of `x` sorted by target row. The host computes it from `index` for [`scatter_add_rows`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Groups {
    /// Row numbers in `x` of the rows to add. Rows with the same target are consecutive and in ascending
    /// order.
    pub sources: Vec<i32>,
    /// Position in `sources` at which each target's rows begin, then the total number of sources.
    pub starts: Vec<i32>,
    /// Row numbers in `y` of the target rows, ascending, each once.
    pub targets: Vec<i32>,
}

impl Groups {
    /// Plan for the targets `index[i]` of the rows `i`: the row numbers `i` sorted by target.
    #[must_use]
    pub fn of(index: &[i32]) -> Self {
        let mut order: Vec<(i32, i32)> = index.iter().copied().zip(0..).collect();
        order.sort_unstable();
        let mut groups = Self::default();
        for same in order.chunk_by(|a, b| a.0 == b.0) {
            groups.starts.push(groups.sources.len() as i32);
            groups.targets.push(same[0].0);
            groups.sources.extend(same.iter().map(|(_, source)| source));
        }
        groups.starts.push(groups.sources.len() as i32);
        groups
    }
}

/// Device addresses of the operands and result of [`scatter_add_rows`]. `sources`, `starts` and `targets` are
/// i32, as in [`Groups`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scatter {
    /// Tensor whose rows are added, with `c` elements per row.
    pub x: Address,
    /// Copy of [`Groups::sources`] in device memory: the numbers of the rows of `x` to add.
    pub sources: Address,
    /// Copy of [`Groups::starts`] in device memory: where each target's sources begin.
    pub starts: Address,
    /// Copy of [`Groups::targets`] in device memory: the numbers of the rows of `y` to write.
    pub targets: Address,
    /// Destination of the sums. Target rows are overwritten; other rows stay as they are.
    pub y: Address,
}

/// Launch that overwrites the target rows of `y` with the sums of their source rows, added in f32 in the
/// order of the sources. `groups` is the number of target rows, `c` the number of elements per row. The
/// dtypes of `x` and `y` are `from` and `to`. `None` when a dtype is not a float.
#[must_use]
pub fn scatter_add_rows(
    (from, to): (DType, DType),
    at: &Scatter,
    groups: u64,
    c: u64,
) -> Option<Launch> {
    Some(Launch {
        module: sums_module(from, to)?,
        kernel: "scatter_add_rows",
        grid: [blocks(c), groups.clamp(1, MAX_GRID) as u32, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: vec![
            Arg::Address(at.x),
            Arg::Address(at.sources),
            Arg::Address(at.starts),
            Arg::Address(at.targets),
            Arg::Address(at.y),
            Arg::I32(groups.try_into().ok()?),
            Arg::U64(c),
        ],
    })
}

/// Size in bytes of the workspace that [`column_sum`] needs for `rows` rows of `c` elements.
#[must_use]
pub const fn column_sum_workspace_bytes(rows: u64, c: u64) -> u64 {
    rows.div_ceil(GROUP_ROWS) * c * 4
}

/// Launches, in order, that write the column sums `y[c]` of `x [rows, c]`, added in f32. If `index`, i32
/// `[rows]`, is not null, the rows to sum are the rows `index[i]` of `x`. Blocks of 256 rows are summed
/// first, then the blocks in order. `workspace` has [`column_sum_workspace_bytes`] bytes. `None` when a dtype
/// is not a float or an extent exceeds a grid's size (16 million rows).
#[must_use]
pub fn column_sum(
    (from, to): (DType, DType),
    x: Address,
    index: Address,
    [rows, c]: [u64; 2],
    workspace: Address,
    y: Address,
) -> Option<[Launch; 2]> {
    let module = sums_module(from, to)?;
    let groups = rows.div_ceil(GROUP_ROWS).max(1);
    if groups > MAX_GRID {
        return None;
    }
    let partial = Launch {
        module: module.clone(),
        kernel: "column_sums",
        grid: [
            u32::try_from(c.div_ceil(TILE).max(1)).ok()?,
            groups as u32,
            1,
        ],
        threads: THREADS,
        shared_bytes: THREADS * 4,
        args: vec![
            Arg::Address(x),
            Arg::Address(index),
            Arg::Address(workspace),
            Arg::U64(rows),
            Arg::I32(c.try_into().ok()?),
            Arg::U64(GROUP_ROWS),
        ],
    };
    let total = Launch {
        module,
        kernel: "sum_groups",
        grid: [blocks(c), 1, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: vec![
            Arg::Address(workspace),
            Arg::I32(groups as i32),
            Arg::Address(y),
            Arg::U64(c),
        ],
    };
    Some([partial, total])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_rows_are_grouped_by_target_in_their_order() {
        let groups = Groups::of(&[5, 2, 5, 0, 2, 5]);
        assert_eq!(groups.targets, [0, 2, 5]);
        assert_eq!(groups.sources, [3, 1, 4, 0, 2, 5]);
        assert_eq!(groups.starts, [0, 1, 3, 6]);
        assert_eq!(Groups::of(&[]).starts, [0]);
    }

    #[test]
    fn the_copy_unit_divides_rows_and_addresses() {
        let of = |bytes, address| unit(bytes, &[Address(address), Address(64)]);
        assert_eq!((of(32, 16), of(32, 8), of(8, 16)), (16, 4, 4));
        assert_eq!((of(6, 16), of(32, 2), of(3, 16), of(32, 1)), (2, 2, 1, 1));
    }
}
