// What the other libraries of this file use of the driver.
#pragma once
#include "shared.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Reports a broken rule and returns `code`.
u32 broken(u32 code, const char* format, ...) __attribute__((format(printf, 2, 3)));
// A number of the environment.
u64 setting(const char* name, u64 otherwise);
// Whether this is the moment of a fault, see `driver.cpp`.
bool faulty(const char* name);
// Bytes of a device that this process uses.
u64 used_bytes(u32 device);
// Whether a context is current on this thread.
bool has_context();
// Whether all of a range is allocated device memory.
bool is_device_memory(u64 at, u64 bytes);
// Whether the current context has failed for good.
bool is_lost();
// The machine's number of the current context's device, and its memory file, which other devices read from now on.
struct Shared {
  int device, memory;
};
Shared share_context();
// Sends what is no command to the device of the current context.
void send_on_context(const Message& m);
// Queues a command on a stream that another library got as a `cudaStream_t`. The driver's error, 0 if none.
u32 queue_on(void* stream, const Message& m);
