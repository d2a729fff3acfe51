// What an emulated kernel sees of the emulator. See README.md for what is modelled.
// A translation unit is this file, primitives.h, prelude.cuh, the family's text and one EMULATOR_EXPORT a kernel;
// the runtime (block.cpp, memory.cpp, warp.cpp) is a second unit without sanitizers.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

namespace emulator {

// A line of a kernel's source, for reports and to tell barriers apart.
struct Site {
  int line;
  const char* file;
};
// The last parameters of a primitive: where it was called.
#define EMULATOR_SITE int line = __builtin_LINE(), const char *file = __builtin_FILE()

// ---- with the caller that launches

// Memory that kernels may touch.
struct Buffer {
  u64 address;
  u64 len;
};
// In which order blocks, warps and lanes run.
enum Order : u32 { ASCENDING = 0, DESCENDING = 1, RANDOM = 2 };
// The same layout as `RawLaunch` of tests/device/src/emulator/mod.rs.
struct Launch {
  u32 grid[3];
  u32 threads;
  u32 shared_bytes;
  u32 order;
  u64 seed;
  const u64* words;   // arguments
  const char* kinds;  // one letter an argument (see `kind`), then 0
  const Buffer* buffers;
  u64 buffer_count;
};
struct Kernel {
  const char* name;
  u32 bound;          // threads a block may have
  const char* kinds;  // of the parameters
  void (*call)();     // calls the kernel with the words of the running launch
};
// 0, or 1 with a message in `error`.
int run(const Launch& launch, const Kernel& kernel, char* error, u64 error_size);

// ---- with kernels; everything below is called by a thread of a running block

struct Index {
  u32 x, y, z;
};
// The same for the whole life of a thread, so the compiler may call each once.
Index thread_index() __attribute__((const));
Index block_index() __attribute__((const));
Index block_size() __attribute__((const));
Index grid_size() __attribute__((const));
u8* shared_memory() __attribute__((const));
u64 argument_word(u32 index);

void block_barrier(Site site);
void warp_barrier(Site site);
u64 shuffle(u64 bits, u32 lane, Site site);
u64 shuffle_xor(u64 bits, u32 mask, Site site);
u32 warp_ballot(bool bit, Site site);
void load_matrices(u32* r, u32 count, u32 address, bool transposed, Site site);
void mma(float* d, const u32* a, const u32* b, bool f16, u32 k, Site site);

u32 shared_address(const void* p, Site site);
void copy_async_16(u32 shared, const void* global, bool valid, Site site);
void copy_async_commit();
void copy_async_wait(u32 in_flight, Site site);

void device_fence();
u32 atomic_increment(u32* counter, Site site);
u32 load_volatile(const u32* p, Site site);
// Fails unless `p` is aligned to 16 bytes; the access itself is seen as a plain one.
void check_vector(const void* p, int bytes, Site site);

// ---- exports

template <typename T>
struct KindOf;
template <typename T>
struct KindOf<T*> {
  static constexpr char value = 'p';
};
template <>
struct KindOf<int> {
  static constexpr char value = 'i';
};
template <>
struct KindOf<u32> {
  static constexpr char value = 'u';
};
template <>
struct KindOf<u64> {
  static constexpr char value = 'l';
};
template <>
struct KindOf<float> {
  static constexpr char value = 'f';
};

template <u32... I>
struct Indices {};
template <u32 N, u32... I>
struct IndicesBelow : IndicesBelow<N - 1, N - 1, I...> {};
template <u32... I>
struct IndicesBelow<0, I...> {
  typedef Indices<I...> List;
};

// Types, in their order.
template <typename... Types>
struct List {};

// What a launch passes for a parameter of type T: one argument, or one for each member of a struct.
template <typename T, typename = List<>>
struct ArgumentsOf {
  typedef List<T> Types;
};
// Type is List<>, where T exists.
template <typename T>
struct Same {
  typedef List<> Type;
};
template <typename T>
struct ArgumentsOf<T, typename Same<typename T::Members>::Type> {
  typedef typename T::Members Types;
};

template <typename T>
T argument(u32 index) {
  u64 word = argument_word(index);
  T value;
  __builtin_memcpy(&value, &word, sizeof value);
  return value;
}
template <typename T, typename... M, u32... I>
T parameter(List<M...>, Indices<I...>, u32 first) {
  return T{argument<M>(first + I)...};
}
// The parameter whose arguments begin at `first`.
template <typename T, typename... M>
T parameter(List<M...> members, u32 first) {
  return parameter<T>(members, typename IndicesBelow<sizeof...(M)>::List(), first);
}

// Kinds and places of a kernel's arguments. A GPU gets them one behind the other, each at a multiple of its size: structs
// must have their members at the same places.
struct Signature {
  char kinds[64] = {};
  u32 first[32] = {};  // each parameter's first argument
  u32 parameters = 0, arguments = 0;
  u64 packed = 0, end = 0;  // behind the last argument, and behind the last parameter
  bool fits = true;

  static constexpr u64 aligned(u64 at, u64 to) { return (at + to - 1) / to * to; }

  template <typename T, typename... M>
  constexpr void add(List<M...>) {
    u64 start = aligned(end, alignof(T));
    bool begins = true;
    first[parameters++] = arguments;
    (
        [&] {
          packed = aligned(packed, sizeof(M));
          if (begins) fits = fits && packed == start;
          begins = false;
          kinds[arguments++] = KindOf<M>::value;
          packed += sizeof(M);
        }(),
        ...);
    end = start + sizeof(T);
    fits = fits && aligned(packed, alignof(T)) == end;
  }
  template <typename... P>
  static constexpr Signature of() {
    Signature all;
    (all.add<P>(typename ArgumentsOf<P>::Types()), ...);
    return all;
  }
};

template <auto F>
struct Export;
template <typename... P, void (*F)(P...)>
struct Export<F> {
  static constexpr Signature signature = Signature::of<P...>();
  static_assert(signature.fits && signature.packed == signature.end, "a struct among the parameters has gaps");
  static void call() { call_with(typename IndicesBelow<sizeof...(P)>::List()); }

 private:
  template <u32... I>
  static void call_with(Indices<I...>) {
    F(parameter<P>(typename ArgumentsOf<P>::Types(), signature.first[I])...);
  }
};

}  // namespace emulator

#define EMULATOR_EXPORT(name, bound)                                                                             \
  extern "C" __attribute__((visibility("default"))) int emulator_run_##name(const emulator::Launch* launch,      \
                                                                            char* error, u64 error_size) {       \
    typedef emulator::Export<&::name> Exported;                                                                  \
    return emulator::run(*launch, {#name, bound, Exported::signature.kinds, Exported::call}, error, error_size);           \
  }                                                                                                              \
  extern "C" __attribute__((visibility("default"))) const char* emulator_kinds_##name() {                        \
    return emulator::Export<&::name>::signature.kinds;                                                                     \
  }
