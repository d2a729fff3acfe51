// What the ranks of an NCCL communicator share: a file, which the process that made the unique id keeps open.
#pragma once
#include "shared.h"

constexpr u32 MAX_RANKS = 16, SLOTS = 4;

// A collective of one rank. Ranks may be one collective apart, so the slots of two are never the same.
struct Slot {
  u64 from, count;
  u32 operation;
};
struct Member {
  std::atomic<u32> pid, memory, device, left;
  std::atomic<u64> arrived, read;  // number of the last collective
  std::atomic<u64> host;           // hash of NCCL_HOSTID
  Slot slots[SLOTS];
};
struct Group {
  std::atomic<u32> joined;
  Member members[MAX_RANKS];
};

enum Operation : u32 { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE };
// Phases of a collective on one device.
enum Phase : u32 { ARRIVES, READS, WRITES };
