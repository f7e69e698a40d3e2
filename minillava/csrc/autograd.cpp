// The ops' gradients, for every device: thin, and in C++ because a gradient that is registered from Python costs more
// time on a small input than its LayerNorm. Without this library `minillava/layer_norm.py` registers the same there.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

#include "checks.h"

namespace minillava {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Outputs = std::tuple<Tensor, Tensor, Tensor>;

Outputs layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, bool compensate) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("minillava::layer_norm", "")
                             .typed<Outputs(const Tensor&, const Tensor&, const Tensor&, double, bool)>();
  return op.call(x, weight, bias, eps, compensate);
}

Outputs layer_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                            const Tensor& weight, bool compensate) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("minillava::layer_norm_backward", "")
          .typed<Outputs(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool)>();
  return op.call(dy, x, mean, rstd, weight, compensate);
}

struct Forward : torch::autograd::Function<Forward> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
                               double eps, bool compensate) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [y, mean, rstd] = layer_norm(x, weight, bias, eps, compensate);
    ctx->save_for_backward({x, weight, mean, rstd});
    ctx->mark_non_differentiable({mean, rstd});
    ctx->saved_data["compensate"] = compensate;
    return {y, mean, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto [dx, dg, db] = layer_norm_backward(grads[0], saved[0], saved[2], saved[3], saved[1],
                                                  ctx->saved_data["compensate"].toBool());
    return {dx, dg, db, Tensor(), Tensor()};
  }
};

struct Backward : torch::autograd::Function<Backward> {
  static variable_list forward(AutogradContext*, const Tensor& dy, const Tensor& x, const Tensor& mean,
                               const Tensor& rstd, const Tensor& weight, bool compensate) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [dx, dg, db] = layer_norm_backward(dy, x, mean, rstd, weight, compensate);
    return {dx, dg, db};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK(false, "minillava's layer_norm can be differentiated once, not twice: with compensation its gradient "
                       "is not that of any function. torch.nn.functional.layer_norm has second derivatives");
  }
};

Outputs layer_norm_autograd(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, bool compensate) {
  const variable_list out = Forward::apply(x, weight, bias, eps, compensate);
  return {out[0], out[1], out[2]};
}

Outputs layer_norm_backward_autograd(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                                     const Tensor& weight, bool compensate) {
  const variable_list out = Backward::apply(dy, x, mean, rstd, weight, compensate);
  return {out[0], out[1], out[2]};
}

TORCH_LIBRARY_IMPL(minillava, Autograd, m) {
  m.impl("layer_norm", layer_norm_autograd);
  m.impl("layer_norm_backward", layer_norm_backward_autograd);
}

}  // namespace
}  // namespace minillava
