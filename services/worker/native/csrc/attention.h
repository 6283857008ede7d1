// Paged attention: walks the block table in place, softmax online in float32.
#pragma once

#include <algorithm>
#include <cstdint>

#include "isa.h"

namespace sl {

// One layer's attention over one step. Mirrored field by field in attention/native_cpu.py.
//
// Strides are in elements, from token to token; the heads of a token lie one after the other.
struct Attention {
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_size;
    int32_t block_size;
    int32_t is_bf16;  // else float32: of all tensors and of the cache
    int32_t num_reqs;
    const int32_t* query_start_loc;  // [num_reqs + 1]
    const int32_t* seq_lens;         // [num_reqs]
    const int32_t* block_table;      // [num_reqs, block_table_stride]
    int64_t block_table_stride;
    const int64_t* slot_mapping;  // [query_start_loc[num_reqs]]
    void* keys;                   // [num_blocks, block_size, num_kv_heads, head_size]
    void* values;                 // the same
    const void* query;            // [num_tokens, num_heads, head_size]
    int64_t query_stride;
    const void* key;  // [num_tokens, num_kv_heads, head_size]; not in the cache yet
    int64_t key_stride;
    const void* value;  // the same
    int64_t value_stride;
    void* out;  // [num_tokens, num_heads, head_size]
    int64_t out_stride;
    float scale;
    int32_t window;  // a token sees itself and at most window - 1 before it; 0 = all before it
};

// Copies the new keys and values to their slots.
void write_kv(const Attention& attention);

// Attends for all query tokens; their keys and values are in the cache.
void attend(const Attention& attention);

// ---- what the kernels share ----

// Query tokens [first_query, last_query) of a request through one KV head, and keys [first_key,
// last_key). A *row* is one query token through one query head of the group; row = query * group +
// head.
struct AttentionBlock {
    int32_t request;
    int32_t kv_head;
    int32_t first_query;
    int32_t last_query;
    int32_t first_key;
    int32_t last_key;
};

// Softmax state of rows: greatest score (scaled), sum of exp(score - greatest), weighted values.
struct AttentionState {
    float* greatest;  // [rows]
    float* sum;       // [rows]
    float* values;    // [rows, head_size], not divided by sum
};

inline int32_t query_length(const Attention& a, int32_t request) {
    return a.query_start_loc[request + 1] - a.query_start_loc[request];
}

// Position in its sequence of a request's query token.
inline int32_t position_of(const Attention& a, int32_t request, int32_t query) {
    return a.seq_lens[request] - query_length(a, request) + query;
}

// The first key that the token at `position` sees.
inline int32_t first_visible(const Attention& a, int32_t position) {
    return a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
}

// Element offset in the cache of a request's key at `position` through one head.
inline int64_t cache_offset(const Attention& a, int32_t request, int32_t kv_head, int32_t position) {
    const int64_t block = a.block_table[request * a.block_table_stride + position / a.block_size];
    const int64_t slot = block * a.block_size + position % a.block_size;
    return (slot * a.num_kv_heads + kv_head) * a.head_size;
}

// Element offsets in the cache of consecutive keys through one head.
class KeyOffsets {
public:
    KeyOffsets(const Attention& a, int32_t request, int32_t kv_head, int first)
        : a_(a), request_(request), kv_head_(kv_head), key_(first) {}

    int64_t next() {
        if (left_ == 0) {
            left_ = a_.block_size - key_ % a_.block_size;
            offset_ = cache_offset(a_, request_, kv_head_, key_);
        }
        const int64_t found = offset_;
        offset_ += int64_t{a_.num_kv_heads} * a_.head_size;
        ++key_;
        --left_;
        return found;
    }

private:
    const Attention& a_;
    const int32_t request_, kv_head_;
    int key_;
    int left_ = 0;  // keys that follow in the same block
    int64_t offset_ = 0;
};

// What a thread will read next of the cache, to be asked for a little at a time while it computes.
// A decode reads its keys and values once, in pieces too small for the processor to run ahead by
// itself, and it can wait for no more than some lines of memory at once.
class Ahead {
public:
    // Keys from `first` on, `num_keys` of them, through `num_heads` heads from `kv_head`.
    Ahead(const Attention& a, int32_t request, int32_t kv_head, int num_heads, int first, int num_keys)
        : offsets_(a, request, kv_head, first), keys_(static_cast<const char*>(a.keys)),
          values_(static_cast<const char*>(a.values)), num_heads_(num_heads), element_(a.is_bf16 ? 2 : 4),
          bytes_(num_heads * a.head_size * element_), left_(num_keys) {}

    // Asks for as much as one head reads of `num_keys` keys.
    void fetch(int num_keys) {
        for (int n = std::min((num_keys + num_heads_ - 1) / num_heads_, left_); n > 0; --n, --left_) {
            const int64_t offset = offsets_.next() * element_;
            for (int64_t at = offset / kLine * kLine; at < offset + bytes_; at += kLine) {
                __builtin_prefetch(keys_ + at, 0, 2);
                __builtin_prefetch(values_ + at, 0, 2);
            }
        }
    }

private:
    static constexpr int64_t kLine = 64;

    KeyOffsets offsets_;
    const char* keys_;
    const char* values_;
    int num_heads_;
    int64_t element_;
    int64_t bytes_;  // of a key in all heads
    int left_;
};

// Whether there is an AMX kernel for this attention.
bool amx_can_attend(const Attention& attention);

// Computes the state of a block's rows over its keys.
void amx_attend_block(const Attention&, const AttentionBlock&, const AttentionState&, Ahead&);

}  // namespace sl
