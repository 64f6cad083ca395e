// v = Δ + decay · residual, tile by tile: encoded, and what was not sent kept.
//
// A tile is passed over twice. The first time everything is read, v is put where it stays in the cache, and each block's
// largest |v| is found; the second time codes and residuals are written, while the next tile's inputs are fetched.
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

constexpr int kCastBlock = 256;  // elements of what a cast takes at once; divides a tile

// Sums and largest magnitudes of a tile, lane by lane.
struct LaneNorms {
  D sums[2 * kParts] = {};
  I delta = {};
  I value = {};
};

// v of a piece of a span, in blocks of `size`, and its norms; `largest` takes the bits of each block's largest |v|.
// Without an anchor Δ is the value, without a residual v is Δ.
template <class Value, class Residual>
inline void prepare_piece(const float* anchor, const Value* values, const Residual* residual, float decay, int length,
                          int size, float* v, uint32_t* largest, LaneNorms& norms) {
  LaneNorms lanes = norms;
  for (int block = 0; block < length; block += size) {
    const int stop = smaller(block + size, length);
    I of_block = {};
    for (int i = block; i < stop; i += kStep) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const int at = i + part * kLanes, left = stop - at;
        F delta = load(values + at, left);
        if (anchor != nullptr) delta = load(anchor + at, left) - delta;
        const F sent = residual == nullptr ? delta : decay * load(residual + at, left) + delta;
        store_finite(v + at, sent, left);
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

// First pass: v of the tile, zeros in gaps, and the bits of each block's largest |v|.
template <class Residual>
inline void prepare_tile(const EncodeJob& job, const Layout& layout, const Tile& tile, int size,
                         const Residual* residual, float* v, uint32_t* largest) {
  LaneNorms norms;
  const float* anchor = job.anchor == nullptr ? nullptr : job.anchor + tile.start;
  const auto prepare = [&](const Piece& piece, const auto* values) {
    prepare_piece(anchor == nullptr ? nullptr : anchor + piece.offset, values,
                  residual == nullptr ? nullptr : residual + piece.offset, job.decay, int(piece.length), size,
                  v + piece.offset, largest + piece.offset / size, norms);
  };
  memset(largest, 0, sizeof(uint32_t) * kMaxBlocks);
  if (job.bodies.count > 0) {
    merge_tile(job.format, layout, job.bodies, tile, v, [&](int, int) {});
    for_pieces(job.spans, tile, [&](const Piece& piece) { prepare(piece, v + piece.offset); });
  } else {
    with_dtype(job.spans.values_dtype, [&](auto* dtype) {
      for_pieces(job.spans, tile, [&](const Piece& piece) {
        prepare(piece, static_cast<decltype(dtype)>(job.spans.values[piece.span]) + piece.value);
      });
    });
  }
  clear_gaps(job.spans, tile, v, (tile.length + size - 1) / size * size);
  job.tile_norms[tile.index] = total(norms);
}

// Elements of each block that lie in spans; no two spans share a block.
inline void count_elements(const EncodeJob& job, const Tile& tile, int32_t* counts) {
  memset(counts, 0, sizeof(int32_t) * kMaxBlocks);
  const int64_t size = job.format.block_size;
  for_pieces(job.spans, tile, [&](const Piece& piece) {
    for (int64_t i = 0; i < piece.length; i += size) {
      counts[(piece.offset + i) / size] = int32_t(smaller(size, piece.length - i));
    }
  });
}

// The scales that blocks want.
template <class Code>
inline void wanted_scales(const EncodeJob& job, const Tile& tile, const float* v, const uint32_t* largest, int blocks,
                          float* wanted) {
  const float max_scale = job.format.max_scale;
  if constexpr (Code::kAbsmax) {
    for (int i = 0; i < blocks; ++i) wanted[i] = smaller(from_bits(largest[i]) / float(Code::kTop), max_scale);
  } else {
    const int size = job.format.block_size;
    int32_t sums[kMaxBlocks], counts[kMaxBlocks];
    count_elements(job, tile, counts);
    for (int i = 0; i < blocks; ++i) {
      sums[i] = largest[i] == 0 ? 0 : sum_of_square_steps(v + i * size, size, from_bits(largest[i]));
    }
    for (int i = 0; i < blocks; ++i) {
      const float root = __builtin_sqrtf(float(sums[i]) / float(larger(counts[i], 1)));
      wanted[i] = smaller(root * float(0.4528 / 2047) * from_bits(largest[i]), max_scale);
    }
  }
}

constexpr int kBatch = 256;  // elements whose random words are made at once: whole blocks of any size

// Random words of elements from `offset` of a tile on; those that only fill up the range's last block get zeros.
inline void make_random(const EncodeJob& job, const Tile& tile, int64_t offset, uint32_t* words) {
  const uint64_t first = uint64_t(job.start + tile.start + offset) / 4;
  for (int i = 0; i < kBatch / 4; i += kCounters) philox(job.key, job.round, first + i, words + 4 * i);
  for (int64_t i = larger(tile.length - offset, int64_t(0)); i < kBatch; ++i) words[i] = 0;
}

// Has the next tile's inputs brought near that lie where a block lies in this one, and the place of its residual.
template <class Residual>
inline void fetch_ahead(const EncodeJob& job, const char* values, int value_bytes, int64_t place, int size) {
  const int64_t ahead = place + kTileElements;
  if (values != nullptr) fetch<false>(values + kTileElements * value_bytes, value_bytes * size);
  if (job.anchor != nullptr) fetch<false>(job.anchor + ahead, int(sizeof(float)) * size);
  const int residual_bytes = int(sizeof(Residual)) * size;
  if (job.residual != nullptr) fetch<false>(static_cast<const Residual*>(job.residual) + ahead, residual_bytes);
  if (job.residual_out != nullptr) fetch<true>(static_cast<const Residual*>(job.residual_out) + ahead, residual_bytes);
}

// Codes of a piece's blocks, and what was not sent.
template <class Code, bool kStochastic, class Residual>
inline void write_piece(const EncodeJob& job, const Tile& tile, const Piece& piece, const float* v, const float* scales) {
  const int size = job.format.block_size, block_bytes = size * Code::kBits / 8;
  const int value_bytes = job.spans.values_dtype == kFp32 ? 4 : 2;
  const int64_t place = tile.start + piece.offset;
  const char* values = nullptr;
  if (job.bodies.count == 0) values = static_cast<const char*>(job.spans.values[piece.span]) + value_bytes * piece.value;
  auto* residual = static_cast<Residual*>(job.residual_out);
  if (residual != nullptr) residual += place;
  uint8_t* codes = job.out + place * Code::kBits / 8;
  const float* scale = scales + piece.offset / size;
  alignas(64) uint32_t random[kBatch];
  for (int i = 0; i < piece.length; i += size) {
    const int offset = int(piece.offset) + i, in_batch = offset % kBatch;
    if (kStochastic && (i == 0 || in_batch == 0)) make_random(job, tile, offset - in_batch, random);
    fetch_ahead<Residual>(job, values == nullptr ? nullptr : values + value_bytes * i, value_bytes, place + i, size);
    quantise_block<Code, kStochastic>(v + offset, *scale++, random + in_batch, size, int(piece.length) - i, codes,
                                      residual == nullptr ? nullptr : residual + i);
    codes += block_bytes;
  }
}

// Second pass: scales, codes and what was not sent.
template <class Code, bool kStochastic, class Residual>
inline void write_blocks(const EncodeJob& job, const Layout& layout, const Tile& tile, const float* v,
                         const uint32_t* largest) {
  const int size = job.format.block_size, block_bytes = size * Code::kBits / 8;
  const int blocks = int((tile.length + size - 1) / size);
  alignas(64) float scales[kMaxBlocks];
  wanted_scales<Code>(job, tile, v, largest, blocks, scales);
  write_scales<Code::kAbsmax>(job.format, layout, job.out, tile, blocks, scales);
  read_scales(job.format, layout, job.out, tile, blocks, scales);
  uint8_t* codes = job.out + tile.start * Code::kBits / 8;
  for_gaps(job.spans, tile, blocks * size, [&](int64_t start, int64_t stop) {
    const int64_t first = (start + size - 1) / size;
    memset(codes + first * block_bytes, 0, (stop / size - first) * block_bytes);
  });
  for_pieces(job.spans, tile,
             [&](const Piece& piece) { write_piece<Code, kStochastic, Residual>(job, tile, piece, v, scales); });
}

template <class Element, class Residual>
inline void write_cast(const EncodeJob& job, const Tile& tile, const float* v) {
  Element* out = reinterpret_cast<Element*>(job.out) + tile.start;
  for (int64_t i = 0; i < tile.length; ++i) out[i] = cast_finite<Element>(v[i]);
  if (job.residual_out == nullptr) return;
  Residual* residual = static_cast<Residual*>(job.residual_out) + tile.start;
  for_pieces(job.spans, tile, [&](const Piece& piece) {
    for (int64_t i = piece.offset; i < piece.offset + piece.length; ++i) {
      residual[i] = cast_finite<Residual>(v[i] - to_fp32(out[i]));
    }
  });
}

template <class Residual>
inline void write_tile(const EncodeJob& job, const Layout& layout, const Tile& tile, const float* v,
                       const uint32_t* largest) {
  const auto write = [&](auto* code) {
    using Code = std::remove_pointer_t<decltype(code)>;
    if (job.stochastic) return write_blocks<Code, true, Residual>(job, layout, tile, v, largest);
    return write_blocks<Code, false, Residual>(job, layout, tile, v, largest);
  };
  switch (job.format.code) {
    case kInt8: return write(static_cast<Int8*>(nullptr));
    case kInt4: return write(static_cast<Int4*>(nullptr));
    case kE2M1: return write(static_cast<E2M1*>(nullptr));
    case kE3M0: return write(static_cast<E3M0*>(nullptr));
    case kBins2: return write(static_cast<Bins2*>(nullptr));
    case kCastFp32: return write_cast<float, Residual>(job, tile, v);
    case kCastBf16: return write_cast<Bf16, Residual>(job, tile, v);
  }
}

inline void encode_tile(const EncodeJob& job, const Layout& layout, const Tile& tile) {
  with_residual_dtype(job.residual_dtype, [&](auto* dtype) {
    using Residual = std::remove_pointer_t<decltype(dtype)>;
    alignas(64) float v[kTileElements];
    uint32_t largest[kMaxBlocks];
    const int size = job.format.block_size == 0 ? kCastBlock : job.format.block_size;
    const Residual* residual = static_cast<const Residual*>(job.residual);
    prepare_tile(job, layout, tile, size, residual == nullptr ? nullptr : residual + tile.start, v, largest);
    write_tile<Residual>(job, layout, tile, v, largest);
  });
}

void encode(EncodeJob& job, int threads) {
  const Layout layout(job.format, job.spans.numel);
  for_tiles(job.spans.numel, threads, [&](const Tile& tile) { encode_tile(job, layout, tile); });
  job.norms = {0, 0, 0};
  for (int64_t i = 0; i < tiles_of(job.spans.numel); ++i) {
    const TileNorms& tile = job.tile_norms[i];
    job.norms.sum_of_squares += tile.sum_of_squares;
    job.norms.delta_bits = larger(job.norms.delta_bits, tile.delta_bits);
    job.norms.value_bits = larger(job.norms.value_bits, tile.value_bits);
  }
}

}  // namespace
