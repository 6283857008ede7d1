// What the attention kernels on AMX share.
#pragma once

#include "attention.h"

#if SL_LEVEL >= SL_AMX

#include <algorithm>

#include "vec.h"

namespace sl {

constexpr int kKeys = 256;        // keys of one softmax update
constexpr int kTile = 16;         // rows of a tile; columns too, in float
constexpr int kPairs = 32;        // bfloat16 elements of a tile's row
constexpr int kTileBytes = 1024;
constexpr float kNothing = -1e30f;  // finite: differences of it are 0, not NaN
// Weights are relative to a reference that need not be the greatest score: it moves only once that is
// so far above it (in units of log2), so that values are seldom rescaled.
constexpr float kFar = 8.0f;

inline int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

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

// Words of two rows of 32, side by side.
struct WordPairs {
    __m512i low;   // the first 16 words of each
    __m512i high;  // the others

    WordPairs() {
        alignas(64) uint16_t at[32];
        for (int i = 0; i < 32; ++i) at[i] = i / 2 + (i & 1) * 32;
        low = _mm512_load_si512(at);
        for (int i = 0; i < 32; ++i) at[i] += 16;
        high = _mm512_load_si512(at);
    }
};

// Queries as tiles [columns / 16][dims / 32] of pairs of dims × columns; a column is a row of the block.
inline void pack_queries(const Attention& a, const AttentionBlock& b, int rows, int columns, int dims,
                         bf16* queries) {
    const int group = a.num_heads / a.num_kv_heads;
    const int64_t first_token = a.query_start_loc[b.request] + b.first_query;
    bf16* target = queries;
    for (int tile = 0; tile < columns / kTile; ++tile) {
        for (int d = 0; d < dims; d += kPairs, target += kTileBytes / 2) {
            __m512i turned[kTile];
            for (int i = 0; i < kTile; ++i) {
                const int row = tile * kTile + i;
                if (row >= rows) {
                    turned[i] = _mm512_setzero_si512();
                    continue;
                }
                const bf16* query = static_cast<const bf16*>(a.query) +
                                    (first_token + row / group) * a.query_stride +
                                    (b.kv_head * group + row % group) * a.head_size;
                turned[i] = load_pairs(query + d, a.head_size - d);
            }
            transpose_dwords(turned);
            for (int i = 0; i < kTile; ++i) _mm512_store_si512(target + i * kPairs, turned[i]);
        }
    }
}

// Where the tile of 16 keys from `key` lies, and the bytes from key to key.
struct KeyTile {
    const bf16* start;
    int64_t stride;
};

// Keys as [count][dims], zeros behind head_size.
inline void copy_keys(const Attention& a, const AttentionBlock& b, int first, int count, int dims, bf16* keys) {
    KeyOffsets offsets(a, b.request, b.kv_head, first);
    for (int key = 0; key < count; ++key) {
        const bf16* source = static_cast<const bf16*>(a.keys) + offsets.next();
        for (int d = 0; d < dims; d += kPairs) {
            _mm512_store_si512(keys + int64_t{key} * dims + d, load_pairs(source + d, a.head_size - d));
        }
    }
}

// The tiles of up to kKeys keys from `first`; `memory` is [kKeys][dims], used if they must be copied.
inline void find_keys(const Attention& a, const AttentionBlock& b, int first, int count, int dims, bf16* memory,
                      KeyTile* keys) {
    const bool is_direct = a.block_size % kTile == 0 && a.head_size % kPairs == 0;
    if (!is_direct) copy_keys(a, b, first, count, dims, memory);
    const auto* const cache = static_cast<const bf16*>(a.keys);
    const int64_t cache_stride = int64_t{a.num_kv_heads} * a.head_size * 2;
    for (int tile = 0; tile * kTile < count; ++tile) {
        keys[tile] = is_direct ? KeyTile{cache + cache_offset(a, b.request, b.kv_head, first + tile * kTile), cache_stride}
                               : KeyTile{memory + int64_t{tile} * kTile * dims, dims * 2};
    }
}

// Computes the state of a block of few rows, as those of a decode, over its keys. See
// amx_attend_block.
void amx_attend_few(const Attention&, const AttentionBlock&, int rows, const AttentionState&, Ahead&);
constexpr int kFewRows = 8;

}  // namespace sl

#endif
