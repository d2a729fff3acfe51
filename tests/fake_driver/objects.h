// Objects of the stand-in for NVIDIA's driver, and what its files share.
#pragma once
#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "driver.h"

// CUresult.
enum : u32 {
  SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
  INVALID_IMAGE = 200, INVALID_CONTEXT = 201, MAP_FAILED_ = 205, PEER_ACCESS_UNSUPPORTED = 217, INVALID_PTX = 218,
  INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, CONTEXT_IS_DESTROYED = 709,
  ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
  CAPTURE_UNMATCHED = 903, CAPTURE_ISOLATION = 905, CAPTURE_IMPLICIT = 906, CAPTURE_WRONG_THREAD = 908, UNKNOWN = 999,
};

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
  std::string name;  // of its object: the hash of its PTX
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
  std::vector<Message> late;  // a fault: copies that come after the next two records
  int late_events = 0;         // records since the first of them
  u64 behind;                 // kernels queued before the event that it waited for last
};
struct Event {
  Context* context;
  u32 number, flags;
  u64 version;  // of the last record; for a foreign event of the last one that was seen
  u32 state;    // number of the state that it is in; 0: own
  State* of;
  u32 stream;   // of the last record, and the number of that command
  u64 command;
  u64 launches; // kernels queued before the last record
};
struct Context {
  int device;
  u32 users;
  pid_t process;
  int socket, memory, state_file;
  State* state;
  std::deque<u32> free_streams, free_events;
  u32 modules, states;
  std::atomic<u64> launches;  // kernels queued so far
  unsigned long launcher;     // thread that queued the last kernel
  std::atomic<u32> held;      // number of the stream whose copy is held, plus 1; 0: none yet
  std::atomic<u64> held_behind, held_turns;
};
struct Range {
  Context* context;
  u64 bytes;
  bool imported;
};

constexpr u32 DISABLE_TIMING = 2, INTERPROCESS = 4;
constexpr u64 OPT_IN_BYTES = 101376, DEFAULT_SHARED_BYTES = 49152;

// They outlive the end of the program: its threads may still call.
extern std::recursive_mutex& busy;
using Lock = std::lock_guard<std::recursive_mutex>;
extern bool started;
extern std::map<int, Context*>& contexts;
extern std::set<void*>&streams, &events, &modules, &functions, &graphs, &executables;
extern std::map<u64, Range>& memory;  // device and pinned, by first byte
extern std::map<u64, u64>& holes;     // freed or never used, by first byte
extern thread_local Context* current;

// A number of this thread.
unsigned long this_thread();

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
#define NEED_DEVICE(device) \
  if (device < 0 || (u32)device >= visible()) return broken(INVALID_DEVICE, "%s of device %d", __func__, device)

// driver.cpp: devices that this process sees, and a line for the test's log.
u32 visible();
u64 memory_bytes();
void note(const char* line);
const std::string& directory();

// memory.cpp
u64 take(u64 base, u64 bytes);
u32 release(u64 start);
bool is_device(u64 at, u64 bytes);
u64 used(Context* context);

// streams.cpp: a message to the device, a command on a stream, and waits of the host.
void send(Context* context, const Message& m);
u32 queue(Stream* stream, Message m);
u32 drain(Context* context, u32 stream);
// Holds the first large copy of another thread to the host until a kernel is queued beside it.
void hold(Stream* stream, u64 bytes);
u32 drain(Context* context);
