// Splits a product into tiles for the pool, and writes what the level's kernels compute.
#include "gemm.h"

#include <algorithm>
#include <type_traits>

#include "gemm_amx.h"
#include "gemm_float.h"
#include "gemm_layout.h"
#include "gemm_pairs.h"
#include "gemm_quantized.h"
#include "pool.h"

namespace sl {
namespace {

#if SL_LEVEL >= SL_AMX
constexpr int64_t kBlockRows = kAmxRows;
#else
constexpr int64_t kBlockRows = 30;
#endif
constexpr int kBlockPanels = 4;
constexpr int64_t kSumsStride = kBlockPanels * kLanes;

// Tiles of so many rows and kBlockPanels panels are written at once, so they may run twice.
constexpr int64_t kTwiceRows = 2 * kBlockRows;

// Rows of x, and panels of their weights, that one tile takes. So many bytes of x stay in the
// second-level cache while tile by tile all panels pass by.
constexpr int64_t kTileBytes = 1 << 20;
constexpr int64_t kLeastTileRows = 4 * kBlockRows;
constexpr int64_t kTilePanels = 8;
constexpr int64_t kTilesPerThread = 4;
// Panels of a tile that are so many bytes stay in that cache beside x.
constexpr size_t kNearBytes = 512 << 10;
// Weights that are widened first should be used by many rows.
constexpr int64_t kWidenedTileRows = 1024;
constexpr int64_t kWidenedTilePanels = 4;

enum class Target { kStore, kAdd, kAddFloat, kGated };

struct Product {
    const Linear& linear;
    const void* x;
    int64_t x_stride;
    int64_t rows;
    Target target;
    void* out;
    int64_t out_stride;
};

// Rows as kernels read them: of their type, padded with zeros to whole steps.
template <class T>
struct Inputs {
    const T* data;
    int64_t stride;
};

// What bfloat16 rows are computed with; elsewhere they are widened.
constexpr bool kHasBf16Kernels = SL_LEVEL >= SL_AVX512_BF16;

template <class T, class From>
Inputs<T> widened(const Product& product) {
    const Linear& linear = product.linear;
    const auto* x = static_cast<const From*>(product.x);
    if constexpr (std::is_same_v<T, From>) {
        if (linear.in_size % kGroup == 0) return {x, product.x_stride};
    }
    const int64_t stride = linear.num_steps * kGroup;
    T* const rows = static_cast<T*>(shared_scratch(Shared::kRows, product.rows * stride * sizeof(T)));
    parallel_for(product.rows, [&](int64_t row) {
        const From* from = x + row * product.x_stride;
        T* to = rows + row * stride;
        for (int64_t i = 0; i < linear.in_size; ++i) to[i] = from_float<T>(to_float(from[i]));
        for (int64_t i = linear.in_size; i < stride; ++i) to[i] = T{};
    });
    return {rows, stride};
}

struct Tile {
    int64_t first_row, num_rows;
    int64_t first_panel, num_panels;
};

class Tiles {
public:
    explicit Tiles(const Product& product)
        : rows_(product.rows), panels_(product.linear.num_panels) {
        const bool is_plain = !is_quantized(product.linear.format);
        const int64_t row_bytes = product.linear.num_steps * kGroup * (product.linear.is_bf16 ? 2 : 4);
        const int64_t most_rows = is_plain ? std::max(kLeastTileRows, kTileBytes / row_bytes) : kWidenedTileRows;
        const int64_t row_tiles = divide_up(rows_, most_rows);
        tile_rows_ = divide_up(divide_up(rows_, row_tiles), kBlockRows) * kBlockRows;
        tile_panels_ = rows_ <= kTwiceRows ? kBlockPanels
                       : is_plain          ? kTilePanels
                                           : kWidenedTilePanels;
        const int64_t wanted = kTilesPerThread * num_threads();
        while (tile_panels_ > 2 && count() < wanted) tile_panels_ /= 2;
    }

    int64_t count() const { return divide_up(rows_, tile_rows_) * columns(); }

    bool may_run_twice() const { return tile_rows_ <= kTwiceRows && tile_panels_ <= kBlockPanels; }

    // Tiles of the same rows follow one another, in an order in which threads that claim tiles in turn
    // have neighbours: each reads its share of the weights in one piece.
    Tile at(int64_t index) const {
        const int64_t row = index / columns() * tile_rows_;
        int64_t column = index % columns();
        const int64_t threads = num_threads(), share = columns() / threads;
        if (column < share * threads) column = column % threads * share + column / threads;
        const int64_t panel = column * tile_panels_;
        return {row, std::min(tile_rows_, rows_ - row), panel, std::min(tile_panels_, panels_ - panel)};
    }

private:
    static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

    int64_t columns() const { return divide_up(panels_, tile_panels_); }

    int64_t rows_, panels_, tile_rows_, tile_panels_;
};

// Weights as kernels read them.
struct Panels {
    const uint8_t* data;
    size_t panel_bytes;
    int64_t num_steps;
    bool is_near;  // in the second-level cache already
};

// Computes sums[rows][panels * kLanes] of up to kBlockRows rows and kBlockPanels panels.
class Multiplier {
public:
#if SL_LEVEL >= SL_AMX
    template <class Step>
    void run(Inputs<bf16> x, int64_t rows, const Panels& panels, int num_panels, float* sums) {
        config_.set(rows);
        AmxBlock block{x.data,           x.stride, panels.data, panels.panel_bytes, panels.num_steps,
                       panels.is_near, sums,     kSumsStride};
        const auto advance = [&](int count) {
            num_panels -= count;
            block.panel += count * block.panel_bytes;
            block.sums += count * kLanes;
        };
        amx_fence();
        if (rows > kAmxTileRows) {
            for (; num_panels >= 2; advance(2)) amx_block_2x2(block);
            for (; num_panels >= 1; advance(1)) amx_block_2x1(block);
        } else {
            for (; num_panels >= 4; advance(4)) amx_block_1x4(block);
            for (; num_panels >= 1; advance(1)) amx_block_1x1(block);
        }
        amx_fence();
    }
#elif SL_LEVEL >= SL_AVX512_BF16
    template <class Step>
    void run(Inputs<bf16> x, int64_t rows, const Panels& panels, int num_panels, float* sums) {
        in_pieces<kPairRows, kPairPanels>(rows, num_panels, [&](auto count, int64_t row, int panel,
                                                                int64_t num_rows) {
            pairs_rows<count>(num_rows, x.data + row * x.stride, x.stride,
                              panels.data + panel * panels.panel_bytes, panels.panel_bytes,
                              panels.num_steps, sums + row * kSumsStride + panel * kLanes,
                              kSumsStride);
        });
    }
#endif
    template <class Step>
    void run(Inputs<float> x, int64_t rows, const Panels& panels, int num_panels, float* sums) {
        in_pieces<kFloatRows, kFloatPanels>(rows, num_panels, [&](auto count, int64_t row, int panel,
                                                                  int64_t num_rows) {
            float_rows<Step, count>(num_rows, x.data + row * x.stride, x.stride,
                                    panels.data + panel * panels.panel_bytes, panels.panel_bytes,
                                    panels.num_steps, sums + row * kSumsStride + panel * kLanes,
                                    kSumsStride);
        });
    }

private:
    // Calls body(number of panels, first row, first panel, number of rows) for pieces of at most
    // kRows by kPanels; the number of panels, kPanels or 1, is known to the compiler.
    template <int kRows, int kPanels, class Body>
    static void in_pieces(int64_t rows, int num_panels, Body body) {
        int panel = 0;
        const auto all_rows = [&](auto count) {
            for (int64_t row = 0; row < rows; row += kRows) {
                body(count, row, panel, std::min<int64_t>(rows - row, kRows));
            }
            panel += count;
        };
        while (num_panels - panel >= kPanels) all_rows(std::integral_constant<int, kPanels>());
        while (panel < num_panels) all_rows(std::integral_constant<int, 1>());
    }

#if SL_LEVEL >= SL_AMX
    AmxRowsConfig config_;
#endif
};

// Sums of some rows and panels, and where the results of the first row go. T is what they become.
template <class T>
struct Results {
    const Linear& linear;
    const float* sums;
    int64_t first_panel;
    int num_panels;
    int64_t num_rows;
    T* out;
    int64_t out_stride;
};

// Calls put(where, values, count) for all results, up to VF of a row at a time.
template <class T, class Put>
inline void each_vector(const Results<T>& results, Put put) {
    const Linear& linear = results.linear;
    const float* const bias = linear.bias.data() + results.first_panel * kLanes;
    const int64_t column = linear.first_row(results.first_panel);
    const int num_lanes =
        (results.num_panels - 1) * kLanes + linear.num_lanes(results.first_panel + results.num_panels - 1);
    for (int64_t row = 0; row < results.num_rows; ++row) {
        const float* const sums = results.sums + row * kSumsStride;
        T* const out = results.out + row * results.out_stride + column;
        int lane = 0;
        for (; lane + VF <= num_lanes; lane += VF) {
            put(out + lane, load(sums + lane) + load(bias + lane), VF);
        }
        if (lane < num_lanes) {
            put(out + lane, load(sums + lane) + load(bias + lane), num_lanes - lane);
        }
    }
}

template <class T>
void store_results(const Results<T>& results) {
    each_vector(results, [](T* out, vf values, int count) { store_part(out, values, count); });
}

template <class T>
void add_results(const Results<T>& results) {
    each_vector(results, [](T* out, vf values, int count) {
        store_part(out, load_part(out, count) + values, count);
    });
}

// x / (1 + exp(-x)), as exact as T.
template <class T>
inline vf silu(vf x) {
#if SL_LEVEL >= SL_AVX512
    if constexpr (std::is_same_v<T, bf16>) {
        return x * (vf)_mm512_rcp14_ps((__m512)((vf)exp2_rough((__m512)(x * -kLog2e)) + 1.0f));
    }
#endif
    return x / (vexp(-x) + 1.0f);
}

// The panel of a gate comes before the panel that it gates.
template <class T>
void gate_results(const Results<T>& results) {
    const Linear& linear = results.linear;
    for (int p = 0; p < results.num_panels; p += 2) {
        const int64_t panel = results.first_panel + p;
        const int num_lanes = linear.num_lanes(panel);
        const float* const bias = linear.bias.data() + panel * kLanes;
        for (int64_t row = 0; row < results.num_rows; ++row) {
            const float* const sums = results.sums + row * kSumsStride + p * kLanes;
            T* const out = results.out + row * results.out_stride + linear.first_row(panel);
            for (int lane = 0; lane < num_lanes; lane += VF) {
                const vf gate = load(sums + lane) + load(bias + lane);
                const vf up = load(sums + kLanes + lane) + load(bias + kLanes + lane);
                store_part(out + lane, silu<T>(gate) * up, std::min(num_lanes - lane, VF));
            }
        }
    }
}

// T is the linear's dtype.
template <class T>
void write_as(const Product& product, const float* sums, const Tile& block) {
    const auto results = [&]<class To>(To* out) {
        return Results<To>{product.linear, sums,
                           block.first_panel, static_cast<int>(block.num_panels),
                           block.num_rows, out + block.first_row * product.out_stride,
                           product.out_stride};
    };
    switch (product.target) {
        case Target::kStore: return store_results(results(static_cast<T*>(product.out)));
        case Target::kAdd: return add_results(results(static_cast<T*>(product.out)));
        case Target::kGated: return gate_results(results(static_cast<T*>(product.out)));
        case Target::kAddFloat: return add_results(results(static_cast<float*>(product.out)));
    }
}

// Writes results of the linear's dtype.
void write(const Product& product, const float* sums, const Tile& block) {
    if (product.linear.is_bf16) {
        write_as<bf16>(product, sums, block);
    } else {
        write_as<float>(product, sums, block);
    }
}

// Calls body(block, its panels) for the blocks of a tile; `panels` are those of the tile.
template <class Body>
void each_block(const Tile& tile, const Panels& panels, Body body) {
    // Few rows stay in the first-level cache while all panels of the tile pass by.
    const bool stays = tile.num_panels * panels.panel_bytes <= kNearBytes;
    for (int64_t r = 0; r < tile.num_rows; r += kBlockRows) {
        for (int64_t p = 0; p < tile.num_panels; p += kBlockPanels) {
            const Tile block{tile.first_row + r, std::min(tile.num_rows - r, kBlockRows),
                             tile.first_panel + p,
                             std::min<int64_t>(tile.num_panels - p, kBlockPanels)};
            body(block, Panels{panels.data + p * panels.panel_bytes, panels.panel_bytes, panels.num_steps,
                               stays && (panels.is_near || r > 0)});
        }
    }
}

// Products of a tile's rows and panels; the latter are of Step.
template <class T, class Step>
void run_tile(const Product& product, Inputs<T> x, const Tile& tile, const Panels& panels, Claim& claim) {
    Multiplier multiplier;
    alignas(64) float sums[kTwiceRows * kSumsStride];
    const bool is_written_at_once = tile.num_rows <= kTwiceRows && tile.num_panels <= kBlockPanels;
    each_block(tile, panels, [&](const Tile& block, const Panels& of_block) {
        float* const of_rows = sums + (is_written_at_once ? block.first_row - tile.first_row : 0) * kSumsStride;
        multiplier.run<Step>({x.data + block.first_row * x.stride, x.stride}, block.num_rows, of_block,
                             static_cast<int>(block.num_panels), of_rows);
        if (!is_written_at_once) write(product, sums, block);
    });
    if (is_written_at_once && claim.may_write()) write(product, sums, tile);
}

// Runs body(tile, claim) for all tiles.
template <class Body>
void each_tile(const Product& product, Body body) {
    const Tiles tiles(product);
    parallel_for_claimed(tiles.count(), tiles.may_run_twice(),
                         [&](int64_t index, Claim& claim) { body(tiles.at(index), claim); });
}

template <class T, class Step>
void run_plain(const Product& product, Inputs<T> x) {
    const Linear& linear = product.linear;
    each_tile(product, [&](const Tile& tile, Claim& claim) {
        run_tile<T, Step>(product, x, tile,
                          {linear.panel(tile.first_panel), linear.panel_bytes(), linear.num_steps, false}, claim);
    });
}

// Each tile's panels of Stored steps become Step ones first.
template <class T, class Stored, class Step>
void run_widened(const Product& product, Inputs<T> x) {
    const Linear& linear = product.linear;
    const size_t panel_bytes = linear.num_steps * sizeof(Step);
    each_tile(product, [&](const Tile& tile, Claim& claim) {
        auto* const panels =
            static_cast<uint8_t*>(thread_scratch(Scratch::kPanels, tile.num_panels * panel_bytes));
        for (int64_t p = 0; p < tile.num_panels; ++p) {
            widen_panel<Stored, Step>(linear.panel(tile.first_panel + p), panels + p * panel_bytes,
                                      linear.num_steps);
        }
        run_tile<T, Step>(product, x, tile, {panels, panel_bytes, linear.num_steps, true}, claim);
    });
}

// Rows whose sums are kept in registers at once.
constexpr int64_t kDirectRows = 4;
static_assert(kMaxDirectRows <= kBlockRows);

// sums[rows][kLanes] of one panel, which stays in the first-level cache.
template <class Stored, class Rows>
void direct_panel_rows(int64_t rows, const Rows& x, const uint8_t* panel, int64_t num_steps,
                       float* sums) {
    const auto run = [&]<int kRows>(std::integral_constant<int, kRows>, int64_t first) {
        direct_panel<Stored, kRows>(x.from(first, num_steps), panel, num_steps,
                                    sums + first * kSumsStride, kSumsStride);
    };
    int64_t first = 0;
    for (; rows - first >= kDirectRows; first += kDirectRows) {
        run(std::integral_constant<int, kDirectRows>(), first);
    }
    switch (rows - first) {
        case 1: return run(std::integral_constant<int, 1>(), first);
        case 2: return run(std::integral_constant<int, 2>(), first);
        case 3: return run(std::integral_constant<int, 3>(), first);
    }
}

// Few rows are multiplied with the weights as they are stored.
template <class Stored, class Rows>
void run_direct(const Product& product, const Rows& x) {
    const Linear& linear = product.linear;
    each_tile(product, [&](const Tile& tile, Claim& claim) {
        alignas(64) float sums[kMaxDirectRows * kSumsStride];
        for (int64_t p = 0; p < tile.num_panels; ++p) {
            direct_panel_rows<Stored>(product.rows, x, linear.panel(tile.first_panel + p),
                                      linear.num_steps, sums + p * kLanes);
        }
        if (claim.may_write()) write(product, sums, tile);
    });
}

template <class T>
void sum_rows(Inputs<T> x, int64_t rows, int64_t num_steps, float* sums) {
    for (int64_t row = 0; row < rows; ++row) {
        sum_steps(x.data + row * x.stride, num_steps, sums + row * num_steps);
    }
}

template <class Stored>
void run_direct(const Product& product, Inputs<float> x) {
    const int64_t num_steps = product.linear.num_steps;
    auto* const sums =
        static_cast<float*>(thread_scratch(Scratch::kRows, product.rows * num_steps * sizeof(float)));
    if (!is_late()) sum_rows(x, product.rows, num_steps, sums);
    run_direct<Stored>(product, FloatRows{x.data, x.stride, sums});
}

#if SL_LEVEL >= SL_AVX512_BF16
template <class Stored>
void run_direct(const Product& product, Inputs<bf16> x) {
    const int64_t num_steps = product.linear.num_steps, count = product.rows * num_steps;
    auto* const values = static_cast<int16_t*>(
        thread_scratch(Scratch::kRows, count * (kGroup * sizeof(int16_t) + 2 * sizeof(float))));
    auto* const scales = reinterpret_cast<float*>(values + count * kGroup);
    float* const sums = scales + count;
    if (!is_late()) {
        if constexpr (std::is_same_v<Stored, Int4Step>) sum_rows(x, product.rows, num_steps, sums);
        for (int64_t i = 0; i < count; ++i) {
            const bf16* const step = x.data + i / num_steps * x.stride + i % num_steps * kGroup;
            scales[i] = to_fixed(step, values + i * kGroup);
        }
    }
    run_direct<Stored>(product, FixedRows{values, scales, sums});
}
#endif

template <class Stored>
void run_quantized(const Product& product) {
    const bool is_direct = product.rows <= kMaxDirectRows;
    if (!product.linear.is_bf16) {
        const auto x = widened<float, float>(product);
        if (is_direct) return run_direct<Stored>(product, x);
        return run_widened<float, Stored, FloatStep>(product, x);
    }
    if constexpr (kHasBf16Kernels) {
        const auto x = widened<bf16, bf16>(product);
        if (is_direct) return run_direct<Stored>(product, x);
        return run_widened<bf16, Stored, Bf16Step>(product, x);
    } else {
        const auto x = widened<float, bf16>(product);
        if (is_direct) return run_direct<Stored>(product, x);
        return run_widened<float, Stored, FloatStep>(product, x);
    }
}

void run(const Product& product) {
    if (product.rows == 0) return;
    switch (product.linear.format) {
        case Format::kFloat32:
            return run_plain<float, FloatStep>(product, widened<float, float>(product));
        case Format::kBfloat16:
            if constexpr (kHasBf16Kernels) {
                return run_plain<bf16, Bf16Step>(product, widened<bf16, bf16>(product));
            } else {
                return run_plain<float, Bf16Step>(product, widened<float, bf16>(product));
            }
        case Format::kInt8: return run_quantized<Int8Step>(product);
        case Format::kInt4: return run_quantized<Int4Step>(product);
    }
}

}  // namespace

void linear_run(const Linear& linear, const void* x, int64_t x_stride, int64_t rows, void* out,
                int64_t out_stride) {
    run({linear, x, x_stride, rows, Target::kStore, out, out_stride});
}

void linear_run_add(const Linear& linear, const void* x, int64_t x_stride, int64_t rows, void* out,
                    int64_t out_stride) {
    run({linear, x, x_stride, rows, Target::kAdd, out, out_stride});
}

void linear_run_add_float(const Linear& linear, const void* x, int64_t x_stride, int64_t rows,
                          float* out, int64_t out_stride) {
    run({linear, x, x_stride, rows, Target::kAddFloat, out, out_stride});
}

void linear_run_gated(const Linear& linear, const void* x, int64_t x_stride, int64_t rows,
                      void* out, int64_t out_stride) {
    run({linear, x, x_stride, rows, Target::kGated, out, out_stride});
}

}  // namespace sl

extern "C" {

SL_EXPORT void sl_linear_run(const sl::Linear* linear, const void* x, int64_t x_stride, int64_t rows,
                             void* out, int64_t out_stride) {
    sl::linear_run(*linear, x, x_stride, rows, out, out_stride);
}

SL_EXPORT void sl_linear_run_add(const sl::Linear* linear, const void* x, int64_t x_stride,
                                 int64_t rows, void* out, int64_t out_stride) {
    sl::linear_run_add(*linear, x, x_stride, rows, out, out_stride);
}

SL_EXPORT void sl_linear_run_add_float(const sl::Linear* linear, const void* x, int64_t x_stride,
                                       int64_t rows, float* out, int64_t out_stride) {
    sl::linear_run_add_float(*linear, x, x_stride, rows, out, out_stride);
}

SL_EXPORT void sl_linear_run_gated(const sl::Linear* linear, const void* x, int64_t x_stride,
                                   int64_t rows, void* out, int64_t out_stride) {
    sl::linear_run_gated(*linear, x, x_stride, rows, out, out_stride);
}
}
