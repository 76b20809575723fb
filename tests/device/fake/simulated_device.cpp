// A software accelerator: torch's PrivateUse1 device, computed by the host's own kernels.
//
// What it shares with hardware is what programs get wrong:
// * Memory of its own. A device address lies in a mapping that nobody may read (PROT_NONE);
//   kernels reach the same bytes through a second mapping of the same file.
// * Streams that run late. Work is queued and run when somebody waits for it. A schedule says which
//   streams are late: the default ones (kernels), the others (copies), or both. A stream that is
//   not late runs what it is given at once, up to a wait for what has not happened.
// * An allocator that gives a freed block to the next taker of the same stream, without waiting for
//   other streams, unless record_stream told it of them. A block that is given out is overwritten,
//   in the order of its stream.
// * Queued work holds addresses, not tensors: it keeps nothing alive.
//
// Kernels are those of torch's CPU backend, so that results have the bits of a host's: shapes come
// from the meta device at once, the CPU kernel runs when the stream does. An operator whose shapes
// depend on values waits for the stream, as on hardware.

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

// ---- streams

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
  ++numbers["num_waits"];
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

// ---- memory

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

// ---- what torch asks of a device

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

// ---- tensors

struct Raw { // a tensor's bytes and layout; keeps nothing alive
  char* data;
  c10::DimVector sizes, strides;
  at::ScalarType dtype;
  bool conj, neg;

  static Raw of(const Tensor& tensor) {
    void* address = tensor.numel() == 0 ? nullptr : tensor.unsafeGetTensorImpl()->storage().mutable_data();
    char* data = nullptr;
    if (address != nullptr) {
      data = tensor.is_cpu() ? (char*)address : visible(address, tensor.device().index());
      data += tensor.storage_offset() * tensor.itemsize();
    }
    return {data, c10::DimVector(tensor.sizes()), c10::DimVector(tensor.strides()), tensor.scalar_type(), tensor.is_conj(), tensor.is_neg()};
  }
  Tensor host() const { // over the bytes
    static char nothing;
    Tensor made = at::from_blob(data ? data : &nothing, sizes, strides, at::TensorOptions(dtype));
    if (conj) made._set_conj(true);
    if (neg) made._set_neg(true);
    return made;
  }
};

void check_dtype(at::ScalarType dtype) {
  if (number("no_float64") && (dtype == at::kDouble || dtype == at::kComplexDouble))
    C10_THROW_ERROR(TypeError, "NPU does not support float64: DT_DOUBLE is not in the list of supported dtypes");
}

Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  check_dtype(type);
  OnDevice on(device ? device->index() : -1);
  return at::detail::empty_generic(sizes, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type, format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  check_dtype(type);
  OnDevice on(device ? device->index() : -1);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

void lay_out(const Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  size_t needed = at::detail::computeStorageNbytes(sizes, strides, tensor.itemsize(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != sizes) lay_out(self, sizes, c10::contiguous_strides(sizes));
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor view_of(const Tensor& base, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, caffe2::TypeMeta dtype) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), dtype);
  made.unsafeGetTensorImpl()->set_storage_offset(offset);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<int64_t> offset) {
  return view_of(self, sizes, strides, offset.value_or(self.storage_offset()), self.dtype());
}

Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  lay_out(self, sizes, strides.empty() && !sizes.empty() ? c10::IntArrayRef(c10::contiguous_strides(sizes)) : strides);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  int64_t count = storage.nbytes() / self.itemsize();
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

bool is_device(const Tensor& tensor) { return tensor.device().type() == kSim; }

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  Tensor from = source.expand(self.sizes());
  Raw to = Raw::of(self);
  if (is_device(self) && is_device(from)) {
    Raw read = Raw::of(from);
    DeviceIndex a = from.device().index(), b = self.device().index();
    if (a != b) give(a, current_streams[a], {nullptr, here(b)});
    submit(a, [=] { to.host().copy_(read.host()); });
    if (a != b) give(b, current_streams[b], {nullptr, here(a)});
  } else if (is_device(self)) {
    if (non_blocking && host_allocator.holds(source.storage().data())) {
      Raw read = Raw::of(from);
      submit(self.device().index(), [=] { to.host().copy_(read.host()); });
    } else { // what is not page-locked is staged: the source may change
      Tensor staged;
      {
        c10::impl::ForceDispatchKeyGuard below(
            c10::default_included_set, c10::autograd_dispatch_keyset_with_ADInplaceOrView);
        staged = Raw::of(from).host().clone();
      }
      submit(self.device().index(), [=] { to.host().copy_(staged); });
    }
  } else {
    Raw read = Raw::of(from);
    DeviceIndex device = from.device().index();
    submit(device, [=] { to.host().copy_(read.host()); });
    if (!non_blocking || !host_allocator.holds(self.storage().data())) {
      if (non_blocking) ++numbers["num_unpinned"];
      synchronize_current(device);
    }
  }
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor to = target;
  return copy_(to, self, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  Tensor to = target;
  to.resize_(self.sizes());
  return copy_(to, self, false);
}

at::Scalar local_scalar(const Tensor& self) {
  synchronize_current(self.device().index());
  return Raw::of(self).host().item();
}

void record_stream(Tensor& self, Stream stream) { GuardImpl().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

// ---- operators

bool is_product(const std::string& op) {
  static const std::set<std::string> names{"aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::baddbmm",
                                           "aten::baddbmm_", "aten::addmv", "aten::dot", "aten::addbmm", "aten::_addmm_activation"};
  return names.count(op);
}

// Keeps 10 fraction bits, to nearest (ties to even), as TF32 and HF32 do.
Tensor short_floats(const Tensor& values) {
  Tensor bits = values.contiguous().view(at::kInt);
  Tensor odd = bits.bitwise_right_shift(13).bitwise_and(1);
  return (bits + odd + 0xfff).bitwise_and(~0x1fff).view(at::kFloat);
}

// Applies `change` to every tensor of an argument or a result.
template <class Change>
IValue mapped(const IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& one : value.toTensorVector()) made.push_back(change(one));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& one : value.toOptionalTensorVector())
      made.push_back(one && one->defined() ? std::optional<Tensor>(change(*one)) : one);
    return made;
  }
  return value;
}

struct Call { // one operator with what it was given
  c10::OperatorHandle op;
  std::string name;
  DeviceIndex device;
  std::vector<IValue> plain;           // arguments; tensors stand in `tensors`, in the order of mapped()
  std::vector<std::pair<Raw, Tensor>> tensors; // the bytes, or a host tensor of its own

  // Arguments with host tensors in the place of the device's.
  Stack on_host() const {
    Stack stack;
    size_t at = 0;
    for (const IValue& value : plain)
      stack.push_back(mapped(value, [&](const Tensor&) {
        const auto& [raw, own] = tensors[at++];
        Tensor made = own.defined() ? own : raw.host();
        if (number("short_products") && is_product(name) && made.scalar_type() == at::kFloat && made.dim() > 0 && !is_result(at - 1))
          made = short_floats(made);
        return made;
      }));
    return stack;
  }
  std::set<size_t> results; // which tensors are written to
  bool is_result(size_t at) const { return results.count(at); }
};

void run_on_host(const Call& call, const std::vector<std::optional<Raw>>& outputs) {
  Stack stack = call.on_host();
  call.op.callBoxed(&stack);
  size_t at = 0;
  bool wrong = is_named("wrong", call.name);
  for (const IValue& value : stack)
    mapped(value, [&](const Tensor& result) {
      if (wrong && at::isFloatingType(result.scalar_type())) result.mul_(1.02);
      if (at < outputs.size() && outputs[at]) outputs[at]->host().copy_(result);
      ++at;
      return result;
    });
}

void check_call(const c10::FunctionSchema& schema, const std::vector<Tensor>& given, DeviceIndex device) {
  const std::string& name = schema.name();
  if (is_named("missing", name))
    TORCH_CHECK_NOT_IMPLEMENTED(false, "Could not run '", name, schema.overload_name().empty() ? "" : ".", schema.overload_name(),
        "' with arguments from the 'PrivateUse1' backend. This could be because the operator doesn't exist for this backend.");
  if (number("no_float64_products") && is_product(name))
    for (const Tensor& one : given)
      TORCH_CHECK(one.scalar_type() != at::kDouble, "call aclnnMatmul failed, detail:EZ1001: Tensor self not implemented for DT_DOUBLE, ",
          "should be in dtype support list [DT_FLOAT,DT_FLOAT16,DT_BFLOAT16]. [ERROR] ERR01100 OPS call acl api failed");
  bool may_mix = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0;
  for (const Tensor& one : given)
    TORCH_CHECK(may_mix || one.device() == Device(kSim, device) || (one.is_cpu() && one.dim() == 0),
        "Expected all tensors to be on the same device, but found at least two devices, ", Device(kSim, device), " and ", one.device(), "! (", name, ")");
  if (is_named("fallback", name))
    TORCH_WARN_ONCE("CAUTION: The operator '", name, "' is not currently supported on the NPU backend and will fall back to run on the CPU. ",
        "This may have performance implications. (function npu_cpu_fallback)");
}

// The operator's results on the meta device; false where only values tell their shapes.
bool shapes_of(const c10::OperatorHandle& op, const std::vector<IValue>& arguments, std::vector<Tensor>& given, Stack& results) {
  c10::impl::ForceDispatchKeyGuard below(
      c10::default_included_set, c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  for (const IValue& value : arguments)
    results.push_back(
        value.isDevice() ? IValue(Device(at::kMeta))
        : value.isGenerator() ? IValue()
        : mapped(value, [&](const Tensor& one) {
      if (one.is_cpu() && one.dim() == 0) { // a number
        given.push_back(one);
        return one;
      }
      size_t num_bytes = at::detail::computeStorageNbytes(one.sizes(), one.strides(), one.itemsize(), one.storage_offset());
      Tensor made = at::empty({int64_t(num_bytes / one.itemsize())}, one.options().device(at::kMeta).pinned_memory(false))
                        .as_strided(one.sizes(), one.strides(), one.storage_offset());
      if (one.is_conj()) made._set_conj(true);
      if (one.is_neg()) made._set_neg(true);
      given.push_back(made);
      return made;
    }));
  try {
    op.callBoxed(&results);
  } catch (const std::exception& error) {
    if (getenv("SIMULATED_NPU_TELL")) fprintf(stderr, "%s waits: %s\n", op.schema().name().c_str(), std::string(error.what()).substr(0, 300).c_str());
    return false;
  }
  return std::all_of(results.begin(), results.end(), [](const IValue& one) { return one.isTensor() || one.isTensorList(); });
}

void any_operator(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t num = schema.arguments().size();
  std::vector<IValue> arguments(stack->end() - num, stack->end());
  Call call{op, schema.name(), -1, {}, {}, {}};

  std::vector<Tensor> given;
  for (size_t i = 0; i < num; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    mapped(arguments[i], [&](const Tensor& one) {
      if (alias != nullptr && alias->isWrite()) call.results.insert(given.size());
      given.push_back(one);
      if (call.device < 0 && is_device(one)) call.device = one.device().index();
      return one;
    });
    if (arguments[i].isDevice() && call.device < 0) call.device = arguments[i].toDevice().index();
  }
  if (call.device < 0) call.device = current_device;
  OnDevice on(call.device);
  check_call(schema, given, call.device);

  std::vector<Tensor> metas;
  Stack results;
  bool late = !is_named("fallback", call.name) && shapes_of(op, arguments, metas, results);
  if (late) // an output argument takes its shape now
    for (size_t i : call.results)
      if (given[i].sizes() != metas[i].sizes() || given[i].strides() != metas[i].strides())
        lay_out(given[i], metas[i].sizes(), metas[i].strides());

  for (size_t i = 0; i < num; ++i) {
    const auto& name = schema.arguments()[i].name();
    IValue value = arguments[i];
    if (value.isDevice()) value = Device(at::kCPU);
    if (name == "generator" && value.isNone()) value = card(call.device).generator;
    call.plain.push_back(mapped(value, [](const Tensor&) { return Tensor(at::empty({0})); }));
  }
  for (const Tensor& one : given) {
    Tensor own;
    if (!is_device(one)) { // a host's scalar may change
      c10::impl::ForceDispatchKeyGuard below(
          c10::default_included_set, c10::autograd_dispatch_keyset_with_ADInplaceOrView);
      own = Raw::of(one).host().clone();
      if (one.unsafeGetTensorImpl()->is_wrapped_number()) own.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    call.tensors.emplace_back(is_device(one) ? Raw::of(one) : Raw{}, own);
  }

  torch::jit::drop(*stack, num);
  if (!late) {
    synchronize_current(call.device);
    ++numbers["num_waiting_operators"];
    Guard guard(lock);
    c10::impl::ForceDispatchKeyGuard below(
        c10::default_included_set, c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    Stack host = call.on_host();
    std::vector<Tensor> shadows;
    for (const IValue& value : host) mapped(value, [&](const Tensor& one) { shadows.push_back(one); return one; });
    op.callBoxed(&host);
    for (const IValue& value : host)
      stack->push_back(mapped(value, [&](const Tensor& result) {
        for (size_t i = 0; i < shadows.size(); ++i)
          if (result.is_same(shadows[i])) return given[i];
        if (is_named("wrong", call.name) && at::isFloatingType(result.scalar_type())) result.mul_(1.02);
        Tensor made = at::empty_strided(result.sizes(), result.strides(), result.options().device(Device(kSim, call.device)));
        return copy_(made, result, false);
      }));
    return;
  }

  std::vector<std::optional<Raw>> outputs;
  bool computes = false;
  for (const IValue& value : results)
    stack->push_back(mapped(value, [&](const Tensor& meta) {
      for (size_t i = 0; i < metas.size(); ++i) {
        if (meta.is_same(metas[i])) {
          outputs.emplace_back();
          computes = true;
          return given[i];
        }
        if (meta.storage().is_alias_of(metas[i].storage())) { // a view: nothing is computed
          outputs.emplace_back();
          return view_of(given[i], meta.sizes(), meta.strides(), meta.storage_offset(), meta.dtype());
        }
      }
      Tensor made = at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(Device(kSim, call.device)));
      outputs.emplace_back(Raw::of(made));
      computes = true;
      return made;
    }));
  if (computes || results.empty())
    submit(call.device, [call = std::move(call), outputs = std::move(outputs)] { run_on_host(call, outputs); });
}

} // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::any_operator>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &sim::empty);
  m.impl("empty_strided", &sim::empty_strided);
  m.impl("resize_", &sim::resize_);
  m.impl("as_strided", &sim::as_strided);
  m.impl("set_.source_Storage", &sim::set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &sim::set_storage);
  m.impl("set_.source_Tensor", &sim::set_tensor);
  m.impl("copy_", &sim::copy_);
  m.impl("_copy_from", &sim::copy_from);
  m.impl("_copy_from_and_resize", &sim::copy_from_and_resize);
  m.impl("_local_scalar_dense", &sim::local_scalar);
  m.impl("record_stream", &sim::record_stream);
  // composed of others elsewhere; hosts have kernels of their own
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&sim::any_operator>());
}

// ---- for the Python module

#define SIM_API extern "C" __attribute__((visibility("default")))

SIM_API void sim_start() {
  c10::SetAllocator(sim::kSim, &sim::device_allocator);
  at::RegisterPrivateUse1HooksInterface(new sim::Hooks);
  sim::set_device(0);
}
SIM_API void sim_set_number(const char* name, int64_t value) { sim::Guard guard(sim::lock); sim::numbers[name] = value; }
SIM_API void sim_set_text(const char* name, const char* value) { sim::Guard guard(sim::lock); sim::texts[name] = value; }
SIM_API int64_t sim_number(const char* name) { sim::Guard guard(sim::lock); return sim::number(name); }
SIM_API int64_t sim_allocated(int device) { return sim::card(device).allocated; }
SIM_API int64_t sim_peak(int device) { return sim::card(device).peak; }
SIM_API void sim_reset_peak(int device) { sim::card(device).peak = sim::card(device).allocated; }
SIM_API void sim_seed(int device, int64_t seed) { sim::card(device).generator.set_current_seed(seed); }
