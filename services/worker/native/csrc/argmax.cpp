// The greatest of each line of logits, and its place.
#include <cstdint>
#include <limits>

#include "isa.h"
#include "pool.h"
#include "vec.h"

namespace sl {
namespace {

// The greatest value; a NaN if there is one.
template <class T>
float greatest_of(const T* line, int64_t size) {
    const vf least = splat(-std::numeric_limits<float>::infinity());
    vf most[4] = {least, least, least, least};
    vi is_nan{};
    int64_t i = 0;
    for (; i + 4 * VF <= size; i += 4 * VF) {
        for (int v = 0; v < 4; ++v) {
            const vf value = load(line + i + v * VF);
            most[v] = vmax(value, most[v]);
            is_nan |= value != value;
        }
    }
    float greatest = hmax(vmax(vmax(most[0], most[1]), vmax(most[2], most[3])));
    bool has_nan = false;
    for (int lane = 0; lane < VF; ++lane) has_nan |= is_nan[lane] != 0;
    for (; i < size; ++i) {
        const float value = to_float(line[i]);
        has_nan |= value != value;
        if (value > greatest) greatest = value;
    }
    return has_nan ? std::numeric_limits<float>::quiet_NaN() : greatest;
}

// The first place of `wanted`, which is there.
template <class T>
int64_t place_of(const T* line, int64_t size, float wanted) {
    const bool is_nan = wanted != wanted;
    const auto is_it = [&](float value) { return is_nan ? value != value : value == wanted; };
    int64_t start = 0;
    for (; start + VF <= size; start += VF) {
        const vf value = load(line + start);
        const vi found = is_nan ? value != value : value == splat(wanted);
        int32_t any = 0;
        for (int lane = 0; lane < VF; ++lane) any |= found[lane];
        if (any) break;
    }
    while (start < size && !is_it(to_float(line[start]))) ++start;
    return start;
}

template <class T>
void argmax(const T* logits, int64_t lines, int64_t size, int64_t stride, int64_t* places, float* values) {
    parallel_for(lines, [&](int64_t index) {
        const T* line = logits + index * stride;
        values[index] = greatest_of(line, size);
        places[index] = place_of(line, size, values[index]);
    });
}

}  // namespace
}  // namespace sl

extern "C" {

SL_EXPORT void sl_argmax(const void* logits, int is_bf16, int64_t lines, int64_t size, int64_t stride,
                         int64_t* places, float* values) {
    if (is_bf16) {
        sl::argmax(static_cast<const sl::bf16*>(logits), lines, size, stride, places, values);
    } else {
        sl::argmax(static_cast<const float*>(logits), lines, size, stride, places, values);
    }
}
}
