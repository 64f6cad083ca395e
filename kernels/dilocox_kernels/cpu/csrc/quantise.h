// Codes: the magnitude that a ratio |v| / scale is rounded to, and its bits. Everything is free of branches.
//
// A code has kBits, kTop (the largest magnitude), and
//   nearest(ratio)         the magnitude that is nearest, ties to the even index
//   bracket(ratio, gap)    the magnitude at or below the ratio; `gap` is how far the next one is
//   field(magnitude, v)    its bits, with the sign of v
// for ratios in [0, kTop]. A gap above kTop does no harm: what it leads to is cut back to kTop.
#pragma once

#include "floats.h"
#include "library.h"
#include "philox.h"
#include "scales.h"

namespace {

template <int kBits_, int kTop_>
struct Integer {
  static constexpr int kBits = kBits_;
  static constexpr float kTop = kTop_;
  static constexpr bool kAbsmax = true;

  static float nearest(float ratio) { return round_half_even(ratio); }

  static float bracket(float ratio, float& gap) {
    gap = 1;
    return float(int32_t(ratio));
  }

  // The low bits of a number after the rounding magic are those of its two's complement.
  static uint8_t field(float magnitude, float v) {
    const uint32_t bits = bits_of(with_sign_of(magnitude, v) + kRoundingMagic);
    return uint8_t(bits & ((1u << kBits) - 1));
  }
};

using Int8 = Integer<8, 127>;
using Int4 = Integer<4, 7>;

inline uint8_t sign_bit(float v, int position) { return uint8_t(bits_of(v) >> 31 << position); }

// 0 .5 1 1.5 2 3 4 6: one mantissa bit from 1 on, steps of a half below.
struct E2M1 {
  static constexpr int kBits = 4;
  static constexpr float kTop = 6;
  static constexpr bool kAbsmax = true;

  static float step(float ratio) {  // half the power of two at or below the ratio, and at least a half
    return from_bits(bits_of(larger(ratio, 1.0f)) & kInfinityBits) * 0.5f;
  }

  static float nearest(float ratio) {
    const float magic = step(ratio) * kRoundingMagic;
    return (ratio + magic) - magic;
  }

  static float bracket(float ratio, float& gap) {
    gap = step(ratio);
    const float from_one_on = from_bits(bits_of(ratio) & 0xFFC00000);
    return ratio >= 1.0f ? from_one_on : ratio >= 0.5f ? 0.5f : 0.0f;
  }

  static uint8_t field(float magnitude, float v) {
    const int32_t from_one_on = int32_t(bits_of(magnitude) >> 22) - 252;  // 1 → 2, 1.5 → 3, 2 → 4 …
    const int32_t index = magnitude < 1.0f ? int32_t(magnitude * 2) : from_one_on;
    return uint8_t(index) | sign_bit(v, 3);
  }
};

// 0 .25 .5 1 2 4 8 16: powers of two.
struct E3M0 {
  static constexpr int kBits = 4;
  static constexpr float kTop = 16;
  static constexpr bool kAbsmax = true;

  // Rounded to an even exponent where it lies in the middle: index and exponent are even together.
  static float nearest(float ratio) {
    const uint32_t bits = bits_of(ratio);
    const uint32_t rounded = (bits + 0x3FFFFF + ((bits >> 23) & 1)) & kInfinityBits;
    return ratio <= 0.125f ? 0.0f : larger(from_bits(rounded), 0.25f);
  }

  static float bracket(float ratio, float& gap) {
    const float power = from_bits(bits_of(ratio) & kInfinityBits);
    gap = larger(power, 0.25f);
    return ratio < 0.25f ? 0.0f : power;
  }

  static uint8_t field(float magnitude, float v) {
    const int32_t index = int32_t(bits_of(magnitude) >> 23) - 124;
    return uint8_t(index > 0 ? index : 0) | sign_bit(v, 3);
  }
};

// 1 and 3.34375. No zero: between the two smallest values the sign is what is random.
struct Bins2 {
  static constexpr int kBits = 2;
  static constexpr float kTop = 3.34375f;
  static constexpr bool kAbsmax = false;

  static uint8_t field(float magnitude, float v) { return uint8_t(magnitude > 1.0f) | sign_bit(v, 1); }
};

// What v becomes at a scale, as a multiple of the scale; `random` is a word, unused for rounding to nearest.
template <class Code, bool kStochastic>
inline float round_to_code(float v, float scale, uint32_t random) {
  const float ratio = magnitude(v) / scale;
  const float uniform = kStochastic ? float(int32_t(random >> 8)) * 0x1p-24f : 0.0f;
  if constexpr (Code::kAbsmax) {
    const float inside = smaller(ratio, Code::kTop);
    if constexpr (!kStochastic) return with_sign_of(Code::nearest(inside), v);
    float gap;
    const float below = Code::bracket(inside, gap);
    const float rounded = below + (uniform * gap < inside - below ? gap : 0.0f);
    return with_sign_of(smaller(rounded, Code::kTop), v);
  } else {
    if constexpr (!kStochastic) return with_sign_of(ratio > 2.171875f ? 3.34375f : 1.0f, v);
    const float outer = with_sign_of(uniform * 2.34375f < ratio - 1.0f ? 3.34375f : 1.0f, v);
    const float inner = uniform * 2.0f < with_sign_of(ratio, v) + 1.0f ? 1.0f : -1.0f;
    return ratio < 1.0f ? inner : outer;
  }
}

// Fields of one byte each → packed, the first element in the lowest bits; `count` is a multiple of 32.
template <int kBits>
inline void pack(const uint8_t* __restrict fields, int count, uint8_t* __restrict out) {
  if constexpr (kBits == 8) {
    memcpy(out, fields, count);
  } else if constexpr (kBits == 4) {
    for (int i = 0; i < count / 2; ++i) {
      uint16_t pair;
      memcpy(&pair, fields + 2 * i, sizeof pair);
      out[i] = uint8_t(pair | pair >> 4);
    }
  } else {
    for (int i = 0; i < count / 4; ++i) {
      uint32_t four;
      memcpy(&four, fields + 4 * i, sizeof four);
      out[i] = uint8_t(four | four >> 6 | four >> 12 | four >> 18);
    }
  }
}

// Encodes a block at its scale, and turns `v` into what was not sent.
template <class Code, bool kStochastic>
inline void quantise_block(float* __restrict v, float scale, const uint32_t* __restrict random, int size,
                           uint8_t* __restrict out) {
  if (scale == 0) {  // codes are zero, and all of v is kept
    memset(out, 0, size * Code::kBits / 8);
    return;
  }
  for (int chunk = 0; chunk < size; chunk += kChunk) {
    uint8_t fields[kChunk];
    for (int i = 0; i < kChunk; ++i) {
      const float value = v[chunk + i];
      const float rounded = round_to_code<Code, kStochastic>(value, scale, kStochastic ? random[chunk + i] : 0);
      fields[i] = Code::field(magnitude(rounded), rounded);
      v[chunk + i] = value - rounded * scale;
    }
    pack<Code::kBits>(fields, kChunk, out + chunk * Code::kBits / 8);
  }
}

// The bits of the largest magnitude of each block, and of them all.
inline uint32_t largest_of_blocks(const float* __restrict v, int blocks, int size, uint32_t* __restrict largest) {
  uint32_t of_all = 0;
  for (int block = 0; block < blocks; ++block) {
    int32_t lanes[kChunk / 2] = {};
    for (int chunk = 0; chunk < size; chunk += kChunk / 2) {
      for (int i = 0; i < kChunk / 2; ++i) {
        const int32_t bits = int32_t(bits_of(v[block * size + chunk + i]) & kAbsMask);
        lanes[i] = larger(bits, lanes[i]);
      }
    }
    int32_t top = 0;
    for (int i = 0; i < kChunk / 2; ++i) top = larger(top, lanes[i]);
    largest[block] = uint32_t(top);
    of_all = larger(of_all, largest[block]);
  }
  return of_all;
}

// Σ t² of a block, t = |v| in 1/2047ths of the largest, rounded: an integer, so that its order does not matter.
inline int32_t sum_of_square_steps(const float* __restrict v, int size, float largest) {
  const float divisor = largest == 0 ? 1.0f : largest;
  int32_t sum = 0;
  for (int i = 0; i < size; ++i) {
    const int32_t step = int32_t(round_half_even(magnitude(v[i]) / divisor * 2047.0f));
    sum += step * step;
  }
  return sum;
}

// The scales that blocks want. `counts`: elements of each block that lie in spans; read by bins only.
template <class Code>
inline void wanted_scales(const Format& format, const float* v, int blocks, const uint32_t* largest,
                          const int32_t* counts, float* __restrict wanted) {
  if constexpr (Code::kAbsmax) {
    for (int i = 0; i < blocks; ++i) wanted[i] = smaller(from_bits(largest[i]) / Code::kTop, format.max_scale);
  } else {
    int32_t sums[kMaxBlocks];
    for (int i = 0; i < blocks; ++i) {
      sums[i] = sum_of_square_steps(v + i * format.block_size, format.block_size, from_bits(largest[i]));
    }
    for (int i = 0; i < blocks; ++i) {
      const float root = __builtin_sqrtf(float(sums[i]) / float(larger(counts[i], 1)));
      wanted[i] = smaller(root * float(0.4528 / 2047) * from_bits(largest[i]), format.max_scale);
    }
  }
}

// Encodes a tile of v, whole blocks, into its place in a body, and turns `v` into what was not sent. Returns the bits
// of the largest |v|.
template <class Code, bool kStochastic>
inline uint32_t quantise_tile(const EncodeJob& job, const Tile& tile, const int32_t* counts, float* v) {
  const Format& format = job.format;
  const int size = format.block_size;
  const int blocks = int((tile.length + size - 1) / size);
  const Layout layout(format, job.spans.numel);
  uint32_t largest[kMaxBlocks];
  alignas(64) float scales[kMaxBlocks];
  const uint32_t of_all = largest_of_blocks(v, blocks, size, largest);
  wanted_scales<Code>(format, v, blocks, largest, counts, scales);
  write_scales<Code::kAbsmax>(format, layout, job.out, tile, blocks, scales);
  read_scales(format, layout, job.out, tile, blocks, scales);
  uint8_t* codes = job.out + tile.start * Code::kBits / 8;
  constexpr int kBatch = 256;  // elements whose random words are made at once: whole blocks of any size
  alignas(64) uint32_t random[kBatch];
  for (int block = 0; block < blocks; ++block) {
    const int offset = block * size;
    if constexpr (kStochastic) {
      if (offset % kBatch == 0) {
        const uint64_t first = uint64_t(job.start + tile.start + offset) / 4;
        for (int i = 0; i < kBatch / 4; i += kPhiloxLanes) philox(job.key, job.round, first + i, random + 4 * i);
        for (int64_t i = tile.length - offset; i < kBatch; ++i) random[i] = 0;  // what fills up the last block
      }
    }
    quantise_block<Code, kStochastic>(v + offset, scales[block], random + offset % kBatch, size,
                                      codes + offset * Code::kBits / 8);
  }
  return of_all;
}

}  // namespace
