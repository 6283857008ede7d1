// What Python calls first.
#include <cstdint>

#include "isa.h"
#include "pool.h"

extern "C" {

// Returns 0 if the kernel refuses what the level needs; nothing else may be called then.
SL_EXPORT int sl_start(int num_threads) {
    if (!sl::enable_level()) return 0;
    sl::start_pool(num_threads);
    return 1;
}

SL_EXPORT int sl_num_threads() { return sl::num_threads(); }

// Runs `work(i)` for each of `counts`, a tile each, and then adds 1 to it: lets a test see that every
// tile counts exactly once. With may_run_twice a tile may be taken over while `work` lasts. Then
// `after` is called, by each thread that comes so far. `work` and `after` may be null.
SL_EXPORT void sl_count_tiles(int32_t* counts, int64_t tiles, int may_run_twice, void (*work)(int64_t),
                              void (*after)()) {
    sl::together([&] {
        sl::parallel_for_claimed(tiles, may_run_twice, [&](int64_t tile, sl::Claim& claim) {
            if (work != nullptr) work(tile);
            if (claim.may_write()) ++counts[tile];
        });
        if (after != nullptr) after();
    });
}
}
