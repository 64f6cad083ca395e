// How a range is walked: tile by tile over the threads, and inside a tile piece by piece of the spans.
#pragma once

#include <cstdint>

#include "floats.h"
#include "library.h"
#include "simd.h"

namespace {

struct Tile {
  int64_t index;
  int64_t start;  // in the range
  int64_t length;
};

inline int64_t tiles_of(int64_t numel) { return (numel + kTileElements - 1) / kTileElements; }

inline Tile tile_at(int64_t index, int64_t numel) {
  const int64_t start = index * kTileElements;
  return {index, start, smaller(kTileElements, numel - start)};
}

// Calls work(tile) for every tile. Tiles share nothing, so who works on which does not matter; threads take runs of
// tiles, which keeps fetching ahead in order, and enough of them to even out a thread that the machine has held up.
template <class Work>
inline void for_tiles(int64_t numel, int threads, const Work& work) {
  const int64_t tiles = tiles_of(numel);
  if (threads == 1 || tiles == 1) {
    const FloatMode mode;
    for (int64_t i = 0; i < tiles; ++i) work(tile_at(i, numel));
    finish_streams();
    return;
  }
  const int64_t run = larger(int64_t(1), smaller(int64_t(32), tiles / (8 * threads)));
#pragma omp parallel num_threads(int(smaller(int64_t(threads), tiles)))
  {
    const FloatMode mode;
#pragma omp for schedule(dynamic, run) nowait
    for (int64_t i = 0; i < tiles; ++i) work(tile_at(i, numel));
    finish_streams();
  }
}

// The part of a span that lies in a tile.
struct Piece {
  int64_t offset;  // in the tile
  int64_t length;
  int64_t span;
  int64_t value;  // first element, in the span
};

// Calls work(piece) for every piece of a tile, in order.
template <class Work>
inline void for_pieces(const Spans& spans, const Tile& tile, const Work& work) {
  int64_t first = 0;
  for (int64_t end = spans.count; first < end;) {  // the first span that stops after the tile's start
    const int64_t middle = (first + end) / 2;
    if (spans.stops[middle] > tile.start) {
      end = middle;
    } else {
      first = middle + 1;
    }
  }
  const int64_t tile_stop = tile.start + tile.length;
  for (int64_t i = first; i < spans.count && spans.starts[i] < tile_stop; ++i) {
    const int64_t start = larger(spans.starts[i], tile.start);
    const int64_t stop = smaller(spans.stops[i], tile_stop);
    if (start < stop) work(Piece{start - tile.start, stop - start, i, start - spans.starts[i]});
  }
}

// Calls work(start, stop) for every part of a tile, up to `length` elements, in which no span lies.
template <class Work>
inline void for_gaps(const Spans& spans, const Tile& tile, int64_t length, const Work& work) {
  int64_t done = 0;
  for_pieces(spans, tile, [&](const Piece& piece) {
    if (done < piece.offset) work(done, piece.offset);
    done = piece.offset + piece.length;
  });
  if (done < length) work(done, length);
}

// Zeros wherever no span lies, up to `length` elements: a tile's last block may reach beyond the range.
inline void clear_gaps(const Spans& spans, const Tile& tile, float* tile_values, int64_t length) {
  for_gaps(spans, tile, length, [&](int64_t start, int64_t stop) {
    memset(tile_values + start, 0, sizeof(float) * (stop - start));
  });
}

// Has the lines of `bytes` bytes brought near; it does no harm where there is no memory.
template <bool kToWrite>
inline void fetch(const void* from, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, kToWrite, 2);
  asm volatile("");  // or g++ takes this for a function without effect, and leaves calls out
}

// Calls work(pointer to the dtype's C++ type), so that one loop serves all dtypes.
template <class Work>
inline void with_dtype(int32_t dtype, const Work& work) {
  switch (dtype) {
    case kFp32: return work(static_cast<float*>(nullptr));
    case kBf16: return work(static_cast<Bf16*>(nullptr));
    case kFp16: return work(static_cast<Fp16*>(nullptr));
  }
}

template <class Work>
inline void with_residual_dtype(int32_t dtype, const Work& work) {
  if (dtype == kFp32) return work(static_cast<float*>(nullptr));
  return work(static_cast<Bf16*>(nullptr));
}

}  // namespace
