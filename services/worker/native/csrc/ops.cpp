#include "ops.h"

#include <algorithm>
#include <cmath>

namespace sl {
namespace {

// Calls body(d, count) for the vectors of `size` elements; count < VF at the end only.
template <class Body>
inline void each_vector(int size, Body&& body) {
    int d = 0;
    for (; d + VF <= size; d += VF) body(d, VF);
    if (d < size) body(d, size - d);
}

template <class Source, class T>
inline void norm_row(const Source* x, const T* weight, float eps, int size, T* out) {
    vf sums{};
    each_vector(size, [&](int d, int count) {
        const vf value = load_part(x + d, count);
        sums += value * value;
    });
    const float factor = 1.0f / std::sqrt(hsum(sums) / static_cast<float>(size) + eps);
    each_vector(size, [&](int d, int count) {
        const vf value = load_part(x + d, count) * factor * load_part(weight + d, count);
        store_part(out + d, value, count);
    });
}

// in and out may be the same.
template <class T>
inline void rotate_head(const T* in, const float* rotation, int rotary_dim, int head_size, T* out) {
    const int half = rotary_dim / 2;
    each_vector(half, [&](int d, int count) {
        const vf cosine = load_part(rotation + d, count), sine = load_part(rotation + half + d, count);
        const vf first = load_part(in + d, count), second = load_part(in + half + d, count);
        store_part(out + d, first * cosine - second * sine, count);
        store_part(out + half + d, second * cosine + first * sine, count);
    });
    if (in != out) std::copy(in + rotary_dim, in + head_size, out + rotary_dim);
}

template <class T>
void rotate_and_write_as(const Attention& a, const Rotary& rotary) {
    const int size = a.head_size;
    const int64_t kv_size = int64_t{a.num_kv_heads} * size;
    const int64_t elements = int64_t{a.num_heads + 2 * a.num_kv_heads} * size;
    const T* query_norm = static_cast<const T*>(rotary.query_norm);
    const T* key_norm = static_cast<const T*>(rotary.key_norm);
    each_row(a.query_start_loc[a.num_reqs], elements, [&](int64_t token) {
        const float* rotation = rotary.rotations + token * rotary.rotary_dim;
        T* query = const_cast<T*>(static_cast<const T*>(a.query)) + token * a.query_stride;
        T* key = const_cast<T*>(static_cast<const T*>(a.key)) + token * a.key_stride;
        const T* value = static_cast<const T*>(a.value) + token * a.value_stride;
        T* key_slot = static_cast<T*>(a.keys) + a.slot_mapping[token] * kv_size;
        T* value_slot = static_cast<T*>(a.values) + a.slot_mapping[token] * kv_size;
        for (int head = 0; head < a.num_heads; ++head, query += size) {
            if (query_norm) norm_row(query, query_norm, rotary.eps, size, query);
            rotate_head(query, rotation, rotary.rotary_dim, size, query);
        }
        for (int head = 0; head < a.num_kv_heads; ++head, key += size, key_slot += size) {
            if (key_norm) norm_row(key, key_norm, rotary.eps, size, key);
            rotate_head<T>(key, rotation, rotary.rotary_dim, size, key_slot);
        }
        std::copy(value, value + kv_size, value_slot);
    });
}

}  // namespace

template <class T>
void rms_norm(const float* x, const T* weight, float eps, int size, T* out) {
    norm_row(x, weight, eps, size, out);
}

template void rms_norm(const float*, const float*, float, int, float*);
template void rms_norm(const float*, const bf16*, float, int, bf16*);

void rotations(const int64_t* positions, int64_t num_tokens, const float* frequencies, int num_frequencies,
               float* out) {
    // A cosine and a sine cost as much as some 30 elements of the others.
    each_row(num_tokens, int64_t{num_frequencies} * 30, [&](int64_t token) {
        const float position = static_cast<float>(positions[token]);
        float* cosines = out + token * 2 * num_frequencies;
        for (int i = 0; i < num_frequencies; ++i) {
            const float angle = position * frequencies[i];
            cosines[i] = std::cos(angle);
            cosines[num_frequencies + i] = std::sin(angle);
        }
    });
}

void rotate_and_write(const Attention& a, const Rotary& rotary) {
    a.is_bf16 ? rotate_and_write_as<bf16>(a, rotary) : rotate_and_write_as<float>(a, rotary);
}

}  // namespace sl
