// The instructions that kernels use beyond plain C++, one function each: sm_80 and newer.
// kernels/emulator/primitives.h has the same functions for a CPU; what is missing there cannot be used.
// Header-free: NVRTC compiles this without a toolkit.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
// A kernel of THREADS threads a block, at least BLOCKS resident blocks per multiprocessor.
#define KERNEL(THREADS, BLOCKS) extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
// All shared memory is dynamic: the launch says how many bytes.
#define SHARED_MEMORY(name) extern __shared__ __align__(1024) u8 name[]
#define UNROLL _Pragma("unroll")
// Types of a struct's members, in their order. A struct that is a kernel's parameter has them as `Members`.
template <typename... Types>
struct List {};

// ---- numbers

DEVICE float float_of_bits(u32 x) { return __uint_as_float(x); }
DEVICE u32 bits_of_float(float x) { return __float_as_uint(x); }
DEVICE u32 multiply_high(u32 a, u32 b) { return __umulhi(a, b); }

// Single operations, rounded to nearest even and never contracted into a fused multiply-add.
DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
DEVICE float sub_rn(float a, float b) { return __fsub_rn(a, b); }
DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float div_rn(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float sqrt_rn(float a) { return __fsqrt_rn(a); }
DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE double add_rn(double a, double b) { return __dadd_rn(a, b); }
DEVICE double mul_rn(double a, double b) { return __dmul_rn(a, b); }
DEVICE double div_rn(double a, double b) { return __ddiv_rn(a, b); }
DEVICE double sqrt_rn(double a) { return __dsqrt_rn(a); }
DEVICE double fma_rn(double a, double b, double c) { return __fma_rn(a, b, c); }

// The natural logarithm, to 1 ulp.
DEVICE double natural_log(double x) { return log(x); }

// 2^x and log2 x to about 2 ulp; subnormal results are zero.
DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x to 1 ulp.
DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Narrowing, to nearest even. Pairs: `low` goes into the low half. NaN stays NaN.
DEVICE u16 bf16_of_float(float x) {
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
DEVICE u16 f16_of_float(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
DEVICE u32 bf16x2_of_floats(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
DEVICE u32 f16x2_of_floats(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
DEVICE float float_of_bf16(u16 x) { return __uint_as_float((u32)x << 16); }
DEVICE float float_of_f16(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

// ---- warps and blocks

// The value of the lane whose number differs in the bits of `mask`; all 32 lanes take part.
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE double shuffle_xor(double x, int mask) {
  u32 low, high;
  asm("mov.b64 {%0, %1}, %2;" : "=r"(low), "=r"(high) : "d"(x));
  low = shuffle_xor(low, mask);
  high = shuffle_xor(high, mask);
  asm("mov.b64 %0, {%1, %2};" : "=d"(x) : "r"(low), "r"(high));
  return x;
}
// The value of lane `lane`.
DEVICE float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE u32 shuffle(u32 x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

// Whether `x` holds in any lane; all 32 lanes take part.
DEVICE bool warp_any(bool x) { return __any_sync(0xffffffffu, x); }

// Waits for all threads of the block / of the warp and makes their memory writes visible to each other.
DEVICE void block_barrier() { __syncthreads(); }
DEVICE void warp_barrier() { __syncwarp(); }

// Writes before the fence are seen by other blocks before writes after it.
DEVICE void device_fence() { __threadfence(); }
// Adds one and returns the value before: the arrival counter of "the last block finishes the sum".
DEVICE u32 atomic_increment(u32* counter) { return atomicAdd(counter, 1u); }
// A load that other blocks' writes are seen by (bypasses the first-level cache).
DEVICE u32 load_volatile(const u32* p) { return *(const volatile u32*)p; }

// ---- memory

// 16 or 8 bytes that this kernel reads once (kept out of the first-level cache) or writes once.
DEVICE uint4 load_streaming(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEVICE void store_streaming(uint4* p, uint4 v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

DEVICE uint2 load_streaming(const uint2* p) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
DEVICE void store_streaming(uint2* p, uint2 v) {
  asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}

// The 32-bit address of shared memory that the instructions below take.
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Asynchronous copy of 16 bytes from global to shared memory; zeros when not `valid` (then nothing is read).
// A group is what was issued since the last commit; wait<N> lets at most N groups stay in flight. The copies are
// visible to the issuing thread after the wait, to others after a barrier that follows it.
DEVICE void copy_async_16(u32 shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- matrix fragments (PTX ISA, "Warp-level matrix instructions")

// Four 8x8 matrices of 16-bit elements; lane 8i + j gives the address of row j of matrix i (16 bytes, aligned).
// Lane 4r + c receives the elements 2c and 2c+1 of row r of each matrix (of its transpose).
DEVICE void load_matrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
DEVICE void load_matrix_x4_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// Two matrices; lanes 0..16 give the addresses (those of the other lanes are ignored but must be valid).
DEVICE void load_matrix_x2(u32 (&r)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}
DEVICE void load_matrix_x2_transposed(u32 (&r)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}

// Which lane holds what of an 8x8 matrix, two elements a lane (ldmatrix; with `transposed`, of its transpose):
//   row 0 |  0  0  1  1  2  2  3  3 |     A [16, 16]: | a0 a2 |     B [16, 8]: | b0 |     D [16, 8]: | d0 d1 |
//   row 1 |  4  4  5  5  6  6  7  7 |                 | a1 a3 |                | b1 |                | d2 d3 |
//   row 7 | 28 28 29 29 30 30 31 31 |     each an 8x8 matrix; those of B are transposed: lane 0 holds rows 0, 1 of column 0
// D[16,8] += A[16,k] B[k,8], f32 sums, k = 16 or 8. Lane 4r + c holds of
//   A: rows r and r+8, columns 2c, 2c+1 (k 16: a[0..2] of columns 0..8, a[2..4] of columns 8..16);
//   B: rows 2c, 2c+1 (k 16: b0 of rows 0..8, b1 of rows 8..16), column r;
//   D: d[0], d[1] row r, columns 2c, 2c+1; d[2], d[3] row r+8.
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_bf16_k8(float (&d)[4], u32 a0, u32 a1, u32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}
DEVICE void mma_f16_k8(float (&d)[4], u32 a0, u32 a1, u32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}
