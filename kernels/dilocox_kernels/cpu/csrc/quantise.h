// Codes: the magnitude that a ratio |v| / scale is rounded to, and its bits.
//
// A code has kBits, kTop (the largest magnitude), kAbsmax (the scale puts the largest |v| of a block on it), and
//   nearest(ratio)         the magnitude that is nearest, ties to the even index
//   bracket(ratio, gap)    the magnitude at or below the ratio; `gap` is how far the next one is
//   field(rounded)         the bits of a signed magnitude
// for ratios in [0, kTop]. A gap above kTop does no harm: what it leads to is cut back to kTop. Integers are rounded to
// nearest with their signs, which takes fewer steps.
#pragma once

#include <type_traits>

#include "library.h"
#include "simd.h"

namespace {

template <int kBits_, int kTop_>
struct Integer {
  static constexpr int kBits = kBits_;
  static constexpr float kTop = kTop_;
  static constexpr bool kAbsmax = true;

  static F bracket(F ratio, F& gap) {
    gap = everywhere(1);
    const F near = round_half_even(ratio);
    return near > ratio ? near - 1 : near;
  }

  // The low bits of a number after the rounding magic are those of its two's complement.
  static U field(F rounded) { return (U)(rounded + kRoundingMagic) & ((1u << kBits) - 1); }
};

using Int8 = Integer<8, 127>;
using Int4 = Integer<4, 7>;

// 0 .5 1 1.5 2 3 4 6: one mantissa bit from 1 on, steps of a half below.
struct E2M1 {
  static constexpr int kBits = 4;
  static constexpr float kTop = 6;
  static constexpr bool kAbsmax = true;

  static F step(F ratio) {  // half the power of two at or below the ratio, and at least a half
    return (F)((U)larger(ratio, everywhere(1)) & kInfinityBits) * 0.5f;
  }

  static F nearest(F ratio) {
    const F magic = step(ratio) * kRoundingMagic;
    return (ratio + magic) - magic;
  }

  static F bracket(F ratio, F& gap) {
    gap = step(ratio);
    const F from_one_on = (F)((U)ratio & 0xFFC00000);
    return ratio >= 1.0f ? from_one_on : ratio >= 0.5f ? everywhere(0.5f) : F{};
  }

  static U field(F rounded) {
    const F size = magnitude(rounded);
    const I from_one_on = ((I)size >> 22) - 252;  // 1 → 2, 1.5 → 3, 2 → 4 …
    const I below_one = size == 0.5f ? I{} + 1 : I{};
    return (U)(size < 1.0f ? below_one : from_one_on) | ((U)rounded >> 28 & 8);
  }
};

// 0 .25 .5 1 2 4 8 16: powers of two.
struct E3M0 {
  static constexpr int kBits = 4;
  static constexpr float kTop = 16;
  static constexpr bool kAbsmax = true;

  // To an even exponent where it lies in the middle: index and exponent are even together.
  static F nearest(F ratio) {
    const U bits = (U)ratio;
    const F rounded = (F)((bits + 0x3FFFFF + ((bits >> 23) & 1)) & kInfinityBits);
    return ratio <= 0.125f ? F{} : larger(rounded, everywhere(0.25f));
  }

  static F bracket(F ratio, F& gap) {
    const F power = (F)((U)ratio & kInfinityBits);
    gap = larger(power, everywhere(0.25f));
    return ratio < 0.25f ? F{} : power;
  }

  static U field(F rounded) {
    const I index = ((I)magnitude(rounded) >> 23) - 124;
    return (U)larger(index, I{}) | ((U)rounded >> 28 & 8);
  }
};

// 1 and 3.34375. No zero: between the two smallest values the sign is what is random.
struct Bins2 {
  static constexpr int kBits = 2;
  static constexpr float kTop = 3.34375f;
  static constexpr bool kAbsmax = false;

  static U field(F rounded) {
    return (U)(magnitude(rounded) > 1.0f ? I{} + 1 : I{}) | ((U)rounded >> 30 & 2);
  }
};

// The same for codes whose magnitude is rounded and takes the sign of v.
template <class Code, bool kStochastic>
inline F round_magnitude(F v, F scale, const uint32_t* random) {
  const F ratio = magnitude(v) / scale;
  F uniform = {};
  if constexpr (kStochastic) uniform = __builtin_convertvector((I)(load_as<U>(random) >> 8), F) * 0x1p-24f;
  if constexpr (Code::kAbsmax) {
    const F inside = smaller(ratio, everywhere(Code::kTop));
    if constexpr (!kStochastic) return with_sign_of(Code::nearest(inside), v);
    F gap;
    const F below = Code::bracket(inside, gap);
    const F rounded = uniform * gap < inside - below ? below + gap : below;
    return with_sign_of(smaller(rounded, everywhere(Code::kTop)), v);
  } else {
    if constexpr (!kStochastic) return with_sign_of(ratio > 2.171875f ? everywhere(Code::kTop) : everywhere(1), v);
    const F outer = with_sign_of(uniform * 2.34375f < ratio - 1 ? everywhere(Code::kTop) : everywhere(1), v);
    const F inner = uniform * 2 < with_sign_of(ratio, v) + 1 ? everywhere(1) : everywhere(-1);
    return ratio < 1.0f ? inner : outer;
  }
}

template <class Code>
constexpr bool kIsInteger = std::is_same_v<Code, Int8> || std::is_same_v<Code, Int4>;

// What v becomes at a scale, as a multiple of the scale. `random` points to a word an element, or to nothing.
template <class Code, bool kStochastic>
inline F round_to_code(F v, F scale, const uint32_t* random, U& field) {
  if constexpr (kIsInteger<Code> && !kStochastic) {
    const F top = everywhere(Code::kTop);
    const F shifted = smaller(larger(v / scale, -top), top) + kRoundingMagic;
    field = (U)shifted & ((1u << Code::kBits) - 1);
    return shifted - kRoundingMagic;
  } else {
    const F rounded = round_magnitude<Code, kStochastic>(v, scale, random);
    field = Code::field(rounded);
    return rounded;
  }
}
// Sixteen fields → 2 · kBits bytes, the first field in the lowest bits.
template <int kBits>
inline void pack(const U* fields, uint8_t* out) {
  typedef uint16_t Pairs __attribute__((vector_size(16)));
  typedef uint32_t Fours __attribute__((vector_size(16)));
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

// Encodes a block of `size` elements at its scale, and keeps what was not sent of the first `count`. A scale of zero
// gives codes of zero, and all is kept. `residual` may be null; kStreamed writes it past the caches, for whole blocks at
// aligned places.
template <class Code, bool kStochastic, bool kStreamed, class Residual>
inline void quantise_block(const float* v, float scale, const uint32_t* random, int size, int count, uint8_t* out,
                           Residual* residual) {
  if (scale == 0) {
    memset(out, 0, size * Code::kBits / 8);
    for (int i = 0; residual != nullptr && i < count; i += kLanes) store_finite(residual + i, load(v + i), count - i);
    return;
  }
  for (int i = 0; i < size; i += kStep) {
    U fields[kParts];
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const int at = i + part * kLanes;
      F value = load(v + at);
      if constexpr (kIsInteger<Code> && !kStochastic) value += 0.0f;  // their zero has no sign: −0 − 0 would keep it
      const F rounded = round_to_code<Code, kStochastic>(value, everywhere(scale), random + at, fields[part]);
      if constexpr (kStreamed) {
        stream_finite(residual + at, value - rounded * scale);
      } else if (residual != nullptr) {
        store_finite(residual + at, value - rounded * scale, count - at);
      }
    }
    pack<Code::kBits>(fields, out + i * Code::kBits / 8);
  }
}

}  // namespace
