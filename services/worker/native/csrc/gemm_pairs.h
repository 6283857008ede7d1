// Blocks of a product with AVX-512-BF16 dot products of pairs.
#pragma once

#include "gemm_layout.h"

#if SL_LEVEL >= SL_AVX512_BF16

namespace sl {

constexpr int kPairRows = 6, kPairPanels = 4;

inline __m512bh broadcast_pair(const bf16* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

// sums[rows][panels * kLanes] of padded rows of x; pairs are added in order, one sum per output.
template <int kRows, int kPanels>
inline void pairs_block(const bf16* x, int64_t x_stride, const uint8_t* panel, size_t panel_bytes,
                        int64_t num_steps, float* sums, int64_t sums_stride) {
    __m512 total[kRows][kPanels];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; ++p) total[r][p] = _mm512_setzero_ps();
    }
    const int64_t num_pairs = num_steps * (kGroup / 2);
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        __m512bh weights[kPanels];
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; ++p) {
            weights[p] = (__m512bh)_mm512_loadu_si512(panel + p * panel_bytes + pair * 64);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const __m512bh inputs = broadcast_pair(x + r * x_stride + 2 * pair);
#pragma GCC unroll 8
            for (int p = 0; p < kPanels; ++p) {
                total[r][p] = _mm512_dpbf16_ps(total[r][p], inputs, weights[p]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; ++p) {
            _mm512_storeu_ps(sums + r * sums_stride + p * kLanes, total[r][p]);
        }
    }
}

// The same for any number of rows up to kPairRows.
template <int kPanels, int kRows = kPairRows>
inline void pairs_rows(int64_t rows, const bf16* x, int64_t x_stride, const uint8_t* panel,
                       size_t panel_bytes, int64_t num_steps, float* sums, int64_t sums_stride) {
    if (rows == kRows) {
        pairs_block<kRows, kPanels>(x, x_stride, panel, panel_bytes, num_steps, sums, sums_stride);
    } else if constexpr (kRows > 1) {
        pairs_rows<kPanels, kRows - 1>(rows, x, x_stride, panel, panel_bytes, num_steps, sums,
                                       sums_stride);
    }
}

}  // namespace sl
#endif
