// Planning, splitting and merging of attention, and the kernel for every level and dtype.
//
// The float32 kernel computes a row by itself: what a row gives depends on its query, its keys and
// their positions only, bit for bit, whatever else is in the batch and whether it comes as a decode
// or inside a prompt. Hence the fixed boundaries: keys go in chunks of kChunk and in parts of kPart,
// counted from position 0, and parts are merged in order.
#include "attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace sl {
namespace {

constexpr int kChunk = 64;       // keys of one softmax update
constexpr int kPart = 512;       // keys after which the state starts anew
constexpr int kRowsOfBlock = 192; // rows that share what is loaded of the cache
constexpr int kRowsSplit = 16;   // blocks of at most so many rows are split by parts over threads
constexpr int kTilesPerThread = 4;
constexpr int kKeysAhead = 256;  // of the next tile: they and those at work fit the second-level cache
constexpr float kNothing = -std::numeric_limits<float>::infinity();

float exp_of(float x) { return vexp(splat(x))[0]; }

// ---- the kernel ----

// Lane j of the results: bit S of j tells whether it comes from the first or the second operand.
template <int S>
inline void exchange(vf& a, vf& b) {
    vi low, high;
    for (int j = 0; j < VF; ++j) {
        low[j] = j & S ? VF + j - S : j;
        high[j] = j & S ? VF + j : j + S;
    }
    const vf first = __builtin_shuffle(a, b, low);
    b = __builtin_shuffle(a, b, high);
    a = first;
}

template <int S>
inline void transpose_stage(vf* rows) {
    if constexpr (S > 0) {
        for (int i = 0; i < VF; ++i) {
            if (!(i & S)) exchange<S>(rows[i], rows[i + S]);
        }
        transpose_stage<S / 2>(rows);
    }
}

// VF rows of VF floats, turned in place.
inline void transpose(vf* rows) { transpose_stage<VF / 2>(rows); }

// A chunk of the cache as float32: keys turned to [size][kChunk], values [kChunk][size], where size
// is head_size rounded up to whole vectors.
struct Chunk {
    float* keys;
    float* values;
    int size;
};

template <class T>
void load_chunk(const Attention& a, const AttentionBlock& b, int first, int count, Chunk& chunk) {
    const T* keys = static_cast<const T*>(a.keys);
    const T* values = static_cast<const T*>(a.values);
    const int size = chunk.size;
    for (int group = 0; group < kChunk && group < (count + VF - 1) / VF * VF; group += VF) {
        int64_t offsets[VF];
        const int num = std::min(VF, count - group);
        for (int i = 0; i < num; ++i) {
            offsets[i] = cache_offset(a, b.request, b.kv_head, first + group + i);
        }
        for (int d = 0; d < size; d += VF) {
            const int part = std::min(VF, a.head_size - d);
            vf rows[VF] = {};
            for (int i = 0; i < num; ++i) {
                rows[i] = load_part(keys + offsets[i] + d, part);
                store(chunk.values + (group + i) * size + d, load_part(values + offsets[i] + d, part));
            }
            transpose(rows);
            for (int i = 0; i < VF; ++i) store(chunk.keys + (d + i) * kChunk + group, rows[i]);
        }
    }
}

// scores[row][kChunk] = queries[row] · keys, for N rows side by side.
template <int N>
void score_rows(const float* queries, const Chunk& chunk, int num_dims, float* scores) {
    constexpr int kWide = 4;  // vectors of keys held at a time
    for (int column = 0; column < kChunk; column += kWide * VF) {
        vf sums[N][kWide] = {};
        for (int d = 0; d < num_dims; ++d) {
            vf keys[kWide];
            for (int v = 0; v < kWide; ++v) keys[v] = load(chunk.keys + d * kChunk + column + v * VF);
            for (int row = 0; row < N; ++row) {
                const vf query = splat(queries[row * chunk.size + d]);
                for (int v = 0; v < kWide; ++v) sums[row][v] += query * keys[v];
            }
        }
        for (int row = 0; row < N; ++row) {
            for (int v = 0; v < kWide; ++v) store(scores + row * kChunk + column + v * VF, sums[row][v]);
        }
    }
}

// values[row] = values[row] * decay[row] + sum of weights[row][key] * chunk.values[key], the keys
// from `begin` to `count`.
template <int N>
void add_values(
    const float* weights, const float* decay, const Chunk& chunk, int begin, int count, float* values) {
    constexpr int kWide = VF == 16 ? 4 : 2;  // vectors of a value held at a time
    const int size = chunk.size;
    for (int d = 0; d < size; d += kWide * VF) {
        const int wide = std::min(kWide, (size - d) / VF);
        vf sums[N][kWide];
        for (int row = 0; row < N; ++row) {
            for (int v = 0; v < wide; ++v) sums[row][v] = load(values + row * size + d + v * VF) * decay[row];
        }
        const auto add = [&](auto num_vectors) {
            for (int key = begin; key < count; ++key) {
                for (int row = 0; row < N; ++row) {
                    const vf weight = splat(weights[row * kChunk + key]);
                    for (int v = 0; v < num_vectors; ++v) {
                        sums[row][v] += weight * load(chunk.values + key * size + d + v * VF);
                    }
                }
            }
        };
        switch (wide) {
            case 4: add(std::integral_constant<int, 4>{}); break;
            case 3: add(std::integral_constant<int, 3>{}); break;
            case 2: add(std::integral_constant<int, 2>{}); break;
            default: add(std::integral_constant<int, 1>{});
        }
        for (int row = 0; row < N; ++row) {
            for (int v = 0; v < wide; ++v) store(values + row * size + d + v * VF, sums[row][v]);
        }
    }
}

// From scores to weights in place. [first, last) is what the row sees of the chunk. Returns by how
// much the state so far shrinks.
inline float soften(float* scores, int first, int last, float scale, float& greatest, float& sum) {
    constexpr int kVectors = kChunk / VF;
    vf most = splat(kNothing);
    vi lanes;
    for (int i = 0; i < VF; ++i) lanes[i] = i;
    for (int v = 0; v < kVectors; ++v) {
        const vi key = lanes + v * VF;
        const vf score = load(scores + v * VF) * scale;
        const vf seen = (key >= first) & (key < last) ? score : splat(kNothing);
        store(scores + v * VF, seen);
        most = vmax(most, seen);
    }
    const float before = greatest;
    greatest = std::max(before, hmax(most));
    vf sums{};
    for (int v = 0; v < kVectors; ++v) {
        const vf weight = vexp(load(scores + v * VF) - greatest);
        store(scores + v * VF, weight);
        sums += weight;
    }
    const float decay = exp_of(before - greatest);
    sum = sum * decay + hsum(sums);
    return decay;
}

// A state that has seen nothing.
void clear(const AttentionState& state, int rows, int size) {
    std::fill_n(state.greatest, rows, kNothing);
    std::fill_n(state.sum, rows, 0.0f);
    std::fill_n(state.values, static_cast<int64_t>(rows) * size, 0.0f);
}

// Adds what `part` has seen to `state`.
void merge(const AttentionState& state, const AttentionState& part, int rows, int size) {
    for (int row = 0; row < rows; ++row) {
        if (part.greatest[row] == kNothing) continue;
        const float greatest = std::max(state.greatest[row], part.greatest[row]);
        const float old_share = exp_of(state.greatest[row] - greatest);
        const float new_share = exp_of(part.greatest[row] - greatest);
        float* values = state.values + static_cast<int64_t>(row) * size;
        const float* added = part.values + static_cast<int64_t>(row) * size;
        for (int d = 0; d < size; ++d) values[d] = values[d] * old_share + added[d] * new_share;
        state.sum[row] = state.sum[row] * old_share + part.sum[row] * new_share;
        state.greatest[row] = greatest;
    }
}

template <int N, class T>
void attend_rows(const Attention& a, const AttentionBlock& b, int first_row, int first_key, int count,
                 const float* queries, const Chunk& chunk, const AttentionState& state) {
    const int group = a.num_heads / a.num_kv_heads;
    alignas(64) float weights[N * kChunk];
    float decay[N];
    score_rows<N>(queries + first_row * chunk.size, chunk, a.head_size, weights);
    for (int i = 0; i < N; ++i) {
        const int row = first_row + i;
        const int position = position_of(a, b.request, b.first_query + row / group);
        const int first = std::max(first_visible(a, position) - first_key, 0);
        const int last = std::min(position + 1 - first_key, count);
        if (first >= last) {
            std::fill_n(weights + i * kChunk, kChunk, 0.0f);
            decay[i] = 1.0f;
            continue;
        }
        decay[i] = soften(weights + i * kChunk, first, last, a.scale, state.greatest[row], state.sum[row]);
    }
    add_values<N>(weights, decay, chunk, std::max(b.first_key - first_key, 0), count, state.values + first_row * chunk.size);
}

// Computes the state of a block's rows over keys [first, last) of one part.
template <class T>
void attend_part(const Attention& a, const AttentionBlock& b, int first, int last, const float* queries,
                 Chunk& chunk, const AttentionState& state) {
    const int rows = (b.last_query - b.first_query) * (a.num_heads / a.num_kv_heads);
    clear(state, rows, chunk.size);
    for (int key = first / kChunk * kChunk; key < last; key += kChunk) {
        const int count = std::min(kChunk, last - key);
        load_chunk<T>(a, b, key, count, chunk);
        int row = 0;
        for (; row + 4 <= rows; row += 4) {
            attend_rows<4, T>(a, b, row, key, count, queries, chunk, state);
        }
        switch (rows - row) {
            case 3: attend_rows<3, T>(a, b, row, key, count, queries, chunk, state); break;
            case 2: attend_rows<2, T>(a, b, row, key, count, queries, chunk, state); break;
            case 1: attend_rows<1, T>(a, b, row, key, count, queries, chunk, state); break;
            default: break;
        }
    }
}

int padded_size(const Attention& a) { return (a.head_size + VF - 1) / VF * VF; }

template <class T>
void attend_block(const Attention& a, const AttentionBlock& b, const AttentionState& state) {
    const int group = a.num_heads / a.num_kv_heads;
    const int rows = (b.last_query - b.first_query) * group;
    const int size = padded_size(a);
    Chunk chunk;
    chunk.size = size;
    chunk.keys = static_cast<float*>(thread_scratch(Scratch::kKernel, int64_t{2} * size * kChunk * 4));
    chunk.values = chunk.keys + size * kChunk;
    float* queries = static_cast<float*>(thread_scratch(Scratch::kQueries, int64_t{rows} * (2 * size + 2) * 4));
    const AttentionState part{queries + int64_t{rows} * 2 * size, queries + int64_t{rows} * (2 * size + 1),
                              queries + int64_t{rows} * size};
    const int64_t first_token = a.query_start_loc[b.request] + b.first_query;
    for (int row = 0; row < rows; ++row) {
        const T* query = static_cast<const T*>(a.query) + (first_token + row / group) * a.query_stride +
                         (b.kv_head * group + row % group) * a.head_size;
        for (int d = 0; d < size; ++d) {
            queries[row * size + d] = d < a.head_size ? to_float(query[d]) : 0.0f;
        }
    }
    clear(state, rows, size);
    for (int key = b.first_key; key < b.last_key; key = (key / kPart + 1) * kPart) {
        const int last = std::min(b.last_key, (key / kPart + 1) * kPart);
        attend_part<T>(a, b, key, last, queries, chunk, part);
        merge(state, part, rows, size);
    }
}

// ---- the plan ----

// Blocks that lie side by side in `Plan::blocks` and whose states are merged when all are there.
struct Split {
    int32_t first_block;
    int32_t num_blocks;
};

struct Plan {
    std::vector<AttentionBlock> blocks;
    std::vector<int32_t> tiles;  // first block of each, and the end: what a thread claims at once
    std::vector<bool> is_split;  // per block
    std::vector<Split> splits;

    int64_t num_tiles() const { return static_cast<int64_t>(tiles.size()) - 1; }
};

void add_request(const Attention& a, int32_t request, Plan& plan) {
    const int group = a.num_heads / a.num_kv_heads;
    const int queries = query_length(a, request);
    // The heads of a token lie side by side: where there is enough to do, one thread reads them all.
    const bool is_claimed_whole = queries * group <= kRowsSplit && a.num_reqs >= kTilesPerThread * num_threads();
    const int per_block = std::max(kRowsOfBlock / group, 1);
    // The last queries see most: begun first, they do not end alone.
    for (int last = queries; last > 0; last -= std::min(per_block, last)) {
        const int first = std::max(last - per_block, 0);
        const int last_key = position_of(a, request, last - 1) + 1;
        const int first_key = first_visible(a, position_of(a, request, first));
        const bool is_split = (last - first) * group <= kRowsSplit && last_key - first_key > kPart;
        for (int head = 0; head < a.num_kv_heads; ++head) {
            if (!is_split) {
                if (head == 0 || !is_claimed_whole) plan.tiles.push_back(plan.blocks.size());
                plan.blocks.push_back({request, head, first, last, first_key, last_key});
                plan.is_split.push_back(false);
                continue;
            }
            Split split{static_cast<int32_t>(plan.blocks.size()), 0};
            for (int key = first_key; key < last_key; key = (key / kPart + 1) * kPart) {
                const int end = std::min(last_key, (key / kPart + 1) * kPart);
                plan.tiles.push_back(plan.blocks.size());
                plan.blocks.push_back({request, head, first, last, key, end});
                plan.is_split.push_back(true);
                ++split.num_blocks;
            }
            plan.splits.push_back(split);
        }
    }
}

void make_plan(const Attention& a, Plan& plan) {
    plan.blocks.clear();
    plan.tiles.clear();
    plan.is_split.clear();
    plan.splits.clear();
    for (int32_t request = 0; request < a.num_reqs; ++request) add_request(a, request, plan);
    plan.tiles.push_back(plan.blocks.size());
}

int num_rows_of(const Attention& a, const AttentionBlock& b) {
    return (b.last_query - b.first_query) * (a.num_heads / a.num_kv_heads);
}

int64_t state_floats(const Attention& a, int rows) { return int64_t{rows} * (padded_size(a) + 2); }

AttentionState state_at(const Attention& a, float* memory, int rows) {
    const int64_t size = padded_size(a);
    return {memory + rows * size, memory + rows * (size + 1), memory};
}

// Where the states of split blocks are, kRowsSplit rows each.
AttentionState partial_state(const Attention& a, float* partial, int64_t block) {
    return state_at(a, partial + block * state_floats(a, kRowsSplit), kRowsSplit);
}

template <class T>
void write_out(const Attention& a, const AttentionBlock& b, const AttentionState& state) {
    const int group = a.num_heads / a.num_kv_heads;
    const int rows = num_rows_of(a, b);
    const int size = padded_size(a);
    const int64_t first_token = a.query_start_loc[b.request] + b.first_query;
    for (int row = 0; row < rows; ++row) {
        T* out = static_cast<T*>(a.out) + (first_token + row / group) * a.out_stride +
                 (b.kv_head * group + row % group) * a.head_size;
        const float inverse = 1.0f / state.sum[row];
        for (int d = 0; d < size; d += VF) {
            const vf value = load(state.values + row * size + d) * inverse;
            store_part(out + d, value, std::min(VF, a.head_size - d));
        }
    }
}

template <class T>
void compute_block(const Attention& a, const AttentionBlock& b, const AttentionState& state, Ahead& ahead) {
    if (amx_can_attend(a)) {
        amx_attend_block(a, b, state, ahead);
    } else {
        attend_block<T>(a, b, state);
    }
}

// What a tile begins with; nothing of one with many rows, which is busy for long with what it reads.
Ahead ahead_of(const Attention& a, const Plan& plan, int64_t tile) {
    if (tile >= plan.num_tiles()) return Ahead(a, 0, 0, 1, 0, 0);
    const AttentionBlock& block = plan.blocks[plan.tiles[tile]];
    const bool is_small = num_rows_of(a, block) <= kRowsSplit;
    return Ahead(a, block.request, block.kv_head, plan.tiles[tile + 1] - plan.tiles[tile], block.first_key,
                 is_small ? std::min(block.last_key - block.first_key, kKeysAhead) : 0);
}

template <class T>
void run_tile(const Attention& a, const Plan& plan, float* partial, int64_t tile, Claim& claim) {
    const int32_t first = plan.tiles[tile], last = plan.tiles[tile + 1];
    int64_t floats = 0;
    for (int32_t b = first; b < last; ++b) floats += state_floats(a, num_rows_of(a, plan.blocks[b]));
    auto* const memory = static_cast<float*>(thread_scratch(Scratch::kStates, floats * 4));
    const auto each_block = [&](auto body) {
        float* next = memory;
        for (int32_t b = first; b < last; ++b) {
            const int rows = num_rows_of(a, plan.blocks[b]);
            body(b, rows, state_at(a, next, rows));
            next += state_floats(a, rows);
        }
    };
    Ahead ahead = ahead_of(a, plan, tile + num_threads());  // a guess: what this thread claims next
    each_block([&](int32_t b, int, const AttentionState& state) {
        compute_block<T>(a, plan.blocks[b], state, ahead);
    });
    if (!claim.may_write()) return;
    each_block([&](int32_t b, int rows, const AttentionState& state) {
        if (!plan.is_split[b]) return write_out<T>(a, plan.blocks[b], state);
        const AttentionState kept = partial_state(a, partial, b);
        std::copy_n(state.values, int64_t{rows} * padded_size(a), kept.values);
        std::copy_n(state.greatest, rows, kept.greatest);
        std::copy_n(state.sum, rows, kept.sum);
    });
}

template <class T>
void merge_split(const Attention& a, const Plan& plan, float* partial, const Split& split) {
    const AttentionBlock& block = plan.blocks[split.first_block];
    const AttentionState whole = partial_state(a, partial, split.first_block);
    for (int i = 1; i < split.num_blocks; ++i) {
        merge(whole, partial_state(a, partial, split.first_block + i), num_rows_of(a, block), padded_size(a));
    }
    write_out<T>(a, block, whole);
}

template <class T>
void attend_as(const Attention& a, const Plan& plan) {
    float* partial = nullptr;
    if (!plan.splits.empty()) {
        const int64_t floats = plan.blocks.size() * state_floats(a, kRowsSplit);
        partial = static_cast<float*>(shared_scratch(Shared::kPartial, floats * 4));
    }
    parallel_for_claimed(plan.num_tiles(), true, [&](int64_t tile, Claim& claim) {
        run_tile<T>(a, plan, partial, tile, claim);
    });
    parallel_for(plan.splits.size(), [&](int64_t i) { merge_split<T>(a, plan, partial, plan.splits[i]); });
}

template <class T>
void write_kv_as(const Attention& a) {
    const int64_t size = int64_t{a.num_kv_heads} * a.head_size;
    const int64_t num_tokens = a.query_start_loc[a.num_reqs];
    constexpr int64_t kTokens = 32;
    parallel_for((num_tokens + kTokens - 1) / kTokens, [&](int64_t tile) {
        const int64_t end = std::min(num_tokens, (tile + 1) * kTokens);
        for (int64_t token = tile * kTokens; token < end; ++token) {
            const int64_t place = a.slot_mapping[token] * size;
            const T* key = static_cast<const T*>(a.key) + token * a.key_stride;
            const T* value = static_cast<const T*>(a.value) + token * a.value_stride;
            std::memcpy(static_cast<T*>(a.keys) + place, key, size * sizeof(T));
            std::memcpy(static_cast<T*>(a.values) + place, value, size * sizeof(T));
        }
    });
}

}  // namespace

void write_kv(const Attention& a) {
    a.is_bf16 ? write_kv_as<bf16>(a) : write_kv_as<float>(a);
}

void attend(const Attention& a) {
    thread_local Plan plan;  // the vectors keep their memory from call to call
    make_plan(a, plan);
    a.is_bf16 ? attend_as<bf16>(a, plan) : attend_as<float>(a, plan);
}

#if SL_LEVEL < SL_AMX
bool amx_can_attend(const Attention&) { return false; }
void amx_attend_block(const Attention&, const AttentionBlock&, const AttentionState&, Ahead&) {}
#endif

}  // namespace sl

extern "C" {

SL_EXPORT void sl_attend(const sl::Attention* attention) {
    sl::write_kv(*attention);
    sl::attend(*attention);
}
}
