// Casts between f32, bf16 and f16, rounded to nearest even (widening is exact).
// Legend: n elements, any alignment of n; x and y are 16-byte aligned.
// Defines: FROM, TO (TYPE_*).
// Bytes: n * (size of FROM + size of TO); WIDTH elements a thread and round.

typedef Element<FROM> From;
typedef Element<TO> To;
constexpr int WIDTH = FROM == TYPE_F32 || TO == TYPE_F32 ? 4 : 8;

KERNEL(256, 4) cast(const From::Stored* x, To::Stored* y, u64 n) {
  u64 stride = (u64)gridDim.x * blockDim.x * WIDTH;
  for (u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * WIDTH; i < n; i += stride) {
    if (i + WIDTH <= n) {
      Several<FROM, WIDTH> from;
      Several<TO, WIDTH> to;
      from.load(x + i);
      UNROLL for (int j = 0; j < WIDTH / 2; j++) to.set_pair(j, from.get(2 * j), from.get(2 * j + 1));
      to.store_streaming(y + i);
    } else {
      for (u64 j = i; j < n; j++) y[j] = To::narrow(From::widen(x[j]));
    }
  }
}
