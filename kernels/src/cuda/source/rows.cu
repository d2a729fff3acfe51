// Tables of rows moved as they are: gather, replace, transpose. The elements' type does not matter, only their size.
// Defines: UNIT, the bytes that move at once: 1, 2, 4 or 16; addresses and rows are multiples of it.
// Bytes: what is moved, twice, and the indices.

#if UNIT == 1
typedef u8 Unit;
#elif UNIT == 2
typedef u16 Unit;
#elif UNIT == 4
typedef u32 Unit;
#else
typedef uint4 Unit;
#endif

// y[i, :] = table[index[i], :] for `rows` rows of `units`; the caller has checked the indices.
KERNEL(256, 4) gather_rows(const Unit* table, const int* index, Unit* y, u64 rows, u64 units) {
  u64 n = rows * units, stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
    u64 row = i / units;
    y[i] = table[(u64)index[row] * units + (i - row * units)];
  }
}

// y[to[i], :] = x[from[i], :], or zeros where x is null. No row is named twice in `to`.
KERNEL(256, 4) put_rows(const Unit* x, const int* from, const int* to, Unit* y, u64 rows, u64 units) {
  u64 n = rows * units, stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
    u64 row = i / units, at = i - row * units;
    Unit value = {};
    if (x) value = x[(u64)from[row] * units + at];
    y[(u64)to[row] * units + at] = value;
  }
}

#if UNIT <= 4  // an element
// y[i, c, r] = x[i, r, c]: matrices [a, b], one tile of 32 x 32 a block (x: column tiles, y: row tiles, z: matrices).
// The first index of the tile is padded so that a column lies in 32 banks.
KERNEL(256, 4) transpose_each(const Unit* x, Unit* y, u64 matrices, int a, int b) {
  SHARED_MEMORY(memory);
  Unit* tile = (Unit*)memory;  // [32, 33]
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int column = blockIdx.x * 32, row = blockIdx.y * 32;
  for (u64 i = blockIdx.z; i < matrices; i += gridDim.z) {
    const Unit* from = x + i * ((u64)a * b);
    Unit* to = y + i * ((u64)a * b);
    UNROLL for (int r = warp; r < 32; r += 8)
      if (row + r < a && column + lane < b) tile[r * 33 + lane] = from[(u64)(row + r) * b + (column + lane)];
    block_barrier();
    UNROLL for (int r = warp; r < 32; r += 8)
      if (column + r < b && row + lane < a) to[(u64)(column + r) * a + (row + lane)] = tile[lane * 33 + r];
    block_barrier();
  }
}
#endif
