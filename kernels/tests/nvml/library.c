/* A library with NVML's interface and known answers, for tests.
   INIT: what nvmlInit_v2 returns. GPUS: how many GPUs there are. PROCESSES: how many processes
   compute on each. OLD: leaves the newest functions out. UNLINKED: no NVLink. BROKEN: every
   question about a GPU fails. */
#include <stdio.h>
#include <string.h>

#ifndef INIT
#define INIT 0
#endif
#ifndef GPUS
#define GPUS 2
#endif
#ifndef PROCESSES
#define PROCESSES 2
#endif

typedef struct { unsigned index; } Gpu;
static Gpu gpus[16];
static int running;

#ifdef BROKEN
#define ANSWER(gpu) return 15
#else
#define ANSWER(gpu) if (!running || !(gpu)) return 1
#endif

unsigned nvmlInit_v2(void) {
  for (unsigned i = 0; i < 16; i++) gpus[i].index = i;
  running += INIT == 0;
  return INIT;
}
unsigned nvmlShutdown(void) { return running-- > 0 ? 0 : 1; }
const char *nvmlErrorString(unsigned code) {
  switch (code) {
  case 3: return "Not Supported";
  case 7: return "Insufficient Size";
  case 15: return "GPU is lost";
  case 18: return "Driver/library version mismatch";
  default: return 0;
  }
}
unsigned nvmlSystemGetDriverVersion(char *text, unsigned size) {
  snprintf(text, size, "580.65.06");
  return running ? 0 : 1;
}
unsigned nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return running ? 0 : 1; }
unsigned nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) {
  if (index >= GPUS) return 2;
  *gpu = &gpus[index];
  return 0;
}
unsigned nvmlDeviceGetName(void *gpu, char *text, unsigned size) {
  ANSWER(gpu);
  snprintf(text, size, "Imaginary %u", 100 + ((Gpu *)gpu)->index);
  return 0;
}
unsigned nvmlDeviceGetUUID(void *gpu, char *text, unsigned size) {
  ANSWER(gpu);
  /* Fills the buffer to its end. */
  memset(text, 'u', size);
  snprintf(text, size, "GPU-%u", ((Gpu *)gpu)->index);
  return 0;
}
typedef struct {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
} Pci;
unsigned nvmlDeviceGetPciInfo_v3(void *gpu, Pci *pci) {
  ANSWER(gpu);
  memset(pci, 0xff, sizeof *pci);
  snprintf(pci->bus_id, 32, "00000000:%02X:00.0", 1 + ((Gpu *)gpu)->index);
  return 0;
}
unsigned nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) {
  ANSWER(gpu);
  *major = 9;
  *minor = 0;
  return 0;
}
typedef struct { unsigned long long total, free, used; } Memory;
unsigned nvmlDeviceGetMemoryInfo(void *gpu, Memory *memory) {
  ANSWER(gpu);
  memory->total = 24ull << 30;
  memory->used = 5ull << 30;
  memory->free = 19ull << 30;
  return 0;
}
#ifndef OLD
typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } Process;
unsigned nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, Process *list) {
  ANSWER(gpu);
  unsigned room = *count;
  *count = PROCESSES;
  if (room < PROCESSES) return 7;
  for (unsigned i = 0; i < PROCESSES; i++) {
    list[i].pid = 1000000000 + i;
    list[i].used = i ? ~0ull : 4ull << 30;
    list[i].instance = list[i].compute = ~0u;
  }
  return 0;
}
unsigned nvmlDeviceGetRemappedRows(void *gpu, unsigned *corrected, unsigned *uncorrected,
                                   unsigned *pending, unsigned *failed) {
  ANSWER(gpu);
  *corrected = 5;
  *uncorrected = 2;
  *pending = ((Gpu *)gpu)->index == 1;
  *failed = 0;
  return 0;
}
#endif
unsigned nvmlDeviceGetCurrPcieLinkGeneration(void *gpu, unsigned *out) { ANSWER(gpu); *out = 1; return 0; }
unsigned nvmlDeviceGetMaxPcieLinkGeneration(void *gpu, unsigned *out) { ANSWER(gpu); *out = 4; return 0; }
unsigned nvmlDeviceGetCurrPcieLinkWidth(void *gpu, unsigned *out) { ANSWER(gpu); *out = 8; return 0; }
unsigned nvmlDeviceGetMaxPcieLinkWidth(void *gpu, unsigned *out) { ANSWER(gpu); *out = 16; return 0; }
unsigned nvmlDeviceGetNvLinkState(void *gpu, unsigned link, unsigned *state) {
  ANSWER(gpu);
#ifdef UNLINKED
  return 3;
#endif
  if (link >= 6) return 2;
  *state = link != 4;
  return 0;
}
typedef struct { unsigned gpu, memory; } Shares;
unsigned nvmlDeviceGetUtilizationRates(void *gpu, Shares *shares) {
  ANSWER(gpu);
  shares->gpu = 37;
  shares->memory = 91;
  return 0;
}
unsigned nvmlDeviceGetTotalEccErrors(void *gpu, unsigned type, unsigned since,
                                     unsigned long long *errors) {
  ANSWER(gpu);
  *errors = type == 1 && since == 0 ? 3 : 99;
  return 0;
}
