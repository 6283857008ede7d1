// Blocks of a product with AMX tiles: up to 32 rows by up to 64 columns.
#pragma once

#include "gemm_layout.h"
#include "isa.h"

#if SL_LEVEL >= SL_AMX

namespace sl {

constexpr int kAmxTileRows = 16;
constexpr int kAmxRows = 2 * kAmxTileRows;

// A panel's steps are asked for so many steps before they are read. Without that a product with few
// rows waits for memory: a tile that is loaded asks for 16 lines and no more. Nothing is asked for
// past a panel's end: what another thread reads anyway would come from memory twice.
constexpr int64_t kStepsAhead = 8;

// What a block reads and writes. x is padded to whole steps.
struct AmxBlock {
    const bf16* x;
    int64_t x_stride;  // elements
    const uint8_t* panel;
    size_t panel_bytes;
    int64_t num_steps;
    bool is_near;  // in the second-level cache already
    float* sums;
    int64_t sums_stride;  // elements
};

// Asks for a step of `count` panels.
template <int count>
inline void amx_prefetch(const AmxBlock& block, int64_t step) {
    if (block.is_near || step + kStepsAhead >= block.num_steps) return;
    const uint8_t* from = block.panel + (step + kStepsAhead) * sizeof(Bf16Step);
    for (int panel = 0; panel < count; ++panel, from += block.panel_bytes) {
        for (size_t line = 0; line < sizeof(Bf16Step); line += 64) _mm_prefetch(from + line, _MM_HINT_T1);
    }
}

// The intrinsics do not tell the compiler which memory they touch.
inline void amx_fence() { asm volatile("" ::: "memory"); }

// Tiles 0-3 hold sums, 4-5 rows of x, 6-7 steps of panels. `rows` (1 to 32) are split into a first
// tile of up to 16 and a second.
inline void amx_configure_rows(int64_t rows) {
    struct alignas(64) {
        uint8_t palette = 1;
        uint8_t start_row = 0;
        uint8_t reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    const auto first = static_cast<uint8_t>(rows < kAmxTileRows ? rows : kAmxTileRows);
    const auto second = static_cast<uint8_t>(rows - first);
    if (second == 0) {
        for (int tile = 0; tile < 5; ++tile) config.rows[tile] = first;
    } else {
        config.rows[2] = config.rows[3] = config.rows[5] = second;
    }
    amx_fence();
    _tile_loadconfig(&config);
}

// Configures the tiles for the rows of one block after another; leaves the standard behind.
class AmxRowsConfig {
public:
    void set(int64_t rows) {
        if (rows == rows_) return;
        amx_configure_rows(rows);
        rows_ = rows;
    }
    ~AmxRowsConfig() {
        if (rows_ != kAmxRows) amx_standard_config();
    }

private:
    int64_t rows_ = kAmxRows;
};

#define SL_LOAD_X(tile, index) \
    _tile_loadd(tile, block.x + (index) * kAmxTileRows * block.x_stride + step * kGroup, x_bytes)
#define SL_LOAD_PANEL(tile, index) \
    _tile_stream_loadd(tile, block.panel + (index) * block.panel_bytes + step * sizeof(Bf16Step), 64)
#define SL_STORE(tile, row, index)                                                              \
    _tile_stored(tile, block.sums + (row) * kAmxTileRows * block.sums_stride + (index) * kLanes, \
                 sums_bytes)

// Up to 16 rows by one panel.
inline void amx_block_1x1(const AmxBlock& block) {
    const int64_t x_bytes = block.x_stride * 2, sums_bytes = block.sums_stride * 4;
    _tile_zero(0);
    for (int64_t step = 0; step < block.num_steps; ++step) {
        amx_prefetch<1>(block, step);
        SL_LOAD_X(4, 0);
        SL_LOAD_PANEL(6, 0);
        _tile_dpbf16ps(0, 4, 6);
    }
    SL_STORE(0, 0, 0);
}

// Up to 16 rows by four panels.
inline void amx_block_1x4(const AmxBlock& block) {
    const int64_t x_bytes = block.x_stride * 2, sums_bytes = block.sums_stride * 4;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < block.num_steps; ++step) {
        amx_prefetch<4>(block, step);
        SL_LOAD_X(4, 0);
        SL_LOAD_PANEL(6, 0);
        _tile_dpbf16ps(0, 4, 6);
        SL_LOAD_PANEL(7, 1);
        _tile_dpbf16ps(1, 4, 7);
        SL_LOAD_PANEL(6, 2);
        _tile_dpbf16ps(2, 4, 6);
        SL_LOAD_PANEL(7, 3);
        _tile_dpbf16ps(3, 4, 7);
    }
    SL_STORE(0, 0, 0);
    SL_STORE(1, 0, 1);
    SL_STORE(2, 0, 2);
    SL_STORE(3, 0, 3);
}

// 17 to 32 rows by one panel.
inline void amx_block_2x1(const AmxBlock& block) {
    const int64_t x_bytes = block.x_stride * 2, sums_bytes = block.sums_stride * 4;
    _tile_zero(0);
    _tile_zero(2);
    for (int64_t step = 0; step < block.num_steps; ++step) {
        amx_prefetch<1>(block, step);
        SL_LOAD_PANEL(6, 0);
        SL_LOAD_X(4, 0);
        _tile_dpbf16ps(0, 4, 6);
        SL_LOAD_X(5, 1);
        _tile_dpbf16ps(2, 5, 6);
    }
    SL_STORE(0, 0, 0);
    SL_STORE(2, 1, 0);
}

// 17 to 32 rows by two panels. A tile of the next step is loaded as soon as its register has been used
// for the last time: loads and products overlap little where the other thread of the core is busy.
inline void amx_block_2x2(const AmxBlock& block) {
    const int64_t x_bytes = block.x_stride * 2, sums_bytes = block.sums_stride * 4;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int64_t step = 0;
    amx_prefetch<2>(block, step);
    SL_LOAD_X(4, 0);
    SL_LOAD_PANEL(7, 1);
    SL_LOAD_PANEL(6, 0);
    SL_LOAD_X(5, 1);
    while (++step < block.num_steps) {
        amx_prefetch<2>(block, step);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        SL_LOAD_X(4, 0);
        _tile_dpbf16ps(3, 5, 7);
        SL_LOAD_PANEL(7, 1);
        _tile_dpbf16ps(2, 5, 6);
        SL_LOAD_PANEL(6, 0);
        SL_LOAD_X(5, 1);
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
    _tile_dpbf16ps(2, 5, 6);
    SL_STORE(0, 0, 0);
    SL_STORE(1, 0, 1);
    SL_STORE(2, 1, 0);
    SL_STORE(3, 1, 1);
}

#undef SL_LOAD_X
#undef SL_LOAD_PANEL
#undef SL_STORE

}  // namespace sl
#endif
