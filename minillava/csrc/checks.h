// What both bindings, C++ and CUDA, demand of their arguments before a kernel may touch memory.
// `minillava.layer_norm.layer_norm` says the same to users in Python; these guard calls that go to the op directly.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <tuple>

namespace minillava {

using at::Tensor;

inline at::ScalarType statistics_dtype(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_parameter(const char* name, const Tensor& p, const Tensor& x) {
  TORCH_CHECK(p.dim() == 1 && p.size(0) == x.size(-1), name, " must have shape (", x.size(-1), ",), got ", p.sizes());
  TORCH_CHECK(p.device() == x.device(), name, " is on ", p.device(), ", x on ", x.device());
  TORCH_CHECK_TYPE(p.scalar_type() == x.scalar_type() || p.scalar_type() == statistics_dtype(x), name, " must be ",
                   x.scalar_type(), " or ", statistics_dtype(x), ", got ", p.scalar_type());
}

inline void check_input(const Tensor& x) {
  TORCH_CHECK(x.dim() > 0 && x.size(-1) > 0, "layer_norm needs at least one feature in the last dimension, got ",
              x.sizes());
}

inline void check_forward(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  check_input(x);
  check_parameter("weight", weight, x);
  check_parameter("bias", bias, x);
  TORCH_CHECK_TYPE(weight.scalar_type() == bias.scalar_type(), "weight is ", weight.scalar_type(), ", bias is ",
                   bias.scalar_type());
}

inline void check_backward(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                           const Tensor& weight) {
  check_input(x);
  check_parameter("weight", weight, x);
  TORCH_CHECK(dy.sizes() == x.sizes() && dy.scalar_type() == x.scalar_type() && dy.device() == x.device(),
              "dy must be like x, ", x.sizes(), " of ", x.scalar_type(), "; got ", dy.sizes(), " of ",
              dy.scalar_type());
  for (const Tensor* s : {&mean, &rstd}) {
    TORCH_CHECK(s->sizes() == x.sizes().slice(0, x.dim() - 1) && s->scalar_type() == statistics_dtype(x) &&
                    s->device() == x.device(),
                "mean and rstd must have one ", statistics_dtype(x), " for each row of x, got ", s->sizes(), " of ",
                s->scalar_type());
  }
}

}  // namespace minillava
