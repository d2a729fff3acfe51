// The device process: the only one in which device memory is mapped. It gets commands from the library and runs each as
// late as CUDA allows: when the host, or another device, waits for something that the command comes before. Only a
// device whose memory or events were shared also goes on by itself, after a while without news.
//
// TESSERA_FAKE_EAGER is a mask of streams, by the order of their creation, that run as early as allowed instead. Late
// copies beside early kernels show a kernel that does not wait for its copy; early copies beside late kernels show a
// copy into memory that is still in use.
//
// A kernel is an object that the emulator was compiled into (kernels/emulator). A fault is sticky, as on a GPU: what
// is queued is dropped, so that every wait ends, and every later call of the library fails.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "group.h"
#include "product.h"
#include "shared.h"

// The launch of kernels/emulator/emulator.h.
struct Buffer {
  u64 address, len;
};
struct Launch {
  u32 grid[3], threads, shared_bytes, order;
  u64 seed;
  const u64* words;
  const char* kinds;
  const Buffer* buffers;
  u64 buffer_count;
};
using Run = int (*)(const Launch*, char*, u64);

constexpr u64 POISONED_BYTES = 32 << 20;
constexpr u32 BURST = 64;  // commands that run by themselves at once
constexpr u32 ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719;

static State* state;
static std::vector<State*> states;  // 0: own
static std::map<u64, u64> buffers;  // start, bytes
static std::map<u32, void*> objects;
static std::deque<Message> queues[MAX_STREAMS];

static void fault(u32 code, const char* what, const char* text) {
  fprintf(stderr, "fake driver: %s: %s\n", what, text);
  u32 none = 0;
  state->error.compare_exchange_strong(none, code);
}

static void crash(int number, siginfo_t* info, void*) {
  char text[64];
  snprintf(text, sizeof text, "signal %d at %p", number, info->si_addr);
  fault(number == SIGSEGV ? ILLEGAL_ADDRESS : LAUNCH_FAILED, "the device faults", text);
  _exit(1);
}

static int foreign(const Message& m) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%u/fd/%u", m.pid, m.file);
  return open(path, O_RDWR | O_CLOEXEC);
}

static void map(u64 at, u64 bytes, int file, u64 offset) {
  void* mapped = mmap((void*)at, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, offset);
  if (mapped == MAP_FAILED) fault(LAUNCH_FAILED, "memory cannot be mapped", strerror(errno));
  if (at < PINNED_BASE) buffers[at] = bytes;
}

// A communicator, with the device memory of every rank at another address.
struct Communicator {
  Group* group;
  u32 rank, world;
  u64 number;  // of collectives that this device began
  u64 memory[MAX_RANKS];
  std::vector<u8> result;
};
static std::map<u32, Communicator> communicators;

static void* map_foreign(u32 pid, u32 number, u64 bytes) {
  Message m = {};
  m.pid = pid, m.file = number;
  const int file = foreign(m);
  if (file < 0) return MAP_FAILED;
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  return mapped;
}

static void join(const Message& m) {
  Communicator one = {};
  void* group = map_foreign(m.pid, m.file, sizeof(Group));
  if (group == MAP_FAILED) return fault(LAUNCH_FAILED, "a communicator is gone", strerror(errno));
  one.group = (Group*)group, one.rank = m.value, one.world = m.count;
  for (u32 r = 0; r < one.world; r++) {
    const Member& member = one.group->members[r];
    void* memory = map_foreign(member.pid, member.memory, SPACE);
    if (memory == MAP_FAILED) return fault(LAUNCH_FAILED, "memory of another rank is gone", strerror(errno));
    one.memory[r] = (u64)memory;
  }
  communicators[m.at] = one;
}

// What the other ranks gave, in their order.
static void read_all(Communicator& one, const Message& m) {
  const u64 slot = one.number % SLOTS, bytes = m.bytes;
  const bool gathers = m.event == ALL_GATHER;
  one.result.assign(gathers ? bytes * one.world : bytes, 0);
  for (u32 r = 0; r < one.world; r++) {
    const Slot& given = one.group->members[r].slots[slot];
    if (given.operation != m.event || given.count != bytes)
      return fault(LAUNCH_FAILED, "a collective", "ranks do not issue the same collectives");
    const u64 from = one.memory[r] + given.from - BASE + (m.event == REDUCE_SCATTER ? one.rank * bytes : 0);
    if (gathers) memcpy(one.result.data() + r * bytes, (void*)from, bytes);
    else
      for (u64 i = 0; i < bytes / 4; i++) ((float*)one.result.data())[i] += ((const float*)from)[i];
  }
}

// Takes a collective as far as it can go. Whether it is over.
static bool collect(Message& m) {
  Communicator& one = communicators[m.object];
  if (!one.group || state->error || one.group->members[one.rank].left) return true;
  Member* members = one.group->members;
  if (m.value == ARRIVES) {
    members[one.rank].slots[++one.number % SLOTS] = {m.from, m.bytes, m.event};
    members[one.rank].arrived = one.number;
    m.value = READS;
  }
  for (u32 r = 0; m.value == READS && r < one.world; r++)
    if (members[r].arrived < one.number) return false;
  if (m.value == READS) {
    read_all(one, m);
    members[one.rank].read = one.number;
    m.value = WRITES;
  }
  // Nobody overwrites what another rank has not read.
  for (u32 r = 0; r < one.world; r++)
    if (members[r].read < one.number) return false;
  memcpy((void*)m.at, one.result.data(), one.result.size());
  return true;
}

// What is no command of a stream happens at once.
static void act(const Message& m) {
  switch (m.kind) {
    case MAP:
      map(m.at, m.bytes, MEMORY_FD, m.at - BASE);
      // Nothing is known of fresh memory. All of a large block would cost more than it shows.
      if (m.at < PINNED_BASE) memset((void*)m.at, POISON, m.bytes < POISONED_BYTES ? m.bytes : POISONED_BYTES);
      return;
    case UNMAP:
      buffers.erase(m.at);
      mmap((void*)m.at, whole_pages(m.bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
      return;
    case IMPORT: {
      int file = foreign(m);
      if (file < 0) return fault(LAUNCH_FAILED, "memory of another process is gone", strerror(errno));
      map(m.at, m.bytes, file, m.offset);
      close(file);
      return;
    }
    case OPEN_STATE: {
      int file = foreign(m);
      void* other = file < 0 ? MAP_FAILED : mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      if (other == MAP_FAILED) return fault(LAUNCH_FAILED, "events of another process are gone", strerror(errno));
      if (states.size() <= m.at) states.resize(m.at + 1);
      states[m.at] = (State*)other;
      close(file);
      return;
    }
    case JOIN: return join(m);
    case LOAD: {
      void* object = dlopen(m.name, RTLD_NOW | RTLD_LOCAL);
      if (!object) return fault(LAUNCH_FAILED, "a module", dlerror());
      objects[m.at] = object;
      return;
    }
    default: return;
  }
}

static void launch(const Message& m) {
  std::string name = std::string("emulator_run_") + m.name;
  std::string kinds = std::string("emulator_kinds_") + m.name;
  Run run = (Run)dlsym(objects[m.object], name.c_str());
  auto of = (const char* (*)())dlsym(objects[m.object], kinds.c_str());
  if (!run || !of) return fault(LAUNCH_FAILED, "a kernel", m.name);
  std::vector<Buffer> all;
  for (auto [start, bytes] : buffers) all.push_back({start, bytes});
  Launch launch = {{m.grid[0], m.grid[1], m.grid[2]}, m.threads, m.shared_bytes, 0, 0, m.words, of(), all.data(), all.size()};
  char error[4096] = "";
  if (run(&launch, error, sizeof error)) fault(LAUNCH_FAILED, m.name, error);
}

static void product(const Message& m) {
  Product p;
  memcpy(&p, m.words, sizeof p);
  multiply(p);
}

// Reads memory that the program has registered.
static void copy_in(const Message& m) {
  for (u64 done = 0; done < m.bytes;) {
    iovec to = {(void*)(m.at + done), m.bytes - done}, from = {(void*)(m.from + done), m.bytes - done};
    ssize_t count = process_vm_readv((pid_t)m.pid, &to, 1, &from, 1, 0);
    if (count <= 0) return fault(ILLEGAL_ADDRESS, "registered memory", strerror(errno));
    done += (u64)count;
  }
}

static u64 now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void record(EventState& event, u64 version) {
  event.nanoseconds = now();
  u64 done = event.done;
  while (done < version && !event.done.compare_exchange_weak(done, version)) {
  }
}

static void run(const Message& m) {
  bool lost = state->error != 0;
  switch (m.kind) {
    case LAUNCH: return lost ? void() : launch(m);
    case FILL: return lost ? void() : (void)memset((void*)m.at, m.value, m.bytes);
    case COPY: return lost ? void() : (void)memmove((void*)m.at, (void*)m.from, m.bytes);
    case COPY_IN: return lost ? void() : copy_in(m);
    case PRODUCT: return lost ? void() : product(m);
    case RECORD: return record(state->events[m.event], m.version);
    default: return;
  }
}

static bool step(u32 stream, u32 depth);

// Whether a wait is over. If not, the stream that records the event goes on.
static bool passed(const Message& m, u32 depth, bool& moved) {
  State* of = m.at < states.size() ? states[m.at] : nullptr;
  if (!of || of->events[m.event].done >= m.version || state->error) return true;
  if (m.at == 0 && depth < MAX_STREAMS)
    for (u32 other = 0; other < MAX_STREAMS; other++)
      for (const Message& queued : queues[other])
        if (queued.kind == RECORD && queued.event == m.event && queued.version == m.version) {
          moved = step(other, depth + 1);
          return false;
        }
  return false;
}

// Runs the next command of a stream, or of a stream that it waits for. Whether anything moved.
static bool step(u32 stream, u32 depth) {
  std::deque<Message>& queue = queues[stream];
  if (queue.empty()) return false;
  bool moved = false;
  if (queue.front().kind == WAIT && !passed(queue.front(), depth, moved)) return moved;
  if (queue.front().kind == COLLECTIVE && !collect(queue.front())) return false;
  Message m = queue.front();
  queue.pop_front();
  run(m);
  state->streams[stream].done = m.number;
  return true;
}

// Reads what the library sent; ends with it. Whether there was any command.
static bool receive(int patience_ms) {
  pollfd ready = {SOCKET_FD, POLLIN, 0};
  bool any = false;
  while (poll(&ready, 1, patience_ms) > 0) {
    Message m;
    if (recv(SOCKET_FD, &m, sizeof m, 0) != sizeof m) _exit(0);
    any |= m.kind != POKE;
    patience_ms = 0;
    if (m.number) queues[m.stream].push_back(m);
    else act(m);
  }
  return any;
}

int main() {
  // The library's process decides when to end.
  signal(SIGINT, SIG_IGN);
  signal(SIGTERM, SIG_IGN);
  struct sigaction on_fault = {};
  on_fault.sa_sigaction = crash;
  on_fault.sa_flags = SA_SIGINFO;
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigaction(number, &on_fault, nullptr);
  void* space = mmap((void*)BASE, END - BASE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  state = (State*)mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, STATE_FD, 0);
  if (space != (void*)BASE || state == MAP_FAILED) return 1;
  states.push_back(state);
  const char* text = getenv("TESSERA_FAKE_EAGER");
  const u64 eager = text ? strtoull(text, nullptr, 0) : 0;
  for (u32 turn = 0, idle = 0;; turn++) {
    bool moved = false;
    for (u32 s = 0; s < MAX_STREAMS; s++)
      if (state->streams[s].wanted > state->streams[s].done || (s < 64 && eager >> s & 1)) moved |= step(s, 0);
    bool news = receive(moved ? 0 : 1);
    idle = news || moved ? 0 : idle + 1;
    // Another device may wait for this one.
    if (!state->alone && idle > 1)
      for (u32 s = 0, most = BURST; s < MAX_STREAMS; s++)
        while (most && step((s + turn) % MAX_STREAMS, 0)) most--;
  }
}
