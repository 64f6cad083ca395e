// v = Δ + decay · residual, encoded, and what was not sent kept: stretch by stretch.
//
// A stretch is passed over twice. The first time everything is read, v is put where it stays in the cache, and each
// block's largest |v| is found; the second time codes and residuals are written. Stretches are short, so that memory is
// read while the one before is still computed with; blocks that share the base of their scales wait for a whole tile.
#pragma once

#include <type_traits>

#include "library.h"
#include "merge.h"
#include "philox.h"
#include "quantise.h"
#include "scales.h"
#include "simd.h"
#include "tiles.h"

namespace {

constexpr int kStretch = 512;  // elements: a whole number of the largest blocks
constexpr int kAhead = 2 * kStretch;  // how far ahead memory is fetched
constexpr int64_t kStreamedElements = 1 << 20;  // ranges of so many elements would not stay in the caches

// What is encoded in one go: a part of a piece, from a block's start on.
struct Part {
  int64_t place;  // in the range
  int length;
  const void* values;  // its first
};

// Sums and largest magnitudes of a tile, lane by lane.
struct LaneNorms {
  D sums[2 * kParts] = {};
  I delta = {};
  I value = {};
};

template <class Element>
inline void fetch_ahead(const Element* from, int count) {
  fetch<false>(from + kAhead, int(sizeof(Element)) * count);
}

struct None {};  // where a residual is not carried on

template <class Residual>
constexpr bool kCarried = !std::is_same_v<Residual, None>;

// v of whole blocks, and its norms; `largest` takes the bits of each block's largest |v|. Without an anchor Δ is the
// value, without a residual v is Δ.
template <class Value, class Residual, bool kAnchored>
inline void prepare_blocks(const EncodeJob& job, const float* anchor, const Value* values, const Residual* residual,
                           int length, int size, float* v, uint32_t* largest, LaneNorms& norms) {
  LaneNorms lanes = norms;
  for (int block = 0; block < length; block += size) {
    if (job.bodies.count == 0) fetch_ahead(values + block, size);  // else they are in the cache: the tile's merge
    if constexpr (kAnchored) fetch_ahead(anchor + block, size);
    if constexpr (kCarried<Residual>) fetch_ahead(residual + block, size);
    I of_block = {};
    for (int i = block; i < block + size; i += kStep) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const int at = i + part * kLanes;
        F delta = load(values + at);
        if constexpr (kAnchored) delta = load(anchor + at) - delta;
        F sent = delta;
        if constexpr (kCarried<Residual>) sent = job.decay * load(residual + at) + delta;
        store_as(v + at, sent);
        add_squares(delta, lanes.sums + 2 * part);
        lanes.delta = larger(lanes.delta, (I)magnitude(delta));
        of_block = larger(of_block, (I)magnitude(sent));
      }
    }
    lanes.value = larger(lanes.value, of_block);
    *largest++ = uint32_t(largest_lane(of_block));
  }
  norms = lanes;
}

inline TileNorms total(const LaneNorms& norms) {
  double lanes[kStep];
  memcpy(lanes, norms.sums, sizeof lanes);
  double sum = 0;
  for (int i = 0; i < kStep; ++i) sum += lanes[i];
  return {sum, uint32_t(largest_lane(norms.delta)), uint32_t(largest_lane(norms.value))};
}

// First pass: v of a part, filled up with zeros to a whole block, and the bits of each block's largest |v|.
template <class Value, class Residual, bool kAnchored>
void prepare(const EncodeJob& job, const Part& part, int size, float* v, uint32_t* largest, LaneNorms& norms) {
  const auto* values = static_cast<const Value*>(part.values);
  const float* anchor = kAnchored ? job.anchor + part.place : nullptr;
  const Residual* residual = nullptr;
  if constexpr (kCarried<Residual>) residual = static_cast<const Residual*>(job.residual) + part.place;
  const int rest = part.length % size, whole = part.length - rest;
  prepare_blocks<Value, Residual, kAnchored>(job, anchor, values, residual, whole, size, v, largest, norms);
  if (rest == 0) return;
  Value last_values[kStretch] = {};
  float last_anchor[kStretch] = {};
  Residual last_residual[kStretch] = {};
  memcpy(last_values, values + whole, sizeof(Value) * rest);
  if constexpr (kAnchored) memcpy(last_anchor, anchor + whole, sizeof(float) * rest);
  if constexpr (kCarried<Residual>) memcpy(last_residual, residual + whole, sizeof(Residual) * rest);
  prepare_blocks<Value, Residual, kAnchored>(job, last_anchor, last_values, last_residual, size, size, v + whole,
                                             largest + whole / size, norms);
}

// The scales that a part's blocks want.
template <class Code>
inline void wanted_scales(const EncodeJob& job, const Part& part, const float* v, const uint32_t* largest, int blocks,
                          float* wanted) {
  const float max_scale = job.format.max_scale;
  if constexpr (Code::kAbsmax) {
    for (int i = 0; i < blocks; ++i) wanted[i] = smaller(from_bits(largest[i]) / float(Code::kTop), max_scale);
  } else {
    const int size = job.format.block_size;
    for (int i = 0; i < blocks; ++i) {
      const int32_t sum = largest[i] == 0 ? 0 : sum_of_square_steps(v + i * size, size, from_bits(largest[i]));
      const float root = __builtin_sqrtf(float(sum) / float(smaller(size, part.length - i * size)));
      wanted[i] = smaller(root * float(0.4528 / 2047) * from_bits(largest[i]), max_scale);
    }
  }
}

// Random words of the elements from `place` on; those that only fill up the range's last block get zeros.
inline void make_random(const EncodeJob& job, int64_t place, uint32_t* words) {
  const uint64_t first = uint64_t(job.start + place) / 4;
  for (int i = 0; i < kStretch / 4; i += kCounters) philox(job.key, job.round, first + i, words + 4 * i);
  for (int64_t i = job.spans.numel - place; i < kStretch; ++i) words[i] = 0;
}

// Second pass: codes of a part's blocks, and what was not sent. Blocks are written whole: what a last one of less than
// `size` elements keeps is put aside first.
template <class Code, bool kStochastic, Keep kKeep, class Residual>
inline void write_blocks(const EncodeJob& job, const Part& part, const float* v, const float* scales, uint8_t* codes,
                         Residual* residual) {
  const int size = job.format.block_size;
  alignas(64) uint32_t random[kStretch];
  alignas(64) Residual last[kStretch];
  for (int i = 0; i < part.length; i += size) {
    if (kStochastic && i % kStretch == 0) make_random(job, part.place + i, random);
    const uint32_t* words = random + i % kStretch;
    const int left = part.length - i;
    uint8_t* out = codes + i * Code::kBits / 8;
    Residual* kept = kKeep == Keep::kNothing || left < size ? last : residual + i;
    quantise_block<Code, kStochastic, kKeep>(v + i, scales[i / size], words, size, out, kept);
    if (kKeep != Keep::kNothing && left < size) memcpy(residual + i, last, sizeof(Residual) * left);
  }
}

template <class Code, bool kStochastic, class Residual>
inline void write_codes(const EncodeJob& job, const Part& part, const float* v, const float* scales) {
  uint8_t* codes = job.out + part.place * Code::kBits / 8;
  fetch<true>(codes + kAhead * Code::kBits / 8, kStretch * Code::kBits / 8);
  if (job.residual_out == nullptr) {
    return write_blocks<Code, kStochastic, Keep::kNothing, Residual>(job, part, v, scales, codes, nullptr);
  }
  Residual* residual = static_cast<Residual*>(job.residual_out) + part.place;
  if (job.spans.numel >= kStreamedElements && uintptr_t(residual) % 64 == 0) {
    return write_blocks<Code, kStochastic, Keep::kStreamed>(job, part, v, scales, codes, residual);
  }
  write_blocks<Code, kStochastic, Keep::kStored>(job, part, v, scales, codes, residual);
}

template <class Element, class Residual>
inline void write_cast(const EncodeJob& job, const Part& part, const float* v) {
  Element* out = reinterpret_cast<Element*>(job.out) + part.place;
  for (int i = 0; i < part.length; ++i) out[i] = cast_finite<Element>(v[i]);
  if (job.residual_out == nullptr) return;
  Residual* residual = static_cast<Residual*>(job.residual_out) + part.place;
  for (int i = 0; i < part.length; ++i) residual[i] = cast_finite<Residual>(v[i] - to_fp32(out[i]));
}

// What depends on a job's code and dtypes, chosen once.
struct Steps {
  void (*prepare)(const EncodeJob& job, const Part& part, int size, float* v, uint32_t* largest, LaneNorms& norms);
  // Block formats:
  void (*want)(const EncodeJob& job, const Part& part, const float* v, const uint32_t* largest, int blocks,
               float* wanted);
  void (*round)(const Format& format, const Layout& layout, uint8_t* body, const Tile& tile, int blocks,
                const float* wanted);
  void (*write)(const EncodeJob& job, const Part& part, const float* v, const float* scales);
  // Casts:
  void (*cast)(const EncodeJob& job, const Part& part, const float* v);
};

template <class Residual>
inline void choose_code(const EncodeJob& job, Steps& steps) {
  const auto blocks = [&](auto* code) {
    using Code = std::remove_pointer_t<decltype(code)>;
    steps.want = wanted_scales<Code>;
    steps.round = write_scales<Code::kAbsmax>;
    steps.write = job.stochastic ? write_codes<Code, true, Residual> : write_codes<Code, false, Residual>;
  };
  switch (job.format.code) {
    case kInt8: return blocks(static_cast<Int8*>(nullptr));
    case kInt4: return blocks(static_cast<Int4*>(nullptr));
    case kE2M1: return blocks(static_cast<E2M1*>(nullptr));
    case kE3M0: return blocks(static_cast<E3M0*>(nullptr));
    case kBins2: return blocks(static_cast<Bins2*>(nullptr));
    case kCastFp32: steps.cast = write_cast<float, Residual>; return;
    case kCastBf16: steps.cast = write_cast<Bf16, Residual>; return;
  }
}

inline Steps choose_steps(const EncodeJob& job) {
  Steps steps = {};
  with_residual_dtype(job.residual_dtype, [&](auto* residual) {
    using Residual = std::remove_pointer_t<decltype(residual)>;
    choose_code<Residual>(job, steps);
    with_dtype(job.bodies.count > 0 ? int32_t(kFp32) : job.spans.values_dtype, [&](auto* value) {
      using Value = std::remove_pointer_t<decltype(value)>;
      if (job.residual == nullptr) {
        steps.prepare = job.anchor == nullptr ? prepare<Value, None, false> : prepare<Value, None, true>;
      } else {
        steps.prepare = job.anchor == nullptr ? prepare<Value, Residual, false> : prepare<Value, Residual, true>;
      }
    });
  });
  return steps;
}

// Calls work(part) for the pieces of a tile, in parts of at most `longest` elements; `merged` holds the tile's Δ where
// that comes from bodies.
template <class Work>
inline void for_parts(const EncodeJob& job, const Tile& tile, const float* merged, int longest, const Work& work) {
  const int value_bytes = job.spans.values_dtype == kFp32 ? 4 : 2;
  for_pieces(job.spans, tile, [&](const Piece& piece) {
    for (int64_t i = 0; i < piece.length; i += longest) {
      const void* values = merged + piece.offset + i;
      if (job.bodies.count == 0) {
        values = static_cast<const char*>(job.spans.values[piece.span]) + value_bytes * (piece.value + i);
      }
      work(Part{tile.start + piece.offset + i, int(smaller(int64_t(longest), piece.length - i)), values});
    }
  });
}

// Codes of gaps are zeros, and so are their scales, unless they were written with the tile's.
inline void clear_gaps_of_body(const EncodeJob& job, const Layout& layout, const Tile& tile) {
  const Format& format = job.format;
  const int64_t size = larger(format.block_size, 1);
  const int64_t unit = format.block_size > 0 ? code_bytes(format) : format.code == kCastFp32 ? 4 : 2;
  const int64_t blocks = (tile.length + size - 1) / size;
  for_gaps(job.spans, tile, blocks * size, [&](int64_t start, int64_t stop) {
    const int64_t first = (start + size - 1) / size, count = stop / size - first, place = tile.start / size + first;
    if (count <= 0) return;
    memset(job.out + place * unit, 0, count * unit);
    if (format.block_size > 0 && format.scale_kind != kScaleE4M4) {
      memset(job.out + layout.scales + place * scale_bytes(format), 0, count * scale_bytes(format));
    }
  });
}

// Blocks whose scales are their own: stretch by stretch.
inline void encode_stretches(const EncodeJob& job, const Layout& layout, const Steps& steps, const Tile& tile,
                             const float* merged, LaneNorms& norms) {
  const int size = job.format.block_size == 0 ? kStretch : job.format.block_size;
  alignas(64) float v[kStretch], scales[kStretch / 32];
  uint32_t largest[kStretch / 32];
  for_parts(job, tile, merged, kStretch, [&](const Part& part) {
    steps.prepare(job, part, size, v, largest, norms);
    if (steps.cast != nullptr) return steps.cast(job, part, v);
    const int blocks = (part.length + size - 1) / size;
    const Tile here = {tile.index, part.place, part.length};
    steps.want(job, part, v, largest, blocks, scales);
    steps.round(job.format, layout, job.out, here, blocks, scales);
    read_scales(job.format, layout, job.out, here, blocks, scales);
    steps.write(job, part, v, scales);
  });
}

// Blocks whose scales share the tile's base: all of them before any is written.
inline void encode_group(const EncodeJob& job, const Layout& layout, const Steps& steps, const Tile& tile,
                         const float* merged, LaneNorms& norms) {
  const int size = job.format.block_size, blocks = int((tile.length + size - 1) / size);
  alignas(64) float v[kTileElements], scales[kMaxBlocks] = {};
  for_parts(job, tile, merged, kStretch, [&](const Part& part) {
    const int64_t offset = part.place - tile.start;
    uint32_t largest[kStretch / 32];
    steps.prepare(job, part, size, v + offset, largest, norms);
    steps.want(job, part, v + offset, largest, (part.length + size - 1) / size, scales + offset / size);
  });
  steps.round(job.format, layout, job.out, tile, blocks, scales);
  read_scales(job.format, layout, job.out, tile, blocks, scales);
  for_parts(job, tile, merged, kStretch, [&](const Part& part) {
    const int64_t offset = part.place - tile.start;
    steps.write(job, part, v + offset, scales + offset / size);
  });
}

void encode(EncodeJob& job, int threads) {
  const Layout layout(job.format, job.spans.numel);
  const Steps steps = choose_steps(job);
  const bool grouped = job.format.block_size > 0 && job.format.scale_kind == kScaleE4M4;
  for_tiles(job.spans.numel, threads, [&](const Tile& tile) {
    alignas(64) float merged[kTileElements];
    LaneNorms norms;
    if (job.bodies.count > 0) merge_tile(job.format, layout, job.bodies, tile, merged, [&](int, int) {});
    if (grouped) {
      encode_group(job, layout, steps, tile, merged, norms);
    } else {
      encode_stretches(job, layout, steps, tile, merged, norms);
    }
    clear_gaps_of_body(job, layout, tile);
    job.tile_norms[tile.index] = total(norms);
  });
  job.norms = {0, 0, 0};
  for (int64_t i = 0; i < tiles_of(job.spans.numel); ++i) {
    const TileNorms& tile = job.tile_norms[i];
    job.norms.sum_of_squares += tile.sum_of_squares;
    job.norms.delta_bits = larger(job.norms.delta_bits, tile.delta_bits);
    job.norms.value_bits = larger(job.norms.value_bits, tile.value_bits);
  }
}

}  // namespace
