// The plain C interface of the library. `cpu/library.py` mirrors these structures field by field.
//
// Everything is checked by the Python side before a call. Lengths, starts and stops count elements; spans are ascending,
// disjoint and start at multiples of the block size. Buffers of the caller are never kept after a call.
#pragma once

#include <cstdint>

// Changes with every change of this file; the Python side refuses another.
constexpr int32_t kAbiVersion = 1;

// Elements that are worked on in one go and whose sums are added up in order: also a group of e4m4 scales.
constexpr int64_t kTileElements = 4096;

enum Code : int32_t { kInt8 = 0, kInt4, kE2M1, kE3M0, kBins2, kCastFp32, kCastBf16 };
enum ScaleKind : int32_t { kScaleFp16 = 0, kScaleBf16, kScaleFp32, kScaleE4M4 };
enum Dtype : int32_t { kFp32 = 0, kBf16, kFp16 };
enum Rule : int32_t { kSgd = 0, kMomentum, kNesterov };

struct Format {
  int32_t code;        // Code
  int32_t scale_kind;  // ScaleKind; casts: unused
  int32_t block_size;  // elements; casts: 0
  float max_scale;
};

struct Spans {
  int64_t numel;  // of the range
  int64_t count;
  const int64_t* starts;
  const int64_t* stops;
  void* const* values;   // one pointer a span, or null where no operation needs them
  int32_t values_dtype;  // Dtype
};

// What islands sent: `count` bodies of the whole range, and the weight of each.
struct Bodies {
  int64_t count;
  const uint8_t* const* bodies;
  const float* weights;
};

struct TileNorms {
  double sum_of_squares;
  uint32_t delta_bits;  // of the largest |Δ|
  uint32_t value_bits;  // of the largest |v|; from 0x7F800000 on: not finite
};

// v = Δ + decay · residual; Δ = anchor − value, or value without an anchor, or with bodies their merge.
struct EncodeJob {
  Format format;
  Spans spans;
  Bodies bodies;       // count 0: Δ comes from the values
  const float* anchor;
  const void* residual;    // null: v = Δ
  void* residual_out;      // null: what was not sent is dropped
  int32_t residual_dtype;  // Dtype of both
  float decay;
  int32_t stochastic;
  uint64_t key;
  uint32_t round;
  int64_t start;  // position of the range, which random words depend on
  uint8_t* out;
  TileNorms* tile_norms;  // scratch: one a tile
  TileNorms norms;        // result: of the range
};

struct DecodeJob {
  Format format;
  Spans spans;
  Bodies bodies;
  float* out;
};

struct OuterStepJob {
  Format format;
  Spans spans;
  Bodies bodies;
  float* anchor;
  float* momentum;
  int32_t rule;  // Rule
  float lr;
  float mu;
  float local_weight;   // fp32(α); 0: values are overwritten
  float anchor_weight;  // fp32(1 − α)
  int64_t start;        // position of the range, which the checksum depends on
  uint64_t* tile_sums;  // scratch: one a tile
  uint64_t checksum;    // result
};

// `threads` is the number of threads to use; results do not depend on it.
struct Kernels {
  void (*encode)(EncodeJob& job, int threads);
  void (*decode_accumulate)(const DecodeJob& job, int threads);
  void (*outer_step)(OuterStepJob& job, int threads);
  uint64_t (*checksum)(const uint8_t* bytes, int64_t length, int64_t start, int threads);
};
