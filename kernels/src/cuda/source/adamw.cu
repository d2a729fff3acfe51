// One AdamW step over a window of n elements, bit-equal to optim::AdamW (any NaN counts as equal): single operations
// rounded to nearest even in the order of optim/src/adamw/update.rs, random bits as optim/src/rounding.rs makes them.
//
// Defines: GRAD (TYPE_* of the gradient), FORM. Bytes per element, reads and writes, without and with the gradient:
//   FORM            weight                        moments                    bytes   + 16-bit grad   + f32 grad
//   FORM_F32        f32                           f32                        24      26              28
//   FORM_MASTER_*   f32 master, bf16 or f16 copy  f32                        26      28              30
//   FORM_BF16       bf16, stochastic rounding     f32                        20      22              24
//   FORM_PURE_BF16  bf16, stochastic rounding     bf16, stochastic rounding  12      14              16
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

#define WEIGHT (FORM >= FORM_BF16 ? TYPE_BF16 : TYPE_F32)
#define MOMENT (FORM == FORM_PURE_BF16 ? TYPE_BF16 : TYPE_F32)
#define HAS_COPY (FORM == FORM_MASTER_BF16 || FORM == FORM_MASTER_F16)
#define COPY (FORM == FORM_MASTER_F16 ? TYPE_F16 : TYPE_BF16)
#define ROUNDED (FORM >= FORM_BF16)

// kernels::Scalars.
struct Scalars {
  float grad_scale, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, decay;
  u32 key[2], step[2];
};

struct Constants {
  float grad_scale, one_minus_beta1, beta2, one_minus_beta2;
  float eps, step_size, decay;
  Rounding rounding;
};

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

// ---- the update

DEVICE void update(const Constants& c, float gradient, float& w, float& m, float& v) {
  float g = mul_rn(gradient, c.grad_scale);
  m = add_rn(m, mul_rn(sub_rn(g, m), c.one_minus_beta1));
  v = add_rn(mul_rn(v, c.beta2), mul_rn(mul_rn(g, g), c.one_minus_beta2));
  float denominator = add_rn(sqrt_rn(v), c.eps);
  w = sub_rn(mul_rn(w, c.decay), div_rn(mul_rn(c.step_size, m), denominator));
}

// ---- the window

typedef Element<GRAD> Grad;
typedef Element<WEIGHT> Weight;
typedef Element<MOMENT> Moment;
typedef Element<COPY> Copy;
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
  if (ROUNDED) {
    u64 element = at.first_element + i;
    if (element >> 33 != c.rounding.page) turn_to(c.rounding, element >> 33);
    hash(c.rounding, (u32)(element >> 1), words);
    UNROLL for (int s = 0; s < 3; s++) words[s] = element & 1 ? words[s] >> 16 : words[s] & 0xffffu;
  }
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
  c.grad_scale = scalars->grad_scale;
  if (clip) {
    if (clip->skip) return;
    c.grad_scale = mul_rn(c.grad_scale, clip->factor);
  }
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
  Window at = {grad, weight, copy, exp_avg, exp_avg_sq, first_element};

  // The thread's elements of the body, one by one where they are large; then what the body leaves over.
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
  u64 body = (n - head) / 8 * 8;
  for (u64 i = head + thread * WIDTH; i < head + body; i += threads * WIDTH)
    if (!step_several(c, at, i))
      for (u64 j = i; j < i + WIDTH; j++) step_one(c, at, j);
  for (u64 i = thread; i < n - body; i += threads) step_one(c, at, i < head ? i : i + body);
}
