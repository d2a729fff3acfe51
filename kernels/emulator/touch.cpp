// Who touched which memory last, and whether an access is ordered after the ones before.
//
// Two accesses of different threads to the same granule, one of them a write, need in between
//   within a block: the block's barrier, or the warp's barrier when both threads are in it;
//   between blocks: a fence and an increment of a counter by the first, then an increment of it by the second.
// Time is the epoch: it counts the barriers of all blocks, which run one after the other. `who` packs the thread and
// the number of its warp's barriers so far.

namespace emulator {

static const u32 IN_FLIGHT = ~0u;       // as the epoch of a write: a copy will land here
static const u32 SEVERAL_BLOCKS = ~0u;  // as the epoch of a read
static const u32 THREAD_MASK = 1023, WARP_MASK = 992, WHOLE_WARP = 1024, MANY = 2048, BARRIERS_SHIFT = 12;

static u32 this_thread() { return running->current | current_warp().barriers << BARRIERS_SHIFT; }
static u32 this_warp() { return current_warp().first | WHOLE_WARP | current_warp().barriers << BARRIERS_SHIFT; }

// Whether two accesses in the same epoch are not ordered.
static bool concurrent(u32 earlier, u32 now) {
  if ((earlier | now) & MANY || (earlier ^ now) & WARP_MASK) return true;
  if ((earlier ^ now) >> BARRIERS_SHIFT) return false;
  return earlier != now || earlier & WHOLE_WARP;
}

static const char* describe(u32 who, char (&text)[64]) {
  if (who & MANY)
    snprintf(text, sizeof text, "several warps");
  else
    snprintf(text, sizeof text, "%sthread %u", who & WHOLE_WARP ? "the warp of " : "", who & THREAD_MASK);
  return text;
}

// ---- between blocks

// Whether what `who` did in an epoch of an earlier block was published by this release.
static bool publishes(const Release& release, u32 epoch, u32 who) {
  u32 thread = who & THREAD_MASK, fence = release.fences[release.thread];
  if (epoch < fence) return true;  // a barrier lies between the access and the fence
  if (who & MANY) return false;
  if (thread == release.thread) return epoch <= fence;
  return epoch <= release.fences[thread] && release.fences[thread] < release.epoch;
}

static u32 block_of(u32 epoch) {
  const std::vector<u32>& starts = running->starts;
  u32 low = 0, high = (u32)starts.size();
  while (high - low > 1) {
    u32 middle = (low + high) / 2;
    (starts[middle] <= epoch ? low : high) = middle;
  }
  return low;
}

// Whether the running thread has seen a release that `accept` takes.
template <typename Accept>
static bool has_seen(Accept accept) {
  Block& block = *running;
  for (const Acquire& acquire : block.acquires) {
    if (acquire.epoch == block.epoch && acquire.thread != block.current) continue;  // no barrier since
    for (u64 i = 0; i < acquire.releases; i++)
      if (block.releases[i].counter == acquire.counter && accept(block.releases[i])) return true;
  }
  return false;
}

// Whether the running thread may rely on what `who` did in an epoch of an earlier block.
static bool handed_over(u32 epoch, u32 who) {
  if (running->acquires.empty()) return false;
  u32 number = block_of(epoch);
  return has_seen([&](const Release& r) { return r.block == number && publishes(r, epoch, who); });
}

// Whether all blocks that ran before have handed over something.
static bool all_handed_over() {
  for (u32 number = 0; number + 1 < running->starts.size(); number++)
    if (!has_seen([&](const Release& r) { return r.block == number && r.fences[r.thread]; })) return false;
  return true;
}

void device_fence() { current_fibre().fence = running->epoch; }

static void release_and_acquire(u64 counter, bool release) {
  Block& block = *running;
  block.acquires.push_back({counter, block.releases.size(), block.current, block.epoch});
  if (!release) return;
  std::vector<u32> fences;
  for (const Fibre& fibre : block.fibre) fences.push_back(fibre.fence);
  block.releases.push_back({counter, (u32)block.starts.size() - 1, block.current, block.epoch, fences});
}

// ---- one granule

enum Space { SHARED, GLOBAL };

// Whether an access now comes too early after one in an epoch. Each block has shared memory of its own.
template <Space SPACE>
static bool races(u32 epoch, u32 earlier, u32 now) {
  Block& block = *running;
  if (epoch == block.epoch) return concurrent(earlier, now);
  return SPACE == GLOBAL && epoch && epoch < block.starts.back() && !handed_over(epoch, earlier);
}

[[noreturn]] static void report_race(const char* what, const char* where, u64 at, u32 epoch, u32 who, const char* other,
                                     Site site) {
  char text[64];
  if (epoch >= running->starts.back() && epoch <= running->epoch)
    fail(site, "%s at byte %llu of %s without a barrier after the %s by %s", what, at, where, other, describe(who, text));
  fail(site, "%s at byte %llu of %s without a fence and a counter after the %s by another block", what, at, where, other);
}

// `at`: the byte, for reports.
template <Space SPACE>
static void touch(Touched cell, Touch how, u32 now, const char* what, u64 at, Site site) {
  Block& block = *running;
  const char* where = SPACE == SHARED ? "shared memory" : "a buffer";
  // What happens most: reads of what nobody has written of late.
  if (how == READ && cell.write_epoch < (SPACE == SHARED ? block.epoch : 1)) {
    if ((cell.read_epoch == block.epoch && cell.reader == now) || cell.read_epoch == SEVERAL_BLOCKS) return;
    if (cell.read_epoch == 0) {
      cell.read_epoch = block.epoch;
      cell.reader = now;
      return;
    }
  }
  if (cell.write_epoch == IN_FLIGHT) {
    if (how != LAND)
      fail(site, "%s at byte %llu of %s while an asynchronous copy of thread %u into it is in flight", what, at, where,
           cell.writer & THREAD_MASK);
  } else if (races<SPACE>(cell.write_epoch, cell.writer, now)) {
    report_race(what, where, at, cell.write_epoch, cell.writer, "write", site);
  }
  if (how == READ) {
    if (cell.read_epoch == SEVERAL_BLOCKS) return;
    if (!races<SPACE>(cell.read_epoch, cell.reader, now)) {
      cell.reader = now;
      cell.read_epoch = block.epoch;
    } else if (cell.read_epoch != block.epoch) {
      cell.read_epoch = SEVERAL_BLOCKS;
    } else {
      // Older reads of the same warp are ordered before whatever this one is ordered before.
      bool same_warp = !((cell.reader ^ now) & WARP_MASK) && !(cell.reader & MANY);
      cell.reader = same_warp ? this_warp() : MANY;
    }
    return;
  }
  if (cell.read_epoch == SEVERAL_BLOCKS) {
    if (!all_handed_over()) fail(site, "%s at byte %llu of %s, which several blocks read", what, at, where);
    cell.read_epoch = 0;
  } else if (races<SPACE>(cell.read_epoch, cell.reader, now)) {
    report_race(what, where, at, cell.read_epoch, cell.reader, "read", site);
  }
  cell.write_epoch = block.epoch;
  cell.writer = now;
}

}  // namespace emulator
