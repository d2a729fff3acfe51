// The launch: memory for threads and blocks, checks, and the order of the blocks.

namespace emulator {

// ---- rooms, kept for the next launch: fresh memory is what costs most

static std::mutex rooms_busy;
static std::vector<Room> rooms;

static void* reserve(u64 bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

static bool take_room(Room& room) {
  {
    std::lock_guard<std::mutex> lock(rooms_busy);
    if (!rooms.empty()) {
      room = std::move(rooms.back());
      rooms.pop_back();
      return true;
    }
  }
  // Shared memory in the middle of a range, so that addresses near it belong to nothing else.
  u8* memory = (u8*)reserve(MAX_THREADS * STACK_STRIDE + SHARED_ROOM + 2 * SHARED_MARGIN);
  if (!memory) return false;
  room.stacks = memory;
  room.shared = memory + MAX_THREADS * STACK_STRIDE + SHARED_MARGIN;
  for (std::vector<u32>* column :
       {&room.shadow.write_epoch, &room.shadow.writer, &room.shadow.read_epoch, &room.shadow.reader})
    column->assign(SHARED_ROOM / GRANULE, 0);
  room.fibres.resize(MAX_THREADS);
  return true;
}

static void give_room_back(Room& room) {
  // Epochs of a room never come again; long before the last one it is left alone.
  if (room.epoch > LAST_EPOCH) return;
  std::lock_guard<std::mutex> lock(rooms_busy);
  rooms.push_back(std::move(room));
}

// Cells for all buffers. What earlier launches left in them lies in epochs before this launch.
static bool open_buffers(Block& block) {
  const Launch& launch = *block.launch;
  u64 count = 0;
  for (u64 i = 0; i < launch.buffer_count; i++) count += launch.buffers[i].len / GRANULE + 1;
  Room& room = block.room;
  if (count > room.cell_count) {
    if (room.cells) munmap(room.cells, room.cell_count * sizeof(Cell));
    room.cell_count = 0;
    room.cells = (Cell*)reserve(2 * count * sizeof(Cell));
    if (!room.cells) return false;
    room.cell_count = 2 * count;
  }
  Cell* cells = room.cells;
  for (u64 i = 0; i < launch.buffer_count; i++) {
    const Buffer& b = launch.buffers[i];
    block.buffers.push_back({b.address, b.address + b.len, cells});
    cells += b.len / GRANULE + 1;
  }
  return true;
}

// ---- blocks

static void start_block(Block& block, u64 number) {
  const Launch& launch = *block.launch;
  block.index.x = number % launch.grid[0];
  block.index.y = number / launch.grid[0] % launch.grid[1];
  block.index.z = number / launch.grid[0] / launch.grid[1];
  block.starts.push_back(++block.room.epoch);
  block.acquires.clear();
  block.live = block.threads;
  block.waiting = 0;
  block.current = NONE;
  memset(block.room.shared, POISON, launch.shared_bytes);
  for (u32 w = 0; w < block.warps; w++) {
    u32 lanes = block.threads - w * WARP < WARP ? block.threads - w * WARP : WARP;
    block.warp[w] = Warp();
    block.warp[w].first = w * WARP;
    block.warp[w].ready = block.warp[w].alive = lanes == WARP ? ~0u : (1u << lanes) - 1;
    block.warp_order[w] = launch.order == DESCENDING ? block.warps - 1 - w : w;
  }
  for (u32 t = 0; t < block.threads; t++) {
    Fibre& fibre = block.room.fibres[t];
    fibre.stack_pointer = fresh_stack(stack_low(block, t) + STACK_BYTES, thread_main);
    fibre.site = {0, nullptr};
    fibre.group = 0;
    fibre.fence = 0;
  }
}

static void run_block(Block& block, u64 number) {
  start_block(block, number);
  run_next(block, &block.launcher_stack_pointer, NONE);
  for (u32 t = 0; t < block.threads; t++) forget_copies(block.room.fibres[t]);
}

static void run_blocks(Block& block) {
  const Launch& launch = *block.launch;
  u64 count = (u64)launch.grid[0] * launch.grid[1] * launch.grid[2];
  std::vector<u64> order(count);
  for (u64 i = 0; i < count; i++) order[i] = launch.order == DESCENDING ? count - 1 - i : i;
  if (launch.order == RANDOM)
    for (u64 i = count; i > 1; i--) std::swap(order[i - 1], order[next_random(block) % i]);
  for (u64 i = 0; i < count && !block.failed; i++) run_block(block, order[i]);
}

// ---- the launch

static bool refuse(Block& block, const char* format, ...) __attribute__((format(printf, 2, 3)));
static bool refuse(Block& block, const char* format, ...) {
  u64 used = 0;
  print(block, used, "kernel %s: ", block.kernel->name);
  va_list list;
  va_start(list, format);
  print_list(block, used, format, list);
  va_end(list);
  return false;
}

static bool check_launch(Block& block) {
  const Launch& launch = *block.launch;
  const Kernel& kernel = *block.kernel;
  if (launch.threads == 0 || launch.threads > kernel.bound || launch.threads > MAX_THREADS)
    return refuse(block, "%u threads in a block, the kernel is bound to %u", launch.threads, kernel.bound);
  if (launch.grid[0] == 0 || launch.grid[1] == 0 || launch.grid[2] == 0 || launch.grid[0] > 0x7fffffffu ||
      launch.grid[1] > 65535 || launch.grid[2] > 65535)
    return refuse(block, "a grid of %u x %u x %u blocks", launch.grid[0], launch.grid[1], launch.grid[2]);
  if (strcmp(launch.kinds, kernel.kinds) != 0)
    return refuse(block,
                  "the launch passes arguments '%s', the parameters are '%s' (p pointer, i int, u u32, l u64, f float)",
                  launch.kinds, kernel.kinds);
  if (launch.shared_bytes > SHARED_ROOM) return refuse(block, "%u bytes of shared memory", launch.shared_bytes);
  return true;
}

int run(const Launch& launch, const Kernel& kernel, char* error, u64 error_size) {
  std::unique_ptr<Block> owner(new Block());
  Block& block = *owner;
  block.launch = &launch;
  block.kernel = &kernel;
  block.error = error;
  block.error_size = error_size;
  block.threads = launch.threads;
  block.warps = (launch.threads + WARP - 1) / WARP;
  block.random = launch.seed;
  if (!check_launch(block)) return 1;
  if (!take_room(block.room) || !open_buffers(block)) {
    refuse(block, "no memory for threads and %llu buffers", launch.buffer_count);
    return 1;
  }
  block.first_epoch = block.room.epoch + 1;
  for (u32 t = 0; t < block.threads; t++) *stack_low(block, t) = POISON;
  running = &block;
  run_blocks(block);
  running = nullptr;
  give_room_back(block.room);
  return block.failed;
}

}  // namespace emulator
