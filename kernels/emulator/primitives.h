// The functions of primitives.cuh on a CPU: the same names, types and meaning.

#define DEVICE inline
#define KERNEL(THREADS, BLOCKS) extern "C" void
// In a kernel or device function, as a declaration.
#define SHARED_MEMORY(name) u8* const name = emulator::shared_memory()
#define UNROLL
template <typename... Types>
using List = emulator::List<Types...>;

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define blockDim (emulator::block_size())
#define gridDim (emulator::grid_size())

// ---- what CUDA brings along

struct alignas(8) uint2 {
  u32 x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
DEVICE uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
DEVICE uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
DEVICE int2 make_int2(int x, int y) { return {x, y}; }
DEVICE int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
DEVICE float2 make_float2(float x, float y) { return {x, y}; }
DEVICE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern "C" {
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float fabsf(float) noexcept;
float fmaf(float, float, float) noexcept;
float sqrtf(float) noexcept;
}

// ---- numbers

DEVICE float float_of_bits(u32 x) {
  float y;
  __builtin_memcpy(&y, &x, 4);
  return y;
}
DEVICE u32 bits_of_float(float x) {
  u32 y;
  __builtin_memcpy(&y, &x, 4);
  return y;
}
DEVICE u32 multiply_high(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }

DEVICE float add_rn(float a, float b) { return a + b; }
DEVICE float sub_rn(float a, float b) { return a - b; }
DEVICE float mul_rn(float a, float b) { return a * b; }
DEVICE float div_rn(float a, float b) { return a / b; }
DEVICE float sqrt_rn(float a) { return sqrtf(a); }
DEVICE float fma_rn(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE double add_rn(double a, double b) { return a + b; }
DEVICE double mul_rn(double a, double b) { return a * b; }
DEVICE double div_rn(double a, double b) { return a / b; }
DEVICE double sqrt_rn(double a) { return __builtin_sqrt(a); }
DEVICE double fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }

namespace emulator {
// A subnormal number becomes a zero of its sign.
DEVICE float flushed(float x) { return (bits_of_float(x) & 0x7f800000u) ? x : float_of_bits(bits_of_float(x) & 0x80000000u); }
}  // namespace emulator
DEVICE double natural_log(double x) { return __builtin_log(x); }
DEVICE float exp2_approx(float x) { return emulator::flushed(__builtin_exp2f(emulator::flushed(x))); }
DEVICE float log2_approx(float x) { return emulator::flushed(__builtin_log2f(emulator::flushed(x))); }
DEVICE float reciprocal_approx(float x) { return emulator::flushed(1.0f / emulator::flushed(x)); }

DEVICE u16 bf16_of_float(float x) {
  u32 bits = bits_of_float(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
DEVICE u16 f16_of_float(float x) {
  u32 bits = bits_of_float(x);
  u32 sign = bits >> 16 & 0x8000u;
  u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return (u16)(sign | 0x7c00u);  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14: the unit of the last place of 0.5 is 2^-24, so the addition rounds as f16 does.
    return (u16)(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u));
  }
  return (u16)(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
}
DEVICE u32 bf16x2_of_floats(float low, float high) { return bf16_of_float(low) | (u32)bf16_of_float(high) << 16; }
DEVICE u32 f16x2_of_floats(float low, float high) { return f16_of_float(low) | (u32)f16_of_float(high) << 16; }
DEVICE float float_of_bf16(u16 x) { return float_of_bits((u32)x << 16); }
DEVICE float float_of_f16(u16 x) {
  u32 sign = (u32)(x & 0x8000u) << 16;
  u32 magnitude = x & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // The exponent's bias is 112 larger in f32; the product is exact, also for subnormal x.
  float value = float_of_bits(magnitude << 13) * float_of_bits(0x77800000u);
  return float_of_bits(sign | bits_of_float(value));
}

// ---- warps and blocks

DEVICE u32 shuffle_xor(u32 x, int mask, EMULATOR_SITE) { return (u32)emulator::shuffle_xor(x, (u32)mask, {line, file}); }
DEVICE float shuffle_xor(float x, int mask, EMULATOR_SITE) {
  return float_of_bits((u32)emulator::shuffle_xor(bits_of_float(x), (u32)mask, {line, file}));
}
DEVICE double shuffle_xor(double x, int mask, EMULATOR_SITE) {
  u64 bits;
  __builtin_memcpy(&bits, &x, 8);
  bits = emulator::shuffle_xor(bits, (u32)mask, {line, file});
  __builtin_memcpy(&x, &bits, 8);
  return x;
}
DEVICE u32 shuffle(u32 x, int lane, EMULATOR_SITE) { return (u32)emulator::shuffle(x, (u32)lane, {line, file}); }
DEVICE float shuffle(float x, int lane, EMULATOR_SITE) {
  return float_of_bits((u32)emulator::shuffle(bits_of_float(x), (u32)lane, {line, file}));
}

DEVICE bool warp_any(bool x, EMULATOR_SITE) { return emulator::warp_ballot(x, {line, file}) != 0; }

DEVICE void block_barrier(EMULATOR_SITE) { emulator::block_barrier({line, file}); }
DEVICE void warp_barrier(EMULATOR_SITE) { emulator::warp_barrier({line, file}); }
DEVICE void device_fence() { emulator::device_fence(); }
DEVICE u32 atomic_increment(u32* counter, EMULATOR_SITE) { return emulator::atomic_increment(counter, {line, file}); }
DEVICE u32 load_volatile(const u32* p, EMULATOR_SITE) { return emulator::load_volatile(p, {line, file}); }

// ---- memory

DEVICE uint4 load_streaming(const uint4* p, EMULATOR_SITE) {
  emulator::check_vector(p, 16, {line, file});
  return *p;
}
DEVICE uint2 load_streaming(const uint2* p, EMULATOR_SITE) {
  emulator::check_vector(p, 8, {line, file});
  return *p;
}
DEVICE void store_streaming(uint4* p, uint4 v, EMULATOR_SITE) {
  emulator::check_vector(p, 16, {line, file});
  *p = v;
}
DEVICE void store_streaming(uint2* p, uint2 v, EMULATOR_SITE) {
  emulator::check_vector(p, 8, {line, file});
  *p = v;
}
DEVICE u32 shared_address(const void* p, EMULATOR_SITE) { return emulator::shared_address(p, {line, file}); }
DEVICE void copy_async_16(u32 shared, const void* global, bool valid, EMULATOR_SITE) {
  emulator::copy_async_16(shared, global, valid, {line, file});
}
DEVICE void copy_async_commit() { emulator::copy_async_commit(); }
template <int N>
DEVICE void copy_async_wait(EMULATOR_SITE) {
  emulator::copy_async_wait(N, {line, file});
}

// ---- matrix fragments

DEVICE void load_matrix_x4(u32 (&r)[4], u32 address, EMULATOR_SITE) {
  emulator::load_matrices(r, 4, address, false, {line, file});
}
DEVICE void load_matrix_x4_transposed(u32 (&r)[4], u32 address, EMULATOR_SITE) {
  emulator::load_matrices(r, 4, address, true, {line, file});
}
DEVICE void load_matrix_x2(u32 (&r)[2], u32 address, EMULATOR_SITE) {
  emulator::load_matrices(r, 2, address, false, {line, file});
}
DEVICE void load_matrix_x2_transposed(u32 (&r)[2], u32 address, EMULATOR_SITE) {
  emulator::load_matrices(r, 2, address, true, {line, file});
}

DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATOR_SITE) {
  u32 b[2] = {b0, b1};
  emulator::mma(d, a, b, false, 16, {line, file});
}
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATOR_SITE) {
  u32 b[2] = {b0, b1};
  emulator::mma(d, a, b, true, 16, {line, file});
}
DEVICE void mma_bf16_k8(float (&d)[4], u32 a0, u32 a1, u32 b, EMULATOR_SITE) {
  u32 a[2] = {a0, a1};
  emulator::mma(d, a, &b, false, 8, {line, file});
}
DEVICE void mma_f16_k8(float (&d)[4], u32 a0, u32 a1, u32 b, EMULATOR_SITE) {
  u32 a[2] = {a0, a1};
  emulator::mma(d, a, &b, true, 8, {line, file});
}
