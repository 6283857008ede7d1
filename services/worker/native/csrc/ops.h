// The small operations between the matrix products: norms, rotation, writing the cache, embedding.
//
// Each token is computed by itself, in float32, in an order that depends on its size only. T is the
// model's dtype: float or bf16.
#pragma once

#include <cstdint>

#include "attention.h"
#include "vec.h"

namespace sl {

// out[row] = x[row] / sqrt(mean(x[row]²) + eps) * weight, for `rows` rows of `size`; strides in
// elements. Runs its own parallel region if there is enough to do.
template <class T>
void rms_norm(const float* x, int64_t x_stride, const T* weight, float eps, int64_t rows, int size, T* out,
              int64_t out_stride);

// Cosines, then sines, of positions[token] * frequencies[i]: [num_tokens][2][num_frequencies].
void rotations(const int64_t* positions, int64_t num_tokens, const float* frequencies, int num_frequencies,
               float* out);

// What happens to a layer's fused q, k, v before attention.
struct Rotary {
    const float* rotations;  // of the step, see above
    int rotary_dim;          // elements of a head that are rotated, from the first on; halves paired
    const void* query_norm;  // [head_size], applied per head before rotation; null = none
    const void* key_norm;
    float eps;
};

// Normalises and rotates queries in place, keys on their way into the cache, where values follow
// them. `attention.query` is writable: queries, keys and values stand side by side.
void rotate_and_write(const Attention& attention, const Rotary& rotary);

}  // namespace sl
