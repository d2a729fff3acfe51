// Softmax attention over packed sequences, forward and backward, for tensor cores of sm_80 and newer.
// (legend to come)

typedef Element<TYPE> T;

// Width of a row: 16-byte pieces (8 elements, the width of an mma tile), steps of k = 16, and one step of k = 8.
constexpr int PIECES = HEAD_DIM / 8;
constexpr int STEPS = HEAD_DIM / 16;
constexpr bool HALF_STEP = PIECES % 2 == 1;
// Bytes from row to row in shared memory: an odd number of pieces, so that the eight rows of an 8x8 matrix lie in
// different banks.
constexpr int PITCH = (PIECES | 1) * 16;
constexpr int THREADS = 128;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int lane_index() { return threadIdx.x & 31; }
// Taken from lane 0: the compiler then knows that branches on it do not divide the warp.
DEVICE int warp_index() { return (int)shuffle((u32)threadIdx.x >> 5, 0); }

struct Sequence {
  int q_start, queries, k_start, keys;
  int causal;

  DEVICE Sequence(const int* q_starts, const int* k_starts, int index, int causal)
      : q_start(q_starts[index]),
        queries(q_starts[index + 1] - q_start),
        k_start(k_starts[index]),
        keys(k_starts[index + 1] - k_start),
        causal(causal) {}

  // Keys that query `row` sees: the first so many.
  DEVICE int visible(int row) const {
    if (!causal) return keys;
    int end = row + 1 + keys - queries;
    return end < 0 ? 0 : smaller(end, keys);
  }
};

// The part of a thread in copies from global to shared memory: one piece of every STEP-th row of a head.
struct Copy {
  static constexpr int STEP = THREADS / PIECES;
  static constexpr bool ALL_THREADS = THREADS % PIECES == 0;
  int row, stride;
  u32 shared, global;

  // A head of a tensor [rows, heads, HEAD_DIM].
  DEVICE Copy(int head, int heads)
      : row(threadIdx.x / PIECES),
        stride(heads * HEAD_DIM),
        shared(row * PITCH + threadIdx.x % PIECES * 16),
        global(row * stride + head * HEAD_DIM + threadIdx.x % PIECES * 8) {
    if (!ALL_THREADS && row >= STEP) row = 1 << 24;
  }

  // Starts copying ROWS rows from row `first` of the tensor on; those from `valid` on become zeros and are not read.
  template <int ROWS>
  DEVICE void rows(u32 to, const u16* tensor, int first, int valid) const {
    const u16* from = tensor + (u64)(u32)first * (u32)stride + global;
    UNROLL for (int i = 0; i < (ROWS + STEP - 1) / STEP; i++) {
      if ((ALL_THREADS && ROWS % STEP == 0) || row < ROWS - i * STEP)
        copy_async_16(to + shared + i * STEP * PITCH, from, row < valid - i * STEP);
      from += (u32)(STEP * stride);
    }
  }
};

// Stores the rows of this warp, 16 bytes a lane.
template <int ROWS>
DEVICE void store_rows(u16* global, const u8* shared, int stride, int valid) {
  UNROLL for (int i = 0; i < (ROWS * PIECES + 31) / 32; i++) {
    int at = lane_index() + i * 32, row = at / PIECES, piece = at % PIECES;
    if (row < smaller(valid, ROWS))
      *(uint4*)(global + (i64)row * stride + piece * 8) = *(const uint4*)(shared + row * PITCH + piece * 16);
  }
}

// Where this lane points into 16 x 16 elements: as the left operand of a product (or, transposed, the right one
// whose rows are summed over), and as the right operand whose rows are the columns of the result.
DEVICE u32 lane_of_left() { return (lane_index() & 15) * PITCH + (lane_index() >> 4) * 16; }
DEVICE u32 lane_of_right() { return ((lane_index() & 7) + (lane_index() >> 4) * 8) * PITCH + (lane_index() >> 3 & 1) * 16; }
// Into 32 x 8 elements.
DEVICE u32 lane_of_column() { return lane_index() * PITCH; }

// The left operand of a product over the head dim: 16 * M rows.
template <int M>
struct Left {
  u32 full[STEPS > 0 ? STEPS : 1][M][4];
  u32 half[4];

  DEVICE void load_full(u32 rows, int k) {
    UNROLL for (int m = 0; m < M; m++) load_matrix_x4(full[k][m], rows + lane_of_left() + m * 16 * PITCH + k * 32);
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
  DEVICE void load(u32 rows) {
    UNROLL for (int k = 0; k < STEPS; k++) load_full(rows, k);
    if (HALF_STEP) load_half(rows);
  }
};

// s = left right^T for 8 * N rows of the right operand. LOADED: `left` is in registers already.
template <bool LOADED, int M, int N>
DEVICE void product(float (&s)[M][N][4], Left<M>& left, u32 left_rows, u32 right_rows) {
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int n = 0; n < N; n++)
      UNROLL for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
  UNROLL for (int k = 0; k < STEPS; k++) {
    if (!LOADED) left.load_full(left_rows, k);
    UNROLL for (int n = 0; n < N; n += 2) {
      u32 b[4];
      load_matrix_x4(b, right_rows + lane_of_right() + n * 8 * PITCH + k * 32);
      UNROLL for (int m = 0; m < M; m++) {
        T::mma(s[m][n], left.full[k][m], b[0], b[1]);
        T::mma(s[m][n + 1], left.full[k][m], b[2], b[3]);
      }
    }
  }
  if (HALF_STEP) {
    if (!LOADED) left.load_half(left_rows);
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
      load_matrix_x4_transposed(b, right_rows + lane_of_left() + k * 16 * PITCH + n * 16);
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
DEVICE void stage(u8* shared, const float (&o)[M][PIECES][4], const float (&factor)[M][2]) {
  int r = lane_index() / 4, c = lane_index() % 4;
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int half = 0; half < 2; half++)
      UNROLL for (int n = 0; n < PIECES; n++)
        *(u32*)(shared + (m * 16 + half * 8 + r) * PITCH + n * 16 + c * 4) =
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
DEVICE void attend(u8* memory, const u16* q, const u16* k, const u16* v, u16* out, float* lse, const int* q_starts,
                   const int* k_starts, const int* tiles, int heads, int kv_heads, int causal, float scale) {
  constexpr int ROWS = 64 * M, KEYS = 64, N = KEYS / 8;
  constexpr bool RESIDENT = HEAD_DIM <= 80;
  const int head = blockIdx.x % heads, kv_head = head / (heads / kv_heads);
  const int* tile = tiles + 2 * (blockIdx.x / heads);
  Sequence sequence(q_starts, k_starts, tile[0], causal);
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

  const float factor = scale * LOG2_E;
  int key = (block_visible - 1) / KEYS * KEYS;
  Left<M> left;
  if (block_visible > 0) {
    Copy(head, heads).rows<ROWS>(shared_q, q, sequence.q_start + block_row, sequence.queries - block_row);
    copy_keys(shared_k, k, key);
    if (RESIDENT) {
      copy_async_wait<0>();
      block_barrier();
      left.load(warp_q);
    }
    for (; key >= 0; key -= KEYS) {
      copy_async_wait<0>();
      block_barrier();
      copy_keys(shared_v, v, key);
      float s[M][N][4];
      if (key < any_visible) product<RESIDENT>(s, left, warp_q, shared_k);
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
  sequence = Sequence(q_starts, k_starts, tile[0], causal);
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
  stage(staged, o, inverse);
  warp_barrier();
  store_rows<16 * M>(out + ((i64)(sequence.q_start + row) * heads + head) * HEAD_DIM, staged, heads * HEAD_DIM,
                     sequence.queries - row);
}

#define FORWARD(NAME, M, BLOCKS)                                                                                    \
  KERNEL(THREADS, BLOCKS)                                                                                           \
  NAME(const u16* q, const u16* k, const u16* v, u16* out, float* lse, const int* q_starts, const int* k_starts,   \
       const int* tiles, int heads, int kv_heads, int causal, float scale) {                                       \
    SHARED_MEMORY(memory);                                                                                          \
    attend<M>(memory, q, k, v, out, lse, q_starts, k_starts, tiles, heads, kv_heads, causal, scale);               \
  }
FORWARD(forward_128, 2, 2)
FORWARD(forward_64, 1, 3)
