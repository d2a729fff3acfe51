// Memory and events of other processes.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "objects.h"

// What a handle of 64 bytes holds. The files are opened below /proc, so they are gone when their process is.
struct Name {
  u64 magic;
  u32 pid, file;
  u64 offset, bytes;
  u32 event;
};
constexpr u64 MEMORY_NAME = 0x6d656d6f7279, EVENT_NAME = 0x6576656e74;
struct Handle {
  u8 bytes[64];
};

static u32 named(const Handle& handle, u64 magic, Name& name) {
  memcpy(&name, &handle, sizeof name);
  if (name.magic != magic) return broken(INVALID_HANDLE, "a handle of something else");
  if (name.pid == (u32)getpid()) return broken(INVALID_CONTEXT, "a handle of this process");
  if (setting("TESSERA_FAKE_NO_IPC", 0)) return PEER_ACCESS_UNSUPPORTED;
  char path[64];
  snprintf(path, sizeof path, "/proc/%u/fd/%u", name.pid, name.file);
  return access(path, R_OK | W_OK) ? (u32)INVALID_HANDLE : (u32)SUCCESS;
}

EXPORT u32 cuIpcGetMemHandle(Handle* handle, u64 at) {
  NEED_CONTEXT();
  Lock lock(busy);
  auto range = memory.find(at);
  if (at >= PINNED_BASE || range == memory.end() || range->second.imported)
    return broken(INVALID_VALUE, "the handle of an address that cuMemAlloc did not give");
  if (faulty("handle")) return NOT_SUPPORTED;
  Context* owner = range->second.context;
  owner->state->alone = 0;
  Name name = {MEMORY_NAME, (u32)getpid(), (u32)owner->memory, at - BASE, range->second.bytes, 0};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &name, sizeof name);
  return SUCCESS;
}
EXPORT u32 cuIpcOpenMemHandle_v2(u64* at, Handle handle, u32 flags) {
  NEED_CONTEXT();
  Lock lock(busy);
  if (flags != 1) return broken(INVALID_VALUE, "flags of cuIpcOpenMemHandle");
  Name name;
  if (u32 code = named(handle, MEMORY_NAME, name)) return code;
  u64 start = take(BASE, name.bytes);
  Message m = {};
  m.kind = IMPORT, m.at = start, m.bytes = whole_pages(name.bytes);
  m.pid = name.pid, m.file = name.file, m.offset = name.offset;
  if (faulty("ipc")) m.kind = MAP;
  send(current, m);
  memory[start] = {current, name.bytes, true};
  return *at = start, SUCCESS;
}
EXPORT u32 cuIpcCloseMemHandle(u64 at) {
  NEED_CONTEXT();
  Lock lock(busy);
  auto range = memory.find(at);
  if (range == memory.end() || !range->second.imported)
    return broken(INVALID_VALUE, "cuIpcCloseMemHandle of memory that was not opened");
  return release(at);
}
EXPORT u32 cuIpcGetEventHandle(Handle* handle, Event* event) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(events, event);
  if (!(event->flags & INTERPROCESS) || event->state) return broken(INVALID_HANDLE, "the handle of an event that is not interprocess");
  event->context->state->alone = 0;
  Name name = {EVENT_NAME, (u32)getpid(), (u32)event->context->state_file, 0, 0, event->number};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &name, sizeof name);
  return SUCCESS;
}
EXPORT u32 cuIpcOpenEventHandle(Event** event, Handle handle) {
  NEED_CONTEXT();
  Lock lock(busy);
  Name name;
  if (u32 code = named(handle, EVENT_NAME, name)) return code;
  using Opened = std::map<std::pair<Context*, std::pair<u32, u32>>, std::pair<u32, State*>>;
  static Opened& opened = *new Opened;
  auto& [number, state] = opened[{current, {name.pid, name.file}}];
  if (!state) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/fd/%u", name.pid, name.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    void* mapped = file < 0 ? MAP_FAILED : mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (mapped == MAP_FAILED) return INVALID_HANDLE;
    state = (State*)mapped, number = ++current->states;
    Message m = {};
    m.kind = OPEN_STATE, m.at = number, m.pid = name.pid, m.file = name.file;
    send(current, m);
  }
  Event* one = new Event();
  one->context = current, one->flags = DISABLE_TIMING | INTERPROCESS;
  one->number = name.event, one->state = number, one->of = state;
  events.insert(one);
  return *event = one, SUCCESS;
}
