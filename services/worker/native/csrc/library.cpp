// What Python calls first.
#include <cstdint>

#include "isa.h"
#include "pool.h"

namespace {

// Adds 1 to each of `values`, a tile each: lets a test see that every tile runs exactly once.
void count_tile(void* context, int64_t tile, int) {
    ++static_cast<int32_t*>(context)[tile];
}

}  // namespace

extern "C" {

// Returns 0 if the kernel refuses what the level needs; nothing else may be called then.
SL_EXPORT int sl_start(int num_threads) {
    if (!sl::enable_level()) return 0;
    sl::start_pool(num_threads);
    return 1;
}

SL_EXPORT int sl_num_threads() { return sl::num_threads(); }

SL_EXPORT void sl_count_tiles(int32_t* counts, int64_t tiles) {
    sl::parallel(tiles, count_tile, counts);
}
}
