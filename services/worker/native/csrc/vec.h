// Float vectors of the machine's width, written once for all levels (GCC's vector extension), and
// bfloat16 in memory. Arithmetic is in float32.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"

#if SL_LEVEL >= SL_AVX2
#include <immintrin.h>
#endif

namespace sl {

#if SL_LEVEL >= SL_AVX512
constexpr int VF = 16;  // floats of one vector
#elif SL_LEVEL >= SL_AVX2
constexpr int VF = 8;
#else
constexpr int VF = 4;
#endif

typedef float vf __attribute__((vector_size(VF * 4)));
typedef int32_t vi __attribute__((vector_size(VF * 4)));
typedef uint32_t vu __attribute__((vector_size(VF * 4)));
typedef uint16_t vh __attribute__((vector_size(VF * 2)));

struct bf16 {
    uint16_t bits;
};

inline vf splat(float x) { return x - vf{}; }

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

template <class T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
    return x;
}

// To the nearest, ties to even; a NaN stays one.
template <>
inline bf16 from_float<bf16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline vf load(const float* p) {
    vf result;
    std::memcpy(&result, p, sizeof result);
    return result;
}

inline vf load(const bf16* p) {
    vh half;
    std::memcpy(&half, p, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}

inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }

inline void store(bf16* p, vf x) {
#if SL_LEVEL >= SL_AVX512_BF16
    const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(p, &half, sizeof half);
#else
    const vu bits = (vu)x;
    const vu rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const vu is_nan = (vu)(x != x);
    const vu result = (rounded & ~is_nan) | ((bits >> 16 | 0x40) & is_nan);
    const vh half = __builtin_convertvector(result, vh);
    std::memcpy(p, &half, sizeof half);
#endif
}

// The first `count` (1 to VF) elements; zeros behind them.
template <class T>
inline vf load_part(const T* p, int count) {
    if (count == VF) return load(p);
    T part[VF] = {};
    std::memcpy(part, p, count * sizeof(T));
    return load(part);
}

template <class T>
inline void store_part(T* p, vf x, int count) {
    if (count == VF) return store(p, x);
    T part[VF];
    store(part, x);
    std::memcpy(p, part, count * sizeof(T));
}

inline float hsum(vf x) {
    float sums[VF];
    std::memcpy(sums, &x, sizeof x);
    for (int width = VF / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
    }
    return sums[0];
}

inline float hmax(vf x) {
    float most[VF];
    std::memcpy(most, &x, sizeof x);
    for (int width = VF / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) {
            if (most[i + width] > most[i]) most[i] = most[i + width];
        }
    }
    return most[0];
}

inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vmin(vf a, vf b) { return a < b ? a : b; }

// e to the x; relative error below 2e-7; 0 below -87.3, where the result would be subnormal.
// Cody-Waite reduction, degree-6 polynomial.
inline vf vexp(vf x) {
    const vf most = splat(88.0f), least = splat(-87.3f);
    const vf clamped = vmin(vmax(x, least), most);
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const vf shifted = clamped * 1.44269504089f + magic;
    const vf n = shifted - magic;
    const vf r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const vi exponent = ((vi)shifted - 0x4b400000) << 23;
    const vf scaled = (vf)((vi)p + exponent);
    return x < least ? vf{} : scaled;
}

constexpr float kLog2e = 1.44269504089f;

#if SL_LEVEL >= SL_AVX512
// 2 to the x, relative error 1e-4: for what is rounded to bfloat16.
inline __m512 exp2_rough(__m512 x) {
    const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
    __m512 p = _mm512_set1_ps(0.078023709f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.226066768f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.695834517f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.999925017f));
    return _mm512_scalef_ps(p, x);  // by floor(x)
}
#endif

}  // namespace sl
