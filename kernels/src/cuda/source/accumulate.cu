// sums[i] += values[i] for n elements: f32 values, bf16 sums, rounded stochastically with the bits of optim::accumulate
// (any NaN counts as equal). Word 0 of a pair rounds a sum. Bytes per element: 8; 6 where the sums are new.
//
// Legend: as in adamw.cu: [0, head) single elements | [head, head + body) four per thread, aligned | the rest
//   single elements. `fresh`: the sums are taken as zero and not read. when [4]: key and time, low words first, in device
//   memory, so that a captured launch can be replayed at another time.

struct Sum {
  u16* sums;
  const float* values;
  u64 first_element;
  bool fresh;
};

DEVICE void add_one(Rounding& r, const Sum& at, u64 i) {
  u64 element = at.first_element + i;
  if (element >> 33 != r.page) turn_to(r, element >> 33);
  u32 words[3];
  hash(r, (u32)(element >> 1), words);
  float old = at.fresh ? 0.0f : float_of_bf16(at.sums[i]);
  u32 random = element & 1 ? words[0] >> 16 : words[0] & 0xffffu;
  at.sums[i] = stochastic_round(add_rn(old, at.values[i]), random);
}

constexpr int WIDTH = 4;

// Returns false, with nothing written, when a number is too large for the pairwise rounding or a page ends inside.
DEVICE bool add_several(Rounding& r, const Sum& at, u64 i) {
  Several<TYPE_BF16, WIDTH> sum;
  Several<TYPE_F32, WIDTH> value;
  if (at.fresh) sum.set_zero(); else sum.load(at.sums + i);
  value.load(at.values + i);
  // An odd first element begins with the high half of a word: four elements then touch three pairs.
  u64 pair = (at.first_element + i) >> 1;
  bool odd = (at.first_element + i) & 1;
  if (pair >> 32 != r.page) turn_to(r, pair >> 32);
  if (pair + WIDTH / 2 >> 32 != r.page) return false;
  u32 words[3], next[3];
  hash(r, (u32)pair, next);
  // Becomes infinite or NaN when a sum is 2^127 or more, infinite or NaN.
  float large = 0.0f;
  UNROLL for (int k = 0; k < WIDTH / 2; k++) {
    float low = add_rn(sum.get(2 * k), value.get(2 * k)), high = add_rn(sum.get(2 * k + 1), value.get(2 * k + 1));
    large = fma_rn(fabsf(high), 2.0f, fma_rn(fabsf(low), 2.0f, large));
    words[0] = next[0];
    if (k < WIDTH / 2 - 1 || odd) hash(r, (u32)pair + k + 1, next);
    u32 random = (u32)(((u64)next[0] << 32 | words[0]) >> (odd ? 16 : 0));
    sum.words[k] = stochastic_round_pair(low, high, random);
  }
  if (!(fabsf(large) < float_of_bits(0x7f800000u))) return false;
  sum.store_streaming(at.sums + i);
  return true;
}

KERNEL(256, 4)
accumulate(u16* sums, const float* values, u64 n, u64 first_element, u64 head, const u32* when, int fresh) {
  Rounding r;
  UNROLL for (int i = 0; i < 2; i++) r.key[i] = when[i], r.time[i] = when[2 + i];
  turn_to(r, first_element >> 33);
  Sum at = {sums, values, first_element, fresh != 0};

  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
  u64 body = (n - head) / 8 * 8;
  for (u64 i = head + thread * WIDTH; i < head + body; i += threads * WIDTH)
    if (!add_several(r, at, i))
      for (u64 j = i; j < i + WIDTH; j++) add_one(r, at, j);
  for (u64 i = thread; i < n - body; i += threads) add_one(r, at, i < head ? i : i + body);
}
