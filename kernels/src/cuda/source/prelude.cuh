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
