// NCCL's side of the stand-in: communicators of one machine. Collectives run on the devices (device.cpp).
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <mutex>
#include <set>

#include "driver.h"
#include "group.h"

enum : u32 { SUCCESS = 0, UNHANDLED_CUDA_ERROR = 1, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum : u32 { UINT8 = 1, FLOAT16 = 6, FLOAT32 = 7, BFLOAT16 = 9 };
constexpr u64 MAGIC = 0x6e63636c;

struct Id {
  char bytes[128];
};
struct Where {
  u64 magic;
  u32 pid, file;
};
struct Communicator {
  Group* group;
  u32 number, rank, world;
};

static std::mutex busy;
static std::set<Communicator*>& communicators = *new std::set<Communicator*>;  // as in objects.h
static u32 count;

EXPORT u32 ncclGetVersion(int* version) { return *version = setting("TESSERA_FAKE_NCCL", 22809), SUCCESS; }
EXPORT const char* ncclGetErrorString(u32 code) {
  switch (code) {
    case SUCCESS: return "no error";
    case UNHANDLED_CUDA_ERROR: return "unhandled cuda error";
    case SYSTEM_ERROR: return "unhandled system error";
    case INVALID_ARGUMENT: return "invalid argument";
    case INVALID_USAGE: return "invalid usage";
    default: return "unknown result code";
  }
}
EXPORT u32 ncclGetUniqueId(Id* id) {
  const int file = memfd_create("fake-group", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, sizeof(Group))) return SYSTEM_ERROR;
  const Where where = {MAGIC, (u32)getpid(), (u32)file};
  memset(id, 0, sizeof *id);
  memcpy(id, &where, sizeof where);
  return SUCCESS;
}
// The host that this process claims to be on: ranks of one host cannot share a GPU.
static u64 claimed_host() {
  const char* name = getenv("NCCL_HOSTID");
  u64 hash = 0xcbf29ce484222325;
  for (; name && *name; name++) hash = (hash ^ (u8)*name) * 0x100000001b3;
  return hash;
}
EXPORT u32 ncclCommInitRank(Communicator** to, int world, Id id, int rank) {
  if (!has_context()) return broken(INVALID_USAGE, "ncclCommInitRank without a current context");
  Where where;
  memcpy(&where, &id, sizeof where);
  if (where.magic != MAGIC || world < 1 || world > (int)MAX_RANKS || rank < 0 || rank >= world)
    return broken(INVALID_ARGUMENT, "rank %d of %d in a communicator", rank, world);
  char path[64];
  snprintf(path, sizeof path, "/proc/%u/fd/%u", where.pid, where.file);
  const int file = open(path, O_RDWR | O_CLOEXEC);
  void* mapped = file < 0 ? MAP_FAILED : mmap(nullptr, sizeof(Group), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (file >= 0) close(file);
  if (mapped == MAP_FAILED) return SYSTEM_ERROR;
  Group* group = (Group*)mapped;
  Member& own = group->members[rank];
  const Shared shared = share_context();
  own.pid = getpid(), own.memory = shared.memory, own.device = shared.device + 1;
  own.host = claimed_host();
  // NCCL waits for the ranks without a limit.
  for (group->joined++; group->joined < (u32)world;) usleep(1000);
  for (int other = 0; other < world; other++)
    if (other != rank && group->members[other].device == own.device && group->members[other].host == own.host)
      return broken(INVALID_USAGE, "ranks %d and %d use one GPU", rank, other);
  std::lock_guard<std::mutex> lock(busy);
  Message m = {};
  m.kind = JOIN, m.at = ++count, m.pid = where.pid, m.file = where.file, m.value = rank, m.count = world;
  send_on_context(m);
  *to = new Communicator{group, count, (u32)rank, (u32)world};
  communicators.insert(*to);
  return SUCCESS;
}
static u32 leave(Communicator* one) {
  std::lock_guard<std::mutex> lock(busy);
  if (!communicators.erase(one)) return broken(INVALID_ARGUMENT, "a communicator that is not alive is left");
  one->group->members[one->rank].left = 1;
  return SUCCESS;
}
EXPORT u32 ncclCommDestroy(Communicator* one) { return leave(one); }
EXPORT u32 ncclCommAbort(Communicator* one) { return leave(one); }
EXPORT u32 ncclCommGetAsyncError(Communicator*, u32* code) { return *code = is_lost() ? UNHANDLED_CUDA_ERROR : SUCCESS, SUCCESS; }

// `gives` and `gets`: parts of `n` elements that a rank reads and writes.
static u32 collective(u32 operation, u64 from, u64 to, u64 n, u32 type, Communicator* one, u64 gives, u64 gets, void* stream) {
  {
    std::lock_guard<std::mutex> lock(busy);
    if (!communicators.count(one)) return broken(INVALID_ARGUMENT, "a collective of a communicator that is not alive");
  }
  const bool sums = operation != ALL_GATHER;
  const u64 size = type == UINT8 ? 1 : type == FLOAT32 ? 4 : 2;
  if (sums && type != FLOAT32) return broken(INVALID_ARGUMENT, "sums of type %u are not modeled", type);
  if (!is_device_memory(from, gives * n * size) || !is_device_memory(to, gets * n * size))
    return broken(INVALID_ARGUMENT, "a collective outside of allocations");
  Message m = {};
  m.kind = COLLECTIVE, m.object = one->number, m.from = from, m.at = to, m.bytes = n * size, m.event = operation;
  m.value = ARRIVES;
  return queue_on(stream, m) ? UNHANDLED_CUDA_ERROR : SUCCESS;
}
EXPORT u32 ncclAllGather(u64 from, u64 to, size_t n, u32 type, Communicator* one, void* stream) {
  return collective(ALL_GATHER, from, to, n, type, one, 1, one->world, stream);
}
EXPORT u32 ncclReduceScatter(u64 from, u64 to, size_t n, u32 type, u32 sum, Communicator* one, void* stream) {
  if (sum) return broken(INVALID_ARGUMENT, "a reduction that is no sum is not modeled");
  return collective(REDUCE_SCATTER, from, to, n, type, one, one->world, 1, stream);
}
EXPORT u32 ncclAllReduce(u64 from, u64 to, size_t n, u32 type, u32 sum, Communicator* one, void* stream) {
  if (sum) return broken(INVALID_ARGUMENT, "a reduction that is no sum is not modeled");
  return collective(ALL_REDUCE, from, to, n, type, one, 1, 1, stream);
}
