// A pool of threads that share out tiles of work, none of which another has to wait for.
//
// In a system of several processes on few cores, a thread loses its core in the middle of a tile all
// the time. So no thread leads: all of them run the same code (`together`) and come to the same
// regions in the same order; whoever has a core claims the tiles of the region that is at hand, and
// whoever comes late finds it over and goes on to the next. A tile that is held too long is taken
// over by a thread that has nothing else to do, if it may be computed twice (`parallel_for_claimed`).
// Waiting threads spin for some tens of microseconds, which is as long as the next region of a
// running step is away, and then sleep: a pool without work burns no core.
#pragma once

#include <cstdint>
#include <type_traits>

namespace sl {

// Starts the threads, once: the caller of what follows counts as one. Later calls change nothing.
void start_pool(int num_threads);

// Threads that take part, the caller included; at least 1.
int num_threads();

// Says whether the results of a tile may be written. A tile whose thread was held up may have been
// taken over: then it is the other thread's to write, and what this one computed may be made of
// memory that is used for something else by now.
class Claim {
public:
    // Called once, before anything is written that others see.
    bool may_write();

private:
    explicit Claim(void* holder) : holder_(holder) {}

    void* holder_;  // null = nobody can take the tile over
    bool is_written_ = true;

    friend class Pool;
};

using TeamFunction = void (*)(void* context);
using TileFunction = void (*)(void* context, int64_t tile, Claim& claim);

void together(TeamFunction function, void* context);
void parallel(int64_t tiles, bool may_run_twice, TileFunction function, void* context);

// Runs body() in all threads, and returns when none is in it any more. In it, each thread has to
// call parallel_for the same times with the same number of tiles. What body computes outside of
// tiles, each thread computes for itself: it may read what earlier regions wrote, and write nothing
// that another thread sees. A thread that is late may find that changed already, and computes
// garbage with it that counts for nothing; it must not crash on it.
template <class Body>
inline void together(Body&& body) {
    together([](void* context) { (*static_cast<std::remove_reference_t<Body>*>(context))(); }, &body);
}

// Whether the region that this thread comes to next is over: then it need not prepare for it.
bool is_late();

// Runs body(tile, claim) for every tile in [0, tiles), and returns when what all of them wrote can be
// seen. In a tile, or while another caller's work runs, it runs the tiles in the calling thread. With
// may_run_twice, body can run again for a tile that is held up, while it runs or before it goes on:
// until claim.may_write() it writes only to memory of its thread.
template <class Body>
inline void parallel_for_claimed(int64_t tiles, bool may_run_twice, Body&& body) {
    parallel(
        tiles, may_run_twice,
        [](void* context, int64_t tile, Claim& claim) {
            (*static_cast<std::remove_reference_t<Body>*>(context))(tile, claim);
        },
        &body);
}

// The same of body(tile), which runs once for each.
template <class Body>
inline void parallel_for(int64_t tiles, Body&& body) {
    parallel_for_claimed(tiles, false, [&](int64_t tile, Claim&) { body(tile); });
}

// Memory of a thread, kept from call to call; 64-byte aligned. The slots are apart.
enum class Scratch { kKernel, kQueries, kStates, kNormed, kRows, kPanels, kCount };
void* thread_scratch(Scratch slot, int64_t num_bytes);

// Memory that all threads of `together` share, the same for all that come to the same call; outside
// of it, memory of the thread. What lay there before the call may be lost.
enum class Shared { kStep, kRows, kPartial, kCount };
void* shared_scratch(Shared slot, int64_t num_bytes);

}  // namespace sl
