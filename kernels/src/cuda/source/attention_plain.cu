// Softmax attention over packed sequences, forward and backward, for every float dtype and head dim up to 128.
// Correctness first; what the tensor cores can do is in attention.cu.
//
// Legend: t queries, s keys of all sequences together; h heads of queries, g heads of keys and values; d head dim.
//   q, out, dout, dq [t,h,d]; k, v, dk, dv [s,g,d]: TYPE. lse, delta [t,h]: f32, lse in natural units.
//   Query head j uses key head j / (h/g). q_starts, k_starts: first rows of the sequences and the end.
//   tiles [n,2]: sequence and tile of 16 rows (queries, or keys for gradient_kv), one block each along y; the blocks
//   along x are the heads.
// Defines: TYPE (TYPE_*).
//
// A warp owns four rows; the other side passes by in tiles of 32 rows in shared memory as f32. Scores: a lane has one
// row of the tile and runs over the head dim. Sums over the tile: a lane has the head dims lane, lane + 32, ...
// A sequence is tiled from its first row and rows are independent: it has the same bits wherever it lies.
// Bytes: 2 * 4 * d of shared memory per multiplication of four rows; not meant to be fast.

typedef Element<TYPE> T;
typedef T::Stored Stored;

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
// Rows of a warp, of a block, of a tile of the other side; head dims of a lane.
constexpr int ROWS = 4, BLOCK_ROWS = ROWS * WARPS, TILE = 32, DIMS = 4;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

DEVICE int lane_index() { return threadIdx.x % 32; }
DEVICE int warp_index() { return threadIdx.x / 32; }

// One head of a tensor [rows, heads, d].
template <typename S>
struct Head {
  S* data;
  u64 stride;

  DEVICE Head(S* tensor, int first_row, int head, int heads, int d)
      : data(tensor + ((u64)first_row * heads + head) * d), stride((u64)heads * d) {}
  DEVICE S* row(int row) const { return data + row * stride; }
};

// Rows first..first + COUNT as f32, `pitch` floats apart; those from `end` on are zeros and not read.
template <int COUNT>
DEVICE void load_rows(float* shared, int pitch, const Head<const Stored>& head, int first, int end, int d) {
  for (int row = warp_index(); row < COUNT; row += WARPS)
    for (int e = lane_index(); e < d; e += 32)
      shared[row * pitch + e] = first + row < end ? T::widen(head.row(first + row)[e]) : 0.0f;
}

// Products of the warp's rows with this lane's row of a tile.
DEVICE void products(float (&s)[ROWS], const float* rows, const float* tile_row, int pitch, int d) {
  UNROLL for (int r = 0; r < ROWS; r++) s[r] = 0.0f;
  for (int e = 0; e < d; e++)
    UNROLL for (int r = 0; r < ROWS; r++) s[r] = fmaf(rows[r * pitch + e], tile_row[e], s[r]);
}

// o += the rows of a tile weighted by p, which lies one row a lane.
DEVICE void weighted_sum(float (&o)[ROWS][DIMS], const float (&p)[ROWS], const float* tile, int pitch, int d) {
  for (int row = 0; row < TILE; row++) {
    float weight[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) weight[r] = shuffle(p[r], row);
    UNROLL for (int i = 0; i < DIMS; i++) {
      int e = lane_index() + 32 * i;
      float x = e < d ? tile[row * pitch + e] : 0.0f;
      UNROLL for (int r = 0; r < ROWS; r++) o[r][i] = fmaf(weight[r], x, o[r][i]);
    }
  }
}

DEVICE void clear(float (&o)[ROWS][DIMS]) {
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int i = 0; i < DIMS; i++) o[r][i] = 0.0f;
}

// Stores the warp's rows times a factor each.
DEVICE void store_rows(const Head<Stored>& head, int first, int end, const float (&o)[ROWS][DIMS],
                       const float (&factor)[ROWS], int d) {
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int i = 0; i < DIMS; i++) {
      int e = lane_index() + 32 * i;
      if (first + r < end && e < d) head.row(first + r)[e] = T::narrow(o[r][i] * factor[r]);
    }
}

DEVICE float warp_max(float x) {
  UNROLL for (int mask = 16; mask; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
  return x;
}
DEVICE float warp_sum(float x) {
  UNROLL for (int mask = 16; mask; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

// The exponent of a weight is score - this: of rows without keys all weights are zero.
DEVICE float exponent_base(float lse) { return lse == minus_infinity() ? -minus_infinity() : lse * LOG2_E; }

// Shared memory: (16 + 2 * 32) rows of d | 1 floats.
KERNEL(THREADS, 4)
forward(const Stored* q, const Stored* k, const Stored* v, Stored* out, float* lse, Sequences all, int d) {
  SHARED_MEMORY(memory);
  const int heads = all.heads, kv_heads = all.kv_heads, pitch = d | 1, head = blockIdx.x;
  const int kv_head = head / (heads / kv_heads);
  float* queries = (float*)memory;
  float* keys = queries + BLOCK_ROWS * pitch;
  float* values = keys + TILE * pitch;
  const int* tile = all.tile();
  const Sequence sequence = all.at(tile[0]);
  const int block_row = tile[1] * BLOCK_ROWS, row = block_row + warp_index() * ROWS;
  const int end = sequence.visible(smaller(block_row + BLOCK_ROWS, sequence.queries) - 1);
  const Head<const Stored> k_head(k, sequence.k_start, kv_head, kv_heads, d);
  const Head<const Stored> v_head(v, sequence.k_start, kv_head, kv_heads, d);
  load_rows<BLOCK_ROWS>(queries, pitch, Head<const Stored>(q, sequence.q_start, head, heads, d), block_row,
                        sequence.queries, d);

  float o[ROWS][DIMS], top[ROWS], sum[ROWS];
  clear(o);
  UNROLL for (int r = 0; r < ROWS; r++) top[r] = minus_infinity(), sum[r] = 0.0f;
  for (int key = 0; key < end; key += TILE) {
    block_barrier();
    load_rows<TILE>(keys, pitch, k_head, key, sequence.keys, d);
    load_rows<TILE>(values, pitch, v_head, key, sequence.keys, d);
    block_barrier();
    float s[ROWS];
    products(s, queries + warp_index() * ROWS * pitch, keys + lane_index() * pitch, pitch, d);
    UNROLL for (int r = 0; r < ROWS; r++) {
      float score = key + lane_index() < sequence.visible(row + r) ? s[r] * (all.scale * LOG2_E) : minus_infinity();
      float risen = fmaxf(top[r], warp_max(score));
      // No key seen yet: any base keeps the weights at zero.
      float base = risen == minus_infinity() ? 0.0f : risen;
      float rescale = exp2_approx(top[r] - base);
      top[r] = risen;
      s[r] = exp2_approx(score - base);
      sum[r] = sum[r] * rescale + s[r];
      UNROLL for (int i = 0; i < DIMS; i++) o[r][i] *= rescale;
    }
    weighted_sum(o, s, values, pitch, d);
  }

  UNROLL for (int r = 0; r < ROWS; r++) {
    sum[r] = warp_sum(sum[r]);
    if (lane_index() == 0 && row + r < sequence.queries)
      lse[(u64)(sequence.q_start + row + r) * heads + head] = (top[r] + log2_approx(sum[r])) * LN_2;
    sum[r] = sum[r] > 0.0f ? 1.0f / sum[r] : 0.0f;
  }
  store_rows(Head<Stored>(out, sequence.q_start, head, heads, d), row, sequence.queries, o, sum, d);
}

// delta = sum over the head dim of out * dout: a warp for each of the `rows` = t * h.
KERNEL(THREADS, 4) output_products(const Stored* out, const Stored* dout, float* delta, u64 rows, int d) {
  u64 row = (u64)blockIdx.x * WARPS + warp_index();
  float sum = 0.0f;
  if (row < rows)
    for (int e = lane_index(); e < d; e += 32) sum = fmaf(T::widen(out[row * d + e]), T::widen(dout[row * d + e]), sum);
  sum = warp_sum(sum);
  if (row < rows && lane_index() == 0) delta[row] = sum;
}

// Shared memory of both gradients: 2 * (16 + 32) rows of d | 1 floats.
KERNEL(THREADS, 4)
gradient_q(const Stored* q, const Stored* k, const Stored* v, const Stored* dout, const float* lse, const float* delta,
           Stored* dq, Sequences all, int d) {
  SHARED_MEMORY(memory);
  const int heads = all.heads, kv_heads = all.kv_heads, pitch = d | 1, head = blockIdx.x;
  const int kv_head = head / (heads / kv_heads);
  float* queries = (float*)memory;
  float* douts = queries + BLOCK_ROWS * pitch;
  float* keys = douts + BLOCK_ROWS * pitch;
  float* values = keys + TILE * pitch;
  const int* tile = all.tile();
  const Sequence sequence = all.at(tile[0]);
  const int block_row = tile[1] * BLOCK_ROWS, row = block_row + warp_index() * ROWS;
  const int end = sequence.visible(smaller(block_row + BLOCK_ROWS, sequence.queries) - 1);
  const Head<const Stored> k_head(k, sequence.k_start, kv_head, kv_heads, d);
  const Head<const Stored> v_head(v, sequence.k_start, kv_head, kv_heads, d);
  load_rows<BLOCK_ROWS>(queries, pitch, Head<const Stored>(q, sequence.q_start, head, heads, d), block_row,
                        sequence.queries, d);
  load_rows<BLOCK_ROWS>(douts, pitch, Head<const Stored>(dout, sequence.q_start, head, heads, d), block_row,
                        sequence.queries, d);

  float o[ROWS][DIMS], base[ROWS], mean[ROWS], factor[ROWS];
  clear(o);
  UNROLL for (int r = 0; r < ROWS; r++) {
    u64 at = (u64)(sequence.q_start + row + r) * heads + head;
    bool inside = row + r < sequence.queries;
    base[r] = inside ? exponent_base(lse[at]) : -minus_infinity();
    mean[r] = inside ? delta[at] : 0.0f;
    factor[r] = all.scale;
  }
  for (int key = 0; key < end; key += TILE) {
    block_barrier();
    load_rows<TILE>(keys, pitch, k_head, key, sequence.keys, d);
    load_rows<TILE>(values, pitch, v_head, key, sequence.keys, d);
    block_barrier();
    float s[ROWS], dp[ROWS];
    products(s, queries + warp_index() * ROWS * pitch, keys + lane_index() * pitch, pitch, d);
    products(dp, douts + warp_index() * ROWS * pitch, values + lane_index() * pitch, pitch, d);
    UNROLL for (int r = 0; r < ROWS; r++) {
      bool sees = key + lane_index() < sequence.visible(row + r);
      s[r] = sees ? exp2_approx(s[r] * (all.scale * LOG2_E) - base[r]) * (dp[r] - mean[r]) : 0.0f;
    }
    weighted_sum(o, s, keys, pitch, d);
  }
  store_rows(Head<Stored>(dq, sequence.q_start, head, heads, d), row, sequence.queries, o, factor, d);
}

KERNEL(THREADS, 4)
gradient_kv(const Stored* q, const Stored* k, const Stored* v, const Stored* dout, const float* lse, const float* delta,
            Stored* dk, Stored* dv, Sequences all, int d) {
  SHARED_MEMORY(memory);
  const int heads = all.heads, kv_heads = all.kv_heads, pitch = d | 1, kv_head = blockIdx.x;
  const int group = heads / kv_heads;
  float* keys = (float*)memory;
  float* values = keys + BLOCK_ROWS * pitch;
  float* queries = values + BLOCK_ROWS * pitch;
  float* douts = queries + TILE * pitch;
  const int* tile = all.tile();
  const Sequence sequence = all.at(tile[0]);
  const int block_row = tile[1] * BLOCK_ROWS, row = block_row + warp_index() * ROWS;
  load_rows<BLOCK_ROWS>(keys, pitch, Head<const Stored>(k, sequence.k_start, kv_head, kv_heads, d), block_row,
                        sequence.keys, d);
  load_rows<BLOCK_ROWS>(values, pitch, Head<const Stored>(v, sequence.k_start, kv_head, kv_heads, d), block_row,
                        sequence.keys, d);
  // The first query that sees a key of the block, rounded down to a tile.
  const int first_seeing = all.causal ? block_row + sequence.queries - sequence.keys : 0;
  const int first = first_seeing < 0 ? 0 : first_seeing / TILE * TILE;

  float dk_sum[ROWS][DIMS], dv_sum[ROWS][DIMS], one[ROWS], factor[ROWS];
  clear(dk_sum);
  clear(dv_sum);
  UNROLL for (int r = 0; r < ROWS; r++) one[r] = 1.0f, factor[r] = all.scale;
  for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
    const Head<const Stored> q_head(q, sequence.q_start, head, heads, d);
    const Head<const Stored> dout_head(dout, sequence.q_start, head, heads, d);
    for (int query = first; query < sequence.queries; query += TILE) {
      block_barrier();
      load_rows<TILE>(queries, pitch, q_head, query, sequence.queries, d);
      load_rows<TILE>(douts, pitch, dout_head, query, sequence.queries, d);
      block_barrier();
      const int mine = query + lane_index();
      const u64 at = (u64)(sequence.q_start + mine) * heads + head;
      const float base = mine < sequence.queries ? exponent_base(lse[at]) : -minus_infinity();
      const float mean = mine < sequence.queries ? delta[at] : 0.0f;
      float p[ROWS], ds[ROWS];
      products(p, keys + warp_index() * ROWS * pitch, queries + lane_index() * pitch, pitch, d);
      products(ds, values + warp_index() * ROWS * pitch, douts + lane_index() * pitch, pitch, d);
      UNROLL for (int r = 0; r < ROWS; r++) {
        bool seen = mine < sequence.queries && row + r < sequence.visible(mine);
        p[r] = seen ? exp2_approx(p[r] * (all.scale * LOG2_E) - base) : 0.0f;
        ds[r] = p[r] * (ds[r] - mean);
      }
      weighted_sum(dv_sum, p, douts, pitch, d);
      weighted_sum(dk_sum, ds, queries, pitch, d);
    }
  }
  store_rows(Head<Stored>(dk, sequence.k_start, kv_head, kv_heads, d), row, sequence.keys, dk_sum, factor, d);
  store_rows(Head<Stored>(dv, sequence.k_start, kv_head, kv_heads, d), row, sequence.keys, dv_sum, one, d);
}
