// Makes packed weights from plain ones, and reads rows of them back.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "gemm.h"
#include "gemm_layout.h"
#include "gemm_quantized.h"
#include "pool.h"

namespace sl {
namespace {

constexpr size_t kAlignment = 64;  // of a cache line, an AMX tile's row and a vector

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory for a weight. Weights lie together in chunks of large pages: all of them are read once a
// step, which would miss the translation of every small page. Null = there is none.
std::shared_ptr<uint8_t> weight_memory(size_t bytes) {
    constexpr size_t kPage = size_t{2} << 20, kChunk = size_t{32} << 20;
    static std::mutex mutex;
    static std::weak_ptr<uint8_t> chunk;  // the last one
    static size_t size = 0, used = 0;
    const std::lock_guard guard(mutex);
    std::shared_ptr<uint8_t> memory = chunk.lock();
    if (memory == nullptr || size - used < bytes) {
        size = divide_up(std::max(bytes, kChunk), kPage) * kPage;
        auto* pages = static_cast<uint8_t*>(std::aligned_alloc(kPage, size));
        if (pages == nullptr) return nullptr;
        madvise(pages, size, MADV_HUGEPAGE);  // small ones, where there are no others
        memory.reset(pages, std::free);
        chunk = memory;
        used = 0;
    }
    uint8_t* const start = memory.get() + used;
    used += divide_up(bytes, kAlignment) * kAlignment;
    return {memory, start};
}

Linear* make_linear(Format format, bool is_bf16, bool is_gated, int64_t out_size, int64_t in_size) {
    const int64_t num_panels =
        is_gated ? 2 * divide_up(out_size / 2, kLanes) : divide_up(out_size, kLanes);
    auto* linear = new Linear{format,
                              is_bf16,
                              is_gated,
                              out_size,
                              in_size,
                              divide_up(in_size, kGroup),
                              num_panels,
                              nullptr,
                              nullptr,
                              std::vector<float>(num_panels * kLanes, 0.0f)};
    linear->memory = weight_memory(num_panels * linear->panel_bytes());
    linear->data = linear->memory.get();
    if (linear->data != nullptr) return linear;
    delete linear;
    return nullptr;
}

template <class T>
void set_bias(Linear& linear, const T* bias) {
    for (int64_t panel = 0; panel < linear.num_panels; ++panel) {
        for (int lane = 0; lane < linear.num_lanes(panel); ++lane) {
            linear.bias[panel * kLanes + lane] = to_float(bias[linear.first_row(panel) + lane]);
        }
    }
}

// Where a step keeps the weight of an input (within the step) and a lane.
float& place(FloatStep& step, int64_t input, int lane) { return step.values[input][lane]; }
bf16& place(Bf16Step& step, int64_t input, int lane) {
    return step.pairs[input / 2][lane][input % 2];
}

template <class Step, class T>
void pack(Linear& linear, const T* weight) {
    parallel_for(linear.num_panels, [&](int64_t panel) {
        auto* steps = reinterpret_cast<Step*>(linear.data + panel * linear.panel_bytes());
        std::memset(static_cast<void*>(steps), 0, linear.panel_bytes());
        for (int lane = 0; lane < linear.num_lanes(panel); ++lane) {
            const T* row = weight + (linear.first_row(panel) + lane) * linear.in_size;
            for (int64_t i = 0; i < linear.in_size; ++i) {
                place(steps[i / kGroup], i % kGroup, lane) = row[i];
            }
        }
    });
}

// values[out_size][in_size] int8, scales[out_size][num_steps] float16.
void pack_int8(Linear& linear, const int8_t* values, const uint16_t* scales) {
    parallel_for(linear.num_panels, [&](int64_t panel) {
        auto* steps = reinterpret_cast<Int8Step*>(linear.data + panel * linear.panel_bytes());
        std::memset(steps, 0, linear.panel_bytes());
        for (int lane = 0; lane < linear.num_lanes(panel); ++lane) {
            const int64_t row = linear.first_row(panel) + lane;
            for (int64_t s = 0; s < linear.num_steps; ++s) {
                steps[s].scale[lane] = scales[row * linear.num_steps + s];
            }
            for (int64_t i = 0; i < linear.in_size; ++i) {
                steps[i / kGroup].pairs[i % kGroup / 2][lane][i % 2] = values[row * linear.in_size + i];
            }
        }
    });
}

// values[out_size][ceil(in_size / 2)]: two in a byte, the first in the lower half;
// scales and leasts [out_size][num_steps] float16.
void pack_int4(Linear& linear, const uint8_t* values, const uint16_t* scales,
               const uint16_t* leasts) {
    const int64_t row_bytes = divide_up(linear.in_size, 2);
    parallel_for(linear.num_panels, [&](int64_t panel) {
        auto* steps = reinterpret_cast<Int4Step*>(linear.data + panel * linear.panel_bytes());
        std::memset(steps, 0, linear.panel_bytes());
        for (int lane = 0; lane < linear.num_lanes(panel); ++lane) {
            const int64_t row = linear.first_row(panel) + lane;
            for (int64_t s = 0; s < linear.num_steps; ++s) {
                steps[s].scale[lane] = scales[row * linear.num_steps + s];
                steps[s].least[lane] = leasts[row * linear.num_steps + s];
            }
            for (int64_t i = 0; i < linear.in_size; ++i) {
                const uint8_t both = values[row * row_bytes + i / 2];
                const uint32_t value = i % 2 ? both >> 4 : both & 15;
                const int shift = static_cast<int>(i % 8 / 2 * 4 + i % 2 * 16);
                steps[i / kGroup].words[i % kGroup / 8][lane] |= value << shift;
            }
        }
    });
}

float half_to_float(uint16_t half) {
    return load_half(std::array<uint16_t, VF>{half}.data())[0];
}

// The weight of an input of the step and a lane, as a product of many rows sees it.
float weight_at(const FloatStep& step, int input, int lane) { return step.values[input][lane]; }
float weight_at(const Bf16Step& step, int input, int lane) {
    return to_float(step.pairs[input / 2][lane][input % 2]);
}
float weight_at(const Int8Step& step, int input, int lane) {
    return half_to_float(step.scale[lane]) * step.pairs[input / 2][lane][input % 2];
}
float weight_at(const Int4Step& step, int input, int lane) {
    const uint32_t value = step.words[input / 8][lane] >> (input % 8 / 2 * 4 + input % 2 * 16) & 15;
    return half_to_float(step.scale[lane]) * static_cast<float>(value) +
           half_to_float(step.least[lane]);
}

template <class Step, class T>
void lookup(const Linear& linear, const int64_t* ids, int64_t num_ids, T* out, int64_t out_stride) {
    parallel_for(num_ids, [&](int64_t index) {
        const auto* steps = reinterpret_cast<const Step*>(linear.panel(ids[index] / kLanes));
        const int lane = static_cast<int>(ids[index] % kLanes);
        for (int64_t i = 0; i < linear.in_size; ++i) {
            out[index * out_stride + i] =
                from_float<T>(weight_at(steps[i / kGroup], static_cast<int>(i % kGroup), lane));
        }
    });
}

template <class T>
void lookup_as(const Linear& linear, const int64_t* ids, int64_t num_ids, T* out,
               int64_t out_stride) {
    switch (linear.format) {
        case Format::kFloat32: return lookup<FloatStep>(linear, ids, num_ids, out, out_stride);
        case Format::kBfloat16: return lookup<Bf16Step>(linear, ids, num_ids, out, out_stride);
        case Format::kInt8: return lookup<Int8Step>(linear, ids, num_ids, out, out_stride);
        case Format::kInt4: return lookup<Int4Step>(linear, ids, num_ids, out, out_stride);
    }
}

void set_bias(Linear& linear, const void* bias) {
    if (bias == nullptr) return;
    if (linear.is_bf16) {
        set_bias(linear, static_cast<const bf16*>(bias));
    } else {
        set_bias(linear, static_cast<const float*>(bias));
    }
}

}  // namespace

void linear_lookup(const Linear& linear, const int64_t* ids, int64_t num_ids, void* out,
                   int64_t out_stride) {
    if (linear.is_bf16) {
        lookup_as(linear, ids, num_ids, static_cast<bf16*>(out), out_stride);
    } else {
        lookup_as(linear, ids, num_ids, static_cast<float*>(out), out_stride);
    }
}

}  // namespace sl

extern "C" {

// What creates a linear returns null without memory; it is destroyed with sl_linear_destroy. A bias
// [out_size] may be null; it is of the dtype of the rows, bfloat16 or float32.

// Packs weight [out_size, in_size], of the dtype of the rows.
SL_EXPORT sl::Linear* sl_linear_create(const void* weight, const void* bias, int64_t out_size,
                                       int64_t in_size, int is_bf16, int is_gated) {
    using namespace sl;
    const Format format = is_bf16 ? Format::kBfloat16 : Format::kFloat32;
    Linear* linear = make_linear(format, is_bf16, is_gated, out_size, in_size);
    if (linear == nullptr) return nullptr;
    if (is_bf16) {
        pack<Bf16Step>(*linear, static_cast<const bf16*>(weight));
    } else {
        pack<FloatStep>(*linear, static_cast<const float*>(weight));
    }
    set_bias(*linear, bias);
    return linear;
}

// Packs a weight of 8 bits, see pack_int8.
SL_EXPORT sl::Linear* sl_linear_create_int8(const int8_t* values, const uint16_t* scales,
                                            const void* bias, int64_t out_size, int64_t in_size,
                                            int is_bf16, int is_gated) {
    using namespace sl;
    Linear* linear = make_linear(Format::kInt8, is_bf16, is_gated, out_size, in_size);
    if (linear == nullptr) return nullptr;
    pack_int8(*linear, values, scales);
    set_bias(*linear, bias);
    return linear;
}

// Packs a weight of 4 bits, see pack_int4.
SL_EXPORT sl::Linear* sl_linear_create_int4(const uint8_t* values, const uint16_t* scales,
                                            const uint16_t* leasts, const void* bias,
                                            int64_t out_size, int64_t in_size, int is_bf16,
                                            int is_gated) {
    using namespace sl;
    Linear* linear = make_linear(Format::kInt4, is_bf16, is_gated, out_size, in_size);
    if (linear == nullptr) return nullptr;
    pack_int4(*linear, values, scales, leasts);
    set_bias(*linear, bias);
    return linear;
}

SL_EXPORT void sl_linear_destroy(sl::Linear* linear) {
    delete linear;
}

SL_EXPORT void sl_linear_lookup(const sl::Linear* linear, const int64_t* ids, int64_t num_ids,
                                void* out, int64_t out_stride) {
    sl::linear_lookup(*linear, ids, num_ids, out, out_stride);
}
}
