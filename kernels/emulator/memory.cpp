// Memory: every access of a kernel is looked at before it happens. The kernel's unit is compiled with the hooks of
// -fsanitize=thread (plain accesses) and -fsanitize=alignment,bounds,... (undefined behaviour); they end here.

#include <dlfcn.h>

namespace emulator {

// ---- global memory

static const Buffer* nearest_buffer(u64 address) {
  const Launch& launch = *running->launch;
  const Buffer* nearest = nullptr;
  u64 distance = 1 << 20;
  for (u64 i = 0; i < launch.buffer_count; i++) {
    const Buffer& b = launch.buffers[i];
    u64 d = address < b.address ? b.address - address : address - b.address < b.len ? 0 : address - (b.address + b.len);
    if (d < distance) distance = d, nearest = &b;
  }
  return nearest;
}

// A constant of the kernel's own library.
static bool is_constant(u64 address) {
  Dl_info here, there;
  return dladdr((void*)nearest_buffer, &here) && dladdr((void*)address, &there) && here.dli_fbase == there.dli_fbase;
}

static void touch_global(u64 address, u64 size, const char* what, Site site) {
  Block& block = *running;
  if (address >= block.known_low && address + size <= block.known_high) return;
  const Buffer* b = nearest_buffer(address);
  if (b && address >= b->address && address + size <= b->address + b->len) {
    block.known_low = b->address;
    block.known_high = b->address + b->len;
    return;
  }
  if (!b && is_constant(address)) return;
  if (!b) fail(site, "%s of %llu bytes at %#llx, in no buffer", what, size, address);
  fail(site, "%s of %llu bytes at byte %lld of a buffer of %llu bytes", what, size, (i64)(address - b->address), b->len);
}

void check_vector(const void* p, Site site) {
  current_fibre().site = site;
  if ((u64)p % 16) fail(site, "a vector access to %#llx, which is not aligned to 16 bytes", (u64)p);
}

void device_fence() {}
u32 atomic_increment(u32* counter, Site site) {
  current_fibre().site = site;
  touch_global((u64)counter, 4, "atomic_increment", site);
  return (*counter)++;
}
u32 load_volatile(const u32* p, Site site) {
  Block& block = *running;
  current_fibre().site = site;
  touch_global((u64)p, 4, "load_volatile", site);
  if (++block.polls > 1 << 22) fail(site, "4194304 volatile loads: the block waits for one that runs later");
  // Others of the block may have to run for the value to change.
  u32 order = block.launch->order;
  if (block.polls % 64 == 0) {
    const_cast<Launch*>(block.launch)->order = RANDOM;
    wait();
    const_cast<Launch*>(block.launch)->order = order;
  }
  return *p;
}

// ---- shared memory
// Accesses of two threads to the same granule, one of them a write, need a barrier in between: of the block, or of
// the warp when both are in it. `who` packs the thread and its warp's barrier count.

static const u32 IN_FLIGHT = ~0u;  // as the epoch of a write: a copy will land here
static const u32 WHOLE_WARP = 1024, MANY = 2048;

static u32 pack(u32 who, u32 barriers) { return who | barriers << 12; }

// Whether an earlier access by `who` in this epoch is not ordered before one by `thread` (NONE: its whole warp).
static bool conflicts(u32 who, u32 thread, u32 warp_first, u32 barriers) {
  if (who & MANY) return true;
  u32 earlier = who & 1023;
  if (earlier / WARP != warp_first / WARP) return true;
  if (who >> 12 != (barriers & 0xfffff)) return false;
  return who & WHOLE_WARP || earlier != thread;
}

static const char* describe(u32 who, char (&text)[64]) {
  if (who & MANY)
    snprintf(text, sizeof text, "several warps");
  else if (who & WHOLE_WARP)
    snprintf(text, sizeof text, "the warp of thread %u", who & 1023);
  else
    snprintf(text, sizeof text, "thread %u", who & 1023);
  return text;
}

static void touch_granule(u32 g, Touch touch, u32 thread, const char* what, Site site) {
  Block& block = *running;
  Shadow& shadow = block.shadow;
  Warp& warp = current_warp();
  char text[64];
  u32 who = pack(thread == NONE ? warp.first | WHOLE_WARP : thread, warp.barriers);
  if (shadow.write_epoch[g] == IN_FLIGHT) {
    if (touch != LAND)
      fail(site, "%s at byte %u of shared memory while an asynchronous copy of thread %u into it is in flight", what,
           g * GRANULE, shadow.writer[g] & 1023);
  } else if (shadow.write_epoch[g] == block.epoch && conflicts(shadow.writer[g], thread, warp.first, warp.barriers)) {
    fail(site, "%s at byte %u of shared memory without a barrier after the write by %s", what, g * GRANULE,
         describe(shadow.writer[g], text));
  }
  if (touch == READ) {
    bool first = shadow.read_epoch[g] != block.epoch;
    u32 before = shadow.reader[g];
    shadow.read_epoch[g] = block.epoch;
    if (first || !conflicts(before, thread, warp.first, warp.barriers))
      shadow.reader[g] = who;
    else
      shadow.reader[g] = (before & 1023) / WARP == warp.first / WARP && !(before & MANY)
                             ? pack(warp.first | WHOLE_WARP, warp.barriers)
                             : MANY;
    return;
  }
  if (shadow.read_epoch[g] == block.epoch && conflicts(shadow.reader[g], thread, warp.first, warp.barriers))
    fail(site, "%s at byte %u of shared memory without a barrier after the read by %s", what, g * GRANULE,
         describe(shadow.reader[g], text));
  shadow.write_epoch[g] = block.epoch;
  shadow.writer[g] = who;
}

static void touch_shared(u32 offset, u32 size, Touch touch, u32 thread, const char* what, Site site) {
  for (u32 g = offset / GRANULE; g <= (offset + size - 1) / GRANULE; g++) touch_granule(g, touch, thread, what, site);
}

static u32 shared_offset(u32 address, u32 size, const char* what, Site site) {
  u32 bytes = running->launch->shared_bytes;
  if (address % size) fail(site, "%s at byte %d of shared memory, not aligned to %u", what, (int)(address - SHARED_START), size);
  if (address < SHARED_START || address - SHARED_START + size > bytes)
    fail(site, "%s of %u bytes at byte %d of shared memory, which has %u", what, size, (int)(address - SHARED_START), bytes);
  return address - SHARED_START;
}

u32 shared_address(const void* p, Site site) {
  current_fibre().site = site;
  // One past the end is an address; using it is an error.
  i64 offset = (i64)((u64)p - (u64)running->shared);
  if (offset < -(i64)SHARED_START || offset > (i64)(running->launch->shared_bytes + SHARED_MARGIN))
    fail(site, "shared_address of %#llx, which is not in shared memory", (u64)p);
  return (u32)(offset + SHARED_START);
}

// ---- asynchronous copies: they land as late as the waits allow

void copy_async_16(u32 shared, const void* global, bool valid, Site site) {
  const char* what = "copy_async_16";
  Fibre& fibre = current_fibre();
  fibre.site = site;
  u32 offset = shared_offset(shared, 16, what, site);
  if (valid) {
    if ((u64)global % 16) fail(site, "copy_async_16 from %#llx, which is not aligned to 16 bytes", (u64)global);
    touch_global((u64)global, 16, "copy_async_16", site);
  }
  touch_shared(offset, 16, WRITE, running->current, what, site);
  for (u32 g = offset / GRANULE; g < (offset + 16) / GRANULE; g++) running->shadow.write_epoch[g] = IN_FLIGHT;
  memset(running->shared + offset, POISON, 16);
  fibre.copies.push_back({offset, valid ? global : nullptr, fibre.group});
}

static void forget_copies(Fibre& fibre) {
  for (const Copy& copy : fibre.copies)
    for (u32 g = copy.offset / GRANULE; g < (copy.offset + 16) / GRANULE; g++) running->shadow.write_epoch[g] = 0;
  fibre.copies.clear();
}

void copy_async_commit() { current_fibre().group++; }

void copy_async_wait(u32 in_flight, Site site) {
  Fibre& fibre = current_fibre();
  fibre.site = site;
  u64 kept = 0;
  for (const Copy& copy : fibre.copies) {
    if (copy.group + in_flight >= fibre.group) {
      fibre.copies[kept++] = copy;
      continue;
    }
    touch_shared(copy.offset, 16, LAND, running->current, "the landing of a copy", site);
    if (copy.source)
      memcpy(running->shared + copy.offset, copy.source, 16);
    else
      memset(running->shared + copy.offset, 0, 16);
  }
  fibre.copies.resize(kept);
}

// ---- plain accesses

static void plain_access(u64 address, u64 size, bool write) {
  if (!running) return;
  Block& block = *running;
  if (address - block.stack_low < STACK_BYTES) return;
  u64 offset = address - (u64)block.shared;
  const char* what = write ? "a write" : "a read";
  if (offset + SHARED_MARGIN < block.launch->shared_bytes + 2 * SHARED_MARGIN) {
    if (offset + size > block.launch->shared_bytes || offset > block.launch->shared_bytes)
      fail(current_fibre().site, "after this line, %s of %llu bytes at byte %lld of shared memory, which has %u", what, size,
           (i64)offset, block.launch->shared_bytes);
    touch_shared(offset, size, write ? WRITE : READ, block.current, write ? "after this line, a write" : "after this line, a read",
                 current_fibre().site);
    return;
  }
  touch_global(address, size, write ? "after this line, a write" : "after this line, a read", current_fibre().site);
}

}  // namespace emulator

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESSES(SIZE)                                                                                      \
  void __tsan_read##SIZE(void* p) { emulator::plain_access((u64)p, SIZE, false); }                          \
  void __tsan_write##SIZE(void* p) { emulator::plain_access((u64)p, SIZE, true); }                          \
  void __tsan_unaligned_read##SIZE(void* p) { emulator::plain_access((u64)p, SIZE, false); }                \
  void __tsan_unaligned_write##SIZE(void* p) { emulator::plain_access((u64)p, SIZE, true); }                \
  void __tsan_volatile_read##SIZE(void* p) { emulator::plain_access((u64)p, SIZE, false); }                 \
  void __tsan_volatile_write##SIZE(void* p) { emulator::plain_access((u64)p, SIZE, true); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, unsigned long size) { emulator::plain_access((u64)p, size, false); }
void __tsan_write_range(void* p, unsigned long size) { emulator::plain_access((u64)p, size, true); }
void* __tsan_memcpy(void* to, const void* from, unsigned long size) {
  emulator::plain_access((u64)from, size, false);
  emulator::plain_access((u64)to, size, true);
  return memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, unsigned long size) {
  emulator::plain_access((u64)from, size, false);
  emulator::plain_access((u64)to, size, true);
  return memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, unsigned long size) {
  emulator::plain_access((u64)to, size, true);
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
