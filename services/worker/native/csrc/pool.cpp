#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "isa.h"

namespace sl {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

inline void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins until `is_true` or the time is over. Returns what `is_true` said last.
template <class Condition>
bool spin_until(Condition is_true) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 16; ++i) {
            if (is_true()) return true;
            pause_core();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    return false;
}

thread_local bool is_in_tile = false;

constexpr uint32_t kClosed = UINT32_MAX;

constexpr uint64_t claim_of(uint32_t region, uint32_t tile) {
    return static_cast<uint64_t>(region) << 32 | tile;
}

// A region is known by its number. `claim` holds that number (upper half) and the next tile (lower
// half) in one word: a thread that comes late fails to claim from a region that is over, and what it
// read of it meanwhile (function, context, tiles) does not matter.
class Pool {
public:
    explicit Pool(int num_threads) : num_threads_(num_threads) {
        for (int thread = 1; thread < num_threads; ++thread) {
            std::thread([this, thread] { work(thread); }).detach();
        }
    }

    int num_threads() const { return num_threads_; }

    void run(int64_t tiles, TileFunction function, void* context) {
        if (is_in_tile || tiles == 1 || num_threads_ == 1 || !busy_.try_lock()) {
            run_alone(tiles, function, context);
            return;
        }
        std::lock_guard guard(busy_, std::adopt_lock);
        // Tiles are counted in 32 bits; a region of more is run piece by piece.
        constexpr int64_t kMost = 1 << 30;
        for (int64_t first = 0; first < tiles; first += kMost) {
            run_region(first, std::min(tiles - first, kMost), function, context);
        }
    }

private:
    void run_alone(int64_t tiles, TileFunction function, void* context) {
        const bool was_in_tile = is_in_tile;
        is_in_tile = true;
        if (!was_in_tile) amx_standard_config();
        for (int64_t tile = 0; tile < tiles; ++tile) function(context, tile, 0);
        is_in_tile = was_in_tile;
    }

    void run_region(int64_t first, int64_t tiles, TileFunction function, void* context) {
        // Closed first: a thread that is late in the region before must not claim while what it reads
        // of the region changes.
        const uint32_t region = region_.load(std::memory_order_relaxed) + 1;
        claim_.exchange(claim_of(region, kClosed), std::memory_order_acq_rel);
        first_.store(first, std::memory_order_relaxed);
        tiles_.store(static_cast<uint32_t>(tiles), std::memory_order_relaxed);
        function_.store(function, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        num_done_.store(0, std::memory_order_relaxed);
        claim_.store(claim_of(region, 0), std::memory_order_release);
        region_.store(region, std::memory_order_seq_cst);
        region_.notify_all();
        // torch's kernels in this thread may have left another tile configuration behind.
        amx_standard_config();
        take_part(region, 0);
        const auto total = static_cast<uint32_t>(tiles);
        const auto is_done = [&] { return num_done_.load(std::memory_order_acquire) == total; };
        if (spin_until(is_done)) return;
        for (uint32_t seen = num_done_.load(); seen != total; seen = num_done_.load()) {
            num_done_.wait(seen, std::memory_order_acquire);
        }
    }

    void work(int thread) {
        amx_standard_config();
        uint32_t seen = 0;
        for (;;) {
            const auto has_come = [&] { return region_.load(std::memory_order_acquire) != seen; };
            if (!spin_until(has_come)) region_.wait(seen, std::memory_order_acquire);
            seen = region_.load(std::memory_order_acquire);
            take_part(seen, thread);
        }
    }

    void take_part(uint32_t region, int thread) {
        uint64_t claim = claim_.load(std::memory_order_acquire);
        uint32_t num_done = 0;
        is_in_tile = true;
        while (static_cast<uint32_t>(claim >> 32) == region) {
            const auto tile = static_cast<uint32_t>(claim);
            const TileFunction function = function_.load(std::memory_order_relaxed);
            void* const context = context_.load(std::memory_order_relaxed);
            const int64_t first = first_.load(std::memory_order_relaxed);
            if (tile >= tiles_.load(std::memory_order_relaxed)) break;
            if (!claim_.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel)) continue;
            function(context, first + tile, thread);
            ++num_done;
            claim = claim_.load(std::memory_order_acquire);
        }
        is_in_tile = false;
        if (num_done == 0) return;
        num_done_.fetch_add(num_done, std::memory_order_acq_rel);
        num_done_.notify_all();
    }

    const int num_threads_;
    std::mutex busy_;
    alignas(64) std::atomic<uint64_t> claim_{0};
    alignas(64) std::atomic<uint32_t> region_{0};
    alignas(64) std::atomic<uint32_t> num_done_{0};
    alignas(64) std::atomic<TileFunction> function_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<int64_t> first_{0};
    std::atomic<uint32_t> tiles_{0};
};

std::once_flag started;
// Never destroyed: its threads are in it until the process ends.
Pool* pool = nullptr;

}  // namespace

void start_pool(int num_threads) {
    std::call_once(started, [&] { pool = new Pool(std::max(num_threads, 1)); });
}

int num_threads() { return pool->num_threads(); }

void parallel(int64_t tiles, TileFunction function, void* context) {
    if (tiles > 0) pool->run(tiles, function, context);
}

}  // namespace sl
