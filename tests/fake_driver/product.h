// A matrix product as cuBLASLt describes it: column-major D = epilogue(alpha op(A) op(B) + beta C). It is executed as one
// chain of f32 additions per element, rounded once.
#pragma once
#include "shared.h"

enum Type : u32 { F32 = 0, F16 = 2, BF16 = 14 };  // cudaDataType_t
enum Epilogue : u32 { PLAIN = 1, BIAS = 4, GELU = 32, AUX = 128 };

struct Product {
  u64 a, b, c, d, bias, aux, workspace, workspace_bytes;
  u64 m, n, k, a_line, b_line, c_line, d_line, aux_line;
  u32 transpose_a, transpose_b, type, out, epilogue;
  float alpha, beta;
};
static_assert(sizeof(Product) <= sizeof(u64) * MAX_WORDS, "a product fits a message");

inline u64 size_of(u32 type) { return type == F32 ? 4 : 2; }
// Executes it, on the device.
void multiply(const Product& p);
