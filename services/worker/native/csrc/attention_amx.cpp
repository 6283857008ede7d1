// Attention in bfloat16 on AMX, for prompts and decodes alike.
//
// Everything is computed turned: a column is a row of the block (a query token through a head), so
// that 16 columns are the lanes of a vector and the softmax needs no sums across lanes. Scores are
// K · Qᵀ with K's tiles loaded as they lie in the cache; values are Vᵀ · P, with V turned on the way.
#include "attention_amx.h"

#if SL_LEVEL >= SL_AMX

#include <algorithm>
#include <cstring>

#include "pool.h"

namespace sl {
namespace {

// The block's memory. Columns are worked on 32 at a time, two tiles side by side; a block of up to 16
// has one tile.
struct Work {
    int columns;      // rows of the block, rounded up to tiles
    int width;        // columns worked on at a time: 16 or 32
    int dims;         // head_size, rounded up to pairs (of the scores' inner axis)
    int value_dims;   // head_size, rounded up to tiles
    bf16* queries;    // tiles [columns / 16][dims / 32]: pairs of dims × columns
    bf16* keys;       // [kKeys][dims], where the cache cannot be loaded from directly
    float* scores;    // [kKeys][width]
    bf16* weights;    // tiles [kKeys / 32][width / 16]: pairs of keys × columns
    bf16* turned;     // tiles [kKeys / 32][value_dims / 16]: value dims × keys
    float* values;    // [columns / width][value_dims][width]
    float* reference; // [columns]: what weights are relative to, in units of log2
    float* sums;      // [columns]
    int32_t* first;   // [columns]: first key that the column sees
    int32_t* last;    // [columns]: one past the last
};

Work make_work(int rows, int head_size) {
    Work w;
    w.width = rows <= kTile ? kTile : 2 * kTile;
    w.columns = round_up(rows, w.width);
    w.dims = round_up(head_size, kPairs);
    w.value_dims = round_up(head_size, kTile);
    const int columns = w.columns;
    const int sizes[] = {
        w.dims * columns * 2, kKeys * w.dims * 2,      kKeys * w.width * 4, kKeys * w.width * 2,
        kKeys * round_up(w.value_dims, kPairs) * 2, w.value_dims * columns * 4, columns * 16,
    };
    int64_t total = 0;
    for (const int size : sizes) total += round_up(size, 64);
    char* next = static_cast<char*>(thread_scratch(Scratch::kKernel, total));
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
    w.reference = reinterpret_cast<float*>(starts[6]);
    w.sums = w.reference + columns;
    w.first = reinterpret_cast<int32_t*>(w.sums + columns);
    w.last = w.first + columns;
    return w;
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

// The scores of KEYS × COLUMNS tiles.
template <int KEYS, int COLUMNS>
void score_tiles(const KeyTile* keys, const bf16* queries, const Work& w, float* scores) {
    const int steps = w.dims / kPairs;
    _tile_zero(0);
    if constexpr (COLUMNS > 1) _tile_zero(1);
    if constexpr (KEYS > 1) _tile_zero(2);
    if constexpr (KEYS > 1 && COLUMNS > 1) _tile_zero(3);
    for (int step = 0; step < steps; ++step, queries += kTileBytes / 2) {
        _tile_loadd(4, keys[0].start + step * kPairs, keys[0].stride);
        _tile_loadd(6, queries, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (COLUMNS > 1) {
            _tile_loadd(7, queries + steps * (kTileBytes / 2), 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (KEYS > 1) {
            _tile_loadd(5, keys[1].start + step * kPairs, keys[1].stride);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (COLUMNS > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    constexpr int kWidth = COLUMNS * kTile;
    _tile_stored(0, scores, kWidth * 4);
    if constexpr (COLUMNS > 1) _tile_stored(1, scores + kTile, kWidth * 4);
    if constexpr (KEYS > 1) _tile_stored(2, scores + kTile * kWidth, kWidth * 4);
    if constexpr (KEYS > 1 && COLUMNS > 1) _tile_stored(3, scores + kTile * kWidth + kTile, kWidth * 4);
}

template <int COLUMNS>
void score(const KeyTile* keys, int num_tiles, int column, const Work& w) {
    const bf16* queries = w.queries + int64_t{column} * w.dims;
    float* scores = w.scores;
    int tile = 0;
    for (; tile + 2 <= num_tiles; tile += 2, scores += 2 * kTile * COLUMNS * kTile) {
        score_tiles<2, COLUMNS>(keys + tile, queries, w, scores);
    }
    if (tile < num_tiles) score_tiles<1, COLUMNS>(keys + tile, queries, w, scores);
}

// The words of two rows of 16, side by side.
inline __m512i pair_words(__m512 first, __m512 second) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                           22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Which of 16 columns see a key.
struct Sight {
    __m512i first, last;

    Sight(int column, int first_key, const Work& w)
        : first(_mm512_sub_epi32(_mm512_load_si512(w.first + column), _mm512_set1_epi32(first_key))),
          last(_mm512_sub_epi32(_mm512_load_si512(w.last + column), _mm512_set1_epi32(first_key))) {}

    __mmask16 of(int key) const {
        const __m512i at = _mm512_set1_epi32(key);
        return _mm512_cmple_epi32_mask(first, at) & _mm512_cmpgt_epi32_mask(last, at);
    }
};

// Moves the reference of 16 columns; `most` is their greatest new score. Returns by how much what was
// summed so far shrinks.
inline __m512 move_reference(__m512 most, float* reference) {
    const __m512 before = _mm512_load_ps(reference);
    const __mmask16 is_far = _mm512_cmp_ps_mask(most, _mm512_add_ps(before, _mm512_set1_ps(kFar)), _CMP_GT_OQ);
    if (is_far == 0) return _mm512_set1_ps(1.0f);
    const __m512 after = _mm512_mask_mov_ps(before, is_far, most);
    _mm512_store_ps(reference, after);
    return exp2_rough(_mm512_sub_ps(before, after));
}

void shrink(__m512 decay, int width, int value_dims, float* values, float* sums) {
    if (_mm512_cmp_ps_mask(decay, _mm512_set1_ps(1.0f), _CMP_NEQ_OQ) == 0) return;
    _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), decay));
    for (int d = 0; d < value_dims; ++d, values += width) {
        _mm512_store_ps(values, _mm512_mul_ps(_mm512_load_ps(values), decay));
    }
}

// Turns scores of COLUMNS tiles to weights; sums and values so far shrink as need be.
template <int COLUMNS, bool MASKED>
void soften(int column, int first_key, int count, float scale, const Work& w) {
    constexpr int kWidth = COLUMNS * kTile;
    const __m512 nothing = _mm512_set1_ps(kNothing);
    const __m512 factor = _mm512_set1_ps(scale * kLog2e);
    for (int tile = 0; tile < COLUMNS; ++tile) {
        const int at = column + tile * kTile;
        const Sight sight(at, first_key, w);
        const float* scores = w.scores + tile * kTile;
        __m512 most[4] = {nothing, nothing, nothing, nothing};
        int key = 0;
        for (; key + 4 <= count; key += 4) {
            for (int i = 0; i < 4; ++i, scores += kWidth) {
                const __m512 score = _mm512_load_ps(scores);
                most[i] = MASKED ? _mm512_mask_max_ps(most[i], sight.of(key + i), most[i], score)
                                 : _mm512_max_ps(most[i], score);
            }
        }
        for (; key < count; ++key, scores += kWidth) {
            most[0] = _mm512_mask_max_ps(most[0], MASKED ? sight.of(key) : 0xffff, most[0], _mm512_load_ps(scores));
        }
        const __m512 greatest = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
        // Scores may be scaled by less than 1: what is nothing stays nothing.
        const __mmask16 is_seen = _mm512_cmp_ps_mask(greatest, nothing, _CMP_NEQ_UQ);
        const __m512 scaled = _mm512_mask_mul_ps(nothing, is_seen, greatest, factor);
        const __m512 decay = move_reference(scaled, w.reference + at);
        shrink(decay, kWidth, w.value_dims, w.values + int64_t{column} * w.value_dims + tile * kTile, w.sums + at);
        const __m512 reference = _mm512_load_ps(w.reference + at);
        const auto weight_of = [&](const float* score, int key) {
            const __m512 weight = exp2_rough(_mm512_fmsub_ps(_mm512_load_ps(score), factor, reference));
            return MASKED ? _mm512_maskz_mov_ps(sight.of(key), weight) : weight;
        };
        __m512 sum0 = _mm512_load_ps(w.sums + at), sum1 = _mm512_setzero_ps();
        scores = w.scores + tile * kTile;
        bf16* weights = w.weights + tile * (kTileBytes / 2);
        // Pairs of keys fill a row of a tile; behind `count` rows are zero up to the tile's end.
        const int padded = round_up(count, kPairs);
        for (int start = 0; start < padded; start += kPairs, weights += COLUMNS * (kTileBytes / 2)) {
            const int pairs = std::clamp((count - start) / 2, 0, kTile);
            for (int i = 0; i < pairs; ++i, scores += 2 * kWidth) {
                const __m512 weight0 = weight_of(scores, start + 2 * i);
                const __m512 weight1 = weight_of(scores + kWidth, start + 2 * i + 1);
                sum0 = _mm512_add_ps(sum0, weight0);
                sum1 = _mm512_add_ps(sum1, weight1);
                _mm512_store_si512(weights + i * kPairs, pair_words(weight0, weight1));
            }
            for (int i = pairs; i < kTile; ++i) {
                __m512 weight = _mm512_setzero_ps();
                if (start + 2 * i < count) weight = weight_of(scores, start + 2 * i);
                sum0 = _mm512_add_ps(sum0, weight);
                _mm512_store_si512(weights + i * kPairs, pair_words(weight, _mm512_setzero_ps()));
            }
        }
        _mm512_store_ps(w.sums + at, _mm512_add_ps(sum0, sum1));
    }
}

// Whether COLUMNS tiles from `column` see all keys [first, first + count).
template <int COLUMNS>
bool is_all_seen(int column, int first, int count, const Work& w) {
    bool all = true;
    for (int at = column; at < column + COLUMNS * kTile; at += kTile) {
        const __m512i firsts = _mm512_load_si512(w.first + at), lasts = _mm512_load_si512(w.last + at);
        all &= _mm512_reduce_max_epi32(firsts) <= first && _mm512_reduce_min_epi32(lasts) >= first + count;
    }
    return all;
}

// Whether no column of them sees any.
template <int COLUMNS>
bool is_none_seen(int column, int first, int count, const Work& w) {
    bool none = true;
    for (int at = column; at < column + COLUMNS * kTile; at += kTile) {
        const __m512i firsts = _mm512_load_si512(w.first + at), lasts = _mm512_load_si512(w.last + at);
        none &= _mm512_reduce_max_epi32(lasts) <= first || _mm512_reduce_min_epi32(firsts) >= first + count;
    }
    return none;
}

// Turns the values of keys [first, first + count); zeros behind them.
void turn_values(const Attention& a, const AttentionBlock& b, int first, int count, const Work& w) {
    const int dim_tiles = w.value_dims / kTile;
    const WordPairs order;
    KeyOffsets offsets(a, b.request, b.kv_head, first);
    for (int key = 0; key < count; key += kPairs) {
        const bf16* sources[kPairs];
        const int num = std::min(kPairs, count - key);
        for (int i = 0; i < num; ++i) {
            sources[i] = static_cast<const bf16*>(a.values) + offsets.next();
        }
        for (int d = 0; d < w.value_dims; d += kPairs) {
            const int part = a.head_size - d;
            __m512i lows[kTile], highs[kTile];
            for (int i = 0; i < kTile; ++i) {
                const __m512i even = 2 * i < num ? load_pairs(sources[2 * i] + d, part) : _mm512_setzero_si512();
                const __m512i odd =
                    2 * i + 1 < num ? load_pairs(sources[2 * i + 1] + d, part) : _mm512_setzero_si512();
                lows[i] = _mm512_permutex2var_epi16(even, order.low, odd);
                highs[i] = _mm512_permutex2var_epi16(even, order.high, odd);
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
void add_tiles(int dim_tile, int steps, const Work& w, float* values) {
    constexpr int kStride = COLUMNS * kTile * 4;
    const int64_t turned_step = int64_t{w.value_dims / kTile} * (kTileBytes / 2);
    const bf16* turned = w.turned + dim_tile * (kTileBytes / 2);
    const bf16* weights = w.weights;
    float* below = values + kTile * COLUMNS * kTile;
    _tile_loadd(0, values, kStride);
    if constexpr (COLUMNS > 1) _tile_loadd(1, values + kTile, kStride);
    if constexpr (DIMS > 1) _tile_loadd(2, below, kStride);
    if constexpr (DIMS > 1 && COLUMNS > 1) _tile_loadd(3, below + kTile, kStride);
    for (int step = 0; step < steps; ++step, turned += turned_step, weights += COLUMNS * (kTileBytes / 2)) {
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
    _tile_stored(0, values, kStride);
    if constexpr (COLUMNS > 1) _tile_stored(1, values + kTile, kStride);
    if constexpr (DIMS > 1) _tile_stored(2, below, kStride);
    if constexpr (DIMS > 1 && COLUMNS > 1) _tile_stored(3, below + kTile, kStride);
}

template <int COLUMNS>
void add_values(int column, int count, const Work& w) {
    const int steps = (count + kPairs - 1) / kPairs;
    float* values = w.values + int64_t{column} * w.value_dims;
    int dim = 0;
    for (; dim + 2 <= w.value_dims / kTile; dim += 2, values += 2 * kTile * COLUMNS * kTile) {
        add_tiles<2, COLUMNS>(dim, steps, w, values);
    }
    if (dim < w.value_dims / kTile) add_tiles<1, COLUMNS>(dim, steps, w, values);
}

template <int COLUMNS>
void attend_columns(const Attention& a, const KeyTile* keys, int first, int count, const Work& w) {
    const int key_tiles = (count + kTile - 1) / kTile;
    for (int column = 0; column < w.columns; column += COLUMNS * kTile) {
        if (is_none_seen<COLUMNS>(column, first, count, w)) continue;
        score<COLUMNS>(keys, key_tiles, column, w);
        if (is_all_seen<COLUMNS>(column, first, count, w)) {
            soften<COLUMNS, false>(column, first, count, a.scale, w);
        } else {
            soften<COLUMNS, true>(column, first, count, a.scale, w);
        }
        add_values<COLUMNS>(column, count, w);
    }
}

// Turns the result back: column by column into the block's state.
void read_state(const Attention& a, int rows, const Work& w, const AttentionState& state) {
    const int size = round_up(a.head_size, VF);
    for (int row = 0; row < rows; ++row) {
        const bool is_empty = w.sums[row] == 0.0f;
        state.greatest[row] = is_empty ? -__builtin_inff() : w.reference[row] / kLog2e;
        state.sum[row] = w.sums[row];
    }
    for (int column = 0; column < rows; column += kTile) {
        const float* values = w.values + int64_t{column / w.width * w.width} * w.value_dims + column % w.width;
        for (int d = 0; d < w.value_dims; d += kTile) {
            __m512i tile[kTile];
            for (int i = 0; i < kTile; ++i) tile[i] = _mm512_load_si512(values + int64_t{d + i} * w.width);
            transpose_dwords(tile);
            for (int i = 0; i < std::min(kTile, rows - column); ++i) {
                _mm512_storeu_si512(state.values + int64_t{column + i} * size + d, tile[i]);
            }
        }
    }
}

}  // namespace

bool amx_can_attend(const Attention& a) { return a.is_bf16; }

void amx_attend_block(const Attention& a, const AttentionBlock& b, const AttentionState& state, Ahead& ahead) {
    const int rows = (b.last_query - b.first_query) * (a.num_heads / a.num_kv_heads);
    if (rows <= kFewRows) return amx_attend_few(a, b, rows, state, ahead);
    const Work w = make_work(rows, a.head_size);
    pack_queries(a, b, rows, w.columns, w.dims, w.queries);
    set_limits(a, b, rows, w);
    std::fill_n(w.reference, w.columns, kNothing);
    std::fill_n(w.sums, w.columns, 0.0f);
    std::fill_n(w.values, int64_t{w.value_dims} * w.columns, 0.0f);
    KeyTile keys[kKeys / kTile];
    for (int key = b.first_key / kTile * kTile; key < b.last_key; key += kKeys) {
        const int count = std::min(kKeys, b.last_key - key);
        find_keys(a, b, key, count, w.dims, w.keys, keys);
        turn_values(a, b, key, count, w);
        w.width == kTile ? attend_columns<1>(a, keys, key, count, w) : attend_columns<2>(a, keys, key, count, w);
    }
    read_state(a, rows, w, state);
}

}  // namespace sl

#endif
