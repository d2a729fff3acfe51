// Matrix products of 16-bit operands with f32 sums on the tensor cores of sm_80 and newer: linear layers with or
// without a low-rank adapter, and the products of their gradients.
//
//   y[m, n] = scale * (sum over k1 of a1[m, k] b1[k, n] + sum over k2 of a2[m, k] b2[k, n]) + bias[n]
//
// The K loop simply goes on from the first pair of operands to the second. This is how an adapter costs next to
// nothing: with s = round(scale * x A^T) (one rounding to the 16-bit type; the same kernel with a narrow tile),
//   forward         y  = [x | s] [W | B]^T + bias       a: x, s     b: W [n, k], B [n, r]
//   input gradient  dx = [dy | ds] [W ; A]              a: dy, ds   b: W [n, k], A [r, k], not transposed
//   gradients       dB = dy^T s, dA = ds^T x            both operands transposed, f32 out, K is the tokens
//
// Legend
//   a    [m, k] with k contiguous, or [k, m] with m contiguous (TRANSPOSE_A 1); lda elements from line to line
//   b    [n, k] with k contiguous, or [k, n] with n contiguous (TRANSPOSE_B 1); rows from b_rows on count as zeros
//   bias [n] in TYPE, or null
//   y    [m, n] in OUT, ldy elements from row to row
//   rows ROUTED 1: two layers over a partition of rows, the vision experts of CogVLM. The tiles of the first layer's rows
//        come before those of the second; rows1 and rows2 name the rows of a1, a2 and y that are theirs. Each row is
//        computed once, in one launch, where it lies. Each layer has its b1, b2 (of its adapter) and bias.
//        ROUTED 2: the sum over k takes these lines of a and b: the gradient of one of those layers.
//   Addresses are 16-byte aligned, lda and ldb multiples of 8, and what lies between the end of k (when contiguous)
//   and the next multiple of 8 is zero in both operands. m, n, k1, k2 are otherwise free; y may have any ldy.
// Defines: TYPE and OUT (TYPE_*), TRANSPOSE_A, TRANSPOSE_B, BLOCK_M, BLOCK_N, BLOCK_K (tile of a block),
//   WARPS_M, WARPS_N, WARPS_K (how the warps share it), STAGES (of the pipeline), BLOCKS (per multiprocessor);
//   ROUTED (absent: 0).
//
// Algorithm: a ring of STAGES tiles in shared memory is filled by asynchronous 16-byte copies (out of range: zeros);
// warps read fragments by ldmatrix one k16 slice ahead of the mma that use them. Chunks of 16 bytes are stored at
// chunk ^ line (mod 8 per 128 bytes), so that copies and ldmatrix, transposed or not, touch each bank once.
// Every sum runs over k in ascending slices of 16 whatever the tile (with WARPS_K > 1: over slices w, w + WARPS_K, ..
// of warp w, then over w), so all tiles with equal WARPS_K give the same bits. gridDim.z > 1 cuts the K loop: block z
// writes its f32 sums to y + z * m * ldy and linear_parts adds them in order.
//
// A row of 16 bytes of y is written once, by whole sectors, through shared memory (f32: 32-byte sectors directly).
//
// Counts. Per block and step 2 * BLOCK_K * (BLOCK_M + BLOCK_N) bytes and 2 * BLOCK_M * BLOCK_N * BLOCK_K flops: 85
// flops a byte of L2 traffic for 128x256, 64 for 128x128. Blocks are numbered in groups of `group` tile rows, so that the
// blocks of one wave read a nearly square piece of both operands.
// Shared memory per step at 128 bytes a cycle, against cycles of mma (2048 fma at 1024 a cycle on sm_80; at 2048 of
// wgmma's peak on sm_90): fragments 512 B an ldmatrix, copies 2 * BLOCK_K * (BLOCK_M + BLOCK_N) bytes:
// mma.sync itself reaches 63 to 65 % of sm_90's peak, so the first two tiles are equal there.
//   tile      warp    ldmatrix + copies   sm_80 mma   sm_90 peak   at most of sm_90's peak
//   128x256   64x64   512 + 192 cycles    1024        512          73 %
//   128x128   64x64   256 + 128           512         256          67 %
//   64x128    32x64   192 + 96            256         128          44 %
//   64x64     32x32   128 + 64            128         64           33 %
// The step is one basic block. Instructions of a warp in machine code (NVRTC 13.0, both orientations of b alike):
//   tile      mma  ldmatrix  copies  all, sm_80  all, sm_90a  registers
//   128x256   64   16        6       147         142          228..246
//   128x128   64   16        8       154         155          228..246
//   64x128    32   12        6       111         106          148..162
//   64x16     16   10        10      104         105          120..126 (a step of 128 shared by four warps)
// The adapter, counted: t = 8192, k = n = 4096, r = 16 adds one step to 128 (0.8 %) and a pass over x, 67 MB at the
// speed of memory against 275 Gflop (16 us at 4.2 TB/s against 500 us at 550 Tflop/s: 3 %).

#ifndef ROUTED
#define ROUTED 0
#endif

typedef Element<TYPE> E;
constexpr int WARPS = WARPS_M * WARPS_N * WARPS_K;
constexpr int THREADS = 32 * WARPS;
constexpr int WARP_M = BLOCK_M / WARPS_M, WARP_N = BLOCK_N / WARPS_N;
// mma tiles of a warp, pairs of n8 columns, and k16 slices of a warp in a step.
constexpr int TILES_M = WARP_M / 16, TILES_N = WARP_N / 16, SLICES = BLOCK_K / 16 / WARPS_K;

// One operand's tile: ROWS (of m or n) by BLOCK_K. A line is contiguous in global memory: BLOCK_K elements of a row,
// or ROWS elements of one k when transposed. SIDE 0 feeds the rows of the mma, 1 its columns. INDEXED: a table names the
// lines.
template <int ROWS, int WARP_ROWS, int TRANSPOSED, int SIDE, int INDEXED>
struct Tile {
  static constexpr int CHUNKS = (TRANSPOSED ? ROWS : BLOCK_K) / 8;
  static constexpr int BYTES = ROWS * BLOCK_K * 2;
  static constexpr int LINES_PER_COPY = THREADS / CHUNKS;
  static constexpr int COPIES = (TRANSPOSED ? BLOCK_K : ROWS) / LINES_PER_COPY;
  static constexpr int FRAGMENTS = WARP_ROWS / 16;
  // Fragments differ by an XOR of the chunk along the line and by a constant across lines.
  static constexpr int ADDRESSES = TRANSPOSED ? FRAGMENTS : SLICES;
  static_assert(LINES_PER_COPY % 8 == 0 && COPIES > 0, "the swizzle repeats from copy to copy");

  const u16* source;  // this thread's chunk of the next tile
  u64 ld;
  int lines, chunks;  // lines and elements of the line left from this thread's place on; <= 0 is out of range
  u32 target;         // where this thread's chunks go, relative to the tile
  u32 fragment[ADDRESSES];
  // Indexed: the table's entry of this thread's first line, and where its lines of the next tile lie, in chunks. The
  // lines of a transposed tile are looked up a step before they are copied.
  const int* entry;
  u32 offset[COPIES];

  // `warp`: the first row of the warp in the tile; `slice`: its first k16 slice of a step.
  DEVICE void place(int thread, int warp, int slice) {
    target = chunk_offset<CHUNKS>(thread / CHUNKS, thread % CHUNKS);
    int lane = thread & 31;
    bool lines_first = (TRANSPOSED != 0) == (SIDE != 0);
    int line = lines_first ? lane & 15 : (lane & 7) + ((lane >> 4) << 3);
    int chunk = lines_first ? lane >> 4 : (lane >> 3) & 1;
    line += TRANSPOSED ? slice * 16 : warp;
    chunk += TRANSPOSED ? warp / 8 : slice * 2;
    u32 first = chunk_offset<CHUNKS>(line, chunk);
    UNROLL for (int i = 0; i < ADDRESSES; i++) fragment[i] = first ^ (u32)(i * (TRANSPOSED ? 1 : WARPS_K) * 32);
  }

  // Starts at element `k` of an operand with `rows` rows and `depth` elements of k; the tile begins at row `row`.
  DEVICE void seek(int thread, const u16* base, u64 line_elements, int rows, int depth, int row, int k,
                   const int* table) {
    int line = thread / CHUNKS + (TRANSPOSED ? k : row), at = thread % CHUNKS * 8 + (TRANSPOSED ? row : k);
    ld = line_elements;
    source = base + (INDEXED ? (u64)at : (u64)line * ld + at);
    lines = (TRANSPOSED ? depth : rows) - line;
    chunks = (TRANSPOSED ? rows : depth) - at;
    if constexpr (INDEXED != 0) {
      entry = table + line;
      look_up();
    }
  }

  DEVICE void look_up() {
    UNROLL for (int i = 0; i < COPIES; i++)
      offset[i] = lines > i * LINES_PER_COPY ? (u32)entry[i * LINES_PER_COPY] * (u32)(ld / 8) : 0u;
  }

  // Copies the tile and moves on by BLOCK_K.
  DEVICE void copy(u32 tile) {
    UNROLL for (int i = 0; i < COPIES; i++)
      copy_async_16(tile + target + i * (LINES_PER_COPY * CHUNKS * 16),
                    source + (INDEXED ? (u64)offset[i] * 8 : i * LINES_PER_COPY * ld),
                    lines > i * LINES_PER_COPY && chunks > 0);
    if (TRANSPOSED) {
      lines -= BLOCK_K;
      if constexpr (INDEXED != 0) {
        entry += BLOCK_K;
        look_up();
      } else {
        source += BLOCK_K * ld;
      }
    } else {
      source += BLOCK_K;
      chunks -= BLOCK_K;
    }
  }

  // Four 8x8 matrices: 16 rows by 16 of k. For SIDE 1: b0, b1 of the first n8 columns, then of the second.
  DEVICE void load(u32 (&r)[4], u32 tile, int i, int slice) const {
    constexpr int SLICE_BYTES = WARPS_K * 16 * CHUNKS * 16, FRAGMENT_BYTES = 16 * CHUNKS * 16;
    if constexpr (TRANSPOSED != 0)
      load_matrix_x4_transposed(r, tile + fragment[i] + slice * SLICE_BYTES);
    else
      load_matrix_x4(r, tile + fragment[slice] + i * FRAGMENT_BYTES);
  }
};

static_assert(ROUTED == 0 || (ROUTED == 1 && !TRANSPOSE_A) || (TRANSPOSE_A && TRANSPOSE_B), "what has a table");
static_assert(ROUTED != 1 || OUT == TYPE, "routed rows are stored in 16 bits");
typedef Tile<BLOCK_M, WARP_M, TRANSPOSE_A, 0, ROUTED != 0> TileA;
typedef Tile<BLOCK_N, WARP_N, TRANSPOSE_B, 1, ROUTED == 2> TileB;
constexpr int STAGE_BYTES = TileA::BYTES + TileB::BYTES;
// After the loop the same memory holds the sums of the other WARPS_K - 1 warps and the rows of y on their way out.
constexpr int PARTIAL_BYTES = (WARPS_K - 1) * BLOCK_M * BLOCK_N * 4;
static_assert(PARTIAL_BYTES + BLOCK_M * BLOCK_N * 2 <= STAGES * STAGE_BYTES, "the epilogue fits into the ring");

typedef float Sums[TILES_M][2 * TILES_N][4];

// One k16 slice of both operands in registers.
struct Fragments {
  u32 a[TILES_M][4], b[TILES_N][4];
  DEVICE void load(const TileA& tile_a, const TileB& tile_b, u32 stage, int slice) {
    UNROLL for (int i = 0; i < TILES_M; i++) tile_a.load(a[i], stage, i, slice);
    UNROLL for (int j = 0; j < TILES_N; j++) tile_b.load(b[j], stage + TileA::BYTES, j, slice);
  }
  // Serpentine: neighbouring mma share one operand.
  DEVICE void multiply(Sums& sums) const {
    UNROLL for (int j = 0; j < 2 * TILES_N; j++) UNROLL for (int step = 0; step < TILES_M; step++) {
      int i = j & 1 ? TILES_M - 1 - step : step;
      E::mma(sums[i][j], a[i], b[j >> 1][2 * (j & 1)], b[j >> 1][2 * (j & 1) + 1]);
    }
  }
};

// Adds the sums of the warps that share a piece of the tile, in the order of their numbers; true for the warp that
// holds the result.
DEVICE bool reduce_warps(Sums& sums, u8* memory, int piece, int share, int lane) {
  constexpr int VALUES = WARP_M * WARP_N / 32;
  float* partial = (float*)memory;
  UNROLL for (int e = 0; e < VALUES; e++) {
    if (share > 0)
      partial[((share - 1) * WARPS_M * WARPS_N + piece) * (VALUES * 32) + e * 32 + lane] =
          sums[e / (8 * TILES_N)][e / 4 % (2 * TILES_N)][e % 4];
  }
  block_barrier();
  if (share > 0) return false;
  UNROLL for (int other = 0; other < WARPS_K - 1; other++) UNROLL for (int e = 0; e < VALUES; e++) {
    float& sum = sums[e / (8 * TILES_N)][e / 4 % (2 * TILES_N)][e % 4];
    sum = add_rn(sum, partial[(other * WARPS_M * WARPS_N + piece) * (VALUES * 32) + e * 32 + lane]);
  }
  return true;
}

// The two elements of the bias from column `column` on.
DEVICE void load_bias(const u16* bias, int column, int n, float (&v)[2]) {
  v[0] = bias && column < n ? E::widen(bias[column]) : 0.0f;
  v[1] = bias && column + 1 < n ? E::widen(bias[column + 1]) : 0.0f;
}

// The warp's piece of y, whose first element is (row, column). `table` names the rows of y where rows are routed.
template <int T>
struct Output {
  static DEVICE void store(const Sums& sums, u8* memory, u16* y, u64 ldy, int row, int column, int m, int n,
                           float scale, const u16* bias, const int* table, int lane) {
    constexpr int CHUNKS = WARP_N / 8, ROWS = 32 / CHUNKS;
    UNROLL for (int j = 0; j < 2 * TILES_N; j++) {
      float v[2];
      load_bias(bias, column + j * 8 + (lane & 3) * 2, n, v);
      UNROLL for (int i = 0; i < TILES_M; i++) UNROLL for (int half = 0; half < 2; half++) {
        u32 at = chunk_offset<CHUNKS>(i * 16 + half * 8 + (lane >> 2), j) + (lane & 3) * 4;
        *(u32*)(memory + at) = E::narrow_pair(fma_rn(sums[i][j][2 * half], scale, v[0]),
                                              fma_rn(sums[i][j][2 * half + 1], scale, v[1]));
      }
    }
    warp_barrier();
    int chunk = lane % CHUNKS, first = column + chunk * 8;
    bool whole = first + 8 <= n && ldy % 8 == 0;
    u16* first_row = y + ((u64)(row + lane / CHUNKS) * ldy + first);
    UNROLL for (int i = 0; i < WARP_M / ROWS; i++) {
      int line = i * ROWS + lane / CHUNKS;
      uint4 w = *(const uint4*)(memory + chunk_offset<CHUNKS>(line, chunk));
      if (row + line < m) {
        u16* out = ROUTED == 1 ? y + ((u64)table[row + line] * ldy + first) : first_row + (u64)(i * ROWS) * ldy;
        if (whole) {
          *(uint4*)out = w;
        } else {
          u32 words[4] = {w.x, w.y, w.z, w.w};
          UNROLL for (int e = 0; e < 8; e++)
            if (first + e < n) out[e] = (u16)(words[e / 2] >> (e % 2 * 16));
        }
      }
    }
  }
};
template <>
struct Output<TYPE_F32> {
  static DEVICE void store(const Sums& sums, u8*, float* y, u64 ldy, int row, int column, int m, int n, float scale,
                           const u16* bias, const int*, int lane) {
    bool pairs = ldy % 2 == 0;
    UNROLL for (int j = 0; j < 2 * TILES_N; j++) {
      int at = column + j * 8 + (lane & 3) * 2;
      float v[2];
      load_bias(bias, at, n, v);
      UNROLL for (int i = 0; i < TILES_M; i++) UNROLL for (int half = 0; half < 2; half++) {
        int line = row + i * 16 + half * 8 + (lane >> 2);
        float low = fma_rn(sums[i][j][2 * half], scale, v[0]), high = fma_rn(sums[i][j][2 * half + 1], scale, v[1]);
        float* out = y + ((u64)line * ldy + at);
        if (line < m && at + 1 < n && pairs) {
          *(float2*)out = make_float2(low, high);
        } else if (line < m) {
          if (at < n) out[0] = low;
          if (at + 1 < n) out[1] = high;
        }
      }
    }
  }
};

typedef Operands<u16> Pair;
typedef Result<u16, Element<OUT>::Stored> Target;

// The tile of y that begins at (row, column), or block z's part of its sum.
DEVICE void multiply(const Pair& first, const Pair& second, const Target& result, int row, int column, int steps_per_part,
                     const int* table) {
  SHARED_MEMORY(memory);
  u32 ring = shared_address(memory);
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  int piece = warp % (WARPS_M * WARPS_N), share = warp / (WARPS_M * WARPS_N);
  int warp_m = piece % WARPS_M * WARP_M, warp_n = piece / WARPS_M * WARP_N;

  // Steps of BLOCK_K over the first pair of operands, then over the second.
  int steps1 = divide_up(first.k, BLOCK_K), steps = steps1 + divide_up(second.k, BLOCK_K);
  int step = (int)blockIdx.z * steps_per_part, end = steps - step < steps_per_part ? steps : step + steps_per_part;

  TileA tile_a;
  TileB tile_b;
  tile_a.place(thread, warp_m, share);
  tile_b.place(thread, warp_n, share);
  if (ROUTED == 2 || step < steps1) {
    tile_a.seek(thread, first.a, first.lda, result.m, first.k, row, step * BLOCK_K, table);
    tile_b.seek(thread, first.b, first.ldb, result.b_rows, first.k, column, step * BLOCK_K, table);
  } else {
    tile_a.seek(thread, second.a, second.lda, result.m, second.k, row, (step - steps1) * BLOCK_K, table);
    tile_b.seek(thread, second.b, second.ldb, result.b_rows, second.k, column, (step - steps1) * BLOCK_K, table);
  }
  int fetched = step;
  // Copies the tile of step `fetched` to `stage`; nothing but the pipeline's count after the last.
  auto fetch = [&](u32 stage) {
    if (fetched < end) {
      if (ROUTED != 2 && fetched == steps1) {
        tile_a.seek(thread, second.a, second.lda, result.m, second.k, row, 0, table);
        tile_b.seek(thread, second.b, second.ldb, result.b_rows, second.k, column, 0, table);
      }
      tile_a.copy(stage);
      tile_b.copy(stage + TileA::BYTES);
    }
    copy_async_commit();
    fetched++;
  };

  Sums sums;
  UNROLL for (int i = 0; i < TILES_M; i++) UNROLL for (int j = 0; j < 2 * TILES_N; j++) {
    UNROLL for (int e = 0; e < 4; e++) sums[i][j][e] = 0.0f;
  }

  u32 read = ring, write = ring + (STAGES - 1) * STAGE_BYTES;
  auto next = [&](u32 stage) { return stage == ring + (STAGES - 1) * STAGE_BYTES ? ring : stage + STAGE_BYTES; };
  UNROLL for (int s = 0; s < STAGES - 1; s++) fetch(ring + s * STAGE_BYTES);

  copy_async_wait<STAGES - 2>();
  block_barrier();
  static_assert(SLICES % 2 == 0, "fragments alternate between two sets of registers");
  Fragments fragments[2];
  fragments[0].load(tile_a, tile_b, read, 0);
  for (; step < end; step++) {
    UNROLL for (int slice = 0; slice < SLICES; slice++) {
      if (slice == SLICES - 1) {
        // The next stage has landed for all threads, and no warp reads the stage that the next fetch overwrites.
        copy_async_wait<STAGES - 2>();
        block_barrier();
        read = next(read);
      }
      fragments[(slice + 1) & 1].load(tile_a, tile_b, read, (slice + 1) % SLICES);
      if (slice == 0) {
        fetch(write);
        write = next(write);
      }
      fragments[slice & 1].multiply(sums);
    }
  }

  copy_async_wait<0>();
  block_barrier();
  if (WARPS_K > 1 && !reduce_warps(sums, memory, piece, share, lane)) return;
  u8* staging = memory + PARTIAL_BYTES + piece * (WARP_M * WARP_N * 2);
  Element<OUT>::Stored* y = result.y + (u64)blockIdx.z * (u64)result.m * result.ldy;
  Output<OUT>::store(sums, staging, y, result.ldy, row + warp_m, column + warp_n, result.m, result.n, result.scale,
                     result.bias, table, lane);
}

#if ROUTED == 0
KERNEL(THREADS, BLOCKS) linear(Pair first, Pair second, Target result, int group, int steps_per_part) {
  Place place = place_of_block(divide_up(result.m, BLOCK_M), divide_up(result.n, BLOCK_N), group);
  multiply(first, second, result, place.row * BLOCK_M, place.column * BLOCK_N, steps_per_part, nullptr);
}
#elif ROUTED == 1
// y[rows[i], :] = scale * (a[rows[i], :] b + s[rows[i], :] c) + bias for the m rows of each layer. Each has its rank
// (0: no adapter, s is not read).
KERNEL(THREADS, BLOCKS)
linear_routed(const u16* a, u64 lda, const u16* s, u64 lds, Element<OUT>::Stored* y, u64 ldy, RoutedLayer<u16> layer1,
              RoutedLayer<u16> layer2, int n, int k, int group) {
  int tiles1 = divide_up(layer1.m, BLOCK_M);
  Place place = place_of_block(tiles1 + divide_up(layer2.m, BLOCK_M), divide_up(n, BLOCK_N), group);
  bool second = place.row >= tiles1;
  int row = (second ? place.row - tiles1 : place.row) * BLOCK_M;
  const RoutedLayer<u16> layer = second ? layer2 : layer1;
  multiply({a, lda, layer.b, layer.ldb, k}, {s, lds, layer.c, layer.ldc, layer.r},
           {layer.bias, y, ldy, layer.m, n, layer.b_rows, layer.scale}, row, place.column * BLOCK_N,
           divide_up(k, BLOCK_K) + divide_up(layer.r, BLOCK_K), layer.rows);
}
#else
// y[m, n] = sum over i < k of a[rows[i], m] b[rows[i], n].
KERNEL(THREADS, BLOCKS)
linear_of_rows(const u16* a, u64 lda, const u16* b, u64 ldb, const int* rows, Element<OUT>::Stored* y, u64 ldy, int m,
               int n, int k, int group, int steps_per_part) {
  Place place = place_of_block(divide_up(m, BLOCK_M), divide_up(n, BLOCK_N), group);
  multiply({a, lda, b, ldb, k}, {nullptr, 0, nullptr, 0, 0}, {nullptr, y, ldy, m, n, n, 1.0f}, place.row * BLOCK_M,
           place.column * BLOCK_N, steps_per_part, rows);
}
#endif
