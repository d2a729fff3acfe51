// Modules, launches of their kernels, and graphs.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "objects.h"

// The object that was built for this PTX, by the hash of its text (FNV-1a).
static std::string object_of(const char* ptx) {
  u64 hash = 0xcbf29ce484222325;
  for (const char* at = ptx; *at; at++) hash = (hash ^ (u8)*at) * 0x100000001b3;
  char name[32];
  snprintf(name, sizeof name, "%016lx", hash);
  std::string path = directory() + "/objects/" + name;
  if (access((path + ".so").c_str(), R_OK) != 0) {
    // The driver's own compiler, with a cache, as in CUDA.
    std::string command = directory() + "/build-object " + name + " >&2";
    if (access((path + ".cpp").c_str(), R_OK) != 0 || system(command.c_str()) != 0) return "";
  }
  return path + ".so";
}
EXPORT u32 cuModuleLoadData(Module** module, const char* image) {
  NEED_CONTEXT();
  NEED_NO_CAPTURE();
  if (memcmp(image, "\177ELF", 4) == 0) return INVALID_IMAGE;
  std::string path = object_of(image);
  if (path.empty()) return broken(INVALID_PTX, "PTX that no built-in module has");
  Lock lock(busy);
  Module* one = new Module();
  one->context = current, one->number = ++current->modules;
  one->name = path.substr(path.rfind('/') + 1, 16);
  one->object = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (!one->object) return broken(INVALID_PTX, "%s", dlerror());
  Message m = {};
  m.kind = LOAD, m.at = one->number;
  snprintf(m.name, sizeof m.name, "%s", path.c_str());
  send(current, m);
  modules.insert(one);
  return *module = one, SUCCESS;
}
EXPORT u32 cuModuleGetFunction(Function** function, Module* module, const char* name) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(modules, module);
  Function*& known = module->functions[name];
  if (!known) {
    std::string symbol = std::string("emulator_kinds_") + name;
    auto kinds = (const char* (*)())dlsym(module->object, symbol.c_str());
    if (!kinds) return module->functions.erase(name), NOT_FOUND;
    known = new Function{module, name, kinds(), 0};
    functions.insert(known);
  }
  return *function = known, SUCCESS;
}
EXPORT u32 cuFuncSetAttribute(Function* function, int which, int value) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(functions, function);
  if (which != 8) return broken(NOT_SUPPORTED, "function attribute %d is not modeled", which);
  if (value < 0 || (u64)value > OPT_IN_BYTES) return broken(INVALID_VALUE, "%d bytes of dynamic shared memory", value);
  return function->shared_limit = value, SUCCESS;
}
EXPORT u32 cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* function, int threads, size_t shared) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(functions, function);
  if (threads < 1 || threads > 1024) return broken(INVALID_VALUE, "blocks of %d threads", threads);
  return *blocks = std::min<u64>(1536 / threads, 102400 / (shared + 1024)), SUCCESS;
}
EXPORT u32 cuLaunchKernel(Function* function, u32 x, u32 y, u32 z, u32 threads_x, u32 threads_y, u32 threads_z, u32 shared,
                          Stream* stream, void** parameters, void** extra) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(functions, function);
  NEED_HANDLE(streams, stream);
  if (function->module->context != stream->context) return broken(INVALID_HANDLE, "kernel and stream of two contexts");
  u64 threads = (u64)threads_x * threads_y * threads_z;
  if (!x || !y || !z || x > 0x7fffffff || y > 65535 || z > 65535 || !threads || threads > 1024)
    return broken(INVALID_VALUE, "a grid of %u x %u x %u blocks of %lu threads", x, y, z, threads);
  if (shared > DEFAULT_SHARED_BYTES && shared > function->shared_limit)
    return broken(INVALID_VALUE, "%u bytes of shared memory, %u were opted in to", shared, function->shared_limit);
  // Parameters come as a list of markers and values: 1 and their bytes, 2 and the number of bytes, 0.
  if (parameters || !extra || (size_t)extra[0] != 1 || (size_t)extra[2] != 2 || extra[4] || threads_y != 1 || threads_z != 1)
    return broken(NOT_SUPPORTED, "this form of a launch is not modeled");
  const u8* bytes = (const u8*)extra[1];
  const size_t size = *(const size_t*)extra[3];
  Message m = {};
  m.kind = LAUNCH, m.object = function->module->number;
  m.grid[0] = x, m.grid[1] = y, m.grid[2] = z, m.threads = threads, m.shared_bytes = shared;
  snprintf(m.name, sizeof m.name, "%s", function->name.c_str());
  if (faulty("launch")) m.object = 0;
  bool drops = faulty("argument") || faulty(function->module->name.c_str());
  size_t at = 0;
  for (; function->kinds[m.count]; m.count++) {
    char kind = function->kinds[m.count];
    bool wide = kind == 'p' || kind == 'l';
    if (m.count == MAX_WORDS) return broken(INVALID_VALUE, "too many parameters");
    const size_t width = wide ? 8 : 4;
    at = (at + width - 1) / width * width;
    if (at + width > size) return broken(INVALID_VALUE, "%lu bytes of parameters are too few for %s", size, m.name);
    memcpy(&m.words[m.count], bytes + at, width);
    at += width;
    u64 word = m.words[m.count];
    // One byte behind an allocation is an address that a kernel may get, though not use.
    if (kind == 'p' && word && !is_device(word, 0))
      return broken(ILLEGAL_ADDRESS, "parameter %u of %s is %#lx, which is no device memory", m.count, m.name, word);
  }
  if (at != size) return broken(INVALID_VALUE, "%lu bytes of parameters, %s has %lu", size, m.name, at);
  if (drops && m.count) m.words[m.count - 1] = 0;
  if (!stream->context->launches) note("launched");
  return queue(stream, m);
}

// ---- graphs

EXPORT u32 cuStreamBeginCapture_v2(Stream* stream, u32 mode) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(streams, stream);
  if (mode > 2) return broken(INVALID_VALUE, "mode of a capture");
  if (stream->captures) return broken(INVALID_VALUE, "a second capture of a stream");
  if (faulty("capture")) return NOT_SUPPORTED;
  stream->captures = true, stream->invalidated = false, stream->mode = mode, stream->capturer = this_thread();
  stream->captured.clear();
  return SUCCESS;
}
EXPORT u32 cuStreamEndCapture(Stream* stream, Graph** graph) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(streams, stream);
  *graph = nullptr;
  if (!stream->captures) return broken(INVALID_VALUE, "the end of a capture that was not begun");
  if (stream->mode != 2 && stream->capturer != this_thread())
    return broken(CAPTURE_WRONG_THREAD, "a capture ends in another thread");
  stream->captures = false;
  if (stream->invalidated) return CAPTURE_INVALIDATED;
  Graph* one = new Graph{current, std::move(stream->captured)};
  graphs.insert(one);
  return *graph = one, SUCCESS;
}
EXPORT u32 cuGraphInstantiateWithFlags(Graph** executable, Graph* graph, unsigned long long flags) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(graphs, graph);
  if (flags) return broken(INVALID_VALUE, "flags of a graph");
  Graph* one = new Graph(*graph);
  executables.insert(one);
  return *executable = one, SUCCESS;
}
EXPORT u32 cuGraphLaunch(Graph* executable, Stream* stream) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(executables, executable);
  NEED_HANDLE(streams, stream);
  const size_t count = executable->commands.size() - (faulty("graph") ? 1 : 0);
  for (size_t i = 0; i < count; i++)
    if (u32 code = queue(stream, executable->commands[i])) return code;
  return SUCCESS;
}
EXPORT u32 cuGraphExecDestroy(Graph* executable) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(executables, executable);
  executables.erase(executable);
  delete executable;
  return SUCCESS;
}
EXPORT u32 cuGraphDestroy(Graph* graph) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(graphs, graph);
  graphs.erase(graph);
  delete graph;
  return SUCCESS;
}
