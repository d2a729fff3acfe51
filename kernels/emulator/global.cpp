// Global memory: the buffers of the launch.

namespace emulator {

static KnownBuffer* nearest_buffer(u64 address) {
  KnownBuffer* nearest = nullptr;
  u64 distance = NEAR_BYTES;
  for (KnownBuffer& b : running->buffers) {
    u64 d = address < b.start ? b.start - address : address < b.end ? 0 : address - b.end;
    if (d < distance) distance = d, nearest = &b;
  }
  return nearest;
}

// A constant of the kernel's own library.
static bool is_constant(u64 address) {
  Dl_info here, there;
  return dladdr((void*)nearest_buffer, &here) && dladdr((void*)address, &there) && here.dli_fbase == there.dli_fbase;
}

// The buffer that holds these bytes; null for a constant.
static const KnownBuffer* find_buffer(u64 address, u64 size, const char* what, Site site) {
  KnownBuffer& known = running->known;
  if (address >= known.start && address + size <= known.end) return &known;
  const KnownBuffer* b = nearest_buffer(address);
  if (b && address >= b->start && address + size <= b->end) return &(known = *b);
  if (!b && is_constant(address)) return nullptr;
  if (!b) fail(site, "%s of %llu bytes at %#llx, in no buffer", what, size, address);
  fail(site, "%s of %llu bytes at byte %lld of a buffer of %llu bytes", what, size, (i64)(address - b->start),
       b->end - b->start);
}

static void touch_global(u64 address, u64 size, Touch how, const char* what, Site site) {
  const KnownBuffer* b = find_buffer(address, size, what, site);
  if (!WATCHED || !b || size < GRANULE) return;
  const u32 now = this_thread();
  const u64 last = (address + size - 1 - b->start) / GRANULE;
  for (u64 g = (address - b->start) / GRANULE; g <= last; g++) {
    Cell& c = b->cells[g];
    Touched cell = {c.write_epoch, c.writer, c.read_epoch, c.reader};
    if (how == READ && quick_read<GLOBAL>(cell, now)) continue;
    touch<GLOBAL>(cell, how, now, what, g * GRANULE, site);
  }
}

void check_vector(const void* p, int bytes, Site site) {
  current_fibre().site = site;
  if ((u64)p % bytes) fail(site, "a vector access to %#llx, which is not aligned to %d bytes", (u64)p, bytes);
}

u32 atomic_increment(u32* counter, Site site) {
  current_fibre().site = site;
  if ((u64)counter % 4) fail(site, "atomic_increment at %#llx, which is not aligned to 4 bytes", (u64)counter);
  find_buffer((u64)counter, 4, "atomic_increment", site);
  release_and_acquire((u64)counter, true);
  return (*counter)++;
}

u32 load_volatile(const u32* p, Site site) {
  Block& block = *running;
  current_fibre().site = site;
  if ((u64)p % 4) fail(site, "load_volatile at %#llx, which is not aligned to 4 bytes", (u64)p);
  find_buffer((u64)p, 4, "load_volatile", site);
  bool is_counter = false;
  for (const Release& release : block.releases) is_counter |= release.counter == (u64)p;
  if (is_counter)
    release_and_acquire((u64)p, false);
  else
    touch_global((u64)p, 4, READ, "load_volatile", site);
  if (++block.polls > MAX_POLLS) fail(site, "%u volatile loads: does the block wait for one that runs later?", MAX_POLLS);
  if (block.polls % 64 == 0) {
    // Others of the block may have to run for the value to change.
    block.shuffled = true;
    wait();
    block.shuffled = false;
  }
  return *p;
}

}  // namespace emulator
