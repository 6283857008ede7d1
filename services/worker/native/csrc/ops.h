// The small operations between the matrix products: norms, rotation, writing the cache, embedding.
//
// Each token is computed by itself, in float32, in an order that depends on its size only. T is the
// model's dtype: float or bf16.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "pool.h"
#include "vec.h"

namespace sl {

constexpr int64_t kElementsOfTile = 16384;  // below it a region costs more than it saves

// Calls body(row) for all rows of so many elements in one region, several rows to a tile.
template <class Body>
void each_row(int64_t rows, int64_t elements, Body&& body) {
    const int64_t per_tile = std::max<int64_t>(kElementsOfTile / std::max<int64_t>(elements, 1), 1);
    parallel_for((rows + per_tile - 1) / per_tile, [&](int64_t tile) {
        const int64_t end = std::min(rows, (tile + 1) * per_tile);
        for (int64_t row = tile * per_tile; row < end; ++row) body(row);
    });
}

// out = x / sqrt(mean(x²) + eps) * weight, for a row of `size`.
template <class T>
void rms_norm(const float* x, const T* weight, float eps, int size, T* out);

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
