// Numbers by their bits: what fp32, bf16 and fp16 have to do with each other. Every function is free of branches, so
// that a loop over it is turned into vector instructions.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

constexpr uint32_t kAbsMask = 0x7FFFFFFF;
constexpr uint32_t kInfinityBits = 0x7F800000;
constexpr float kBf16Max = 0x1.FEp127f;

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline float magnitude(float value) { return from_bits(bits_of(value) & kAbsMask); }

inline float with_sign_of(float magnitude, float sign) {
  return from_bits(bits_of(magnitude) | (bits_of(sign) & ~kAbsMask));
}

template <class Number>
inline Number smaller(Number a, Number b) {
  return a < b ? a : b;
}

template <class Number>
inline Number larger(Number a, Number b) {
  return a > b ? a : b;
}

// To nearest even, for |value| up to 2^22: the sum has no bits left for a fraction.
constexpr float kRoundingMagic = 0x1.8p23f;
inline float round_half_even(float value) { return (value + kRoundingMagic) - kRoundingMagic; }

struct Bf16 {
  uint16_t bits;
};

struct Fp16 {
  uint16_t bits;
};

inline float to_fp32(float value) { return value; }
inline float to_fp32(Bf16 value) { return from_bits(uint32_t(value.bits) << 16); }

inline float to_fp32(Fp16 value) {
  const uint32_t rest = value.bits & 0x7FFFu;
  const uint32_t normal = (rest << 13) + (112u << 23);
  const uint32_t special = normal + (112u << 23);  // infinity and NaN keep all exponent bits set
  const uint32_t subnormal = bits_of(float(int32_t(rest)) * 0x1p-24f);
  const uint32_t bits = rest < 0x0400 ? subnormal : rest < 0x7C00 ? normal : special;
  return from_bits(bits | (uint32_t(value.bits & 0x8000u) << 16));
}

// Casts of weights, as torch's copy_: to nearest even, what is too large becomes infinity.
template <class To>
inline To cast(float value);

template <>
inline float cast<float>(float value) {
  return value;
}

template <>
inline Bf16 cast<Bf16>(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return {uint16_t((bits & kAbsMask) > kInfinityBits ? 0x7FC0 : rounded)};
}

template <>
inline Fp16 cast<Fp16>(float value) {
  const uint32_t bits = bits_of(value) & kAbsMask;
  const uint32_t sign = (bits_of(value) >> 16) & 0x8000;
  const uint32_t normal = (bits + 0xFFF + ((bits >> 13) & 1) - (112u << 23)) >> 13;
  const uint32_t subnormal = bits_of(from_bits(bits) + 0.5f) - bits_of(0.5f);  // counts 2^-24, to nearest even
  const uint32_t special = bits > kInfinityBits ? 0x7E00 : 0x7C00;
  const uint32_t rest = bits < 0x38800000 ? subnormal : bits < 0x477FF000 ? normal : special;
  return {uint16_t(rest | sign)};
}

// Stored residuals: what is too large becomes the largest finite value.
template <class To>
inline To cast_finite(float value);

template <>
inline float cast_finite<float>(float value) {
  return value;
}

template <>
inline Bf16 cast_finite<Bf16>(float value) {
  return cast<Bf16>(with_sign_of(smaller(magnitude(value), kBf16Max), value));
}

// Denormals are computed with, whatever the calling thread was set to (torch.set_flush_denormal), on every thread.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1F80); }
  ~FloatMode() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  uint32_t saved_;
#elif defined(__aarch64__)
  FloatMode() : saved_(__builtin_aarch64_get_fpcr()) { __builtin_aarch64_set_fpcr(0); }
  ~FloatMode() { __builtin_aarch64_set_fpcr(saved_); }

 private:
  uint32_t saved_;
#else
#error "dilocox_kernels: the CPU back end is written for x86-64 and aarch64"
#endif
};

}  // namespace
