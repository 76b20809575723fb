// What torch asks of a device: its threads' device, streams, events, page-locked memory.

#pragma once

#include "memory.h"

namespace sim {

struct Event {
  Point point;
  int num_queries = 0;
};

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device device) const override {
    Device old(kSim, current_device);
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return Device(kSim, current_device); }
  void setDevice(Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Stream getStream(Device device) const override {
    DeviceIndex index = device.index() < 0 ? current_device : device.index();
    return Stream(Stream::UNSAFE, Device(kSim, index), current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, Device(kSim, device.index() < 0 ? current_device : device.index()), 0);
  }
  Stream getNewStream(Device device, int = 0) const override {
    need_context("aclrtCreateStream");
    Guard guard(lock);
    DeviceIndex index = device.index() < 0 ? current_device : device.index();
    auto& streams = card(index).streams;
    streams.emplace_back();
    return Stream(Stream::UNSAFE, Device(kSim, index), streams.size() - 1);
  }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
  Stream exchangeStream(Stream stream) const override {
    Stream old = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return old;
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    need_context("aclrtRecordEvent");
    Guard guard(lock);
    if (*event == nullptr) *event = new Event;
    auto& queue = card(stream.device_index()).streams.at(stream.id());
    *(Event*)*event = {{stream.device_index(), stream.id(), queue.num_given}, 0};
  }
  void block(void* event, const Stream& stream) const override {
    need_context("aclrtStreamWaitEvent");
    if (event != nullptr) give(stream.device_index(), stream.id(), {nullptr, ((Event*)event)->point});
  }
  bool queryEvent(void* event) const override {
    need_context("aclrtQueryEventStatus");
    if (event == nullptr) return true;
    Guard guard(lock);
    auto* one = (Event*)event;
    if (++one->num_queries > 1000) synchronize(one->point); // somebody polls
    return is_done(one->point);
  }
  void synchronizeEvent(void* event) const override {
    need_context("aclrtSynchronizeEvent");
    if (event != nullptr) synchronize(((Event*)event)->point);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (Event*)event; }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const Stream& stream) const override {
    Guard guard(lock);
    return card(stream.device_index()).streams.at(stream.id()).tasks.empty();
  }
  void synchronizeStream(const Stream& stream) const override {
    need_context("aclrtSynchronizeStream");
    Guard guard(lock);
    auto& queue = card(stream.device_index()).streams.at(stream.id());
    synchronize({stream.device_index(), stream.id(), queue.num_given});
  }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    Guard guard(lock);
    auto* block = (Block*)data.get_context();
    if (block != nullptr && block->stream != stream.id()) block->used_on.insert(stream.id());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

struct OnDevice { // allocations and operators go to the device of their tensors
  explicit OnDevice(DeviceIndex device) : old_(current_device) { current_device = device < 0 ? current_device : device; }
  ~OnDevice() { current_device = old_; }
  DeviceIndex old_;
};

void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  DeviceIndex device = storage.device().index();
  OnDevice on(device);
  c10::DataPtr data = device_allocator.allocate(num_bytes);
  if (size_t kept = std::min<size_t>(storage.nbytes(), num_bytes)) {
    char *to = visible(data.get(), device), *from = visible(storage.data(), device);
    submit(device, [=] { memcpy(to, from, kept); });
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    DeviceIndex old = current_device;
    if (device >= 0) set_device(device);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override { return host_allocator.holds(address); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(!number("no_pinned"), "NPU error: page-locked memory is not supported here");
    need_context("aclrtMallocHost");
    return &host_allocator;
  }
  Device getDeviceFromPtr(void*) const override { return Device(kSim, current_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return card(device < 0 ? current_device : device).generator;
  }
  at::Generator getNewGenerator(DeviceIndex = -1) const override { return at::detail::createCPUGenerator(0); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage, num_bytes);
  }
};

} // namespace sim
