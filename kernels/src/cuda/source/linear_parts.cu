// What surrounds the products of lora_linear: operands whose lines are no multiple of 16 bytes are copied to lines
// that are, and the parts of a product whose K loop was cut are added.
// Defines: TYPE (TYPE_*: of the bias), OUT (TYPE_*: of the sum).

#if TYPE == TYPE_BF16 && OUT == TYPE_BF16  // one module has what does not depend on them
// y[i, 0..to) = x[i, 0..from) followed by zeros, for `lines` lines of 16-bit elements; `to` is a multiple of 8, y is
// 16-byte aligned. Bytes: 2 * lines * (from + to).
KERNEL(256, 4) pad_lines(const u16* x, u16* y, u64 lines, int from, int to) {
  u64 chunks = (u64)(to / 8), n = lines * chunks, stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
    u64 line = i / chunks;
    int at = (int)(i - line * chunks) * 8;
    const u16* source = x + (line * (u64)from + at);
    u32 words[4];
    UNROLL for (int w = 0; w < 4; w++) {
      u32 low = at + 2 * w < from ? source[2 * w] : 0u;
      u32 high = at + 2 * w + 1 < from ? source[2 * w + 1] : 0u;
      words[w] = low | high << 16;
    }
    ((uint4*)y)[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
#endif

// y[i, j] = scale * (part 0 + part 1 + ..)[i, j] + bias[j]: parts [parts, m, n] f32, added in this order; bias [n] in
// TYPE or null; y [m, n] with ldy elements from row to row. rows [m] or null: row i of the sum is row rows[i] of y.
// Bytes: m * n * (4 * parts + size of OUT).
KERNEL(256, 4)
sum_parts(const float* partial, int parts, u64 m, u64 n, const Element<TYPE>::Stored* bias, float scale,
          Element<OUT>::Stored* y, u64 ldy, const int* rows) {
  u64 stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < m * n; i += stride) {
    float sum = partial[i];
    for (int p = 1; p < parts; p++) sum = add_rn(sum, partial[(u64)p * (m * n) + i]);
    u64 row = i / n, column = i - row * n;
    float result = fma_rn(sum, scale, bias ? Element<TYPE>::widen(bias[column]) : 0.0f);
    y[(rows ? (u64)rows[row] : row) * ldy + column] = Element<OUT>::narrow(result);
  }
}
