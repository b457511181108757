// Matrix products and elementwise operations that allocate their result and compute nothing, in place of the CPU's: what is left of nn.Linear, and
// of an FP8 linear, is what the host does. They are reached as the real ones are, through torch's bindings and dispatcher.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>

namespace {

using at::IntArrayRef;
using at::Tensor;
using at::TensorList;
using Dtype = std::optional<at::ScalarType>;
using Maybe = const std::optional<Tensor> &;

Tensor result(const Tensor &a, const Tensor &b, Dtype dtype) {
  return at::empty({a.size(0), b.size(1)}, a.options().dtype(dtype.value_or(a.scalar_type())));
}

Tensor mm(const Tensor &a, const Tensor &b) { return result(a, b, {}); }

Tensor addmm(const Tensor &bias, const Tensor &a, const Tensor &b, const at::Scalar &, const at::Scalar &) {
  return result(a, b, {});
}

Tensor scaled_mm(const Tensor &a, const Tensor &b, const Tensor &, const Tensor &, Maybe, Maybe, Dtype dtype, bool) {
  return result(a, b, dtype);
}

Tensor scaled_mm_v2(const Tensor &a, const Tensor &b, TensorList, IntArrayRef, IntArrayRef, TensorList, IntArrayRef,
                    IntArrayRef, Maybe, Dtype dtype, IntArrayRef, bool) {
  return result(a, b, dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("mm", mm);
  m.impl("addmm", addmm);
  m.impl("_scaled_mm", scaled_mm);
  m.impl("_scaled_mm_v2", scaled_mm_v2);
}
