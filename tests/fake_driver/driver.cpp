// A stand-in for NVIDIA's driver, for tests of the unmodified program. README.md describes what it enforces.
//
// The rules are those of NVIDIA's driver API reference, not those of the code under test. A broken rule is reported on
// standard error and returned as the error that the reference names. Memory and streams are in a device process
// (device.cpp) for each context.
#include <dlfcn.h>
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

#include "objects.h"

extern char** environ;

bool started;
std::recursive_mutex& busy = *new std::recursive_mutex;
std::map<int, Context*>& contexts = *new std::map<int, Context*>;
std::map<u64, Range>& memory = *new std::map<u64, Range>;
std::map<u64, u64>& holes = *new std::map<u64, u64>;
static std::set<void*>& none() { return *new std::set<void*>; }
std::set<void*>&streams = none(), &events = none(), &modules = none(), &functions = none(), &graphs = none(), &executables = none();
thread_local Context* current;

unsigned long this_thread() {
  static thread_local u64 mark;
  return (unsigned long)&mark;
}

// ---- CUresult

EXPORT u32 cuGetErrorName(u32 code, const char** name) {
  static const std::map<u32, const char*>& names = *new std::map<u32, const char*>{
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

const std::string& directory() {
  static const std::string& found = *new std::string([] {
    Dl_info info;
    std::string path = dladdr((void*)&directory, &info) ? info.dli_fname : "";
    char* real = realpath(path.c_str(), nullptr);
    path = real ? real : path;
    free(real);
    return path.substr(0, path.rfind('/'));
  }());
  return found;
}

// Whether this is the moment of the fault `name`: TESSERA_FAKE_FAULT has `name:n`, and this is its n-th occasion, or
// with `name:n+` a later one. Several faults are separated by commas.
bool faulty(const char* name) {
  static std::mutex busy;
  static std::map<std::string, u64>& occasions = *new std::map<std::string, u64>;
  static const char* list = getenv("TESSERA_FAKE_FAULT");
  static const std::string& wanted = *new std::string(list ? "," + std::string(list) : "");
  const std::string start = "," + std::string(name) + ":";
  const size_t found = wanted.find(start);
  if (found == std::string::npos) return false;
  std::lock_guard<std::mutex> lock(busy);
  char* end;
  u64 first = strtoull(wanted.c_str() + found + start.size(), &end, 10), now = ++occasions[name];
  if (now != first && !(now > first && *end == '+')) return false;
  fprintf(stderr, "fake driver: fault %s:%lu%s\n", name, first, *end == '+' ? "+" : "");
  return true;
}

// Adds a line to the file that the test asked for.
void note(const char* line) {
  const char* path = getenv("TESSERA_FAKE_LOG");
  FILE* file = path ? fopen(path, "a") : nullptr;
  if (file) fprintf(file, "%s\n", line), fclose(file);
}

// ---- the driver and its devices

// Numbers of the machine's devices that this process sees.
static std::vector<u32> shown() {
  const u32 all = setting("TESSERA_FAKE_GPUS", 2);
  std::vector<u32> devices;
  const char* mask = getenv("CUDA_VISIBLE_DEVICES");
  for (u32 i = 0; !mask && i < all; i++) devices.push_back(i);
  for (const char* at = mask ? mask : ""; *at; at += *at == ',') {
    char* end;
    u64 number = strtoull(at, &end, 10);
    if (end == at || number >= all) break;
    at = end, devices.push_back(number);
  }
  return devices;
}
u32 visible() { return shown().size(); }
u64 memory_bytes() { return setting("TESSERA_FAKE_MEMORY", 2ull << 30); }

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
  memset(uuid, 0xf0 + shown()[device], 16);
  return SUCCESS;
}
EXPORT u32 cuDeviceGetPCIBusId(char* text, int size, int device) {
  NEED_INIT();
  NEED_DEVICE(device);
  return snprintf(text, size, "0000:%02X:00.0", shown()[device] + 1), SUCCESS;
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
    note("opened");
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
  note("released");
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
  return {(int)shown()[current->device], current->memory};
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
