// Scales of a tile's blocks: from what a block wants to what is stored and back. Loops run over blocks, so that they
// are turned into vector instructions too.
#pragma once

#include <cstring>

#include "floats.h"
#include "library.h"
#include "tiles.h"

namespace {

constexpr int kMaxBlocks = kTileElements / 32;  // of a tile

inline int64_t code_bytes(const Format& format) {  // of a block
  const int bits = format.code == kInt8 ? 8 : format.code == kBins2 ? 2 : 4;
  return format.block_size * bits / 8;
}

inline int scale_bytes(const Format& format) {  // of a block
  return format.scale_kind == kScaleFp32 ? 4 : format.scale_kind == kScaleE4M4 ? 1 : 2;
}

// Where the parts of a body lie: codes, then bases (e4m4 only), then scales.
struct Layout {
  Layout(const Format& format, int64_t numel) {
    if (format.block_size == 0) return;  // a cast: elements alone
    const int64_t blocks = (numel + format.block_size - 1) / format.block_size;
    bases = blocks * code_bytes(format);
    scales = bases + (format.scale_kind == kScaleE4M4 ? 2 * tiles_of(numel) : 0);
  }
  int64_t bases = 0;
  int64_t scales = 0;
};

// A scale kind's 16 bits and what they mean: rounded up for absmax codes, so that the largest element of a block is
// never cut off, and to nearest even for bins.
template <bool kUp>
inline uint16_t to_fp16(float wanted) {
  const uint32_t bits = bits_of(wanted);
  const uint32_t rounding = kUp ? 0x1FFF : 0xFFF + ((bits >> 13) & 1);
  const uint32_t normal = (bits + rounding - (112u << 23)) >> 13;
  const float units = wanted * 0x1p24f;  // of 2^-24; exact
  const int32_t nearest = int32_t(round_half_even(smaller(units, 1024.0f)));
  const int32_t subnormal = nearest + (kUp && float(nearest) < units ? 1 : 0);
  return uint16_t(bits < 0x38800000 ? uint32_t(subnormal) : normal);
}

template <bool kUp>
inline uint16_t to_bf16(float wanted) {
  const uint32_t bits = bits_of(wanted);
  return uint16_t((bits + (kUp ? 0xFFFF : 0x7FFF + ((bits >> 16) & 1))) >> 16);
}

// Four exponent and four mantissa bits over the tile's base; 0 where nothing is wanted.
template <bool kUp>
inline int16_t to_e4m4(const float* wanted, int blocks, uint8_t* codes) {
  const uint32_t rounding = kUp ? 0x7FFFF : 0x40000;
  int32_t top = 0;
  for (int i = 0; i < blocks; ++i) {
    const int32_t t = int32_t((bits_of(wanted[i]) + rounding) >> 19);
    top = larger(top, t);
  }
  const int32_t base = top - 255;
  for (int i = 0; i < blocks; ++i) {
    const int32_t code = int32_t((bits_of(wanted[i]) + rounding) >> 19) - base;
    const int32_t kept = code < 1 ? int32_t(kUp) : code;
    codes[i] = uint8_t(wanted[i] == 0 ? 0 : kept);
  }
  return int16_t(base);
}

inline float from_e4m4(int32_t base, uint8_t code) {
  return code == 0 ? 0.0f : from_bits(uint32_t(base + code) << 19);
}

// Reads the scales of a tile's blocks from a body, as fp32.
inline void read_scales(const Format& format, const Layout& layout, const uint8_t* body, const Tile& tile, int blocks,
                        float* scales) {
  const int64_t first = tile.start / format.block_size;
  const uint8_t* stored = body + layout.scales;
  switch (format.scale_kind) {
    case kScaleFp16: {
      const Fp16* halves = reinterpret_cast<const Fp16*>(stored) + first;
      for (int i = 0; i < blocks; ++i) scales[i] = to_fp32(halves[i]);
      return;
    }
    case kScaleBf16: {
      const Bf16* halves = reinterpret_cast<const Bf16*>(stored) + first;
      for (int i = 0; i < blocks; ++i) scales[i] = to_fp32(halves[i]);
      return;
    }
    case kScaleFp32:
      memcpy(scales, stored + sizeof(float) * first, sizeof(float) * blocks);
      return;
    case kScaleE4M4: {
      int16_t base;
      memcpy(&base, body + layout.bases + 2 * tile.index, sizeof base);
      for (int i = 0; i < blocks; ++i) scales[i] = from_e4m4(base, stored[first + i]);
      return;
    }
  }
}

// Writes the scales that a tile's blocks want into a body.
template <bool kUp>
inline void write_scales(const Format& format, const Layout& layout, uint8_t* body, const Tile& tile, int blocks,
                         const float* wanted) {
  const int64_t first = tile.start / format.block_size;
  uint8_t* stored = body + layout.scales;
  switch (format.scale_kind) {
    case kScaleFp16: {
      uint16_t* halves = reinterpret_cast<uint16_t*>(stored) + first;
      for (int i = 0; i < blocks; ++i) halves[i] = to_fp16<kUp>(wanted[i]);
      return;
    }
    case kScaleBf16: {
      uint16_t* halves = reinterpret_cast<uint16_t*>(stored) + first;
      for (int i = 0; i < blocks; ++i) halves[i] = to_bf16<kUp>(wanted[i]);
      return;
    }
    case kScaleFp32:
      memcpy(stored + sizeof(float) * first, wanted, sizeof(float) * blocks);
      return;
    case kScaleE4M4: {
      const int16_t base = to_e4m4<kUp>(wanted, blocks, stored + first);
      memcpy(body + layout.bases + 2 * tile.index, &base, sizeof base);
      return;
    }
  }
}

}  // namespace
