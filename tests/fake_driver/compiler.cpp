// A stand-in for NVRTC. It compiles nothing: after the time of a compiler it gives machine code that the fake driver does not
// take, so that programs run the built-in PTX. Each compiled program is a line in the log of `driver.cpp`.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))
enum : int { SUCCESS = 0, INVALID_INPUT = 3 };
constexpr char CUBIN[] = "\177ELF that no driver takes", PTX[] = "no PTX", LOG[] = "";
constexpr int ARCHITECTURES[] = {80, 86, 89, 90};
constexpr long COMPILING_NANOSECONDS = 50'000'000;

struct Program {
  std::string name;
};

static double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}
template <size_t N>
static int give(const char (&text)[N], char* to) {
  return memcpy(to, text, N), SUCCESS;
}

EXPORT int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, SUCCESS; }
EXPORT const char* nvrtcGetErrorString(int code) { return code ? "NVRTC_ERROR_INVALID_INPUT" : "NVRTC_SUCCESS"; }
EXPORT int nvrtcGetNumSupportedArchs(int* count) { return *count = sizeof ARCHITECTURES / sizeof(int), SUCCESS; }
EXPORT int nvrtcGetSupportedArchs(int* all) { return memcpy(all, ARCHITECTURES, sizeof ARCHITECTURES), SUCCESS; }
EXPORT int nvrtcCreateProgram(Program** program, const char* source, const char* name, int headers, const char* const*,
                              const char* const*) {
  if (!source || !*source || headers) return INVALID_INPUT;
  return *program = new Program{name}, SUCCESS;
}
EXPORT int nvrtcCompileProgram(Program* program, int, const char* const*) {
  const double begun = now();
  const timespec time = {0, COMPILING_NANOSECONDS};
  nanosleep(&time, nullptr);
  const char* path = getenv("TESSERA_FAKE_LOG");
  FILE* file = path ? fopen(path, "a") : nullptr;
  if (file) fprintf(file, "compiled %s %d %f %f\n", program->name.c_str(), getpid(), begun, now()), fclose(file);
  return SUCCESS;
}
EXPORT int nvrtcDestroyProgram(Program** program) { return delete *program, *program = nullptr, SUCCESS; }
EXPORT int nvrtcGetProgramLogSize(Program*, size_t* size) { return *size = sizeof LOG, SUCCESS; }
EXPORT int nvrtcGetProgramLog(Program*, char* to) { return give(LOG, to); }
EXPORT int nvrtcGetCUBINSize(Program*, size_t* size) { return *size = sizeof CUBIN, SUCCESS; }
EXPORT int nvrtcGetCUBIN(Program*, char* to) { return give(CUBIN, to); }
EXPORT int nvrtcGetPTXSize(Program*, size_t* size) { return *size = sizeof PTX, SUCCESS; }
EXPORT int nvrtcGetPTX(Program*, char* to) { return give(PTX, to); }
