// Products on the device process.
#include <math.h>
#include <string.h>

#include <vector>

#include "product.h"

static float load(u64 at, u64 index, u32 type) {
  if (type == F32) return ((const float*)at)[index];
  if (type == F16) return (float)((const _Float16*)at)[index];
  u32 bits = (u32)((const uint16_t*)at)[index] << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static void store(u64 at, u64 index, u32 type, float value) {
  if (type == F32) return (void)(((float*)at)[index] = value);
  if (type == F16) return (void)(((_Float16*)at)[index] = (_Float16)value);
  u32 bits;
  memcpy(&bits, &value, 4);
  // To the nearest, ties to even; NaN stays one.
  bits = value != value ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
  ((uint16_t*)at)[index] = bits >> 16;
}
static float gelu(float x) {
  const float inner = sqrtf(2 / (float)M_PI) * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1 + tanhf(inner));
}

void multiply(const Product& p) {
  memset((void*)p.workspace, POISON, p.workspace_bytes < PAGE ? p.workspace_bytes : PAGE);
  memset((void*)(p.workspace + p.workspace_bytes - PAGE), POISON, PAGE);
  // Rows of A, one for each step of k.
  std::vector<float> a(p.m * p.k), sums(p.m);
  for (u64 step = 0; step < p.k; step++)
    for (u64 row = 0; row < p.m; row++)
      a[step * p.m + row] = load(p.a, p.transpose_a ? row * p.a_line + step : step * p.a_line + row, p.type);
  for (u64 column = 0; column < p.n; column++) {
    for (float& sum : sums) sum = 0;
    for (u64 step = 0; step < p.k; step++) {
      const float b = load(p.b, p.transpose_b ? step * p.b_line + column : column * p.b_line + step, p.type);
      const float* factors = &a[step * p.m];
      for (u64 row = 0; row < p.m; row++) sums[row] += b * factors[row];
    }
    for (u64 row = 0; row < p.m; row++) {
      float value = p.alpha * sums[row];
      if (p.beta != 0) value += p.beta * load(p.c, column * p.c_line + row, p.out);
      if (p.epilogue & BIAS) value += load(p.bias, row, p.out);
      if (p.epilogue & AUX) store(p.aux, column * p.aux_line + row, p.out, value);
      store(p.d, column * p.d_line + row, p.out, p.epilogue & GELU ? gelu(value) : value);
    }
  }
}
