// The threads that share a piece of work, and the barrier at which they wait for one another.

#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "entry.h"

namespace [[gnu::visibility("hidden")]] kernels {

// A signal from a failed thread that ends the other threads' waits, with the first failure.
struct Alarm {
    std::atomic<bool> taken{false}, rings{false};
    Failure first; // to be read when all threads have ended

    void raise(const Failure &failure) noexcept;
    bool rung() const { return rings.load(std::memory_order_relaxed); }
};

// A barrier at which all threads wait for the last one. OpenMP's own barrier would spin for milliseconds.
struct Barrier {
    alignas(64) std::atomic<int64_t> arrived{0};
    alignas(64) std::atomic<int64_t> turn{0};

    void wait(int64_t n_threads, const Alarm &alarm);
};

struct Team {
    int64_t thread, n_threads;
    Barrier *barrier;
    const Alarm *alarm;

    std::pair<int64_t, int64_t> share(int64_t n) const {
        return {n * thread / n_threads, n * (thread + 1) / n_threads};
    }
    void wait() const {
        if (n_threads > 1) barrier->wait(n_threads, *alarm);
    }
};

// Work that threads share: a function, and its first argument.
struct Work {
    void (*function)(const void *with, const Team &team);
    const void *with;
};

// Runs work on up to n_threads threads at once. After all have ended, throws the first exception of any of them. No
// thread waits for one that has failed.
void parallel(int64_t n_threads, const Work &work);

template<class F> void parallel(int64_t n_threads, const F &work) {
    parallel(n_threads, Work{[](const void *with, const Team &team) { (*(const F *)with)(team); }, &work});
}

} // namespace kernels
