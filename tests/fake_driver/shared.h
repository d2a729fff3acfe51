// What the library (host.cpp) and the device process (device.cpp) share: the address space, a page of state, messages.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;

// One sparse file holds all memory. An address is at BASE plus its offset in that file, in both processes. The host
// maps pinned memory only, so that it faults on an address of the device. Freed ranges are mapped by neither.
constexpr u64 BASE = 0x100000000000, SPACE = 1ull << 40;
constexpr u64 PINNED_BASE = BASE + SPACE, END = BASE + 2 * SPACE;
constexpr u64 PAGE = 4096;
constexpr u8 POISON = 0xff;

constexpr u64 whole_pages(u64 bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

constexpr u32 MAX_STREAMS = 256, MAX_EVENTS = 1 << 16, MAX_WORDS = 48;
// Descriptors of a device process.
constexpr int MEMORY_FD = 3, STATE_FD = 4, SOCKET_FD = 5;

// Versions count the records of an event. A wait names the version that it waits for.
struct EventState {
  std::atomic<u64> recorded, done;
  std::atomic<u64> nanoseconds;  // when the device reached it
};
// Commands of a stream are numbered from 1.
struct StreamState {
  std::atomic<u64> queued, done, wanted;
};
struct State {
  std::atomic<u32> error;  // sticky: the context is lost
  std::atomic<u32> alone;  // no other process waits for this device
  StreamState streams[MAX_STREAMS];
  EventState events[MAX_EVENTS];
};

enum Kind : u32 {
  POKE,         // nothing: something is wanted
  MAP,          // at, bytes
  UNMAP,        // at, bytes
  IMPORT,       // at, bytes; pid, file, offset
  OPEN_STATE,   // at: number of a foreign state; pid, file
  LAUNCH,       // number of the object, kernel, grid, threads, shared_bytes, words
  LOAD,         // at: number of the object; name: its file
  FILL,         // at, bytes, value
  COPY,         // at, from, bytes
  COPY_IN,      // at, from, bytes: from memory of the process pid
  PRODUCT,      // words: a Product
  JOIN,         // at: number of the communicator; pid, file of its group; value: rank, count: ranks
  COLLECTIVE,   // object: communicator; event: operation; from, at, bytes; value: phase
  RECORD,       // event, version
  WAIT,         // event, version; at: number of the state that the event is in (0: own)
};

struct Message {
  Kind kind;
  u32 stream;
  u64 number;  // of the command in its stream; 0 for what is no command
  u64 at, from, bytes, version, offset;
  u32 event, value, pid, file;
  u32 object, grid[3], threads, shared_bytes, count;
  char name[256];
  u64 words[MAX_WORDS];
};
