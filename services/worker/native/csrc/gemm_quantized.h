// Weights of 8 and 4 bits: widened for the kernels of other formats, or multiplied as they are.
#pragma once

#include <array>

#include "gemm_layout.h"

namespace sl {

// Vectors of one panel's lanes.
constexpr int kLaneVectors = kLanes / VF;

inline vf load_half(const uint16_t* p) {
#if SL_LEVEL >= SL_AVX512
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (vf)_mm512_maskz_cvtph_ps(0xffff, half);
#elif SL_LEVEL >= SL_AVX2
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    vh half;
    std::memcpy(&half, p, sizeof half);
    const vu bits = __builtin_convertvector(half, vu);
    const vf magnitude = (vf)((bits & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)magnitude | (bits & 0x8000) << 16);
#endif
}

// The stored value of an input of the step, for VF lanes.
inline vf stored(const Int8Step& step, int input, int vector) {
    const int8_t* const values = step.values[input] + vector * VF;
#if SL_LEVEL >= SL_AVX512
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    return __builtin_convertvector((vi)_mm512_maskz_cvtepi8_epi32(0xffff, bytes), vf);
#elif SL_LEVEL >= SL_AVX2
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values));
    return __builtin_convertvector((vi)_mm256_cvtepi8_epi32(bytes), vf);
#else
    vf result;
    for (int i = 0; i < VF; ++i) result[i] = values[i];
    return result;
#endif
}

inline vf stored(const Int4Step& step, int input, int vector) {
    vi words;
    std::memcpy(&words, step.words[input / 8] + vector * VF, sizeof words);
    const int shift = input % 8 / 2 * 4 + input % 2 * 16;
    return __builtin_convertvector((words >> shift) & 15, vf);
}

// weight = scale * stored + least.
inline vf scale_of(const Int8Step& step, int vector) { return load_half(step.scale + vector * VF); }
inline vf scale_of(const Int4Step& step, int vector) { return load_half(step.scale + vector * VF); }
inline vf least_of(const Int8Step&, int) { return vf{}; }
inline vf least_of(const Int4Step& step, int vector) { return load_half(step.least + vector * VF); }

template <class Step>
inline void widen(const Step& from, FloatStep& to) {
    for (int v = 0; v < kLaneVectors; ++v) {
        const vf scale = scale_of(from, v), least = least_of(from, v);
#pragma GCC unroll 32
        for (int i = 0; i < kGroup; ++i) {
            store(to.values[i] + v * VF, stored(from, i, v) * scale + least);
        }
    }
}

#if SL_LEVEL >= SL_AVX512_BF16
// Weights rounded to bfloat16.
template <class Step>
inline void widen(const Step& from, Bf16Step& to) {
    // cvtne2ps puts all first inputs below all second ones; pairs alternate.
    alignas(64) static constexpr uint16_t kAlternate[32] = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i alternate = _mm512_load_si512(kAlternate);
    const vf scale = scale_of(from, 0), least = least_of(from, 0);
#pragma GCC unroll 16
    for (int pair = 0; pair < kGroup / 2; ++pair) {
        const vf first = stored(from, 2 * pair, 0) * scale + least;
        const vf second = stored(from, 2 * pair + 1, 0) * scale + least;
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        _mm512_store_si512(to.pairs[pair], _mm512_permutexvar_epi16(alternate, both));
    }
}
#endif

template <class From, class To>
inline void widen_panel(const uint8_t* from, uint8_t* to, int64_t num_steps) {
    for (int64_t s = 0; s < num_steps; ++s) {
        widen(reinterpret_cast<const From*>(from)[s], reinterpret_cast<To*>(to)[s]);
    }
}

// Sum of each step's inputs of a padded row: what `least` is multiplied with.
template <class T>
inline void sum_steps(const T* x, int64_t num_steps, float* sums) {
    for (int64_t s = 0; s < num_steps; ++s) {
        vf total = {};
        for (int i = 0; i < kGroup; i += VF) total += load(x + s * kGroup + i);
        sums[s] = hsum(total);
    }
}

// sums[rows][kLanes] of one panel. Values are multiplied as they are stored, and each step's sum is
// scaled once: nothing is rounded but float32 sums.
template <class Step, int kRows>
inline void direct_panel(const float* x, int64_t x_stride, const float* step_sums,
                         const uint8_t* panel, int64_t num_steps, float* sums,
                         int64_t sums_stride) {
    constexpr int kChains = 4;  // an addition waits for the one before
    for (int v = 0; v < kLaneVectors; ++v) {
        vf total[kRows] = {};
        for (int64_t s = 0; s < num_steps; ++s) {
            const auto& step = reinterpret_cast<const Step*>(panel)[s];
            vf part[kRows][kChains] = {};
#pragma GCC unroll 32
            for (int i = 0; i < kGroup; ++i) {
                const vf values = stored(step, i, v);
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    part[r][i % kChains] += values * x[r * x_stride + s * kGroup + i];
                }
            }
            const vf scale = scale_of(step, v), least = least_of(step, v);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                const vf part_sum = (part[r][0] + part[r][1]) + (part[r][2] + part[r][3]);
                total[r] += scale * part_sum;
                total[r] += least * step_sums[r * num_steps + s];
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) store(sums + r * sums_stride + v * VF, total[r]);
    }
}

#if SL_LEVEL >= SL_AVX512_BF16
// The same for bfloat16 rows and 4 bits: a table turns 32 stored values into bfloat16 at once.
template <class Step, int kRows>
inline void direct_panel(const bf16* x, int64_t x_stride, const float* step_sums,
                         const uint8_t* panel, int64_t num_steps, float* sums,
                         int64_t sums_stride) {
    static_assert(std::is_same_v<Step, Int4Step>);
    // 0 to 15 in bfloat16, twice: bits above the lowest four of an index do not matter.
    alignas(64) static constexpr uint16_t kValues[32] = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
        0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const __m512i values = _mm512_load_si512(kValues);
    __m512 total[kRows] = {};
    for (int64_t s = 0; s < num_steps; ++s) {
        const auto& step = reinterpret_cast<const Int4Step*>(panel)[s];
        __m512 part[kRows][4] = {};
#pragma GCC unroll 4
        for (int c = 0; c < kGroup / 8; ++c) {
            const __m512i words = _mm512_loadu_si512(step.words[c]);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const __m512i index = _mm512_srli_epi16(words, 4 * i);
                const auto weights = (__m512bh)_mm512_permutexvar_epi16(index, values);
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    int32_t pair;
                    std::memcpy(&pair, x + r * x_stride + s * kGroup + 8 * c + 2 * i, sizeof pair);
                    part[r][i] = _mm512_dpbf16_ps(part[r][i], weights,
                                                  (__m512bh)_mm512_set1_epi32(pair));
                }
            }
        }
        const auto scale = (__m512)load_half(step.scale), least = (__m512)load_half(step.least);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const __m512 part_sum = (part[r][0] + part[r][1]) + (part[r][2] + part[r][3]);
            total[r] += scale * part_sum;
            total[r] += least * step_sums[r * num_steps + s];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(sums + r * sums_stride, total[r]);
}
#endif

}  // namespace sl
