#include "io/slab_reader.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>

#include "io/crc32.h"
#include "threads/clock.h"
#include "threads/signals_blocked.h"
#include "threads/spin.h"

namespace moeflow {

SlabReader::SlabReader(const SlabFile& file, uint8_t* memory, int64_t slot_bytes, int num_threads)
    : file_(file),
      memory_(memory),
      slot_bytes_(slot_bytes),
      loads_(file.num_slabs()),
      is_checked_(file.num_slabs()) {
  SignalsBlocked blocked;
  try {
    while (num_threads_ < num_threads) {
      threads_.emplace_back([this, thread = num_threads_] { serve(thread); });
      ++num_threads_;
    }
  } catch (...) {
    close();
    throw;
  }
}

SlabReader::~SlabReader() { close(); }

void SlabReader::submit(const std::vector<std::tuple<int64_t, int64_t>>& slabs_and_slots, bool is_urgent,
                        bool waits_at_once) {
  const int64_t count = static_cast<int64_t>(slabs_and_slots.size());
  Lock lock(mutex_);
  const size_t before = queue_.size();
  for (const auto& [slab, slot] : slabs_and_slots) queue(slab, slot, is_urgent, num_threads_ / count);
  if (is_closed_) {
    for (const auto& [slab, slot] : slabs_and_slots) end_pieces(lock, slab, loads_[slab].num_pieces, false);
    queue_.clear();
    return;
  }
  const size_t added = queue_.size() - before - (waits_at_once ? 1 : 0);
  lock.unlock();
  for (size_t i = 0; i < std::min(added, threads_.size()); ++i) work_.notify_one();
}

void SlabReader::queue(int64_t slab, int64_t slot, bool is_urgent, int64_t max_pieces) {
  const int64_t filled = file_.filled_bytes(slab);
  const int64_t count = is_urgent ? std::max<int64_t>(1, std::min(max_pieces, filled / kMinPieceBytes)) : 1;
  const int64_t size = ((filled + count - 1) / count + kSlabPageBytes - 1) / kSlabPageBytes * kSlabPageBytes;
  Load& load = loads_[slab];
  load = Load{};
  load.slot = slot;
  load.is_urgent = is_urgent;
  const int64_t priority = is_urgent ? 0 : 1 + slab / file_.slabs_per_layer;
  for (int64_t start = 0; start < filled; start += size) {
    queue_[{priority, num_queued_++}] = Piece{slab, start, std::min(size, filled - start)};
    ++load.num_pieces;
  }
}

bool SlabReader::cancel(int64_t slab) { return take_back(slab, true); }

bool SlabReader::cancel_prefetch(int64_t slab) { return take_back(slab, false); }

bool SlabReader::take_back(int64_t slab, bool may_be_urgent) {
  Lock lock(mutex_);
  Load& load = loads_[slab];
  if (load.num_pieces == 0 || load.has_begun || is_closed_ || (load.is_urgent && !may_be_urgent)) return false;
  for (auto it = queue_.begin(); it != queue_.end();) it = it->second.slab == slab ? queue_.erase(it) : std::next(it);
  load.num_pieces = 0;
  return true;
}

std::vector<EndedRead> SlabReader::take_ended() {
  Lock lock(mutex_);
  std::vector<EndedRead> ended;
  ended.swap(ended_);
  num_ended_.store(0, std::memory_order_release);
  if (!ended.empty()) {
    num_taken_.fetch_add(1, std::memory_order_release);
    ended_one_.notify_all();  // others who wait look again
  }
  return ended;
}

bool SlabReader::wait(double seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  const uint64_t taken = num_taken_.load(std::memory_order_acquire);
  const auto is_over = [&] { return has_ended() || num_taken_.load(std::memory_order_acquire) != taken; };
  Lock lock(mutex_);
  while (can_help() && !is_over()) read_first(lock, num_threads_);
  lock.unlock();
  for (int spins = 0; spins < kSpins && !is_over(); ++spins) relax();
  lock.lock();
  return ended_one_.wait_until(lock, deadline, is_over);
}

void SlabReader::keep_spans(bool keeps) {
  Lock lock(mutex_);
  keeps_spans_.store(keeps, std::memory_order_relaxed);
  if (!keeps) spans_.clear();
}

std::vector<ReadSpan> SlabReader::take_spans() {
  Lock lock(mutex_);
  std::vector<ReadSpan> spans;
  spans.swap(spans_);
  return spans;
}

void SlabReader::close() {
  Lock lock(mutex_);
  is_closed_ = true;
  std::map<Place, Piece> queued;
  queued.swap(queue_);
  for (const auto& [place, piece] : queued) end_pieces(lock, piece.slab, 1, false);
  std::vector<std::thread> threads;
  threads.swap(threads_);
  lock.unlock();
  work_.notify_all();
  for (std::thread& thread : threads) thread.join();
}

bool SlabReader::is_closed() {
  Lock lock(mutex_);
  return is_closed_;
}

void SlabReader::serve(int thread) {
  Lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return is_closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    read_first(lock, thread);
  }
}

// Reads the first piece of the queue, without the lock meanwhile.
void SlabReader::read_first(Lock& lock, int thread) {
  const Piece piece = queue_.begin()->second;
  queue_.erase(queue_.begin());
  Load& load = loads_[piece.slab];
  load.has_begun = true;
  const int64_t slot = load.slot;
  const bool is_urgent = load.is_urgent;
  lock.unlock();
  const int64_t start_ns = keeps_spans() ? now_ns() : 0;
  const bool is_right = read_piece(piece, slot);
  const int64_t end_ns = start_ns != 0 ? now_ns() : 0;
  lock.lock();
  if (start_ns != 0 && keeps_spans()) {
    spans_.push_back({thread, piece.slab, piece.num_bytes, is_urgent, start_ns, end_ns});
  }
  end_pieces(lock, piece.slab, 1, is_right);
}

// Counts pieces that have ended; the last one ends the slab. The lock is released while the slab is checked.
void SlabReader::end_pieces(Lock& lock, int64_t slab, int count, bool is_right) {
  Load& load = loads_[slab];
  load.is_right = load.is_right && is_right;
  if (load.num_pieces > count) {
    load.num_pieces -= count;
    return;
  }
  if (load.is_right && file_.checksums != nullptr && is_checked_[slab] == 0) {
    const uint8_t* const content = memory_ + load.slot * slot_bytes_;
    lock.unlock();
    const bool is_same = crc32(content, file_.slab_bytes(slab)) == file_.checksums[slab];
    lock.lock();
    load.is_right = is_same;
    is_checked_[slab] = is_same;
  }
  load.num_pieces = 0;
  ended_.push_back({slab, load.slot, load.is_right});
  num_ended_.store(static_cast<int64_t>(ended_.size()), std::memory_order_release);
  ended_one_.notify_all();
}

bool SlabReader::read_piece(const Piece& piece, int64_t slot) const {
  const int64_t position = file_.position(piece.slab) + piece.start;
  uint8_t* const into = memory_ + slot * slot_bytes_ + piece.start;
  int64_t done = 0;
  while (done < piece.num_bytes) {
    const ssize_t count = pread(file_.descriptor, into + done, piece.num_bytes - done, position + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) break;
    done += count;
    // The end; a direct read cannot go on from the middle of a page.
    if (count == 0 || done % kSlabPageBytes != 0) break;
  }
#if defined(POSIX_FADV_DONTNEED)
  if (!file_.is_direct) posix_fadvise(file_.descriptor, position, piece.num_bytes, POSIX_FADV_DONTNEED);
#endif
  return done >= piece.num_bytes;
}

}  // namespace moeflow
