// v = Δ + decay · residual, tile by tile: encoded, and what was not sent kept.
#pragma once

#include "floats.h"
#include "library.h"
#include "merge.h"
#include "quantise.h"
#include "tiles.h"

namespace {

// Δ of a piece into `delta`: anchor − value, or the value itself.
template <class Value>
inline void difference(const float* __restrict anchor, const Value* __restrict values, int64_t length,
                       float* __restrict delta) {
  if (anchor == nullptr) {
    for (int64_t i = 0; i < length; ++i) delta[i] = to_fp32(values[i]);
  } else {
    for (int64_t i = 0; i < length; ++i) delta[i] = anchor[i] - to_fp32(values[i]);
  }
}

template <class Residual>
inline void add_residual(const Residual* __restrict residual, float decay, int64_t length, float* __restrict v) {
  for (int64_t i = 0; i < length; ++i) v[i] = decay * to_fp32(residual[i]) + v[i];
}

template <class Residual>
inline void keep_residual(const float* __restrict v, int64_t length, Residual* __restrict residual) {
  for (int64_t i = 0; i < length; ++i) residual[i] = cast_finite<Residual>(v[i]);
}

// Of a whole tile, whose gaps are zeros; `length` is a multiple of 32. Sums go lane by lane, so that their order is
// the same whatever the width of the vectors.
inline void measure(const float* __restrict delta, int64_t length, TileNorms& norms) {
  constexpr int kLanes = 16;
  double sums[kLanes] = {};
  int32_t largest[kLanes] = {};
  for (int64_t chunk = 0; chunk < length; chunk += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      const double value = delta[chunk + i];
      sums[i] += value * value;
    }
    for (int i = 0; i < kLanes; ++i) {
      const int32_t bits = int32_t(bits_of(delta[chunk + i]) & kAbsMask);
      largest[i] = larger(bits, largest[i]);
    }
  }
  norms.sum_of_squares = 0;
  norms.delta_bits = 0;
  for (int i = 0; i < kLanes; ++i) {
    norms.sum_of_squares += sums[i];
    norms.delta_bits = larger(norms.delta_bits, uint32_t(largest[i]));
  }
}

// What there is of Δ in a tile, zeros in gaps and up to `padded` elements.
inline void load_delta(const EncodeJob& job, const Layout& layout, const Tile& tile, int64_t padded, float* delta) {
  if (job.bodies.count > 0) {
    merge_tile(job.format, layout, job.bodies, tile, delta);
  } else {
    with_dtype(job.spans.values_dtype, [&](auto* dtype) {
      for_pieces(job.spans, tile, [&](const Piece& piece) {
        const auto* values = static_cast<decltype(dtype)>(job.spans.values[piece.span]) + piece.value;
        const float* anchor = job.anchor == nullptr ? nullptr : job.anchor + tile.start + piece.offset;
        difference(anchor, values, piece.length, delta + piece.offset);
      });
    });
  }
  clear_gaps(job.spans, tile, delta, padded);
}

template <class Element>
inline uint32_t cast_tile(const EncodeJob& job, const Tile& tile, float* __restrict v) {
  Element* __restrict out = reinterpret_cast<Element*>(job.out) + tile.start;
  uint32_t largest;
  largest_of_blocks(v, 1, int((tile.length + kChunk - 1) / kChunk * kChunk), &largest);
  for (int64_t i = 0; i < tile.length; ++i) {
    out[i] = cast_finite<Element>(v[i]);
    v[i] -= to_fp32(out[i]);
  }
  return largest;
}

template <class Code>
inline uint32_t round_tile(const EncodeJob& job, const Tile& tile, const int32_t* counts, float* v) {
  return job.stochastic ? quantise_tile<Code, true>(job, tile, counts, v)
                        : quantise_tile<Code, false>(job, tile, counts, v);
}

inline uint32_t write_tile(const EncodeJob& job, const Tile& tile, const int32_t* counts, float* v) {
  switch (job.format.code) {
    case kInt8: return round_tile<Int8>(job, tile, counts, v);
    case kInt4: return round_tile<Int4>(job, tile, counts, v);
    case kE2M1: return round_tile<E2M1>(job, tile, counts, v);
    case kE3M0: return round_tile<E3M0>(job, tile, counts, v);
    case kBins2: return round_tile<Bins2>(job, tile, counts, v);
    case kCastFp32: return cast_tile<float>(job, tile, v);
    default: return cast_tile<Bf16>(job, tile, v);
  }
}

// How many elements of each block lie in spans; no two spans share a block.
inline void count_elements(const EncodeJob& job, const Tile& tile, int32_t* counts) {
  memset(counts, 0, sizeof(int32_t) * kMaxBlocks);
  const int64_t size = job.format.block_size;
  for_pieces(job.spans, tile, [&](const Piece& piece) {
    for (int64_t i = 0; i < piece.length; i += size) {
      counts[(piece.offset + i) / size] = int32_t(smaller(size, piece.length - i));
    }
  });
}

inline void encode_tile(const EncodeJob& job, const Layout& layout, const Tile& tile) {
  alignas(64) float v[kTileElements];
  const int64_t block = larger(job.format.block_size, int32_t(kChunk));
  load_delta(job, layout, tile, (tile.length + block - 1) / block * block, v);
  TileNorms& norms = job.tile_norms[tile.index];
  measure(v, (tile.length + kChunk - 1) / kChunk * kChunk, norms);
  if (job.residual != nullptr) {
    with_residual_dtype(job.residual_dtype, [&](auto* dtype) {
      const auto* residual = static_cast<decltype(dtype)>(const_cast<void*>(job.residual)) + tile.start;
      for_pieces(job.spans, tile, [&](const Piece& piece) {
        add_residual(residual + piece.offset, job.decay, piece.length, v + piece.offset);
      });
    });
  }
  int32_t counts[kMaxBlocks];
  if (job.format.code == kBins2) count_elements(job, tile, counts);
  norms.value_bits = write_tile(job, tile, counts, v);
  if (job.residual_out != nullptr) {
    with_residual_dtype(job.residual_dtype, [&](auto* dtype) {
      auto* residual = static_cast<decltype(dtype)>(job.residual_out) + tile.start;
      for_pieces(job.spans, tile, [&](const Piece& piece) {
        keep_residual(v + piece.offset, piece.length, residual + piece.offset);
      });
    });
  }
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
