#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "isa.h"

namespace sl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpin = std::chrono::microseconds(50);

// A tile is taken over from a thread that holds it for so many times as long as others took.
constexpr int kPatience = 2;
constexpr auto kLeastPatience = std::chrono::microseconds(5);

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
    const auto deadline = Clock::now() + kSpin;
    do {
        for (int i = 0; i < 16; ++i) {
            if (is_true()) return true;
            pause_core();
        }
    } while (Clock::now() < deadline);
    return false;
}

// A region's number and a count in one word, so that what comes late for a region fails.
constexpr int kCountBits = 24;
constexpr int64_t kMostTiles = int64_t{1} << 20;  // of a region; more are run piece by piece
constexpr uint64_t word_of(uint64_t region, uint64_t count) { return region << kCountBits | count; }
constexpr uint64_t region_of(uint64_t word) { return word >> kCountBits; }
constexpr uint64_t count_of(uint64_t word) { return word & ((uint64_t{1} << kCountBits) - 1); }

// What a thread tells the others; only it writes `num_done`.
struct alignas(64) Holder {
    std::atomic<uint64_t> tile{0};      // the one it holds, plus kHeld while it may be taken over
    std::atomic<uint64_t> num_done{0};  // tiles of the region that it has run
};
constexpr uint64_t kHeld = uint64_t{1} << (kCountBits - 1);

struct FreeDeleter {
    void operator()(void* p) const { std::free(p); }
};

class Memory {
public:
    bool has(int64_t num_bytes) const { return size_ >= num_bytes; }
    void* data() const { return data_.get(); }
    void make(int64_t num_bytes) {
        size_ = (num_bytes * 2 + 63) / 64 * 64;
        data_.reset();
        data_.reset(std::aligned_alloc(64, size_));
    }

private:
    std::unique_ptr<void, FreeDeleter> data_;
    int64_t size_ = 0;
};

// Of this thread. `region` is the next one that it comes to, if it is in a team.
thread_local bool is_in_tile = false;
thread_local bool is_in_team = false;
thread_local int thread_index = 0;
thread_local uint64_t region = 0;

}  // namespace

class Pool {
public:
    explicit Pool(int num_threads) : num_threads_(num_threads), holders_(new Holder[num_threads]) {
        for (int thread = 1; thread < num_threads; ++thread) {
            std::thread([this, thread] { work(thread); }).detach();
        }
    }

    int num_threads() const { return num_threads_; }

    void together(TeamFunction function, void* context) {
        if (is_in_tile || is_in_team || num_threads_ == 1 || !busy_.try_lock()) return function(context);
        const std::lock_guard guard(busy_, std::adopt_lock);
        // Nobody is inside, so this may change.
        function_ = function;
        context_ = context;
        retired_.clear();
        first_region_ = region_of(claim_.load());
        const uint32_t number = static_cast<uint32_t>(team_.load() >> 32) + 1;
        team_.store(uint64_t{number} << 32 | kOpen, std::memory_order_seq_cst);
        number_.store(number, std::memory_order_seq_cst);
        number_.notify_all();
        // torch's kernels in this thread may have left another tile configuration behind.
        amx_standard_config();
        take_part();
        team_.fetch_and(~kOpen, std::memory_order_acq_rel);
        const auto is_left = [&] { return static_cast<uint32_t>(team_.load(std::memory_order_acquire)) == 0; };
        if (spin_until(is_left)) return;
        for (uint64_t seen = team_.load(); static_cast<uint32_t>(seen) != 0; seen = team_.load()) team_.wait(seen);
    }

    void run(int64_t tiles, bool may_run_twice, TileFunction function, void* context) {
        if (is_in_team && !is_in_tile) {
            for (int64_t first = 0; first < tiles; first += kMostTiles) {
                run_region({first, std::min(tiles - first, kMostTiles), may_run_twice, function, context});
            }
            return;
        }
        const bool is_worth_it = tiles > 1 && !is_in_tile && num_threads_ > 1;
        if (!is_worth_it) return run_alone(tiles, function, context);
        // Without the others, `together` comes back here in no team.
        struct Work {
            Pool* pool;
            int64_t tiles;
            bool may_run_twice;
            TileFunction function;
            void* context;
        } work{this, tiles, may_run_twice, function, context};
        together(
            [](void* given) {
                const Work& w = *static_cast<Work*>(given);
                is_in_team ? w.pool->run(w.tiles, w.may_run_twice, w.function, w.context)
                           : w.pool->run_alone(w.tiles, w.function, w.context);
            },
            &work);
    }

    bool is_late() const {
        return is_in_team && region_of(claim_.load(std::memory_order_acquire)) > region;
    }

    void* shared_scratch(Shared slot, int64_t num_bytes) {
        const std::lock_guard guard(memory_lock_);
        Memory& found = shared_[static_cast<int>(slot)];
        if (!found.has(num_bytes)) {
            // A thread that is late may still read what there was.
            retired_.push_back(std::move(found));
            found = Memory();
            found.make(num_bytes);
        }
        return found.data();
    }

private:
    friend class Claim;

    struct Region {
        int64_t first;
        int64_t tiles;
        bool may_run_twice;
        TileFunction function;
        void* context;
    };

    static constexpr uint64_t kOpen = uint64_t{1} << 31;  // of team_: threads may still enter

    void run_alone(int64_t tiles, TileFunction function, void* context) {
        const bool was_in_tile = is_in_tile;
        is_in_tile = true;
        if (!was_in_tile) amx_standard_config();
        Claim claim(nullptr);
        for (int64_t tile = 0; tile < tiles; ++tile) function(context, tile, claim);
        is_in_tile = was_in_tile;
    }

    void work(int thread) {
        amx_standard_config();
        thread_index = thread;
        uint32_t seen = 0;
        for (;;) {
            const auto has_come = [&] { return number_.load(std::memory_order_acquire) != seen; };
            if (!spin_until(has_come)) number_.wait(seen, std::memory_order_acquire);
            seen = number_.load(std::memory_order_acquire);
            if (!enter()) continue;
            take_part();
            const uint64_t left = team_.fetch_sub(1, std::memory_order_acq_rel) - 1;
            if (static_cast<uint32_t>(left) == 0) team_.notify_all();
        }
    }

    bool enter() {
        uint64_t team = team_.load(std::memory_order_acquire);
        while (team & kOpen) {
            if (team_.compare_exchange_weak(team, team + 1, std::memory_order_acq_rel)) return true;
        }
        return false;
    }

    void take_part() {
        region = first_region_;
        is_in_team = true;
        function_(context_);
        is_in_team = false;
    }

    void run_region(const Region& r) {
        const uint64_t mine = region++;
        uint64_t claim = claim_.load(std::memory_order_acquire);
        if (region_of(claim) != mine) return;
        const auto begun = Clock::now();
        int64_t num_run = 0;
        while (region_of(claim) == mine && count_of(claim) < static_cast<uint64_t>(r.tiles)) {
            if (!claim_.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel)) continue;
            run_tile(r, mine, count_of(claim));
            ++num_run;
            claim = claim_.load(std::memory_order_acquire);
        }
        if (region_of(claim) != mine) return;
        const auto waits_since = Clock::now();
        const auto took = num_run == 0 ? Clock::duration(kSpin) : (waits_since - begun) / num_run;
        wait_for_others(r, mine, waits_since, std::max<Clock::duration>(took * kPatience, kLeastPatience));
    }

    void run_tile(const Region& r, uint64_t number, uint64_t tile) {
        Holder& holder = holders_[thread_index];
        holder.tile.store(word_of(number, r.may_run_twice ? kHeld | tile : tile), std::memory_order_release);
        Claim claim(r.may_run_twice ? &holder : nullptr);
        is_in_tile = true;
        r.function(r.context, r.first + static_cast<int64_t>(tile), claim);
        is_in_tile = false;
        if (!claim.is_written_) return;
        const uint64_t done = holder.num_done.load(std::memory_order_relaxed);
        const uint64_t count = region_of(done) == number ? count_of(done) : 0;
        holder.num_done.store(word_of(number, count + 1), std::memory_order_release);
    }

    // All tiles are claimed.
    void wait_for_others(const Region& r, uint64_t number, Clock::time_point since, Clock::duration patience) {
        const uint64_t all_claimed = word_of(number, r.tiles);
        for (;;) {
            for (int i = 0; i < 16; ++i) {
                if (claim_.load(std::memory_order_acquire) != all_claimed) return;
                if (is_done(r, number)) return go_on(all_claimed, number);
                pause_core();
            }
            const auto waited = Clock::now() - since;
            const bool may_take_over = r.may_run_twice && waited > patience;
            if (may_take_over && take_over(r, number)) {
                since = Clock::now();
            } else if (waited > kSpin && (may_take_over || !r.may_run_twice)) {
                // Whoever ends last goes on to the next region and wakes the others.
                claim_.wait(all_claimed, std::memory_order_acquire);
            }
        }
    }

    bool is_done(const Region& r, uint64_t number) const {
        uint64_t total = 0;
        for (int thread = 0; thread < num_threads_; ++thread) {
            const uint64_t done = holders_[thread].num_done.load(std::memory_order_acquire);
            if (region_of(done) == number) total += count_of(done);
        }
        return total == static_cast<uint64_t>(r.tiles);
    }

    void go_on(uint64_t all_claimed, uint64_t number) {
        if (claim_.compare_exchange_strong(all_claimed, word_of(number + 1, 0), std::memory_order_seq_cst)) {
            claim_.notify_all();
        }
    }

    // Runs a tile that another thread holds. Returns false if there was none.
    bool take_over(const Region& r, uint64_t number) {
        for (int i = 1; i < num_threads_; ++i) {
            Holder& other = holders_[(thread_index + i) % num_threads_];
            uint64_t held = other.tile.load(std::memory_order_acquire);
            if (region_of(held) != number || !(held & kHeld)) continue;
            if (!other.tile.compare_exchange_strong(held, held & ~kHeld, std::memory_order_acq_rel)) continue;
            run_tile(r, number, count_of(held) & ~kHeld);
            return true;
        }
        return false;
    }

    const int num_threads_;
    std::mutex busy_;
    TeamFunction function_ = nullptr;
    void* context_ = nullptr;
    uint64_t first_region_ = 0;  // of the next team
    std::mutex memory_lock_;
    Memory shared_[static_cast<int>(Shared::kCount)];
    std::vector<Memory> retired_;
    const std::unique_ptr<Holder[]> holders_;
    alignas(64) std::atomic<uint64_t> claim_{0};   // region at hand, and its next tile
    alignas(64) std::atomic<uint64_t> team_{0};    // its number (upper half), kOpen, threads but the caller's in it
    alignas(64) std::atomic<uint32_t> number_{0};  // of the team: what threads without work wait for
};

bool Claim::may_write() {
    if (holder_ == nullptr) return true;
    auto& tile = static_cast<Holder*>(holder_)->tile;
    uint64_t held = tile.load(std::memory_order_relaxed);
    is_written_ = held & kHeld && tile.compare_exchange_strong(held, held & ~kHeld, std::memory_order_acq_rel);
    return is_written_;
}

namespace {

std::once_flag started;
// Never destroyed: its threads are in it until the process ends.
Pool* pool = nullptr;

}  // namespace

void start_pool(int num_threads) {
    std::call_once(started, [&] { pool = new Pool(std::max(num_threads, 1)); });
}

int num_threads() { return pool->num_threads(); }

void together(TeamFunction function, void* context) { pool->together(function, context); }

bool is_late() { return pool->is_late(); }

void parallel(int64_t tiles, bool may_run_twice, TileFunction function, void* context) {
    if (tiles > 0) pool->run(tiles, may_run_twice, function, context);
}

void* thread_scratch(Scratch slot, int64_t num_bytes) {
    thread_local Memory memory[static_cast<int>(Scratch::kCount)];
    Memory& found = memory[static_cast<int>(slot)];
    if (!found.has(num_bytes)) found.make(num_bytes);
    return found.data();
}

void* shared_scratch(Shared slot, int64_t num_bytes) {
    if (is_in_team) return pool->shared_scratch(slot, num_bytes);
    thread_local Memory memory[static_cast<int>(Shared::kCount)];
    Memory& found = memory[static_cast<int>(slot)];
    if (!found.has(num_bytes)) found.make(num_bytes);
    return found.data();
}

}  // namespace sl
