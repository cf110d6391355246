// See threads.h.

#include "threads.h"

#include <thread>

#ifdef _OPENMP
#include <omp.h>
#else
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <unistd.h>
#include <vector>
#endif

using namespace kernels;

namespace {

// Checks a condition for about 30 µs; returns whether it came true.
template<class F> bool soon(const F &came_true) {
    for (int tries = 0; tries < 2000; tries++) {
        if (came_true()) return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
    }
    return came_true();
}

// Waits until a condition comes true. After about 30 µs it yields: on a busy machine, the awaited thread can then run.
template<class F> void await(const F &came_true) {
    if (soon(came_true)) return;
    while (!came_true()) std::this_thread::yield();
}

struct Abandoned {}; // thrown in the threads that would wait for one that failed

#ifndef _OPENMP
// These threads serve compilers without OpenMP. All sources share them; other libraries in the process do not.
typedef std::function<void(int64_t)> Piece; // a piece of work, called with the thread's number

// A thread that waits for work: at first it spins, because the next piece often comes soon; then it sleeps.
class Worker {
public:
    explicit Worker(int64_t number) : thread([this, number] { run(number); }) {}
    ~Worker() {
        const Piece end;
        give(end);
        thread.join();
    }
    void give(const Piece &piece) {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            work.store(&piece, std::memory_order_release);
        }
        wakes.notify_one();
    }
    bool done() const { return !work.load(std::memory_order_acquire); }

private:
    void run(int64_t number) {
        const auto given = [&] { return !done(); };
        while (true) {
            if (!soon(given)) {
                std::unique_lock<std::mutex> lock(mutex);
                wakes.wait(lock, given);
            }
            const Piece &piece = *work.load(std::memory_order_acquire);
            if (!piece) return; // the end
            piece(number);
            work.store(nullptr, std::memory_order_release);
        }
    }

    std::atomic<const Piece *> work{nullptr};
    std::mutex mutex;
    std::condition_variable wakes;
    std::thread thread; // declared last, because it uses the other members
};

// The workers of one calling thread, which end with it.
class Pool {
public:
    ~Pool() { forget_those_before_fork(); }

    // Starts workers until there are n, or as many as the system grants; returns their number, at most n.
    int64_t have(int64_t n) {
        forget_those_before_fork();
        try {
            while ((int64_t)workers.size() < n) workers.push_back(std::make_unique<Worker>(workers.size() + 1));
        } catch (const std::system_error &) {
            static std::atomic<bool> said{false};
            if (!said.exchange(true))
                std::fprintf(stderr, "gptworks: the system grants %zu of %lld threads\n", workers.size() + 1,
                             (long long)n + 1);
        }
        return std::min<int64_t>(workers.size(), n);
    }

    // Does a piece of work on the calling thread and on n workers.
    void run(int64_t n, const Piece &piece) {
        for (int64_t i = 0; i < n; i++) workers[i]->give(piece);
        piece(0);
        for (int64_t i = 0; i < n; i++) await([&] { return workers[i]->done(); });
    }

private:
    // A forked process has a copy of the workers and none of their threads.
    void forget_those_before_fork() {
        if (process == getpid()) return;
        for (auto &worker : workers) (void)worker.release();
        workers.clear();
        process = getpid();
    }

    std::vector<std::unique_ptr<Worker>> workers;
    pid_t process = getpid();
};

Pool &pool() {
    thread_local Pool mine;
    return mine;
}
#endif

} // namespace

void Alarm::raise(const Failure &failure) noexcept {
    if (!taken.exchange(true)) first = failure;
    rings.store(true, std::memory_order_release);
}

void Barrier::wait(int64_t n_threads, const Alarm &alarm) {
    const int64_t mine = turn.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == n_threads - 1) {
        arrived.store(0, std::memory_order_relaxed);
        turn.store(mine + 1, std::memory_order_release);
        return;
    }
    await([&] { return turn.load(std::memory_order_acquire) != mine || alarm.rung(); });
    if (alarm.rung()) throw Abandoned();
}

void kernels::parallel(int64_t n_threads, const Work &work) {
    Barrier barrier;
    Alarm alarm;
    const auto run = [&](int64_t thread, int64_t n) noexcept {
        try {
            work.function(work.with, {thread, n, &barrier, &alarm});
        } catch (const Abandoned &) {
        } catch (...) {
            alarm.raise(caught());
        }
    };
#ifdef _OPENMP
#pragma omp parallel num_threads((int)n_threads)
    run(omp_get_thread_num(), omp_get_num_threads());
#else
    Pool &workers = pool();
    const int64_t n_workers = workers.have(n_threads - 1);
    workers.run(n_workers, [&](int64_t thread) { run(thread, n_workers + 1); });
#endif
    if (alarm.rung()) throw alarm.first;
}
