#include "threads/pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "threads/signals_blocked.h"
#include "threads/spin.h"
#include "ops/workspace.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#else
#include <condition_variable>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moeflow {
namespace {

// How long workers stay awake after a job while they yield to other threads. It exceeds the gap between two decode
// passes; waking one may take a fifth of that.
constexpr std::chrono::microseconds kAwake{400};

// Waits for what other running threads are about to do. On an oversubscribed machine they may not even run: yield then.
template <typename IsDone>
void spin_until(IsDone is_done) {
  for (int spins = 0; !is_done();) {
    if (spins < kSpins) {
      ++spins;
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

// A counter whose change can be slept for. Sleepers announce themselves, so that no wake-up is in vain. Between the
// announcement and the sleep they check the counter again, so that no change is missed.
class Ticket {
 public:
  uint32_t current() const { return value_.load(std::memory_order_acquire); }

  void advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all();
  }

  void sleep_while(uint32_t value) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value_.load(std::memory_order_seq_cst) == value) sleep_once(value);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
#if defined(__linux__)
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a word of 32 bits");
  void sleep_once(uint32_t value) { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0); }
  void wake_all() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
  void sleep_once(uint32_t value) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return value_.load(std::memory_order_seq_cst) != value; });
  }
  void wake_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
#endif
  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
};

// How this thread treats floats: rounding, and whether subnormal ones are zero, as torch.set_flush_denormal has it.
// Workers use the caller's rounding mode, or bits would depend on the computing thread.
struct FloatMode {
#if defined(__x86_64__)
  static uint32_t current() { return _mm_getcsr() & ~uint32_t{0x3f}; }  // without the flags of what happened
  static void use(uint32_t mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
  static uint64_t current() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void use(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  static int current() { return 0; }
  static void use(int) {}
#endif
  using Mode = decltype(current());
};

}  // namespace

void Team::barrier() {
  if (num_threads_ == 1) return;
  const uint32_t generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  spin_until([&] { return generation_.load(std::memory_order_acquire) != generation; });
}

class Pool {
 public:
  Pool() = default;
  ~Pool() { stop(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void run(Job job, void* context) {
    std::lock_guard<std::mutex> one_at_a_time(mutex_);
    start_missing_workers();
    team_.reset();
    job_ = job;
    context_ = context;
    float_mode_ = FloatMode::current();
    if (!workers_.empty()) {
      pending_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
      ticket_.advance();
    }
    perform(0);
    spin_until([&] { return pending_.load(std::memory_order_acquire) == 0; });
  }

  void resize(int num_threads) {
    std::lock_guard<std::mutex> one_at_a_time(mutex_);
    if (num_threads == team_.num_threads_) return;
    stop();
    set_size(num_threads);
    start_missing_workers();
  }

  int size() const { return size_.load(std::memory_order_relaxed); }

  // Around a fork the pool is idle, because this waits for a running job.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  // In the child of a fork there are no workers. Their handles are forgotten, not joined; the next job starts new ones.
  void forget_workers() {
    new (&workers_) std::vector<std::thread>();
    new (&ticket_) Ticket();
  }

 private:
  // A job that throws ends the program here, before its context goes away under the other threads.
  void perform(int thread_idx) noexcept { job_(context_, team_, thread_idx); }

  void work(int thread_idx, uint32_t seen) {
    while (true) {
      wait_for_ticket(seen++);
      if (stopping_.load(std::memory_order_acquire)) return;
      FloatMode::use(float_mode_);
      perform(thread_idx);
      pending_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  void wait_for_ticket(uint32_t seen) {
    for (int spins = 0; spins < kSpins; ++spins) {
      if (ticket_.current() != seen) return;
      relax();
    }
    for (const auto end = std::chrono::steady_clock::now() + kAwake; std::chrono::steady_clock::now() < end;) {
      if (ticket_.current() != seen) return;
      std::this_thread::yield();
    }
    ticket_.sleep_while(seen);
  }

  void start_missing_workers() {
    if (static_cast<int>(workers_.size()) == team_.num_threads_ - 1) return;
    SignalsBlocked blocked;
    const uint32_t seen = ticket_.current();
    try {
      while (static_cast<int>(workers_.size()) < team_.num_threads_ - 1) {
        workers_.emplace_back([this, idx = static_cast<int>(workers_.size()) + 1, seen] { work(idx, seen); });
      }
    } catch (...) {  // the system gives no more threads: go on without any
      stop();
      set_size(1);
      throw;
    }
  }

  void stop() {
    stopping_.store(true, std::memory_order_release);
    ticket_.advance();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stopping_.store(false, std::memory_order_release);
  }

  void set_size(int num_threads) {
    team_.num_threads_ = num_threads;
    size_.store(num_threads, std::memory_order_relaxed);
  }

  std::mutex mutex_;
  Team team_;
  std::atomic<int> size_{1};  // the team's, for readers without the mutex
  Job job_ = nullptr;
  void* context_ = nullptr;
  FloatMode::Mode float_mode_ = 0;
  std::vector<std::thread> workers_;
  Ticket ticket_;                            // one more for every job, and for stopping
  alignas(64) std::atomic<int> pending_{0};  // workers that have not finished the job
  std::atomic<bool> stopping_{false};
};

namespace {

// Made on first use and never destroyed: joining threads while the interpreter ends is useless.
Pool& shared_pool() {
  static Pool* const instance = new Pool();
  return *instance;
}

// Pool and workspace of a thread that computes independently; they end with it.
struct OwnTeam {
  Pool pool;
  LockedWorkspace workspace;
  OwnTeam() { own_workspace = &workspace; }
  ~OwnTeam() { own_workspace = nullptr; }
};
thread_local std::unique_ptr<OwnTeam> own_team;

Pool& pool() { return own_team == nullptr ? shared_pool() : own_team->pool; }

}  // namespace

// A fork copies the locks as they are, but of the threads only the one that forks. It therefore takes the locks first,
// in the kernels' order: the child inherits an idle pool and a free workspace. The forking thread's own team is idle
// anyway, and the child has no threads that use other teams.
struct ForkLocks {
  static void take() {
    WorkspaceLock::shared().mutex.lock();
    shared_pool().lock();
  }
  static void release() {
    shared_pool().unlock();
    WorkspaceLock::shared().mutex.unlock();
  }
  static void release_in_child() {
    shared_pool().forget_workers();
    if (own_team != nullptr) own_team->pool.forget_workers();
    release();
  }
  static const int registered;
};
const int ForkLocks::registered = pthread_atfork(take, release, release_in_child);

void run_on_pool(Job job, void* context) { pool().run(job, context); }
void set_num_threads(int count) {
  WorkspaceLock workspace;  // kernels that hold it may prepare something for each thread
  pool().resize(count < 1 ? 1 : count);
}
int num_threads() { return pool().size(); }
void use_own_threads(int count) {
  if (own_team == nullptr) own_team = std::make_unique<OwnTeam>();
  set_num_threads(count);
}

}  // namespace moeflow
