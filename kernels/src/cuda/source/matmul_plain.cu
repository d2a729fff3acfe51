// Matrix products of f32 operands with f32 sums on the ordinary multipliers: what f32 runs use, and the same sum over
// two pairs of operands as lora_linear (see there for the use of the second pair).
//
//   y[m, n] = scale * (sum over k1 of a1[m, k] b1[k, n] + sum over k2 of a2[m, k] b2[k, n]) + bias[n]
//
// Legend
//   a    [m, k], or [k, m] (TRANSPOSE_A 1); lda elements from line to line
//   b    [n, k], or [k, n] (TRANSPOSE_B 1); rows from b_rows on count as zeros
//   bias [n], or null
//   y    [m, n], ldy elements from row to row
//   All f32. Every size, any ld; addresses are aligned to 4 bytes.
// Defines: TRANSPOSE_A, TRANSPOSE_B, BLOCK (edge of a block's square tile: 128 or 64).
//
// Algorithm: 256 threads; thread (i, j) of 16 x 16 sums SIDE x SIDE elements, in quadrants of 4 x 4 so that it reads
// shared memory by 16 bytes. Tiles of 8 elements of k lie as [k][row] in two buffers: while one is used, the next is on
// its way through registers. Per k a thread does SIDE^2 fma on SIDE / 2 loads of 16 bytes (64 on 4 for BLOCK 128).
// Every element is one chain of fma over ascending k, whatever BLOCK: the same bits. gridDim.z cuts the K loop as in
// lora_linear.

constexpr int DEPTH = 8, SIDE = BLOCK / 16, QUADS = SIDE / 4;
// Elements of each operand that a thread moves per tile, and the padded length of a line in shared memory.
constexpr int MOVES = BLOCK * DEPTH / 256, LINE = BLOCK + 4;

// One operand's tile of BLOCK rows by DEPTH.
template <int TRANSPOSED>
struct Tile {
  // From move to move: rows of an operand whose lines run along k, elements of k else.
  static constexpr int STRIDE = TRANSPOSED ? 256 / BLOCK : 256 / DEPTH;
  const float* source;  // this thread's first element
  u64 ld;
  int rows, depth;  // left from there on
  float values[MOVES];

  DEVICE void seek(const float* base, u64 line_elements, int row_count, int k_count, int row, int k) {
    int thread = threadIdx.x;
    row += TRANSPOSED ? thread % BLOCK : thread / DEPTH;
    k += TRANSPOSED ? thread / BLOCK : thread % DEPTH;
    ld = line_elements;
    source = base + (TRANSPOSED ? (u64)k * ld + row : (u64)row * ld + k);
    rows = row_count - row;
    depth = k_count - k;
  }
  // Loads the tile and moves on by DEPTH; zeros where there is nothing.
  DEVICE void load() {
    UNROLL for (int i = 0; i < MOVES; i++) {
      bool inside = TRANSPOSED ? rows > 0 && depth > i * STRIDE : depth > 0 && rows > i * STRIDE;
      values[i] = inside ? source[i * STRIDE * ld] : 0.0f;
    }
    source += TRANSPOSED ? DEPTH * ld : (u64)DEPTH;
    depth -= DEPTH;
  }
  DEVICE void store(float* tile) const {
    int thread = threadIdx.x;
    int line = TRANSPOSED ? thread / BLOCK : thread % DEPTH, place = TRANSPOSED ? thread % BLOCK : thread / DEPTH;
    float* target = tile + (line * LINE + place);
    UNROLL for (int i = 0; i < MOVES; i++) target[i * STRIDE * (TRANSPOSED ? LINE : 1)] = values[i];
  }
};

// SIDE elements of line `k`, in quads BLOCK / QUADS apart.
DEVICE void load_quads(float (&v)[SIDE], const float* tile, int k, int place) {
  UNROLL for (int q = 0; q < QUADS; q++) {
    float4 w = *(const float4*)(tile + k * LINE + q * (BLOCK / QUADS) + place * 4);
    v[4 * q] = w.x, v[4 * q + 1] = w.y, v[4 * q + 2] = w.z, v[4 * q + 3] = w.w;
  }
}

KERNEL(256, 2)
matmul_plain(const float* a1, u64 lda1, const float* b1, u64 ldb1, int k1, const float* a2, u64 lda2, const float* b2,
             u64 ldb2, int k2, int m, int n, int b_rows, const float* bias, float* y, u64 ldy, float scale, int group,
             int steps_per_part) {
  SHARED_MEMORY(memory);
  constexpr int BUFFER = 2 * DEPTH * LINE;
  float* tiles = (float*)memory;  // [2 buffers][a, b][DEPTH][LINE]
  int thread_row = threadIdx.x / 16, thread_column = threadIdx.x % 16;

  // Tile rows come in groups, a group is walked column by column.
  int tiles_m = divide_up(m, BLOCK), tiles_n = divide_up(n, BLOCK);
  int first_row = (int)blockIdx.x / (group * tiles_n) * group;
  int in_group = (int)blockIdx.x % (group * tiles_n);
  int height = tiles_m - first_row < group ? tiles_m - first_row : group;
  int row = (first_row + in_group % height) * BLOCK, column = in_group / height * BLOCK;

  int steps1 = divide_up(k1, DEPTH), steps = steps1 + divide_up(k2, DEPTH);
  int step = (int)blockIdx.z * steps_per_part, end = steps - step < steps_per_part ? steps : step + steps_per_part;

  Tile<TRANSPOSE_A> tile_a;
  Tile<TRANSPOSE_B> tile_b;
  if (step < steps1) {
    tile_a.seek(a1, lda1, m, k1, row, step * DEPTH);
    tile_b.seek(b1, ldb1, b_rows, k1, column, step * DEPTH);
  }
  // Brings the tile of step `next` into registers.
  auto load = [&](int next) {
    if (next == steps1 || (next > steps1 && next == step)) {
      tile_a.seek(a2, lda2, m, k2, row, (next - steps1) * DEPTH);
      tile_b.seek(b2, ldb2, b_rows, k2, column, (next - steps1) * DEPTH);
    }
    tile_a.load();
    tile_b.load();
  };

  float sums[SIDE][SIDE];
  UNROLL for (int i = 0; i < SIDE; i++) UNROLL for (int j = 0; j < SIDE; j++) sums[i][j] = 0.0f;
  if (step < end) {
    load(step);
    tile_a.store(tiles);
    tile_b.store(tiles + DEPTH * LINE);
  }
  block_barrier();
  float* buffer = tiles;
  for (; step < end; step++) {
    float* other = buffer == tiles ? tiles + BUFFER : tiles;
    bool more = step + 1 < end;
    if (more) load(step + 1);
    UNROLL for (int k = 0; k < DEPTH; k++) {
      float a[SIDE], b[SIDE];
      load_quads(a, buffer, k, thread_row);
      load_quads(b, buffer + DEPTH * LINE, k, thread_column);
      UNROLL for (int i = 0; i < SIDE; i++) UNROLL for (int j = 0; j < SIDE; j++)
        sums[i][j] = fma_rn(a[i], b[j], sums[i][j]);
    }
    // The other buffer was last read before the previous barrier.
    if (more) {
      tile_a.store(other);
      tile_b.store(other + DEPTH * LINE);
    }
    block_barrier();
    buffer = other;
  }

  y += (u64)blockIdx.z * (u64)m * ldy;
  UNROLL for (int j = 0; j < SIDE; j++) {
    int at = column + j / 4 * (BLOCK / QUADS) + thread_column * 4 + j % 4;
    float add = bias && at < n ? bias[at] : 0.0f;
    UNROLL for (int i = 0; i < SIDE; i++) {
      int line = row + i / 4 * (BLOCK / QUADS) + thread_row * 4 + i % 4;
      if (line < m && at < n) y[(u64)line * ldy + at] = fma_rn(sums[i][j], scale, add);
    }
  }
}
