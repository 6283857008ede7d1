// Weights of 8 and 4 bits: widened for the kernels of other formats, or multiplied as they are.
#pragma once

#include <array>
#include <bit>
#include <limits>
#include <type_traits>

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
    const auto* const pairs = step.pairs[input / 2] + vector * VF;
#if SL_LEVEL >= SL_AVX512
    const __m256i loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
    const vi both = (vi)_mm512_maskz_cvtepi16_epi32(0xffff, loaded);
    return __builtin_convertvector(input % 2 ? both >> 8 : both << 24 >> 24, vf);
#elif SL_LEVEL >= SL_AVX2
    const vi both = (vi)_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs)));
    return __builtin_convertvector(input % 2 ? both >> 8 : both << 24 >> 24, vf);
#else
    vf result;
    for (int i = 0; i < VF; ++i) result[i] = pairs[i][input % 2];
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

// A step is asked for so many bytes before it is read: a panel is read once and in order, but the
// processor runs ahead by itself only to the end of a small page.
constexpr int64_t kBytesAhead = 4096;

template <class Step>
inline void prefetch_ahead(const Step& step) {
    const char* const from = reinterpret_cast<const char*>(&step) + kBytesAhead;
#pragma GCC unroll 9
    for (size_t line = 0; line < sizeof(Step); line += 64) __builtin_prefetch(from + line);
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

// Few rows, padded to whole steps, that are multiplied with values as they are stored.
struct FloatRows {
    const float* data;  // [rows, stride]
    int64_t stride;
    const float* step_sums;  // [rows, num_steps]

    FloatRows from(int64_t first, int64_t num_steps) const {
        return {data + first * stride, stride, step_sums + first * num_steps};
    }
};

// sums[rows][kLanes] of one panel. Each step's sum is scaled once: nothing is rounded but float32
// sums.
template <class Step, int kRows>
inline void direct_panel(const FloatRows& x, const uint8_t* panel, int64_t num_steps, float* sums,
                         int64_t sums_stride) {
    constexpr int kChains = 4;  // an addition waits for the one before
    for (int v = 0; v < kLaneVectors; ++v) {
        vf total[kRows] = {};
        for (int64_t s = 0; s < num_steps; ++s) {
            const auto& step = reinterpret_cast<const Step*>(panel)[s];
            if (v == 0) prefetch_ahead(step);
            vf part[kRows][kChains] = {};
#pragma GCC unroll 32
            for (int i = 0; i < kGroup; ++i) {
                const vf values = stored(step, i, v);
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    part[r][i % kChains] += values * x.data[r * x.stride + s * kGroup + i];
                }
            }
            const vf scale = scale_of(step, v), least = least_of(step, v);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                const vf part_sum = (part[r][0] + part[r][1]) + (part[r][2] + part[r][3]);
                total[r] += scale * part_sum;
                total[r] += least * x.step_sums[r * num_steps + s];
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) store(sums + r * sums_stride + v * VF, total[r]);
    }
}

#if SL_LEVEL >= SL_AVX512_BF16
// The same of bfloat16 rows, in 16-bit integers with a scale for each step: x = scale * value.
struct FixedRows {
    const int16_t* data;     // [rows, num_steps * kGroup]
    const float* scales;     // [rows, num_steps]
    const float* step_sums;  // [rows, num_steps]; read for Int4Step only

    FixedRows from(int64_t first, int64_t num_steps) const {
        const int64_t steps = first * num_steps;
        return {data + steps * kGroup, scales + steps, step_sums + steps};
    }
};

// 2 to the (exponent - 127), exponent in 1..254.
inline float power_of_two(int exponent) { return std::bit_cast<float>(exponent << 23); }

// Makes integers of one step's inputs; returns their scale, a power of two. Inputs of at least
// 1/128 of the largest are kept to the bit, smaller ones to 1/32768 of it. A step with an infinity or
// a NaN has a NaN for its scale.
inline float to_fixed(const bf16* x, int16_t* values) {
    const __m512i magnitudes =
        _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(magnitudes),
                                          _mm512_extracti64x4_epi64(magnitudes, 1));
    const __m128i quarter =
        _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const auto not_least = _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1))));
    const int exponent = (~not_least & 0xffff) >> 7;  // of the largest, biased by 127
    constexpr int kBits = 14, kNotFinite = 255;
    const bool is_kept = exponent > kBits && exponent < kNotFinite;
    const float inverse = is_kept ? power_of_two(254 + kBits - exponent) : 0.0f;
    for (int i = 0; i < kGroup; i += VF) {
        const __m512i integers = _mm512_cvtps_epi32((__m512)(load(x + i) * inverse));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + i), _mm512_cvtepi32_epi16(integers));
    }
    if (exponent == kNotFinite) return std::numeric_limits<float>::quiet_NaN();
    return is_kept ? power_of_two(exponent - kBits) : 0.0f;
}

// Stored values of inputs 2 * pair and 2 * pair + 1 in the lanes' lower and upper halves.
inline __m512i stored_pair(const Int8Step& step, int pair) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(step.pairs[pair])));
}
inline __m512i stored_pair(const Int4Step& step, int pair) {
    const __m512i words = _mm512_loadu_si512(step.words[pair / 4]);
    return _mm512_and_si512(_mm512_srli_epi16(words, pair % 4 * 4), _mm512_set1_epi16(15));
}

// A step's sum of products is exact in 32 bits.
template <class Step, int kRows>
inline void direct_panel(const FixedRows& x, const uint8_t* panel, int64_t num_steps, float* sums,
                         int64_t sums_stride) {
    constexpr int kChains = 4;  // an addition waits for the one before
    vf total[kRows] = {};
    for (int64_t s = 0; s < num_steps; ++s) {
        const auto& step = reinterpret_cast<const Step*>(panel)[s];
        prefetch_ahead(step);
        __m512i part[kRows][kChains] = {};
#pragma GCC unroll 16
        for (int pair = 0; pair < kGroup / 2; ++pair) {
            const __m512i weights = stored_pair(step, pair);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                int32_t inputs;
                std::memcpy(&inputs, x.data + (r * num_steps + s) * kGroup + 2 * pair, sizeof inputs);
                __m512i& chain = part[r][pair % kChains];
                chain = _mm512_dpwssd_epi32(chain, weights, _mm512_set1_epi32(inputs));
            }
        }
        const vf scale = scale_of(step, 0);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const vi part_sum = ((vi)part[r][0] + (vi)part[r][1]) + ((vi)part[r][2] + (vi)part[r][3]);
            const int64_t at = r * num_steps + s;
            total[r] += scale * x.scales[at] * __builtin_convertvector(part_sum, vf);
            if constexpr (std::is_same_v<Step, Int4Step>) total[r] += least_of(step, 0) * x.step_sums[at];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) store(sums + r * sums_stride, total[r]);
}
#endif

}  // namespace sl
