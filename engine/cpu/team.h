// A fixed team of threads that run one function together, with a barrier and a shared task counter.
//
// Waiting threads spin briefly and then give the core away, so that another process on the machine
// costs its share and no more.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "lanes.h"

namespace bb {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

class Team {
public:
    explicit Team(int threads) : threads_(threads) {
        for (int n = 1; n < threads; ++n) workers_.emplace_back([this] { work(); });
    }

    ~Team() {
        stop_ = true;
        start(nullptr);
        for (auto& worker : workers_) worker.join();
    }

    int size() const { return threads_; }

    // Runs `job` on every thread of the team, the caller's included, and returns when all are through.
    void run(const std::function<void()>& job) {
        next_.store(0, std::memory_order_relaxed);
        start(&job);
        job();
        barrier();
    }

    // Hands out 0 .. count-1, each to one thread. Followed by a barrier before the next use.
    template <class Task>
    void share(int count, Task task) {
        for (int n; (n = next_.fetch_add(1, std::memory_order_relaxed)) < count;) task(n);
        barrier();
    }

    // Returns when every thread of the team is here; what they wrote before is then visible.
    void barrier() {
        const unsigned phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
            if (spins < 2000) relax(); else std::this_thread::yield();
        }
    }

private:
    void start(const std::function<void()>* job) {
        job_ = job;
        jobs_.fetch_add(1, std::memory_order_release);
        jobs_.notify_all();
    }

    void work() {
        for (unsigned done = 0;; ++done) {
            for (int spins = 0; spins < 20000 && jobs_.load(std::memory_order_acquire) == done; ++spins) relax();
            jobs_.wait(done, std::memory_order_acquire);
            if (stop_) return;
            (*job_)();
            barrier();
        }
    }

    const int threads_;
    std::vector<std::thread> workers_;
    const std::function<void()>* job_ = nullptr;
    std::atomic<unsigned> jobs_{0};
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> phase_{0};
};

}  // namespace bb
