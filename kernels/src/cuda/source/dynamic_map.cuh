// The dynamic maps of kernels::dynamic_map, computed bit for bit, in front of the families that decode 8-bit codes.
//
// In each of seven decades k cells of equal width divide 0.1 .. 1, and a value is the middle of a cell times the decade's
// unit. k is 1 in the smallest decade of a sign of the signed map, 2 in that of the unsigned map, and doubles.

// Border i of k cells of 0.1 .. 1, from the nearer end, as torch.linspace computes it.
DEVICE float cell_border(int i, int k) {
  float step = div_rn(sub_rn(1.0f, 0.1f), (float)k);
  return i < (k + 1) / 2 ? fma_rn(step, (float)i, 0.1f) : fma_rn(-step, (float)(k - i), 1.0f);
}

// Middle of cell `at`, counted from 1 over all decades of a map whose smallest decade has 2^first cells.
DEVICE float cell_middle(int at, int first) {
  int e = 0;
  while ((2 << e) <= at) e++;
  int k = 1 << e, j = at - k;
  e -= first;
  float unit = e == 0 ? 1e-6f : e == 1 ? 1e-5f : e == 2 ? 1e-4f : e == 3 ? 1e-3f : e == 4 ? 1e-2f : e == 5 ? 1e-1f : 1.0f;
  return mul_rn(mul_rn(add_rn(cell_border(j, k), cell_border(j + 1, k)), 0.5f), unit);
}

// Value of a code of the signed map: 127 is 0, 255 is 1.
DEVICE float signed_value(int code) {
  if (code == 127) return 0.0f;
  if (code == 255) return 1.0f;
  return code > 127 ? cell_middle(code - 127, 0) : -cell_middle(127 - code, 0);
}

// Value of a code of the unsigned map: 0 is 0, 255 is 1.
DEVICE float unsigned_value(int code) {
  if (code == 0) return 0.0f;
  return code == 255 ? 1.0f : cell_middle(code + 1, 1);
}
