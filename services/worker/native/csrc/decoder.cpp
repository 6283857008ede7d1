// A decoder of the Llama kind: one call runs all layers over a step's tokens.
//
// The residual is float32 whatever the model's dtype is; what is normalised, projected and attended
// is of the model's dtype. Mirrored field by field in models/_native_decoder.py.
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "attention.h"
#include "gemm.h"
#include "ops.h"
#include "pool.h"
#include "vec.h"

namespace sl {
namespace {

struct DecoderLayer {
    const Linear* qkv;
    const Linear* out;
    const Linear* gate_up;
    const Linear* down;
    const void* attention_norm;  // [hidden_size]
    const void* mlp_norm;        // [hidden_size]
    const void* query_norm;      // [head_size]; null = none
    const void* key_norm;        // [head_size]; null = none
    int64_t window;              // see Attention
};

struct Decoder {
    int32_t num_layers;
    int32_t hidden_size;
    int32_t intermediate_size;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_size;
    int32_t rotary_dim;
    int32_t is_bf16;
    float eps;
    float scale;                 // of attention's scores
    const float* frequencies;    // [rotary_dim / 2], radians per position
    const void* embedding;       // [vocab_size, hidden_size]; null = looked up in `head`
    const Linear* head;          // only if embedding is null
    const void* norm;            // [hidden_size]
    const DecoderLayer* layers;  // [num_layers]
};

struct DecoderStep {
    const int64_t* input_ids;      // [num_tokens]
    const int64_t* positions;      // [num_tokens]
    void* const* kv_caches;        // [num_layers], keys first
    int64_t values_offset;         // bytes from a layer's keys to its values
    const Attention* attention;    // the step's batch
    void* hidden;                  // [num_tokens, hidden_size]: after the final norm
};

// The step's activations, one below the other.
template <class T>
struct Buffers {
    float* residual;   // [num_tokens, hidden_size]
    float* rotations;  // [num_tokens, rotary_dim]
    T* normed;         // [num_tokens, hidden_size]
    T* qkv;            // [num_tokens, (num_heads + 2 * num_kv_heads) * head_size]
    T* attended;       // [num_tokens, num_heads * head_size]
    T* inner;          // [num_tokens, intermediate_size]; shares memory with qkv and attended

    Buffers(const Decoder& d, int64_t tokens) {
        const int64_t qkv_size = int64_t{d.num_heads + 2 * d.num_kv_heads} * d.head_size;
        const int64_t attended_size = int64_t{d.num_heads} * d.head_size;
        const auto aligned = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
        const int64_t residual_bytes = aligned(tokens * d.hidden_size * 4);
        const int64_t rotation_bytes = aligned(tokens * d.rotary_dim * 4);
        const int64_t normed_bytes = aligned(tokens * d.hidden_size * sizeof(T));
        const int64_t qkv_bytes = aligned(tokens * qkv_size * sizeof(T));
        const int64_t rest_bytes = std::max<int64_t>(qkv_bytes + tokens * attended_size * sizeof(T),
                                                     tokens * d.intermediate_size * sizeof(T));
        char* memory = static_cast<char*>(
            shared_scratch(Shared::kStep, residual_bytes + rotation_bytes + normed_bytes + rest_bytes));
        residual = reinterpret_cast<float*>(memory);
        rotations = reinterpret_cast<float*>(memory += residual_bytes);
        normed = reinterpret_cast<T*>(memory += rotation_bytes);
        qkv = inner = reinterpret_cast<T*>(memory += normed_bytes);
        attended = reinterpret_cast<T*>(memory + qkv_bytes);
    }
};

template <class T>
void embed(const Decoder& d, const DecoderStep& step, int64_t tokens, const Buffers<T>& buffers) {
    const int size = d.hidden_size;
    const T* table = static_cast<const T*>(d.embedding);
    if (!table) linear_lookup(*d.head, step.input_ids, tokens, buffers.normed, size);
    each_row(tokens, size, [&](int64_t token) {
        const T* source = table ? table + step.input_ids[token] * size : buffers.normed + token * size;
        float* target = buffers.residual + token * size;
        for (int i = 0; i < size; ++i) target[i] = to_float(source[i]);
    });
}

template <class T>
void attend_layer(const Decoder& d, const DecoderStep& step, int index, int64_t tokens, const T* normed,
                  const Buffers<T>& buffers) {
    const DecoderLayer& layer = d.layers[index];
    const int64_t stride = int64_t{d.num_heads + 2 * d.num_kv_heads} * d.head_size;
    linear_run(*layer.qkv, normed, d.hidden_size, tokens, buffers.qkv, stride);
    Attention attention = *step.attention;
    attention.keys = step.kv_caches[index];
    attention.values = static_cast<char*>(attention.keys) + step.values_offset;
    attention.query = buffers.qkv;
    attention.key = buffers.qkv + int64_t{d.num_heads} * d.head_size;
    attention.value = buffers.qkv + int64_t{d.num_heads + d.num_kv_heads} * d.head_size;
    attention.query_stride = attention.key_stride = attention.value_stride = stride;
    attention.out = buffers.attended;
    attention.out_stride = int64_t{d.num_heads} * d.head_size;
    attention.scale = d.scale;
    attention.window = static_cast<int32_t>(layer.window);
    rotate_and_write(attention, {buffers.rotations, d.rotary_dim, layer.query_norm, layer.key_norm, d.eps});
    attend(attention);
}

// Runs in all threads of the pool at once.
template <class T>
void forward(const Decoder& d, const DecoderStep& step) {
    const int64_t tokens = step.attention->query_start_loc[step.attention->num_reqs];
    const int64_t size = d.hidden_size;
    const Buffers<T> buffers(d, tokens);
    const auto norm_row = [&](int64_t row, const void* weight, T* out) {
        rms_norm(buffers.residual + row * size, static_cast<const T*>(weight), d.eps, d.hidden_size, out + row * size);
    };
    const auto norm = [&](const void* weight, T* out) {
        each_row(tokens, size, [&](int64_t row) { norm_row(row, weight, out); });
        return out;
    };
    const auto normed = [&](const void* weight) {
        if (tokens * size > kElementsOfTile) return norm(weight, buffers.normed);
        // So little each thread computes for itself: nobody waits for another.
        T* const own = static_cast<T*>(thread_scratch(Scratch::kNormed, tokens * size * sizeof(T)));
        for (int64_t row = 0; row < tokens && !is_late(); ++row) norm_row(row, weight, own);
        return own;
    };
    rotations(step.positions, tokens, d.frequencies, d.rotary_dim / 2, buffers.rotations);
    embed(d, step, tokens, buffers);
    for (int index = 0; index < d.num_layers; ++index) {
        const DecoderLayer& layer = d.layers[index];
        attend_layer(d, step, index, tokens, normed(layer.attention_norm), buffers);
        linear_run_add_float(*layer.out, buffers.attended, int64_t{d.num_heads} * d.head_size, tokens,
                             buffers.residual, size);
        linear_run_gated(*layer.gate_up, normed(layer.mlp_norm), size, tokens, buffers.inner,
                         d.intermediate_size);
        linear_run_add_float(*layer.down, buffers.inner, d.intermediate_size, tokens, buffers.residual, size);
    }
    norm(d.norm, static_cast<T*>(step.hidden));
}

}  // namespace
}  // namespace sl

extern "C" {

SL_EXPORT void sl_decoder_forward(const sl::Decoder* decoder, const sl::DecoderStep* step) {
    sl::together([&] {
        decoder->is_bf16 ? sl::forward<sl::bf16>(*decoder, *step) : sl::forward<float>(*decoder, *step);
    });
}
}
