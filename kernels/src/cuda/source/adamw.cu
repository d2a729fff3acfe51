// One AdamW step over a window of n elements, bit-equal to optim::AdamW (any NaN counts as equal): single operations
// rounded to nearest even in the order of optim/src/adamw/update.rs, random bits as optim/src/rounding.rs makes them.
//
// Defines: GRAD (TYPE_* of the gradient), FORM. Bytes per element, reads and writes, without and with the gradient:
//   FORM            weight                        moments                    bytes   + 16-bit grad   + f32 grad
//   FORM_F32        f32                           f32                        24      26              28
//   FORM_MASTER_*   f32 master, bf16 or f16 copy  f32                        26      28              30
//   FORM_BF16       bf16, stochastic rounding     f32                        20      22              24
//   FORM_PURE_BF16  bf16, stochastic rounding     bf16, stochastic rounding  12      14              16
// FORM_BLOCKS + a form has its weights, and moments of 8 bits in blocks of 256 elements: 12, 14, 14 or 8 bytes without the
// gradient, and 16 bytes of absmax per block. That update has the order of bitsandbytes' kernel, as
// optim/src/adamw/blockwise.rs: decay after the update, and elements whose gradient is not finite keep their weight.
//
// Legend: element i of the window is element first_element + i of the run, the position in the rounding stream:
//   elements 2k and 2k + 1 share three words hashed from k; the low and high half of word 0 round the weight, of
//   word 1 the first moment, of word 2 the second. 2^32 pairs (a page) share a key, the Philox block at counter
//   (page, step).
//   [0, head) single elements | [head, head + body) WIDTH per thread, aligned | the rest single elements.
//   The launch chooses head so that all windows are aligned behind it; head = n when no head aligns them all.
// The factor on every gradient is scalars.grad_scale * clip.factor, one f32 product: with grad_scale = 1 it is the
// factor that the norm kernel wrote. A null clip stands for 1. With clip.skip set nothing is written.

#define FORM_F32 0
#define FORM_MASTER_BF16 1
#define FORM_MASTER_F16 2
#define FORM_BF16 3
#define FORM_PURE_BF16 4
#define FORM_BLOCKS 5

#define WEIGHTS (FORM >= FORM_BLOCKS ? FORM - FORM_BLOCKS : FORM)
#define WEIGHT (WEIGHTS >= FORM_BF16 ? TYPE_BF16 : TYPE_F32)
#define MOMENT (FORM == FORM_PURE_BF16 ? TYPE_BF16 : TYPE_F32)
#define HAS_COPY (WEIGHTS == FORM_MASTER_BF16 || WEIGHTS == FORM_MASTER_F16)
#define COPY (WEIGHTS == FORM_MASTER_F16 ? TYPE_F16 : TYPE_BF16)
#define ROUNDED (WEIGHTS >= FORM_BF16)

// kernels::Scalars.
struct Scalars {
  float grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, decay;
  u32 key[2], step[2];
};

struct Constants {
  float grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2;
  float eps, step_size, decay;
  Rounding rounding;
};

// Reads the constants of a window. Returns false if the step is skipped.
DEVICE bool begin(Constants& c, const Scalars* scalars, const Clip* clip, u64 first_element) {
  c.grad_scale = scalars->grad_scale;
  if (clip) {
    if (clip->skip) return false;
    c.grad_scale = mul_rn(c.grad_scale, clip->factor);
  }
  c.beta1 = scalars->beta1;
  c.one_minus_beta1 = scalars->one_minus_beta1;
  c.beta2 = scalars->beta2;
  c.one_minus_beta2 = scalars->one_minus_beta2;
  c.eps = scalars->eps;
  c.step_size = scalars->step_size;
  c.decay = scalars->decay;
  UNROLL for (int i = 0; i < 2; i++) {
    c.rounding.key[i] = scalars->key[i];
    c.rounding.time[i] = scalars->step[i];
  }
  if (ROUNDED) turn_to(c.rounding, first_element >> 33);
  return true;
}

// Random bits of element `element` of the run: the low 16 of each word.
DEVICE void draw(Constants& c, u64 element, u32 (&words)[3]) {
  if (element >> 33 != c.rounding.page) turn_to(c.rounding, element >> 33);
  hash(c.rounding, (u32)(element >> 1), words);
  UNROLL for (int s = 0; s < 3; s++) words[s] = element & 1 ? words[s] >> 16 : words[s] & 0xffffu;
}

// ---- stores

// Stores exactly, or with stochastic rounding.
DEVICE void put(float& x, float value, u32) { x = value; }
DEVICE void put(u16& x, float value, u32 random16) { x = stochastic_round(value, random16); }
template <int N>
DEVICE void put_pair(Several<TYPE_F32, N>& x, int k, float low, float high, u32) {
  x.set_pair(k, low, high);
}
template <int N>
DEVICE void put_pair(Several<TYPE_BF16, N>& x, int k, float low, float high, u32 random) {
  x.words[k] = stochastic_round_pair(low, high, random);
}

typedef Element<GRAD> Grad;
typedef Element<WEIGHT> Weight;
typedef Element<MOMENT> Moment;
typedef Element<COPY> Copy;

#if FORM < FORM_BLOCKS
// ---- the update

DEVICE void update(const Constants& c, float gradient, float& w, float& m, float& v) {
  float g = mul_rn(gradient, c.grad_scale);
  m = add_rn(m, mul_rn(sub_rn(g, m), c.one_minus_beta1));
  v = add_rn(mul_rn(v, c.beta2), mul_rn(mul_rn(g, g), c.one_minus_beta2));
  float denominator = add_rn(sqrt_rn(v), c.eps);
  w = sub_rn(mul_rn(w, c.decay), div_rn(mul_rn(c.step_size, m), denominator));
}

// ---- the window

// Elements of a lane.
constexpr int WIDTH = GRAD == TYPE_F32 || WEIGHT == TYPE_F32 || MOMENT == TYPE_F32 ? 4 : 8;

struct Window {
  const Grad::Stored* grad;
  Weight::Stored* weight;
  u16* copy;
  Moment::Stored* exp_avg;
  Moment::Stored* exp_avg_sq;
  u64 first_element;
};

DEVICE void step_one(Constants& c, const Window& at, u64 i) {
  float w = Weight::widen(at.weight[i]), m = Moment::widen(at.exp_avg[i]), v = Moment::widen(at.exp_avg_sq[i]);
  update(c, Grad::widen(at.grad[i]), w, m, v);
  u32 words[3] = {0, 0, 0};
  if (ROUNDED) draw(c, at.first_element + i, words);
  put(at.weight[i], w, words[0]);
  put(at.exp_avg[i], m, words[1]);
  put(at.exp_avg_sq[i], v, words[2]);
  if (HAS_COPY) at.copy[i] = Copy::narrow(w);
}

// Returns false, with nothing written, when a number is too large for the pairwise rounding or a page ends inside.
DEVICE bool step_several(Constants& c, const Window& at, u64 i) {
  Several<GRAD, WIDTH> grad;
  Several<WEIGHT, WIDTH> weight;
  Several<MOMENT, WIDTH> exp_avg, exp_avg_sq;
  Several<COPY, WIDTH> copy;
  grad.load(at.grad + i);
  weight.load(at.weight + i);
  exp_avg.load(at.exp_avg + i);
  exp_avg_sq.load(at.exp_avg_sq + i);
  // An odd first element begins with the high half of a word: the elements then touch one pair more.
  u64 pair = (at.first_element + i) >> 1;
  bool odd = (at.first_element + i) & 1;
  u32 words[3] = {0, 0, 0}, next[3] = {0, 0, 0};
  if (ROUNDED) {
    if (pair >> 32 != c.rounding.page) turn_to(c.rounding, pair >> 32);
    if (pair + WIDTH / 2 >> 32 != c.rounding.page) return false;
    hash(c.rounding, (u32)pair, next);
  }
  // Becomes infinite or NaN when a number to be rounded is 2^127 or more, infinite or NaN.
  float sum = 0.0f;
  UNROLL for (int k = 0; k < WIDTH / 2; k++) {
    float w[2], m[2], v[2];
    UNROLL for (int h = 0; h < 2; h++) {
      w[h] = weight.get(2 * k + h), m[h] = exp_avg.get(2 * k + h), v[h] = exp_avg_sq.get(2 * k + h);
      update(c, grad.get(2 * k + h), w[h], m[h], v[h]);
      if (ROUNDED) sum = fma_rn(fabsf(w[h]), 2.0f, sum);
      if (MOMENT == TYPE_BF16) sum = fma_rn(fabsf(v[h]), 2.0f, fma_rn(fabsf(m[h]), 2.0f, sum));
    }
    if (ROUNDED) {
      UNROLL for (int s = 0; s < 3; s++) words[s] = next[s];
      if (k < WIDTH / 2 - 1 || odd) hash(c.rounding, (u32)pair + k + 1, next);
      UNROLL for (int s = 0; s < 3; s++) words[s] = (u32)(((u64)next[s] << 32 | words[s]) >> (odd ? 16 : 0));
    }
    put_pair(weight, k, w[0], w[1], words[0]);
    put_pair(exp_avg, k, m[0], m[1], words[1]);
    put_pair(exp_avg_sq, k, v[0], v[1], words[2]);
    if (HAS_COPY) copy.set_pair(k, w[0], w[1]);
  }
  if (ROUNDED && !(fabsf(sum) < float_of_bits(0x7f800000u))) return false;
  weight.store_streaming(at.weight + i);
  exp_avg.store_streaming(at.exp_avg + i);
  exp_avg_sq.store_streaming(at.exp_avg_sq + i);
  if (HAS_COPY) copy.store_streaming(at.copy + i);
  return true;
}

KERNEL(256, 3)
adamw(const Grad::Stored* grad, Weight::Stored* weight, u16* copy, Moment::Stored* exp_avg,
      Moment::Stored* exp_avg_sq, const Scalars* scalars, const Clip* clip, u64 n, u64 first_element, u64 head) {
  Constants c;
  if (!begin(c, scalars, clip, first_element)) return;
  Window at = {grad, weight, copy, exp_avg, exp_avg_sq, first_element};

  // The thread's elements of the body, one by one where they are large; then what the body leaves over.
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
  u64 body = (n - head) / 8 * 8;
  for (u64 i = head + thread * WIDTH; i < head + body; i += threads * WIDTH)
    if (!step_several(c, at, i))
      for (u64 j = i; j < i + WIDTH; j++) step_one(c, at, j);
  for (u64 i = thread; i < n - body; i += threads) step_one(c, at, i < head ? i : i + body);
}
#else
// ---- moments of 8 bits

// Values of the codes of both moments.
struct Maps {
  float first[256], second[256];
};

// optim::adamw::blockwise::search: the code of a number, by the binary search of bitsandbytes' kernel.
template <bool SIGNED>
DEVICE u8 search(const float* map, float x) {
  int pivot = 127, lower = 0, upper = 255;
  float low = SIGNED ? -1.0f : 0.0f, high = 1.0f;
  UNROLL for (int step = 64; step > 0; step >>= 1) {
    float at = map[pivot];
    if (x > at) {
      lower = pivot, low = at, pivot += step;
    } else {
      upper = pivot, high = at, pivot -= step;
    }
  }
  float at = map[pivot];
  int nearer = x > at ? (x > mul_rn(add_rn(high, at), 0.5f) ? upper : pivot)
                      : (x < mul_rn(add_rn(low, at), 0.5f) ? lower : pivot);
  // A code of the other sign than the number's moves by one.
  if (SIGNED && (bits_of_float(map[nearer]) ^ bits_of_float(x)) >> 31) nearer += x > 0.0f ? 1 : -1;
  return (u8)nearer;
}

// Code of a moment in a block of this absmax. A block of zeros has the codes at which the search for 0 / 0 ends.
template <bool SIGNED>
DEVICE u8 encode(const float* map, float x, float absmax) {
  u32 quotient = bits_of_float(div_rn(x, absmax)) & 0x7fffffffu;
  u32 y = absmax == 0.0f ? 0x7fc00000u : quotient | (bits_of_float(x) & 0x80000000u);
  return search<SIGNED>(map, float_of_bits(y));
}

// The largest of a warp's magnitudes. As integers they are ordered like the numbers, infinity and NaN included.
DEVICE float largest(u32 magnitude) {
  UNROLL for (int mask = 16; mask > 0; mask >>= 1) {
    u32 other = shuffle_xor(magnitude, mask);
    magnitude = other > magnitude ? other : magnitude;
  }
  return float_of_bits(magnitude);
}

// A warp updates 256 elements: its lanes take one in 32 each.
KERNEL(256, 2)
adamw_blocks(const Grad::Stored* grad, Weight::Stored* weight, u16* copy, u8* exp_avg, u8* exp_avg_sq,
             float* exp_avg_absmax, float* exp_avg_sq_absmax, const Scalars* scalars, const Clip* clip, u64 n,
             u64 first_element) {
  SHARED_MEMORY(memory);
  Maps* maps = (Maps*)memory;
  Constants c;
  if (!begin(c, scalars, clip, first_element)) return;
  // As bitsandbytes computes them.
  c.one_minus_beta1 = sub_rn(1.0f, c.beta1);
  c.one_minus_beta2 = sub_rn(1.0f, c.beta2);
  maps->first[threadIdx.x] = signed_value(threadIdx.x);
  maps->second[threadIdx.x] = unsigned_value(threadIdx.x);
  block_barrier();
  int lane = threadIdx.x & 31;
  u64 warps = (u64)gridDim.x * 8;
  for (u64 block = (u64)blockIdx.x * 8 + (threadIdx.x >> 5); block * 256 < n; block += warps) {
    u64 start = block * 256;
    int count = n - start < 256 ? (int)(n - start) : 256;
    float absmax_m = exp_avg_absmax[block], absmax_v = exp_avg_sq_absmax[block];
    float w[8], m[8], v[8];
    u32 most_m = 0, most_v = 0;
    UNROLL for (int j = 0; j < 8; j++) {
      int own = 32 * j + lane;
      bool is_there = own < count;
      float g = is_there ? Grad::widen(grad[start + own]) : 0.0f;
      w[j] = is_there ? Weight::widen(weight[start + own]) : 0.0f;
      m[j] = mul_rn(maps->first[is_there ? exp_avg[start + own] : 127], absmax_m);
      v[j] = mul_rn(maps->second[is_there ? exp_avg_sq[start + own] : 0], absmax_v);
      g = mul_rn(g, c.grad_scale);
      v[j] = add_rn(mul_rn(v[j], c.beta2), mul_rn(mul_rn(c.one_minus_beta2, g), g));
      m[j] = add_rn(mul_rn(m[j], c.beta1), mul_rn(c.one_minus_beta1, g));
      if (fabsf(g) < float_of_bits(0x7f800000u)) {
        float quotient = div_rn(m[j], add_rn(sqrt_rn(v[j]), c.eps));
        w[j] = mul_rn(sub_rn(w[j], mul_rn(c.step_size, quotient)), c.decay);
      } else {
        m[j] = v[j] = 0.0f;
      }
      u32 of_m = bits_of_float(m[j]) & 0x7fffffffu, of_v = bits_of_float(v[j]) & 0x7fffffffu;
      most_m = of_m > most_m ? of_m : most_m;
      most_v = of_v > most_v ? of_v : most_v;
    }
    absmax_m = largest(most_m), absmax_v = largest(most_v);
    UNROLL for (int j = 0; j < 8; j++) {
      int own = 32 * j + lane;
      if (own >= count) continue;
      u32 words[3] = {0, 0, 0};
      if (ROUNDED) draw(c, first_element + start + own, words);
      put(weight[start + own], w[j], words[0]);
      if (HAS_COPY) copy[start + own] = Copy::narrow(w[j]);
      exp_avg[start + own] = encode<true>(maps->first, m[j], absmax_m);
      exp_avg_sq[start + own] = encode<false>(maps->second, v[j], absmax_v);
    }
    // All lanes have read the old ones.
    warp_barrier();
    if (lane == 0) exp_avg_absmax[block] = absmax_m, exp_avg_sq_absmax[block] = absmax_v;
  }
}
#endif
