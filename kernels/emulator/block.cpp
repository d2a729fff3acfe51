// Fibres, their scheduler, and reports.

namespace emulator {

// ---- switching stacks: saves what a call preserves, stores the stack pointer in *save, continues at `load`

#if defined(__x86_64__)
extern "C" void emulator_switch(void** save, void* load) asm("emulator_switch");
asm(".text\n.balign 16\n.hidden emulator_switch\n.type emulator_switch,@function\nemulator_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
    ".size emulator_switch, .-emulator_switch\n");
static void* fresh_stack(u8* top, void (*entry)()) {
  void** p = (void**)top;
  *--p = nullptr;  // the entry finds the stack as after a call
  *--p = (void*)entry;
  for (int i = 0; i < 6; i++) *--p = nullptr;
  return p;
}
#elif defined(__aarch64__) && defined(__ELF__)
extern "C" void emulator_switch(void** save, void* load) asm("emulator_switch");
asm(".text\n.balign 16\n.hidden emulator_switch\n.type emulator_switch,%function\nemulator_switch:\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp, #0]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
    "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp, #0]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\nret\n"
    ".size emulator_switch, .-emulator_switch\n");
static void* fresh_stack(u8* top, void (*entry)()) {
  void** p = (void**)(top - 160);
  memset(p, 0, 160);
  p[11] = (void*)entry;  // x30
  return p;
}
#else
}  // namespace emulator
#include <ucontext.h>
namespace emulator {
// A saved stack pointer is the address of a context that lies on the stack itself.
static void emulator_switch(void** save, void* load) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, (ucontext_t*)load);
}
static void* fresh_stack(u8* top, void (*entry)()) {
  ucontext_t* context = (ucontext_t*)((u64)(top - sizeof(ucontext_t)) & ~63ull);
  getcontext(context);
  context->uc_stack.ss_sp = top - STACK_BYTES;
  context->uc_stack.ss_size = (u64)context - (u64)(top - STACK_BYTES);
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}
#endif

static u8* stack_low(Block& block, u32 thread) { return block.room.stacks + thread * STACK_STRIDE; }

static void leave(Block& block, void** save) {
  void* load = block.launcher_stack_pointer;
  emulator_switch(save, load);
  __builtin_unreachable();
}

// ---- reports

static const char* file_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

static void print(Block& block, u64& used, const char* format, ...) __attribute__((format(printf, 3, 4)));
static void print_list(Block& block, u64& used, const char* format, va_list list) {
  if (used + 1 >= block.error_size) return;
  int n = vsnprintf(block.error + used, block.error_size - used, format, list);
  if (n > 0) used = used + n < block.error_size ? used + n : block.error_size - 1;
}
static void print(Block& block, u64& used, const char* format, ...) {
  va_list list;
  va_start(list, format);
  print_list(block, used, format, list);
  va_end(list);
}
static u64 print_place(Block& block) {
  u64 used = 0;
  block.failed = true;
  print(block, used, "kernel %s, block (%u, %u, %u)", block.kernel->name, block.index.x, block.index.y, block.index.z);
  return used;
}

static void fail(Site site, const char* format, ...) {
  Block& block = *running;
  u64 used = print_place(block);
  print(block, used, ", thread %u, ", block.current);
  Dl_info library;
  if (site.file)
    print(block, used, "%s:%d: ", file_name(site.file), site.line);
  else if (block.program_counter && dladdr(block.program_counter, &library))  // the caller may know the line
    print(block, used, "library+%#llx: ", (u64)block.program_counter - 1 - (u64)library.dli_fbase);
  va_list list;
  va_start(list, format);
  print_list(block, used, format, list);
  va_end(list);
  void* abandoned;
  leave(block, &abandoned);
  __builtin_unreachable();
}

// Threads in the same state, as ranges.
static void print_threads(Block& block, u64& used, u32 first, u32 last) {
  if (first == last)
    print(block, used, "; thread %u ", first);
  else
    print(block, used, "; threads %u..=%u ", first, last);
}
static bool same(Site a, Site b) {
  return a.line == b.line && (a.file == b.file || (a.file && b.file && strcmp(a.file, b.file) == 0));
}
static int state_of(Block& block, u32 thread) {
  Warp& warp = block.warp[thread / WARP];
  u32 bit = 1u << thread % WARP;
  return warp.at_block & bit ? 0 : warp.at_warp & bit ? 1 : 2;
}
// Names what every thread waits for.
static void report_threads(Block& block, const char* what) {
  u64 used = print_place(block);
  print(block, used, ": %s", what);
  for (u32 first = 0, last; first < block.threads; first = last + 1) {
    int state = state_of(block, first);
    Site site = block.room.fibres[first].site;
    for (last = first; last + 1 < block.threads; last++)
      if (state_of(block, last + 1) != state || (state != 2 && !same(block.room.fibres[last + 1].site, site))) break;
    print_threads(block, used, first, last);
    if (state == 2)
      print(block, used, "returned");
    else
      print(block, used, "wait at %s, %s:%d", state == 0 ? "block_barrier" : block.warp[first / WARP].operation,
            file_name(site.file), site.line);
  }
}

// ---- the scheduler: a warp runs as far as possible, in it a lane runs as far as possible

static u64 next_random(Block& block) {
  u64 z = block.random += 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

static u32 choose_lane(Block& block, u32 ready) {
  u32 order = block.shuffled ? RANDOM : block.launch->order;
  if (order == ASCENDING) return __builtin_ctz(ready);
  if (order == DESCENDING) return 31 - __builtin_clz(ready);
  for (u32 skip = next_random(block) % __builtin_popcount(ready); skip; skip--) ready &= ready - 1;
  return __builtin_ctz(ready);
}

static u32 choose_warp(Block& block) {
  u32 here = block.current / WARP;
  bool random = block.shuffled || block.launch->order == RANDOM;
  if (!random && block.current != NONE && block.warp[here].ready) return here;
  u32 start = random ? next_random(block) % block.warps : 0;
  for (u32 i = 0; i < block.warps; i++) {
    u32 warp = block.warp_order[(start + i) % block.warps];
    if (block.warp[warp].ready) return warp;
  }
  return NONE;
}

// All living threads wait at the block's barrier: false when it is not the same one.
static bool pass_barrier(Block& block) {
  Site site = {0, nullptr};
  for (u32 t = 0; t < block.threads; t++) {
    if (!(block.warp[t / WARP].alive >> t % WARP & 1)) continue;
    if (!site.file) site = block.room.fibres[t].site;
    if (!same(site, block.room.fibres[t].site)) return false;
  }
  for (u32 w = 0; w < block.warps; w++) {
    block.warp[w].ready = block.warp[w].at_block;
    block.warp[w].at_block = 0;
  }
  block.waiting = 0;
  block.room.epoch++;
  block.current = NONE;
  return true;
}

// The thread that runs next; NONE when the block has ended or failed.
static u32 choose(Block& block) {
  u32 warp = choose_warp(block);
  if (warp == NONE) {
    if (!block.live) return NONE;
    if (block.waiting != block.live) {
      report_threads(block, "deadlock");
      return NONE;
    }
    if (!pass_barrier(block)) {
      report_threads(block, "threads wait at different barriers");
      return NONE;
    }
    warp = choose_warp(block);
  }
  return warp * WARP + choose_lane(block, block.warp[warp].ready);
}

static void run_next(Block& block, void** save, u32 previous) {
  u32 next = choose(block);
  if (next == NONE) leave(block, save);
  block.current = next;
  block.stack_low = (u64)stack_low(block, next);
  if (next != previous) emulator_switch(save, block.room.fibres[next].stack_pointer);
}

static void wait() {
  Block& block = *running;
  u32 current = block.current;
  run_next(block, &block.room.fibres[current].stack_pointer, current);
}

static void thread_main() {
  Block& block = *running;
  block.kernel->call();
  u32 thread = block.current;
  Warp& warp = block.warp[thread / WARP];
  warp.ready &= ~(1u << thread % WARP);
  warp.alive &= ~(1u << thread % WARP);
  block.live--;
  block.program_counter = nullptr;
  if (*stack_low(block, thread) != POISON) fail({0, nullptr}, "the stack of %llu bytes overflowed", STACK_BYTES);
  run_next(block, &block.room.fibres[thread].stack_pointer, NONE);
  __builtin_unreachable();
}

// ---- what kernels ask for

Index thread_index() { return {running->current, 0, 0}; }
Index block_index() { return running->index; }
Index block_size() { return {running->threads, 1, 1}; }
Index grid_size() { return {running->launch->grid[0], running->launch->grid[1], running->launch->grid[2]}; }
u8* shared_memory() { return running->room.shared; }
u64 argument_word(u32 index) { return running->launch->words[index]; }

void block_barrier(Site site) {
  Block& block = *running;
  current_fibre().site = site;
  Warp& warp = current_warp();
  u32 bit = 1u << block.current % WARP;
  warp.ready &= ~bit;
  warp.at_block |= bit;
  block.waiting++;
  wait();
}

}  // namespace emulator
