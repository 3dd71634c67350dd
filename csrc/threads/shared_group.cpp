#include "threads/shared_group.h"

#if defined(__linux__)

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "threads/spin.h"

namespace moeflow {

namespace {

constexpr uint64_t kMagic = 0x70756f7267656f6d;  // "moegroup"
constexpr uint32_t kVersion = 1;
constexpr int64_t kLine = 64;
constexpr int64_t kPage = 4096;
constexpr uint32_t kFirstEpoch = 0u - 1000;  // so that tests see epochs wrap
constexpr int kLabelBytes = 112, kReasonBytes = 1024;

enum AbortState : uint32_t { kAlive, kEnding, kEnded };  // kEnding: its reason is being written

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Fits a text into an array of bytes, whole characters of UTF-8 only. The rest of the array stays as it is.
void copy_text(char* to, int64_t capacity, const std::string& text) {
  int64_t length = std::min<int64_t>(capacity - 1, text.size());
  while (length < static_cast<int64_t>(text.size()) && length > 0 && (text[length] & 0xc0) == 0x80) --length;
  std::memcpy(to, text.data(), length);
  to[length] = 0;
}

uint64_t hash_of(const std::string& text) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return hash;
}

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

}  // namespace

// What a rank says of its stream, beside each of its two buffers.
struct Message {
  uint64_t label_hash;
  int64_t bytes;
  char label[kLabelBytes];
  Interval for_rank[kMaxRanks];
};

struct RankState {
  alignas(kLine) std::atomic<uint32_t> epoch;  // the futex that waits for this rank sleep on
  std::atomic<uint32_t> sleepers;
  alignas(kLine) Message messages[2];
};

// The beginning of the segment. Buffers follow: those of rank 0, those of rank 1, ... Each rank is the first to write
// into its own, so that they lie in the memory next to its processor.
struct Segment {
  uint64_t magic;
  uint32_t version;
  int32_t num_ranks;
  int64_t buffer_bytes;
  alignas(kLine) std::atomic<uint32_t> abort_state;
  char abort_reason[kReasonBytes];
  RankState ranks[kMaxRanks];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t),
              "processes share the words, and futexes have 32 bits");

namespace {

constexpr int64_t kBuffersAt = (sizeof(Segment) + kPage - 1) / kPage * kPage;

// Not private: the sleepers are other processes.
void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void sleep_while(std::atomic<uint32_t>& word, uint32_t value, int64_t ns) {
  const timespec timeout{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

// What two intervals of a stream have in common; of no bytes if that is nothing.
Interval common(Interval a, Interval b) {
  const int64_t begin = std::max(a.begin, b.begin), end = std::min(a.begin + a.bytes, b.begin + b.bytes);
  return {begin, std::max<int64_t>(end - begin, 0)};
}

void check_sizes(int num_ranks, int64_t buffer_bytes) {
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    throw std::invalid_argument("a group has 1 to " + std::to_string(kMaxRanks) + " ranks, not " +
                                std::to_string(num_ranks));
  }
  if (buffer_bytes < 1) throw std::invalid_argument("ranks need buffers of at least one byte");
}

}  // namespace

int64_t segment_bytes(int num_ranks, int64_t buffer_bytes) {
  check_sizes(num_ranks, buffer_bytes);
  return kBuffersAt + 2 * num_ranks * round_up(buffer_bytes, kLine);
}

void make_segment(void* memory, int num_ranks, int64_t buffer_bytes) {
  check_sizes(num_ranks, buffer_bytes);
  Segment* const segment = static_cast<Segment*>(memory);
  segment->version = kVersion;
  segment->num_ranks = num_ranks;
  segment->buffer_bytes = round_up(buffer_bytes, kLine);
  for (int rank = 0; rank < num_ranks; ++rank) segment->ranks[rank].epoch.store(kFirstEpoch, std::memory_order_relaxed);
  segment->magic = kMagic;
}

SharedGroup::SharedGroup(void* memory, int rank)
    : segment_(static_cast<Segment*>(memory)), rank_(rank), epoch_(kFirstEpoch) {
  if (segment_->magic != kMagic || segment_->version != kVersion) {
    throw std::invalid_argument("this is no segment of a group, or one of another version");
  }
  if (rank < 0 || rank >= num_ranks()) {
    throw std::invalid_argument("a group of " + std::to_string(num_ranks()) + " has no rank " + std::to_string(rank));
  }
}

int SharedGroup::num_ranks() const { return segment_->num_ranks; }

// ---- the collective ----

void SharedGroup::start(const std::string& label, std::vector<Part> parts, bool is_for_all) {
  if (!is_for_all) {
    if (static_cast<int>(parts.size()) != num_ranks()) throw std::invalid_argument("each rank has one part");
    parts[rank_].bytes = 0;  // what a rank keeps takes no way through the buffers
  }
  if (is_aborted()) return;  // this rank may have left a collective, while others still read its data
  parts_ = std::move(parts);
  piece_ = 0;
  Message& message = segment_->ranks[rank_].messages[(epoch_ + 1) % 2];
  message.label_hash = hash_of(label);
  copy_text(message.label, kLabelBytes, label);
  message.bytes = 0;
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (!is_for_all) message.for_rank[i] = {message.bytes, parts_[i].bytes};
    message.bytes += parts_[i].bytes;
  }
  if (is_for_all) std::fill_n(message.for_rank, num_ranks(), Interval{0, message.bytes});
  publish_piece();
}

SharedGroup::State SharedGroup::wait(double seconds) {
  const int64_t deadline_ns = now_ns() + static_cast<int64_t>(seconds * 1e9);
  int spins = 0;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    if (!wait_for(rank, &spins, deadline_ns)) return is_aborted() ? State::kAborted : State::kWaiting;
  }
  return piece_ > 0 || take_messages() ? State::kComplete : State::kMismatch;
}

bool SharedGroup::advance(const std::vector<void*>& outs) {
  const int64_t size = segment_->buffer_bytes;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const Interval wanted = incoming_[rank];
    const Interval taken = common({piece_ * size, size}, wanted);
    if (taken.bytes == 0) continue;
    std::memcpy(static_cast<uint8_t*>(outs[rank]) + (taken.begin - wanted.begin),
                buffer(rank) + (taken.begin - piece_ * size), taken.bytes);
  }
  if (++piece_ >= num_pieces_) return false;
  publish_piece();
  return true;
}

// ---- its pieces ----

uint8_t* SharedGroup::buffer(int rank) const {
  uint8_t* const buffers = reinterpret_cast<uint8_t*>(segment_) + kBuffersAt;
  return buffers + (2 * rank + epoch_ % 2) * segment_->buffer_bytes;
}

void SharedGroup::publish_piece() {
  ++epoch_;
  write_piece();
  RankState& own = segment_->ranks[rank_];
  // In this order, and seq_cst: a sleeper announces itself before the kernel checks the epoch again.
  own.epoch.store(epoch_, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) > 0) wake_all(own.epoch);
}

void SharedGroup::write_piece() {
  const Interval piece{piece_ * segment_->buffer_bytes, segment_->buffer_bytes};
  Interval whole{0, 0};
  for (const Part& part : parts_) {
    whole = {whole.begin + whole.bytes, part.bytes};
    const Interval written = common(piece, whole);
    if (written.bytes == 0) continue;
    std::memcpy(buffer(rank_) + (written.begin - piece.begin),
                static_cast<const uint8_t*>(part.data) + (written.begin - whole.begin), written.bytes);
  }
}

// Notes what the others have for this rank, before their next collective takes the place of these messages. False if
// one of them does something else. All ranks see all messages, so they agree on the number of pieces.
bool SharedGroup::take_messages() {
  const uint64_t own_hash = segment_->ranks[rank_].messages[epoch_ % 2].label_hash;
  incoming_.assign(num_ranks(), Interval{0, 0});
  int64_t longest = 0;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const Message& message = segment_->ranks[rank].messages[epoch_ % 2];
    if (message.label_hash != own_hash) return false;
    longest = std::max(longest, message.bytes);
    if (rank != rank_) incoming_[rank] = message.for_rank[rank_];
  }
  num_pieces_ = round_up(longest, segment_->buffer_bytes) / segment_->buffer_bytes;
  return true;
}

std::vector<int64_t> SharedGroup::incoming_bytes() const {
  std::vector<int64_t> sizes;
  for (const Interval& interval : incoming_) sizes.push_back(interval.bytes);
  return sizes;
}

// ---- waiting ----

bool SharedGroup::has_published(int rank) const {
  const uint32_t theirs = segment_->ranks[rank].epoch.load(std::memory_order_acquire);
  return static_cast<int32_t>(theirs - epoch_) >= 0;
}

// False if the deadline passes before, or the group is aborted. `spins` counts through all waits for a piece.
bool SharedGroup::wait_for(int rank, int* spins, int64_t deadline_ns) {
  RankState& state = segment_->ranks[rank];
  while (!is_aborted()) {
    if (has_published(rank)) return true;
    if (++*spins <= kSpins) {
      relax();
      continue;
    }
    const int64_t left_ns = deadline_ns - now_ns();
    if (left_ns <= 0) return false;
    state.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = state.epoch.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - epoch_) < 0) sleep_while(state.epoch, seen, left_ns);
    state.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
  return false;
}

std::vector<int> SharedGroup::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    if (!has_published(rank)) ranks.push_back(rank);
  }
  return ranks;
}

std::string SharedGroup::label_of(int rank) const { return segment_->ranks[rank].messages[epoch_ % 2].label; }

// ---- the end ----

bool SharedGroup::is_aborted() const { return segment_->abort_state.load(std::memory_order_acquire) != kAlive; }

// A rank that looked before and sleeps after this misses the call to wake up: it then sleeps until its wait is over.
void SharedGroup::abort(const std::string& reason) {
  uint32_t expected = kAlive;
  if (!segment_->abort_state.compare_exchange_strong(expected, kEnding)) return;
  copy_text(segment_->abort_reason, kReasonBytes, reason);
  segment_->abort_state.store(kEnded, std::memory_order_release);
  for (int rank = 0; rank < num_ranks(); ++rank) wake_all(segment_->ranks[rank].epoch);
}

// Who writes it may be killed in between.
std::string SharedGroup::abort_reason() const {
  for (int spins = 0; spins < kSpins; ++spins) {
    if (segment_->abort_state.load(std::memory_order_acquire) == kEnded) return segment_->abort_reason;
    relax();
  }
  return "for no reason that was said";
}

}  // namespace moeflow

#endif  // __linux__
