// RMS norm and layer norm over the last axis, forward and backward; statistics and sums in f32.
//
// Defines: NORM (NORM_*), X (TYPE_* of activations and their gradients), W (TYPE_* of weight and bias).
// Bytes per element, s = size of X (weights stay in the caches):
//   forward 2s, rotated too; with the residual sum 4s; backward 3s, with d_sum 4s, and 4 per partial sum and column twice.
//
// Legend: x, y, dx, dy [rows, c]; weight, bias [c]; partials [groups, params, c] f32, params = 1 (RMS) or 2 (layer).
//   mean = sum(x) / c (0 for RMS), scale = 1 / sqrt(sum((x - mean)^2) / c + eps), normal = (x - mean) * scale
//   RMS    y = round(normal) * weight          layer  y = normal * weight + bias
//   g = dy * weight, dx = scale * (g - mean(g) [layer only] - normal * mean(g * normal))
//   d_weight = sum over rows of dy * normal (RMS: rounded), d_bias = sum over rows of dy
// A row belongs to row_threads threads (a multiple of 32), which hold it in registers: thread t has the chunks of eight
// elements t, t + row_threads, .... A block has as many rows as fit. The kernels *_any take any c and alignment: a
// block per row, which is read again for every sum.
// Backward: a group of row_threads threads takes rows group, group + groups, ... and keeps d_weight and d_bias of its
// columns; the number of groups depends on rows and c only, and sum_partials adds their sums in a fixed order, so the
// result is the same on every GPU.

#define NORM_RMS 0
#define NORM_LAYER 1
#define LAYER (NORM == NORM_LAYER)
#define PARAMS (LAYER ? 2 : 1)

typedef Element<X> Activation;
typedef Element<W> Parameter;
typedef Activation::Stored A;
typedef Parameter::Stored P;

// Sums a and b over the threads of a row: butterflies in warps, then the warps in order. All threads of the block take
// part. `shared` [2 * warps of the block] must not be in use: calls in turn take different ones.
DEVICE void row_sums(float& a, float& b, float* shared, int warps_per_row) {
  UNROLL for (int mask = 16; mask > 0; mask >>= 1) {
    a += shuffle_xor(a, mask);
    b += shuffle_xor(b, mask);
  }
  if (warps_per_row == 1) return;
  int warp = threadIdx.x >> 5, first = warp / warps_per_row * warps_per_row;
  if ((threadIdx.x & 31) == 0) shared[2 * warp] = a, shared[2 * warp + 1] = b;
  block_barrier();
  a = 0.0f, b = 0.0f;
  for (int i = first; i < first + warps_per_row; i++) a += shared[2 * i], b += shared[2 * i + 1];
}

DEVICE float inverse_root(float mean_square, float eps) { return div_rn(1.0f, sqrt_rn(mean_square + eps)); }

// ---- forward

// Four chunks a thread: c <= 32 * row_threads, a multiple of 8, 16-byte aligned rows.
// With a residual: sum = round(x + residual) is written and normalised instead of x.
#define CHUNKS 4
KERNEL(512, 2)
forward(const A* x, const A* residual, A* sum, const P* weight, const P* bias, A* y, u64 rows, int c, float eps,
        int row_threads) {
  SHARED_MEMORY(memory);
  float* shared = (float*)memory;
  int group = threadIdx.x / row_threads, t = threadIdx.x - group * row_threads, warps_per_row = row_threads >> 5;
  u64 row = (u64)blockIdx.x * (blockDim.x / row_threads) + group;
  int limit = row < rows ? c : 0;
  u64 start = row * c;
  Eight<X> h[CHUNKS];
  UNROLL for (int k = 0; k < CHUNKS; k++) {
    int e = (k * row_threads + t) * 8;
    h[k].set_zero();
    if (e < limit) h[k].load(x + start + e);
  }
  if (residual) {
    UNROLL for (int k = 0; k < CHUNKS; k++) {
      int e = (k * row_threads + t) * 8;
      if (e < limit) {
        Eight<X> r;
        r.load(residual + start + e);
        UNROLL for (int i = 0; i < 4; i++)
          h[k].set_pair(i, h[k].get(2 * i) + r.get(2 * i), h[k].get(2 * i + 1) + r.get(2 * i + 1));
        h[k].store(sum + start + e);
      }
    }
  }
  float mean = 0.0f, squares = 0.0f, unused = 0.0f;
  if (LAYER) {
    UNROLL for (int k = 0; k < CHUNKS; k++)
      UNROLL for (int i = 0; i < 8; i++) mean += h[k].get(i);
    row_sums(mean, unused, shared, warps_per_row);
    mean = mean / (float)c;
  }
  UNROLL for (int k = 0; k < CHUNKS; k++) {
    if ((k * row_threads + t) * 8 < limit)
      UNROLL for (int i = 0; i < 8; i++) {
        float d = h[k].get(i) - mean;
        squares += d * d;
      }
  }
  row_sums(squares, unused, shared + 2 * (blockDim.x >> 5), warps_per_row);
  float scale = inverse_root(squares / (float)c, eps);
  UNROLL for (int k = 0; k < CHUNKS; k++) {
    int e = (k * row_threads + t) * 8;
    if (e < limit) {
      Eight<W> w, b;
      w.load_cached(weight + e);
      if (LAYER) b.load_cached(bias + e);
      UNROLL for (int i = 0; i < 4; i++) {
        float low = (h[k].get(2 * i) - mean) * scale, high = (h[k].get(2 * i + 1) - mean) * scale;
        if (LAYER) {
          h[k].set_pair(i, low * w.get(2 * i) + b.get(2 * i), high * w.get(2 * i + 1) + b.get(2 * i + 1));
        } else {
          h[k].set_pair(i, low, high);
          h[k].set_pair(i, h[k].get(2 * i) * w.get(2 * i), h[k].get(2 * i + 1) * w.get(2 * i + 1));
        }
      }
      h[k].store(y + start + e);
    }
  }
}
#undef CHUNKS

KERNEL(256, 4)
forward_any(const A* x, const A* residual, A* sum, const P* weight, const P* bias, A* y, u64 rows, int c, float eps,
            int row_threads) {
  SHARED_MEMORY(memory);
  float* shared = (float*)memory;
  int warps = blockDim.x >> 5;
  if (blockIdx.x >= rows) return;
  u64 start = (u64)blockIdx.x * c;
  x += start, y += start;
  if (residual) {
    for (int e = threadIdx.x; e < c; e += blockDim.x)
      sum[start + e] =
          Activation::narrow(Activation::widen(x[e]) + Activation::widen(residual[start + e]));
    // Each thread reads what it wrote.
    x = sum + start;
  }
  float mean = 0.0f, squares = 0.0f, unused = 0.0f;
  if (LAYER) {
    for (int e = threadIdx.x; e < c; e += blockDim.x) mean += Activation::widen(x[e]);
    row_sums(mean, unused, shared, warps);
    mean = mean / (float)c;
  }
  for (int e = threadIdx.x; e < c; e += blockDim.x) {
    float d = Activation::widen(x[e]) - mean;
    squares += d * d;
  }
  row_sums(squares, unused, shared + 2 * warps, warps);
  float scale = inverse_root(squares / (float)c, eps);
  for (int e = threadIdx.x; e < c; e += blockDim.x) {
    float normal = (Activation::widen(x[e]) - mean) * scale, w = Parameter::widen(weight[e]);
    if (LAYER)
      y[e] = Activation::narrow(normal * w + Parameter::widen(bias[e]));
    else
      y[e] = Activation::narrow(Activation::widen(Activation::narrow(normal)) * w);
  }
}

// ---- forward of heads, rotated

#if !LAYER
// The first (a cos - b sin) or second (b cos + a sin) element of a rotated pair a, b: `own` beside `other`, with the
// roundings of `pointwise.cu`.
DEVICE float rotated(float own, float other, float cos, float sin, bool is_first) {
  float product = mul_rn(own, cos), crossed = mul_rn(other, sin);
  return is_first ? sub_rn(product, crossed) : add_rn(product, crossed);
}

// Rotates what `forward` gives for heads of c <= 256 elements, a multiple of 8, in 16-byte aligned rows: x, y
// [tokens, heads, c], cos and sin [tokens, w] f32, halves: pairs (i, i + w), else (2i, 2i + 1). A warp has a head.
KERNEL(256, 4)
forward_rotated(const A* x, const P* weight, const float* cos, const float* sin, A* y, u64 rows, int heads, int c,
                int w, float eps, int halves) {
  SHARED_MEMORY(memory);
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, e = lane * 8;
  float* head = (float*)memory + warp * c;
  u64 row = (u64)blockIdx.x * (blockDim.x >> 5) + warp;
  int limit = row < rows ? c : 0;
  u64 start = row * c;
  Eight<X> h;
  h.set_zero();
  if (e < limit) h.load(x + start + e);
  float squares = 0.0f, unused = 0.0f;
  if (e < limit)
    UNROLL for (int i = 0; i < 8; i++) {
      float d = h.get(i);
      squares += d * d;
    }
  row_sums(squares, unused, head, 1);
  float scale = inverse_root(squares / (float)c, eps);
  if (e < limit) {
    Eight<W> v;
    v.load_cached(weight + e);
    UNROLL for (int i = 0; i < 4; i++) {
      h.set_pair(i, h.get(2 * i) * scale, h.get(2 * i + 1) * scale);
      h.set_pair(i, h.get(2 * i) * v.get(2 * i), h.get(2 * i + 1) * v.get(2 * i + 1));
    }
    UNROLL for (int i = 0; i < 8; i++) head[e + i] = h.get(i);
  }
  warp_barrier();
  if (e >= limit) return;
  u64 angle = row / heads * w;
  float out[8];
  UNROLL for (int i = 0; i < 8; i++) {
    int at = e + i;
    out[i] = h.get(i);
    if (at < 2 * w) {
      bool is_first = halves ? at < w : !(at & 1);
      int pair = halves ? (is_first ? at : at - w) : at >> 1;
      int other = halves ? (is_first ? at + w : at - w) : at ^ 1;
      out[i] = rotated(out[i], head[other], cos[angle + pair], sin[angle + pair], is_first);
    }
  }
  UNROLL for (int i = 0; i < 4; i++) h.set_pair(i, out[2 * i], out[2 * i + 1]);
  h.store(y + start + e);
}
#endif

// ---- backward

// What a row's statistics give its elements.
struct Row {
  float mean, scale, mean_g, mean_gx;
};

// g = dy * weight and d = x - mean.
DEVICE float input_gradient(const Row& r, float g, float d) {
  return r.scale * (g - r.mean_g - d * r.scale * r.mean_gx);
}
// The factor of dy in the weight's gradient.
DEVICE float normal_of(const Row& r, float d) {
  float normal = d * r.scale;
  return LAYER ? normal : Activation::widen(Activation::narrow(normal));
}
DEVICE Row row_of(float mean, float mean_g, float squares, float gx, int c, float eps) {
  float scale = inverse_root(squares / (float)c, eps);
  Row r = {mean, scale, mean_g, scale * (gx / (float)c)};
  return r;
}

template <int CHUNKS>
DEVICE void load_row(Eight<X> (&v)[CHUNKS], const A* from, int t, int row_threads, int limit) {
  UNROLL for (int k = 0; k < CHUNKS; k++) {
    int e = (k * row_threads + t) * 8;
    v[k].set_zero();
    if (e < limit) v[k].load(from + e);
  }
}

// CHUNKS chunks a thread, else as `forward`. d_sum, if there is one, is added to dx: the gradient that reaches the
// residual sum directly. PREFETCH loads a group's next row before it works on this one.
template <int CHUNKS, bool PREFETCH>
DEVICE void backward_rows(const A* x, const P* weight, const A* dy, const A* d_sum, A* dx, float* partials, u64 rows,
                          int c, float eps, int row_threads, float* shared) {
  int group = threadIdx.x / row_threads, t = threadIdx.x - group * row_threads, warps_per_row = row_threads >> 5;
  int per_block = blockDim.x / row_threads;
  u64 step = (u64)gridDim.x * per_block, row = (u64)blockIdx.x * per_block + group;
  Eight<W> w[CHUNKS];
  Eight<X> hs[CHUNKS], ds[CHUNKS], next_h[CHUNKS], next_d[CHUNKS];
  float d_weight[CHUNKS][8], d_bias[CHUNKS][8];
  UNROLL for (int k = 0; k < CHUNKS; k++) {
    int e = (k * row_threads + t) * 8;
    w[k].set_zero();
    if (e < c) w[k].load_cached(weight + e);
    UNROLL for (int i = 0; i < 8; i++) d_weight[k][i] = 0.0f, d_bias[k][i] = 0.0f;
  }
  if (PREFETCH) {
    int limit = row < rows ? c : 0;
    load_row(next_h, x + row * c, t, row_threads, limit);
    load_row(next_d, dy + row * c, t, row_threads, limit);
  }
  // Warps of one block leave together: the first row of the block decides.
  int turn = 0;
  for (u64 first = row - group; first < rows; first += step, row += step, turn ^= 1) {
    int limit = row < rows ? c : 0;
    u64 start = row * c;
    if (PREFETCH) {
      UNROLL for (int k = 0; k < CHUNKS; k++) hs[k] = next_h[k], ds[k] = next_d[k];
      int next_limit = row + step < rows ? c : 0;
      load_row(next_h, x + (row + step) * c, t, row_threads, next_limit);
      load_row(next_d, dy + (row + step) * c, t, row_threads, next_limit);
    } else {
      load_row(hs, x + start, t, row_threads, limit);
      load_row(ds, dy + start, t, row_threads, limit);
    }
    float mean = 0.0f, mean_g = 0.0f, squares = 0.0f, gx = 0.0f;
    // Two sums a round; a round's shared memory is free again when all warps have passed the next round's barrier.
    float* space = shared + (LAYER ? 0 : turn) * 2 * (blockDim.x >> 5);
    if (LAYER) {
      UNROLL for (int k = 0; k < CHUNKS; k++)
        UNROLL for (int i = 0; i < 8; i++) mean += hs[k].get(i), mean_g += ds[k].get(i) * w[k].get(i);
      row_sums(mean, mean_g, space, warps_per_row);
      mean = mean / (float)c, mean_g = mean_g / (float)c;
      space += 2 * (blockDim.x >> 5);
    }
    UNROLL for (int k = 0; k < CHUNKS; k++)
      if ((k * row_threads + t) * 8 < limit)
        UNROLL for (int i = 0; i < 8; i++) {
          float d = hs[k].get(i) - mean;
          squares += d * d;
          gx += ds[k].get(i) * w[k].get(i) * d;
        }
    row_sums(squares, gx, space, warps_per_row);
    Row r = row_of(mean, mean_g, squares, gx, c, eps);
    UNROLL for (int k = 0; k < CHUNKS; k++) {
      int e = (k * row_threads + t) * 8;
      if (e < limit) {
        Eight<X> extra;
        extra.set_zero();
        if (d_sum) extra.load(d_sum + start + e);
        UNROLL for (int i = 0; i < 4; i++) {
          float out[2];
          UNROLL for (int j = 2 * i; j < 2 * i + 2; j++) {
            float d = hs[k].get(j) - mean, dy_j = ds[k].get(j);
            d_weight[k][j] += dy_j * normal_of(r, d);
            if (LAYER) d_bias[k][j] += dy_j;
            out[j & 1] = input_gradient(r, dy_j * w[k].get(j), d) + extra.get(j);
          }
          hs[k].set_pair(i, out[0], out[1]);
        }
        hs[k].store(dx + start + e);
      }
    }
  }
  float* own = partials + ((u64)blockIdx.x * per_block + group) * PARAMS * c;
  UNROLL for (int k = 0; k < CHUNKS; k++) {
    int e = (k * row_threads + t) * 8;
    if (e < c) {
      UNROLL for (int h = 0; h < 8; h += 4) {
        *(float4*)(own + e + h) =
            make_float4(d_weight[k][h], d_weight[k][h + 1], d_weight[k][h + 2], d_weight[k][h + 3]);
        if (LAYER)
          *(float4*)(own + c + e + h) = make_float4(d_bias[k][h], d_bias[k][h + 1], d_bias[k][h + 2], d_bias[k][h + 3]);
      }
    }
  }
}

// c <= 16 * row_threads.
KERNEL(512, 1)
backward(const A* x, const P* weight, const A* dy, const A* d_sum, A* dx, float* partials, u64 rows, int c, float eps,
         int row_threads) {
  SHARED_MEMORY(memory);
  backward_rows<2, X != TYPE_F32>(x, weight, dy, d_sum, dx, partials, rows, c, eps, row_threads, (float*)memory);
}

// c <= 32 * row_threads; what needs more registers than there are does not have it.
#if !LAYER && X != TYPE_F32
KERNEL(512, 1)
backward_wide(const A* x, const P* weight, const A* dy, const A* d_sum, A* dx, float* partials, u64 rows, int c,
              float eps, int row_threads) {
  SHARED_MEMORY(memory);
  backward_rows<4, false>(x, weight, dy, d_sum, dx, partials, rows, c, eps, row_threads, (float*)memory);
}
#endif

// Groups are blocks; their sums are kept in `partials`.
KERNEL(256, 2)
backward_any(const A* x, const P* weight, const A* dy, const A* d_sum, A* dx, float* partials, u64 rows, int c,
             float eps, int row_threads) {
  SHARED_MEMORY(memory);
  float* shared = (float*)memory;
  int warps = blockDim.x >> 5, turn = 0;
  float* own = partials + (u64)blockIdx.x * PARAMS * c;
  for (u64 row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    u64 start = row * c;
    float mean = 0.0f, mean_g = 0.0f, squares = 0.0f, gx = 0.0f;
    float* space = shared + (LAYER ? 0 : turn) * 2 * warps;
    if (LAYER) {
      for (int e = threadIdx.x; e < c; e += blockDim.x) {
        mean += Activation::widen(x[start + e]);
        mean_g += Activation::widen(dy[start + e]) * Parameter::widen(weight[e]);
      }
      row_sums(mean, mean_g, space, warps);
      mean = mean / (float)c, mean_g = mean_g / (float)c;
      space += 2 * warps;
    }
    for (int e = threadIdx.x; e < c; e += blockDim.x) {
      float d = Activation::widen(x[start + e]) - mean;
      squares += d * d;
      gx += Activation::widen(dy[start + e]) * Parameter::widen(weight[e]) * d;
    }
    row_sums(squares, gx, space, warps);
    Row r = row_of(mean, mean_g, squares, gx, c, eps);
    bool fresh = row == blockIdx.x;
    for (int e = threadIdx.x; e < c; e += blockDim.x) {
      float d = Activation::widen(x[start + e]) - mean, dy_e = Activation::widen(dy[start + e]);
      float extra = d_sum ? Activation::widen(d_sum[start + e]) : 0.0f;
      dx[start + e] = Activation::narrow(input_gradient(r, dy_e * Parameter::widen(weight[e]), d) + extra);
      own[e] = (fresh ? 0.0f : own[e]) + dy_e * normal_of(r, d);
      if (LAYER) own[c + e] = (fresh ? 0.0f : own[c + e]) + dy_e;
    }
  }
}

// d_weight [c] and d_bias [c] (layer) from partials [groups, PARAMS * c]: a block of 1024 threads has 32 columns;
// warp s adds groups s, s + 32, ..., then the 32 sums are added in order.
KERNEL(1024, 1) sum_partials(const float* partials, int groups, int c, float* d_weight, float* d_bias) {
  SHARED_MEMORY(memory);
  float* shared = (float*)memory;
  int lane = threadIdx.x & 31, segment = threadIdx.x >> 5, width = PARAMS * c, column = blockIdx.x * 32 + lane;
  float sum = 0.0f;
  for (int first = segment; first < groups; first += 256) {
    float next[8];
    UNROLL for (int i = 0; i < 8; i++) {
      int g = first + 32 * i;
      next[i] = g < groups && column < width ? partials[(u64)g * width + column] : 0.0f;
    }
    UNROLL for (int i = 0; i < 8; i++) sum += next[i];
  }
  shared[segment * 32 + lane] = sum;
  block_barrier();
  if (segment != 0 || column >= width) return;
  sum = 0.0f;
  for (int s = 0; s < 32; s++) sum += shared[s * 32 + lane];
  if (column < c)
    d_weight[column] = sum;
  else
    d_bias[column - c] = sum;
}
