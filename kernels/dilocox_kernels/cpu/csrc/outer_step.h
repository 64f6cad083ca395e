// The merge, the outer optimiser and the way back into the local weights, in one pass; and checksums.
#pragma once

#include "floats.h"
#include "library.h"
#include "merge.h"
#include "tiles.h"

namespace {

void decode_accumulate(const DecodeJob& job, int threads) {
  const Layout layout(job.format, job.spans.numel);
  for_tiles(job.spans.numel, threads, [&](const Tile& tile) {
    alignas(64) float last[kTileElements];  // whole blocks are written: those of the last tile may not fit
    float* out = job.out + tile.start;
    float* sums = tile.length == kTileElements ? out : last;
    merge_tile(job.format, layout, job.bodies, tile, sums,
               [&](int offset, int length) { fetch<true>(sums + kTileElements + offset, int(sizeof(float)) * length); });
    clear_gaps(job.spans, tile, sums, tile.length);
    if (sums == last) memcpy(out, last, sizeof(float) * tile.length);
  });
}

// Moves the anchor and the momentum of a piece against Δ.
template <int32_t kRule>
inline void step(const float* __restrict delta, int64_t length, float lr, float mu, float* __restrict anchor,
                 float* __restrict momentum) {
  for (int64_t i = 0; i < length; ++i) {
    float direction = delta[i];
    if constexpr (kRule != kSgd) {
      const float moved = mu * momentum[i] + delta[i];
      momentum[i] = moved;
      direction = kRule == kNesterov ? delta[i] + moved * mu : moved;
    }
    anchor[i] = anchor[i] - lr * direction;
  }
}

template <class Value>
inline void apply(const float* __restrict anchor, int64_t length, float local_weight, float anchor_weight,
                  Value* __restrict values) {
  if (local_weight == 0) {
    for (int64_t i = 0; i < length; ++i) values[i] = cast<Value>(anchor[i]);
  } else {
    for (int64_t i = 0; i < length; ++i) {
      values[i] = cast<Value>(local_weight * to_fp32(values[i]) + anchor_weight * anchor[i]);
    }
  }
}

// Σ word · (2 position + 1 mod 2^32) mod 2^64. Words of whatever alignment.
inline uint64_t weighted_sum(const uint8_t* __restrict words, int64_t count, int64_t start) {
  const uint32_t first = uint32_t(2 * uint64_t(start) + 1);
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t word;
    memcpy(&word, words + 4 * i, sizeof word);
    sum += uint64_t(word) * (first + 2 * uint32_t(i));
  }
  return sum;
}

inline void step_piece(const OuterStepJob& job, const float* delta, int64_t length, float* anchor, float* momentum) {
  switch (job.rule) {
    case kSgd: return step<kSgd>(delta, length, job.lr, job.mu, anchor, momentum);
    case kMomentum: return step<kMomentum>(delta, length, job.lr, job.mu, anchor, momentum);
    case kNesterov: return step<kNesterov>(delta, length, job.lr, job.mu, anchor, momentum);
  }
}

inline uint64_t step_tile(const OuterStepJob& job, const Layout& layout, const Tile& tile) {
  alignas(64) float delta[kTileElements];
  merge_tile(job.format, layout, job.bodies, tile, delta, [&](int offset, int length) {
    fetch<true>(job.anchor + tile.start + offset, int(sizeof(float)) * length);
    if (job.momentum != nullptr) fetch<true>(job.momentum + tile.start + offset, int(sizeof(float)) * length);
  });
  uint64_t checksum = 0;
  with_dtype(job.spans.values_dtype, [&](auto* dtype) {
    for_pieces(job.spans, tile, [&](const Piece& piece) {
      const int64_t place = tile.start + piece.offset;
      float* anchor = job.anchor + place;
      step_piece(job, delta + piece.offset, piece.length, anchor,
                 job.momentum == nullptr ? nullptr : job.momentum + place);
      auto* values = static_cast<decltype(dtype)>(job.spans.values[piece.span]) + piece.value;
      apply(anchor, piece.length, job.local_weight, job.anchor_weight, values);
      checksum += weighted_sum(reinterpret_cast<const uint8_t*>(anchor), piece.length, job.start + place);
    });
  });
  return checksum;
}

void outer_step(OuterStepJob& job, int threads) {
  const Layout layout(job.format, job.spans.numel);
  for_tiles(job.spans.numel, threads,
            [&](const Tile& tile) { job.tile_sums[tile.index] = step_tile(job, layout, tile); });
  job.checksum = 0;
  for (int64_t i = 0; i < tiles_of(job.spans.numel); ++i) job.checksum += job.tile_sums[i];
}

// Of `length` bytes, the last word filled up with zeros; `start` is the position of the first word.
uint64_t checksum(const uint8_t* bytes, int64_t length, int64_t start, int threads) {
  const int64_t words = length / 4;
  uint64_t sum = 0;
  for_tiles(words, threads, [&](const Tile& tile) {
    const uint64_t part = weighted_sum(bytes + 4 * tile.start, tile.length, start + tile.start);
    __atomic_fetch_add(&sum, part, __ATOMIC_RELAXED);
  });
  uint8_t tail[4] = {};
  memcpy(tail, bytes + 4 * words, length - 4 * words);
  return sum + weighted_sum(tail, 1, start + words);
}

}  // namespace
