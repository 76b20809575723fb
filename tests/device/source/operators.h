// Every other operator: its shapes from the meta device now, its values from the host's kernel later.

#pragma once

#include "tensors.h"

namespace sim {

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
