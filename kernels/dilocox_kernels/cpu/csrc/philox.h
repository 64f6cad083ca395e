// Philox4x32-10 (Salmon et al., 2011): a random word is a function of a key, a round and an element's position, so it
// does not depend on who computes it, nor in which order.
#pragma once

#include "simd.h"

namespace {

constexpr int kCounters = kLanes / 2;  // computed side by side, four words each

// words[4 i + j] = word j of counter (first + i, round), i < kCounters: one word an element, first = position / 4.
inline void philox(uint64_t key, uint32_t round, uint64_t first, uint32_t* words) {
  const L low_half = L{} + 0xFFFFFFFFu;
  L counter;
  for (int i = 0; i < kCounters; ++i) counter[i] = first + uint64_t(i / 2 + i % 2 * (kCounters / 2));
  L c0 = counter, c1 = counter >> 32, c2 = L{} + round, c3 = {};  // of each lane the low half counts
  L key0 = L{} + (key & 0xFFFFFFFFu), key1 = L{} + (key >> 32);
#pragma GCC unroll 10
  for (int turn = 0; turn < 10; ++turn) {
    const L product0 = multiply_low_halves(c0, L{} + 0xD2511F53u);
    const L product1 = multiply_low_halves(c2, L{} + 0xCD9E8D57u);
    c0 = (product1 >> 32) ^ c1 ^ key0;
    c1 = product1;
    c2 = (product0 >> 32) ^ c3 ^ key1;
    c3 = product0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const L front = (c0 & low_half) | (c1 << 32), back = (c2 & low_half) | (c3 << 32);
  store_as(words, even_lanes(front, back));
  store_as(words + 2 * kCounters, odd_lanes(front, back));
}

}  // namespace
