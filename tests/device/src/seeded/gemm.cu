// C[m,n] = A[m,k] B[n,k]^T in bf16 with f32 sums: small, and with every kind of synchronisation that kernels use.
// A block computes 64 x 64 of C with 2 x 2 warps; steps of 32 along k pass through STAGES stages of shared memory.
// A stage: 64 rows of A, then 64 rows of B; a row is four 16-byte pieces, permuted against bank conflicts.
// k and n are multiples of 8.

constexpr int STAGES = 3;
constexpr int TILE_BYTES = 64 * 64;
constexpr int STAGE_BYTES = 2 * TILE_BYTES;
// Elements from row to row where a warp gathers its part of C.
constexpr int PITCH = 40;

DEVICE int place(int row, int piece) { return row * 64 + (piece ^ (row >> 1 & 3)) * 16; }

KERNEL(128, 2) gemm(const u16* a, const u16* b, u16* c, int m, int n, int k) {
  SHARED_MEMORY(memory);
  const u32 shared = shared_address(memory);
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int first_row = blockIdx.y * 64, first_column = blockIdx.x * 64;
  const int warp_row = (warp & 1) * 32, warp_column = (warp >> 1) * 32;
  const int steps = divide_up(k, 32);

  auto copy_stage = [&](int step) {
    const u32 stage = shared + step % STAGES * STAGE_BYTES;
    UNROLL for (int i = 0; i < 2; i++) {
      const int row = (thread + i * 128) >> 2, piece = thread & 3, column = step * 32 + piece * 8;
      const int row_a = first_row + row, row_b = first_column + row;
      copy_async_16(stage + place(row, piece), a + (i64)row_a * k + column, row_a < m && column < k);
      copy_async_16(stage + TILE_BYTES + place(row, piece), b + (i64)row_b * k + column, row_b < n && column < k);
    }
  };

  float sums[2][4][4];
  UNROLL for (int i = 0; i < 2; i++)
    UNROLL for (int j = 0; j < 4; j++)
      UNROLL for (int e = 0; e < 4; e++) sums[i][j][e] = 0.0f;

  for (int step = 0; step < STAGES - 1; step++) {
    if (step < steps) copy_stage(step);
    copy_async_commit();
  }
  for (int step = 0; step < steps; step++) {
    copy_async_wait<STAGES - 2>();
    block_barrier();  // this step's stage has landed; the stage before it may be overwritten
    if (step + STAGES - 1 < steps) copy_stage(step + STAGES - 1);
    copy_async_commit();  // also when empty: the wait counts groups
    const u32 stage = shared + step % STAGES * STAGE_BYTES;
    UNROLL for (int half = 0; half < 2; half++) {
      u32 left[2][4], right[2][4];
      UNROLL for (int i = 0; i < 2; i++)
        load_matrix_x4(left[i], stage + place(warp_row + i * 16 + (lane & 15), half * 2 + (lane >> 4)));
      UNROLL for (int j = 0; j < 2; j++)
        load_matrix_x4(right[j], stage + TILE_BYTES + place(warp_column + j * 16 + (lane & 7) + (lane >> 4) * 8,
                                                            half * 2 + (lane >> 3 & 1)));
      UNROLL for (int i = 0; i < 2; i++)
        UNROLL for (int j = 0; j < 4; j++) mma_bf16(sums[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
    }
  }

  block_barrier();  // all stages have been read
  u16* part = (u16*)memory + warp * 32 * PITCH;
  UNROLL for (int i = 0; i < 2; i++)
    UNROLL for (int j = 0; j < 4; j++)
      UNROLL for (int half = 0; half < 2; half++) {
        const int row = i * 16 + half * 8 + lane / 4, column = j * 8 + lane % 4 * 2;
        *(u32*)(part + row * PITCH + column) = bf16x2_of_floats(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
      }
  warp_barrier();  // the warp's part is complete
  UNROLL for (int i = 0; i < 4; i++) {
    const int row = i * 8 + lane / 4, column = lane % 4 * 8;
    const int row_c = first_row + warp_row + row, column_c = first_column + warp_column + column;
    if (row_c < m && column_c < n)
      store_streaming((uint4*)(c + (i64)row_c * n + column_c), *(const uint4*)(part + row * PITCH + column));
  }
}
