// Operations on single elements, on pairs that rotate, and dropout. Every operation is rounded on its own, in the order
// in which the CPU computes, so the bits are the CPU's; results are rounded once on store.
// Defines: TYPE (TYPE_*: of all tensors; cosines and sines are f32).
// Bytes: every operand and result once. Operands are read, and results written, eight elements at a time where `wide`
// says that all addresses (and line lengths, where there are lines) are multiples of 16 bytes.

typedef Element<TYPE> E;
typedef E::Stored S;

// ---- functions of a number

DEVICE float exponential(float x) {
  // Comparisons that are false for NaN let it through.
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  ScaledExp e = scaled_exp(x);
  // Two factors, since 2^n alone does not fit the exponent at either end.
  int half = e.n >> 1;
  return mul_rn(mul_rn(e.p, power_of_two(half)), power_of_two((int)((u32)e.n - (u32)half)));
}
DEVICE float sigmoid(float x) { return div_rn(1.0f, add_rn(1.0f, exponential(-x))); }

// The argument of tanh in the tanh form of GELU, and its derivative.
#define TANH_SCALE 0.7978846f
#define TANH_CUBE 0.044715f
DEVICE float tanh_argument(float x) {
  float cube = mul_rn(mul_rn(mul_rn(TANH_CUBE, x), x), x);
  return mul_rn(TANH_SCALE, add_rn(x, cube));
}
DEVICE float tanh_slope(float x) {
  float square = mul_rn(mul_rn(mul_rn(3.0f, TANH_CUBE), x), x);
  return mul_rn(TANH_SCALE, add_rn(1.0f, square));
}

// Distribution function and density of the standard normal distribution.
struct Normal {
  float distribution, density;
};
DEVICE Normal normal(float x) {
  float e = exponential(mul_rn(mul_rn(-0.5f, x), x));
  float z = mul_rn(float_of_bits(bits_of_float(x) & 0x7fffffffu), 0.70710678118654752f);
  float t = div_rn(1.0f, add_rn(1.0f, mul_rn(0.4f, z)));
  float p = 0.03850851f;
  p = sub_rn(mul_rn(p, t), 0.12744644f);
  p = add_rn(mul_rn(p, t), 0.05845089f);
  p = add_rn(mul_rn(p, t), 0.11585861f);
  p = add_rn(mul_rn(p, t), 0.061465688f);
  p = add_rn(mul_rn(p, t), 0.20074255f);
  p = add_rn(mul_rn(p, t), 0.20012526f);
  p = add_rn(mul_rn(p, t), 0.22667327f);
  p = add_rn(mul_rn(p, t), 0.2256217f);
  float tail = mul_rn(mul_rn(mul_rn(0.5f, e), t), p);
  return {x > 0.0f ? sub_rn(1.0f, tail) : tail, mul_rn(e, 0.3989423f)};
}

// ---- elements

// y = f(x), y = f(a, b): eight elements a thread and round.
template <class F>
DEVICE void map(const S* x, S* y, u64 n, int wide, F f) {
  u64 stride = (u64)gridDim.x * blockDim.x * 8;
  for (u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < n; i += stride) {
    if (wide && i + 8 <= n) {
      Eight<TYPE> from, to;
      from.load(x + i);
      UNROLL for (int j = 0; j < 4; j++) to.set_pair(j, f(from.get(2 * j)), f(from.get(2 * j + 1)));
      to.store(y + i);
    } else {
      for (u64 j = i; j < n && j < i + 8; j++) y[j] = E::narrow(f(E::widen(x[j])));
    }
  }
}
template <class F>
DEVICE void map(const S* a, const S* b, S* y, u64 n, int wide, F f) {
  u64 stride = (u64)gridDim.x * blockDim.x * 8;
  for (u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < n; i += stride) {
    if (wide && i + 8 <= n) {
      Eight<TYPE> p, q, to;
      p.load(a + i), q.load(b + i);
      UNROLL for (int j = 0; j < 4; j++)
        to.set_pair(j, f(p.get(2 * j), q.get(2 * j)), f(p.get(2 * j + 1), q.get(2 * j + 1)));
      to.store(y + i);
    } else {
      for (u64 j = i; j < n && j < i + 8; j++) y[j] = E::narrow(f(E::widen(a[j]), E::widen(b[j])));
    }
  }
}

KERNEL(256, 4) add(const S* a, const S* b, S* y, u64 n, int wide) {
  map(a, b, y, n, wide, [](float a, float b) { return add_rn(a, b); });
}

KERNEL(256, 4) scale(const S* x, float factor, S* y, u64 n, int wide) {
  map(x, y, n, wide, [factor](float x) { return mul_rn(x, factor); });
}

// 0.5 (1 + tanh u) = sigmoid(2 u), without cancellation.
KERNEL(256, 4) gelu_tanh(const S* x, S* y, u64 n, int wide) {
  map(x, y, n, wide, [](float x) { return mul_rn(x, sigmoid(mul_rn(2.0f, tanh_argument(x)))); });
}
KERNEL(256, 4) gelu_tanh_backward(const S* x, const S* dy, S* dx, u64 n, int wide) {
  map(x, dy, dx, n, wide, [](float x, float dy) {
    float s = sigmoid(mul_rn(2.0f, tanh_argument(x)));
    float slope = mul_rn(mul_rn(mul_rn(mul_rn(x, s), sub_rn(1.0f, s)), 2.0f), tanh_slope(x));
    return mul_rn(dy, add_rn(s, slope));
  });
}
KERNEL(256, 4) gelu_erf(const S* x, S* y, u64 n, int wide) {
  map(x, y, n, wide, [](float x) { return mul_rn(x, normal(x).distribution); });
}
KERNEL(256, 4) gelu_erf_backward(const S* x, const S* dy, S* dx, u64 n, int wide) {
  map(x, dy, dx, n, wide, [](float x, float dy) {
    Normal at = normal(x);
    return mul_rn(dy, add_rn(at.distribution, mul_rn(x, at.density)));
  });
}

DEVICE float gated(float gate, float x) { return mul_rn(mul_rn(gate, sigmoid(gate)), x); }
DEVICE float d_gated(float gate, float up, float dy) {
  float s = sigmoid(gate);
  return mul_rn(mul_rn(mul_rn(dy, up), s), add_rn(1.0f, mul_rn(gate, sub_rn(1.0f, s))));
}

// silu(gate) * up
KERNEL(256, 4) swiglu(const S* gate, const S* up, S* y, u64 n, int wide) {
  map(gate, up, y, n, wide, [](float g, float u) { return gated(g, u); });
}
// Both gradients in one pass: 5 elements moved per element.
KERNEL(256, 4) swiglu_backward(const S* gate, const S* up, const S* dy, S* d_gate, S* d_up, u64 n, int wide) {
  u64 stride = (u64)gridDim.x * blockDim.x * 8;
  for (u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < n; i += stride) {
    if (wide && i + 8 <= n) {
      Eight<TYPE> g, u, d, dg, du;
      g.load(gate + i), u.load(up + i), d.load(dy + i);
      UNROLL for (int j = 0; j < 4; j++) {
        int a = 2 * j, b = a + 1;
        dg.set_pair(j, d_gated(g.get(a), u.get(a), d.get(a)), d_gated(g.get(b), u.get(b), d.get(b)));
        du.set_pair(j, gated(g.get(a), d.get(a)), gated(g.get(b), d.get(b)));
      }
      dg.store(d_gate + i), du.store(d_up + i);
    } else {
      for (u64 j = i; j < n && j < i + 8; j++) {
        float g = E::widen(gate[j]), u = E::widen(up[j]), d = E::widen(dy[j]);
        d_gate[j] = E::narrow(d_gated(g, u, d));
        d_up[j] = E::narrow(gated(g, d));
      }
    }
  }
}

// ---- dropout

// Philox4x32 with ten rounds (Salmon et al. 2011).
DEVICE uint4 philox(uint4 counter, u32 key0, u32 key1) {
  UNROLL for (int round = 0; round < 10; round++) {
    u32 left = 0xD2511F53u, right = 0xCD9E8D57u;
    u32 high_left = multiply_high(left, counter.x), low_left = left * counter.x;
    u32 high_right = multiply_high(right, counter.z), low_right = right * counter.z;
    counter = make_uint4(high_right ^ counter.y ^ key0, low_right, high_left ^ counter.w ^ key1, low_left);
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  return counter;
}

// y = factor * x where the element's random number is at least threshold, zero elsewhere: x, y [t, k]; rows [t, 2] are
// the words that tell rows apart. With `onto` [t, k], which may be y, it is added; with `at` [t], only its rows of all of
// these are touched. A thread takes four columns, a block of the generator.
KERNEL(256, 4)
dropout(const S* x, const u32* rows, const S* onto, const u32* at_rows, S* y, u64 t, u64 k, u32 key0, u32 key1,
        u32 threshold, float factor) {
  u64 blocks = (k + 3) / 4, n = t * blocks, stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
    u64 line = i / blocks, block = i - line * blocks;
    u64 row = at_rows ? at_rows[line] : line;
    uint4 random = philox(make_uint4(rows[2 * row], rows[2 * row + 1], (u32)block, 0), key0, key1);
    u32 words[4] = {random.x, random.y, random.z, random.w};
    UNROLL for (int j = 0; j < 4; j++) {
      u64 column = 4 * block + j;
      if (column >= k) break;
      u64 at = row * k + column;
      S kept = E::narrow(words[j] >= threshold ? mul_rn(E::widen(x[at]), factor) : 0.0f);
      y[at] = onto ? E::narrow(add_rn(E::widen(onto[at]), E::widen(kept))) : kept;
    }
  }
}

// ---- rotary positions

DEVICE float rotated_first(float a, float b, float cos, float sin) { return sub_rn(mul_rn(a, cos), mul_rn(b, sin)); }
DEVICE float rotated_second(float a, float b, float cos, float sin) { return add_rn(mul_rn(b, cos), mul_rn(a, sin)); }

// The elements of pair i of a head begin at `first` and `second`.
template <bool HALVES>
DEVICE int first_of(int i, int) { return HALVES ? i : 2 * i; }
template <bool HALVES>
DEVICE int second_of(int i, int w) { return HALVES ? i + w : 2 * i + 1; }

// x, y [heads of all tokens, d]; cos, sin [tokens, w]; the first 2 w elements of a head rotate, by sign * angle.
// A thread takes eight pairs or eight elements that pass through (not wide: one).
template <bool HALVES>
DEVICE void rotate(const S* x, const float* cos, const float* sin, S* y, u64 tokens, int heads, int d, int w,
                   float sign, int wide) {
  int size = wide ? 8 : 1;
  int pairs = w / size, units = pairs + (d - 2 * w) / size;
  u64 n = tokens * heads * (u64)units, stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
    u64 head = i / units;
    int unit = (int)(i - head * units);
    const S* from = x + head * d;
    S* to = y + head * d;
    u64 angle = head / heads * w + (u64)unit * size;
    if (unit >= pairs) {
      int at = 2 * w + (unit - pairs) * size;
      if (wide) {
        Eight<TYPE> rest;
        rest.load(from + at);
        rest.store(to + at);
      } else {
        to[at] = from[at];
      }
    } else if (wide) {
      Eight<TYPE_F32> c, s;
      c.load_cached(cos + angle), s.load_cached(sin + angle);
      // Halves: eight first and eight second elements. Pairs: eight elements of four pairs, twice.
      int at = HALVES ? 8 * unit : 16 * unit, other = HALVES ? at + w : at + 8;
      Eight<TYPE> p, q, u, v;
      p.load(from + at), q.load(from + other);
      UNROLL for (int j = 0; j < 4; j++) {
        if (HALVES) {
          float a0 = p.get(2 * j), b0 = q.get(2 * j), a1 = p.get(2 * j + 1), b1 = q.get(2 * j + 1);
          float c0 = c.get(2 * j), s0 = mul_rn(s.get(2 * j), sign);
          float c1 = c.get(2 * j + 1), s1 = mul_rn(s.get(2 * j + 1), sign);
          u.set_pair(j, rotated_first(a0, b0, c0, s0), rotated_first(a1, b1, c1, s1));
          v.set_pair(j, rotated_second(a0, b0, c0, s0), rotated_second(a1, b1, c1, s1));
        } else {
          float s0 = mul_rn(s.get(j), sign), s1 = mul_rn(s.get(j + 4), sign);
          float a0 = p.get(2 * j), b0 = p.get(2 * j + 1), a1 = q.get(2 * j), b1 = q.get(2 * j + 1);
          u.set_pair(j, rotated_first(a0, b0, c.get(j), s0), rotated_second(a0, b0, c.get(j), s0));
          v.set_pair(j, rotated_first(a1, b1, c.get(j + 4), s1), rotated_second(a1, b1, c.get(j + 4), s1));
        }
      }
      u.store(to + at), v.store(to + other);
    } else {
      int first = first_of<HALVES>(unit, w), second = second_of<HALVES>(unit, w);
      float a = E::widen(from[first]), b = E::widen(from[second]), s = mul_rn(sin[angle], sign);
      to[first] = E::narrow(rotated_first(a, b, cos[angle], s));
      to[second] = E::narrow(rotated_second(a, b, cos[angle], s));
    }
  }
}

KERNEL(256, 4)
rope_half(const S* x, const float* cos, const float* sin, S* y, u64 tokens, int heads, int d, int w, float sign,
          int wide) {
  rotate<true>(x, cos, sin, y, tokens, heads, d, w, sign, wide);
}
KERNEL(256, 4)
rope_pairs(const S* x, const float* cos, const float* sin, S* y, u64 tokens, int heads, int d, int w, float sign,
           int wide) {
  rotate<false>(x, cos, sin, y, tokens, heads, d, w, sign, wide);
}
