// A stand-in for NVIDIA's driver, for tests of the unmodified program. README.md describes what it enforces.
//
// The rules are those of NVIDIA's driver API reference, not those of the code under test. A broken rule is reported on
// standard error and returned as the error that the reference names. Memory and streams are in a device process
// (device.cpp) for each context.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "driver.h"

extern char** environ;

// ---- CUresult

enum : u32 {
  SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
  INVALID_IMAGE = 200, INVALID_CONTEXT = 201, MAP_FAILED_ = 205, PEER_ACCESS_UNSUPPORTED = 217, INVALID_PTX = 218,
  INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, CONTEXT_IS_DESTROYED = 709,
  LAUNCH_FAILED = 719, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
  CAPTURE_UNMATCHED = 903, CAPTURE_ISOLATION = 905, CAPTURE_IMPLICIT = 906, CAPTURE_WRONG_THREAD = 908, UNKNOWN = 999,
};

EXPORT u32 cuGetErrorName(u32 code, const char** name) {
  static const std::map<u32, const char*> names = {
      {0, "CUDA_SUCCESS"}, {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"},
      {3, "CUDA_ERROR_NOT_INITIALIZED"}, {100, "CUDA_ERROR_NO_DEVICE"}, {101, "CUDA_ERROR_INVALID_DEVICE"},
      {200, "CUDA_ERROR_INVALID_IMAGE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"}, {205, "CUDA_ERROR_MAP_FAILED"},
      {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"}, {218, "CUDA_ERROR_INVALID_PTX"}, {400, "CUDA_ERROR_INVALID_HANDLE"},
      {500, "CUDA_ERROR_NOT_FOUND"}, {600, "CUDA_ERROR_NOT_READY"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"}, {719, "CUDA_ERROR_LAUNCH_FAILED"}, {801, "CUDA_ERROR_NOT_SUPPORTED"},
      {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}, {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
      {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"}, {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
      {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"}, {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"},
      {999, "CUDA_ERROR_UNKNOWN"}};
  auto found = names.find(code);
  *name = found == names.end() ? nullptr : found->second;
  return *name ? SUCCESS : INVALID_VALUE;
}

u32 broken(u32 code, const char* format, ...) {
  char text[512];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  fprintf(stderr, "fake driver: broken rule: %s\n", text);
  return code;
}

// ---- settings and faults

u64 setting(const char* name, u64 otherwise) {
  const char* text = getenv(name);
  return text && *text ? strtoull(text, nullptr, 0) : otherwise;
}

static const std::string& directory() {
  static const std::string found = [] {
    Dl_info info;
    std::string path = dladdr((void*)&directory, &info) ? info.dli_fname : "";
    char* real = realpath(path.c_str(), nullptr);
    path = real ? real : path;
    free(real);
    return path.substr(0, path.rfind('/'));
  }();
  return found;
}

// Whether this is the moment of the fault `name`: TESSERA_FAKE_FAULT is `name:n`, and this is its n-th occasion, or
// with `name:n+` a later one.
bool faulty(const char* name) {
  static std::mutex busy;
  static std::map<std::string, u64> occasions;
  static const std::string wanted = getenv("TESSERA_FAKE_FAULT") ? getenv("TESSERA_FAKE_FAULT") : "";
  size_t colon = wanted.find(':');
  if (colon == std::string::npos || wanted.compare(0, colon, name) != 0 || strlen(name) != colon) return false;
  std::lock_guard<std::mutex> lock(busy);
  char* end;
  u64 first = strtoull(wanted.c_str() + colon + 1, &end, 10), now = ++occasions[name];
  if (now != first && !(now > first && *end == '+')) return false;
  fprintf(stderr, "fake driver: fault %s\n", wanted.c_str());
  return true;
}

// ---- objects

struct Module;
struct Function {
  Module* module;
  std::string name;
  const char* kinds;  // of the parameters, one letter each
  u32 shared_limit;   // dynamic shared memory that was opted in to
};
struct Module {
  struct Context* context;
  u32 number;
  void* object;
  std::map<std::string, Function*> functions;
};
struct Graph {
  Context* context;
  std::vector<Message> commands;
};
struct Stream {
  Context* context;
  u32 number;
  bool captures, invalidated;
  unsigned long capturer;  // thread
  u32 mode;
  std::vector<Message> captured;
  std::vector<Message> late;  // a fault: copies that come after the next record
};
struct Event {
  Context* context;
  u32 number, flags;
  u64 version;  // of the last record; for a foreign event of the last one that was seen
  u32 state;    // number of the state that it is in; 0: own
  State* of;
  u32 stream;   // of the last record, and the number of that command
  u64 command;
};
struct Context {
  int device;
  u32 users;
  pid_t process;
  int socket, memory, state_file;
  State* state;
  std::deque<u32> free_streams, free_events;
  u32 modules, states;
};
struct Range {
  Context* context;
  u64 bytes;
  bool imported;
};

constexpr u32 DISABLE_TIMING = 2, INTERPROCESS = 4;
constexpr u64 OPT_IN_BYTES = 101376, DEFAULT_SHARED_BYTES = 49152;

static std::recursive_mutex busy;
using Lock = std::lock_guard<std::recursive_mutex>;
static bool started;
static std::map<int, Context*> contexts;
static std::set<void*> streams, events, modules, functions, graphs, executables;
static std::map<u64, Range> memory;  // device and pinned, by first byte
static std::map<u64, u64> holes;     // freed or never used, by first byte
static thread_local Context* current;
static thread_local u64 thread_mark;

static unsigned long this_thread() { return (unsigned long)&thread_mark; }

// Every call: initialized, a current context, no lost context.
#define NEED_INIT() \
  if (!started) return broken(NOT_INITIALIZED, "%s before cuInit", __func__)
#define NEED_CONTEXT()                                                                     \
  NEED_INIT();                                                                             \
  if (!current) return broken(INVALID_CONTEXT, "%s without a current context", __func__); \
  if (u32 lost = current->state->error) return lost
#define NEED_HANDLE(set, handle) \
  if (!set.count(handle)) return broken(INVALID_HANDLE, "%s of a handle that is not alive", __func__)

// A call that waits, or that may wait, while a stream is captured.
#define NEED_NO_CAPTURE()                                                                       \
  for (void* other : streams) {                                                                 \
    Stream* s = (Stream*)other;                                                                 \
    if (s->captures && (s->mode == 0 || (s->mode == 1 && s->capturer == this_thread()))) {      \
      s->invalidated = true;                                                                    \
      return broken(CAPTURE_UNSUPPORTED, "%s during a capture", __func__);                      \
    }                                                                                           \
  }

static void send(Context* context, const Message& m) {
  if (::send(context->socket, &m, sizeof m, MSG_NOSIGNAL) != sizeof m) {
    u32 none = 0;
    context->state->error.compare_exchange_strong(none, UNKNOWN);
  }
}

// Adds a command to a stream, or to the graph that it captures.
static u32 queue(Stream* stream, Message m) {
  m.stream = stream->number;
  if (stream->captures) {
    if (stream->mode != 2 && stream->capturer != this_thread() && stream->mode == 0)
      return broken(CAPTURE_WRONG_THREAD, "a command from another thread");
    stream->captured.push_back(m);
    return SUCCESS;
  }
  m.number = ++stream->context->state->streams[stream->number].queued;
  send(stream->context, m);
  return SUCCESS;
}

// ---- waiting

static bool lives(Context* context) {
  int status;
  return waitpid(context->process, &status, WNOHANG) == 0;
}

static void want(Context* context, u32 stream, u64 number) {
  StreamState& of = context->state->streams[stream];
  u64 wanted = of.wanted;
  if (wanted >= number) return;
  while (wanted < number && !of.wanted.compare_exchange_weak(wanted, number)) {
  }
  Message poke = {};
  poke.kind = POKE;
  send(context, poke);
}

template <typename Done>
static u32 until(Context* context, Done done) {
  for (u32 turn = 0; !done(); turn++) {
    if (context->state->error) return context->state->error;
    if (turn % 1024 == 1023 && !lives(context)) {
      u32 none = 0;
      context->state->error.compare_exchange_strong(none, UNKNOWN);
    }
    usleep(turn < 64 ? 5 : 50);
  }
  return context->state->error;
}

static u32 drain(Context* context, u32 stream) {
  StreamState& of = context->state->streams[stream];
  u64 number = of.queued;
  if (of.done >= number) return context->state->error;
  want(context, stream, number);
  return until(context, [&] { return of.done >= number; });
}

static u32 drain(Context* context) {
  u32 worst = SUCCESS;
  for (u32 s = 0; s < MAX_STREAMS; s++)
    if (u32 code = drain(context, s)) worst = code;
  return worst;
}

// ---- the driver and its devices

static u32 visible() {
  u32 all = setting("TESSERA_FAKE_GPUS", 2), count = 0;
  const char* mask = getenv("CUDA_VISIBLE_DEVICES");
  if (!mask) return all;
  for (const char* at = mask; *at; at += *at == ',') {
    char* end;
    u64 number = strtoull(at, &end, 10);
    if (end == at || number >= all) break;
    at = end, count++;
  }
  return count;
}
static u64 memory_bytes() { return setting("TESSERA_FAKE_MEMORY", 2ull << 30); }
#define NEED_DEVICE(device) \
  if (device < 0 || (u32)device >= visible()) return broken(INVALID_DEVICE, "%s of device %d", __func__, device)

EXPORT u32 cuInit(u32 flags) {
  if (flags) return broken(INVALID_VALUE, "flags of cuInit");
  if (!visible()) return NO_DEVICE;
  Lock lock(busy);
  if (started) return SUCCESS;
  void* space = mmap((void*)BASE, END - BASE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (space != (void*)BASE) return OUT_OF_MEMORY;
  holes[BASE] = SPACE;
  holes[PINNED_BASE] = SPACE;
  started = true;
  return SUCCESS;
}
EXPORT u32 cuDriverGetVersion(int* version) { return *version = setting("TESSERA_FAKE_VERSION", 13000), SUCCESS; }
EXPORT u32 cuDeviceGetCount(int* count) {
  NEED_INIT();
  return *count = visible(), SUCCESS;
}
EXPORT u32 cuDeviceGet(int* device, int ordinal) {
  NEED_INIT();
  NEED_DEVICE(ordinal);
  return *device = ordinal, SUCCESS;
}
EXPORT u32 cuDeviceGetName(char* text, int size, int device) {
  NEED_INIT();
  NEED_DEVICE(device);
  return snprintf(text, size, "Fake GPU"), SUCCESS;
}
EXPORT u32 cuDeviceGetUuid_v2(u8* uuid, int device) {
  NEED_INIT();
  NEED_DEVICE(device);
  memset(uuid, 0xf0 + device, 16);
  return SUCCESS;
}
EXPORT u32 cuDeviceGetPCIBusId(char* text, int size, int device) {
  NEED_INIT();
  NEED_DEVICE(device);
  return snprintf(text, size, "0000:%02X:00.0", device + 1), SUCCESS;
}
EXPORT u32 cuDeviceTotalMem_v2(size_t* bytes, int device) {
  NEED_INIT();
  NEED_DEVICE(device);
  return *bytes = memory_bytes(), SUCCESS;
}
EXPORT u32 cuDeviceGetAttribute(int* value, int which, int device) {
  NEED_INIT();
  NEED_DEVICE(device);
  switch (which) {
    case 16: return *value = setting("TESSERA_FAKE_MULTIPROCESSORS", 4), SUCCESS;
    case 75: return *value = 8, SUCCESS;   // compute capability
    case 76: return *value = 6, SUCCESS;
    case 115: return *value = 0, SUCCESS;  // memory pools
    case 97: return *value = OPT_IN_BYTES, SUCCESS;
    default: return broken(NOT_SUPPORTED, "device attribute %d is not modeled", which);
  }
}
EXPORT u32 cuDeviceCanAccessPeer(int* can, int device, int peer) {
  NEED_INIT();
  NEED_DEVICE(device);
  NEED_DEVICE(peer);
  if (device == peer) return broken(INVALID_DEVICE, "peer access of a device to itself");
  return *can = !setting("TESSERA_FAKE_NO_PEERS", 0), SUCCESS;
}

// ---- contexts

static int file_of(const char* name, u64 bytes) {
  int file = memfd_create(name, MFD_CLOEXEC);
  return file >= 0 && ftruncate(file, bytes) == 0 ? file : -1;
}

static u32 open_device(Context* context) {
  context->memory = file_of("fake-memory", 2 * SPACE);
  context->state_file = file_of("fake-state", sizeof(State));
  int ends[2];
  if (context->memory < 0 || context->state_file < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends))
    return OUT_OF_MEMORY;
  context->state = (State*)mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, context->state_file, 0);
  if (context->state == MAP_FAILED) return OUT_OF_MEMORY;
  context->state->alone = 1;
  // Descriptors that are none of the three targets, so that the copies do not overwrite each other.
  int from[3] = {fcntl(context->memory, F_DUPFD_CLOEXEC, 64), fcntl(context->state_file, F_DUPFD_CLOEXEC, 64),
                 fcntl(ends[1], F_DUPFD_CLOEXEC, 64)};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  for (int i = 0; i < 3; i++) posix_spawn_file_actions_adddup2(&actions, from[i], MEMORY_FD + i);
  std::string program = directory() + "/fake-device";
  char* arguments[] = {(char*)"fake-device", nullptr};
  int failed = posix_spawn(&context->process, program.c_str(), &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  for (int file : from) close(file);
  close(ends[1]);
  context->socket = ends[0];
  for (u32 i = 0; i < MAX_STREAMS; i++) context->free_streams.push_back(i);
  for (u32 i = 0; i < MAX_EVENTS; i++) context->free_events.push_back(i);
  return failed ? broken(UNKNOWN, "%s does not start", program.c_str()) : (u32)SUCCESS;
}

EXPORT u32 cuDevicePrimaryCtxRetain(Context** context, int device) {
  NEED_INIT();
  NEED_DEVICE(device);
  Lock lock(busy);
  Context*& known = contexts[device];
  if (!known) {
    known = new Context();
    known->device = device;
    if (u32 code = open_device(known)) return contexts.erase(device), code;
  }
  known->users++;
  return *context = known, SUCCESS;
}
EXPORT u32 cuDevicePrimaryCtxRelease_v2(int device) {
  NEED_INIT();
  NEED_DEVICE(device);
  Lock lock(busy);
  auto known = contexts.find(device);
  if (known == contexts.end() || !known->second->users) return broken(INVALID_CONTEXT, "a context that is not retained");
  Context* context = known->second;
  if (--context->users) return SUCCESS;
  drain(context);
  // Whatever the context held is gone with it. The handles are no longer alive.
  auto drop = [&](std::set<void*>& all, auto* type) {
    for (auto at = all.begin(); at != all.end();) {
      auto* one = (decltype(type))*at;
      at = one->context == context ? all.erase(at) : std::next(at);
    }
  };
  drop(streams, (Stream*)nullptr), drop(events, (Event*)nullptr), drop(modules, (Module*)nullptr);
  drop(graphs, (Graph*)nullptr), drop(executables, (Graph*)nullptr);
  for (auto at = memory.begin(); at != memory.end();) at = at->second.context == context ? memory.erase(at) : std::next(at);
  close(context->socket);
  waitpid(context->process, nullptr, 0);
  close(context->memory), close(context->state_file);
  contexts.erase(known);
  if (current == context) current = nullptr;
  return SUCCESS;  // the context is not freed: threads may still have it current
}
EXPORT u32 cuCtxGetCurrent(Context** context) {
  NEED_INIT();
  return *context = current, SUCCESS;
}
EXPORT u32 cuCtxSetCurrent(Context* context) {
  NEED_INIT();
  Lock lock(busy);
  bool known = !context;
  for (auto [_, one] : contexts) known |= one == context;
  if (!known) return broken(INVALID_CONTEXT, "a context that is not retained");
  if (faulty("bind")) return SUCCESS;
  return current = context, SUCCESS;
}
EXPORT u32 cuCtxSynchronize() {
  NEED_CONTEXT();
  NEED_NO_CAPTURE();
  if (faulty("synchronization")) return SUCCESS;
  return drain(current);
}

// ---- memory

// A range of whole pages with an unused page behind it.
static u64 take(u64 base, u64 bytes) {
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
static bool is_device(u64 at, u64 bytes) { return at < PINNED_BASE && find(at, bytes); }
static bool is_pinned(u64 at, u64 bytes) { return at >= PINNED_BASE && find(at, bytes); }

static u64 used(Context* context) {
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

static u32 release(u64 start) {
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
EXPORT u32 cuPointerGetAttribute(u32* value, int which, u64 at) {
  NEED_CONTEXT();
  Lock lock(busy);
  if (which != 2) return broken(NOT_SUPPORTED, "pointer attribute %d is not modeled", which);
  if (!find(at, 1)) return INVALID_VALUE;
  return *value = at < PINNED_BASE ? 2 : 1, SUCCESS;
}

// ---- for other libraries

bool has_context() {
  Lock lock(busy);
  return started && current;
}
bool is_device_memory(u64 at, u64 bytes) {
  Lock lock(busy);
  return is_device(at, bytes);
}
bool is_lost() {
  Lock lock(busy);
  return current && current->state->error;
}
Shared share_context() {
  Lock lock(busy);
  current->state->alone = 0;
  return {current->device, current->memory};
}
void send_on_context(const Message& m) {
  Lock lock(busy);
  send(current, m);
}
u32 queue_on(void* stream, const Message& m) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(streams, stream);
  return queue((Stream*)stream, m);
}

// ---- streams

EXPORT u32 cuStreamCreate(Stream** stream, u32 flags) {
  NEED_CONTEXT();
  if (flags > 1) return broken(INVALID_VALUE, "flags of a stream");
  Lock lock(busy);
  if (current->free_streams.empty()) return OUT_OF_MEMORY;
  Stream* one = new Stream();
  one->context = current;
  one->number = current->free_streams.front();
  current->free_streams.pop_front();
  streams.insert(one);
  return *stream = one, SUCCESS;
}
EXPORT u32 cuStreamDestroy_v2(Stream* stream) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(streams, stream);
  if (stream->captures) return broken(CAPTURE_UNSUPPORTED, "a stream that is captured is destroyed");
  // Its work goes on; the number is not used again.
  streams.erase(stream);
  return SUCCESS;
}
EXPORT u32 cuStreamSynchronize(Stream* stream) {
  NEED_CONTEXT();
  {
    Lock lock(busy);
    NEED_HANDLE(streams, stream);
    if (stream->captures) stream->invalidated = true;
    if (stream->captures) return broken(CAPTURE_UNSUPPORTED, "a stream that is captured is waited for");
  }
  if (faulty("synchronization")) return SUCCESS;
  return drain(stream->context, stream->number);
}
EXPORT u32 cuStreamWaitEvent(Stream* stream, Event* event, u32 flags) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(streams, stream);
  NEED_HANDLE(events, event);
  if (flags) return broken(INVALID_VALUE, "flags of a wait");
  if (stream->captures) {
    stream->invalidated = true;
    return broken(CAPTURE_ISOLATION, "a captured stream waits for an event outside of the capture");
  }
  u64 version = event->state ? event->of->events[event->number].recorded.load() : event->version;
  std::string fault = "wait" + std::to_string(stream->number);
  if (!version || faulty(fault.c_str())) return SUCCESS;
  Message m = {};
  m.kind = WAIT, m.event = event->number, m.version = version, m.at = event->state;
  return queue(stream, m);
}

// ---- events

EXPORT u32 cuEventCreate(Event** event, u32 flags) {
  NEED_CONTEXT();
  if (flags > 7 || ((flags & INTERPROCESS) && !(flags & DISABLE_TIMING)))
    return broken(INVALID_VALUE, "flags %u of an event", flags);
  Lock lock(busy);
  if (current->free_events.empty()) return OUT_OF_MEMORY;
  Event* one = new Event();
  one->context = current, one->flags = flags;
  one->number = current->free_events.front();
  one->of = current->state;
  current->free_events.pop_front();
  events.insert(one);
  return *event = one, SUCCESS;
}
EXPORT u32 cuEventDestroy_v2(Event* event) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(events, event);
  events.erase(event);
  // Commands that are queued may still name it. So the number that is used again is the one that was freed first.
  if (!event->state) event->context->free_events.push_back(event->number);
  delete event;
  return SUCCESS;
}
EXPORT u32 cuEventRecord(Event* event, Stream* stream) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(events, event);
  NEED_HANDLE(streams, stream);
  if (event->context != stream->context) return broken(INVALID_HANDLE, "event and stream of two contexts");
  if (event->state) return broken(NOT_SUPPORTED, "the record of another process's event is not modeled");
  if (stream->captures) {
    stream->invalidated = true;
    return broken(CAPTURE_UNSUPPORTED, "the record of an event in a capture is not modeled");
  }
  event->version = ++event->of->events[event->number].recorded;
  Message m = {};
  m.kind = RECORD, m.event = event->number, m.version = event->version;
  u32 code = queue(stream, m);
  u64 number = event->context->state->streams[stream->number].queued;
  for (const Message& late : stream->late) queue(stream, late);
  stream->late.clear();
  event->stream = stream->number, event->command = number;
  return code;
}
static bool reached(Event* event) {
  u64 version = event->state ? event->of->events[event->number].recorded.load() : event->version;
  return event->of->events[event->number].done >= version;
}
EXPORT u32 cuEventQuery(Event* event) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(events, event);
  if (reached(event)) return SUCCESS;
  want(event->context, event->stream, event->command);
  return NOT_READY;
}
EXPORT u32 cuEventSynchronize(Event* event) {
  NEED_CONTEXT();
  {
    Lock lock(busy);
    NEED_HANDLE(events, event);
  }
  if (faulty("synchronization") || reached(event)) return SUCCESS;
  want(event->context, event->stream, event->command);
  return until(event->context, [&] { return reached(event); });
}
EXPORT u32 cuEventElapsedTime(float* milliseconds, Event* from, Event* to) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(events, from);
  NEED_HANDLE(events, to);
  if ((from->flags | to->flags) & DISABLE_TIMING) return broken(INVALID_HANDLE, "the time of an event without timing");
  if (!from->version || !to->version) return broken(INVALID_HANDLE, "the time of an event that was not recorded");
  if (!reached(from) || !reached(to)) return NOT_READY;
  *milliseconds = (float)(((double)to->of->events[to->number].nanoseconds - (double)from->of->events[from->number].nanoseconds) / 1e6);
  return SUCCESS;
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

// ---- modules and launches

// The object that was built for this PTX, by the hash of its text (FNV-1a).
static std::string object_of(const char* ptx) {
  u64 hash = 0xcbf29ce484222325;
  for (const char* at = ptx; *at; at++) hash = (hash ^ (u8)*at) * 0x100000001b3;
  char name[32];
  snprintf(name, sizeof name, "%016lx", hash);
  std::string path = directory() + "/objects/" + name;
  if (access((path + ".so").c_str(), R_OK) != 0) {
    // The driver's own compiler, with a cache, as in CUDA.
    std::string command = directory() + "/build-object " + name + " >&2";
    if (access((path + ".cpp").c_str(), R_OK) != 0 || system(command.c_str()) != 0) return "";
  }
  return path + ".so";
}
EXPORT u32 cuModuleLoadData(Module** module, const char* image) {
  NEED_CONTEXT();
  NEED_NO_CAPTURE();
  if (memcmp(image, "\177ELF", 4) == 0) return INVALID_IMAGE;
  std::string path = object_of(image);
  if (path.empty()) return broken(INVALID_PTX, "PTX that no built-in module has");
  Lock lock(busy);
  Module* one = new Module();
  one->context = current, one->number = ++current->modules;
  one->object = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (!one->object) return broken(INVALID_PTX, "%s", dlerror());
  Message m = {};
  m.kind = LOAD, m.at = one->number;
  snprintf(m.name, sizeof m.name, "%s", path.c_str());
  send(current, m);
  modules.insert(one);
  return *module = one, SUCCESS;
}
EXPORT u32 cuModuleGetFunction(Function** function, Module* module, const char* name) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(modules, module);
  Function*& known = module->functions[name];
  if (!known) {
    std::string symbol = std::string("emulator_kinds_") + name;
    auto kinds = (const char* (*)())dlsym(module->object, symbol.c_str());
    if (!kinds) return module->functions.erase(name), NOT_FOUND;
    known = new Function{module, name, kinds(), 0};
    functions.insert(known);
  }
  return *function = known, SUCCESS;
}
EXPORT u32 cuFuncSetAttribute(Function* function, int which, int value) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(functions, function);
  if (which != 8) return broken(NOT_SUPPORTED, "function attribute %d is not modeled", which);
  if (value < 0 || (u64)value > OPT_IN_BYTES) return broken(INVALID_VALUE, "%d bytes of dynamic shared memory", value);
  return function->shared_limit = value, SUCCESS;
}
EXPORT u32 cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* function, int threads, size_t shared) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(functions, function);
  if (threads < 1 || threads > 1024) return broken(INVALID_VALUE, "blocks of %d threads", threads);
  return *blocks = std::min<u64>(1536 / threads, 102400 / (shared + 1024)), SUCCESS;
}
EXPORT u32 cuLaunchKernel(Function* function, u32 x, u32 y, u32 z, u32 threads_x, u32 threads_y, u32 threads_z, u32 shared,
                          Stream* stream, void** parameters, void** extra) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(functions, function);
  NEED_HANDLE(streams, stream);
  if (function->module->context != stream->context) return broken(INVALID_HANDLE, "kernel and stream of two contexts");
  u64 threads = (u64)threads_x * threads_y * threads_z;
  if (!x || !y || !z || x > 0x7fffffff || y > 65535 || z > 65535 || !threads || threads > 1024)
    return broken(INVALID_VALUE, "a grid of %u x %u x %u blocks of %lu threads", x, y, z, threads);
  if (shared > DEFAULT_SHARED_BYTES && shared > function->shared_limit)
    return broken(INVALID_VALUE, "%u bytes of shared memory, %u were opted in to", shared, function->shared_limit);
  if (extra || threads_y != 1 || threads_z != 1) return broken(NOT_SUPPORTED, "this form of a launch is not modeled");
  Message m = {};
  m.kind = LAUNCH, m.object = function->module->number;
  m.grid[0] = x, m.grid[1] = y, m.grid[2] = z, m.threads = threads, m.shared_bytes = shared;
  snprintf(m.name, sizeof m.name, "%s", function->name.c_str());
  bool drops = faulty("argument");
  for (; function->kinds[m.count]; m.count++) {
    char kind = function->kinds[m.count];
    bool wide = kind == 'p' || kind == 'l';
    if (m.count == MAX_WORDS) return broken(INVALID_VALUE, "too many parameters");
    memcpy(&m.words[m.count], parameters[m.count], wide ? 8 : 4);
    u64 word = m.words[m.count];
    // One byte behind an allocation is an address that a kernel may get, though not use.
    if (kind == 'p' && word && !is_device(word, 0))
      return broken(ILLEGAL_ADDRESS, "parameter %u of %s is %#lx, which is no device memory", m.count, m.name, word);
  }
  if (drops && m.count) m.words[m.count - 1] = 0;
  return queue(stream, m);
}

// ---- graphs

EXPORT u32 cuStreamBeginCapture_v2(Stream* stream, u32 mode) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(streams, stream);
  if (mode > 2) return broken(INVALID_VALUE, "mode of a capture");
  if (stream->captures) return broken(INVALID_VALUE, "a second capture of a stream");
  if (faulty("capture")) return NOT_SUPPORTED;
  stream->captures = true, stream->invalidated = false, stream->mode = mode, stream->capturer = this_thread();
  stream->captured.clear();
  return SUCCESS;
}
EXPORT u32 cuStreamEndCapture(Stream* stream, Graph** graph) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(streams, stream);
  *graph = nullptr;
  if (!stream->captures) return broken(INVALID_VALUE, "the end of a capture that was not begun");
  if (stream->mode != 2 && stream->capturer != this_thread())
    return broken(CAPTURE_WRONG_THREAD, "a capture ends in another thread");
  stream->captures = false;
  if (stream->invalidated) return CAPTURE_INVALIDATED;
  Graph* one = new Graph{current, std::move(stream->captured)};
  graphs.insert(one);
  return *graph = one, SUCCESS;
}
EXPORT u32 cuGraphInstantiateWithFlags(Graph** executable, Graph* graph, unsigned long long flags) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(graphs, graph);
  if (flags) return broken(INVALID_VALUE, "flags of a graph");
  Graph* one = new Graph(*graph);
  executables.insert(one);
  return *executable = one, SUCCESS;
}
EXPORT u32 cuGraphLaunch(Graph* executable, Stream* stream) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(executables, executable);
  NEED_HANDLE(streams, stream);
  const size_t count = executable->commands.size() - (faulty("graph") ? 1 : 0);
  for (size_t i = 0; i < count; i++)
    if (u32 code = queue(stream, executable->commands[i])) return code;
  return SUCCESS;
}
EXPORT u32 cuGraphExecDestroy(Graph* executable) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(executables, executable);
  executables.erase(executable);
  delete executable;
  return SUCCESS;
}
EXPORT u32 cuGraphDestroy(Graph* graph) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(graphs, graph);
  graphs.erase(graph);
  delete graph;
  return SUCCESS;
}

// ---- memory and events of other processes

// What a handle of 64 bytes holds. The files are opened below /proc, so they are gone when their process is.
struct Name {
  u64 magic;
  u32 pid, file;
  u64 offset, bytes;
  u32 event;
};
constexpr u64 MEMORY_NAME = 0x6d656d6f7279, EVENT_NAME = 0x6576656e74;
struct Handle {
  u8 bytes[64];
};

static u32 named(const Handle& handle, u64 magic, Name& name) {
  memcpy(&name, &handle, sizeof name);
  if (name.magic != magic) return broken(INVALID_HANDLE, "a handle of something else");
  if (name.pid == (u32)getpid()) return broken(INVALID_CONTEXT, "a handle of this process");
  if (setting("TESSERA_FAKE_NO_IPC", 0)) return PEER_ACCESS_UNSUPPORTED;
  char path[64];
  snprintf(path, sizeof path, "/proc/%u/fd/%u", name.pid, name.file);
  return access(path, R_OK | W_OK) ? (u32)INVALID_HANDLE : (u32)SUCCESS;
}

EXPORT u32 cuIpcGetMemHandle(Handle* handle, u64 at) {
  NEED_CONTEXT();
  Lock lock(busy);
  auto range = memory.find(at);
  if (at >= PINNED_BASE || range == memory.end() || range->second.imported)
    return broken(INVALID_VALUE, "the handle of an address that cuMemAlloc did not give");
  Context* owner = range->second.context;
  owner->state->alone = 0;
  Name name = {MEMORY_NAME, (u32)getpid(), (u32)owner->memory, at - BASE, range->second.bytes, 0};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &name, sizeof name);
  return SUCCESS;
}
EXPORT u32 cuIpcOpenMemHandle_v2(u64* at, Handle handle, u32 flags) {
  NEED_CONTEXT();
  Lock lock(busy);
  if (flags != 1) return broken(INVALID_VALUE, "flags of cuIpcOpenMemHandle");
  Name name;
  if (u32 code = named(handle, MEMORY_NAME, name)) return code;
  u64 start = take(BASE, name.bytes);
  Message m = {};
  m.kind = IMPORT, m.at = start, m.bytes = whole_pages(name.bytes);
  m.pid = name.pid, m.file = name.file, m.offset = name.offset;
  if (faulty("ipc")) map(current, MAP, start, name.bytes);
  else send(current, m);
  memory[start] = {current, name.bytes, true};
  return *at = start, SUCCESS;
}
EXPORT u32 cuIpcCloseMemHandle(u64 at) {
  NEED_CONTEXT();
  Lock lock(busy);
  auto range = memory.find(at);
  if (range == memory.end() || !range->second.imported)
    return broken(INVALID_VALUE, "cuIpcCloseMemHandle of memory that was not opened");
  return release(at);
}
EXPORT u32 cuIpcGetEventHandle(Handle* handle, Event* event) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(events, event);
  if (!(event->flags & INTERPROCESS) || event->state) return broken(INVALID_HANDLE, "the handle of an event that is not interprocess");
  event->context->state->alone = 0;
  Name name = {EVENT_NAME, (u32)getpid(), (u32)event->context->state_file, 0, 0, event->number};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &name, sizeof name);
  return SUCCESS;
}
EXPORT u32 cuIpcOpenEventHandle(Event** event, Handle handle) {
  NEED_CONTEXT();
  Lock lock(busy);
  Name name;
  if (u32 code = named(handle, EVENT_NAME, name)) return code;
  static std::map<std::pair<Context*, std::pair<u32, u32>>, std::pair<u32, State*>> opened;
  auto& [number, state] = opened[{current, {name.pid, name.file}}];
  if (!state) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/fd/%u", name.pid, name.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    void* mapped = file < 0 ? MAP_FAILED : mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (mapped == MAP_FAILED) return INVALID_HANDLE;
    state = (State*)mapped, number = ++current->states;
    Message m = {};
    m.kind = OPEN_STATE, m.at = number, m.pid = name.pid, m.file = name.file;
    send(current, m);
  }
  Event* one = new Event();
  one->context = current, one->flags = DISABLE_TIMING | INTERPROCESS;
  one->number = name.event, one->state = number, one->of = state;
  events.insert(one);
  return *event = one, SUCCESS;
}
