// Collectives of csrc/threads/shared_group.h between threads in place of processes. So the thread sanitizer detects a
// read of memory that may still be written. scripts/sanitize builds it; tests/parallel has processes.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/threads/shared_group.h"

using namespace moeflow;

namespace {

using Bytes = std::vector<uint8_t>;

constexpr int kBufferBytes = 64;

void expect(bool is_right, const std::string& what) {
  if (is_right) return;
  std::fprintf(stderr, "check_shared_group: %s is wrong\n", what.c_str());
  std::exit(1);
}

// Memory of exactly one segment.
class Memory {
 public:
  explicit Memory(int num_ranks) : bytes_(segment_bytes(num_ranks, kBufferBytes)) {
    data_ = ::operator new(bytes_, std::align_val_t{64});
    std::fill_n(static_cast<uint8_t*>(data_), bytes_, 0);
    make_segment(data_, num_ranks, kBufferBytes);
  }
  ~Memory() { ::operator delete(data_, std::align_val_t{64}); }
  void* data() const { return data_; }

 private:
  const int64_t bytes_;
  void* data_;
};

// What rank `source` has for rank `target` in a collective: all ranks know it.
Bytes part_of(int step, int source, int target) {
  std::minstd_rand generator((step * 64 + source) * 64 + target + 1);
  generator.discard(3);
  Bytes part(generator() % 3 == 0 ? 0 : generator() % (3 * kBufferBytes));
  for (uint8_t& byte : part) byte = generator();
  return part;
}

void run_step(SharedGroup& group, int rank, int step) {
  const int size = group.num_ranks();
  const bool is_for_all = step % 2 == 0;
  std::vector<Bytes> own;
  std::vector<Part> parts;
  for (int target = 0; target < (is_for_all ? 1 : size); ++target) own.push_back(part_of(step, rank, target));
  for (const Bytes& part : own) parts.push_back({part.data(), static_cast<int64_t>(part.size())});
  group.start("step " + std::to_string(step), parts, is_for_all);
  expect(group.wait(60) == SharedGroup::State::kComplete, "a wait");
  std::vector<Bytes> received;
  std::vector<void*> outs;
  for (const int64_t bytes : group.incoming_bytes()) received.emplace_back(bytes);
  for (Bytes& bytes : received) outs.push_back(bytes.data());
  while (group.advance(outs)) expect(group.wait(60) == SharedGroup::State::kComplete, "the wait for a piece");
  for (int source = 0; source < size; ++source) {
    const Bytes want = source == rank ? Bytes() : part_of(step, source, is_for_all ? 0 : rank);
    expect(received[source] == want, "what rank " + std::to_string(source) + " sent");
  }
}

// Epochs wrap after the first 1000 pieces.
void check_many_steps(int num_ranks) {
  const Memory memory(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&memory, rank] {
      SharedGroup group(memory.data(), rank);
      for (int step = 0; step < 1500; ++step) run_step(group, rank, step);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void check_abort() {
  const Memory memory(2);
  std::atomic<bool> has_looked{false};
  std::thread waiting([&] {
    SharedGroup group(memory.data(), 0);
    group.start("never", {{nullptr, 0}}, true);
    expect(group.wait(0.01) == SharedGroup::State::kWaiting, "a wait for nobody");
    expect(group.missing() == std::vector<int>{1}, "who is missing");
    has_looked.store(true);
    SharedGroup::State state;
    while ((state = group.wait(0.05)) == SharedGroup::State::kWaiting) {
    }
    expect(state == SharedGroup::State::kAborted && group.abort_reason() == "enough", "the reason");
  });
  while (!has_looked.load()) std::this_thread::yield();
  SharedGroup(memory.data(), 1).abort("enough");
  waiting.join();
}

// A rank that has left a collective writes nothing more: another may still read the rank's data there.
void check_buffers_after_abort() {
  const Memory memory(2);
  SharedGroup first(memory.data(), 0), second(memory.data(), 1);
  const Bytes sent(kBufferBytes, 1), later(kBufferBytes, 2);
  Bytes received(kBufferBytes);
  first.start("a", {{sent.data(), kBufferBytes}}, true);
  second.start("a", {}, true);
  expect(second.wait(0) == SharedGroup::State::kComplete, "a wait for one that was there before");
  expect(first.wait(0) == SharedGroup::State::kComplete && !first.advance({nullptr, nullptr}), "one piece");
  first.start("b", {{later.data(), kBufferBytes}}, true);
  first.abort("left");
  first.start("c", {{later.data(), kBufferBytes}}, true);
  second.advance({received.data(), nullptr});
  expect(received == sent, "what was sent before the end");
}

}  // namespace

int main() {
  for (const int num_ranks : {1, 2, 3, 5}) check_many_steps(num_ranks);
  check_abort();
  check_buffers_after_abort();
  std::printf("shared group: right\n");
}
