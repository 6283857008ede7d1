// Makes packed weights from plain ones, and reads rows of them back.
#include <algorithm>
#include <cstdlib>
#include <new>

#include "gemm.h"
#include "gemm_layout.h"
#include "pool.h"

namespace sl {
namespace {

constexpr size_t kAlignment = 64;  // of a cache line, an AMX tile's row and a vector

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

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
                              std::vector<float>(num_panels * kLanes, 0.0f)};
    const size_t bytes = divide_up(num_panels * linear->panel_bytes(), kAlignment) * kAlignment;
    linear->data = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, bytes));
    return linear;
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
    parallel_for(linear.num_panels, [&](int64_t panel, int) {
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

template <class Step, class T>
void lookup(const Linear& linear, const int64_t* ids, int64_t num_ids, T* out, int64_t out_stride) {
    parallel_for(num_ids, [&](int64_t index, int) {
        const int64_t id = ids[index];
        auto* steps = reinterpret_cast<const Step*>(linear.panel(id / kLanes));
        for (int64_t i = 0; i < linear.in_size; ++i) {
            auto& step = const_cast<Step&>(steps[i / kGroup]);
            out[index * out_stride + i] = place(step, i % kGroup, static_cast<int>(id % kLanes));
        }
    });
}

}  // namespace

void linear_lookup(const Linear& linear, const int64_t* ids, int64_t num_ids, void* out,
                   int64_t out_stride) {
    if (linear.is_bf16) {
        lookup<Bf16Step>(linear, ids, num_ids, static_cast<bf16*>(out), out_stride);
    } else {
        lookup<FloatStep>(linear, ids, num_ids, static_cast<float*>(out), out_stride);
    }
}

}  // namespace sl

extern "C" {

// Packs weight [out_size, in_size] and bias [out_size] or null, all bfloat16 or all float32. Returns
// null without memory. Destroyed with sl_linear_destroy.
SL_EXPORT sl::Linear* sl_linear_create(const void* weight, const void* bias, int64_t out_size,
                                       int64_t in_size, int is_bf16, int is_gated) {
    using namespace sl;
    const Format format = is_bf16 ? Format::kBfloat16 : Format::kFloat32;
    Linear* linear = make_linear(format, is_bf16, is_gated, out_size, in_size);
    if (linear->data == nullptr) {
        delete linear;
        return nullptr;
    }
    if (is_bf16) {
        pack<Bf16Step>(*linear, static_cast<const bf16*>(weight));
        if (bias != nullptr) set_bias(*linear, static_cast<const bf16*>(bias));
    } else {
        pack<FloatStep>(*linear, static_cast<const float*>(weight));
        if (bias != nullptr) set_bias(*linear, static_cast<const float*>(bias));
    }
    return linear;
}

SL_EXPORT void sl_linear_destroy(sl::Linear* linear) {
    std::free(linear->data);
    delete linear;
}

SL_EXPORT void sl_linear_lookup(const sl::Linear* linear, const int64_t* ids, int64_t num_ids,
                                void* out, int64_t out_stride) {
    sl::linear_lookup(*linear, ids, num_ids, out, out_stride);
}
}
