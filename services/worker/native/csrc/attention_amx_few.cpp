// Attention in bfloat16 on AMX for a few rows at a time, as those of a decode.
//
// Scores are K · Qᵀ with K's tiles loaded as they lie in the cache, and are turned to rows of keys, so
// that the softmax works on 16 keys of a row and not on 16 rows of which most are none. Values are
// added by dot products of pairs of keys: for so few rows turning V to tiles costs more.
#include "attention_amx.h"

#if SL_LEVEL >= SL_AMX

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "pool.h"

namespace sl {
namespace {

constexpr int kDims = 64;  // of values, added at a time
constexpr int kRows = 4;   // whose values are added at a time

// The block's memory.
struct Work {
    int dims;         // head_size, rounded up to pairs (of the scores' inner axis)
    int value_dims;   // head_size, rounded up to kDims
    bf16* queries;    // tiles [dims / 32]: pairs of dims × kTile columns
    bf16* keys;       // [kKeys][dims], where the cache cannot be loaded from directly
    float* scores;    // [kKeys][kTile]
    float* turned;    // [kFewRows][kKeys]
    bf16* weights;    // [kFewRows][kKeys]
    float* values;    // [kFewRows][value_dims]
};

// What a row has come to.
struct Row {
    int first, last;             // keys that it sees
    float reference = kNothing;  // what weights are relative to, in units of log2
    float sum = 0.0f;
    float decay = 1.0f;          // by how much the values so far shrink
};

Work make_work(int head_size) {
    Work w;
    w.dims = round_up(head_size, kPairs);
    w.value_dims = round_up(head_size, kDims);
    const int sizes[] = {w.dims * kTile * 2,   kKeys * w.dims * 2,   kKeys * kTile * 4,
                         kFewRows * kKeys * 4, kFewRows * kKeys * 2, kFewRows * w.value_dims * 4};
    int64_t total = 0;
    for (const int size : sizes) total += size;
    char* next = static_cast<char*>(thread_scratch(Scratch::kKernel, total));
    char* starts[6];
    for (int i = 0; i < 6; ++i) {
        starts[i] = next;
        next += sizes[i];
    }
    w.queries = reinterpret_cast<bf16*>(starts[0]);
    w.keys = reinterpret_cast<bf16*>(starts[1]);
    w.scores = reinterpret_cast<float*>(starts[2]);
    w.turned = reinterpret_cast<float*>(starts[3]);
    w.weights = reinterpret_cast<bf16*>(starts[4]);
    w.values = reinterpret_cast<float*>(starts[5]);
    return w;
}

// The scores of TILES tiles of keys.
template <int TILES>
void score(const KeyTile* keys, const Work& w, float* scores) {
    _tile_zero(0);
    if constexpr (TILES > 1) {
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int d = 0; d < w.dims; d += kPairs) {
        _tile_loadd(6, w.queries + d * kTile, 64);
        _tile_loadd(4, keys[0].start + d, keys[0].stride);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (TILES > 1) {
            _tile_loadd(5, keys[1].start + d, keys[1].stride);
            _tile_dpbf16ps(1, 5, 6);
            _tile_loadd(4, keys[2].start + d, keys[2].stride);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(5, keys[3].start + d, keys[3].stride);
            _tile_dpbf16ps(3, 5, 6);
        }
    }
    _tile_stored(0, scores, kTile * 4);
    if constexpr (TILES > 1) {
        _tile_stored(1, scores + kTile * kTile, kTile * 4);
        _tile_stored(2, scores + 2 * kTile * kTile, kTile * 4);
        _tile_stored(3, scores + 3 * kTile * kTile, kTile * 4);
    }
    static_assert(TILES == 1 || TILES == 4);
}

// [16 keys][16], of which the first kFewRows count, to [kFewRows][kKeys].
void turn_scores(const float* scores, float* turned) {
    __m512 keys[8];  // in each 128 bits four rows of a key; keys i and i + 8
    for (int i = 0; i < 8; ++i) {
        keys[i] = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_load_ps(scores + i * kTile)),
                                     _mm256_load_ps(scores + (i + 8) * kTile), 1);
    }
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(4));
    // From keys 0 to 3 (and 8 to 11) or 4 to 7 (and 12 to 15): rows r and r + 4, side by side.
    __m512 quads[2][4];
    for (int half = 0; half < 2; ++half) {
        const __m512* k = keys + 4 * half;
        const __m512d low0 = _mm512_castps_pd(_mm512_unpacklo_ps(k[0], k[1]));
        const __m512d low1 = _mm512_castps_pd(_mm512_unpacklo_ps(k[2], k[3]));
        const __m512d high0 = _mm512_castps_pd(_mm512_unpackhi_ps(k[0], k[1]));
        const __m512d high1 = _mm512_castps_pd(_mm512_unpackhi_ps(k[2], k[3]));
        quads[half][0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low0, low1));
        quads[half][1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low0, low1));
        quads[half][2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high0, high1));
        quads[half][3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high0, high1));
    }
    for (int row = 0; row < 4; ++row) {
        _mm512_store_ps(turned + row * kKeys, _mm512_permutex2var_ps(quads[0][row], first, quads[1][row]));
        _mm512_store_ps(turned + (row + 4) * kKeys, _mm512_permutex2var_ps(quads[0][row], second, quads[1][row]));
    }
    static_assert(kFewRows == 8);
}

// Turns a row's scores of the keys [first, first + count) to weights, zeros behind them.
void soften(float* scores, int first, int count, float factor, Row& row, bf16* weights) {
    const __m512 nothing = _mm512_set1_ps(kNothing);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i begin = _mm512_set1_epi32(row.first - first);
    const __m512i end = _mm512_set1_epi32(std::min(row.last - first, count));
    __m512 most = nothing;
    for (int key = 0; key < count; key += kTile) {
        const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(key));
        const __mmask16 is_seen = _mm512_cmpge_epi32_mask(at, begin) & _mm512_cmplt_epi32_mask(at, end);
        const __m512 score = _mm512_mask_mov_ps(nothing, is_seen, _mm512_load_ps(scores + key));
        _mm512_store_ps(scores + key, score);
        most = _mm512_max_ps(most, score);
    }
    const float greatest = _mm512_reduce_max_ps(most);
    row.decay = 1.0f;
    if (greatest == kNothing) {
        std::fill_n(weights, round_up(count, kTile), bf16{});
        return;
    }
    if (greatest * factor > row.reference + kFar) {
        row.decay = _mm512_cvtss_f32(exp2_rough(_mm512_set1_ps(row.reference - greatest * factor)));
        row.reference = greatest * factor;
    }
    const __m512 reference = _mm512_set1_ps(row.reference);
    __m512 sum = _mm512_setzero_ps();
    for (int key = 0; key < count; key += kTile) {
        const __m512 score = _mm512_load_ps(scores + key);
        const __mmask16 is_seen = _mm512_cmp_ps_mask(score, nothing, _CMP_NEQ_UQ);
        const __m512 weight = _mm512_maskz_mov_ps(
            is_seen, exp2_rough(_mm512_fmsub_ps(score, _mm512_set1_ps(factor), reference)));
        sum = _mm512_add_ps(sum, weight);
        store(weights + key, (vf)weight);
    }
    row.sum = row.sum * row.decay + _mm512_reduce_add_ps(sum);
}

// Adds weights · values to kDims dims from `d` of ROWS rows. `offsets` are of the keys' values.
template <int ROWS>
void add_values(const Attention& a, const int64_t* offsets, int count, int d, const Row* rows,
                const bf16* weights, float* values, int stride, Ahead& ahead) {
    constexpr int kVectors = kDims / VF;
    const WordPairs order;
    const auto* cache = static_cast<const bf16*>(a.values);
    const int part = a.head_size - d;
    __m512 sums[ROWS][kVectors];
    for (int row = 0; row < ROWS; ++row) {
        const __m512 decay = _mm512_set1_ps(rows[row].decay);
        for (int i = 0; i < kVectors; ++i) {
            sums[row][i] = _mm512_mul_ps(_mm512_load_ps(values + row * stride + i * VF), decay);
        }
    }
    const auto add = [&](const auto load_two) {
        for (int key = 0; key < count; key += 2) {
            if (key % kTile == 0) ahead.fetch(kTile / 3);
            __m512i pairs[kVectors];
            for (int i = 0; i < kVectors; i += 2) {
                const __m512i even = load_two(offsets[key], i * VF);
                const __m512i odd = key + 1 < count ? load_two(offsets[key + 1], i * VF) : _mm512_setzero_si512();
                pairs[i] = _mm512_permutex2var_epi16(even, order.low, odd);
                pairs[i + 1] = _mm512_permutex2var_epi16(even, order.high, odd);
            }
            for (int row = 0; row < ROWS; ++row) {
                int32_t both;
                std::memcpy(&both, weights + row * kKeys + key, sizeof both);
                const auto weight = (__m512bh)_mm512_set1_epi32(both);
                for (int i = 0; i < kVectors; ++i) {
                    sums[row][i] = _mm512_dpbf16_ps(sums[row][i], weight, (__m512bh)pairs[i]);
                }
            }
        }
    };
    if (part >= kDims) {
        add([&](int64_t offset, int at) { return _mm512_loadu_si512(cache + offset + d + at); });
    } else {
        add([&](int64_t offset, int at) {
            return part > at ? load_pairs(cache + offset + d + at, part - at) : _mm512_setzero_si512();
        });
    }
    for (int row = 0; row < ROWS; ++row) {
        for (int i = 0; i < kVectors; ++i) _mm512_store_ps(values + row * stride + i * VF, sums[row][i]);
    }
}

void add_values(const Attention& a, const int64_t* offsets, int count, int num_rows, const Row* rows, const Work& w,
                Ahead& ahead) {
    for (int row = 0; row < num_rows; row += kRows) {
        for (int d = 0; d < w.value_dims; d += kDims) {
            const auto add = [&]<int ROWS>(std::integral_constant<int, ROWS>) {
                add_values<ROWS>(a, offsets, count, d, rows + row, w.weights + row * kKeys,
                                 w.values + row * w.value_dims + d, w.value_dims, ahead);
            };
            switch (std::min(num_rows - row, kRows)) {
                case 1: add(std::integral_constant<int, 1>()); break;
                case 2: add(std::integral_constant<int, 2>()); break;
                case 3: add(std::integral_constant<int, 3>()); break;
                default: add(std::integral_constant<int, kRows>());
            }
        }
    }
}

}  // namespace

void amx_attend_few(const Attention& a, const AttentionBlock& b, int num_rows, const AttentionState& state,
                    Ahead& ahead) {
    const int group = a.num_heads / a.num_kv_heads;
    const Work w = make_work(a.head_size);
    pack_queries(a, b, num_rows, kTile, w.dims, w.queries);
    std::fill_n(w.values, num_rows * w.value_dims, 0.0f);
    Row rows[kFewRows];
    for (int row = 0; row < num_rows; ++row) {
        const int position = position_of(a, b.request, b.first_query + row / group);
        rows[row].first = first_visible(a, position);
        rows[row].last = position + 1;
    }
    KeyTile keys[kKeys / kTile];
    int64_t offsets[kKeys];
    for (int key = b.first_key / kTile * kTile; key < b.last_key; key += kKeys) {
        const int count = std::min(kKeys, b.last_key - key);
        const int num_tiles = (count + kTile - 1) / kTile;
        find_keys(a, b, key, count, w.dims, w.keys, keys);
        // A third of what comes next is asked for in each of three phases.
        int tile = 0;
        for (; tile + 4 <= num_tiles; tile += 4) {
            score<4>(keys + tile, w, w.scores + tile * kTile * kTile);
            ahead.fetch(4 * kTile / 3);
        }
        for (; tile < num_tiles; ++tile) score<1>(keys + tile, w, w.scores + tile * kTile * kTile);
        for (tile = 0; tile < num_tiles; ++tile) {
            turn_scores(w.scores + tile * kTile * kTile, w.turned + tile * kTile);
            ahead.fetch(kTile / 3);
        }
        for (int row = 0; row < num_rows; ++row) {
            soften(w.turned + row * kKeys, key, count, a.scale * kLog2e, rows[row], w.weights + row * kKeys);
        }
        KeyOffsets places(a, b.request, b.kv_head, key);
        for (int i = 0; i < count; ++i) offsets[i] = places.next();
        add_values(a, offsets, count, num_rows, rows, w, ahead);
    }
    const int size = round_up(a.head_size, VF);
    for (int row = 0; row < num_rows; ++row) {
        const bool is_empty = rows[row].sum == 0.0f;
        state.greatest[row] = is_empty ? -std::numeric_limits<float>::infinity() : rows[row].reference / kLog2e;
        state.sum[row] = rows[row].sum;
        std::copy_n(w.values + row * w.value_dims, size, state.values + int64_t{row} * size);
    }
}

}  // namespace sl

#endif
