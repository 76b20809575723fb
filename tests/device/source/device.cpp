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

#include "operators.h"

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
