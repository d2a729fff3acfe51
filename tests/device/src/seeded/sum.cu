// y = the sum of x[n] in a fixed order: every block sums its part, the last one to finish sums the parts.
// `partial` has a float a block, `arrived` is zero. 64 threads a block.

KERNEL(64, 1) sum(const float* x, float* partial, u32* arrived, float* y, int n) {
  SHARED_MEMORY(memory);
  float* of_warp = (float*)memory;
  const int thread = threadIdx.x;
  float total = 0.0f;
  for (int i = blockIdx.x * 64 + thread; i < n; i += gridDim.x * 64) total += x[i];
  UNROLL for (int mask = 16; mask > 0; mask >>= 1) total += shuffle_xor(total, mask);
  if (thread % 32 == 0) of_warp[thread / 32] = total;
  block_barrier();  // the warps' sums are there
  if (thread != 0) return;
  partial[blockIdx.x] = of_warp[0] + of_warp[1];
  device_fence();
  if (atomic_increment(arrived) != gridDim.x - 1) return;
  float all = 0.0f;
  for (int b = 0; b < (int)gridDim.x; b++) all += partial[b];
  *y = all;
  *arrived = 0;  // for the next launch
}
