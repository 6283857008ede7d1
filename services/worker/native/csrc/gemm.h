// Matrix products with weights that are packed once: float32, bfloat16, int8 or int4.
//
// Every row of a result is computed by the same sequence of operations whatever other rows there
// are: with float32 and bfloat16 weights the result is equal to the bit for any number of rows. With
// int8 and int4 weights that holds among calls of up to kMaxDirectRows rows and among calls of more.
#pragma once

#include <cstdint>

namespace sl {

// A packed weight with its optional bias. Made and destroyed through `sl_linear_*`.
struct Linear;

constexpr int64_t kMaxDirectRows = 8;

// out[rows, out_size] = x[rows, in_size] @ weight^T + bias.
//
// x and out are of the linear's dtype (bfloat16 or float32); strides are in elements. Neither needs
// an alignment, and nothing outside [rows, in_size] and [rows, out_size] is touched. Runs
// parallel regions, so it is called outside of a tile.
void linear_run(const Linear& linear, const void* x, int64_t x_stride, int64_t rows, void* out,
                int64_t out_stride);

// The same with out += result; the sum is rounded once.
void linear_run_add(const Linear& linear, const void* x, int64_t x_stride, int64_t rows, void* out,
                    int64_t out_stride);

// The same with a float32 out += result, whatever the linear's dtype.
void linear_run_add_float(const Linear& linear, const void* x, int64_t x_stride, int64_t rows,
                          float* out, int64_t out_stride);

// For a linear made as gated, whose weight is a gate above an equally large `up`:
// out[rows, out_size / 2] = silu(x @ gate^T) * (x @ up^T), rounded once.
void linear_run_gated(const Linear& linear, const void* x, int64_t x_stride, int64_t rows,
                      void* out, int64_t out_stride);

// out[num_ids, in_size] = rows of the weight, as the products see it; out is of the linear's dtype.
// An embedding that is also the output head needs no second copy of its table.
void linear_lookup(const Linear& linear, const int64_t* ids, int64_t num_ids, void* out,
                   int64_t out_stride);

}  // namespace sl
