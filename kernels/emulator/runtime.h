// What the files of the runtime share.

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace emulator {

// Whether accesses are checked for races. Unless they are, kernels are compiled without the hooks, too.
#ifdef EMULATOR_UNWATCHED
const bool WATCHED = false;
#else
const bool WATCHED = true;
#endif

const u32 WARP = 32;
const u32 MAX_THREADS = 1024;
const u32 NONE = ~0u;
const u64 STACK_BYTES = 64 << 10;
// From stack to stack, not a power of two: the ends of all stacks would share a few sets of the caches.
const u64 STACK_STRIDE = STACK_BYTES + 17 * 64;
const u8 POISON = 0xff;
// Where shared memory starts in its own address space: address 0 is no address.
const u32 SHARED_START = 1024;
// Races are looked for in granules of this many bytes, and not among smaller accesses.
const u32 GRANULE = 2;
// Volatile loads in a launch.
const u32 MAX_POLLS = 1 << 22;
// Accesses this far from a buffer are attributed to it.
const u64 NEAR_BYTES = 8 << 20;
// The same for shared memory.
const u64 SHARED_MARGIN = 64 << 10;
// More shared memory than any block of a GPU has.
const u32 SHARED_ROOM = 256 << 10;
const u32 LAST_EPOCH = 1u << 31;

// An asynchronous copy that has not landed.
struct Copy {
  u32 offset;
  const void* source;  // null: zeros
  u64 group;
};

// What a lane brings to a warp collective; results are written through `out`.
struct Operands {
  u64 value;
  u32 lane;
  const u32* a;
  const u32* b;
  void* out;
};

struct Fibre {
  void* stack_pointer;
  Site site;  // of the last primitive
  Operands operands;
  std::vector<Copy> copies;
  u64 group;   // that the next copy joins
  u32 fence;   // epoch of the last fence
};

struct Warp;
typedef void (*Collective)(Warp& warp);

struct Warp {
  u32 first;      // thread
  u32 ready;      // lanes that can run
  u32 alive;      // lanes that have not returned
  u32 at_block;   // lanes that wait at the block's barrier
  u32 at_warp;    // lanes that wait at a collective
  u32 barriers;   // passed by the warp alone
  Collective collective;
  const char* operation;
  Site site;
};

// Who touched a granule last, in which epoch (touch.cpp). For shared memory as columns: the rows of matrices are
// checked eight granules at a time.
struct Cell {
  u32 write_epoch, writer, read_epoch, reader;
};
struct Shadow {
  std::vector<u32> write_epoch, writer, read_epoch, reader;
};
struct Touched {
  u32 &write_epoch, &writer, &read_epoch, &reader;
};
// An increment of a counter after fences: other blocks may see what lies before.
struct Release {
  u64 counter;
  u32 block, thread, epoch;
  std::vector<u32> fences;  // of every thread
};
// A look at a counter by the running block, after so many releases of the launch.
struct Acquire {
  u64 counter, releases;
  u32 thread, epoch;
};
struct KnownBuffer {
  u64 start, end;
  Cell* cells;
};

// What a block works in, kept from launch to launch.
struct Room {
  u8* stacks = nullptr;
  u8* shared = nullptr;
  Shadow shadow;
  Cell* cells = nullptr;
  u64 cell_count = 0;
  u32 epoch = 0;
  std::vector<Fibre> fibres;
};

struct Block {
  const Launch* launch;
  const Kernel* kernel;
  Index index;
  u32 threads, warps, current;
  u32 warp_order[MAX_THREADS / WARP];
  u64 random;
  u32 first_epoch;  // of the launch
  u32 live;
  u32 waiting;  // threads at the block's barrier
  u64 polls;    // volatile loads
  bool failed;
  bool shuffled;  // the next thread is drawn at random
  void* launcher_stack_pointer;
  u64 stack_low;          // of the running thread
  void* program_counter;  // of the last plain access
  std::vector<KnownBuffer> buffers;
  KnownBuffer known;  // the one that was touched last
  std::vector<u32> starts;  // the first epoch of every block so far
  std::vector<Release> releases;
  std::vector<Acquire> acquires;
  char* error;
  u64 error_size;
  Warp warp[MAX_THREADS / WARP];
  Room room;
};

// The block that this OS thread executes.
static thread_local Block* running = nullptr;

static inline Fibre& current_fibre() { return running->room.fibres[running->current]; }
static inline Warp& current_warp() { return running->warp[running->current / WARP]; }

// Ends the launch with a message. Without a site the place is that of the last plain access.
[[noreturn]] static void fail(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));
// Runs other threads until this one may go on.
static void wait();
static u64 next_random(Block& block);

enum Touch { READ, WRITE, LAND };
// Checks an access before it happens.
static void touch_global(u64 address, u64 size, Touch how, const char* what, Site site);
// Drops copies that never landed.
static void forget_copies(Fibre& fibre);
// The offset of `size` bytes at an address of shared memory.
static u32 shared_offset(u32 address, u32 size, const char* what, Site site);

}  // namespace emulator
