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
//   rows as in lora_linear: two layers over a partition of rows (ROUTED 1), sums over named lines (ROUTED 2)
//   All f32. Every size, any ld; addresses are aligned to 4 bytes.
// Defines: TRANSPOSE_A, TRANSPOSE_B, BLOCK (edge of a block's square tile: 128 or 64), ROUTED
//   (absent: 0).
//
// Algorithm: 256 threads; thread (i, j) of 16 x 16 sums SIDE x SIDE elements, in quadrants of 4 x 4 so that it reads
// shared memory by 16 bytes. Tiles of 8 elements of k lie as [k][row] in two buffers: while one is used, the next is on
// its way through registers. Per k a thread does SIDE^2 fma on SIDE / 2 loads of 16 bytes (64 on 4 for BLOCK 128).
// Every element is one chain of fma over ascending k, whatever BLOCK: the same bits. gridDim.z cuts the K loop as in
// lora_linear.

#ifndef ROUTED
#define ROUTED 0
#endif

constexpr int DEPTH = 8, SIDE = BLOCK / 16, QUADS = SIDE / 4;
// Elements of each operand that a thread moves per tile, and the padded length of a line in shared memory.
constexpr int MOVES = BLOCK * DEPTH / 256, LINE = BLOCK + 4;

// One operand's tile of BLOCK rows by DEPTH. INDEXED: a table names the lines.
template <int TRANSPOSED, int INDEXED>
struct Tile {
  // From move to move: rows of an operand whose lines run along k, elements of k else.
  static constexpr int STRIDE = TRANSPOSED ? 256 / BLOCK : 256 / DEPTH;
  const float* source;  // this thread's first element
  u64 ld;
  int rows, depth;  // left from there on
  float values[MOVES];
  // Indexed: the table's entry of this thread's first line, and the lines of the next tile, looked up a step before.
  const int* entry;
  u32 named[MOVES];

  DEVICE void seek(const float* base, u64 line_elements, int row_count, int k_count, int row, int k,
                   const int* table) {
    int thread = threadIdx.x;
    row += TRANSPOSED ? thread % BLOCK : thread / DEPTH;
    k += TRANSPOSED ? thread / BLOCK : thread % DEPTH;
    ld = line_elements;
    if (INDEXED)
      source = base + (TRANSPOSED ? row : k);
    else
      source = base + (TRANSPOSED ? (u64)k * ld + row : (u64)row * ld + k);
    rows = row_count - row;
    depth = k_count - k;
    if constexpr (INDEXED != 0) {
      entry = table + (TRANSPOSED ? k : row);
      look_up();
    }
  }
  DEVICE void look_up() {
    int lines = TRANSPOSED ? depth : rows;
    UNROLL for (int i = 0; i < MOVES; i++) named[i] = lines > i * STRIDE ? (u32)entry[i * STRIDE] : 0u;
  }
  // Loads the tile and moves on by DEPTH; zeros where there is nothing.
  DEVICE void load() {
    UNROLL for (int i = 0; i < MOVES; i++) {
      bool inside = TRANSPOSED ? rows > 0 && depth > i * STRIDE : depth > 0 && rows > i * STRIDE;
      values[i] = inside ? source[INDEXED ? named[i] * ld : i * STRIDE * ld] : 0.0f;
    }
    depth -= DEPTH;
    if constexpr (INDEXED != 0 && TRANSPOSED != 0) {
      entry += DEPTH;
      look_up();
    } else {
      source += TRANSPOSED ? DEPTH * ld : (u64)DEPTH;
    }
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

typedef Operands<float> Pair;
typedef Result<float, float> Target;

// The tile of y that begins at (row, column), or block z's part of its sum. `table` names the rows of y where rows are
// routed.
DEVICE void multiply(const Pair& first, const Pair& second, const Target& result, int row, int column, int steps_per_part,
                     const int* table) {
  SHARED_MEMORY(memory);
  constexpr int BUFFER = 2 * DEPTH * LINE;
  float* tiles = (float*)memory;  // [2 buffers][a, b][DEPTH][LINE]
  int thread_row = threadIdx.x / 16, thread_column = threadIdx.x % 16;

  int steps1 = divide_up(first.k, DEPTH), steps = steps1 + divide_up(second.k, DEPTH);
  int step = (int)blockIdx.z * steps_per_part, end = steps - step < steps_per_part ? steps : step + steps_per_part;

  Tile<TRANSPOSE_A, ROUTED != 0> tile_a;
  Tile<TRANSPOSE_B, ROUTED == 2> tile_b;
  if (ROUTED == 2 || step < steps1) {
    tile_a.seek(first.a, first.lda, result.m, first.k, row, step * DEPTH, table);
    tile_b.seek(first.b, first.ldb, result.b_rows, first.k, column, step * DEPTH, table);
  }
  // Brings the tile of step `next` into registers.
  auto load = [&](int next) {
    if (ROUTED != 2 && (next == steps1 || (next > steps1 && next == step))) {
      tile_a.seek(second.a, second.lda, result.m, second.k, row, (next - steps1) * DEPTH, table);
      tile_b.seek(second.b, second.ldb, result.b_rows, second.k, column, (next - steps1) * DEPTH, table);
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

  float* y = result.y + (u64)blockIdx.z * (u64)result.m * result.ldy;
  UNROLL for (int j = 0; j < SIDE; j++) {
    int at = column + j / 4 * (BLOCK / QUADS) + thread_column * 4 + j % 4;
    float add = result.bias && at < result.n ? result.bias[at] : 0.0f;
    UNROLL for (int i = 0; i < SIDE; i++) {
      int line = row + i / 4 * (BLOCK / QUADS) + thread_row * 4 + i % 4;
      if (line < result.m && at < result.n)
        y[(u64)(ROUTED == 1 ? table[line] : line) * result.ldy + at] = fma_rn(sums[i][j], result.scale, add);
    }
  }
}

#if ROUTED == 0
KERNEL(256, 2) matmul_plain(Pair first, Pair second, Target result, int group, int steps_per_part) {
  Place place = place_of_block(divide_up(result.m, BLOCK), divide_up(result.n, BLOCK), group);
  multiply(first, second, result, place.row * BLOCK, place.column * BLOCK, steps_per_part, nullptr);
}
#elif ROUTED == 1
// y[rows[i], :] = scale * (a[rows[i], :] b + s[rows[i], :] c) + bias for the m rows of each layer.
// Two blocks of the large tile would have too few registers for both layers' operands.
KERNEL(256, BLOCK == 128 ? 1 : 2)
matmul_routed(const float* a, u64 lda, const float* s, u64 lds, float* y, u64 ldy, RoutedLayer<float> layer1,
              RoutedLayer<float> layer2, int n, int k, int group) {
  int tiles1 = divide_up(layer1.m, BLOCK);
  Place place = place_of_block(tiles1 + divide_up(layer2.m, BLOCK), divide_up(n, BLOCK), group);
  bool second = place.row >= tiles1;
  int row = (second ? place.row - tiles1 : place.row) * BLOCK;
  const RoutedLayer<float> layer = second ? layer2 : layer1;
  multiply({a, lda, layer.b, layer.ldb, k}, {s, lds, layer.c, layer.ldc, layer.r},
           {layer.bias, y, ldy, layer.m, n, layer.b_rows, layer.scale}, row, place.column * BLOCK,
           divide_up(k, DEPTH) + divide_up(layer.r, DEPTH), layer.rows);
}
#else
// y[m, n] = sum over i < k of a[rows[i], m] b[rows[i], n].
KERNEL(256, 2)
matmul_of_rows(const float* a, u64 lda, const float* b, u64 ldb, const int* rows, float* y, u64 ldy, int m, int n, int k,
               int group, int steps_per_part) {
  Place place = place_of_block(divide_up(m, BLOCK), divide_up(n, BLOCK), group);
  multiply({a, lda, b, ldb, k}, {nullptr, 0, nullptr, 0, 0}, {nullptr, y, ldy, m, n, n, 1.0f}, place.row * BLOCK,
           place.column * BLOCK, steps_per_part, rows);
}
#endif
