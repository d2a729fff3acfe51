// Tables of rows moved as they are: gather, replace, transpose; and rows numbered by group. The elements' type does not matter, only their size.
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

#if UNIT == 1
// The numbers of the rows below n whose byte is 0, in order, and from rows[first] on those of the others; `first` rows
// have a 0. One block: it counts and numbers 4096 rows at a time, and starts where it stopped. Bytes: 5 n.
KERNEL(256, 4) partition_rows(const u8* second, int n, int first, int* rows) {
  constexpr int OWN = 16;
  SHARED_MEMORY(memory);
  int* counts = (int*)memory;  // [256]
  int thread = threadIdx.x, before = 0;
  for (int start = 0; start < n; start += 256 * OWN) {
    int begin = start + thread * OWN, end = n - begin < OWN ? n : begin + OWN, own = 0;
    for (int row = begin; row < end; row++) own += second[row] != 0;
    counts[thread] = own;
    block_barrier();
    // Sums up to and with each thread's.
    for (int distance = 1; distance < 256; distance *= 2) {
      int left = thread >= distance ? counts[thread - distance] : 0;
      block_barrier();
      counts[thread] += left;
      block_barrier();
    }
    int ones = before + counts[thread] - own;
    for (int row = begin; row < end; row++) {
      bool is_second = second[row] != 0;
      rows[is_second ? first + ones : row - ones] = row;
      ones += is_second;
    }
    before += counts[255];
    block_barrier();
  }
}
#endif

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
