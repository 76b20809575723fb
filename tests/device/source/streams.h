// Queues of work that run when somebody waits, threads, and the switches.

#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>


namespace sim {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Stream;
using Stack = torch::jit::Stack;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr size_t kDeviceBytes = size_t(4) << 30;
constexpr size_t kLeastBytes = 512;

// One lock for all. Nothing that needs Python's lock is called under it (tensors with a Python
// object are neither made nor dropped there).
std::recursive_mutex lock;
using Guard = std::lock_guard<std::recursive_mutex>;

std::map<std::string, int64_t> numbers;   // switches and counters, by name
std::map<std::string, std::string> texts; // names of operators that a switch is about

int64_t number(const char* name) {
  auto found = numbers.find(name);
  return found == numbers.end() ? 0 : found->second;
}

bool is_named(const char* option, const std::string& op) {
  auto found = texts.find(option);
  return found != texts.end() && !found->second.empty() && ("," + found->second + ",").find("," + op + ",") != std::string::npos;
}


struct Point { // a place in a stream's queue
  DeviceIndex device = -1;
  int64_t stream = 0;
  int64_t count = 0;
};

struct Task {
  std::function<void()> work; // empty: a wait for `after`
  Point after;
};

struct Queue {
  std::deque<Task> tasks;
  int64_t num_given = 0, num_done = 0;
};

struct Block {
  char* address; // in the mapping that nobody may read
  size_t num_bytes;
  DeviceIndex device;
  int64_t stream;
  std::set<int64_t> used_on; // streams told by record_stream
};

struct Card {
  char *hidden = nullptr, *visible = nullptr;
  size_t num_used = 0; // of the mapping
  size_t allocated = 0, peak = 0;
  std::deque<Queue> streams;
  std::map<std::pair<int64_t, size_t>, std::vector<Block*>> free;
  std::vector<std::pair<Block*, std::vector<Point>>> leaving; // freed, used on other streams
  at::Generator generator;
};

Card& card(DeviceIndex index) {
  static std::vector<Card>* cards = [] {
    auto* made = new std::vector<Card>(kDevices);
    for (auto& one : *made) {
      int file = memfd_create("simulated device", 0);
      TORCH_CHECK(file >= 0 && ftruncate(file, kDeviceBytes) == 0, "no memory for the device");
      one.hidden = (char*)mmap(nullptr, kDeviceBytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
      one.visible =
          (char*)mmap(nullptr, kDeviceBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(one.hidden != MAP_FAILED && one.visible != MAP_FAILED, "no addresses for the device");
      close(file);
      one.streams.resize(1);
      one.generator = at::detail::createCPUGenerator(0);
    }
    return made;
  }();
  TORCH_CHECK(index >= 0 && index < kDevices, "NPU error: invalid device ordinal ", int(index));
  return (*cards)[index];
}

const std::thread::id first_thread = std::this_thread::get_id(); // it loads this library
thread_local DeviceIndex current_device = 0;
thread_local bool has_context = false;
thread_local std::map<DeviceIndex, int64_t> current_streams;

// Every call of the runtime. On Ascend a thread that never set its device has no context.
void need_context(const char* call) {
  if (number("strict_threads") && !has_context)
    TORCH_CHECK(false, call, " failed: ctx is NULL, error code is 107002 (this thread set no device)");
}

void set_device(DeviceIndex index) {
  card(index);
  current_device = index;
  has_context = true;
}

Point here(DeviceIndex device) {
  int64_t stream = current_streams[device];
  return {device, stream, card(device).streams.at(stream).num_given};
}

bool is_late(int64_t stream) { return number(stream == 0 ? "kernels_late" : "copies_late") != 0; }

bool is_done(const Point& point) {
  return point.device < 0 || card(point.device).streams.at(point.stream).num_done >= point.count;
}

void run_to(const Point& point);

// Runs the next task of a queue; false where it waits for what has not happened (not `forced`).
bool run_next(Queue& queue, bool forced) {
  Task& next = queue.tasks.front();
  if (!next.work) {
    if (!forced && !is_done(next.after)) return false;
    run_to(next.after);
  } else {
    auto work = std::move(next.work);
    queue.tasks.pop_front();
    ++queue.num_done;
    ++numbers["num_run"];
    c10::impl::ForceDispatchKeyGuard below(
        c10::default_included_set, c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    work();
    return true;
  }
  queue.tasks.pop_front();
  ++queue.num_done;
  return true;
}

void run_to(const Point& point) {
  if (point.device < 0) return;
  Queue& queue = card(point.device).streams.at(point.stream);
  while (queue.num_done < point.count) run_next(queue, true);
}

// Runs whatever is not late and not waiting.
void pump() {
  for (bool moved = true; moved;) {
    moved = false;
    for (DeviceIndex device = 0; device < kDevices; ++device) {
      auto& streams = card(device).streams;
      for (size_t id = 0; id < streams.size(); ++id)
        while (!is_late(id) && !streams[id].tasks.empty() && run_next(streams[id], false)) moved = true;
    }
  }
}

void give(DeviceIndex device, int64_t stream, Task task) {
  Guard guard(lock);
  Queue& queue = card(device).streams.at(stream);
  queue.tasks.push_back(std::move(task));
  ++queue.num_given;
  pump();
}

void submit(DeviceIndex device, std::function<void()> work) {
  has_context = true; // as torch's device guards see to
  give(device, current_streams[device], {std::move(work), {}});
}

void synchronize(const Point& point) {
  Guard guard(lock);
  ++numbers[std::this_thread::get_id() == first_thread ? "num_waits" : "num_waits_elsewhere"];
  run_to(point);
  pump();
}

void synchronize_current(DeviceIndex device) {
  need_context("aclrtSynchronizeStream");
  Guard guard(lock);
  synchronize(here(device));
}

void synchronize_device(DeviceIndex device) {
  need_context("aclrtSynchronizeDevice");
  Guard guard(lock);
  auto& streams = card(device).streams;
  for (size_t id = 0; id < streams.size(); ++id) synchronize({device, int64_t(id), streams[id].num_given});
}

} // namespace sim
