// The device's memory, given out in the order of streams, and page-locked memory of the host.

#pragma once

#include "streams.h"

namespace sim {

char* visible(const void* address, DeviceIndex device) {
  Card& one = card(device);
  auto offset = (const char*)address - one.hidden;
  TORCH_INTERNAL_ASSERT(offset >= 0 && size_t(offset) < kDeviceBytes, "not an address of the device");
  return one.visible + offset;
}

void settle(Card& one) { // blocks that other streams have done with
  for (size_t i = 0; i < one.leaving.size();) {
    auto& [block, points] = one.leaving[i];
    if (std::all_of(points.begin(), points.end(), is_done)) {
      one.free[{block->stream, block->num_bytes}].push_back(block);
      one.leaving.erase(one.leaving.begin() + i);
    } else {
      ++i;
    }
  }
}

void release(void* context) {
  if (context == nullptr) return;
  Guard guard(lock);
  auto* block = (Block*)context;
  Card& one = card(block->device);
  one.allocated -= block->num_bytes;
  std::vector<Point> points;
  for (int64_t id : block->used_on) points.push_back({block->device, id, one.streams.at(id).num_given});
  block->used_on.clear();
  one.leaving.emplace_back(block, std::move(points));
  settle(one);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    DeviceIndex device = current_device;
    has_context = true; // as torch's device guards see to
    if (wanted == 0) return {nullptr, nullptr, &release, Device(kSim, device)};
    Guard guard(lock);
    Card& one = card(device);
    size_t num_bytes = kLeastBytes;
    while (num_bytes < wanted) num_bytes *= 2;
    if (int64_t most = number("max_bytes"); most && one.allocated + num_bytes > size_t(most))
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", wanted, " bytes (NPU ", int(device), "; ",
          most, " bytes total capacity; ", one.allocated, " bytes already allocated)");
    settle(one);
    int64_t stream = current_streams[device];
    auto& free = one.free[{stream, num_bytes}];
    Block* block;
    if (!free.empty()) {
      block = free.back();
      free.pop_back();
      ++numbers["num_reused"];
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, one.num_used + num_bytes <= kDeviceBytes, "NPU out of memory");
      block = new Block{one.hidden + one.num_used, num_bytes, device, stream, {}};
      one.num_used += num_bytes;
    }
    one.allocated += num_bytes;
    one.peak = std::max(one.peak, one.allocated);
    // What was there is gone, from this place of the stream on: not a number in every float.
    char* bytes = visible(block->address, device);
    give(device, stream, {[=] { memset(bytes, 0xff, wanted); }, {}});
    return {block->address, block, &release, Device(kSim, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t count) const override {
    DeviceIndex device = current_device;
    char *to = visible(target, device), *from = visible(source, device);
    submit(device, [=] { memcpy(to, from, count); });
  }
};

DeviceAllocator device_allocator;

// Page-locked host memory. Freed memory stays until all work given so far is done, as torch's own
// caching allocators see to it.
struct HostAllocator final : c10::Allocator {
  std::map<char*, size_t> ranges;
  std::vector<std::tuple<char*, size_t, std::vector<Point>>> leaving;

  c10::DataPtr allocate(size_t num_bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }
  bool holds(const void* address) {
    Guard guard(lock);
    auto found = ranges.upper_bound((char*)address);
    if (found == ranges.begin()) return false;
    --found;
    if (number("pinned_by_base")) return found->first == address; // older CANN: no address within
    return (char*)address < found->first + found->second;
  }
  void free(char* address) {
    Guard guard(lock);
    std::vector<Point> points;
    for (DeviceIndex device = 0; device < kDevices; ++device) {
      auto& streams = card(device).streams;
      for (size_t id = 0; id < streams.size(); ++id)
        points.push_back({device, int64_t(id), streams[id].num_given});
    }
    leaving.emplace_back(address, ranges.at(address), std::move(points));
    ranges.erase(address);
    for (size_t i = 0; i < leaving.size();) {
      auto& [begin, size, after] = leaving[i];
      if (std::all_of(after.begin(), after.end(), is_done)) {
        munmap(begin, size);
        leaving.erase(leaving.begin() + i);
      } else {
        ++i;
      }
    }
  }
} host_allocator;

c10::DataPtr HostAllocator::allocate(size_t num_bytes) {
  Guard guard(lock);
  size_t size = std::max<size_t>(num_bytes, 1);
  auto* address = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "no page-locked memory");
  ranges[address] = size;
  return {address, address, [](void* memory) { host_allocator.free((char*)memory); }, Device(at::kCPU)};
}

} // namespace sim
