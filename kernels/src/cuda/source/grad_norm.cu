// The sum of squares of gradients, bit-equal to optim::clip::SquareSum, and what follows from it.
//
// Defines: GRAD (TYPE_*). Bytes: n * (size of GRAD), and 8 per 4096 elements twice. Operations: 11 f32 an element.
//
// Legend: block b = elements [4096 b, 4096 b + 4096) of the window; element i of a block belongs to lane i % 256 of 256
//   sums of two floats (optim/src/squares.rs has the definition). One warp sums one block, a thread eight lanes.
//   16-bit: thread t loads 8 elements, lanes 8t..8t+8, quads (four lanes) 2t and 2t + 1;
//   f32: thread t loads 2 x 4 elements, lanes 4t..4t+4 and 128 + 4t.., quads t and t + 32.
//   The 64 quads are halved: x[k] += x[k + half], half = 32, 16, ..., 1. A block's sum is an f64.
//   `total` adds block sums in 1024 lanes.
//
// Few cards are fast in f64: a GeForce multiplies and adds two f64 a clock and multiprocessor, and loads more elements.

#define LANES 256
#define BLOCK_LANES 1024
#define BLOCK 4096
// Largest magnitudes with which a block is summed as it is: from 2^-40, and below 2^50.
#define SMALLEST_PLAIN 9.094947017729282e-13f
#define LARGEST_PLAIN 1.125899906842624e15f

typedef Element<GRAD> Grad;

// What a thread adds of 256 elements.
DEVICE void load_run(Eight<TYPE_F32>& x, const float* run, int t) {
  x.set_half(0, load_streaming((const uint4*)run + t));
  x.set_half(1, load_streaming((const uint4*)run + 32 + t));
}
template <int T>
DEVICE void load_run(Eight<T>& x, const u16* run, int t) {
  x.load(run + 8 * t);
}
// The lane of its i-th element.
DEVICE int lane_of(int i, int t) { return GRAD == TYPE_F32 ? (i >> 2) * 128 + 4 * t + (i & 3) : 8 * t + i; }

// The exact sum of two floats, of which `low` collects what rounding takes from `high`.
struct Pair {
  float high, low;
};
// high = high + x rounded; returns the error, which is exact (Knuth).
DEVICE float add_to(float& high, float x) {
  float sum = add_rn(high, x);
  float of_x = sub_rn(sum, high);
  float error = add_rn(sub_rn(high, sub_rn(sum, of_x)), sub_rn(x, of_x));
  high = sum;
  return error;
}
DEVICE void add_square(Pair& sum, float x) {
  float square = mul_rn(x, x);
  float error = fma_rn(x, x, -square);
  sum.low = add_rn(sum.low, add_rn(add_to(sum.high, square), error));
}
DEVICE Pair operator+(Pair a, Pair b) {
  float lost = add_to(a.high, b.high);
  a.low = add_rn(add_rn(a.low, b.low), lost);
  return a;
}
DEVICE Pair shuffle_xor(Pair x, int mask) { return {shuffle_xor(x.high, mask), shuffle_xor(x.low, mask)}; }

// Adds the squares of `count` elements times `factor`; returns the largest magnitude of an element.
DEVICE float add_elements(Pair (&lanes)[8], const Grad::Stored* x, int count, float factor, int t) {
  float largest = 0.0f;
  for (int run = 0; run < count; run += LANES)
    UNROLL for (int i = 0; i < 8; i++) {
      int e = run + lane_of(i, t);
      float v = e < count ? Grad::widen(x[e]) : 0.0f;
      add_square(lanes[i], mul_rn(v, factor));
      largest = fmaxf(largest, fabsf(v));
    }
  return largest;
}

// sums[b] = sum of squares of block b of x [n]; any alignment.
KERNEL(256, 3) block_sums(const Grad::Stored* x, double* sums, u64 n) {
  int t = threadIdx.x & 31;
  u64 block = (u64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (block * BLOCK >= n) return;
  x += block * BLOCK;
  u64 left = n - block * BLOCK;
  int count = left < BLOCK ? (int)left : BLOCK;
  Pair lanes[8];
  UNROLL for (int i = 0; i < 8; i++) lanes[i] = {0.0f, 0.0f};
  float largest = 0.0f;
  if (left >= BLOCK && ((u64)x & 15) == 0) {
    UNROLL for (int half = 0; half < 2; half++) {
      Eight<GRAD> runs[8];
      UNROLL for (int r = 0; r < 8; r++) load_run(runs[r], x + (half * 8 + r) * LANES, t);
      UNROLL for (int r = 0; r < 8; r++)
        UNROLL for (int i = 0; i < 8; i++) {
          float v = runs[r].get(i);
          add_square(lanes[i], v);
          largest = fmaxf(largest, fabsf(v));
        }
    }
  } else {
    largest = add_elements(lanes, x, count, 1.0f, t);
  }
  UNROLL for (int mask = 16; mask > 0; mask >>= 1) largest = fmaxf(largest, shuffle_xor(largest, mask));
  double back = 1.0;
  // Squares that could overflow, or whose errors could vanish: again, with the largest magnitude moved into [2, 4).
  if (largest != 0.0f && !(largest >= SMALLEST_PLAIN && largest < LARGEST_PLAIN)) {
    u32 exponent = bits_of_float(largest) >> 23;
    if (exponent == 0) exponent = 1;
    UNROLL for (int i = 0; i < 8; i++) lanes[i] = {0.0f, 0.0f};
    add_elements(lanes, x, count, float_of_bits((255u - exponent) << 23), t);
    back = (double)float_of_bits(exponent << 23) * 0.5;
  }
  Pair low = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  Pair high = (lanes[4] + lanes[5]) + (lanes[6] + lanes[7]);
  if (GRAD == TYPE_F32) low = low + high;
  UNROLL for (int mask = 16; mask > 0; mask >>= 1) {
    low = low + shuffle_xor(low, mask);
    if (GRAD != TYPE_F32) high = high + shuffle_xor(high, mask);
  }
  if (GRAD != TYPE_F32) low = low + high;
  if (t == 0) sums[block] = mul_rn(add_rn((double)low.high, (double)low.low), mul_rn(back, back));
}

// sum = (accumulate ? sum : 0) + the sum of sums [blocks], in one block of 1024 threads.
KERNEL(1024, 1) total(const double* sums, u64 blocks, double* sum, int accumulate) {
  SHARED_MEMORY(memory);
  double* shared = (double*)memory;
  int t = threadIdx.x;
  double lane = 0.0;
  for (u64 first = t; first < blocks; first += 8 * BLOCK_LANES) {
    double next[8];
    // A sum that is not there counts as zero: squares are not negative, so adding it changes nothing.
    UNROLL for (int i = 0; i < 8; i++) {
      u64 b = first + (u64)i * BLOCK_LANES;
      next[i] = b < blocks ? sums[b] : 0.0;
    }
    UNROLL for (int i = 0; i < 8; i++) lane = add_rn(lane, next[i]);
  }
  shared[t] = lane;
  for (int half = BLOCK_LANES / 2; half >= 32; half >>= 1) {
    block_barrier();
    if (t < half) shared[t] = add_rn(shared[t], shared[t + half]);
  }
  if (t >= 32) return;
  warp_barrier();
  lane = shared[t];
  UNROLL for (int mask = 16; mask > 0; mask >>= 1) lane = add_rn(lane, shuffle_xor(lane, mask));
  if (t == 0) *sum = add_rn(accumulate ? *sum : 0.0, lane);
}

#if GRAD == TYPE_F32
// sums [ranks, 3] = each rank's sum of squares, sum of losses, number of tokens; added in the order of ranks.
// optim::clip::GradientScale, and whether the step is skipped. An infinite max_norm never clips.
KERNEL(32, 1) clip(const double* sums, int ranks, float max_norm, Clip* out) {
  if (threadIdx.x != 0) return;
  double squares = 0.0, loss = 0.0, tokens = 0.0;
  for (int r = 0; r < ranks; r++) {
    squares = add_rn(squares, sums[3 * r]);
    loss = add_rn(loss, sums[3 * r + 1]);
    tokens = add_rn(tokens, sums[3 * r + 2]);
  }
  if (tokens < 1.0) tokens = 1.0;
  double norm = div_rn(sqrt_rn(squares), tokens);
  double factor = div_rn((double)max_norm, add_rn(norm, 1e-6));
  factor = factor < 1.0 ? factor : 1.0;
  // A difference that is not zero: infinite or NaN.
  bool skip = !(norm - norm == 0.0 && loss - loss == 0.0);
  out->norm = norm;
  out->loss = div_rn(loss, tokens);
  out->factor = skip ? 0.0f : (float)div_rn(factor, tokens);
  out->skip = skip;
}
#endif
