// Every primitive on its own, to be compared with its definition in the PTX ISA: what a GPU and the emulator must
// agree on. One thread handles one element unless a kernel says otherwise; n is the number of elements.

DEVICE int this_element() { return blockIdx.x * blockDim.x + threadIdx.x; }

// ---- numbers

// Two neighbours a thread, one by one and as a pair; n is even.
KERNEL(256, 1) narrowings(const float* x, u16* bf16, u16* f16, u32* bf16_pairs, u32* f16_pairs, int n) {
  const int i = this_element();
  if (2 * i >= n) return;
  const float low = x[2 * i], high = x[2 * i + 1];
  bf16[2 * i] = bf16_of_float(low), bf16[2 * i + 1] = bf16_of_float(high);
  f16[2 * i] = f16_of_float(low), f16[2 * i + 1] = f16_of_float(high);
  bf16_pairs[i] = bf16x2_of_floats(low, high);
  f16_pairs[i] = f16x2_of_floats(low, high);
}

KERNEL(256, 1) widenings(const u16* x, float* from_bf16, float* from_f16, int n) {
  const int i = this_element();
  if (i >= n) return;
  from_bf16[i] = float_of_bf16(x[i]);
  from_f16[i] = float_of_f16(x[i]);
}

KERNEL(256, 1) approximations(const float* x, float* exp2, float* log2, int n) {
  const int i = this_element();
  if (i >= n) return;
  exp2[i] = exp2_approx(x[i]);
  log2[i] = log2_approx(x[i]);
}

// y[9][n]: a + b, a - b, a * b, a / b, sqrt a, a * b + c rounded once, rounded twice, maximum and minimum of a and b.
KERNEL(256, 1) arithmetic(const float* as, const float* bs, const float* cs, float* y, int n) {
  const int i = this_element();
  if (i >= n) return;
  const float a = as[i], b = bs[i], c = cs[i];
  y[i] = add_rn(a, b);
  y[n + i] = sub_rn(a, b);
  y[2 * n + i] = mul_rn(a, b);
  y[3 * n + i] = div_rn(a, b);
  y[4 * n + i] = sqrt_rn(a);
  y[5 * n + i] = fma_rn(a, b, c);
  y[6 * n + i] = add_rn(mul_rn(a, b), c);
  y[7 * n + i] = fmaxf(a, b);
  y[8 * n + i] = fminf(a, b);
}

// y[3][n]: a * b + c rounded twice, a + b, ln |a|.
KERNEL(256, 1) double_arithmetic(const double* as, const double* bs, const double* cs, double* y, int n) {
  const int i = this_element();
  if (i >= n) return;
  y[i] = add_rn(mul_rn(as[i], bs[i]), cs[i]);
  y[n + i] = add_rn(as[i], bs[i]);
  y[2 * n + i] = natural_log(as[i] < 0.0 ? -as[i] : as[i]);
}

KERNEL(256, 1) high_products(const u32* a, const u32* b, u32* y, int n) {
  const int i = this_element();
  if (i < n) y[i] = multiply_high(a[i], b[i]);
}

// ---- warps and blocks

// One block. words[36][n]: for each mask the u32 of the other lane; then by lanes[n] as u32 and as float; then whether
// any lane of the warp has its lowest bit set, or all bits; doubles[32][n]: for each mask.
KERNEL(256, 1) exchanges(const u32* x, const double* d, const int* lanes, u32* words, double* doubles) {
  const int i = threadIdx.x, n = blockDim.x;
  for (int mask = 0; mask < 32; mask++) {
    const u32 as_integer = shuffle_xor(x[i], mask), as_float = bits_of_float(shuffle_xor(float_of_bits(x[i]), mask));
    words[mask * n + i] = as_integer == as_float ? as_integer : ~as_integer;
    doubles[mask * n + i] = shuffle_xor(d[i], mask);
  }
  words[32 * n + i] = shuffle(x[i], lanes[i]);
  words[33 * n + i] = bits_of_float(shuffle(float_of_bits(x[i]), lanes[i]));
  words[34 * n + i] = warp_any(x[i] & 1);
  words[35 * n + i] = warp_any(x[i] == 0xffffffffu);
}

// One block of n threads. y = x reversed in the block, then in each warp. Shared: 4 n bytes.
KERNEL(256, 1) reversals(const u32* x, u32* y) {
  SHARED_MEMORY(memory);
  u32* words = (u32*)memory;
  const int i = threadIdx.x, n = blockDim.x;
  words[i] = x[i];
  block_barrier();
  const u32 of_block = words[n - 1 - i];
  block_barrier();
  words[i] = of_block;
  warp_barrier();
  y[i] = words[i ^ 31];
}

// y = the sum of x by the last of the blocks to arrive; `partial` has a word a block, `arrived` is zero. Shared: 128
// bytes.
KERNEL(128, 1) last_block(const u32* x, u32* partial, u32* arrived, u32* y, int n) {
  SHARED_MEMORY(memory);
  u32* words = (u32*)memory;
  const int thread = threadIdx.x;
  if (thread == 0) {
    u32 sum = 0;
    for (int i = blockIdx.x; i < n; i += gridDim.x) sum += x[i];
    partial[blockIdx.x] = sum;
    device_fence();
    words[0] = atomic_increment(arrived);
  }
  block_barrier();
  if (words[0] != gridDim.x - 1) return;
  if (thread == 0) {
    u32 sum = 0;
    for (u32 b = 0; b < gridDim.x; b++) sum += load_volatile(partial + b);
    y[0] = sum;
    y[1] = load_volatile(arrived);
  }
}

// ---- memory

KERNEL(256, 1) streams(const uint4* x, uint4* y, int n) {
  const int i = this_element();
  if (i < n) store_streaming(y + i, load_streaming(x + i));
}

// One block of 128 threads, four groups of copies in flight: y[g][t] = x[from[g][t]] or zero where not valid. The
// last group is read by other threads than those that copied it. Shared: 8192 bytes.
KERNEL(128, 1) copies(const uint4* x, const int* from, const int* valid, uint4* y) {
  SHARED_MEMORY(memory);
  const uint4* landed = (const uint4*)memory;
  const int t = threadIdx.x, other = (t + 37) % 128;
  for (int group = 0; group < 4; group++) {
    const int i = group * 128 + t;
    copy_async_16(shared_address(landed + i), x + from[i], valid[i] != 0);
    copy_async_commit();
  }
  copy_async_wait<3>();
  y[t] = landed[t];
  copy_async_wait<1>();
  y[128 + t] = landed[128 + t];
  y[256 + t] = landed[256 + t];
  copy_async_wait<0>();
  block_barrier();
  y[384 + other] = landed[384 + other];
}

// ---- matrix fragments

// One warp. `rows`: bytes from the start of 4096 bytes `x` that lane t points at; the registers of all lanes.
KERNEL(32, 1) matrix_loads(const uint4* x, const u32* rows, u32* x4, u32* x4_transposed, u32* x2, u32* x2_transposed) {
  SHARED_MEMORY(memory);
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) ((uint4*)memory)[i] = x[i];
  block_barrier();
  const u32 row = shared_address(memory) + rows[lane];
  u32 four[4], two[2];
  load_matrix_x4(four, row);
  UNROLL for (int i = 0; i < 4; i++) x4[lane * 4 + i] = four[i];
  load_matrix_x4_transposed(four, row);
  UNROLL for (int i = 0; i < 4; i++) x4_transposed[lane * 4 + i] = four[i];
  load_matrix_x2(two, row);
  UNROLL for (int i = 0; i < 2; i++) x2[lane * 2 + i] = two[i];
  load_matrix_x2_transposed(two, row);
  UNROLL for (int i = 0; i < 2; i++) x2_transposed[lane * 2 + i] = two[i];
}

template <int T>
DEVICE void products_of(const u32* as, const u32* bs, const float* cs, float* wide, float* narrow) {
  const int lane = threadIdx.x;
  const u32 a[4] = {as[lane * 4], as[lane * 4 + 1], as[lane * 4 + 2], as[lane * 4 + 3]};
  float d[4] = {cs[lane * 4], cs[lane * 4 + 1], cs[lane * 4 + 2], cs[lane * 4 + 3]};
  float e[4] = {d[0], d[1], d[2], d[3]};
  Element<T>::mma(d, a, bs[lane * 2], bs[lane * 2 + 1]);
  Element<T>::mma_k8(e, a[0], a[1], bs[lane * 2]);
  UNROLL for (int i = 0; i < 4; i++) wide[lane * 4 + i] = d[i], narrow[lane * 4 + i] = e[i];
}

// One warp. The registers of all lanes; `wide` = A B + C for k 16, `narrow` for k 8 (the first half of A and B).
KERNEL(32, 1) bf16_products(const u32* a, const u32* b, const float* c, float* wide, float* narrow) {
  products_of<TYPE_BF16>(a, b, c, wide, narrow);
}
KERNEL(32, 1) f16_products(const u32* a, const u32* b, const float* c, float* wide, float* narrow) {
  products_of<TYPE_F16>(a, b, c, wide, narrow);
}
