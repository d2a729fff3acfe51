// Cross entropy of logits that exist as tiles of the vocabulary: statistics of rows, losses, gradients of logits.
// Defines: OUT (TYPE_* of the gradients of logits: the operand of the products that follow).
// Bytes: `statistics` reads the logits once, `gradients` reads them once and writes OUT.
//
// Legend: logits [rows, cols] f32, a tile of columns first .. first + cols of the vocabulary; labels [rows] i32.
// A row's statistics: largest logit, sum of exp(logit - largest) in f64, the label's logit. The order of every sum is
// that of the CPU: f32 lanes over a stretch of 1024 columns, f64 over stretches.

struct Running {
  double sum;
  float max, label;
};

#define STRETCH 1024

// e^x for x up to about 1: 0 below 1e-30, as on the CPU.
DEVICE float weight(float x) {
  ScaledExp e = scaled_exp(x < -69.0f ? -69.0f : x);
  return x < -69.0f ? 0.0f : mul_rn(e.p, power_of_two(e.n));
}

DEVICE double log_sum(const Running& row) { return add_rn((double)row.max, natural_log(row.sum)); }

#if OUT == TYPE_F32  // one module has what does not depend on OUT
DEVICE float greater(float a, float b) { return a > b ? a : b; }

// Takes a tile into the statistics of its rows, one block a row; `begin` starts them.
KERNEL(256, 4) statistics(const float* logits, const int* labels, Running* running, int cols, int first, int begin) {
  SHARED_MEMORY(memory);
  double* sums = (double*)memory;           // of stretches, up to 8 at a time
  float* tops = (float*)(memory + 8 * 8);   // of warps
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const float* row = logits + (u64)blockIdx.x * cols;
  float top = minus_infinity();
  for (int i = threadIdx.x; i < cols; i += blockDim.x) top = greater(row[i], top);
  UNROLL for (int mask = 16; mask > 0; mask >>= 1) top = greater(top, shuffle_xor(top, mask));
  if (lane == 0) tops[warp] = top;
  block_barrier();
  for (int w = 0; w < warps; w++) top = greater(tops[w], top);
  Running before = {0.0, minus_infinity(), 0.0f};
  if (!begin) before = running[blockIdx.x];
  top = greater(top, before.max);
  // Every warp a stretch, then all stretches of the round in order.
  double sum = 0.0;
  for (int round = 0; round < cols; round += warps * STRETCH) {
    int start = round + warp * STRETCH, end = start + STRETCH < cols ? start + STRETCH : cols;
    float part = 0.0f;
    for (int i = start + lane; i < end; i += 32) part = add_rn(part, weight(sub_rn(row[i], top)));
    UNROLL for (int mask = 16; mask > 0; mask >>= 1) part = add_rn(part, shuffle_xor(part, mask));
    if (lane == 0) sums[warp] = part;
    block_barrier();
    if (threadIdx.x == 0)
      for (int w = 0; w < warps && round + w * STRETCH < cols; w++) sum = add_rn(sum, sums[w]);
    block_barrier();
  }
  if (threadIdx.x == 0) {
    // The maximum was -inf before the first tile: its weight is zero.
    double scaled = mul_rn(before.sum, (double)weight(sub_rn(before.max, top)));
    Running after = {add_rn(scaled, sum), top, before.label};
    int label = labels[blockIdx.x] - first;
    if (label >= 0 && label < cols) after.label = row[label];
    running[blockIdx.x] = after;
  }
}

// losses[rows_of[i]] = log of the sum of exponentials - the label's logit.
KERNEL(256, 4) losses(const Running* running, const int* rows_of, float* losses, int rows) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < rows) losses[rows_of[i]] = (float)add_rn(log_sum(running[i]), -(double)running[i].label);
}
#endif

// y[:, 0..cols) = factor * (softmax - one at the label), zeros up to the end of a line of `line` elements; one block a
// row. y may be the logits themselves when OUT is f32 and line is cols.
KERNEL(256, 4)
gradients(const float* logits, const int* labels, const Running* running, Element<OUT>::Stored* y, int cols, int line,
          int first, float factor) {
  const float* row = logits + (u64)blockIdx.x * cols;
  Element<OUT>::Stored* to = y + (u64)blockIdx.x * line;
  float base = (float)log_sum(running[blockIdx.x]);
  int label = labels[blockIdx.x] - first;
  for (int i = threadIdx.x; i < line; i += blockDim.x) {
    float g = 0.0f;
    if (i < cols) {
      g = mul_rn(factor, weight(sub_rn(row[i], base)));
      if (i == label) g = sub_rn(g, factor);
    }
    to[i] = Element<OUT>::narrow(g);
  }
}
