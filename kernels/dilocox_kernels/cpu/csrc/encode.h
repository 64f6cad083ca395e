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

// v of the first `count` elements of a block, and their norms. Without an anchor Δ is the value, without a residual v is
// Δ. Returns the bits of the largest |v|.
template <class Value, class Residual>
inline uint32_t prepare_block(const float* anchor, const Value* values, const Residual* residual, float decay, int count,
                              float* v, LaneNorms& norms) {
  LaneNorms of_block = norms;
  of_block.value = I{};
  for (int i = 0; i < count; i += kStep) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const int at = i + part * kLanes, left = count - at;
      F delta = load(values + at, left);
      if (anchor != nullptr) delta = load(anchor + at, left) - delta;
      const F sent = residual == nullptr ? delta : decay * load(residual + at, left) + delta;
      store_finite(v + at, sent, left);
      add_squares(delta, of_block.sums + 2 * part);
      of_block.delta = larger(of_block.delta, (I)magnitude(delta));
      of_block.value = larger(of_block.value, (I)magnitude(sent));
    }
  }
  const uint32_t largest = uint32_t(largest_lane(of_block.value));
  of_block.value = larger(of_block.value, norms.value);
  norms = of_block;
  return largest;
}

inline TileNorms total(const LaneNorms& norms) {
  double lanes[kStep];
  memcpy(lanes, norms.sums, sizeof lanes);
  double sum = 0;
  for (int i = 0; i < kStep; ++i) sum += lanes[i];
  return {sum, uint32_t(largest_lane(norms.delta)), uint32_t(largest_lane(norms.value))};
}

// What the second pass knows of a tile's blocks; zeros for those that no span touches.
struct Blocks {
  uint32_t largest[kMaxBlocks] = {};  // bits of the largest |v|
  int32_t counts[kMaxBlocks] = {};    // elements in spans
  const void* values[kMaxBlocks] = {};
};

// First pass: v of the blocks that spans touch, and the largest |v| and the number of elements of every block.
template <class Residual>
inline void prepare_tile(const EncodeJob& job, const Layout& layout, const Tile& tile, int size, Blocks& blocks, float* v,
                         const Residual* residual) {
  LaneNorms norms;
  const auto prepare = [&](const Block& block, const float* anchor, const auto* values) {
    const Residual* kept = residual == nullptr ? nullptr : residual + block.offset;
    blocks.largest[block.index] = prepare_block(anchor, values, kept, job.decay, block.count, v + block.offset, norms);
    blocks.counts[block.index] = block.count;
    blocks.values[block.index] = values;
  };
  if (job.bodies.count > 0) {
    merge_tile(job.format, layout, job.bodies, tile, v);
    for_blocks(job.spans, tile, size, [&](const Block& block) { prepare(block, nullptr, v + block.offset); });
  } else {
    const float* anchor = job.anchor == nullptr ? nullptr : job.anchor + tile.start;
    with_dtype(job.spans.values_dtype, [&](auto* dtype) {
      for_blocks(job.spans, tile, size, [&](const Block& block) {
        const auto* values = static_cast<decltype(dtype)>(job.spans.values[block.span]) + block.value;
        prepare(block, anchor == nullptr ? nullptr : anchor + block.offset, values);
      });
    });
  }
  clear_gaps(job.spans, tile, v, (tile.length + size - 1) / size * size);
  job.tile_norms[tile.index] = total(norms);
}

// The scales that blocks want.
template <class Code>
inline void wanted_scales(const Format& format, const float* v, const Blocks& blocks, int count, float* wanted) {
  if constexpr (Code::kAbsmax) {
    for (int i = 0; i < count; ++i) {
      wanted[i] = smaller(from_bits(blocks.largest[i]) / float(Code::kTop), format.max_scale);
    }
  } else {
    int32_t sums[kMaxBlocks];
    for (int i = 0; i < count; ++i) {
      const float largest = from_bits(blocks.largest[i]);
      sums[i] = largest == 0 ? 0 : sum_of_square_steps(v + i * format.block_size, format.block_size, largest);
    }
    for (int i = 0; i < count; ++i) {
      const float root = __builtin_sqrtf(float(sums[i]) / float(larger(blocks.counts[i], 1)));
      wanted[i] = smaller(root * float(0.4528 / 2047) * from_bits(blocks.largest[i]), format.max_scale);
    }
  }
}

// Random words of the elements around a block, made for some blocks at once.
class RandomWords {
 public:
  RandomWords(const EncodeJob& job, const Tile& tile) : job_(job), tile_(tile) {}

  // Of the elements from `offset` of the tile on, a block of them; what fills up the range's last block has zeros.
  const uint32_t* at(int offset) {
    const int batch = offset / kBatch * kBatch;
    if (batch != batch_) {
      const uint64_t first = uint64_t(job_.start + tile_.start + batch) / 4;
      for (int i = 0; i < kBatch / 4; i += kCounters) philox(job_.key, job_.round, first + i, words_ + 4 * i);
      for (int64_t i = larger(tile_.length - batch, int64_t(0)); i < kBatch; ++i) words_[i] = 0;
      batch_ = batch;
    }
    return words_ + (offset - batch);
  }

 private:
  static constexpr int kBatch = 256;  // whole blocks of any size
  const EncodeJob& job_;
  const Tile& tile_;
  int batch_ = -1;
  alignas(64) uint32_t words_[kBatch];
};

// Has the inputs of the next tile's block brought near, and where its residual goes.
__attribute__((always_inline)) inline void fetch_ahead(const EncodeJob& job, const Tile& tile, const void* values, int offset, int size) {
  const int64_t ahead = tile.start + kTileElements + offset;
  const int residual_bytes = job.residual_dtype == kFp32 ? 4 : 2, value_bytes = job.spans.values_dtype == kFp32 ? 4 : 2;
  if (job.anchor != nullptr) fetch<false>(job.anchor + ahead, 4 * size);
  if (job.bodies.count == 0) fetch<false>(static_cast<const char*>(values) + kTileElements * value_bytes, value_bytes * size);
  if (job.residual != nullptr) {
    fetch<false>(static_cast<const char*>(job.residual) + residual_bytes * ahead, residual_bytes * size);
  }
  if (job.residual_out != nullptr) {
    fetch<true>(static_cast<const char*>(job.residual_out) + residual_bytes * ahead, residual_bytes * size);
  }
}

// Second pass: scales, codes and what was not sent.
template <class Code, bool kStochastic, class Residual>
inline void write_blocks(const EncodeJob& job, const Layout& layout, const Tile& tile, const Blocks& blocks,
                         const float* v, Residual* residual) {
  const int size = job.format.block_size;
  const int count = int((tile.length + size - 1) / size);
  alignas(64) float scales[kMaxBlocks];
  wanted_scales<Code>(job.format, v, blocks, count, scales);
  write_scales<Code::kAbsmax>(job.format, layout, job.out, tile, count, scales);
  read_scales(job.format, layout, job.out, tile, count, scales);
  uint8_t* codes = job.out + tile.start * Code::kBits / 8;
  const int code_bytes = size * Code::kBits / 8;
  RandomWords random(job, tile);
  for (int i = 0; i < count; ++i) {
    const int offset = i * size;
    Residual* kept = residual == nullptr ? nullptr : residual + offset;
    const uint32_t* words = nullptr;
    if constexpr (kStochastic) words = random.at(offset);
    fetch_ahead(job, tile, blocks.values[i], offset, size);
    quantise_block<Code, kStochastic>(v + offset, scales[i], words, size, blocks.counts[i], codes + i * code_bytes, kept);
  }
}

template <class Element, class Residual>
inline void write_cast(const EncodeJob& job, const Tile& tile, const float* v, Residual* residual) {
  Element* out = reinterpret_cast<Element*>(job.out) + tile.start;
  for (int64_t i = 0; i < tile.length; ++i) out[i] = cast_finite<Element>(v[i]);
  if (residual == nullptr) return;
  for_pieces(job.spans, tile, [&](const Piece& piece) {
    for (int64_t i = piece.offset; i < piece.offset + piece.length; ++i) {
      residual[i] = cast_finite<Residual>(v[i] - to_fp32(out[i]));
    }
  });
}

template <class Residual>
inline void write_tile(const EncodeJob& job, const Layout& layout, const Tile& tile, const Blocks& blocks, float* v,
                       Residual* residual) {
  const auto write = [&](auto* code) {
    using Code = std::remove_pointer_t<decltype(code)>;
    if (job.stochastic) return write_blocks<Code, true>(job, layout, tile, blocks, v, residual);
    return write_blocks<Code, false>(job, layout, tile, blocks, v, residual);
  };
  switch (job.format.code) {
    case kInt8: return write(static_cast<Int8*>(nullptr));
    case kInt4: return write(static_cast<Int4*>(nullptr));
    case kE2M1: return write(static_cast<E2M1*>(nullptr));
    case kE3M0: return write(static_cast<E3M0*>(nullptr));
    case kBins2: return write(static_cast<Bins2*>(nullptr));
    case kCastFp32: return write_cast<float>(job, tile, v, residual);
    case kCastBf16: return write_cast<Bf16>(job, tile, v, residual);
  }
}

inline void encode_tile(const EncodeJob& job, const Layout& layout, const Tile& tile) {
  with_residual_dtype(job.residual_dtype, [&](auto* dtype) {
    using Residual = std::remove_pointer_t<decltype(dtype)>;
    const auto here = [&](const void* flat) -> const Residual* {
      return flat == nullptr ? nullptr : static_cast<const Residual*>(flat) + tile.start;
    };
    alignas(64) float v[kTileElements];
    Blocks blocks;
    const bool is_cast = job.format.block_size == 0;
    prepare_tile(job, layout, tile, is_cast ? kCastBlock : job.format.block_size, blocks, v, here(job.residual));
    write_tile(job, layout, tile, blocks, v, const_cast<Residual*>(here(job.residual_out)));
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
