// How packed weights lie in memory. One layout serves every level.
//
// A panel holds kLanes output columns, so that a vector of partial sums has a lane per column. Its
// elements run along the input dimension in steps of kGroup: one step is an AMX tile of bfloat16, and
// the group that shares a scale in quantized formats. Columns and steps that the weight does not
// have are zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "vec.h"

namespace sl {

constexpr int kLanes = 16;
constexpr int kGroup = 32;

enum class Format : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3 };

// w[lane][k] = values[k][lane].
struct FloatStep {
    float values[kGroup][kLanes];
};

// w[lane][2 i + j] = pairs[i][lane][j]: what dot products of pairs (AMX, AVX-512-BF16) read.
struct Bf16Step {
    bf16 pairs[kGroup / 2][kLanes][2];
};

// w[lane][2 i + j] = scale[lane] * pairs[i][lane][j]; scales are float16.
struct Int8Step {
    uint16_t scale[kLanes];
    int8_t pairs[kGroup / 2][kLanes][2];
};

// w[lane][k] = scale[lane] * v + least[lane] with v in 0..15; scale and least are float16. Word c of
// a lane holds k = 8 c .. 8 c + 7: the even ones in bits 0-15, the odd ones in bits 16-31, so that one
// shift yields the pair (k, k + 1) in the low bits of two 16-bit halves.
struct Int4Step {
    uint16_t scale[kLanes];
    uint16_t least[kLanes];
    uint32_t words[kGroup / 8][kLanes];
};

static_assert(sizeof(Bf16Step) == 1024 && sizeof(Int8Step) == 544 && sizeof(Int4Step) == 320);

constexpr bool is_quantized(Format format) {
    return format == Format::kInt8 || format == Format::kInt4;
}

constexpr size_t step_bytes(Format format) {
    switch (format) {
        case Format::kFloat32: return sizeof(FloatStep);
        case Format::kBfloat16: return sizeof(Bf16Step);
        case Format::kInt8: return sizeof(Int8Step);
        case Format::kInt4: return sizeof(Int4Step);
    }
    return 0;
}

struct Linear {
    Format format;
    bool is_bf16;   // of x and out
    bool is_gated;  // panels alternate between the upper (gate) and the lower half (up) of the rows
    int64_t out_size;
    int64_t in_size;
    int64_t num_steps;   // of kGroup inputs
    int64_t num_panels;  // of kLanes outputs
    std::shared_ptr<uint8_t> memory;
    uint8_t* data;       // [num_panels][num_steps] steps, in `memory`
    std::vector<float> bias;  // [num_panels * kLanes] in the panels' order

    size_t panel_bytes() const { return num_steps * step_bytes(format); }
    const uint8_t* panel(int64_t index) const { return data + index * panel_bytes(); }

    // Row of the plain weight that a panel's first lane holds, and how many lanes hold one.
    int64_t first_row(int64_t panel) const {
        if (!is_gated) return panel * kLanes;
        return panel / 2 * kLanes + (panel % 2 ? out_size / 2 : 0);
    }
    int num_lanes(int64_t panel) const {
        const int64_t size = is_gated ? out_size / 2 : out_size;
        const int64_t rest = size - (is_gated ? panel / 2 : panel) * kLanes;
        return static_cast<int>(rest < kLanes ? rest : kLanes);
    }
};

}  // namespace sl
