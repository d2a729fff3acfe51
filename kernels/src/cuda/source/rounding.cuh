// Stochastic rounding to bf16 with the random bits of optim::rounding, in front of the families that round so.
//
// Element i of a run draws from a stream at a time (an update, or an addition): elements 2k and 2k + 1 share three words
// hashed from k; the low and high half of a word round one number each. 2^32 pairs (a page) share a key, the Philox block
// at counter (page, time).

struct Rounding {
  // Of the stream, and the time, low word first.
  u32 key[2], time[2];
  // Of the page that was seen last.
  u64 page;
  u32 page_key[4];
};

// Makes the key of a page: the Philox4x32-10 block at counter (page, time).
DEVICE void turn_to(Rounding& r, u64 page) {
  u32 c0 = (u32)page, c1 = (u32)(page >> 32), c2 = r.time[0], c3 = r.time[1];
  u32 k0 = r.key[0], k1 = r.key[1];
  UNROLL for (int round = 0; round < 10; round++) {
    u64 left = (u64)0xD2511F53u * c0, right = (u64)0xCD9E8D57u * c2;
    c0 = (u32)(right >> 32) ^ c1 ^ k0;
    c1 = (u32)right;
    c2 = (u32)(left >> 32) ^ c3 ^ k1;
    c3 = (u32)left;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  r.page = page;
  r.page_key[0] = c0, r.page_key[1] = c1, r.page_key[2] = c2, r.page_key[3] = c3;
}

// optim::rounding: the words of a pair of the page at hand.
DEVICE void hash(const Rounding& r, u32 pair, u32 (&words)[3]) {
  u32 x = pair + r.page_key[0];
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  x ^= x >> 16;
  u32 a = (x + r.page_key[1]) * 0x9E3779B1u;
  u32 b = (x + r.page_key[2]) * 0x85EBCA6Bu;
  u32 d = (x + r.page_key[3]) * 0xC2B2AE35u;
  words[0] = a ^ a >> 17, words[1] = b ^ b >> 17, words[2] = d ^ d >> 17;
}

// optim::rng::stochastic_round_bf16.
DEVICE u16 stochastic_round(float x, u32 random16) {
  u32 bits = bits_of_float(x), magnitude = bits & 0x7fffffffu;
  u32 rounded = (magnitude + random16) >> 16;
  rounded = rounded < 0x7f7fu ? rounded : 0x7f7fu;
  u32 stochastic = (bits >> 16 & 0x8000u) | rounded;
  return magnitude < 0x7f800000u ? (u16)stochastic : bf16_of_float(x);
}

// The same for two numbers below 2^127 in magnitude: the carry stays below the sign.
DEVICE u32 stochastic_round_pair(float low, float high, u32 random) {
  u32 l = bits_of_float(low) + (random & 0xffffu), h = bits_of_float(high) + (random >> 16);
  return l >> 16 | (h & 0xffff0000u);
}
