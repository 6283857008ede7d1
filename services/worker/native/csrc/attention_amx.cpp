// Attention in bfloat16 on AMX, for prompts and decodes alike.
//
// Everything is computed turned: a column is a row of the block (a query token through a head), so
// that 16 columns are the lanes of a vector and the softmax needs no sums across lanes. Scores are
// K · Qᵀ with K's tiles loaded as they lie in the cache; values are Vᵀ · P, with V turned on the way.
#include "attention.h"

#if SL_LEVEL >= SL_AMX

#include <algorithm>
#include <cstring>

#include "vec.h"

namespace sl {
namespace {

constexpr int kKeys = 128;        // keys of one softmax update
constexpr int kTile = 16;         // rows of a tile; columns too, in float
constexpr int kPairs = 32;        // bfloat16 elements of a tile's row
constexpr int kTileBytes = 1024;
constexpr float kLog2e = 1.44269504089f;
constexpr float kNothing = -1e30f;  // finite: differences of it are 0, not NaN

int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// The block's memory.
struct Work {
    int columns;     // rows of the block, rounded up to tiles
    int dims;        // head_size, rounded up to pairs (of the scores' inner axis)
    int value_dims;  // head_size, rounded up to tiles
    bf16* queries;   // tiles [dims / 32][columns / 16]: pairs of dims × columns
    bf16* keys;      // [kKeys][dims], where the cache cannot be loaded from directly
    float* scores;   // [kKeys][columns]
    bf16* weights;   // tiles [kKeys / 32][columns / 16]: pairs of keys × columns
    bf16* turned;    // tiles [kKeys / 32][value_dims / 16]: value dims × keys
    float* values;   // [value_dims][columns]
    float* greatest; // [columns], in units of log2
    float* sums;     // [columns]
    int32_t* first;  // [columns]: first key that the column sees
    int32_t* last;   // [columns]: one past the last
};

Work make_work(int rows, int head_size) {
    Work w;
    w.columns = round_up(rows, kTile);
    w.dims = round_up(head_size, kPairs);
    w.value_dims = round_up(head_size, kTile);
    const int64_t columns = w.columns;
    const int64_t sizes[] = {
        w.dims * columns * 2, int64_t{kKeys} * w.dims * 2, kKeys * columns * 4, kKeys * columns * 2,
        int64_t{kKeys} * w.value_dims * 2, w.value_dims * columns * 4, columns * 16,
    };
    int64_t total = 0;
    for (const int64_t size : sizes) total += round_up(size, 64);
    char* next = static_cast<char*>(thread_scratch(0, total));
    char* starts[7];
    for (int i = 0; i < 7; ++i) {
        starts[i] = next;
        next += round_up(sizes[i], 64);
    }
    w.queries = reinterpret_cast<bf16*>(starts[0]);
    w.keys = reinterpret_cast<bf16*>(starts[1]);
    w.scores = reinterpret_cast<float*>(starts[2]);
    w.weights = reinterpret_cast<bf16*>(starts[3]);
    w.turned = reinterpret_cast<bf16*>(starts[4]);
    w.values = reinterpret_cast<float*>(starts[5]);
    w.greatest = reinterpret_cast<float*>(starts[6]);
    w.sums = w.greatest + columns;
    w.first = reinterpret_cast<int32_t*>(w.sums + columns);
    w.last = w.first + columns;
    return w;
}

// 16 rows of 16 dwords, turned.
inline void transpose_dwords(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

// 32 bfloat16 from p, `count` of them there.
inline __m512i load_pairs(const bf16* p, int count) {
    const __mmask32 mask = count >= 32 ? ~0u : (1u << count) - 1;
    return _mm512_maskz_loadu_epi16(mask, p);
}

void pack_queries(const Attention& a, const AttentionBlock& b, int rows, const Work& w) {
    const int group = a.num_heads / a.num_kv_heads;
    const int64_t first_token = a.query_start_loc[b.request] + b.first_query;
    const int column_tiles = w.columns / kTile;
    for (int tile = 0; tile < column_tiles; ++tile) {
        for (int d = 0; d < w.dims; d += kPairs) {
            __m512i columns[kTile];
            for (int i = 0; i < kTile; ++i) {
                const int row = tile * kTile + i;
                if (row >= rows) {
                    columns[i] = _mm512_setzero_si512();
                    continue;
                }
                const bf16* query = static_cast<const bf16*>(a.query) +
                                    (first_token + row / group) * a.query_stride +
                                    (b.kv_head * group + row % group) * a.head_size;
                columns[i] = load_pairs(query + d, a.head_size - d);
            }
            transpose_dwords(columns);
            bf16* target = w.queries + ((d / kPairs) * column_tiles + tile) * (kTileBytes / 2);
            for (int i = 0; i < kTile; ++i) _mm512_store_si512(target + i * kPairs, columns[i]);
        }
    }
}

void set_limits(const Attention& a, const AttentionBlock& b, int rows, const Work& w) {
    const int group = a.num_heads / a.num_kv_heads;
    for (int column = 0; column < w.columns; ++column) {
        const int row = std::min(column, rows - 1);
        const int position = position_of(a, b.request, b.first_query + row / group);
        w.first[column] = first_visible(a, position);
        w.last[column] = position + 1;
    }
}

// Where the tile of 16 keys from `key` lies, and the bytes from key to key.
struct KeyTile {
    const bf16* start;
    int64_t stride;
};

KeyTile key_tile(const Attention& a, const AttentionBlock& b, int key, int tile, const Work& w, bool is_direct) {
    if (!is_direct) return {w.keys + int64_t{tile} * kTile * w.dims, w.dims * 2};
    const int64_t offset = cache_offset(a, b.request, b.kv_head, key);
    return {static_cast<const bf16*>(a.keys) + offset, int64_t{a.num_kv_heads} * a.head_size * 2};
}

void copy_keys(const Attention& a, const AttentionBlock& b, int first, int count, const Work& w) {
    for (int key = 0; key < count; ++key) {
        const bf16* source = static_cast<const bf16*>(a.keys) + cache_offset(a, b.request, b.kv_head, first + key);
        for (int d = 0; d < w.dims; d += kPairs) {
            _mm512_store_si512(w.keys + int64_t{key} * w.dims + d, load_pairs(source + d, a.head_size - d));
        }
    }
}

// The scores of KEYS × COLUMNS tiles.
template <int KEYS, int COLUMNS>
void score_tiles(const KeyTile* keys, int column_tile, const Work& w, float* scores) {
    const int column_tiles = w.columns / kTile;
    _tile_zero(0);
    if constexpr (COLUMNS > 1) _tile_zero(1);
    if constexpr (KEYS > 1) _tile_zero(2);
    if constexpr (KEYS > 1 && COLUMNS > 1) _tile_zero(3);
    for (int step = 0; step < w.dims / kPairs; ++step) {
        const bf16* queries = w.queries + (step * column_tiles + column_tile) * (kTileBytes / 2);
        _tile_loadd(4, keys[0].start + step * kPairs, keys[0].stride);
        _tile_loadd(6, queries, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (COLUMNS > 1) {
            _tile_loadd(7, queries + kTileBytes / 2, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (KEYS > 1) {
            _tile_loadd(5, keys[1].start + step * kPairs, keys[1].stride);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (COLUMNS > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    const int64_t stride = int64_t{w.columns} * 4;
    float* target = scores + column_tile * kTile;
    _tile_stored(0, target, stride);
    if constexpr (COLUMNS > 1) _tile_stored(1, target + kTile, stride);
    if constexpr (KEYS > 1) _tile_stored(2, target + kTile * w.columns, stride);
    if constexpr (KEYS > 1 && COLUMNS > 1) _tile_stored(3, target + kTile * w.columns + kTile, stride);
}

void compute_scores(const Attention& a, const AttentionBlock& b, int first, int count, const Work& w, bool is_direct) {
    if (!is_direct) copy_keys(a, b, first, count, w);
    const int key_tiles = (count + kTile - 1) / kTile;
    const int column_tiles = w.columns / kTile;
    for (int tile = 0; tile < key_tiles; tile += 2) {
        const bool is_pair = tile + 1 < key_tiles;
        KeyTile keys[2];
        for (int i = 0; i < 1 + is_pair; ++i) {
            keys[i] = key_tile(a, b, first + (tile + i) * kTile, tile + i, w, is_direct);
        }
        float* scores = w.scores + int64_t{tile} * kTile * w.columns;
        int column = 0;
        for (; column + 2 <= column_tiles; column += 2) {
            is_pair ? score_tiles<2, 2>(keys, column, w, scores) : score_tiles<1, 2>(keys, column, w, scores);
        }
        if (column < column_tiles) {
            is_pair ? score_tiles<2, 1>(keys, column, w, scores) : score_tiles<1, 1>(keys, column, w, scores);
        }
    }
}

// 2 to the x, relative error 1e-4: what follows is rounded to bfloat16. x at most 0, finite.
inline __m512 exp2_rough(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(0.05550410866f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.2402265070f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6931471806f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

// Turns scores of one tile of columns to weights. Returns whether the values so far shrink; by how
// much is in `decay`.
template <bool MASKED>
bool soften(int column_tile, int first, int count, float scale, const Work& w, __m512& decay) {
    const int column = column_tile * kTile;
    const int column_tiles = w.columns / kTile;
    const float* scores = w.scores + column;
    const __m512i first_seen = _mm512_sub_epi32(_mm512_load_si512(w.first + column), _mm512_set1_epi32(first));
    const __m512i last_seen = _mm512_sub_epi32(_mm512_load_si512(w.last + column), _mm512_set1_epi32(first));
    const auto seen = [&](int key) -> __mmask16 {
        const __m512i at = _mm512_set1_epi32(key);
        return _mm512_cmple_epi32_mask(first_seen, at) & _mm512_cmpgt_epi32_mask(last_seen, at);
    };
    __m512 most0 = _mm512_set1_ps(kNothing), most1 = most0;
    for (int key = 0; key < count; ++key) {
        const __m512 score = _mm512_load_ps(scores + int64_t{key} * w.columns);
        __m512& most = key & 1 ? most1 : most0;
        most = MASKED ? _mm512_mask_max_ps(most, seen(key), most, score) : _mm512_max_ps(most, score);
    }
    const __m512 factor = _mm512_set1_ps(scale * kLog2e);
    const __m512 before = _mm512_load_ps(w.greatest + column);
    const __m512 found = _mm512_max_ps(most0, most1);
    // What is nothing stays nothing, whatever the scale.
    const __mmask16 is_found = _mm512_cmp_ps_mask(found, _mm512_set1_ps(kNothing), _CMP_GT_OQ);
    const __m512 greatest = _mm512_mask_max_ps(before, is_found, before, _mm512_mul_ps(found, factor));
    _mm512_store_ps(w.greatest + column, greatest);
    decay = exp2_rough(_mm512_sub_ps(before, greatest));
    const auto weight_of = [&](int key) {
        const __m512 score = _mm512_load_ps(scores + int64_t{key} * w.columns);
        const __m512 weight = exp2_rough(_mm512_fmsub_ps(score, factor, greatest));
        return MASKED ? _mm512_maskz_mov_ps(seen(key), weight) : weight;
    };
    // The words of two rows of 16, side by side.
    const __m512i pairing = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                             7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512 sum0 = _mm512_setzero_ps(), sum1 = sum0;
    const int padded = round_up(count, kPairs);
    for (int key = 0; key < padded; key += 2) {
        __m512 weight0 = _mm512_setzero_ps(), weight1 = weight0;
        if (key < count) weight0 = weight_of(key);
        if (key + 1 < count) weight1 = weight_of(key + 1);
        sum0 = _mm512_add_ps(sum0, weight0);
        sum1 = _mm512_add_ps(sum1, weight1);
        const __m512i rows = (__m512i)_mm512_cvtne2ps_pbh(weight1, weight0);
        bf16* tile = w.weights + ((key / kPairs) * column_tiles + column_tile) * (kTileBytes / 2);
        _mm512_store_si512(tile + key % kPairs * kTile, _mm512_permutexvar_epi16(pairing, rows));
    }
    const __m512 sum = _mm512_load_ps(w.sums + column);
    _mm512_store_ps(w.sums + column, _mm512_fmadd_ps(sum, decay, _mm512_add_ps(sum0, sum1)));
    return _mm512_cmp_ps_mask(before, greatest, _CMP_NEQ_OQ) != 0;
}

// Whether every column sees all keys [first, first + count).
bool is_all_seen(int column_tile, int first, int count, const Work& w) {
    const __m512i firsts = _mm512_load_si512(w.first + column_tile * kTile);
    const __m512i lasts = _mm512_load_si512(w.last + column_tile * kTile);
    return _mm512_reduce_max_epi32(firsts) <= first && _mm512_reduce_min_epi32(lasts) >= first + count;
}

void shrink_values(int column_tile, __m512 decay, const Work& w) {
    float* values = w.values + column_tile * kTile;
    for (int d = 0; d < w.value_dims; ++d, values += w.columns) {
        _mm512_store_ps(values, _mm512_mul_ps(_mm512_load_ps(values), decay));
    }
}

// Turns the values of keys [first, first + count); zeros behind them.
void turn_values(const Attention& a, const AttentionBlock& b, int first, int count, const Work& w) {
    const int dim_tiles = w.value_dims / kTile;
    // Words of two rows of 32, side by side: dims 0 to 15, and 16 to 31.
    __m512i low, high;
    {
        alignas(64) uint16_t at[32];
        for (int i = 0; i < 32; ++i) at[i] = i / 2 + (i & 1) * 32;
        low = _mm512_load_si512(at);
        for (int i = 0; i < 32; ++i) at[i] += 16;
        high = _mm512_load_si512(at);
    }
    for (int key = 0; key < count; key += kPairs) {
        const bf16* sources[kPairs];
        const int num = std::min(kPairs, count - key);
        for (int i = 0; i < num; ++i) {
            sources[i] = static_cast<const bf16*>(a.values) + cache_offset(a, b.request, b.kv_head, first + key + i);
        }
        for (int d = 0; d < w.value_dims; d += kPairs) {
            const int part = a.head_size - d;
            __m512i lows[kTile], highs[kTile];
            for (int i = 0; i < kTile; ++i) {
                const __m512i even = 2 * i < num ? load_pairs(sources[2 * i] + d, part) : _mm512_setzero_si512();
                const __m512i odd =
                    2 * i + 1 < num ? load_pairs(sources[2 * i + 1] + d, part) : _mm512_setzero_si512();
                lows[i] = _mm512_permutex2var_epi16(even, low, odd);
                highs[i] = _mm512_permutex2var_epi16(even, high, odd);
            }
            bf16* target = w.turned + ((key / kPairs) * dim_tiles + d / kTile) * (kTileBytes / 2);
            transpose_dwords(lows);
            for (int i = 0; i < kTile; ++i) _mm512_store_si512(target + i * kPairs, lows[i]);
            if (d + kTile >= w.value_dims) continue;
            transpose_dwords(highs);
            for (int i = 0; i < kTile; ++i) _mm512_store_si512(target + kTileBytes / 2 + i * kPairs, highs[i]);
        }
    }
}

// Adds weights · values to DIMS × COLUMNS tiles.
template <int DIMS, int COLUMNS>
void add_tiles(int dim_tile, int column_tile, int steps, const Work& w) {
    const int dim_tiles = w.value_dims / kTile, column_tiles = w.columns / kTile;
    const int64_t stride = int64_t{w.columns} * 4;
    float* values = w.values + int64_t{dim_tile} * kTile * w.columns + column_tile * kTile;
    float* below = values + int64_t{kTile} * w.columns;
    _tile_loadd(0, values, stride);
    if constexpr (COLUMNS > 1) _tile_loadd(1, values + kTile, stride);
    if constexpr (DIMS > 1) _tile_loadd(2, below, stride);
    if constexpr (DIMS > 1 && COLUMNS > 1) _tile_loadd(3, below + kTile, stride);
    for (int step = 0; step < steps; ++step) {
        const bf16* turned = w.turned + (step * dim_tiles + dim_tile) * (kTileBytes / 2);
        const bf16* weights = w.weights + (step * column_tiles + column_tile) * (kTileBytes / 2);
        _tile_loadd(4, turned, 64);
        _tile_loadd(6, weights, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (COLUMNS > 1) {
            _tile_loadd(7, weights + kTileBytes / 2, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (DIMS > 1) {
            _tile_loadd(5, turned + kTileBytes / 2, 64);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (COLUMNS > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, values, stride);
    if constexpr (COLUMNS > 1) _tile_stored(1, values + kTile, stride);
    if constexpr (DIMS > 1) _tile_stored(2, below, stride);
    if constexpr (DIMS > 1 && COLUMNS > 1) _tile_stored(3, below + kTile, stride);
}

void add_values(int count, const Work& w) {
    const int steps = (count + kPairs - 1) / kPairs;
    const int dim_tiles = w.value_dims / kTile, column_tiles = w.columns / kTile;
    for (int column = 0; column < column_tiles; column += 2) {
        const bool is_wide = column + 1 < column_tiles;
        for (int dim = 0; dim < dim_tiles; dim += 2) {
            const bool is_tall = dim + 1 < dim_tiles;
            if (is_wide) {
                is_tall ? add_tiles<2, 2>(dim, column, steps, w) : add_tiles<1, 2>(dim, column, steps, w);
            } else {
                is_tall ? add_tiles<2, 1>(dim, column, steps, w) : add_tiles<1, 1>(dim, column, steps, w);
            }
        }
    }
}

// Turns the result back: column by column into the block's state.
void read_state(const Attention& a, int rows, const Work& w, const AttentionState& state) {
    const int size = round_up(a.head_size, VF);
    for (int row = 0; row < rows; ++row) {
        const bool is_empty = w.sums[row] == 0.0f;
        state.greatest[row] = is_empty ? -__builtin_inff() : w.greatest[row] / kLog2e;
        state.sum[row] = w.sums[row];
    }
    for (int column = 0; column < rows; column += kTile) {
        for (int d = 0; d < w.value_dims; d += kTile) {
            __m512i tile[kTile];
            for (int i = 0; i < kTile; ++i) {
                tile[i] = _mm512_load_si512(w.values + int64_t{d + i} * w.columns + column);
            }
            transpose_dwords(tile);
            for (int i = 0; i < std::min(kTile, rows - column); ++i) {
                _mm512_storeu_si512(state.values + int64_t{column + i} * size + d, tile[i]);
            }
        }
    }
}

}  // namespace

bool amx_can_attend(const Attention& a) { return a.is_bf16; }

void amx_attend_block(const Attention& a, const AttentionBlock& b, const AttentionState& state) {
    const int rows = (b.last_query - b.first_query) * (a.num_heads / a.num_kv_heads);
    const Work w = make_work(rows, a.head_size);
    pack_queries(a, b, rows, w);
    set_limits(a, b, rows, w);
    std::fill_n(w.greatest, w.columns, kNothing);
    std::fill_n(w.sums, w.columns, 0.0f);
    std::fill_n(w.values, int64_t{w.value_dims} * w.columns, 0.0f);
    const bool is_direct = a.block_size % kTile == 0 && a.head_size % kPairs == 0;
    for (int key = b.first_key / kTile * kTile; key < b.last_key; key += kKeys) {
        const int count = std::min(kKeys, b.last_key - key);
        compute_scores(a, b, key, count, w, is_direct);
        for (int tile = 0; tile < w.columns / kTile; ++tile) {
            __m512 decay;
            const bool shrinks = is_all_seen(tile, key, count, w)
                                     ? soften<false>(tile, key, count, a.scale, w, decay)
                                     : soften<true>(tile, key, count, a.scale, w, decay);
            if (shrinks) shrink_values(tile, decay, w);
        }
        turn_values(a, b, key, count, w);
        add_values(count, w);
    }
    read_state(a, rows, w, state);
}

}  // namespace sl

#endif
