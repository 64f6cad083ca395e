// Philox4x32-10 (Salmon et al., 2011): a random word is a function of a key, a round and an element's position, so it
// does not depend on who computes it, nor in which order.
#pragma once

#include <cstdint>

namespace {

constexpr int kPhiloxLanes = 16;  // counters that are computed side by side, four words each

// words[4 i + j] = word j of counter (first + i, round), i < kPhiloxLanes: one word an element, `first` = position / 4.
inline void philox(uint64_t key, uint32_t round, uint64_t first, uint32_t* __restrict words) {
  for (int i = 0; i < kPhiloxLanes; ++i) {
    const uint64_t counter = first + uint64_t(i);
    uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = round, c3 = 0;
    uint32_t key0 = uint32_t(key), key1 = uint32_t(key >> 32);
#pragma GCC unroll 10
    for (int turn = 0; turn < 10; ++turn) {
      const uint64_t product0 = uint64_t(c0) * 0xD2511F53u;
      const uint64_t product1 = uint64_t(c2) * 0xCD9E8D57u;
      c0 = uint32_t(product1 >> 32) ^ c1 ^ key0;
      c1 = uint32_t(product1);
      c2 = uint32_t(product0 >> 32) ^ c3 ^ key1;
      c3 = uint32_t(product0);
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    words[4 * i + 0] = c0;
    words[4 * i + 1] = c1;
    words[4 * i + 2] = c2;
    words[4 * i + 3] = c3;
  }
}

}  // namespace
