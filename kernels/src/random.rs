//! Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Random function Philox4x32-10: 128 random bits for a 128-bit counter and a 64-bit key. Equal arguments give equal
/// bits.
#[must_use]
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let lanes = philox4x32_lanes(counter.map(|word| [word]), key);
    lanes.map(|[word]| word)
}

/// Philox4x32-10 for `L` counters at once with one key, as [`philox4x32`] for each. Word `w` of number `l` is
/// at `[w][l]`, in counters and results. The loops run over `l`, so they vectorize.
#[inline(always)]
#[must_use]
pub fn philox4x32_lanes<const L: usize>(
    mut counter: [[u32; L]; 4],
    mut key: [u32; 2],
) -> [[u32; L]; 4] {
    for _ in 0..ROUNDS {
        for l in 0..L {
            let left = u64::from(MULTIPLIERS[0]) * u64::from(counter[0][l]);
            let right = u64::from(MULTIPLIERS[1]) * u64::from(counter[2][l]);
            counter[0][l] = (right >> 32) as u32 ^ counter[1][l] ^ key[0];
            counter[1][l] = right as u32;
            counter[2][l] = (left >> 32) as u32 ^ counter[3][l] ^ key[1];
            counter[3][l] = left as u32;
        }
        key = [
            key[0].wrapping_add(KEY_STEPS[0]),
            key[1].wrapping_add(KEY_STEPS[1]),
        ];
    }
    counter
}
