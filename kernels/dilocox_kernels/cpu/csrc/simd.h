// Vectors of the level's width, on the compiler's own vector types, and the few instructions that it does not find by
// itself. Loops that it does turn into vector instructions are written as loops, elsewhere.
#pragma once

#include <cstdint>
#include <cstring>

#include "floats.h"

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef uint64_t L __attribute__((vector_size(4 * kLanes)));  // half as many lanes
typedef double D __attribute__((vector_size(4 * kLanes)));
typedef uint16_t H __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

// Sixteen elements are one vector, two or four: sums go by sixteen lanes on every level, and so agree in every bit.
constexpr int kStep = 16;
constexpr int kParts = kStep / kLanes;

constexpr int kChunk = 32;  // elements that an inner loop takes; divides every block size
constexpr int kChunkVectors = kChunk / kLanes;

template <class Vector>
inline Vector load_as(const void* from) {
  Vector vector;
  memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Vector>
inline void store_as(void* to, Vector vector) {
  memcpy(to, &vector, sizeof vector);
}

inline F everywhere(float value) { return F{} + value; }
inline F magnitude(F value) { return (F)((U)value & kAbsMask); }
inline F with_sign_of(F magnitude, F sign) {
#if defined(__AVX512F__)
  return (F)_mm512_ternarylogic_epi32((__m512i)magnitude, (__m512i)sign, (__m512i)(U{} + kAbsMask), 0xE4);
#else
  return (F)((U)magnitude | ((U)sign & ~kAbsMask));
#endif
}
inline F round_half_even(F value) { return (value + kRoundingMagic) - kRoundingMagic; }

// The integer at or below a value in [0, 2^22].
inline F round_down(F value) {
#if defined(__AVX512F__)
  return (F)_mm512_roundscale_ps((__m512)value, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (F)_mm256_floor_ps((__m256)value);
#elif defined(__x86_64__)
  const F near = round_half_even(value);
  return near > value ? near - 1 : near;
#else
  return (F)vrndmq_f32((float32x4_t)value);
#endif
}

// Of two numbers; what they give for NaN does not matter, as that is found out and refused.
inline F smaller(F a, F b) {
#if defined(__AVX512F__)
  return (F)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (F)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

inline F larger(F a, F b) {
#if defined(__AVX512F__)
  return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (F)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline I larger(I a, I b) {
#if defined(__AVX512F__)
  return (I)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (I)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}

inline F load(const float* from) { return load_as<F>(from); }
inline F load(const Bf16* from) {
#if defined(__AVX512F__)
  return (F)((U)_mm512_cvtepu16_epi32(load_as<__m256i>(from)) << 16);
#elif defined(__AVX2__)
  return (F)((U)_mm256_cvtepu16_epi32(load_as<__m128i>(from)) << 16);
#else
  return (F)(__builtin_convertvector(load_as<H>(from), U) << 16);
#endif
}

inline F load(const Fp16* from) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__F16C__)
  return (F)_mm256_cvtph_ps(load_as<__m128i>(from));
#else
  F vector;
  for (int i = 0; i < kLanes; ++i) vector[i] = to_fp32(from[i]);
  return vector;
#endif
}

// The odd halves of two vectors' lanes, `low` first.
inline U odd_halves(U low, U high) {
#if defined(__AVX512F__)
  typedef uint16_t Halves __attribute__((vector_size(64)));
  const Halves odd = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return (U)__builtin_shuffle((Halves)low, (Halves)high, odd);
#elif defined(__AVX2__)
  const __m256i mixed = _mm256_packus_epi32((__m256i)(low >> 16), (__m256i)(high >> 16));
  return (U)_mm256_permute4x64_epi64(mixed, 0xD8);
#elif defined(__x86_64__)
  return (U)_mm_packs_epi32((__m128i)((I)low >> 16), (__m128i)((I)high >> 16));
#else
  return (U)vuzp2q_u16((uint16x8_t)low, (uint16x8_t)high);
#endif
}

// A residual to bf16 in the upper half of each lane: to nearest even, what is too large becomes the largest finite value.
inline U finite_bf16(F value) {
  const F largest = everywhere(kBf16Max);
  const U bits = (U)smaller(larger(value, -largest), largest);
  return bits + 0x7FFF + ((bits >> 16) & 1);
}

// Past the caches, to a place aligned to the vector: a line that is written whole need not be read first.
inline void stream(void* to, U vector) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(to), (__m512i)vector);
#elif defined(__AVX2__)
  _mm256_stream_si256(static_cast<__m256i*>(to), (__m256i)vector);
#elif defined(__x86_64__)
  _mm_stream_si128(static_cast<__m128i*>(to), (__m128i)vector);
#else
  store_as(to, vector);
#endif
}

template <bool kStreamed>
inline void write_vector(void* to, U vector) {
  if constexpr (kStreamed) {
    stream(to, vector);
  } else {
    store_as(to, vector);
  }
}

// A chunk of residuals.
template <bool kStreamed>
inline void write_chunk(float* to, const F* values) {
  for (int i = 0; i < kChunkVectors; ++i) write_vector<kStreamed>(to + i * kLanes, (U)values[i]);
}

template <bool kStreamed>
inline void write_chunk(Bf16* to, const F* values) {
  for (int i = 0; i < kChunkVectors; i += 2) {
    write_vector<kStreamed>(to + i * kLanes, odd_halves(finite_bf16(values[i]), finite_bf16(values[i + 1])));
  }
}

// Orders what was written past the caches before whatever this thread does next, such as to say that it is done.
inline void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

inline int32_t largest_lane(I vector) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)vector);
#else
  int32_t largest = vector[0];
  for (int i = 1; i < kLanes; ++i) largest = larger(largest, vector[i]);
  return largest;
#endif
}

// sums[0] and [1] += the squares of the low and the high half, in float64.
inline void add_squares(F value, D* sums) {
#if defined(__AVX512F__)
  const D low = (D)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)value));
  const D high = (D)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)value, 1));
#elif defined(__AVX2__)
  const D low = (D)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)value));
  const D high = (D)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)value, 1));
#elif defined(__x86_64__)
  const D low = (D)_mm_cvtps_pd((__m128)value);
  const D high = (D)_mm_cvtps_pd(_mm_movehl_ps((__m128)value, (__m128)value));
#else
  const D low = (D)vcvt_f64_f32(vget_low_f32((float32x4_t)value));
  const D high = (D)vcvt_high_f64_f32((float32x4_t)value);
#endif
  sums[0] += low * low;
  sums[1] += high * high;
}

inline L exclusive_or(L a, L b, L c) {
#if defined(__AVX512F__)
  return (L)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
#else
  return a ^ b ^ c;
#endif
}

// The 64-bit products of the low halves of lanes.
inline L multiply_low_halves(L a, L b) {
#if defined(__AVX512F__)
  return (L)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (L)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (L)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (L)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#endif
}

// Lanes 0 (of each pair of lanes) of a and b in turn, and lanes 1.
inline L even_lanes(L a, L b) {
#if defined(__AVX512F__)
  return (L)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (L)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
#else
  return L{a[0], b[0]};
#endif
}

inline L odd_lanes(L a, L b) {
#if defined(__AVX512F__)
  return (L)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (L)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
#else
  return L{a[1], b[1]};
#endif
}

// The low bytes of sixteen numbers below 256.
inline Bytes narrow_to_bytes(const U* numbers) {
#if defined(__AVX512F__)
  return (Bytes)_mm512_cvtepi32_epi8((__m512i)numbers[0]);
#elif defined(__AVX2__)
  const __m256i mixed = _mm256_packus_epi32((__m256i)numbers[0], (__m256i)numbers[1]);
  const __m256i words = _mm256_permute4x64_epi64(mixed, 0xD8);
  return (Bytes)_mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#elif defined(__x86_64__)
  const __m128i low = _mm_packs_epi32((__m128i)numbers[0], (__m128i)numbers[1]);
  const __m128i high = _mm_packs_epi32((__m128i)numbers[2], (__m128i)numbers[3]);
  return (Bytes)_mm_packus_epi16(low, high);
#else
  const uint16x8_t low = vcombine_u16(vmovn_u32((uint32x4_t)numbers[0]), vmovn_u32((uint32x4_t)numbers[1]));
  const uint16x8_t high = vcombine_u16(vmovn_u32((uint32x4_t)numbers[2]), vmovn_u32((uint32x4_t)numbers[3]));
  return (Bytes)vcombine_u8(vmovn_u16(low), vmovn_u16(high));
#endif
}

// Sixteen signed bytes as numbers.
inline void widen(Bytes bytes, F* numbers) {
#if defined(__AVX512F__)
  numbers[0] = (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
  numbers[0] = (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)bytes));
  numbers[1] = (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)bytes, 8)));
#else
  for (int part = 0; part < kParts; ++part) {
    for (int i = 0; i < kLanes; ++i) numbers[part][i] = float(int8_t(bytes[part * kLanes + i]));
  }
#endif
}

}  // namespace
