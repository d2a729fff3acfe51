// Unpacks weights of 4 or 8 bits, with the bits of kernels::quantized: each product is rounded to f32, then to TO.
// Legend: n elements; codes at packed, the other parts at offsets in bytes; y and packed are 16-byte aligned.
// Defines: TO (TYPE_* of y), FORM (FORM_*), CODEBOOK (0 NF4, 1 FP4; unused for int8).
// Bytes: n / 2 or n, 4 or 1 per block or 4 per row, n * size of TO; eight elements a thread and round.

#define FORM_FOUR_BIT 0
#define FORM_DOUBLE 1
#define FORM_INT8 2

typedef Element<TO> To;

// Values of the codes of 4 bits. An array with a computed index would lie in a stack frame.
#define CODES(V)                                                                                                       \
  V(0, 0xbf800000u, 0x00000000u) V(1, 0xbf3239b1u, 0x3baaaaabu) V(2, 0xbf066b30u, 0x3f2aaaabu)                         \
  V(3, 0xbeca32a0u, 0x3f800000u) V(4, 0xbe91a24du, 0x3eaaaaabu) V(5, 0xbe3d353fu, 0x3f000000u)                         \
  V(6, 0xbdba7871u, 0x3e2aaaabu) V(7, 0x00000000u, 0x3e800000u) V(8, 0x3da2faffu, 0x00000000u)                         \
  V(9, 0x3e24cae3u, 0xbbaaaaabu) V(10, 0x3e7c04ddu, 0xbf2aaaabu) V(11, 0x3ead033au, 0xbf800000u)                       \
  V(12, 0x3ee1a4b8u, 0xbeaaaaabu) V(13, 0x3f1007abu, 0xbf000000u) V(14, 0x3f3913b3u, 0xbe2aaaabu)                      \
  V(15, 0x3f800000u, 0xbe800000u)
#define FIND(I, NF4, FP4) bits = code == I ? (CODEBOOK == 0 ? NF4 : FP4) : bits;
DEVICE float code_value(int code) {
  u32 bits = 0;
  CODES(FIND)
  return float_of_bits(bits);
}

// The tables of a block: 16 values of codes, and 256 of packed magnitudes.
struct Tables {
  float codes[16];
  float magnitudes[256];
};

// block: elements of a block, or of a row for int8.
KERNEL(256, 4) unpack(const u8* packed, u64 magnitudes, u64 nested, u64 offset, To::Stored* y, u64 n, u64 block) {
#if FORM != FORM_INT8
  SHARED_MEMORY(memory);
  Tables* tables = (Tables*)memory;
  if (threadIdx.x < 16) tables->codes[threadIdx.x] = code_value(threadIdx.x);
#if FORM == FORM_DOUBLE
  tables->magnitudes[threadIdx.x] = signed_value(threadIdx.x);
  float mean = *(const float*)(packed + offset);
#endif
  block_barrier();
#endif
  u64 stride = (u64)gridDim.x * blockDim.x * 8;
  for (u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < n; i += stride) {
    int count = i + 8 <= n ? 8 : (int)(n - i);
    float values[8];
#if FORM == FORM_INT8
    u32 words[2] = {0, 0};
    if (count == 8) {
      words[0] = *(const u32*)(packed + i), words[1] = *(const u32*)(packed + i + 4);
    } else {
      UNROLL for (int j = 0; j < 8; j++)
        if (j < count) words[j >> 2] |= (u32)packed[i + j] << (8 * (j & 3));
    }
    u64 row = i / block, left = block - (i - row * block);
    float magnitude = *(const float*)(packed + magnitudes + 4 * row);
    UNROLL for (int j = 0; j < 8; j++) {
      if (j < count && left == 0) {
        row++, left = block;
        magnitude = *(const float*)(packed + magnitudes + 4 * row);
      }
      left--;
      int code = (int)(words[j >> 2] << (24 - 8 * (j & 3))) >> 24;
      values[j] = mul_rn(mul_rn((float)code, magnitude), 7.874015718698502e-3f);
    }
#else
    u32 codes = 0;
    if (count == 8) {
      codes = *(const u32*)(packed + i / 2);
    } else {
      for (int j = 0; 2 * j < count; j++) codes |= (u32)packed[i / 2 + j] << (8 * j);
    }
    u64 at = i / block;
#if FORM == FORM_DOUBLE
    float scale = *(const float*)(packed + nested + 4 * (at / 256));
    float magnitude = add_rn(mul_rn(tables->magnitudes[packed[magnitudes + at]], scale), mean);
#else
    float magnitude = *(const float*)(packed + magnitudes + 4 * at);
#endif
    UNROLL for (int j = 0; j < 8; j++) {
      int code = codes >> (8 * (j >> 1) + (j & 1 ? 0 : 4)) & 15;
      values[j] = mul_rn(tables->codes[code], magnitude);
    }
#endif
    if (count == 8) {
      Eight<TO> to;
      UNROLL for (int j = 0; j < 4; j++) to.set_pair(j, values[2 * j], values[2 * j + 1]);
      to.store(y + i);
    } else {
      UNROLL for (int j = 0; j < 8; j++)
        if (j < count) y[i + j] = To::narrow(values[j]);
    }
  }
}
