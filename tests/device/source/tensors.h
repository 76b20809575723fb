// Tensors: made, laid out, viewed, copied.

#pragma once

#include "guard.h"

namespace sim {

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

} // namespace sim
