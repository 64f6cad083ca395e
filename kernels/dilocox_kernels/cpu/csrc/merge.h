// Decoding: Σ wₖ · decodedₖ of a tile, in the order of the bodies.
#pragma once

#include "floats.h"
#include "library.h"
#include "scales.h"
#include "tiles.h"

namespace {

// Sixteen bytes that one instruction looks up in a table of sixteen.
typedef uint8_t Bytes __attribute__((vector_size(16)));

// What the fields of a code mean, in integers: value = integer · kUnit, exactly. A field is an index into the table.
struct Int4Table {
  static constexpr float kUnit = 1;
  static constexpr int8_t kIntegers[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
};
struct E2M1Table {
  static constexpr float kUnit = 0.5f;
  static constexpr int8_t kIntegers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
};
struct E3M0Table {
  static constexpr float kUnit = 0.25f;
  static constexpr int8_t kIntegers[16] = {0, 1, 2, 4, 8, 16, 32, 64, 0, -1, -2, -4, -8, -16, -32, -64};
};
struct Bins2Table {  // four entries, repeated: what lies above the two bits of a field does not matter
  static constexpr float kUnit = 0.03125f;
  static constexpr int8_t kIntegers[16] = {32,  107, -32, -107, 32,  107, -32, -107,
                                           32, 107, -32, -107, 32, 107, -32, -107};
};

inline Bytes look_up(Bytes table, Bytes index) { return __builtin_shuffle(table, index & 15); }

inline Bytes interleave_low(Bytes a, Bytes b) {
  return __builtin_shuffle(a, b, Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
}

inline Bytes interleave_high(Bytes a, Bytes b) {
  return __builtin_shuffle(a, b, Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
}

// 32 fields → integers.
template <int kBits>
inline void unpack(const uint8_t* codes, Bytes table, int8_t* integers) {
  Bytes packed = {}, first, last;
  memcpy(&packed, codes, kBits * kChunk / 8);
  if constexpr (kBits == 4) {
    const Bytes even = look_up(table, packed), odd = look_up(table, packed >> 4);
    first = interleave_low(even, odd);
    last = interleave_high(even, odd);
  } else {
    const Bytes even = interleave_low(look_up(table, packed), look_up(table, packed >> 4));
    const Bytes odd = interleave_low(look_up(table, packed >> 2), look_up(table, packed >> 6));
    first = interleave_low(even, odd);
    last = interleave_high(even, odd);
  }
  memcpy(integers, &first, sizeof first);
  memcpy(integers + 16, &last, sizeof last);
}

template <bool kFirst>
inline void add_scaled(const int8_t* __restrict integers, float unit, float scale, float* __restrict sums) {
  for (int i = 0; i < kChunk; ++i) {
    sums[i] = (kFirst ? 0.0f : sums[i]) + float(integers[i]) * unit * scale;
  }
}

// sums += weight · a block body's tile; a first body sets them instead, up to the end of the last block.
template <int kBits, class Table, bool kFirst>
inline void add_tile(const Format& format, const Layout& layout, const uint8_t* body, float weight, const Tile& tile,
                     float* __restrict sums) {
  const int size = format.block_size;
  const int blocks = int((tile.length + size - 1) / size);
  alignas(64) float scales[kMaxBlocks];
  read_scales(format, layout, body, tile, blocks, scales);
  for (int i = 0; i < blocks; ++i) scales[i] *= weight;
  const uint8_t* codes = body + tile.start * kBits / 8;
  Bytes table;
  memcpy(&table, Table::kIntegers, sizeof table);
  for (int block = 0; block < blocks; ++block) {
    for (int i = block * size; i < (block + 1) * size; i += kChunk) {
      if constexpr (kBits == 8) {
        add_scaled<kFirst>(reinterpret_cast<const int8_t*>(codes) + i, 1.0f, scales[block], sums + i);
      } else {
        int8_t integers[kChunk];
        unpack<kBits>(codes + i * kBits / 8, table, integers);
        add_scaled<kFirst>(integers, Table::kUnit, scales[block], sums + i);
      }
    }
  }
}

template <class Element, bool kFirst>
inline void add_cast(const uint8_t* body, float weight, const Tile& tile, float* __restrict sums) {
  const Element* elements = reinterpret_cast<const Element*>(body) + tile.start;
  for (int64_t i = 0; i < tile.length; ++i) {
    sums[i] = (kFirst ? 0.0f : sums[i]) + to_fp32(elements[i]) * weight;
  }
}

template <bool kFirst>
inline void add_body(const Format& format, const Layout& layout, const uint8_t* body, float weight, const Tile& tile,
                     float* sums) {
  switch (format.code) {
    case kInt8: return add_tile<8, Int4Table, kFirst>(format, layout, body, weight, tile, sums);
    case kInt4: return add_tile<4, Int4Table, kFirst>(format, layout, body, weight, tile, sums);
    case kE2M1: return add_tile<4, E2M1Table, kFirst>(format, layout, body, weight, tile, sums);
    case kE3M0: return add_tile<4, E3M0Table, kFirst>(format, layout, body, weight, tile, sums);
    case kBins2: return add_tile<2, Bins2Table, kFirst>(format, layout, body, weight, tile, sums);
    case kCastFp32: return add_cast<float, kFirst>(body, weight, tile, sums);
    case kCastBf16: return add_cast<Bf16, kFirst>(body, weight, tile, sums);
  }
}

// The merge of a tile into `sums`, which has room for a whole tile; gaps hold nothing of meaning.
inline void merge_tile(const Format& format, const Layout& layout, const Bodies& bodies, const Tile& tile, float* sums) {
  add_body<true>(format, layout, bodies.bodies[0], bodies.weights[0], tile, sums);
  for (int64_t k = 1; k < bodies.count; ++k) {
    add_body<false>(format, layout, bodies.bodies[k], bodies.weights[k], tile, sums);
  }
}

}  // namespace
