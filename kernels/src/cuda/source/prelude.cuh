// What every kernel family shares, written on the primitives.
// A family is compiled with -D defines that choose types and sizes, one module per choice.

// Element types by number: the same numbers as kernels::cuda::ElementType.
#define TYPE_F32 0
#define TYPE_BF16 1
#define TYPE_F16 2

// How the elements of type T lie in memory, and their value in f32.
template <int T>
struct Element;
template <>
struct Element<TYPE_F32> {
  typedef float Stored;
  static DEVICE float widen(float x) { return x; }
  static DEVICE float narrow(float x) { return x; }
};
template <>
struct Element<TYPE_BF16> {
  typedef u16 Stored;
  static DEVICE float widen(u16 x) { return float_of_bf16(x); }
  static DEVICE u16 narrow(float x) { return bf16_of_float(x); }
  static DEVICE u32 narrow_pair(float low, float high) { return bf16x2_of_floats(low, high); }
  static DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(d, a, b0, b1); }
  static DEVICE void mma_k8(float (&d)[4], u32 a0, u32 a1, u32 b) { mma_bf16_k8(d, a0, a1, b); }
};
template <>
struct Element<TYPE_F16> {
  typedef u16 Stored;
  static DEVICE float widen(u16 x) { return float_of_f16(x); }
  static DEVICE u16 narrow(float x) { return f16_of_float(x); }
  static DEVICE u32 narrow_pair(float low, float high) { return f16x2_of_floats(low, high); }
  static DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_f16(d, a, b0, b1); }
  static DEVICE void mma_k8(float (&d)[4], u32 a0, u32 a1, u32 b) { mma_f16_k8(d, a0, a1, b); }
};

DEVICE float minus_infinity() { return float_of_bits(0xff800000u); }
DEVICE int divide_up(int a, int b) { return (a + b - 1) / b; }
DEVICE int smaller(int a, int b) { return a < b ? a : b; }

// Where chunk `chunk` (16 bytes) of line `line` lies in shared memory, in bytes: eight lines of one chunk, or eight chunks of
// one line, touch each bank once. Chunks of a line of CHUNKS, as they lie in memory (64 and 128 bytes a line):
//   4 chunks: line 0 | 0 1 2 3   line 1 | 0 1 2 3     8 chunks: line 0 | 0 1 2 3 4 5 6 7
//             line 2 | 1 0 3 2   line 3 | 1 0 3 2               line 1 | 1 0 3 2 5 4 7 6
//             line 4 | 2 3 0 1   line 5 | 2 3 0 1               line 2 | 2 3 0 1 6 7 4 5
//             line 6 | 3 2 1 0   line 7 | 3 2 1 0               line 7 | 7 6 5 4 3 2 1 0
template <int CHUNKS>
DEVICE u32 chunk_offset(int line, int chunk) {
  constexpr int LINES_PER_128_BYTES = CHUNKS < 8 ? 8 / CHUNKS : 1;
  constexpr int MASK = CHUNKS < 8 ? CHUNKS - 1 : 7;
  return (u32)((line * CHUNKS + (chunk ^ ((line / LINES_PER_128_BYTES) & MASK))) * 16);
}

// The tile of y that a block computes. Tile rows come in groups, a group is walked column by column.
struct Place {
  int row, column;  // of tiles
};
DEVICE Place place_of_block(int tiles_m, int tiles_n, int group) {
  int first_row = (int)blockIdx.x / (group * tiles_n) * group;
  int in_group = (int)blockIdx.x % (group * tiles_n);
  int height = tiles_m - first_row < group ? tiles_m - first_row : group;
  return {first_row + in_group % height, in_group / height};
}

// Parameters of matrix products, with operands of type In and results of type Out.

// One pair of operands: a sum over k elements. k = 0: no pair, nothing is read. lda and ldb: elements from line to line.
template <typename In>
struct Operands {
  const In* a;
  u64 lda;
  const In* b;
  u64 ldb;
  int k;
  typedef List<const In*, u64, const In*, u64, int> Members;
};

// What a layer makes of the sums: y [m, n] = scale * sum + bias. b has `b_rows` rows; the sums of the others are zero.
template <typename In, typename Out>
struct Result {
  const In* bias;
  Out* y;
  u64 ldy;
  int m, n, b_rows;
  float scale;
  typedef List<const In*, Out*, u64, int, int, int, float> Members;
};

// One of two layers over a partition of rows: its m rows of a and y, its weight b, and the matrix c [n, r] of its adapter
// (r = 0: none).
template <typename In>
struct RoutedLayer {
  const int* rows;
  const In* b;
  u64 ldb;
  const In* c;
  u64 ldc;
  const In* bias;
  int m, b_rows, r;
  float scale;
  typedef List<const int*, const In*, u64, const In*, u64, const In*, int, int, int, float> Members;
};

// A sequence of packed attention.
struct Sequence {
  int q_start, queries, k_start, keys;
  int causal;

  // Keys that query `row` sees: the first so many.
  DEVICE int visible(int row) const {
    if (!causal) return keys;
    int end = row + 1 + keys - queries;
    return end < 0 ? 0 : smaller(end, keys);
  }
};

// The sequences of an attention call. starts: [sequences + 1], the first query and key of each; tiles: pairs (sequence,
// tile) of the launch.
struct Sequences {
  const int *q_starts, *k_starts, *tiles;
  int heads, kv_heads, causal;
  float scale;
  typedef List<const int*, const int*, const int*, int, int, int, float> Members;

  // The sequence and the tile of a block.
  DEVICE const int* tile() const { return tiles + 2 * blockIdx.y; }
  DEVICE Sequence at(int index) const {
    int q = q_starts[index], k = k_starts[index];
    return {q, q_starts[index + 1] - q, k, k_starts[index + 1] - k, causal};
  }
};

// p and n with e^x = p * 2^n for -104 <= x <= 89, with the bits of the CPU (kernels::cpu::math).
struct ScaledExp {
  float p;
  int n;
};
DEVICE ScaledExp scaled_exp(float x) {
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  float shifted = add_rn(mul_rn(x, 1.44269504088896341f), round);
  float n = sub_rn(shifted, round);
  // ln 2 in two parts: the product of the first with a small integer is exact.
  float r = sub_rn(sub_rn(x, mul_rn(n, 0.6933594f)), mul_rn(n, -2.1219444e-4f));
  float p = 1.9875692e-4f;
  p = add_rn(mul_rn(p, r), 1.3982e-3f);
  p = add_rn(mul_rn(p, r), 8.333452e-3f);
  p = add_rn(mul_rn(p, r), 4.1665796e-2f);
  p = add_rn(mul_rn(p, r), 1.6666665e-1f);
  p = add_rn(mul_rn(p, r), 0.5f);
  p = add_rn(add_rn(mul_rn(p, mul_rn(r, r)), r), 1.0f);
  return {p, (int)(bits_of_float(shifted) - bits_of_float(round))};
}
DEVICE float power_of_two(int n) { return float_of_bits(((u32)n + 127u) << 23); }

// Eight consecutive elements as they lie in memory, from and to addresses of 16-byte words: registers hold them
// packed until they are used. `load` bypasses the first-level cache (read once), `load_cached` does not;
// `store_streaming` is for what is not read again soon.
template <int T>
struct Eight {
  typedef Element<T> E;
  u32 words[4];
  DEVICE void load(const u16* p) { set_words(load_streaming((const uint4*)p)); }
  DEVICE void load_cached(const u16* p) { set_words(*(const uint4*)p); }
  DEVICE void store(u16* p) const { *(uint4*)p = make_uint4(words[0], words[1], words[2], words[3]); }
  DEVICE void store_streaming(u16* p) const {
    ::store_streaming((uint4*)p, make_uint4(words[0], words[1], words[2], words[3]));
  }
  DEVICE float get(int i) const { return E::widen((u16)(i & 1 ? words[i >> 1] >> 16 : words[i >> 1])); }
  DEVICE void set_pair(int i, float low, float high) { words[i] = E::narrow_pair(low, high); }
  DEVICE void set_zero() { words[0] = words[1] = words[2] = words[3] = 0; }
  DEVICE void set_words(uint4 v) { words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w; }
};
template <>
struct Eight<TYPE_F32> {
  float values[8];
  DEVICE void load(const float* p) {
    set_half(0, load_streaming((const uint4*)p));
    set_half(1, load_streaming((const uint4*)p + 1));
  }
  DEVICE void load_cached(const float* p) {
    set_half(0, *(const uint4*)p);
    set_half(1, *((const uint4*)p + 1));
  }
  DEVICE void store(float* p) const {
    *(uint4*)p = half(0);
    *((uint4*)p + 1) = half(1);
  }
  DEVICE void store_streaming(float* p) const {
    ::store_streaming((uint4*)p, half(0));
    ::store_streaming((uint4*)p + 1, half(1));
  }
  DEVICE float get(int i) const { return values[i]; }
  DEVICE void set_pair(int i, float low, float high) { values[2 * i] = low, values[2 * i + 1] = high; }
  DEVICE void set_zero() { UNROLL for (int i = 0; i < 8; i++) values[i] = 0.0f; }
  DEVICE void set_half(int h, uint4 v) {
    values[4 * h] = float_of_bits(v.x), values[4 * h + 1] = float_of_bits(v.y);
    values[4 * h + 2] = float_of_bits(v.z), values[4 * h + 3] = float_of_bits(v.w);
  }
  DEVICE uint4 half(int h) const {
    return make_uint4(bits_of_float(values[4 * h]), bits_of_float(values[4 * h + 1]), bits_of_float(values[4 * h + 2]),
                      bits_of_float(values[4 * h + 3]));
  }
};

// Four consecutive elements, for kernels that stream f32: a lane's 16 bytes of f32 lie beside those of its neighbors, so that
// each access fills whole sectors of 32 bytes. With eight f32 a lane, an access has every second half of them.
template <int T>
struct Four {
  typedef Element<T> E;
  u32 words[2];
  DEVICE void load(const u16* p) {
    uint2 v = load_streaming((const uint2*)p);
    words[0] = v.x, words[1] = v.y;
  }
  DEVICE void store_streaming(u16* p) const { ::store_streaming((uint2*)p, make_uint2(words[0], words[1])); }
  DEVICE float get(int i) const { return E::widen((u16)(i & 1 ? words[i >> 1] >> 16 : words[i >> 1])); }
  DEVICE void set_pair(int i, float low, float high) { words[i] = E::narrow_pair(low, high); }
  DEVICE void set_zero() { words[0] = words[1] = 0; }
};
template <>
struct Four<TYPE_F32> {
  float values[4];
  DEVICE void load(const float* p) {
    uint4 v = load_streaming((const uint4*)p);
    values[0] = float_of_bits(v.x), values[1] = float_of_bits(v.y);
    values[2] = float_of_bits(v.z), values[3] = float_of_bits(v.w);
  }
  DEVICE void store_streaming(float* p) const {
    ::store_streaming((uint4*)p, make_uint4(bits_of_float(values[0]), bits_of_float(values[1]),
                                            bits_of_float(values[2]), bits_of_float(values[3])));
  }
  DEVICE float get(int i) const { return values[i]; }
  DEVICE void set_pair(int i, float low, float high) { values[2 * i] = low, values[2 * i + 1] = high; }
};

// N consecutive elements of a lane: 8, or 4 where a stream is f32.
template <int T, int N>
struct Several : Eight<T> {};
template <int T>
struct Several<T, 4> : Four<T> {};

// What the gradient norm decided about a step: kernels::cuda::ops::grad_norm::Clip.
struct Clip {
  double norm, loss;
  float factor;
  u32 skip;
};
