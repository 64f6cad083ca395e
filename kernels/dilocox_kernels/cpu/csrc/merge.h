// Decoding: Σ wₖ · decodedₖ of a tile, in the order of the bodies.
//
// Chunks of 32 elements are summed over all bodies before the next, so that sums stay in registers. A chunk of fields is
// turned into signed magnitudes in one of two ways: on AVX-512 one instruction looks sixteen fields up in a table that
// the scale has been multiplied into; elsewhere fields are looked up as small integers, which are widened and scaled.
#pragma once

#include "library.h"
#include "scales.h"
#include "simd.h"
#include "tiles.h"

namespace {

constexpr int kMaxBodies = 32;

// What the fields of a code mean: magnitude = integer · kUnit, exactly. A field is an index into the table; of bins the
// two bits above a field do not matter, as its entries are repeated.
template <int32_t kCode>
struct Meaning;

template <>
struct Meaning<kInt8> {
  static constexpr int kBits = 8;
  static constexpr float kUnit = 1;
};

template <>
struct Meaning<kInt4> {
  static constexpr int kBits = 4;
  static constexpr float kUnit = 1;
  static constexpr int8_t kIntegers[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
};

template <>
struct Meaning<kE2M1> {
  static constexpr int kBits = 4;
  static constexpr float kUnit = 0.5f;
  static constexpr int8_t kIntegers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
};

template <>
struct Meaning<kE3M0> {
  static constexpr int kBits = 4;
  static constexpr float kUnit = 0.25f;
  static constexpr int8_t kIntegers[16] = {0, 1, 2, 4, 8, 16, 32, 64, 0, -1, -2, -4, -8, -16, -32, -64};
};

template <>
struct Meaning<kBins2> {
  static constexpr int kBits = 2;
  static constexpr float kUnit = 0.03125f;
  static constexpr int8_t kIntegers[16] = {32, 107, -32, -107, 32, 107, -32, -107,
                                           32, 107, -32, -107, 32, 107, -32, -107};
};

// The magnitudes of a code at a scale.
template <int32_t kCode>
class Decoder {
 public:
  using Code = Meaning<kCode>;

  Decoder() {
    if constexpr (Code::kBits != 8) {
      table_ = load_as<Bytes>(Code::kIntegers);
#if defined(__AVX512F__)
      widen(table_, &magnitudes_);
      magnitudes_ *= Code::kUnit;
#endif
    }
  }

  // sums[0 … 31] += the 32 fields at `codes`, times the scale.
  void add(const uint8_t* codes, float scale, F* sums) const {
#if defined(__AVX512F__)
    if constexpr (Code::kBits != 8) {
      const __m512 table = (__m512)(magnitudes_ * scale);
      for (int i = 0; i < 2; ++i) {
        sums[i] += (F)_mm512_permutexvar_ps(spread(codes + i * 2 * Code::kBits), table);
      }
      return;
    }
#endif
    Bytes halves[2];
    unpack(codes, halves);
    for (int half = 0; half < 2; ++half) {
      F numbers[kParts];
      widen(halves[half], numbers);
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) sums[half * kParts + part] += numbers[part] * Code::kUnit * scale;
    }
  }

 private:
#if defined(__AVX512F__)
  // Sixteen fields in the lowest bits of lanes; what lies above four bits does not matter.
  static __m512i spread(const uint8_t* codes) {
    if constexpr (Code::kBits == 4) {
      const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
      return _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));
    } else {
      const __m512i shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      return _mm512_srlv_epi32(_mm512_set1_epi32(load_as<int32_t>(codes)), shifts);
    }
  }

  F magnitudes_;
#endif

  static Bytes interleave_low(Bytes a, Bytes b) {
    return __builtin_shuffle(a, b, Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
  }

  static Bytes interleave_high(Bytes a, Bytes b) {
    return __builtin_shuffle(a, b, Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
  }

  Bytes look_up(Bytes index) const { return __builtin_shuffle(table_, index & 15); }

  // 32 fields → integers.
  void unpack(const uint8_t* codes, Bytes* halves) const {
    if constexpr (Code::kBits == 8) {
      memcpy(halves, codes, 2 * sizeof(Bytes));
      return;
    }
    Bytes even, odd;
    if constexpr (Code::kBits == 4) {
      const Bytes packed = load_as<Bytes>(codes);
      even = look_up(packed);
      odd = look_up(packed >> 4);
    } else {
      typedef uint64_t Words __attribute__((vector_size(16)));
      const Bytes packed = (Bytes)Words{load_as<uint64_t>(codes), 0};
      even = interleave_low(look_up(packed), look_up(packed >> 4));
      odd = interleave_low(look_up(packed >> 2), look_up(packed >> 6));
    }
    halves[0] = interleave_low(even, odd);
    halves[1] = interleave_high(even, odd);
  }

  Bytes table_;
};

// The scales of a tile's blocks, times the weight, of each body. Those of the next tile are fetched: a stream a body, each
// read once a tile, no processor sees coming.
struct WeightedScales {
  WeightedScales(const Format& format, const Layout& layout, const Bodies& bodies, const Tile& tile, int blocks) {
    const int width = scale_bytes(format);
    const int64_t next = tile.start / format.block_size + blocks;
    for (int64_t k = 0; k < bodies.count; ++k) {
      read_scales(format, layout, bodies.bodies[k], tile, blocks, scales[k]);
      for (int i = 0; i < blocks; ++i) scales[k][i] *= bodies.weights[k];
      fetch<false>(bodies.bodies[k] + layout.scales + width * next, width * blocks);
    }
  }
  alignas(64) float scales[kMaxBodies][kMaxBlocks];
};

template <int32_t kCode, class Fetch>
inline void merge_blocks(const Format& format, const Layout& layout, const Bodies& bodies, const Tile& tile, float* sums,
                         const Fetch& fetch_block) {
  constexpr int kBits = Meaning<kCode>::kBits;
  const int size = format.block_size, islands = int(bodies.count);
  const int blocks = int((tile.length + size - 1) / size);
  const WeightedScales weighted(format, layout, bodies, tile, blocks);
  const Decoder<kCode> decoder;
  constexpr int kLineElements = 64 * 8 / kBits;  // whose codes fill a line
  constexpr int kAheadBytes = 256;               // of codes; a whole tile was slower with eight bodies
  const uint8_t* codes[kMaxBodies];
  for (int k = 0; k < islands; ++k) codes[k] = bodies.bodies[k] + tile.start * kBits / 8;
  for (int block = 0; block < blocks; ++block) {
    fetch_block(block * size, size);
    for (int i = block * size; i < (block + 1) * size; i += kChunk) {
      F chunk[kChunkVectors] = {};
      if (i % kLineElements == 0) {
        for (int k = 0; k < islands; ++k) fetch<false>(codes[k] + i * kBits / 8 + kAheadBytes, 64);
      }
      for (int k = 0; k < islands; ++k) decoder.add(codes[k] + i * kBits / 8, weighted.scales[k][block], chunk);
      for (int part = 0; part < kChunkVectors; ++part) store_as(sums + i + part * kLanes, chunk[part]);
    }
  }
}

template <class Element>
inline void merge_casts(const Bodies& bodies, const Tile& tile, float* __restrict sums) {
  memset(sums, 0, sizeof(float) * tile.length);
  for (int64_t k = 0; k < bodies.count; ++k) {
    const Element* elements = reinterpret_cast<const Element*>(bodies.bodies[k]) + tile.start;
    const float weight = bodies.weights[k];
    for (int64_t i = 0; i < tile.length; ++i) sums[i] += to_fp32(elements[i]) * weight;
  }
}

// The merge of a tile into `sums`, which has room for a whole tile; gaps hold nothing of meaning. Calls
// fetch_block(offset, length) along the way, to have what is needed next brought near.
template <class Fetch>
inline void merge_tile(const Format& format, const Layout& layout, const Bodies& bodies, const Tile& tile, float* sums,
                       const Fetch& fetch_block) {
  switch (format.code) {
    case kInt8: return merge_blocks<kInt8>(format, layout, bodies, tile, sums, fetch_block);
    case kInt4: return merge_blocks<kInt4>(format, layout, bodies, tile, sums, fetch_block);
    case kE2M1: return merge_blocks<kE2M1>(format, layout, bodies, tile, sums, fetch_block);
    case kE3M0: return merge_blocks<kE3M0>(format, layout, bodies, tile, sums, fetch_block);
    case kBins2: return merge_blocks<kBins2>(format, layout, bodies, tile, sums, fetch_block);
    case kCastFp32: return merge_casts<float>(bodies, tile, sums);
    case kCastBf16: return merge_casts<Bf16>(bodies, tile, sums);
  }
}

}  // namespace
