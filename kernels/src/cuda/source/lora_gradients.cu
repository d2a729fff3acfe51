// One pass over dy for two products of an adapter's backward:
//
//   ds[t, r] = dy[t, n] B[n, r]        dB[n, r] = dy[t, n]^T s[t, r]
//
// Legend
//   dy [t, n], n a multiple of 8; s [t, s_line], of which `columns` are read, a multiple of 16 that is at most RANK:
//   those from r on are zeros; b [n, r]
//   ds_partial [slices, t, columns] f32, slice = blockIdx.x; columns from r on are zeros
//   db_partial [ranges, n, r] f32, range = blockIdx.y
//   rows [t] ROUTED 1: the rows of dy and s that are row 0, 1, .. above, such as those of one expert, read where they
//        lie. ds_partial has them in the order of the list; linear_parts puts their sums where they belong.
//   linear_parts adds both in order. Addresses of dy and s are 16-byte aligned, s_line is a multiple of 8.
// Defines: TYPE (TYPE_*), RANK (16, 32 or 64); ROUTED (absent: 0).
//
// Algorithm: a block owns SLICE columns and `range_rows` rows; each of its 8 warps owns 64 of the columns. B's part lies
// in registers as the right operand of the first product, dB's part as the sums of the second. Tiles of 16 rows of dy
// and s pass through a ring in shared memory; a tile of dy is read from there twice, as it is and transposed. With a
// list, lane i of every warp holds the entry of row i mod 16 of the tile that is fetched next, looked up a tile before.
// Every sum has one order, which follows from the sizes alone. ds: k16 slices of a warp's columns, then warps, then
// slices of blocks; dB: rows of a range (in the order of the list), then ranges; all ascending. Named rows therefore have
// the bits that the same rows have behind each other.
// Bytes: 2 t n + 2 slices t RANK + 4 slices t RANK + 4 ranges n r, and the partial sums once more where they are added:
// for t = 8192, n = 4096, r = 16 in 8 slices and 16 ranges 67 + 2 + 4 + 4 MB, where two products read 134 MB. With rank
// 64 as many bytes as two products move, half of them partial sums, which caches of 40 MB and more hold.
// A list adds 64 bytes to a tile, read by every warp from the cache.
// A tile's work per warp: 8 loads of matrices of dy (with rank 64: 12), RANK / 16 of s, RANK mma.

#ifndef ROUTED
#define ROUTED 0
#endif

typedef Element<TYPE> E;
constexpr int WARPS = 8, THREADS = 32 * WARPS, SLICE = 64 * WARPS, ROWS = 16, STAGES = RANK < 64 ? 4 : 3;
constexpr int DY_BYTES = ROWS * SLICE * 2, S_BYTES = ROWS * RANK * 2, STAGE_BYTES = DY_BYTES + S_BYTES;
constexpr int TILES = RANK / 8;        // n8 columns of the rank
constexpr int PITCH = RANK + 8;        // floats of a row of a warp's sums: rows start at different banks
constexpr int DY_CHUNKS = SLICE / 8, S_CHUNKS = RANK / 8;

DEVICE void gradients(const u16* dy, const u16* s, u64 s_line, const u16* b, int t, int n, int r, int columns,
                      float* ds_partial, float* db_partial, int range_rows, const int* rows) {
  SHARED_MEMORY(memory);
  u32 ring = shared_address(memory);
  float* warp_sums = (float*)(memory + STAGES * STAGE_BYTES);  // [WARPS][ROWS][PITCH]
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  int slice = (int)blockIdx.x * SLICE, column = slice + warp * 64;
  int begin = (int)blockIdx.y * range_rows, end = t - begin < range_rows ? t : begin + range_rows;

  u32 entry = 0;
  auto look_up = [&](int row) { entry = row + (lane & 15) < end ? (u32)rows[row + (lane & 15)] : 0u; };
  // Tiles are fetched in order. Whole warps copy, so that their lanes can tell each other what they looked up.
  auto fetch = [&](int row, int stage) {
    u32 to = ring + stage * STAGE_BYTES;
    auto place = [&](int line) { return ROUTED ? (u64)shuffle(entry, line) : (u64)(row + line); };
    if (row < end) {
      UNROLL for (int i = 0; i < ROWS * DY_CHUNKS / THREADS; i++) {
        int at = i * THREADS + thread, line = at / DY_CHUNKS, chunk = at % DY_CHUNKS;
        bool inside = row + line < end && slice + chunk * 8 < n;
        copy_async_16(to + chunk_offset<DY_CHUNKS>(line, chunk), dy + (place(line) * n + (slice + chunk * 8)), inside);
      }
      if (thread < ROWS * S_CHUNKS) {
        int line = thread / S_CHUNKS, chunk = thread % S_CHUNKS;
        copy_async_16(to + DY_BYTES + chunk_offset<S_CHUNKS>(line, chunk), s + (place(line) * s_line + chunk * 8),
                      row + line < end && chunk * 8 < columns);
      }
      if (ROUTED) look_up(row + ROWS);
    }
    copy_async_commit();
  };

  // Rows 2c, 2c + 1 and 8 further of each k16 slice of B, column 8 j + lane / 4.
  u32 right[4][TILES][2];
  UNROLL for (int e = 0; e < 8 * TILES; e++) {
    int k = e / (2 * TILES), j = e / 2 % TILES, half = e % 2;
    int line = column + k * 16 + half * 8 + (lane & 3) * 2, at = j * 8 + (lane >> 2);
    u32 low = line < n && at < r ? b[(u64)line * r + at] : 0u;
    u32 high = line + 1 < n && at < r ? b[(u64)(line + 1) * r + at] : 0u;
    right[k][j][half] = low | high << 16;
  }
  float sums[4][TILES][4];
  UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int e = 0; e < 4; e++)
    sums[i][j][e] = 0.0f;

  if (ROUTED) look_up(begin);
  UNROLL for (int i = 0; i < STAGES - 1; i++) fetch(begin + i * ROWS, i);
  int stage = 0;
  for (int row = begin; row < end; row += ROWS) {
    // The tile has landed for all threads; nobody reads the stage that is fetched next, nor the sums of the last tile.
    copy_async_wait<STAGES - 2>();
    block_barrier();
    fetch(row + (STAGES - 1) * ROWS, (stage + STAGES - 1) % STAGES);
    u32 tile = ring + stage * STAGE_BYTES;
    stage = (stage + 1) % STAGES;

    // Columns of the rank at once: all of 64 would need more registers than there are.
    constexpr int GROUP = TILES < 4 ? TILES : 4;
    UNROLL for (int first = 0; first < TILES; first += GROUP) {
      float own[GROUP][4];
      UNROLL for (int j = 0; j < GROUP; j++) UNROLL for (int e = 0; e < 4; e++) own[j][e] = 0.0f;
      UNROLL for (int k = 0; k < 4; k++) {
        u32 left[4];
        load_matrix_x4(left, tile + chunk_offset<DY_CHUNKS>(lane & 15, warp * 8 + k * 2 + (lane >> 4)));
        UNROLL for (int j = 0; j < GROUP; j++) E::mma(own[j], left, right[k][first + j][0], right[k][first + j][1]);
      }
      UNROLL for (int j = 0; j < GROUP; j++) UNROLL for (int half = 0; half < 2; half++)
        *(float2*)(warp_sums + (warp * ROWS + half * 8 + (lane >> 2)) * PITCH + (first + j) * 8 + (lane & 3) * 2) =
            make_float2(own[j][2 * half], own[j][2 * half + 1]);
    }

    u32 low_rank[TILES / 2][4];
    UNROLL for (int j = 0; j < TILES / 2; j++)
      load_matrix_x4_transposed(low_rank[j],
                                tile + DY_BYTES + chunk_offset<S_CHUNKS>(lane & 15, j * 2 + (lane >> 4)));
    UNROLL for (int i = 0; i < 4; i++) {
      u32 left[4];
      int line = (lane & 7) + ((lane >> 4) << 3), chunk = warp * 8 + i * 2 + ((lane >> 3) & 1);
      load_matrix_x4_transposed(left, tile + chunk_offset<DY_CHUNKS>(line, chunk));
      UNROLL for (int j = 0; j < TILES; j++)
        E::mma(sums[i][j], left, low_rank[j >> 1][2 * (j & 1)], low_rank[j >> 1][2 * (j & 1) + 1]);
    }

    block_barrier();
    UNROLL for (int i = 0; i < ROWS * RANK / THREADS; i++) {
      int line = (i * THREADS + thread) / RANK, at = (i * THREADS + thread) % RANK;
      float sum = warp_sums[line * PITCH + at];
      UNROLL for (int w = 1; w < WARPS; w++) sum = add_rn(sum, warp_sums[(w * ROWS + line) * PITCH + at]);
      if (row + line < end && at < columns) ds_partial[((u64)blockIdx.x * t + (row + line)) * columns + at] = sum;
    }
  }
  copy_async_wait<0>();

  UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int e = 0; e < 4; e++) {
    int line = column + i * 16 + (e >> 1) * 8 + (lane >> 2), at = j * 8 + (lane & 3) * 2 + (e & 1);
    if (line < n && at < r) db_partial[((u64)blockIdx.y * n + line) * r + at] = sums[i][j][e];
  }
}

#if ROUTED == 0
KERNEL(THREADS, 1)
lora_gradients(const u16* dy, const u16* s, u64 s_line, const u16* b, int t, int n, int r, int columns,
               float* ds_partial, float* db_partial, int range_rows) {
  gradients(dy, s, s_line, b, t, n, r, columns, ds_partial, db_partial, range_rows, nullptr);
}
#else
KERNEL(THREADS, 1)
lora_gradients_routed(const u16* dy, const u16* s, u64 s_line, const u16* b, int t, int n, int r, int columns,
                      float* ds_partial, float* db_partial, int range_rows, const int* rows) {
  gradients(dy, s, s_line, b, t, n, r, columns, ds_partial, db_partial, range_rows, rows);
}
#endif
