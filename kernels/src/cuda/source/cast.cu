// Casts between f32, bf16 and f16, rounded to nearest even (widening is exact).
// Legend: n elements, any alignment of n; x and y are 16-byte aligned.
// Defines: FROM, TO (TYPE_*).
// Bytes: n * (size of FROM + size of TO); eight elements a thread and round.

typedef Element<FROM> From;
typedef Element<TO> To;

// Eight elements from or to 16-byte words.
template <int T>
struct Eight {
  static DEVICE void load(const u16* p, float (&v)[8]) {
    uint4 w = load_streaming((const uint4*)p);
    u32 words[4] = {w.x, w.y, w.z, w.w};
    UNROLL for (int i = 0; i < 4; i++) {
      v[2 * i] = Element<T>::widen((u16)words[i]);
      v[2 * i + 1] = Element<T>::widen((u16)(words[i] >> 16));
    }
  }
  static DEVICE void store(u16* p, const float (&v)[8]) {
    store_streaming((uint4*)p, make_uint4(Element<T>::narrow_pair(v[0], v[1]), Element<T>::narrow_pair(v[2], v[3]),
                                          Element<T>::narrow_pair(v[4], v[5]), Element<T>::narrow_pair(v[6], v[7])));
  }
};
template <>
struct Eight<TYPE_F32> {
  static DEVICE void load(const float* p, float (&v)[8]) {
    UNROLL for (int half = 0; half < 2; half++) {
      uint4 w = load_streaming((const uint4*)p + half);
      v[4 * half] = float_of_bits(w.x), v[4 * half + 1] = float_of_bits(w.y);
      v[4 * half + 2] = float_of_bits(w.z), v[4 * half + 3] = float_of_bits(w.w);
    }
  }
  static DEVICE void store(float* p, const float (&v)[8]) {
    UNROLL for (int half = 0; half < 2; half++)
      store_streaming((uint4*)p + half, make_uint4(bits_of_float(v[4 * half]), bits_of_float(v[4 * half + 1]),
                                                   bits_of_float(v[4 * half + 2]), bits_of_float(v[4 * half + 3])));
  }
};

KERNEL(256, 4) cast(const From::Stored* x, To::Stored* y, u64 n) {
  u64 stride = (u64)gridDim.x * blockDim.x * 8;
  for (u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < n; i += stride) {
    if (i + 8 <= n) {
      float v[8];
      Eight<FROM>::load(x + i, v);
      Eight<TO>::store(y + i, v);
    } else {
      for (u64 j = i; j < n; j++) y[j] = To::narrow(From::widen(x[j]));
    }
  }
}
