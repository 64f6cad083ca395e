// What the library exports: the levels of instructions it has, and each operation at one of them.

#include "library.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__x86_64__)
extern const Kernels kernels_x86_64_v4, kernels_x86_64_v3, kernels_x86_64;
#else
extern const Kernels kernels_aarch64;
#endif

namespace {

bool always() { return true; }

#if defined(__x86_64__)
#define HAS(feature) (__builtin_cpu_supports(feature) != 0)

// By their parts: g++ 11 does not know the levels by name.
bool has_v3() {
  return HAS("avx2") && HAS("bmi") && HAS("bmi2") && HAS("f16c") && HAS("fma") && HAS("lzcnt") && HAS("movbe");
}

bool has_v4() {
  return has_v3() && HAS("avx512f") && HAS("avx512bw") && HAS("avx512cd") && HAS("avx512dq") && HAS("avx512vl");
}
#endif

struct Level {
  const char* name;
  bool (*runs_here)();
  const Kernels* kernels;
};

// Best first.
const Level kLevels[] = {
#if defined(__x86_64__)
    {"x86-64-v4", has_v4, &kernels_x86_64_v4},
    {"x86-64-v3", has_v3, &kernels_x86_64_v3},
    {"x86-64", always, &kernels_x86_64},
#else
    {"aarch64", always, &kernels_aarch64},
#endif
    {nullptr, nullptr, nullptr},
};

}  // namespace

EXPORT int32_t dilocox_abi_version() { return kAbiVersion; }

// The name of a level, or null after the last.
EXPORT const char* dilocox_level_name(int32_t level) { return kLevels[level].name; }

EXPORT int32_t dilocox_level_runs_here(int32_t level) { return kLevels[level].runs_here(); }

EXPORT void dilocox_encode(int32_t level, EncodeJob* job, int32_t threads) {
  kLevels[level].kernels->encode(*job, threads);
}

EXPORT void dilocox_decode_accumulate(int32_t level, const DecodeJob* job, int32_t threads) {
  kLevels[level].kernels->decode_accumulate(*job, threads);
}

EXPORT void dilocox_outer_step(int32_t level, OuterStepJob* job, int32_t threads) {
  kLevels[level].kernels->outer_step(*job, threads);
}

EXPORT uint64_t dilocox_checksum(int32_t level, const uint8_t* bytes, int64_t length, int64_t start, int32_t threads) {
  return kLevels[level].kernels->checksum(bytes, length, start, threads);
}
