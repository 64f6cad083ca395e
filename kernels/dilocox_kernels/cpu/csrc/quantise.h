// Codes: the magnitude that a ratio |v| / scale is rounded to, and its bits.
//
// A code has kBits, kTop (the largest magnitude), kAbsmax (the scale puts the largest |v| of a block on it) and
// kSignedZero (a zero keeps the sign of what it was rounded from).
// Those of signs and magnitudes have
//   nearest(ratio, index)        the magnitude that is nearest, ties to the even index
//   bracket(ratio, gap, index)   the magnitude at or below the ratio; `gap` is how far the next one is
// for ratios in [0, kTop], both with the index of what they return. Integers are rounded to nearest with
// their signs.
#pragma once

#include "library.h"
#include "simd.h"

namespace {

template <int kBits_, int kTop_>
struct Integer {
  static constexpr int kBits = kBits_;
  static constexpr float kTop = kTop_;
  static constexpr bool kAbsmax = true;
  static constexpr bool kSignedZero = false;
};

using Int8 = Integer<8, 127>;
using Int4 = Integer<4, 7>;

// 0 .5 1 1.5 2 3 4 6: one mantissa bit from 1 on, steps of a half below.
struct E2M1 {
  static constexpr int kBits = 4;
  static constexpr float kTop = 6;
  static constexpr bool kAbsmax = true;
  static constexpr bool kSignedZero = true;

  // The power of two at or below the ratio, and at least 1: steps are half as long.
  static F power(F ratio) { return (F)((U)larger(ratio, everywhere(1)) & kInfinityBits); }

  // Of `steps` from zero, which may be the lowest bits of a larger number; a step is of half the power.
  static U index(U steps, F power) { return (steps + ((U)power >> 22) - 254) & 7; }

  static F nearest(F ratio, U& at) {
    const F base = power(ratio), magic = base * (0.5f * kRoundingMagic);
    const F shifted = ratio + magic;
    at = index((U)shifted, base);
    return shifted - magic;
  }

  static F bracket(F ratio, F& gap, U& at) {
    const F base = power(ratio), per_step = (F)(0x7F800000 - (U)base);
    gap = base * 0.5f;
    const F steps = round_down(ratio * per_step);
    at = index((U)(steps + kRoundingMagic), base);
    return steps * gap;
  }
};

// 0 .25 .5 1 2 4 8 16: powers of two.
struct E3M0 {
  static constexpr int kBits = 4;
  static constexpr float kTop = 16;
  static constexpr bool kAbsmax = true;
  static constexpr bool kSignedZero = true;

  static U index(F magnitude) { return (U)larger(((I)magnitude >> 23) - 124, I{}); }

  // To an even exponent where it lies in the middle: index and exponent are even together.
  static F nearest(F ratio, U& at) {
    const U bits = (U)ratio;
    const F rounded = (F)((bits + 0x3FFFFF + ((bits >> 23) & 1)) & kInfinityBits);
    const F nearest = ratio <= 0.125f ? F{} : larger(rounded, everywhere(0.25f));
    at = index(nearest);
    return nearest;
  }

  static F bracket(F ratio, F& gap, U& at) {
    const F power = (F)((U)ratio & kInfinityBits);
    gap = larger(power, everywhere(0.25f));
    at = index(power);
    return ratio < 0.25f ? F{} : power;
  }
};

// 1 and 3.34375. No zero: between the two smallest values the sign is what is random.
struct Bins2 {
  static constexpr int kBits = 2;
  static constexpr float kTop = 3.34375f;
  static constexpr bool kAbsmax = false;
  static constexpr bool kSignedZero = true;
};

// Up with the probability that keeps the mean.
inline F round_up_or_down(F ratio, F below, F gap, F uniform, I& up) {
  up = uniform * gap < ratio - below;
  return up ? below + gap : below;
}

// What v becomes at a scale, as a multiple of the scale; `uniform` in [0, 1) is used by stochastic rounding only.
template <bool kStochastic, int kBits, int kTop>
inline F round_to(Integer<kBits, kTop>, F v, F scale, F uniform, U& field) {
  const F top = everywhere(float(kTop));
  F rounded;
  if constexpr (kStochastic) {
    const F ratio = smaller(magnitude(v) / scale, top);
    I up;
    rounded = with_sign_of(round_up_or_down(ratio, round_down(ratio), everywhere(1), uniform, up), v);
  } else {
    rounded = smaller(larger(v / scale, -top), top);
  }
  const F shifted = rounded + kRoundingMagic;  // its low bits are those of the two's complement
  field = (U)shifted & ((1u << kBits) - 1);
  return kStochastic ? rounded : shifted - kRoundingMagic;
}

template <bool kStochastic, class Code>
inline F round_to(Code, F v, F scale, F uniform, U& field) {
  const F ratio = smaller(magnitude(v) / scale, everywhere(Code::kTop));
  F rounded;
  if constexpr (kStochastic) {
    F gap;
    I up;
    const F below = Code::bracket(ratio, gap, field);
    rounded = round_up_or_down(ratio, below, gap, uniform, up);
    field -= (U)up;
  } else {
    rounded = Code::nearest(ratio, field);
  }
  field |= (U)v >> 28 & 8;
  return with_sign_of(rounded, v);
}

template <bool kStochastic>
inline F round_to(Bins2, F v, F scale, F uniform, U& field) {
  const F ratio = magnitude(v) / scale;
  F rounded;
  if constexpr (kStochastic) {
    const F outer = with_sign_of(uniform * 2.34375f < ratio - 1 ? everywhere(Bins2::kTop) : everywhere(1), v);
    const F inner = uniform * 2 < with_sign_of(ratio, v) + 1 ? everywhere(1) : everywhere(-1);
    rounded = ratio < 1.0f ? inner : outer;
  } else {
    rounded = with_sign_of(ratio > 2.171875f ? everywhere(Bins2::kTop) : everywhere(1), v);
  }
  field = (U)(magnitude(rounded) > 1.0f ? I{} + 1 : I{}) | ((U)rounded >> 30 & 2);
  return rounded;
}

// Of random words.
inline F uniform(const uint32_t* words) { return __builtin_convertvector((I)(load_as<U>(words) >> 8), F) * 0x1p-24f; }

// Sixteen fields → 2 · kBits bytes, the first field in the lowest bits.
template <int kBits>
inline void pack(const U* fields, uint8_t* out) {
  typedef uint16_t Pairs __attribute__((vector_size(16)));
  typedef uint32_t Fours __attribute__((vector_size(16)));
#if defined(__AVX512F__)
  if constexpr (kBits == 4) {
    const L pairs = (L)fields[0] | (L)fields[0] >> 28;
    return _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm512_cvtepi64_epi8((__m512i)pairs));
  }
#endif
  Bytes bytes = narrow_to_bytes(fields);
  if constexpr (kBits == 4) {
    bytes |= (Bytes)((Pairs)bytes >> 4);
    bytes = __builtin_shuffle(bytes, Bytes{0, 2, 4, 6, 8, 10, 12, 14});
  } else if constexpr (kBits == 2) {
    const Fours fours = (Fours)bytes;
    bytes |= (Bytes)(fours >> 6 | fours >> 12 | fours >> 18);
    bytes = __builtin_shuffle(bytes, Bytes{0, 4, 8, 12});
  }
  memcpy(out, &bytes, 2 * kBits);
}

// Σ t² of a block, t = |v| in 1/2047ths of the largest, rounded: an integer, so that its order does not matter.
inline int32_t sum_of_square_steps(const float* __restrict v, int size, float largest) {
  int32_t sum = 0;
  for (int i = 0; i < size; ++i) {
    const int32_t step = int32_t(round_half_even(magnitude(v[i]) / largest * 2047.0f));
    sum += step * step;
  }
  return sum;
}

enum class Keep { kNothing, kStored, kStreamed };  // what becomes of what was not sent: past the caches or not

// Encodes a block of `size` elements at its scale, and keeps what was not sent. A scale of zero gives codes of zero, and
// all is kept.
template <class Code, bool kStochastic, Keep kKeep, class Residual>
inline void quantise_block(const float* v, float scale, const uint32_t* random, int size, uint8_t* out,
                           Residual* residual) {
  constexpr bool kStreamed = kKeep == Keep::kStreamed;
  if (scale == 0) {
    memset(out, 0, size * Code::kBits / 8);
    if constexpr (kKeep == Keep::kNothing) return;
    for (int i = 0; i < size; i += kChunk) {
      F all[kChunkVectors];
      memcpy(all, v + i, sizeof all);
      write_chunk<kStreamed>(residual + i, all);
    }
    return;
  }
  for (int i = 0; i < size; i += kChunk) {
    U fields[kChunkVectors];
    F kept[kChunkVectors];
#pragma GCC unroll 8
    for (int part = 0; part < kChunkVectors; ++part) {
      const int at = i + part * kLanes;
      F value = load(v + at);
      if constexpr (!Code::kSignedZero && !kStochastic) value += 0.0f;  // −0 − 0 would keep the sign
      const F random_part = kStochastic ? uniform(random + at) : F{};
      kept[part] = value - round_to<kStochastic>(Code{}, value, everywhere(scale), random_part, fields[part]) * scale;
    }
    uint8_t* packed = out + i * Code::kBits / 8;
    for (int part = 0; part < kChunkVectors; part += kParts) {
      pack<Code::kBits>(fields + part, packed + part * kLanes * Code::kBits / 8);
    }
    if constexpr (kKeep != Keep::kNothing) write_chunk<kStreamed>(residual + i, kept);
  }
}

}  // namespace
