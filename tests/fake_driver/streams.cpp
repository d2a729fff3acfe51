// Streams, the commands on them, events, and waits.
#include <stdio.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "objects.h"

void send(Context* context, const Message& m) {
  if (::send(context->socket, &m, sizeof m, MSG_NOSIGNAL) != sizeof m) {
    u32 none = 0;
    context->state->error.compare_exchange_strong(none, UNKNOWN);
  }
}

// Adds a command to a stream, or to the graph that it captures.
u32 queue(Stream* stream, Message m) {
  m.stream = stream->number;
  if (stream->captures) {
    if (stream->mode != 2 && stream->capturer != this_thread() && stream->mode == 0)
      return broken(CAPTURE_WRONG_THREAD, "a command from another thread");
    stream->captured.push_back(m);
    return SUCCESS;
  }
  if (m.kind == LAUNCH || m.kind == PRODUCT) stream->context->launches++, stream->context->launcher = this_thread();
  m.number = ++stream->context->state->streams[stream->number].queued;
  send(stream->context, m);
  return SUCCESS;
}

// ---- waiting

static bool lives(Context* context) {
  int status;
  return waitpid(context->process, &status, WNOHANG) == 0;
}

static void want(Context* context, u32 stream, u64 number) {
  StreamState& of = context->state->streams[stream];
  u64 wanted = of.wanted;
  if (wanted >= number) return;
  while (wanted < number && !of.wanted.compare_exchange_weak(wanted, number)) {
  }
  Message poke = {};
  poke.kind = POKE;
  send(context, poke);
}

template <typename Done>
static u32 until(Context* context, Done done) {
  for (u32 turn = 0; !done(); turn++) {
    if (context->state->error) return context->state->error;
    if (turn % 1024 == 1023 && !lives(context)) {
      u32 none = 0;
      context->state->error.compare_exchange_strong(none, UNKNOWN);
    }
    usleep(turn < 64 ? 5 : 50);
  }
  return context->state->error;
}

u32 drain(Context* context, u32 stream) {
  StreamState& of = context->state->streams[stream];
  u64 number = of.queued;
  if (of.done >= number) return context->state->error;
  want(context, stream, number);
  return until(context, [&] { return of.done >= number; });
}

u32 drain(Context* context) {
  u32 worst = SUCCESS;
  for (u32 s = 0; s < MAX_STREAMS; s++)
    if (u32 code = drain(context, s)) worst = code;
  return worst;
}

// ---- a copy beside kernels

constexpr u64 HELD_TURNS = 100000;  // at most, of 50 microseconds and more
static thread_local u64 waited;      // kernels queued before the event that this thread waited for last

void hold(Stream* stream, u64 bytes) {
  static const u64 least = setting("TESSERA_FAKE_HOLD", 0);
  Context* context = stream->context;
  if (!least || bytes < least || context->held || this_thread() == context->launcher) return;
  context->held_behind = std::max(stream->behind, waited);
  context->held = stream->number + 1;
}
// Whether the event comes after a copy beside which no kernel was queued yet.
static bool is_held(Event* event) {
  Context* context = event->context;
  if (context->held != event->stream + 1 || context->held_turns > HELD_TURNS) return false;
  if (context->launches > context->held_behind) {
    note("kernels were queued beside a copy to the host");
    context->held_turns = HELD_TURNS + 1;
  } else if (context->held_turns++ == HELD_TURNS) {
    broken(UNKNOWN, "no kernel was queued beside a copy to the host");
  }
  return context->held_turns <= HELD_TURNS;
}

// ---- streams

EXPORT u32 cuStreamCreate(Stream** stream, u32 flags) {
  NEED_CONTEXT();
  if (flags > 1) return broken(INVALID_VALUE, "flags of a stream");
  Lock lock(busy);
  if (current->free_streams.empty()) return OUT_OF_MEMORY;
  Stream* one = new Stream();
  one->context = current;
  one->number = current->free_streams.front();
  current->free_streams.pop_front();
  streams.insert(one);
  return *stream = one, SUCCESS;
}
EXPORT u32 cuStreamDestroy_v2(Stream* stream) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(streams, stream);
  if (stream->captures) return broken(CAPTURE_UNSUPPORTED, "a stream that is captured is destroyed");
  // Its work goes on; the number is not used again.
  streams.erase(stream);
  return SUCCESS;
}
EXPORT u32 cuStreamSynchronize(Stream* stream) {
  NEED_CONTEXT();
  {
    Lock lock(busy);
    NEED_HANDLE(streams, stream);
    if (stream->captures) stream->invalidated = true;
    if (stream->captures) return broken(CAPTURE_UNSUPPORTED, "a stream that is captured is waited for");
  }
  if (faulty("synchronization")) return SUCCESS;
  return drain(stream->context, stream->number);
}
EXPORT u32 cuStreamWaitEvent(Stream* stream, Event* event, u32 flags) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(streams, stream);
  NEED_HANDLE(events, event);
  if (flags) return broken(INVALID_VALUE, "flags of a wait");
  if (stream->captures) {
    stream->invalidated = true;
    return broken(CAPTURE_ISOLATION, "a captured stream waits for an event outside of the capture");
  }
  u64 version = event->state ? event->of->events[event->number].recorded.load() : event->version;
  std::string fault = "wait" + std::to_string(stream->number);
  if (!version || faulty(fault.c_str())) return SUCCESS;
  stream->behind = event->launches;
  Message m = {};
  m.kind = WAIT, m.event = event->number, m.version = version, m.at = event->state;
  return queue(stream, m);
}

// ---- events

EXPORT u32 cuEventCreate(Event** event, u32 flags) {
  NEED_CONTEXT();
  if (flags > 7 || ((flags & INTERPROCESS) && !(flags & DISABLE_TIMING)))
    return broken(INVALID_VALUE, "flags %u of an event", flags);
  Lock lock(busy);
  if (current->free_events.empty()) return OUT_OF_MEMORY;
  Event* one = new Event();
  one->context = current, one->flags = flags;
  one->number = current->free_events.front();
  one->of = current->state;
  current->free_events.pop_front();
  events.insert(one);
  return *event = one, SUCCESS;
}
EXPORT u32 cuEventDestroy_v2(Event* event) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(events, event);
  events.erase(event);
  // Commands that are queued may still name it. So the number that is used again is the one that was freed first.
  if (!event->state) event->context->free_events.push_back(event->number);
  delete event;
  return SUCCESS;
}
EXPORT u32 cuEventRecord(Event* event, Stream* stream) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(events, event);
  NEED_HANDLE(streams, stream);
  if (event->context != stream->context) return broken(INVALID_HANDLE, "event and stream of two contexts");
  if (event->state) return broken(NOT_SUPPORTED, "the record of another process's event is not modeled");
  if (stream->captures) {
    stream->invalidated = true;
    return broken(CAPTURE_UNSUPPORTED, "the record of an event in a capture is not modeled");
  }
  event->launches = event->context->launches;
  event->version = ++event->of->events[event->number].recorded;
  Message m = {};
  m.kind = RECORD, m.event = event->number, m.version = event->version;
  u32 code = queue(stream, m);
  u64 number = event->context->state->streams[stream->number].queued;
  // The first event behind a copy is that of its chunk, the second that of the work behind it.
  if (!stream->late.empty() && ++stream->late_events == 2) {
    for (const Message& late : stream->late) queue(stream, late);
    stream->late.clear(), stream->late_events = 0;
  }
  event->stream = stream->number, event->command = number;
  return code;
}
static bool reached(Event* event) {
  u64 version = event->state ? event->of->events[event->number].recorded.load() : event->version;
  return event->of->events[event->number].done >= version;
}
EXPORT u32 cuEventQuery(Event* event) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(events, event);
  if (reached(event) && !is_held(event)) return waited = event->launches, SUCCESS;
  want(event->context, event->stream, event->command);
  return NOT_READY;
}
EXPORT u32 cuEventSynchronize(Event* event) {
  NEED_CONTEXT();
  {
    Lock lock(busy);
    NEED_HANDLE(events, event);
  }
  waited = event->launches;
  if (faulty("synchronization") || (reached(event) && !is_held(event))) return SUCCESS;
  want(event->context, event->stream, event->command);
  return until(event->context, [&] { return reached(event) && !is_held(event); });
}
EXPORT u32 cuEventElapsedTime(float* milliseconds, Event* from, Event* to) {
  NEED_CONTEXT();
  Lock lock(busy);
  NEED_HANDLE(events, from);
  NEED_HANDLE(events, to);
  if ((from->flags | to->flags) & DISABLE_TIMING) return broken(INVALID_HANDLE, "the time of an event without timing");
  if (!from->version || !to->version) return broken(INVALID_HANDLE, "the time of an event that was not recorded");
  if (!reached(from) || !reached(to)) return NOT_READY;
  *milliseconds = (float)(((double)to->of->events[to->number].nanoseconds - (double)from->of->events[from->number].nanoseconds) / 1e6);
  return SUCCESS;
}
