#include "pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#elif defined(__aarch64__)
static inline void relax() { asm volatile("yield"); }
#else
static inline void relax() {}
#endif

namespace moeflow {
namespace {

// How many pauses before a thread sleeps or yields: about 50 microseconds, longer than the gap between two
// kernels of a decode pass, far shorter than a pass of torch code that wants the cores.
constexpr int kSpins = 2000;

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

void Team::barrier() {
  if (num_threads_ == 1) return;
  const uint32_t generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  // The others are at work on the last items. On an oversubscribed machine they may not even run: yield then.
  for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; ++spins) {
    if (spins < kSpins) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

class Pool {
 public:
  ~Pool() { stop(); }

  void run(Job job, void* context) {
    std::lock_guard<std::mutex> one_at_a_time(mutex_);
    for (WorkCounter& counter : team_.counters_) counter.reset();
    job_ = job;
    context_ = context;
    if (!workers_.empty()) {
      pending_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
      ticket_.fetch_add(1, std::memory_order_seq_cst);
      if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake_all(&ticket_);
    }
    job(context, team_, 0);
    for (int spins = 0; pending_.load(std::memory_order_acquire) > 0; ++spins) {
      if (spins < kSpins) {
        relax();
      } else {
        std::this_thread::yield();
      }
    }
  }

  void resize(int num_threads) {
    std::lock_guard<std::mutex> one_at_a_time(mutex_);
    if (num_threads == team_.num_threads_) return;
    stop();
    team_.num_threads_ = num_threads;
    stopping_ = false;
    for (int idx = 1; idx < num_threads; ++idx) {
      workers_.emplace_back([this, idx, ticket = ticket_.load()] { work(idx, ticket); });
    }
  }

  int size() const { return team_.num_threads_; }

 private:
  void work(int thread_idx, uint32_t seen) {
    while (true) {
      seen = wait_for_ticket(seen);
      if (stopping_.load(std::memory_order_acquire)) return;
      job_(context_, team_, thread_idx);
      pending_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  // Returns the next ticket. Between the last spin and the futex the ticket is looked at again, so that a
  // wake-up cannot be missed.
  uint32_t wait_for_ticket(uint32_t seen) {
    for (int spins = 0; spins < kSpins; ++spins) {
      if (ticket_.load(std::memory_order_acquire) != seen) return seen + 1;
      relax();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (ticket_.load(std::memory_order_seq_cst) == seen) futex_wait(&ticket_, seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return seen + 1;
  }

  void stop() {
    stopping_.store(true, std::memory_order_release);
    ticket_.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(&ticket_);
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  std::mutex mutex_;
  Team team_;
  Job job_ = nullptr;
  void* context_ = nullptr;
  std::vector<std::thread> workers_;
  alignas(64) std::atomic<uint32_t> ticket_{0};  // one more for every job, and for stopping
  alignas(64) std::atomic<int> pending_{0};      // workers that have not finished the job
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
};

namespace {

// Made on first use and never destroyed: joining threads while the interpreter dies helps nobody.
Pool& pool() {
  static Pool* const instance = new Pool();
  return *instance;
}

}  // namespace

void run_on_pool(Job job, void* context) { pool().run(job, context); }
void set_num_threads(int count) { pool().resize(count < 1 ? 1 : count); }
int num_threads() { return pool().size(); }

}  // namespace moeflow
