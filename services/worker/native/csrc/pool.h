// A pool of threads that share out tiles of work.
//
// Tiles are claimed one by one from a shared counter, so a thread whose core is taken away by another
// process holds up only the tile it is in. Waiting threads spin for some tens of microseconds, which
// is as long as the next region of a running step is away, and then sleep: a pool without work burns
// no core.
#pragma once

#include <cstdint>
#include <type_traits>

namespace sl {

using TileFunction = void (*)(void* context, int64_t tile, int thread);

// Starts the threads, once: the caller of `parallel` counts as one. Later calls change nothing.
void start_pool(int num_threads);

// Threads that take part, the caller included; at least 1.
int num_threads();

// Runs function(context, tile, thread) for every tile in [0, tiles) and returns when all are done;
// thread is in [0, num_threads()). In a tile, or while another thread's region runs, it runs the
// tiles in the calling thread.
void parallel(int64_t tiles, TileFunction function, void* context);

template <class Body>
inline void parallel_for(int64_t tiles, Body&& body) {
    parallel(
        tiles,
        [](void* context, int64_t tile, int thread) {
            (*static_cast<std::remove_reference_t<Body>*>(context))(tile, thread);
        },
        &body);
}

}  // namespace sl
