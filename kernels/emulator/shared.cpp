// Shared memory, and asynchronous copies into it, which land as late as the waits allow.

namespace emulator {

// A warp reads eight granules; false, and nothing is done, when one was written in this epoch.
static bool warp_reads_eight(u32 g) {
  Shadow& shadow = running->room.shadow;
  const u32 epoch = running->room.epoch, now = this_warp();
  u32 *write = &shadow.write_epoch[g], *read = &shadow.read_epoch[g], *reader = &shadow.reader[g];
  u32 written = 0;
  for (u32 i = 0; i < 8; i++) written |= write[i] >= epoch;
  if (written) return false;
  for (u32 i = 0; i < 8; i++) {
    u32 other_warp = (reader[i] ^ now) & (WARP_MASK | MANY);
    reader[i] = ((read[i] == epoch) & (other_warp != 0)) ? MANY : now;
    read[i] = epoch;
  }
  return true;
}

static void touch_shared(u32 offset, u32 size, Touch how, u32 now, const char* what, Site site) {
  if (!WATCHED || size < GRANULE) return;
  Shadow& shadow = running->room.shadow;
  for (u32 g = offset / GRANULE; g <= (offset + size - 1) / GRANULE; g++) {
    Touched cell = {shadow.write_epoch[g], shadow.writer[g], shadow.read_epoch[g], shadow.reader[g]};
    if (how == READ && quick_read<SHARED>(cell, now)) continue;
    touch<SHARED>(cell, how, now, what, g * GRANULE, site);
  }
}

static void warp_reads_row(u32 offset, const char* what, Site site) {
  if (WATCHED && !warp_reads_eight(offset / GRANULE)) touch_shared(offset, 16, READ, this_warp(), what, site);
}

static u32 shared_offset(u32 address, u32 size, const char* what, Site site) {
  u32 bytes = running->launch->shared_bytes;
  int offset = (int)(address - SHARED_START);
  if (address % size) fail(site, "%s at byte %d of shared memory, not aligned to %u", what, offset, size);
  if (offset < 0 || offset + size > bytes)
    fail(site, "%s of %u bytes at byte %d of shared memory, which has %u", what, size, offset, bytes);
  return offset;
}

u32 shared_address(const void* p, Site site) {
  current_fibre().site = site;
  // Addresses outside may be computed; using one is an error.
  i64 offset = (i64)((u64)p - (u64)running->room.shared);
  if (offset < -(i64)SHARED_START || offset > (i64)(running->launch->shared_bytes + SHARED_MARGIN))
    fail(site, "shared_address of %#llx, which is not in shared memory", (u64)p);
  return (u32)(offset + SHARED_START);
}

// ---- asynchronous copies

void copy_async_16(u32 address, const void* global, bool valid, Site site) {
  const char* what = "copy_async_16";
  Fibre& fibre = current_fibre();
  fibre.site = site;
  u32 offset = shared_offset(address, 16, what, site);
  if (valid) {
    if ((u64)global % 16) fail(site, "copy_async_16 from %#llx, which is not aligned to 16 bytes", (u64)global);
    touch_global((u64)global, 16, READ, what, site);
  }
  touch_shared(offset, 16, WRITE, this_thread(), what, site);
  if (WATCHED)
    for (u32 g = offset / GRANULE; g < (offset + 16) / GRANULE; g++) running->room.shadow.write_epoch[g] = IN_FLIGHT;
  memset(running->room.shared + offset, POISON, 16);
  fibre.copies.push_back({offset, valid ? global : nullptr, fibre.group});
}

void copy_async_commit() { current_fibre().group++; }

static void land(const Copy& copy, Site site) {
  const char* what = "the landing of a copy";
  touch_shared(copy.offset, 16, LAND, this_thread(), what, site);
  if (copy.source) {
    touch_global((u64)copy.source, 16, READ, what, site);
    memcpy(running->room.shared + copy.offset, copy.source, 16);
  } else {
    memset(running->room.shared + copy.offset, 0, 16);
  }
}

void copy_async_wait(u32 in_flight, Site site) {
  Fibre& fibre = current_fibre();
  fibre.site = site;
  u64 kept = 0;
  for (const Copy& copy : fibre.copies)
    if (copy.group + in_flight >= fibre.group)
      fibre.copies[kept++] = copy;
    else
      land(copy, site);
  fibre.copies.resize(kept);
}

static void forget_copies(Fibre& fibre) {
  for (const Copy& copy : fibre.copies)
    for (u32 g = copy.offset / GRANULE; g < (copy.offset + 16) / GRANULE; g++) running->room.shadow.write_epoch[g] = 0;
  fibre.copies.clear();
}

}  // namespace emulator
