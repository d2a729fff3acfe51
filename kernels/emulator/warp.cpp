// Collectives of a warp: lanes leave their operands and wait; the last one computes for all.

namespace emulator {

static Fibre& lane_of(Warp& warp, u32 lane) { return running->room.fibres[warp.first + lane]; }

static void meet(const char* operation, Collective collective, Site site, Operands operands) {
  Block& block = *running;
  Warp& warp = current_warp();
  Fibre& fibre = current_fibre();
  fibre.site = site;
  fibre.operands = operands;
  if (warp.at_warp == 0) {
    warp.operation = operation;
    warp.collective = collective;
    warp.site = site;
  } else if (warp.operation != operation || !same(warp.site, site)) {
    fail(site, "calls %s while other lanes of its warp wait at %s, %s:%d", operation, warp.operation,
         file_name(warp.site.file), warp.site.line);
  }
  u32 bit = 1u << block.current % WARP;
  warp.at_warp |= bit;
  warp.ready &= ~bit;
  if (warp.at_warp == ~0u) {
    warp.collective(warp);
    warp.ready = warp.at_warp;
    warp.at_warp = 0;
  }
  wait();
}

static void finish_barrier(Warp& warp) { warp.barriers++; }
void warp_barrier(Site site) { meet("warp_barrier", finish_barrier, site, {}); }

static void finish_shuffle(Warp& warp) {
  u64 values[WARP];
  for (u32 lane = 0; lane < WARP; lane++) values[lane] = lane_of(warp, lane).operands.value;
  for (u32 lane = 0; lane < WARP; lane++) {
    Operands& operands = lane_of(warp, lane).operands;
    operands.value = values[operands.lane % WARP];
  }
}
static u64 exchange(u64 bits, u32 lane, const char* operation, Site site) {
  Operands operands = {};
  operands.value = bits;
  operands.lane = lane;
  meet(operation, finish_shuffle, site, operands);
  return current_fibre().operands.value;
}
u64 shuffle(u64 bits, u32 lane, Site site) { return exchange(bits, lane, "shuffle", site); }
u64 shuffle_xor(u64 bits, u32 mask, Site site) {
  return exchange(bits, running->current % WARP ^ mask, "shuffle_xor", site);
}

static void finish_ballot(Warp& warp) {
  u64 all = 0;
  for (u32 lane = 0; lane < WARP; lane++) all |= lane_of(warp, lane).operands.value << lane;
  for (u32 lane = 0; lane < WARP; lane++) lane_of(warp, lane).operands.value = all;
}
u32 warp_ballot(bool bit, Site site) {
  Operands operands = {};
  operands.value = bit;
  meet("a vote", finish_ballot, site, operands);
  return (u32)current_fibre().operands.value;
}

// ---- matrices

template <u32 COUNT, bool TRANSPOSED>
static void finish_load(Warp& warp) {
  Block& block = *running;
  for (u32 m = 0; m < COUNT; m++) {
    u16 matrix[8][8];
    for (u32 row = 0; row < 8; row++) {
      Fibre& giver = lane_of(warp, 8 * m + row);
      warp_reads_row(giver.operands.lane, warp.operation, giver.site);
      memcpy(matrix[row], block.room.shared + giver.operands.lane, 16);
    }
    for (u32 lane = 0; lane < WARP; lane++) {
      u32 row = lane / 4, column = lane % 4 * 2;
      u16 low = TRANSPOSED ? matrix[column][row] : matrix[row][column];
      u16 high = TRANSPOSED ? matrix[column + 1][row] : matrix[row][column + 1];
      ((u32*)lane_of(warp, lane).operands.out)[m] = low | (u32)high << 16;
    }
  }
}
void load_matrices(u32* r, u32 count, u32 address, bool transposed, Site site) {
  static const Collective finish[2][2] = {{finish_load<2, false>, finish_load<2, true>},
                                          {finish_load<4, false>, finish_load<4, true>}};
  static const char* const names[2][2] = {{"load_matrix_x2", "load_matrix_x2_transposed"},
                                          {"load_matrix_x4", "load_matrix_x4_transposed"}};
  Operands operands = {};
  operands.out = r;
  operands.lane = shared_offset(address, 16, names[count == 4][transposed], site);
  meet(names[count == 4][transposed], finish[count == 4][transposed], site, operands);
}

static float bf16_value(u32 x) {
  x <<= 16;
  float y;
  memcpy(&y, &x, 4);
  return y;
}
static float f16_value(u32 x) {
  // As float_of_f16 of primitives.h, without branches.
  u32 magnitude = (x & 0x7fffu) << 13, sign = (x & 0x8000u) << 16, scale_bits = 0x77800000u, bits;
  float value, scale;
  memcpy(&value, &magnitude, 4);
  memcpy(&scale, &scale_bits, 4);
  value *= scale;
  memcpy(&bits, &value, 4);
  bits |= sign | (magnitude >= 0x0f800000u ? 0x7f800000u : 0u);
  memcpy(&value, &bits, 4);
  return value;
}

typedef float Four __attribute__((vector_size(16)));

// Products of 16-bit floats are exact in f32; the sum runs over k in order, starting from D.
template <float (*VALUE)(u32), u32 K>
static void finish_mma(Warp& warp) {
  float a[16][K];
  alignas(16) float b[K][8];
  for (u32 lane = 0; lane < WARP; lane++) {
    const Operands& operands = lane_of(warp, lane).operands;
    u32 row = lane / 4, column = lane % 4 * 2;
    for (u32 i = 0; i < K / 4; i++)
      for (u32 e = 0; e < 2; e++)
        a[row + i % 2 * 8][column + i / 2 * 8 + e] = VALUE(operands.a[i] >> 16 * e & 0xffffu);
    for (u32 i = 0; i < K / 8; i++)
      for (u32 e = 0; e < 2; e++) b[column + i * 8 + e][row] = VALUE(operands.b[i] >> 16 * e & 0xffffu);
  }
  for (u32 row = 0; row < 16; row++) {
    alignas(16) float d[8];
    for (u32 c = 0; c < 4; c++) memcpy(d + 2 * c, (float*)lane_of(warp, row % 8 * 4 + c).operands.out + row / 8 * 2, 8);
    Four low = *(Four*)d, high = *(Four*)(d + 4);
    for (u32 k = 0; k < K; k++) {
      low += a[row][k] * *(const Four*)b[k];
      high += a[row][k] * *(const Four*)(b[k] + 4);
    }
    *(Four*)d = low;
    *(Four*)(d + 4) = high;
    for (u32 c = 0; c < 4; c++) memcpy((float*)lane_of(warp, row % 8 * 4 + c).operands.out + row / 8 * 2, d + 2 * c, 8);
  }
}
void mma(float* d, const u32* a, const u32* b, bool f16, u32 k, Site site) {
  static const Collective finish[2][2] = {{finish_mma<bf16_value, 8>, finish_mma<bf16_value, 16>},
                                          {finish_mma<f16_value, 8>, finish_mma<f16_value, 16>}};
  static const char* const names[2][2] = {{"mma_bf16_k8", "mma_bf16"}, {"mma_f16_k8", "mma_f16"}};
  Operands operands = {};
  operands.a = a;
  operands.b = b;
  operands.out = d;
  meet(names[f16][k == 16], finish[f16][k == 16], site, operands);
}

}  // namespace emulator
