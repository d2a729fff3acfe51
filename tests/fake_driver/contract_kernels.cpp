// A module for contract.cpp, in the form of the emulator's objects.
#include <stdio.h>

#include "shared.h"

struct Launch {
  u32 grid[3], threads, shared_bytes, order;
  u64 seed;
  const u64* words;
};
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* emulator_kinds_add() { return "pu"; }
EXPORT const char* emulator_kinds_fail() { return "pu"; }
// Adds 1 to `count` bytes.
EXPORT int emulator_run_add(const Launch* launch, char*, u64) {
  for (u64 i = 0; i < launch->words[1]; i++) ((volatile u8*)launch->words[0])[i] += 1;
  return 0;
}
EXPORT int emulator_run_fail(const Launch*, char* error, u64 bytes) { return snprintf(error, bytes, "a kernel fails"), 1; }
