// Where the compiler's sanitizers end: the kernel's unit is compiled with the hooks of -fsanitize=thread (plain
// accesses, before they happen) and -fsanitize=alignment,bounds,... (undefined behaviour).

namespace emulator {

// `from`: where the kernel accesses memory, for reports.
static void plain_access(u64 address, u64 size, bool write, void* from) {
  if (!running) return;
  Block& block = *running;
  if (address - block.stack_low < STACK_BYTES) return;
  block.program_counter = from;
  const char* what = write ? "a write" : "a read";
  const Site here = {0, nullptr};
  const u64 offset = address - (u64)block.room.shared, bytes = block.launch->shared_bytes;
  if (offset + SHARED_MARGIN >= bytes + 2 * SHARED_MARGIN) {
    touch_global(address, size, write ? WRITE : READ, what, here);
  } else if (offset > bytes || offset + size > bytes) {
    fail(here, "%s of %llu bytes at byte %lld of shared memory, which has %llu", what, size, (i64)offset, bytes);
  } else {
    touch_shared(offset, size, write ? WRITE : READ, this_thread(), what, here);
  }
}

}  // namespace emulator

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define HOOK(ADDRESS, SIZE, WRITES) \
  emulator::plain_access((u64)ADDRESS, SIZE, WRITES, __builtin_return_address(0))
#define ACCESSES(SIZE)                                              \
  void __tsan_read##SIZE(void* p) { HOOK(p, SIZE, false); }            \
  void __tsan_write##SIZE(void* p) { HOOK(p, SIZE, true); }            \
  void __tsan_unaligned_read##SIZE(void* p) { HOOK(p, SIZE, false); }  \
  void __tsan_unaligned_write##SIZE(void* p) { HOOK(p, SIZE, true); }  \
  void __tsan_volatile_read##SIZE(void* p) { HOOK(p, SIZE, false); }   \
  void __tsan_volatile_write##SIZE(void* p) { HOOK(p, SIZE, true); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, unsigned long size) { HOOK(p, size, false); }
void __tsan_write_range(void* p, unsigned long size) { HOOK(p, size, true); }
void* __tsan_memcpy(void* to, const void* from, unsigned long size) {
  HOOK(from, size, false);
  HOOK(to, size, true);
  return memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, unsigned long size) {
  HOOK(from, size, false);
  HOOK(to, size, true);
  return memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, unsigned long size) {
  HOOK(to, size, true);
  return memset(to, value, size);
}

// ---- undefined behaviour: all handlers get a description that starts with the place

struct Place {
  const char* file;
  u32 line, column;
};
struct MisfitData {
  Place place;
  void* type;
  u8 log_alignment, kind;
};
#define UNDEFINED(NAME, PARAMETERS, ...)                                                             \
  void __ubsan_handle_##NAME PARAMETERS {                                                            \
    if (emulator::running) emulator::fail({(int)data->line, data->file}, __VA_ARGS__);               \
  }
UNDEFINED(out_of_bounds, (Place * data, u64 index), "index %lld is outside its array", (i64)index)
UNDEFINED(add_overflow, (Place * data, u64, u64), "an addition of signed integers overflows")
UNDEFINED(sub_overflow, (Place * data, u64, u64), "a subtraction of signed integers overflows")
UNDEFINED(mul_overflow, (Place * data, u64, u64), "a product of signed integers overflows")
UNDEFINED(negate_overflow, (Place * data, u64), "the negation of an integer overflows")
UNDEFINED(divrem_overflow, (Place * data, u64, u64), "a division of integers by zero or with overflow")
UNDEFINED(shift_out_of_bounds, (Place * data, u64, u64), "a shift by a negative count or by all bits")
UNDEFINED(float_cast_overflow, (Place * data, u64), "a float that the integer type cannot hold")
void __ubsan_handle_type_mismatch_v1(MisfitData* data, u64 pointer) {
  if (!emulator::running) return;
  emulator::fail({(int)data->place.line, data->place.file}, "an access to %#llx, which is null or not aligned to %u bytes",
                 pointer, 1u << data->log_alignment);
}
}
