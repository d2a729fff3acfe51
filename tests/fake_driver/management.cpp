// NVML's side of the stand-in: the GPUs of the machine, whatever CUDA_VISIBLE_DEVICES hides.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

enum : u32 { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, INSUFFICIENT_SIZE = 7 };
static u32 users;
static char handles[16];

static u32 gpus() { return setting("TESSERA_FAKE_GPUS", 2); }

#define NEED(handle)                                       \
  if (!users) return UNINITIALIZED;                        \
  const long index = (char*)handle - handles;              \
  if (index < 0 || index >= (long)gpus()) return INVALID_ARGUMENT

EXPORT u32 nvmlInit_v2() { return users++, SUCCESS; }
EXPORT u32 nvmlShutdown() { return users ? users--, SUCCESS : UNINITIALIZED; }
EXPORT const char* nvmlErrorString(u32 code) { return code == UNINITIALIZED ? "Uninitialized" : "Invalid Argument"; }
EXPORT u32 nvmlSystemGetDriverVersion(char* text, u32 size) {
  const char* version = getenv("TESSERA_FAKE_DRIVER");
  return users ? snprintf(text, size, "%s", version ? version : "580.00.fake"), SUCCESS : UNINITIALIZED;
}
EXPORT u32 nvmlDeviceGetCount_v2(u32* count) { return users ? *count = gpus(), SUCCESS : UNINITIALIZED; }
EXPORT u32 nvmlDeviceGetHandleByIndex_v2(u32 index, void** handle) {
  if (!users) return UNINITIALIZED;
  if (index >= gpus() || index >= sizeof handles) return INVALID_ARGUMENT;
  return *handle = &handles[index], SUCCESS;
}
EXPORT u32 nvmlDeviceGetName(void* handle, char* text, u32 size) {
  NEED(handle);
  return snprintf(text, size, "Fake GPU"), SUCCESS;
}
EXPORT u32 nvmlDeviceGetUUID(void* handle, char* text, u32 size) {
  NEED(handle);
  char part[33];
  for (int i = 0; i < 16; i++) snprintf(part + 2 * i, 3, "%02x", (u8)(0xf0 + index));
  return snprintf(text, size, "GPU-%.8s-%.4s-%.4s-%.4s-%.12s", part, part, part, part, part), SUCCESS;
}
EXPORT u32 nvmlDeviceGetCudaComputeCapability(void* handle, int* major, int* minor) {
  NEED(handle);
  return *major = 8, *minor = 6, SUCCESS;
}
EXPORT u32 nvmlDeviceGetMemoryInfo(void* handle, u64* memory) {
  NEED(handle);
  memory[0] = setting("TESSERA_FAKE_MEMORY", 2ull << 30);  // total
  memory[2] = used_bytes(index);                           // used
  return memory[1] = memory[0] - memory[2], SUCCESS;       // free
}
// At most one process, of TESSERA_FAKE_PROCESS bytes.
struct Process {
  u32 pid;
  u64 bytes;
  u32 instances[2];
};
EXPORT u32 nvmlDeviceGetComputeRunningProcesses_v3(void* handle, u32* count, Process* processes) {
  NEED(handle);
  const u32 room = *count;
  const u64 bytes = setting("TESSERA_FAKE_PROCESS", 0);
  if (!(*count = bytes != 0)) return SUCCESS;
  if (!room) return INSUFFICIENT_SIZE;
  return processes[0] = {4242, bytes, {~0u, ~0u}}, SUCCESS;
}
