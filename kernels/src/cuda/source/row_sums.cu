// Sums over rows, in f32 and in an order that depends on shapes only: rows that share a target, and columns.
// Defines: X (TYPE_* of what is summed), OUT (TYPE_* of the sum).

typedef Element<X> From;
typedef Element<OUT> To;

// y[targets[g], :] = sum of x[sources[j], :] over j in starts[g] .. starts[g + 1], in order, for g < groups: rows of c
// elements. Other rows of y stay as they are. Bytes: c * (size of X * sources + size of OUT * groups).
// Grid: columns along x, groups along y.
KERNEL(256, 4)
scatter_add_rows(const From::Stored* x, const int* sources, const int* starts, const int* targets, To::Stored* y,
                 int groups, u64 c) {
  for (int g = blockIdx.y; g < groups; g += gridDim.y) {
    int first = starts[g], last = starts[g + 1];
    u64 target = (u64)targets[g] * c, stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < c; i += stride) {
      float sum = 0.0f;
      for (int j = first; j < last; j++) sum = add_rn(sum, From::widen(x[(u64)sources[j] * c + i]));
      y[target + i] = To::narrow(sum);
    }
  }
}

// partial[g, :] = sums over the rows g * group .. (g + 1) * group of x [rows, c]: a block takes 32 columns (grid x) of
// one group (grid y); its eight warps take every eighth row, then their sums are added in order. c below 2^31. With an
// index, row r is index[r] of x.
// Bytes: rows * c * size of X + 4 * groups * c.
KERNEL(256, 4) column_sums(const From::Stored* x, const int* index, float* partial, u64 rows, int c, u64 group) {
  SHARED_MEMORY(memory);
  float* sums = (float*)memory;  // [8, 32]
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = blockIdx.x * 32 + lane;
  u64 first = (u64)blockIdx.y * group, last = first + group < rows ? first + group : rows;
  float sum = 0.0f;
  if (column < c)
    for (u64 r = first + warp; r < last; r += 8) sum = add_rn(sum, From::widen(x[(index ? (u64)index[r] : r) * c + column]));
  sums[threadIdx.x] = sum;
  block_barrier();
  if (warp == 0 && column < c) {
    for (int w = 1; w < 8; w++) sum = add_rn(sum, sums[w * 32 + lane]);
    partial[(u64)blockIdx.y * c + column] = sum;
  }
}

// y[:] = partial[0, :] + partial[1, :] + .., in this order.
KERNEL(256, 4) sum_groups(const float* partial, int groups, To::Stored* y, u64 c) {
  u64 stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < c; i += stride) {
    float sum = partial[i];
    for (int g = 1; g < groups; g++) sum = add_rn(sum, partial[(u64)g * c + i]);
    y[i] = To::narrow(sum);
  }
}
