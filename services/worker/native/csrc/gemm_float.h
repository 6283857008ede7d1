// Blocks of a product in float32: what every level can do.
#pragma once

#include "gemm_layout.h"

namespace sl {

constexpr int kVectors = kLanes / VF;  // of one panel's sums

// How many rows and panels are computed at once: as many sums as there are registers for.
#if SL_LEVEL >= SL_AVX512
constexpr int kFloatRows = 6, kFloatPanels = 4;
#elif SL_LEVEL >= SL_AVX2
constexpr int kFloatRows = 6, kFloatPanels = 1;
#else
constexpr int kFloatRows = 2, kFloatPanels = 1;
#endif

// The weights of two inputs, 2 pair and 2 pair + 1, for VF outputs.
struct PairOfVectors {
    vf first, second;
};

inline PairOfVectors load_pair(const FloatStep& step, int pair, int vector) {
    return {load(step.values[2 * pair] + vector * VF), load(step.values[2 * pair + 1] + vector * VF)};
}

inline PairOfVectors load_pair(const Bf16Step& step, int pair, int vector) {
    vu both;
    std::memcpy(&both, step.pairs[pair][vector * VF], sizeof both);
    return {(vf)(both << 16), (vf)(both & 0xffff0000u)};
}

// sums[rows][panels * kLanes] of padded rows of x. Inputs are added one by one, in order, to one sum
// per output: a row's result is the same in blocks of any size.
template <class Step, int kRows, int kPanels>
inline void float_block(const float* x, int64_t x_stride, const uint8_t* panel, size_t panel_bytes,
                        int64_t num_steps, float* sums, int64_t sums_stride) {
    vf total[kRows][kPanels][kVectors] = {};
    for (int64_t s = 0; s < num_steps; ++s) {
        const float* inputs = x + s * kGroup;
        for (int pair = 0; pair < kGroup / 2; ++pair) {
#pragma GCC unroll 16
            for (int p = 0; p < kPanels; ++p) {
                const auto& step = reinterpret_cast<const Step*>(panel + p * panel_bytes)[s];
#pragma GCC unroll 16
                for (int v = 0; v < kVectors; ++v) {
                    const PairOfVectors weights = load_pair(step, pair, v);
#pragma GCC unroll 16
                    for (int r = 0; r < kRows; ++r) {
                        const float* at = inputs + r * x_stride + 2 * pair;
                        total[r][p][v] += weights.first * at[0];
                        total[r][p][v] += weights.second * at[1];
                    }
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) {
                store(sums + r * sums_stride + p * kLanes + v * VF, total[r][p][v]);
            }
        }
    }
}

// The same for any number of rows up to kFloatRows.
template <class Step, int kPanels, int kRows = kFloatRows>
inline void float_rows(int64_t rows, const float* x, int64_t x_stride, const uint8_t* panel,
                       size_t panel_bytes, int64_t num_steps, float* sums, int64_t sums_stride) {
    if (rows == kRows) {
        float_block<Step, kRows, kPanels>(x, x_stride, panel, panel_bytes, num_steps, sums,
                                          sums_stride);
    } else if constexpr (kRows > 1) {
        float_rows<Step, kPanels, kRows - 1>(rows, x, x_stride, panel, panel_bytes, num_steps, sums,
                                             sums_stride);
    }
}

}  // namespace sl
