/* NVIDIA's driver, NVRTC and cuBLASLt in one file, with known versions and one GPU, for tests of the search.
   UNTOUCHED: every function ends the process, so that a test sees that none is called.
   LACKING: the file lacks a function that programs need. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#ifdef UNTOUCHED
#define ANSWER(...) do { static const char text[] = "a library that was not found is called\n"; \
  write(2, text, sizeof text - 1); _exit(99); } while (0)
#else
#define ANSWER(...) __VA_ARGS__
#endif
#define PLAIN(name) int name(void) { ANSWER(return 801); }

/* The driver. */
int cuInit(unsigned flags) { ANSWER(return flags ? 1 : 0); }
int cuDriverGetVersion(int *version) { ANSWER(*version = 13070; return 0); }
int cuGetErrorName(int code, const char **name) { ANSWER(*name = code == 801 ? "DECOY_ERROR" : 0; return 0); }
int cuDeviceGetCount(int *count) { ANSWER(*count = 1; return 0); }
int cuDeviceGet(int *device, int ordinal) { ANSWER(*device = 40 + ordinal; return 0); }
int cuDeviceGetName(char *text, int size, int device) {
  ANSWER(snprintf(text, size, "Decoy %d", device); return 0);
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { ANSWER(memset(uuid, device, 16); return 0); }
int cuDeviceGetPCIBusId(char *text, int size, int device) {
  ANSWER(snprintf(text, size, "0000:%d:00.0", device); return 0);
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { ANSWER(*bytes = (size_t)24 << 30; return 0); }
int cuDeviceGetAttribute(int *value, int which, int device) { ANSWER(*value = which == 75 ? 8 : 6; return 0); }
PLAIN(cuDeviceCanAccessPeer) PLAIN(cuDevicePrimaryCtxRetain) PLAIN(cuDevicePrimaryCtxRelease_v2)
PLAIN(cuCtxGetCurrent) PLAIN(cuCtxSetCurrent) PLAIN(cuCtxSynchronize)
PLAIN(cuMemGetInfo_v2) PLAIN(cuMemAlloc_v2) PLAIN(cuMemFree_v2) PLAIN(cuMemHostAlloc) PLAIN(cuMemFreeHost)
PLAIN(cuMemHostRegister_v2) PLAIN(cuMemHostUnregister)
PLAIN(cuMemsetD8Async) PLAIN(cuMemcpyHtoDAsync_v2) PLAIN(cuMemcpyDtoHAsync_v2) PLAIN(cuMemcpyDtoDAsync_v2)
PLAIN(cuPointerGetAttribute)
PLAIN(cuStreamCreate) PLAIN(cuStreamDestroy_v2) PLAIN(cuStreamSynchronize) PLAIN(cuStreamWaitEvent)
PLAIN(cuEventCreate) PLAIN(cuEventRecord) PLAIN(cuEventQuery) PLAIN(cuEventSynchronize)
PLAIN(cuEventElapsedTime) PLAIN(cuEventDestroy_v2)
PLAIN(cuStreamBeginCapture_v2) PLAIN(cuStreamEndCapture) PLAIN(cuGraphInstantiateWithFlags)
PLAIN(cuGraphLaunch) PLAIN(cuGraphExecDestroy) PLAIN(cuGraphDestroy)
PLAIN(cuModuleLoadData) PLAIN(cuModuleGetFunction) PLAIN(cuFuncSetAttribute) PLAIN(cuLaunchKernel)
PLAIN(cuOccupancyMaxActiveBlocksPerMultiprocessor)
PLAIN(cuIpcGetMemHandle) PLAIN(cuIpcOpenMemHandle_v2) PLAIN(cuIpcCloseMemHandle) PLAIN(cuIpcGetEventHandle)
#ifndef LACKING
PLAIN(cuIpcOpenEventHandle)
#endif

/* NVRTC. It compiles every source to the text of its first option. */
static char option[64];
int nvrtcVersion(int *major, int *minor) { ANSWER(*major = 13; *minor = 77; return 0); }
int nvrtcGetNumSupportedArchs(int *count) { ANSWER(*count = 2; return 0); }
int nvrtcGetSupportedArchs(int *all) { ANSWER(all[0] = 80; all[1] = 86; return 0); }
const char *nvrtcGetErrorString(int code) { ANSWER(return "NVRTC_ERROR_DECOY"); }
int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, void *texts, void *names) {
  ANSWER(*program = option; return 0);
}
int nvrtcCompileProgram(void *program, int count, const char **options) {
  ANSWER(snprintf(option, sizeof option, "%s", count ? options[0] : ""); return 0);
}
int nvrtcDestroyProgram(void **program) { ANSWER(*program = 0; return 0); }
#define OUTPUT(name) \
  int name##Size(void *program, size_t *bytes) { ANSWER(*bytes = strlen(option) + 1; return 0); } \
  int name(void *program, char *to) { ANSWER(strcpy(to, option); return 0); }
OUTPUT(nvrtcGetProgramLog) OUTPUT(nvrtcGetCUBIN) OUTPUT(nvrtcGetPTX)

/* cuBLASLt: its version only, as no GPU can be opened. */
size_t cublasLtGetVersion(void) { ANSWER(return 130977); }
