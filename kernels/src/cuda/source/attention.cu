// Softmax attention over packed sequences, forward and backward, for tensor cores of sm_80 and newer.
//
// Legend: sequences lie one behind the other; sequence i has queries q_starts[i]..q_starts[i + 1] and keys
// k_starts[i]..k_starts[i + 1]. q, out, dout, dq [t, h, d]; k, v, dk, dv [s, g, d] in TYPE; lse, delta [t, h] f32; query
// head j uses key/value head j / (h / g). Causal: query i of n sees the keys 0..=i + (keys - n). A query without keys
// has out 0, lse -inf and no gradients. Defines: TYPE (bf16 or f16), HEAD_DIM (d, a multiple of 8 up to 128).
// `tiles` holds pairs (sequence, tile of its rows), the longest first; one block each per head. 128 threads a block.
//
// Forward (Dao, FlashAttention-2): a warp has 16 or 32 query rows. For each tile of 64 keys, from the last visible one
// down: s = q k^T, mask where the tile is at the boundary, p = 2^(s - base) with a running base per row, o += p v.
// Key and value tiles alternate in shared memory: one is copied while the other is used. p is rounded to TYPE for the
// second product; its sum is not.
// Backward, without atomics and so in one order: output_products makes delta = sum of out * dout; gradient_kv has one
// block per tile of 64 keys and key/value head (or part of its query heads: partial sums, added in order by sum_parts)
// and walks the tiles of 32 queries; gradient_q has one block per tile of queries and head and walks the tiles of 32
// keys. Both compute p again from lse: seven products where five would do with sums in memory that blocks share.
// ds and p are rounded to TYPE for the products.
//
// Products per pair of query and key: 2 d multiply-adds forward, 7 d backward. No head dim is padded but to 8: d = 72
// takes four steps of k = 16 and one of k = 8. Nothing of the size of the scores is ever stored.

typedef Element<TYPE> T;

// Width of a row: 16-byte pieces (8 elements, the width of an mma tile), steps of k = 16, and one step of k = 8.
constexpr int PIECES = HEAD_DIM / 8;
constexpr int STEPS = HEAD_DIM / 16;
constexpr bool HALF_STEP = PIECES % 2 == 1;
// Shared memory: the eight rows of an 8x8 matrix must lie in different banks. Rows of 8 or 16 pieces are swizzled: piece p
// of row r is stored at p ^ (r % 8). Other rows are an odd number of pieces apart.
//
//   swizzled, 8 pieces a row                 padded, 10 pieces in rows of 11
//   row 0 | 0 1 2 3 4 5 6 7 |                row 0 | 0 1 2 3 4 5 6 7 8 9 - |
//   row 1 | 1 0 3 2 5 4 7 6 |                row 1 | 0 1 2 3 4 5 6 7 8 9 - |  each row begins 11 pieces later:
//   row 2 | 2 3 0 1 6 7 4 5 |                row 2 | 0 1 2 3 4 5 6 7 8 9 - |  banks 0, 3, 6, 1, 4, 7, 2, 5 (of 8)
//   row 7 | 7 6 5 4 3 2 1 0 |
constexpr bool SWIZZLED = PIECES % 8 == 0;
constexpr int PITCH = (SWIZZLED ? PIECES : PIECES | 1) * 16;
constexpr int THREADS = 128;
// Tuning by head dim. First, how many steps of a left operand that does not change stay in registers: as many as fit
// without spilling (ALL: every one). Then blocks of a multiprocessor that the registers must suffice for. At the right the
// blocks that shared memory leaves resident on multiprocessors with 100 / 164 / 228 KB (a test holds them): `_128` where
// the launch takes tiles of 128 queries, `_64` elsewhere.
constexpr int ALL = 9;
struct Tuning {
  int head_dim;  // up to this one
  int forward, q, dout, kv;
  int blocks_128, blocks_64, blocks_kv;
};
constexpr Tuning TUNING[] = {
    //  steps in registers       blocks by registers   resident: forward_128, forward_64, gradient_q_128, _64,   gradient_kv
    {32, ALL, ALL, ALL, 1, 3, 4, 4},    //             3/3/3    4/4/4   3/3/3  4/4/4   3/4/4
    {64, ALL, ALL, ALL, 4, 2, 3, 3},    //             2/2/2    3/3/3   2/2/2  3/3/3   2/3/3
    {72, ALL, ALL, ALL, 3, 2, 3, 3},    //             2/2/2    3/3/3   2/2/2  3/3/3   2/3/3
    {80, ALL, ALL, 0, ALL, 2, 3, 2},    //             -/2/2    2/3/3   -/2/2  2/3/3   1/2/2
    {112, 0, 3, 0, 4, 2, 3, 2},         //             -/2/2    2/3/3   -/2/2  2/3/3   1/2/2
    {128, 0, 0, 0, 1, 2, 3, 2},         //             -/2/2    2/3/3   -/2/2  2/3/3   1/2/2
};
DEVICE constexpr int tuning_row() {
  int row = 0;
  while (TUNING[row].head_dim < HEAD_DIM) row++;
  return row;
}
constexpr Tuning TUNED = TUNING[tuning_row()];
constexpr int FORWARD_RESIDENT = TUNED.forward, Q_RESIDENT = TUNED.q, DOUT_RESIDENT = TUNED.dout, KV_RESIDENT = TUNED.kv;
constexpr int BLOCKS_128 = TUNED.blocks_128, BLOCKS_64 = TUNED.blocks_64, KV_BLOCKS = TUNED.blocks_kv;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// Where a piece lies in rows that begin at a multiple of 8 rows.
DEVICE u32 place(int row, int piece) { return row * PITCH + (SWIZZLED ? piece ^ (row & 7) : piece) * 16; }
// The same row, `pieces` (even) to the right of an address whose piece is 0 or 1 but for the swizzle.
DEVICE u32 right_of(u32 address, int pieces) { return SWIZZLED ? address ^ (pieces * 16) : address + pieces * 16; }

DEVICE int lane_index() { return threadIdx.x & 31; }
// Taken from lane 0: the compiler then knows that branches on it do not divide the warp.
DEVICE int warp_index() { return (int)shuffle((u32)threadIdx.x >> 5, 0); }

// The part of a thread in copies from global to shared memory by COUNT threads: one piece of every STEP-th row of a
// head.
template <int COUNT>
struct CopyBy {
  static constexpr int STEP = COUNT / PIECES;
  static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 128, "no row of TUNING");
  static_assert(!SWIZZLED || STEP % 8 == 0, "the swizzle repeats from step to step");
  static constexpr bool ALL_THREADS = COUNT % PIECES == 0;
  int row;
  u32 stride, shared, global;

  // A head of a tensor [rows, heads, HEAD_DIM].
  DEVICE CopyBy(int head, int heads)
      : row(threadIdx.x / PIECES),
        stride(heads * HEAD_DIM),
        shared(place(row, threadIdx.x % PIECES)),
        global(row * stride + head * HEAD_DIM + threadIdx.x % PIECES * 8) {
    if (!ALL_THREADS && row >= STEP) row = 1 << 24;
  }

  // Starts copying ROWS rows from row `first` of the tensor on; those from `valid` on become zeros and are not read.
  template <int ROWS>
  DEVICE void rows(u32 to, const u16* tensor, int first, int valid) const {
    const u16* from = tensor + ((u32)first * stride + global);
    UNROLL for (int i = 0; i < (ROWS + STEP - 1) / STEP; i++) {
      if ((ALL_THREADS && ROWS % STEP == 0) || row < ROWS - i * STEP)
        copy_async_16(to + shared + i * STEP * PITCH, from, row < valid - i * STEP);
      from += STEP * stride;
    }
  }
};
typedef CopyBy<THREADS> Copy;

// Stores the rows of this warp, 16 bytes a lane.
template <int ROWS>
DEVICE void store_rows(u16* global, const u8* shared, int stride, int valid) {
  UNROLL for (int i = 0; i < (ROWS * PIECES + 31) / 32; i++) {
    int at = lane_index() + i * 32, row = at / PIECES, piece = at % PIECES;
    if (row < smaller(valid, ROWS))
      *(uint4*)(global + (i64)row * stride + piece * 8) = *(const uint4*)(shared + place(row, piece));
  }
}

// Where this lane points into 16 x 16 elements: as the left operand of a product (or, transposed, the right one
// whose rows are summed over), and as the right operand whose rows are the columns of the result.
DEVICE u32 lane_of_left() { return place(lane_index() & 15, lane_index() >> 4); }
DEVICE u32 lane_of_right() { return place((lane_index() & 7) + (lane_index() >> 4) * 8, lane_index() >> 3 & 1); }
// Into 32 x 8 elements. Rows with a step of k = 8 have an odd number of pieces: they are not swizzled.
DEVICE u32 lane_of_column() { return lane_index() * PITCH; }

// The left operand of a product over the head dim: 16 * M rows.
template <int M>
struct Left {
  u32 full[STEPS > 0 ? STEPS : 1][M][4];
  u32 half[4];

  DEVICE void load_full(u32 rows, int k) {
    UNROLL for (int m = 0; m < M; m++) load_matrix_x4(full[k][m], right_of(rows + lane_of_left(), 2 * k) + m * 16 * PITCH);
  }
  DEVICE void load_half(u32 rows) {
    if (M == 2) {
      load_matrix_x4(half, rows + lane_of_column() + STEPS * 32);
    } else {
      u32 two[2];
      load_matrix_x2(two, rows + (lane_index() & 15) * PITCH + STEPS * 32);
      half[0] = two[0], half[1] = two[1];
    }
  }
  // The first COUNT steps, the one of k = 8 last.
  template <int COUNT>
  DEVICE void load(u32 rows) {
    UNROLL for (int k = 0; k < STEPS && k < COUNT; k++) load_full(rows, k);
    if (HALF_STEP && COUNT > STEPS) load_half(rows);
  }
};

// s = left right^T for 8 * N rows of the right operand. The first LOADED steps of `left` are in registers already.
template <int LOADED, int M, int N>
DEVICE void product(float (&s)[M][N][4], Left<M>& left, u32 left_rows, u32 right_rows) {
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int n = 0; n < N; n++)
      UNROLL for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
  UNROLL for (int k = 0; k < STEPS; k++) {
    if (k >= LOADED) left.load_full(left_rows, k);
    UNROLL for (int n = 0; n < N; n += 2) {
      u32 b[4];
      load_matrix_x4(b, right_of(right_rows + lane_of_right(), 2 * k) + n * 8 * PITCH);
      UNROLL for (int m = 0; m < M; m++) {
        T::mma(s[m][n], left.full[k][m], b[0], b[1]);
        T::mma(s[m][n + 1], left.full[k][m], b[2], b[3]);
      }
    }
  }
  if (HALF_STEP) {
    if (STEPS >= LOADED) left.load_half(left_rows);
    UNROLL for (int n = 0; n < N; n += 4) {
      u32 b[4];
      load_matrix_x4(b, right_rows + lane_of_column() + n * 8 * PITCH + STEPS * 32);
      UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int i = 0; i < 4; i++) T::mma_k8(s[m][n + i], left.half[2 * m], left.half[2 * m + 1], b[i]);
    }
  }
}

// The left operand of `accumulate` from a product: its accumulators have the layout of that operand.
template <int M, int N>
DEVICE void narrow(u32 (&p)[M][N / 2][4], const float (&s)[M][N][4]) {
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int n = 0; n < N; n++) {
      p[m][n / 2][n % 2 * 2] = T::narrow_pair(s[m][n][0], s[m][n][1]);
      p[m][n / 2][n % 2 * 2 + 1] = T::narrow_pair(s[m][n][2], s[m][n][3]);
    }
}

// o += p right for 16 * K rows of the right operand.
template <int M, int K>
DEVICE void accumulate(float (&o)[M][PIECES][4], const u32 (&p)[M][K][4], u32 right_rows) {
  UNROLL for (int k = 0; k < K; k++)
    UNROLL for (int n = 0; n + 1 < PIECES; n += 2) {
      u32 b[4];
      load_matrix_x4_transposed(b, right_of(right_rows + lane_of_left(), n) + k * 16 * PITCH);
      UNROLL for (int m = 0; m < M; m++) {
        T::mma(o[m][n], p[m][k], b[0], b[1]);
        T::mma(o[m][n + 1], p[m][k], b[2], b[3]);
      }
    }
  if (HALF_STEP) {
    UNROLL for (int k = 0; k < K; k += 2) {
      u32 b[4];
      load_matrix_x4_transposed(b, right_rows + lane_of_column() + k * 16 * PITCH + (PIECES - 1) * 16);
      UNROLL for (int m = 0; m < M; m++) {
        T::mma(o[m][PIECES - 1], p[m][k], b[0], b[1]);
        T::mma(o[m][PIECES - 1], p[m][k + 1], b[2], b[3]);
      }
    }
  }
}

template <int M>
DEVICE void clear(float (&o)[M][PIECES][4]) {
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int n = 0; n < PIECES; n++)
      UNROLL for (int i = 0; i < 4; i++) o[m][n][i] = 0.0f;
}

// Rounds accumulators times a factor per row into shared memory, row by row.
template <int M>
DEVICE void stage_rows(u8* shared, const float (&o)[M][PIECES][4], const float (&factor)[M][2]) {
  int r = lane_index() / 4, c = lane_index() % 4;
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int half = 0; half < 2; half++)
      UNROLL for (int n = 0; n < PIECES; n++)
        *(u32*)(shared + place(m * 16 + half * 8 + r, n) + c * 4) =
            T::narrow_pair(o[m][n][2 * half] * factor[m][half], o[m][n][2 * half + 1] * factor[m][half]);
}

// Scores of keys from `limit` on become minus infinity; `key` is the column of this lane's first element.
template <int N>
DEVICE void mask_row(float (&s)[N][4], int half, int key, int limit) {
  UNROLL for (int n = 0; n < N; n++)
    UNROLL for (int i = 0; i < 2; i++)
      if (key + n * 8 + i >= limit) s[n][2 * half + i] = minus_infinity();
}

// ---- forward

// The running softmax of the rows of a warp in powers of two: p = 2^(score - base). `base` is the maximum of some
// earlier tile, at most 2^LAG below the true one: the output is rescaled only when a maximum rises by more.
constexpr float LAG = 8.0f;

template <int M>
struct Softmax {
  float base[M][2], sum[M][2];

  // Turns scores (before the factor) into weights; `o` is rescaled where needed.
  template <int N>
  DEVICE void step(float (&s)[M][N][4], float (&o)[M][PIECES][4], float factor) {
    float rescale[M][2];
    bool risen = false;
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int half = 0; half < 2; half++) {
        float top = s[m][0][2 * half];
        UNROLL for (int n = 0; n < N; n++)
          UNROLL for (int i = 0; i < 2; i++) top = fmaxf(top, s[m][n][2 * half + i]);
        top = fmaxf(top, shuffle_xor(top, 1));
        top = fmaxf(top, shuffle_xor(top, 2)) * factor;
        bool rises = top > base[m][half] + LAG;
        rescale[m][half] = rises ? exp2_approx(base[m][half] - top) : 1.0f;
        base[m][half] = rises ? top : base[m][half];
        risen = risen || rises;
      }
    if (warp_any(risen)) {
      UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int half = 0; half < 2; half++) {
          sum[m][half] *= rescale[m][half];
          UNROLL for (int n = 0; n < PIECES; n++)
            UNROLL for (int i = 0; i < 2; i++) o[m][n][2 * half + i] *= rescale[m][half];
        }
    }
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int half = 0; half < 2; half++) {
        // No key seen yet: any base keeps the weights at zero.
        float base_or_zero = base[m][half] == minus_infinity() ? 0.0f : base[m][half];
        UNROLL for (int n = 0; n < N; n++)
          UNROLL for (int i = 0; i < 2; i++) {
            float p = exp2_approx(fmaf(s[m][n][2 * half + i], factor, -base_or_zero));
            s[m][n][2 * half + i] = p;
            sum[m][half] += p;
          }
      }
  }
};

template <int M>
DEVICE void attend(u8* memory, const u16* q, const u16* k, const u16* v, u16* out, float* lse, Sequences all) {
  constexpr int ROWS = 64 * M, KEYS = 64, N = KEYS / 8;
  const int heads = all.heads, kv_heads = all.kv_heads, head = blockIdx.x, kv_head = head / (heads / kv_heads);
  const int* tile = all.tile();
  Sequence sequence = all.at(tile[0]);
  const int warp = warp_index();
  int block_row = tile[1] * ROWS, row = block_row + warp * 16 * M;
  const int block_visible = sequence.visible(smaller(block_row + ROWS, sequence.queries) - 1);
  // Keys that some row of the warp sees, and those that all of them see.
  const int any_visible = row < sequence.queries ? sequence.visible(smaller(row + 16 * M, sequence.queries) - 1) : 0;
  const int all_visible = sequence.visible(row);

  const u32 shared_q = shared_address(memory), shared_k = shared_q + ROWS * PITCH, shared_v = shared_k + KEYS * PITCH;
  const u32 warp_q = shared_q + warp * 16 * M * PITCH;
  const Copy copy_k(kv_head, kv_heads);
  auto copy_keys = [&](u32 shared, const u16* tensor, int key) {
    copy_k.rows<KEYS>(shared, tensor, sequence.k_start + key, sequence.keys - key);
    copy_async_commit();
  };

  float o[M][PIECES][4];
  clear(o);
  Softmax<M> softmax;
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int half = 0; half < 2; half++) softmax.base[m][half] = minus_infinity(), softmax.sum[m][half] = 0.0f;

  const float factor = all.scale * LOG2_E;
  int key = (block_visible - 1) / KEYS * KEYS;
  Left<M> left;
  if (block_visible > 0) {
    Copy(head, heads).rows<ROWS>(shared_q, q, sequence.q_start + block_row, sequence.queries - block_row);
    copy_keys(shared_k, k, key);
    if (FORWARD_RESIDENT > 0) {
      copy_async_wait<0>();
      block_barrier();
      left.template load<FORWARD_RESIDENT>(warp_q);
    }
    for (; key >= 0; key -= KEYS) {
      copy_async_wait<0>();
      block_barrier();
      copy_keys(shared_v, v, key);
      float s[M][N][4];
      if (key < any_visible) product<FORWARD_RESIDENT>(s, left, warp_q, shared_k);
      copy_async_wait<0>();
      block_barrier();
      if (key > 0) copy_keys(shared_k, k, key - KEYS);
      if (key < any_visible) {
        if (key + KEYS > all_visible) {
          UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int half = 0; half < 2; half++)
              mask_row(s[m], half, key + lane_index() % 4 * 2,
                       sequence.visible(row + m * 16 + half * 8 + lane_index() / 4));
        }
        softmax.step(s, o, factor);
        u32 p[M][N / 2][4];
        narrow(p, s);
        accumulate(o, p, shared_v);
      }
    }
  }

  // Read again instead of kept in registers.
  sequence = all.at(tile[0]);
  row = tile[1] * ROWS + warp * 16 * M;
  float inverse[M][2];
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int half = 0; half < 2; half++) {
      float sum = softmax.sum[m][half];
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      inverse[m][half] = sum > 0.0f ? reciprocal_approx(sum) : 0.0f;
      int at = row + m * 16 + half * 8 + lane_index() / 4;
      if (lane_index() % 4 == 0 && at < sequence.queries)
        lse[(i64)(sequence.q_start + at) * heads + head] = (softmax.base[m][half] + log2_approx(sum)) * LN_2;
    }
  u8* staged = memory + warp * 16 * M * PITCH;
  stage_rows(staged, o, inverse);
  warp_barrier();
  store_rows<16 * M>(out + ((i64)(sequence.q_start + row) * heads + head) * HEAD_DIM, staged, heads * HEAD_DIM,
                     sequence.queries - row);
}

KERNEL(THREADS, BLOCKS_128)
forward_128(const u16* q, const u16* k, const u16* v, u16* out, float* lse, Sequences all) {
  SHARED_MEMORY(memory);
  attend<2>(memory, q, k, v, out, lse, all);
}
KERNEL(THREADS, BLOCKS_64)
forward_64(const u16* q, const u16* k, const u16* v, u16* out, float* lse, Sequences all) {
  SHARED_MEMORY(memory);
  attend<1>(memory, q, k, v, out, lse, all);
}

// ---- backward

// The exponent of a weight is score - this: of rows without keys, and of rows that are none, all weights are zero.
DEVICE float exponent_base(float lse) { return lse == minus_infinity() ? -minus_infinity() : lse * LOG2_E; }

// delta = sum over the head dim of out * dout, for each of the `rows` = t * h; LANES lanes a row.
KERNEL(THREADS, 8) output_products(const u16* out, const u16* dout, float* delta, u64 rows) {
  constexpr int LANES = PIECES > 8 ? 16 : PIECES > 4 ? 8 : PIECES > 2 ? 4 : 2;
  const u64 row = ((u64)blockIdx.x * THREADS + threadIdx.x) / LANES;
  const int piece = threadIdx.x % LANES;
  float sum = 0.0f;
  if (row < rows && piece < PIECES) {
    uint4 a = load_streaming((const uint4*)(out + row * HEAD_DIM) + piece);
    uint4 b = load_streaming((const uint4*)(dout + row * HEAD_DIM) + piece);
    u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    UNROLL for (int i = 0; i < 4; i++) {
      sum = fmaf(T::widen((u16)x[i]), T::widen((u16)y[i]), sum);
      sum = fmaf(T::widen((u16)(x[i] >> 16)), T::widen((u16)(y[i] >> 16)), sum);
    }
  }
  UNROLL for (int mask = 1; mask < LANES; mask *= 2) sum += shuffle_xor(sum, mask);
  if (row < rows && piece == 0) delta[row] = sum;
}

template <int M>
DEVICE void differentiate_q(u8* memory, const u16* q, const u16* k, const u16* v, const u16* dout, const float* lse,
                            const float* delta, u16* dq, Sequences all) {
  constexpr int ROWS = 64 * M, KEYS = 32, N = KEYS / 8;
  const int heads = all.heads, kv_heads = all.kv_heads, head = blockIdx.x, kv_head = head / (heads / kv_heads);
  const int warp = warp_index();
  const int* tile = all.tile();
  Sequence sequence = all.at(tile[0]);
  const int block_row = tile[1] * ROWS;
  int row = block_row + warp * 16 * M;
  const int block_visible = sequence.visible(smaller(block_row + ROWS, sequence.queries) - 1);
  const int any_visible = row < sequence.queries ? sequence.visible(smaller(row + 16 * M, sequence.queries) - 1) : 0;
  const int all_visible = sequence.visible(row);

  const u32 shared_q = shared_address(memory), shared_dout = shared_q + ROWS * PITCH;
  const u32 shared_k = shared_dout + ROWS * PITCH, shared_v = shared_k + KEYS * PITCH;
  const u32 warp_q = shared_q + warp * 16 * M * PITCH, warp_dout = warp_q + ROWS * PITCH;
  const Copy copy_k(kv_head, kv_heads);
  auto copy_keys = [&](u32 shared, const u16* tensor, int key) {
    copy_k.rows<KEYS>(shared, tensor, sequence.k_start + key, sequence.keys - key);
    copy_async_commit();
  };

  float o[M][PIECES][4];
  clear(o);
  if (block_visible > 0) {
    int key = (block_visible - 1) / KEYS * KEYS;
    const Copy copy_q(head, heads);
    copy_q.rows<ROWS>(shared_q, q, sequence.q_start + block_row, sequence.queries - block_row);
    copy_q.rows<ROWS>(shared_dout, dout, sequence.q_start + block_row, sequence.queries - block_row);
    copy_keys(shared_v, v, key);
    copy_keys(shared_k, k, key);
    float base[M][2], mean[M][2];
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int half = 0; half < 2; half++) {
        int at = row + m * 16 + half * 8 + lane_index() / 4;
        bool inside = at < sequence.queries;
        base[m][half] = inside ? exponent_base(lse[(i64)(sequence.q_start + at) * heads + head]) : -minus_infinity();
        mean[m][half] = inside ? delta[(i64)(sequence.q_start + at) * heads + head] : 0.0f;
      }
    const float factor = all.scale * LOG2_E;
    Left<M> left_q, left_dout;
    if (Q_RESIDENT > 0) {
      copy_async_wait<0>();
      block_barrier();
      left_q.template load<Q_RESIDENT>(warp_q);
      left_dout.template load<DOUT_RESIDENT>(warp_dout);
    }
    // Each of the two tiles has one buffer. The values of the next tile are copied during the rest of this one, its keys
    // during the next product with values.
    for (; key >= 0; key -= KEYS) {
      copy_async_wait<1>();
      block_barrier();
      float s[M][N][4], dp[M][N][4];
      if (key < any_visible) product<DOUT_RESIDENT>(dp, left_dout, warp_dout, shared_v);
      copy_async_wait<0>();
      block_barrier();
      if (key > 0) copy_keys(shared_v, v, key - KEYS);
      if (key < any_visible) {
        product<Q_RESIDENT>(s, left_q, warp_q, shared_k);
        if (key + KEYS > all_visible) {
          UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int half = 0; half < 2; half++)
              mask_row(s[m], half, key + lane_index() % 4 * 2,
                       sequence.visible(row + m * 16 + half * 8 + lane_index() / 4));
        }
        UNROLL for (int m = 0; m < M; m++)
          UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int i = 0; i < 4; i++)
              s[m][n][i] = exp2_approx(fmaf(s[m][n][i], factor, -base[m][i / 2])) * (dp[m][n][i] - mean[m][i / 2]);
        u32 ds[M][N / 2][4];
        narrow(ds, s);
        accumulate(o, ds, shared_k);
      }
      block_barrier();
      if (key > 0) copy_keys(shared_k, k, key - KEYS);
    }
  }

  sequence = all.at(tile[0]);
  row = tile[1] * ROWS + warp * 16 * M;
  float factor[M][2];
  UNROLL for (int m = 0; m < M; m++) factor[m][0] = factor[m][1] = all.scale;
  u8* staged = memory + warp * 16 * M * PITCH;
  stage_rows(staged, o, factor);
  warp_barrier();
  store_rows<16 * M>(dq + ((i64)(sequence.q_start + row) * heads + head) * HEAD_DIM, staged, heads * HEAD_DIM,
                     sequence.queries - row);
}

KERNEL(THREADS, BLOCKS_128)
gradient_q_128(const u16* q, const u16* k, const u16* v, const u16* dout, const float* lse, const float* delta, u16* dq,
               Sequences all) {
  SHARED_MEMORY(memory);
  differentiate_q<2>(memory, q, k, v, dout, lse, delta, dq, all);
}
KERNEL(THREADS, BLOCKS_64)
gradient_q_64(const u16* q, const u16* k, const u16* v, const u16* dout, const float* lse, const float* delta, u16* dq,
              Sequences all) {
  SHARED_MEMORY(memory);
  differentiate_q<1>(memory, q, k, v, dout, lse, delta, dq, all);
}

KERNEL(THREADS, KV_BLOCKS)
gradient_kv(const u16* q, const u16* k, const u16* v, const u16* dout, const float* lse, const float* delta, u16* dk,
            u16* dv, float* dk_parts, float* dv_parts, u64 part_stride, Sequences all, int parts) {
  SHARED_MEMORY(memory);
  constexpr int KEYS = 64, ROWS = 32, M = 2, N = ROWS / 8;
  // Shared memory: keys, values, two stages of (queries, gradients of outputs), weights, two stages of (lse, delta).
  constexpr int STAGE = 2 * ROWS * PITCH;
  const int heads = all.heads, kv_heads = all.kv_heads, causal = all.causal;
  const int part = blockIdx.x % parts, kv_head = blockIdx.x / parts, group = heads / kv_heads, warp = warp_index();
  const int* tile = all.tile();
  const Sequence sequence = all.at(tile[0]);
  // Warps 0 and 1 make dv and dk of the first 32 keys, 2 and 3 of the others.
  const bool of_k = warp % 2 == 1;
  const int block_key = tile[1] * KEYS, warp_key = warp / 2 * 32, key = block_key + warp_key;

  const u32 shared_k = shared_address(memory), shared_v = shared_k + KEYS * PITCH, stages = shared_v + KEYS * PITCH;
  float4* weights = (float4*)(memory + 2 * KEYS * PITCH + 2 * STAGE) + warp / 2 * M * N * 32 + lane_index();
  float* statistics = (float*)(memory + 2 * KEYS * PITCH + 2 * STAGE + KEYS * ROWS * 4);
  // Left and right rows of the first product; the second one takes the other right rows.
  const u32 left_rows = (of_k ? shared_v : shared_k) + warp_key * PITCH;
  const u32 first_right = of_k ? ROWS * PITCH : 0, second_right = ROWS * PITCH - first_right;

  const int first_seeing = causal ? block_key + sequence.queries - sequence.keys : 0;
  const int first = first_seeing < 0 ? 0 : first_seeing / ROWS * ROWS;
  int head = kv_head * group + part * group / parts;
  const int last_head = kv_head * group + (part + 1) * group / parts;
  Copy copy_q(head, heads);
  auto copy_queries = [&](int stage, int query) {
    const u32 to = stages + stage * STAGE;
    copy_q.rows<ROWS>(to, q, sequence.q_start + query, sequence.queries - query);
    copy_q.rows<ROWS>(to + ROWS * PITCH, dout, sequence.q_start + query, sequence.queries - query);
    copy_async_commit();
  };
  // Warp 0 fetches lse, warp 1 delta.
  auto statistic = [&](int head, int query) {
    const int at = query + lane_index();
    const bool inside = at < sequence.queries;
    const i64 from = (i64)(sequence.q_start + at) * heads + head;
    if (warp == 0) return inside ? exponent_base(lse[from]) : -minus_infinity();
    if (warp == 1) return inside ? delta[from] : 0.0f;
    return 0.0f;
  };

  float o[M][PIECES][4];
  clear(o);
  if (first < sequence.queries) {
    const Copy copy_k(kv_head, kv_heads);
    copy_k.rows<KEYS>(shared_k, k, sequence.k_start + block_key, sequence.keys - block_key);
    copy_k.rows<KEYS>(shared_v, v, sequence.k_start + block_key, sequence.keys - block_key);
    copy_queries(0, first);
    if (warp < 2) statistics[warp * ROWS + lane_index()] = statistic(head, first);
    const float factor = all.scale * LOG2_E;
    int query = first, stage = 0;
    Left<M> left;
    if (KV_RESIDENT > 0) {
      copy_async_wait<0>();
      block_barrier();
      left.template load<KV_RESIDENT>(left_rows);
    }
    while (head < last_head) {
      copy_async_wait<0>();
      block_barrier();
      int next_head = head, next_query = query + ROWS;
      if (next_query >= sequence.queries) {
        next_head++, next_query = first;
        copy_q.global += HEAD_DIM;
      }
      float next_statistic = 0.0f;
      if (next_head < last_head) {
        copy_queries(stage ^ 1, next_query);
        next_statistic = statistic(next_head, next_query);
      }
      const u32 right_rows = stages + stage * STAGE;
      const float* base = statistics + stage * 2 * ROWS + lane_index() % 4 * 2;
      // Keys that the first and the last query see.
      const int offset = causal ? query + 1 + sequence.keys - sequence.queries : sequence.keys;
      const bool seen = key < offset + ROWS - 1;
      float s[M][N][4];
      u32 p[M][N / 2][4];
      if (seen) {
        product<KV_RESIDENT>(s, left, left_rows, right_rows + first_right);
        if (!of_k) {
          if (key + 32 > offset && causal) {
            UNROLL for (int m = 0; m < M; m++)
              UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int i = 0; i < 4; i++)
                  if (key + m * 16 + i / 2 * 8 + lane_index() / 4 >= offset + n * 8 + lane_index() % 4 * 2 + i % 2)
                    s[m][n][i] = minus_infinity();
          }
          UNROLL for (int n = 0; n < N; n++) {
            const float2 b = *(const float2*)(base + n * 8);
            UNROLL for (int m = 0; m < M; m++) {
              s[m][n][0] = exp2_approx(fmaf(s[m][n][0], factor, -b.x));
              s[m][n][1] = exp2_approx(fmaf(s[m][n][1], factor, -b.y));
              s[m][n][2] = exp2_approx(fmaf(s[m][n][2], factor, -b.x));
              s[m][n][3] = exp2_approx(fmaf(s[m][n][3], factor, -b.y));
              weights[(m * N + n) * 32] = make_float4(s[m][n][0], s[m][n][1], s[m][n][2], s[m][n][3]);
            }
          }
        }
      }
      block_barrier();
      if (seen) {
        if (of_k) {
          UNROLL for (int n = 0; n < N; n++) {
            const float2 mean = *(const float2*)(base + ROWS + n * 8);
            UNROLL for (int m = 0; m < M; m++) {
              const float4 w = weights[(m * N + n) * 32];
              s[m][n][0] = w.x * (s[m][n][0] - mean.x);
              s[m][n][1] = w.y * (s[m][n][1] - mean.y);
              s[m][n][2] = w.z * (s[m][n][2] - mean.x);
              s[m][n][3] = w.w * (s[m][n][3] - mean.y);
            }
          }
        }
        narrow(p, s);
        accumulate(o, p, right_rows + second_right);
      }
      if (warp < 2) statistics[(stage ^ 1) * 2 * ROWS + warp * ROWS + lane_index()] = next_statistic;
      head = next_head, query = next_query, stage ^= 1;
    }
  }

  const int valid = sequence.keys - key;
  if (parts == 1) {
    float scales[M][2];
    UNROLL for (int m = 0; m < M; m++) scales[m][0] = scales[m][1] = of_k ? all.scale : 1.0f;
    u8* staged = memory + ((of_k ? KEYS : 0) + warp_key) * PITCH;
    stage_rows(staged, o, scales);
    warp_barrier();
    store_rows<32>((of_k ? dk : dv) + ((i64)(sequence.k_start + key) * kv_heads + kv_head) * HEAD_DIM, staged,
                   kv_heads * HEAD_DIM, valid);
  } else {
    float* to = (of_k ? dk_parts : dv_parts) + part * part_stride +
                ((i64)(sequence.k_start + key) * kv_heads + kv_head) * HEAD_DIM + lane_index() % 4 * 2;
    const float factor = of_k ? all.scale : 1.0f;
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int half = 0; half < 2; half++) {
        const int row = m * 16 + half * 8 + lane_index() / 4;
        if (row < valid) {
          UNROLL for (int n = 0; n < PIECES; n++)
            *(float2*)(to + (i64)row * kv_heads * HEAD_DIM + n * 8) =
                make_float2(o[m][n][2 * half] * factor, o[m][n][2 * half + 1] * factor);
        }
      }
  }
}

// dk and dv (blocks 0 and 1 along y) as the sums of their parts, in order; n = s * g * HEAD_DIM.
KERNEL(THREADS, 8) sum_parts(const float* dk_parts, const float* dv_parts, u16* dk, u16* dv, int parts, u64 n) {
  const float* from = blockIdx.y ? dv_parts : dk_parts;
  u16* to = blockIdx.y ? dv : dk;
  const u64 at = ((u64)blockIdx.x * THREADS + threadIdx.x) * 4;
  if (at >= n) return;
  float4 sum = *(const float4*)(from + at);
  for (int part = 1; part < parts; part++) {
    float4 x = *(const float4*)(from + part * n + at);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  *(uint2*)(to + at) = make_uint2(T::narrow_pair(sum.x, sum.y), T::narrow_pair(sum.z, sum.w));
}

// ---- backward with five products

// One kernel instead of gradient_q and gradient_kv (Dao, FlashAttention-2): a block has 128 keys of one key/value head
// (or of a part of its query heads) and walks tiles of queries from the last one down. Warp w has keys 16 w..16 w + 16:
// it makes p and ds [keys, queries] once, adds p dout to dv and ds q to dk in registers, and stores ds. All warps then
// make dq = ds^T k of the tile.
//
// Blocks that share a tile of queries add to dq in f32, each in its turn: tile of keys i is the i-th. A tile of queries
// sees the tiles of keys from 0 on, so its word of `turns` counts those that have added. The first one stores its sum,
// the last one rounds it to `dq`; where one tile has all keys, no sum is stored. Blocks take tickets: one waits only
// for earlier tickets, whose blocks run already, in whatever order a GPU starts blocks.
constexpr int FUSED_THREADS = 256, FUSED_KEYS = 128;
// Queries of a tile: as many as 99 KB of shared memory and 255 registers hold.
constexpr int FUSED_ROWS = HEAD_DIM <= 80 ? 64 : 32;

// Words of `words` become zero.
KERNEL(FUSED_THREADS, 1) clear_words(u32* words, u64 n) {
  const u64 at = (u64)blockIdx.x * FUSED_THREADS + threadIdx.x;
  if (at < n) words[at] = 0;
}

// What `gradients` writes. dq_sums: [t, h, d]. dk_parts, dv_parts, part_stride: as for gradient_kv. turns: zeros, the
// ticket and then one word per tile of queries and head; the tiles of sequence i begin at q_starts[i] / FUSED_ROWS + i.
struct Gradients {
  u16 *dq, *dk, *dv;
  float *dq_sums, *dk_parts, *dv_parts;
  u32* turns;
  u64 part_stride;
  typedef List<u16*, u16*, u16*, float*, float*, float*, u32*, u64> Members;
};

// One block per pair of tiles, key/value head and part; pairs of one sequence ascend.
KERNEL(FUSED_THREADS, 1)
gradients(const u16* q, const u16* k, const u16* v, const u16* dout, const float* lse, const float* delta, Gradients to,
          Sequences all, int parts) {
  SHARED_MEMORY(memory);
  const int heads = all.heads, kv_heads = all.kv_heads, causal = all.causal;
  const float scale = all.scale;
  u16* const dq = to.dq;
  float* const dq_sums = to.dq_sums;
  u32* const turns = to.turns;
  constexpr int KEYS = FUSED_KEYS, ROWS = FUSED_ROWS, N = ROWS / 8, STAGE = ROWS * PITCH;
  // Pairs of pieces of dq, and how many of them a warp makes for 16 queries.
  constexpr int PAIRS = (PIECES + 1) / 2, GROUPS = 8 * 16 / ROWS, OWN = (PAIRS + GROUPS - 1) / GROUPS;
  // Shared memory: keys, values, two stages of queries, gradients of outputs, ds, two stages of (lse, delta).
  const u32 shared_k = shared_address(memory), shared_v = shared_k + KEYS * PITCH, shared_q = shared_v + KEYS * PITCH;
  const u32 shared_dout = shared_q + 2 * STAGE, shared_ds = shared_dout + STAGE;
  u8* const stored_ds = memory + 2 * KEYS * PITCH + 3 * STAGE;
  float* const statistics = (float*)(stored_ds + KEYS * ROWS * 2);
  const int warp = warp_index(), lane = lane_index(), thread = threadIdx.x;

  if (thread == 0) *(u32*)statistics = atomic_increment(turns);
  block_barrier();
  const int ticket = (int)*(u32*)statistics, heads_of_tile = kv_heads * parts;
  block_barrier();
  const int* tile = all.tiles + 2 * (ticket / heads_of_tile);
  const int part = ticket % heads_of_tile % parts, kv_head = ticket % heads_of_tile / parts, group = heads / kv_heads;
  const Sequence sequence = all.at(tile[0]);
  const int block_key = tile[1] * KEYS, key = block_key + warp * 16;

  const int first_seeing = causal ? block_key + sequence.queries - sequence.keys : 0;
  const int first = first_seeing < 0 ? 0 : first_seeing / ROWS * ROWS;
  const int last = (sequence.queries - 1) / ROWS * ROWS;
  int head = kv_head * group + part * group / parts;
  const int last_head = kv_head * group + (part + 1) * group / parts;
  CopyBy<FUSED_THREADS> copy_q(head, heads);
  auto copy_queries = [&](u32 to, const u16* tensor, int query) {
    copy_q.rows<ROWS>(to, tensor, sequence.q_start + query, sequence.queries - query);
    copy_async_commit();
  };
  // Of the first 2 ROWS threads one half fetches lse, the other delta.
  auto statistic = [&](int head, int query) {
    const int at = query + thread % ROWS;
    const bool inside = at < sequence.queries, is_lse = thread < ROWS;
    const i64 from = (i64)(sequence.q_start + at) * heads + head;
    if (thread >= 2 * ROWS) return 0.0f;
    return is_lse ? (inside ? exponent_base(lse[from]) : -minus_infinity()) : (inside ? delta[from] : 0.0f);
  };

  float dk_sum[1][PIECES][4], dv_sum[1][PIECES][4];
  clear(dk_sum);
  clear(dv_sum);
  if (sequence.queries > 0) {
    const CopyBy<FUSED_THREADS> copy_k(kv_head, kv_heads);
    copy_k.rows<KEYS>(shared_k, k, sequence.k_start + block_key, sequence.keys - block_key);
    copy_k.rows<KEYS>(shared_v, v, sequence.k_start + block_key, sequence.keys - block_key);
    copy_queries(shared_q, q, last);
    copy_queries(shared_dout, dout, last);
    if (thread < 2 * ROWS) statistics[thread] = statistic(head, last);
    const u32 warp_k = shared_k + warp * 16 * PITCH, warp_v = shared_v + warp * 16 * PITCH;
    const float factor = scale * LOG2_E;
    int query = last, stage = 0;
    u32 added_to = 0;  // the turns of the tile before, if other blocks wait for them
    Left<1> left;
    while (head < last_head) {
      copy_async_wait<0>();
      block_barrier();
      int next_head = head, next_query = query - ROWS;
      if (next_query < first) {
        next_head++, next_query = last;
        copy_q.global += HEAD_DIM;
      }
      const bool has_next = next_head < last_head;
      float next_statistic = 0.0f;
      if (has_next) {
        copy_queries(shared_q + (stage ^ 1) * STAGE, q, next_query);
        next_statistic = statistic(next_head, next_query);
      }
      const u32 rows_q = shared_q + stage * STAGE;
      // Keys that the last query of the tile sees.
      const int visible = sequence.visible(smaller(query + ROWS, sequence.queries) - 1);
      const u32 turn = 1 + (sequence.q_start / ROWS + tile[0] + query / ROWS) * heads + head;
      const bool is_first = block_key == 0, is_last = block_key + KEYS >= visible;
      // Read early: it arrives during the products.
      u32 turns_taken = thread == 0 && !is_first ? load_volatile(turns + turn) : 0;
      u32 ds[1][N / 2][4] = {};
      if (key < visible) {
        const float* base = statistics + stage * 2 * ROWS + lane % 4 * 2;
        float s[1][N][4], dp[1][N][4];
        u32 p[1][N / 2][4];
        product<0>(s, left, warp_k, rows_q);
        const int offset = causal ? query + 1 + sequence.keys - sequence.queries : sequence.keys;
        if (key + 16 > smaller(offset, sequence.keys)) {
          UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int i = 0; i < 4; i++)
              if (key + i / 2 * 8 + lane / 4 >= (causal ? offset + n * 8 + lane % 4 * 2 + i % 2 : offset))
                s[0][n][i] = minus_infinity();
        }
        UNROLL for (int n = 0; n < N; n++) {
          const float2 b = *(const float2*)(base + n * 8);
          UNROLL for (int i = 0; i < 4; i++) s[0][n][i] = exp2_approx(fmaf(s[0][n][i], factor, i % 2 ? -b.y : -b.x));
        }
        narrow(p, s);
        product<0>(dp, left, warp_v, shared_dout);
        UNROLL for (int n = 0; n < N; n++) {
          const float2 mean = *(const float2*)(base + ROWS + n * 8);
          UNROLL for (int i = 0; i < 4; i++) s[0][n][i] *= dp[0][n][i] - (i % 2 ? mean.y : mean.x);
        }
        narrow(ds, s);
        accumulate(dv_sum, p, shared_dout);
      }
      UNROLL for (int n = 0; n < N; n++)
        UNROLL for (int half = 0; half < 2; half++)
          *(u32*)(stored_ds + chunk_offset<N>(warp * 16 + half * 8 + lane / 4, n) + lane % 4 * 4) =
              ds[0][n / 2][n % 2 * 2 + half];
      // One fence for both: it follows the turns before this one, and what this block added to the tile before.
      if (thread == 0 && (!is_first || added_to)) {
        while (turns_taken != (u32)tile[1]) turns_taken = load_volatile(turns + turn);
        device_fence();
        if (added_to) atomic_increment(turns + added_to);
      }
      block_barrier();
      if (has_next) {
        copy_queries(shared_dout, dout, next_query);
        if (thread < 2 * ROWS) statistics[(stage ^ 1) * 2 * ROWS + thread] = next_statistic;
      }
      // This warp's part of dq: 16 queries, the pairs of pieces from `pair` on. Those behind the row are not stored.
      const int warp_row = warp % (ROWS / 16) * 16, pair = warp / (ROWS / 16) * OWN;
      float o[2 * OWN][4];
      UNROLL for (int n = 0; n < 2 * OWN; n++)
        UNROLL for (int i = 0; i < 4; i++) o[n][i] = 0.0f;
      const u32 left_ds = shared_ds + chunk_offset<N>(lane % 8 + lane / 16 * 8, warp_row / 8 + lane / 8 % 2);
      UNROLL for (int step = 0; step < KEYS / 16; step++) {
        u32 a[4];
        load_matrix_x4_transposed(a, left_ds + step * 16 * ROWS * 2);
        UNROLL for (int i = 0; i < OWN; i++) {
          u32 b[4];
          load_matrix_x4_transposed(b, right_of(shared_k + lane_of_left(), 2 * (pair + i)) + step * 16 * PITCH);
          T::mma(o[2 * i], a, b[0], b[1]);
          T::mma(o[2 * i + 1], a, b[2], b[3]);
        }
      }
      // What earlier blocks added arrives during the product for dk.
      uint2 before[2][2 * OWN];
      const int row = query + warp_row + lane / 4, rows_left = sequence.queries - row, pieces_left = PIECES - 2 * pair;
      const u32 at = ((u32)(sequence.q_start + row) * heads + head) * HEAD_DIM + pair * 16 + lane % 4 * 2;
      const u32 half_stride = 8 * heads * HEAD_DIM;
      UNROLL for (int half = 0; half < 2; half++)
        UNROLL for (int n = 0; n < 2 * OWN; n++) {
          before[half][n] = make_uint2(0, 0);
          if (!is_first && half * 8 < rows_left && n < pieces_left)
            before[half][n] = load_streaming((const uint2*)(dq_sums + at + half * half_stride + n * 8));
        }
      if (key < visible) accumulate(dk_sum, ds, rows_q);
      UNROLL for (int half = 0; half < 2; half++)
        UNROLL for (int n = 0; n < 2 * OWN; n++) {
          if (half * 8 >= rows_left || n >= pieces_left) continue;
          const float x = float_of_bits(before[half][n].x) + o[n][2 * half];
          const float y = float_of_bits(before[half][n].y) + o[n][2 * half + 1];
          const u32 place = at + half * half_stride + n * 8;
          if (is_last)
            *(u32*)(dq + place) = T::narrow_pair(x * scale, y * scale);
          else
            *(float2*)(dq_sums + place) = make_float2(x, y);
        }
      added_to = is_last ? 0 : turn;
      head = next_head, query = next_query, stage ^= 1;
    }
    block_barrier();
    if (thread == 0 && added_to) {
      device_fence();
      atomic_increment(turns + added_to);
    }
  }

  const int valid = sequence.keys - key;
  const i64 first_row = ((i64)(sequence.k_start + key) * kv_heads + kv_head) * HEAD_DIM;
  const float factors[2] = {scale, 1.0f};
  UNROLL for (int which = 0; which < 2; which++) {
    const float(&sum)[1][PIECES][4] = which ? dv_sum : dk_sum;
    if (parts == 1) {
      const float factor[1][2] = {{factors[which], factors[which]}};
      u8* staged = memory + (which * KEYS + warp * 16) * PITCH;
      stage_rows(staged, sum, factor);
      warp_barrier();
      store_rows<16>((which ? to.dv : to.dk) + first_row, staged, kv_heads * HEAD_DIM, valid);
    } else {
      float* const sums = (which ? to.dv_parts : to.dk_parts) + part * to.part_stride + first_row + lane % 4 * 2;
      UNROLL for (int half = 0; half < 2; half++) {
        const int row = half * 8 + lane / 4;
        if (row < valid) {
          UNROLL for (int n = 0; n < PIECES; n++)
            *(float2*)(sums + (i64)row * kv_heads * HEAD_DIM + n * 8) =
                make_float2(sum[0][n][2 * half] * factors[which], sum[0][n][2 * half + 1] * factors[which]);
        }
      }
    }
  }
}
