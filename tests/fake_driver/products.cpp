// cuBLASLt's side of the stand-in. It has one algorithm for every product, which uses the workspace it may use.
#include <stdlib.h>
#include <string.h>

#include <mutex>
#include <set>

#include "driver.h"
#include "product.h"

enum : u32 { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
constexpr u64 ALGORITHM = 0x66616b65;

struct Description {
  u32 compute, scale;
  int transpose_a, transpose_b;
  u32 epilogue;
  u64 bias, aux;
  long aux_line;
};
struct Layout {
  u32 type;
  u64 rows, columns;
  long line;
};
struct Preference {
  u64 workspace_bytes;
  u32 schemes, alignment[4];
};
struct Algorithm {
  u64 data[8];
};
struct Result {
  Algorithm algorithm;
  size_t workspace_bytes;
  u32 state;
  float waves;
  int reserved[4];
};

static std::mutex busy;
static std::set<const void*>& alive = *new std::set<const void*>;  // as in objects.h

template <typename T>
static u32 make(T** to, T value) {
  std::lock_guard<std::mutex> lock(busy);
  *to = new T(value);
  alive.insert(*to);
  return SUCCESS;
}
template <typename T>
static u32 end(T* one) {
  std::lock_guard<std::mutex> lock(busy);
  if (!alive.erase(one)) return broken(INVALID_VALUE, "cuBLASLt: a handle that is not alive is destroyed");
  delete one;
  return SUCCESS;
}
static bool lives(const void* one) {
  std::lock_guard<std::mutex> lock(busy);
  return alive.count(one);
}
#define NEED(one) \
  if (!lives(one)) return broken(INVALID_VALUE, "%s of a handle that is not alive", __func__)

EXPORT size_t cublasLtGetVersion() { return setting("TESSERA_FAKE_CUBLASLT", 130000); }
EXPORT const char* cublasLtGetStatusName(u32 code) {
  switch (code) {
    case SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    default: return "an unknown status";
  }
}
EXPORT u32 cublasLtCreate(u64** handle) {
  if (!has_context()) return broken(NOT_INITIALIZED, "cublasLtCreate without a current context");
  return make(handle, (u64)0);
}
EXPORT u32 cublasLtDestroy(u64* handle) { return end(handle); }

EXPORT u32 cublasLtMatmulDescCreate(Description** to, u32 compute, u32 scale) {
  if (compute != 68 || scale != F32) return broken(NOT_SUPPORTED, "compute type %u, scale type %u", compute, scale);
  return make(to, Description{compute, scale, 0, 0, PLAIN, 0, 0, 0});
}
EXPORT u32 cublasLtMatmulDescDestroy(Description* one) { return end(one); }

// Writes an attribute whose size must be that of the field.
template <typename T>
static u32 write(T& field, const void* from, size_t bytes) {
  if (bytes != sizeof field) return broken(INVALID_VALUE, "an attribute of %zu bytes is set with %zu", sizeof field, bytes);
  memcpy(&field, from, bytes);
  return SUCCESS;
}
EXPORT u32 cublasLtMatmulDescSetAttribute(Description* of, u32 which, const void* from, size_t bytes) {
  NEED(of);
  switch (which) {
    case 3: return write(of->transpose_a, from, bytes);
    case 4: return write(of->transpose_b, from, bytes);
    case 7: return write(of->epilogue, from, bytes);
    case 8: return write(of->bias, from, bytes);
    case 11: return write(of->aux, from, bytes);
    case 12: return write(of->aux_line, from, bytes);
    default: return broken(NOT_SUPPORTED, "attribute %u of a description is not modeled", which);
  }
}
EXPORT u32 cublasLtMatrixLayoutCreate(Layout** to, u32 type, u64 rows, u64 columns, long line) {
  if (line < (long)rows) return broken(INVALID_VALUE, "columns of %lu rows overlap at %ld", rows, line);
  return make(to, Layout{type, rows, columns, line});
}
EXPORT u32 cublasLtMatrixLayoutDestroy(Layout* one) { return end(one); }
EXPORT u32 cublasLtMatmulPreferenceCreate(Preference** to) { return make(to, Preference{0, ~0u, {256, 256, 256, 256}}); }
EXPORT u32 cublasLtMatmulPreferenceDestroy(Preference* one) { return end(one); }
EXPORT u32 cublasLtMatmulPreferenceSetAttribute(Preference* of, u32 which, const void* from, size_t bytes) {
  NEED(of);
  switch (which) {
    case 1: return write(of->workspace_bytes, from, bytes);
    case 3: return write(of->schemes, from, bytes);
    case 5: case 6: case 7: case 8: return write(of->alignment[which - 5], from, bytes);
    default: return broken(NOT_SUPPORTED, "attribute %u of a preference is not modeled", which);
  }
}

// The extents of a product, if the layouts fit each other.
static u32 extents(const Description* of, const Layout* a, const Layout* b, const Layout* c, const Layout* d, Product& p) {
  p.transpose_a = of->transpose_a, p.transpose_b = of->transpose_b, p.epilogue = of->epilogue;
  p.type = a->type, p.out = d->type;
  p.m = p.transpose_a ? a->columns : a->rows, p.k = p.transpose_a ? a->rows : a->columns;
  p.n = p.transpose_b ? b->rows : b->columns;
  p.a_line = a->line, p.b_line = b->line, p.c_line = c->line, p.d_line = d->line, p.aux_line = of->aux_line;
  const bool fits = p.k == (p.transpose_b ? b->columns : b->rows) && d->rows == p.m && d->columns == p.n &&
                    c->rows == p.m && c->columns == p.n && a->type == b->type && c->type == d->type;
  const bool known = (p.type == F32 || p.type == F16 || p.type == BF16) && (p.out == F32 || p.out == p.type);
  if (!fits) return broken(INVALID_VALUE, "layouts of a product do not fit each other");
  if ((p.epilogue & AUX) && p.aux_line < p.m) return broken(INVALID_VALUE, "lines of the auxiliary output overlap");
  return known ? SUCCESS : NOT_SUPPORTED;
}

EXPORT u32 cublasLtMatmulAlgoGetHeuristic(u64* handle, Description* of, Layout* a, Layout* b, Layout* c, Layout* d,
                                          Preference* preference, int wanted, Result* results, int* found) {
  NEED(handle);
  for (const void* one : {(void*)of, (void*)a, (void*)b, (void*)c, (void*)d, (void*)preference}) NEED(one);
  if (wanted < 1) return broken(INVALID_VALUE, "no result is wanted");
  Product p = {};
  if (u32 code = extents(of, a, b, c, d, p)) return *found = 0, code;
  results[0] = {};
  results[0].algorithm.data[0] = ALGORITHM;
  results[0].algorithm.data[1] = results[0].workspace_bytes = preference->workspace_bytes;
  for (int i = 0; i < 4; i++) results[0].algorithm.data[2 + i] = preference->alignment[i];
  return *found = 1, SUCCESS;
}

static u64 span(u64 lines, u64 line, u64 along, u32 type) { return ((lines - 1) * line + along) * size_of(type); }

EXPORT u32 cublasLtMatmul(u64* handle, Description* of, const float* alpha, const void* a, Layout* a_layout, const void* b,
                          Layout* b_layout, const float* beta, const void* c, Layout* c_layout, void* d, Layout* d_layout,
                          const Algorithm* algorithm, void* workspace, size_t bytes, void* stream) {
  NEED(handle);
  for (const void* one : {(void*)of, (void*)a_layout, (void*)b_layout, (void*)c_layout, (void*)d_layout}) NEED(one);
  if (!algorithm || algorithm->data[0] != ALGORITHM) return broken(INVALID_VALUE, "an algorithm of another library");
  if (bytes < algorithm->data[1]) return broken(INVALID_VALUE, "%zu bytes of workspace, the algorithm needs %lu", bytes, algorithm->data[1]);
  Product p = {};
  if (u32 code = extents(of, a_layout, b_layout, c_layout, d_layout, p)) return code;
  p.a = (u64)a, p.b = (u64)b, p.c = (u64)c, p.d = (u64)d, p.bias = of->bias, p.aux = of->aux;
  p.alpha = faulty("product") ? -*alpha : *alpha, p.beta = *beta, p.workspace = (u64)workspace, p.workspace_bytes = bytes;
  const u64 at[4] = {p.a, p.b, p.c, p.d};
  for (int i = 0; i < 4; i++)
    if (at[i] % algorithm->data[2 + i]) return broken(INVALID_VALUE, "operand %d at %#lx is not aligned as was promised", i, at[i]);
  const bool inside = is_device_memory(p.a, span(a_layout->columns, p.a_line, a_layout->rows, p.type)) &&
                      is_device_memory(p.b, span(b_layout->columns, p.b_line, b_layout->rows, p.type)) &&
                      is_device_memory(p.d, span(p.n, p.d_line, p.m, p.out)) && is_device_memory(p.workspace, bytes) &&
                      (p.beta == 0 || is_device_memory(p.c, span(p.n, p.c_line, p.m, p.out))) &&
                      (!(p.epilogue & BIAS) || is_device_memory(p.bias, p.m * size_of(p.out))) &&
                      (!(p.epilogue & AUX) || is_device_memory(p.aux, span(p.n, p.aux_line, p.m, p.out)));
  if (!inside) return broken(INVALID_VALUE, "an operand of a product is outside of allocations");
  Message m = {};
  m.kind = PRODUCT;
  memcpy(m.words, &p, sizeof p);
  return queue_on(stream, m) ? EXECUTION_FAILED : SUCCESS;
}
