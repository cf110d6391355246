// The threads that share a piece of work, and where they wait for one another.

#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

// Where all threads wait for the last. OpenMP's own barrier spins for milliseconds, which on a busy machine keeps the very
// thread that is waited for from running; this one yields after some 30 µs.
struct Barrier {
    alignas(64) std::atomic<int64_t> arrived{0};
    alignas(64) std::atomic<int64_t> turn{0};

    void wait(int64_t n_threads) {
        const int64_t mine = turn.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == n_threads - 1) {
            arrived.store(0, std::memory_order_relaxed);
            turn.store(mine + 1, std::memory_order_release);
            return;
        }
        for (int tries = 0; turn.load(std::memory_order_acquire) == mine; tries++) {
            if (tries > 2000) std::this_thread::yield();
#if defined(__x86_64__)
            else __builtin_ia32_pause();
#endif
        }
    }
};

struct Team {
    int64_t thread, n_threads;
    Barrier *barrier;

    std::pair<int64_t, int64_t> share(int64_t n) const {
        return {n * thread / n_threads, n * (thread + 1) / n_threads};
    }
    void wait() const {
        if (n_threads > 1) barrier->wait(n_threads);
    }
};

// Runs work(team) on some threads at once.
template <class F> void parallel(int n_threads, const F &work) {
    Barrier barrier;
#ifdef _OPENMP
#pragma omp parallel num_threads(n_threads)
    work(Team{omp_get_thread_num(), omp_get_num_threads(), &barrier});
#else
    (void)n_threads;
    work(Team{0, 1, &barrier});
#endif
}

}  // namespace
