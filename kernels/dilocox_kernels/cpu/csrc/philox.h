// Philox4x32-10 (Salmon et al., 2011): a random word is a function of a key, a round and an element's position, so it
// does not depend on who computes it, nor in which order.
#pragma once

#include "simd.h"

namespace {

// Groups of counters that are computed in turn, so that none waits for its own products; as many as there are registers.
constexpr int kGroups = kLanes == 16 ? 4 : 2;
constexpr int kGroupCounters = kLanes / 2;
constexpr int kCounters = kGroups * kGroupCounters;  // four words each

// words[4 i + j] = word j of counter (first + i, round), i < kCounters: one word an element, first = position / 4.
inline void philox(uint64_t key, uint32_t round, uint64_t first, uint32_t* words) {
  L counter[kGroups][4];  // of each lane the low half counts
  for (int group = 0; group < kGroups; ++group) {
    L numbers;
    for (int i = 0; i < kGroupCounters; ++i) numbers[i] = uint64_t(i / 2 + i % 2 * (kGroupCounters / 2));
    numbers += first + uint64_t(group * kGroupCounters);
    counter[group][0] = numbers;
    counter[group][1] = numbers >> 32;
    counter[group][2] = L{} + round;
    counter[group][3] = L{};
  }
  L key0 = L{} + (key & 0xFFFFFFFFu), key1 = L{} + (key >> 32);
#pragma GCC unroll 10
  for (int turn = 0; turn < 10; ++turn) {
#pragma GCC unroll 4
    for (int group = 0; group < kGroups; ++group) {
      L* c = counter[group];
      const L product0 = multiply_low_halves(c[0], L{} + 0xD2511F53u);
      const L product1 = multiply_low_halves(c[2], L{} + 0xCD9E8D57u);
      c[0] = exclusive_or(product1 >> 32, c[1], key0);
      c[1] = product1;
      c[2] = exclusive_or(product0 >> 32, c[3], key1);
      c[3] = product0;
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const L low_half = L{} + 0xFFFFFFFFu;
  for (int group = 0; group < kGroups; ++group) {
    const L* c = counter[group];
    const L front = (c[0] & low_half) | (c[1] << 32), back = (c[2] & low_half) | (c[3] << 32);
    store_as(words + 4 * kGroupCounters * group, even_lanes(front, back));
    store_as(words + 4 * kGroupCounters * group + 2 * kGroupCounters, odd_lanes(front, back));
  }
}

}  // namespace
