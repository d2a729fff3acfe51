// The fake driver's own tests: one function for each rule, each in a process of its own, because a rule may end it.
// Usage: contract NAME, or nothing for the list of names. The program is linked with libcuda.so.1.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shared.h"

typedef void* P;
extern "C" {
u32 cuInit(u32);
u32 cuDeviceGet(int*, int);
u32 cuDevicePrimaryCtxRetain(P*, int);
u32 cuDevicePrimaryCtxRelease_v2(int);
u32 cuCtxSetCurrent(P);
u32 cuCtxSynchronize();
u32 cuMemGetInfo_v2(size_t*, size_t*);
u32 cuMemAlloc_v2(u64*, size_t);
u32 cuMemFree_v2(u64);
u32 cuMemHostAlloc(P*, size_t, u32);
u32 cuMemFreeHost(P);
u32 cuMemHostRegister_v2(P, size_t, u32);
u32 cuMemHostUnregister(P);
u32 cuMemsetD8Async(u64, u8, size_t, P);
u32 cuMemcpyHtoDAsync_v2(u64, const void*, size_t, P);
u32 cuMemcpyDtoHAsync_v2(P, u64, size_t, P);
u32 cuMemcpyDtoDAsync_v2(u64, u64, size_t, P);
u32 cuStreamCreate(P*, u32);
u32 cuStreamDestroy_v2(P);
u32 cuStreamSynchronize(P);
u32 cuStreamWaitEvent(P, P, u32);
u32 cuEventCreate(P*, u32);
u32 cuEventRecord(P, P);
u32 cuEventQuery(P);
u32 cuEventSynchronize(P);
u32 cuEventElapsedTime(float*, P, P);
u32 cuEventDestroy_v2(P);
u32 cuModuleLoadData(P*, const char*);
u32 cuModuleGetFunction(P*, P, const char*);
u32 cuFuncSetAttribute(P, int, int);
u32 cuLaunchKernel(P, u32, u32, u32, u32, u32, u32, u32, P, void**, void**);
u32 cuStreamBeginCapture_v2(P, u32);
u32 cuStreamEndCapture(P, P*);
u32 cuGraphInstantiateWithFlags(P*, P, unsigned long long);
u32 cuGraphLaunch(P, P);
u32 cuGraphExecDestroy(P);
struct Handle { u8 bytes[64]; };
u32 cuIpcGetMemHandle(Handle*, u64);
u32 cuIpcOpenMemHandle_v2(u64*, Handle, u32);
u32 cuIpcCloseMemHandle(u64);
u32 cuIpcGetEventHandle(Handle*, P);
u32 cuIpcOpenEventHandle(P*, Handle);
u32 cublasLtCreate(P*);
u32 cublasLtMatmulDescCreate(P*, u32, u32);
u32 cublasLtMatmulDescSetAttribute(P, u32, const void*, size_t);
u32 cublasLtMatrixLayoutCreate(P*, u32, u64, u64, long);
u32 cublasLtMatmulPreferenceCreate(P*);
u32 cublasLtMatmulPreferenceSetAttribute(P, u32, const void*, size_t);
u32 cublasLtMatmulAlgoGetHeuristic(P, P, P, P, P, P, P, int, P, int*);
u32 cublasLtMatmul(P, P, const float*, u64, P, u64, P, const float*, u64, P, u64, P, P, u64, size_t, P);
struct Id { char bytes[128]; };
u32 ncclGetUniqueId(Id*);
u32 ncclCommInitRank(P*, int, Id, int);
u32 ncclAllReduce(u64, u64, size_t, u32, u32, P, P);
u32 ncclCommDestroy(P);
}

#define IS(code, call)                                                              \
  do {                                                                              \
    u32 got = call;                                                                 \
    if (got != (code)) printf("line %d: %s is %u, not %u\n", __LINE__, #call, got, (u32)(code)), exit(1); \
  } while (0)
#define OK(call) IS(0, call)
#define HOLDS(what) \
  if (!(what)) printf("line %d: not %s\n", __LINE__, #what), exit(1)

constexpr u64 N = 10000;
static P context, stream, other;
static u64 memory;
static u8* pinned;

static void open() {
  OK(cuInit(0));
  OK(cuDevicePrimaryCtxRetain(&context, 0));
  OK(cuCtxSetCurrent(context));
  OK(cuStreamCreate(&stream, 1));
  OK(cuStreamCreate(&other, 1));
  OK(cuMemAlloc_v2(&memory, N));
  OK(cuMemHostAlloc((P*)&pinned, N, 1));
}
static P event(u32 flags = 2) {
  P one;
  OK(cuEventCreate(&one, flags));
  return one;
}
static bool all(u8 value) {
  for (u64 i = 0; i < N; i++)
    if (pinned[i] != value) return false;
  return true;
}
static P kernel(const char* name) {
  P module, function;
  OK(cuModuleLoadData(&module, "contract"));
  OK(cuModuleGetFunction(&function, module, name));
  return function;
}
static u32 launch(P function, u64 at, u32 count, u32 shared = 0, size_t size = 12) {
  struct {
    u64 at;
    u32 count;
  } parameters = {at, count};
  void* extra[] = {(void*)1, &parameters, (void*)2, &size, nullptr};
  return cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, shared, stream, nullptr, extra);
}

static void calls_need_a_start_and_a_context() {
  IS(3, cuMemAlloc_v2(&memory, N));
  OK(cuInit(0));
  IS(201, cuMemAlloc_v2(&memory, N));
  IS(101, cuDevicePrimaryCtxRetain(&context, 7));
  IS(201, cuCtxSetCurrent((P)8));
}
static void device_memory_is_not_the_hosts() {
  open();
  pid_t child = fork();
  if (!child) *(volatile u8*)memory = 1, _exit(0);
  int status;
  waitpid(child, &status, 0);
  HOLDS(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}
static void copies_read_as_late_as_allowed() {
  open();
  memset(pinned, 1, N);
  OK(cuMemcpyHtoDAsync_v2(memory, pinned, N, stream));
  memset(pinned, 2, N);  // too early: the copy has not read
  OK(cuStreamSynchronize(stream));
  memset(pinned, 3, N);
  OK(cuMemcpyDtoHAsync_v2(pinned, memory, N, stream));
  HOLDS(all(POISON));
  OK(cuStreamSynchronize(stream));
  HOLDS(all(2));
}
static void pageable_copies_are_done_with_the_hosts_bytes() {
  open();
  u8 bytes[100] = {7}, back[100];
  OK(cuMemcpyHtoDAsync_v2(memory, bytes, sizeof bytes, stream));
  bytes[0] = 8;
  OK(cuMemcpyDtoHAsync_v2(back, memory, sizeof back, stream));
  HOLDS(back[0] == 7);
}
static void registered_memory_is_read_where_it_is() {
  open();
  static u8 own[N];
  memset(own, 1, N);
  OK(cuMemHostRegister_v2(own, N, 1));
  IS(712, cuMemHostRegister_v2(own + 8, 8, 1));
  OK(cuMemcpyHtoDAsync_v2(memory, own, N, stream));
  memset(own, 2, N);  // too early: the copy has not read
  OK(cuStreamSynchronize(stream));
  OK(cuMemcpyDtoHAsync_v2(pinned, memory, N, stream));
  OK(cuStreamSynchronize(stream));
  HOLDS(all(2));
  OK(cuMemcpyHtoDAsync_v2(memory, own, N, stream));
  IS(1, cuMemHostUnregister(own));  // the copy still reads it
  OK(cuStreamSynchronize(stream));
  OK(cuMemHostRegister_v2(own, N, 1));
  OK(cuMemHostUnregister(own));
  IS(713, cuMemHostUnregister(own));
}
static void streams_are_ordered_by_events_only() {
  open();
  OK(cuMemsetD8Async(memory, 4, N, stream));
  OK(cuMemcpyDtoHAsync_v2(pinned, memory, N, other));
  OK(cuStreamSynchronize(other));
  HOLDS(all(POISON));  // fresh memory
  P done = event();
  OK(cuEventRecord(done, stream));
  OK(cuStreamWaitEvent(other, done, 0));
  OK(cuMemcpyDtoHAsync_v2(pinned, memory, N, other));
  IS(600, cuEventQuery(done));
  OK(cuStreamSynchronize(other));
  HOLDS(all(4));
  OK(cuEventQuery(done));
  OK(cuEventDestroy_v2(done));
  IS(400, cuEventRecord(done, stream));
}
static void a_wait_is_for_the_record_before_it() {
  open();
  P done = event();
  OK(cuStreamWaitEvent(other, done, 0));  // never recorded: no wait
  OK(cuMemsetD8Async(memory, 1, N, stream));
  OK(cuEventRecord(done, stream));
  OK(cuStreamWaitEvent(other, done, 0));
  OK(cuMemsetD8Async(memory, 2, N, stream));
  OK(cuEventRecord(done, stream));
  OK(cuMemcpyDtoHAsync_v2(pinned, memory, N, other));
  OK(cuStreamSynchronize(other));
  HOLDS(all(1));
}
static void ranges_must_be_allocated() {
  open();
  IS(1, cuMemsetD8Async(memory, 0, N + 1, stream));
  IS(1, cuMemsetD8Async(memory, 0, 0, stream));
  IS(1, cuMemcpyDtoDAsync_v2(memory, memory + 10, 20, stream));
  IS(1, cuMemcpyDtoHAsync_v2((P)memory, memory, N, stream));
  IS(1, cuMemFree_v2(memory + 1));
  OK(cuMemFree_v2(memory));
  IS(1, cuMemFree_v2(memory));
  IS(1, cuMemsetD8Async(memory, 0, N, stream));
  OK(cuMemFreeHost(pinned));
  IS(1, cuMemFreeHost(pinned));
}
static void handles_must_be_alive() {
  open();
  OK(cuStreamDestroy_v2(other));
  IS(400, cuStreamSynchronize(other));
  IS(400, cuEventQuery(stream));
  IS(1, cuEventCreate(&other, 4));
  OK(cuDevicePrimaryCtxRelease_v2(0));
  IS(201, cuStreamSynchronize(stream));
}
static void memory_ends() {
  setenv("TESSERA_FAKE_MEMORY", "100000", 1);
  open();
  size_t free, total;
  OK(cuMemGetInfo_v2(&free, &total));
  HOLDS(total == 100000 && free == 90000);
  u64 more;
  IS(2, cuMemAlloc_v2(&more, 90001));
  OK(cuMemAlloc_v2(&more, 90000));
  OK(cuMemFree_v2(more));
  OK(cuMemAlloc_v2(&more, 90000));
}
static void events_with_timing_measure() {
  open();
  P plain = event(), from = event(0), to = event(0);
  float milliseconds = -1;
  OK(cuEventRecord(from, stream));
  OK(cuEventRecord(to, stream));
  OK(cuEventRecord(plain, stream));
  IS(600, cuEventElapsedTime(&milliseconds, from, to));
  IS(400, cuEventElapsedTime(&milliseconds, from, plain));
  OK(cuEventSynchronize(to));
  OK(cuEventElapsedTime(&milliseconds, from, to));
  HOLDS(milliseconds >= 0);
}
static void kernels_get_their_parameters() {
  open();
  OK(cuMemsetD8Async(memory, 1, N, stream));
  OK(launch(kernel("add"), memory, N));
  OK(cuMemcpyDtoHAsync_v2(pinned, memory, N, stream));
  OK(cuStreamSynchronize(stream));
  HOLDS(all(2));
  P module, function;
  OK(cuModuleLoadData(&module, "contract"));
  IS(500, cuModuleGetFunction(&function, module, "absent"));
  IS(218, cuModuleLoadData(&module, "unknown"));
  IS(200, cuModuleLoadData(&module, "\177ELF"));
  IS(700, launch(kernel("add"), 1234, N));
  IS(1, launch(kernel("add"), memory, N, 0, 8));
  IS(1, launch(kernel("add"), memory, N, 0, 16));
}
static void shared_memory_needs_an_opt_in() {
  open();
  P add = kernel("add");
  IS(1, launch(add, memory, N, 60000));
  IS(1, cuFuncSetAttribute(add, 8, 200000));
  OK(cuFuncSetAttribute(add, 8, 90000));
  OK(launch(add, memory, N, 60000));
  OK(cuStreamSynchronize(stream));
}
static void errors_of_kernels_stay() {
  open();
  OK(launch(kernel("fail"), memory, N));
  OK(cuMemsetD8Async(memory, 1, N, stream));
  IS(719, cuStreamSynchronize(stream));
  IS(719, cuMemAlloc_v2(&memory, N));
  IS(719, cuStreamSynchronize(other));
}
static void a_kernel_that_leaves_its_memory_ends_the_context() {
  open();
  OK(launch(kernel("add"), memory, N + 100000));
  IS(700, cuStreamSynchronize(stream));
}
static void graphs_run_when_they_are_launched() {
  open();
  P add = kernel("add"), graph, executable;
  OK(cuMemsetD8Async(memory, 0, N, stream));
  OK(cuStreamBeginCapture_v2(stream, 1));
  OK(launch(add, memory, N));
  OK(cuStreamEndCapture(stream, &graph));
  OK(cuGraphInstantiateWithFlags(&executable, graph, 0));
  for (int i = 0; i < 3; i++) OK(cuGraphLaunch(executable, stream));
  OK(cuGraphExecDestroy(executable));
  IS(400, cuGraphLaunch(executable, stream));
  OK(cuMemcpyDtoHAsync_v2(pinned, memory, N, stream));
  OK(cuStreamSynchronize(stream));
  HOLDS(all(3));
}
static void a_capture_forbids_waiting() {
  open();
  P graph;
  OK(cuStreamBeginCapture_v2(stream, 1));
  IS(900, cuStreamSynchronize(stream));
  IS(901, cuStreamEndCapture(stream, &graph));
  OK(cuStreamBeginCapture_v2(stream, 1));
  IS(900, cuMemAlloc_v2(&memory, N));
  IS(901, cuStreamEndCapture(stream, &graph));
  OK(cuStreamSynchronize(stream));
}
static void faults_happen_once() {
  setenv("TESSERA_FAKE_FAULT", "memory:2", 1);
  open();
  u64 more;
  IS(2, cuMemAlloc_v2(&more, N));
  OK(cuMemAlloc_v2(&more, N));
}
static void processes_share_memory_and_events() {
  int down[2], up[2];
  HOLDS(!pipe(down) && !pipe(up));
  pid_t child = fork();
  Handle handles[2];
  if (child) {
    open();
    P done = event(6);
    OK(cuIpcGetMemHandle(&handles[0], memory));
    OK(cuIpcGetEventHandle(&handles[1], done));
    IS(201, cuIpcOpenMemHandle_v2(&memory, handles[0], 1));
    OK(cuMemsetD8Async(memory, 5, N, stream));
    OK(cuEventRecord(done, stream));
    HOLDS(write(down[1], handles, sizeof handles) == sizeof handles);
    // Nothing here waits for the stream: it moves by itself.
    int status;
    waitpid(child, &status, 0);
    HOLDS(status == 0);
    return;
  }
  HOLDS(read(down[0], handles, sizeof handles) == sizeof handles);
  open();
  u64 far;
  P done;
  IS(1, cuIpcOpenMemHandle_v2(&far, handles[0], 0));
  OK(cuIpcOpenMemHandle_v2(&far, handles[0], 1));
  OK(cuIpcOpenEventHandle(&done, handles[1]));
  OK(cuStreamWaitEvent(stream, done, 0));
  OK(cuMemcpyDtoDAsync_v2(memory, far, N, stream));
  OK(cuMemcpyDtoHAsync_v2(pinned, memory, N, stream));
  OK(cuStreamSynchronize(stream));
  HOLDS(all(5));
  OK(cuIpcCloseMemHandle(far));
  IS(1, cuMemcpyDtoDAsync_v2(memory, far, N, stream));
}

static void products_keep_what_was_promised() {
  open();
  P handle, description, a, b, d, preference;
  OK(cublasLtCreate(&handle));
  OK(cublasLtMatmulDescCreate(&description, 68, 0));
  int one = 1;
  IS(7, cublasLtMatmulDescSetAttribute(description, 3, &one, 8));
  OK(cublasLtMatmulDescSetAttribute(description, 3, &one, 4));  // A is transposed
  // Column-major: A is 2 x 3 and stored as 3 x 2, B is 3 x 1.
  OK(cublasLtMatrixLayoutCreate(&a, 0, 3, 2, 3));
  OK(cublasLtMatrixLayoutCreate(&b, 0, 3, 1, 3));
  OK(cublasLtMatrixLayoutCreate(&d, 0, 2, 1, 2));
  OK(cublasLtMatmulPreferenceCreate(&preference));
  u64 bytes = 2 * PAGE;
  u32 alignment = 16;
  OK(cublasLtMatmulPreferenceSetAttribute(preference, 1, &bytes, 8));
  for (u32 which = 5; which <= 8; which++) OK(cublasLtMatmulPreferenceSetAttribute(preference, which, &alignment, 4));
  struct { u64 algorithm[8], workspace; u32 rest[6]; } best;
  int found = 0;
  OK(cublasLtMatmulAlgoGetHeuristic(handle, description, a, b, d, d, preference, 1, &best, &found));
  HOLDS(found == 1);
  IS(7, cublasLtMatmulAlgoGetHeuristic(handle, description, b, b, d, d, preference, 1, &best, &found));
  OK(cublasLtMatmulAlgoGetHeuristic(handle, description, a, b, d, d, preference, 1, &best, &found));
  u64 space;
  OK(cuMemAlloc_v2(&space, bytes));
  const float values[] = {1, 2, 3, 4, 5, 6, 0, 0, 1, 10, 100, 0, 7, 7};
  memcpy(pinned, values, sizeof values);
  OK(cuMemcpyHtoDAsync_v2(memory, pinned, sizeof values, stream));
  OK(cuStreamSynchronize(stream));
  const u64 left = memory, right = memory + 32, result = memory + 48;
  const float alpha = 2, beta = 1;
  IS(7, cublasLtMatmul(handle, description, &alpha, left, a, right, b, &beta, result, d, result, d, best.algorithm, space, PAGE, stream));
  IS(7, cublasLtMatmul(handle, description, &alpha, left + 4, a, right, b, &beta, result, d, result, d, best.algorithm, space, bytes, stream));
  OK(cublasLtMatmul(handle, description, &alpha, left, a, right, b, &beta, result, d, result, d, best.algorithm, space, bytes, stream));
  OK(cuMemcpyDtoHAsync_v2(pinned, result, 8, stream));
  OK(cuStreamSynchronize(stream));
  const float* got = (const float*)pinned;
  HOLDS(got[0] == 2 * 321 + 7 && got[1] == 2 * 654 + 7);
}
static void ranks_sum_what_all_of_them_gave() {
  int down[2];
  HOLDS(!pipe(down));
  pid_t child = fork();
  const u32 rank = child ? 0 : 1;
  OK(cuInit(0));
  OK(cuDevicePrimaryCtxRetain(&context, rank));
  OK(cuCtxSetCurrent(context));
  OK(cuStreamCreate(&stream, 1));
  OK(cuMemAlloc_v2(&memory, N));
  OK(cuMemHostAlloc((P*)&pinned, N, 1));
  Id id;
  if (child) {
    OK(ncclGetUniqueId(&id));
    HOLDS(write(down[1], &id, sizeof id) == sizeof id);
  } else {
    HOLDS(read(down[0], &id, sizeof id) == sizeof id);
  }
  P ranks;
  OK(ncclCommInitRank(&ranks, 2, id, rank));
  float* values = (float*)pinned;
  values[0] = 1 + rank, values[1] = 10;
  OK(cuMemcpyHtoDAsync_v2(memory, pinned, 8, stream));
  OK(cuStreamSynchronize(stream));
  for (int i = 0; i < 3; i++) OK(ncclAllReduce(memory, memory, 2, 7, 0, ranks, stream));
  IS(4, ncclAllReduce(memory, memory, N, 7, 0, ranks, stream));
  OK(cuMemcpyDtoHAsync_v2(pinned, memory, 8, stream));
  OK(cuStreamSynchronize(stream));
  HOLDS(values[0] == 3 * 4 && values[1] == 80);
  OK(ncclCommDestroy(ranks));
  int status = 0;
  if (child) waitpid(child, &status, 0);
  HOLDS(status == 0);
}

#define RULE(name) {#name, name}
static const struct {
  const char* name;
  void (*run)();
} RULES[] = {
    RULE(calls_need_a_start_and_a_context), RULE(device_memory_is_not_the_hosts), RULE(copies_read_as_late_as_allowed),
    RULE(pageable_copies_are_done_with_the_hosts_bytes), RULE(registered_memory_is_read_where_it_is),
    RULE(streams_are_ordered_by_events_only),
    RULE(a_wait_is_for_the_record_before_it), RULE(ranges_must_be_allocated), RULE(handles_must_be_alive),
    RULE(memory_ends), RULE(events_with_timing_measure), RULE(kernels_get_their_parameters),
    RULE(shared_memory_needs_an_opt_in), RULE(errors_of_kernels_stay),
    RULE(a_kernel_that_leaves_its_memory_ends_the_context), RULE(graphs_run_when_they_are_launched),
    RULE(a_capture_forbids_waiting), RULE(faults_happen_once), RULE(processes_share_memory_and_events),
    RULE(products_keep_what_was_promised), RULE(ranks_sum_what_all_of_them_gave),
};

int main(int count, char** words) {
  for (auto& rule : RULES) {
    if (count < 2) puts(rule.name);
    else if (strcmp(rule.name, words[1]) == 0) return rule.run(), 0;
  }
  return count < 2 ? 0 : 2;
}
