// Device memory, pinned memory of the host, and copies between them.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "objects.h"

// A range of whole pages with an unused page behind it.
u64 take(u64 base, u64 bytes) {
  u64 size = whole_pages(bytes) + PAGE;
  for (auto [start, free] : holes)
    if (start >= base && start < base + SPACE && free >= size) {
      holes.erase(start);
      if (free > size) holes[start + size] = free - size;
      return start;
    }
  return 0;
}
static void give(u64 start, u64 bytes) {
  u64 size = whole_pages(bytes) + PAGE;
  auto next = holes.lower_bound(start);
  if (next != holes.end() && next->first == start + size && next->first != PINNED_BASE) {
    size += next->second;
    next = holes.erase(next);
  }
  if (next != holes.begin() && std::prev(next)->first + std::prev(next)->second == start && start != PINNED_BASE)
    std::prev(next)->second += size;
  else holes[start] = size;
}

static void map(Context* context, Kind kind, u64 at, u64 bytes) {
  Message m = {};
  m.kind = kind, m.at = at, m.bytes = bytes;
  send(context, m);
}

// The live range that holds these bytes.
static const Range* find(u64 at, u64 bytes) {
  auto after = memory.upper_bound(at);
  if (after == memory.begin()) return nullptr;
  auto [start, range] = *std::prev(after);
  return at + bytes <= start + range.bytes ? &std::prev(after)->second : nullptr;
}
bool is_device(u64 at, u64 bytes) { return at < PINNED_BASE && find(at, bytes); }
static bool is_pinned(u64 at, u64 bytes) { return at >= PINNED_BASE && find(at, bytes); }

u64 used(Context* context) {
  u64 bytes = 0;
  for (auto& [start, range] : memory)
    if (range.context == context && start < PINNED_BASE && !range.imported) bytes += range.bytes;
  return bytes;
}

static u64 context_bytes() { return setting("TESSERA_FAKE_CONTEXT", 0); }
EXPORT u32 cuMemGetInfo_v2(size_t* free, size_t* total) {
  NEED_CONTEXT();
  Lock lock(busy);
  *total = memory_bytes();
  *free = *total - std::min<u64>(*total, used(current) + context_bytes());
  return SUCCESS;
}
// Bytes of a device that this process uses.
u64 used_bytes(u32 device) {
  Lock lock(busy);
  u64 bytes = 0;
  for (auto [number, context] : contexts)
    if (number == (int)device) bytes += used(context) + context_bytes();
  return std::min(bytes, memory_bytes());
}
EXPORT u32 cuMemAlloc_v2(u64* at, size_t bytes) {
  NEED_CONTEXT();
  if (!bytes) return broken(INVALID_VALUE, "an allocation of no bytes");
  Lock lock(busy);
  NEED_NO_CAPTURE();
  if (faulty("memory") || used(current) + bytes > memory_bytes()) return OUT_OF_MEMORY;
  u64 start = take(BASE, bytes);
  memory[start] = {current, bytes, false};
  map(current, MAP, start, bytes);
  return *at = start, SUCCESS;
}

u32 release(u64 start) {
  auto range = memory.find(start);
  u64 bytes = range->second.bytes;
  Context* context = range->second.context;
  drain(context);
  map(context, UNMAP, start, bytes);
  // The device must have unmapped the range before its pages are freed: messages are in order.
  if (!range->second.imported) fallocate(context->memory, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, start - BASE, whole_pages(bytes));
  memory.erase(range);
  give(start, bytes);
  return context->state->error;
}

EXPORT u32 cuMemFree_v2(u64 at) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_NO_CAPTURE();
  auto range = memory.find(at);
  if (at >= PINNED_BASE || range == memory.end() || range->second.imported)
    return broken(INVALID_VALUE, "cuMemFree of an address that cuMemAlloc did not give");
  return release(at);
}
EXPORT u32 cuMemHostAlloc(void** at, size_t bytes, u32 flags) {
  NEED_CONTEXT();
  if (!bytes || flags > 7) return broken(INVALID_VALUE, "pinned memory of %zu bytes, flags %u", bytes, flags);
  Lock lock(busy);
  NEED_NO_CAPTURE();
  if (faulty("pinned")) return OUT_OF_MEMORY;
  u64 start = take(PINNED_BASE, bytes), size = whole_pages(bytes);
  void* mapped = mmap((void*)start, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, current->memory, start - BASE);
  if (mapped == MAP_FAILED) return OUT_OF_MEMORY;
  memory[start] = {current, bytes, false};
  map(current, MAP, start, bytes);
  return *at = mapped, SUCCESS;
}
EXPORT u32 cuMemFreeHost(void* at) {
  NEED_CONTEXT();
  Lock lock(busy);
  auto range = memory.find((u64)at);
  if ((u64)at < PINNED_BASE || range == memory.end())
    return broken(INVALID_VALUE, "cuMemFreeHost of an address that cuMemHostAlloc did not give");
  u64 size = whole_pages(range->second.bytes);
  u32 code = release((u64)at);
  mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return code;
}

// ---- registered memory: the program's own, which the device process reads when a copy runs

// Copies that may still read it, with the number of the command.
struct Read {
  Context* context;
  u32 stream;
  u64 number, from, bytes;
};
static std::vector<Read>& reads = *new std::vector<Read>();

// Whether a copy that is not done reads a part of these bytes.
static bool has_queued(Context* context, u64 from, u64 bytes) {
  auto is_done = [](const Read& read) { return read.context->state->streams[read.stream].done >= read.number; };
  reads.erase(std::remove_if(reads.begin(), reads.end(), is_done), reads.end());
  return std::any_of(reads.begin(), reads.end(), [&](const Read& read) {
    return read.context == context && read.from < from + bytes && from < read.from + read.bytes;
  });
}
// By first byte.
static std::map<u64, Range>& registered = *new std::map<u64, Range>();

static bool is_registered(u64 at, u64 bytes) {
  auto after = registered.upper_bound(at);
  if (after == registered.begin()) return false;
  auto [start, range] = *std::prev(after);
  return at + bytes <= start + range.bytes;
}
EXPORT u32 cuMemHostRegister_v2(void* at, size_t bytes, u32 flags) {
  NEED_CONTEXT();
  if (!bytes || flags > 15) return broken(INVALID_VALUE, "a registration of %zu bytes, flags %u", bytes, flags);
  Lock lock(busy);
  NEED_NO_CAPTURE();
  if (faulty("register")) return NOT_SUPPORTED;
  u64 start = (u64)at, end = start + bytes;
  if (start < END && end > BASE) return broken(INVALID_VALUE, "a registration of memory that the driver gave");
  auto next = registered.lower_bound(start);
  if (is_registered(start, 1) || (next != registered.end() && next->first < end))
    return broken(ALREADY_REGISTERED, "a registration of memory that is registered");
  // The device process reads this memory.
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
  registered[start] = {current, bytes, false};
  return SUCCESS;
}
EXPORT u32 cuMemHostUnregister(void* at) {
  NEED_CONTEXT();
  Lock lock(busy);
  auto range = registered.find((u64)at);
  if (range == registered.end()) return broken(NOT_REGISTERED, "the end of a registration that does not exist");
  Context* context = range->second.context;
  u64 start = range->first, bytes = range->second.bytes;
  registered.erase(range);
  // The reference does not say that the call waits.
  if (has_queued(context, start, bytes)) return broken(INVALID_VALUE, "the end of a registration that a copy still reads");
  return SUCCESS;
}
EXPORT u32 cuPointerGetAttribute(u32* value, int which, u64 at) {
  NEED_CONTEXT();
  Lock lock(busy);
  if (which != 2) return broken(NOT_SUPPORTED, "pointer attribute %d is not modeled", which);
  if (!find(at, 1)) return INVALID_VALUE;
  return *value = at < PINNED_BASE ? 2 : 1, SUCCESS;
}

// ---- copies

EXPORT u32 cuMemsetD8Async(u64 at, u8 value, size_t bytes, Stream* stream) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(streams, stream);
  // A graph takes no node of this kind, and the reference says nothing of a stream.
  if (!bytes) return broken(INVALID_VALUE, "a fill of no bytes");
  if (!is_device(at, bytes)) return broken(INVALID_VALUE, "a fill of %zu bytes at %#lx, outside of allocations", bytes, at);
  Message m = {};
  m.kind = FILL, m.at = at, m.value = value, m.bytes = bytes;
  return queue(stream, m);
}
// Whether an address is in memory of another process.
static bool is_imported(u64 at) {
  auto range = memory.upper_bound(at);
  return range != memory.begin() && (--range)->second.imported && at - range->first < range->second.bytes;
}
static u32 copy(Stream* stream, u64 to, u64 from, u64 bytes) {
  Message m = {};
  m.kind = COPY, m.at = to, m.from = from, m.bytes = bytes;
  if (is_imported(from) && faulty("peer")) return SUCCESS;
  if (from >= PINNED_BASE && faulty("late")) return stream->late.push_back(m), SUCCESS;
  return queue(stream, m);
}
EXPORT u32 cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, Stream* stream) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(streams, stream);
  if (!bytes) return SUCCESS;
  if (!is_device(to, bytes) || !is_device(from, bytes))
    return broken(INVALID_VALUE, "a copy of %zu bytes from %#lx to %#lx, outside of allocations", bytes, from, to);
  if (to < from + bytes && from < to + bytes) return broken(INVALID_VALUE, "a copy between overlapping ranges");
  return copy(stream, to, from, bytes);
}
// Pageable memory goes through pinned memory of the driver, as in CUDA.
static u64 staging(u64 bytes) {
  void* at = nullptr;
  return cuMemHostAlloc(&at, bytes, 0) ? 0 : (u64)at;
}
EXPORT u32 cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, Stream* stream) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(streams, stream);
  if (!bytes) return SUCCESS;
  if (!is_device(to, bytes)) return broken(INVALID_VALUE, "a copy of %zu bytes to %#lx, outside of allocations", bytes, to);
  if (is_pinned((u64)from, bytes)) return copy(stream, to, (u64)from, bytes);
  if (is_registered((u64)from, bytes)) {
    if (stream->captures) return broken(NOT_SUPPORTED, "a copy of registered memory in a capture is not modeled");
    Range& range = std::prev(registered.upper_bound((u64)from))->second;
    if (!range.imported) note("read registered memory");
    range.imported = true;  // here: whether it was read
    Message m = {};
    m.kind = COPY_IN, m.at = to, m.from = (u64)from, m.bytes = bytes, m.pid = getpid();
    if (faulty("late")) return stream->late.push_back(m), SUCCESS;
    u32 code = queue(stream, m);
    reads.push_back({stream->context, stream->number, stream->context->state->streams[stream->number].queued, m.from, bytes});
    return code;
  }
  if ((u64)from >= BASE && (u64)from < END) return broken(INVALID_VALUE, "a copy from %p, which is no host memory", from);
  if (stream->captures) return broken(CAPTURE_UNSUPPORTED, "a copy of pageable memory in a capture");
  u64 pinned = staging(bytes);
  if (!pinned) return OUT_OF_MEMORY;
  memcpy((void*)pinned, from, bytes);
  u32 code = copy(stream, to, pinned, bytes);
  drain(stream->context, stream->number);
  cuMemFreeHost((void*)pinned);
  return code;
}
EXPORT u32 cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, Stream* stream) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(streams, stream);
  if (!bytes) return SUCCESS;
  if (!is_device(from, bytes)) return broken(INVALID_VALUE, "a copy of %zu bytes from %#lx, outside of allocations", bytes, from);
  if (is_pinned((u64)to, bytes)) {
    // What is there until the copy is done is not defined.
    if (!stream->captures) memset(to, POISON, bytes);
    hold(stream, bytes);
    return copy(stream, (u64)to, from, bytes);
  }
  if ((u64)to >= BASE && (u64)to < END) return broken(INVALID_VALUE, "a copy to %p, which is no host memory", to);
  if (stream->captures) return broken(CAPTURE_UNSUPPORTED, "a copy to pageable memory in a capture");
  u64 pinned = staging(bytes);
  if (!pinned) return OUT_OF_MEMORY;
  u32 code = copy(stream, pinned, from, bytes);
  if (u32 lost = drain(stream->context, stream->number)) return lost;
  memcpy(to, (void*)pinned, bytes);
  cuMemFreeHost((void*)pinned);
  return code;
}
