// Binds the kernels of layer_norm.cuh to the dispatcher's CUDA key: checks, memory, device and stream, nothing else.
// c10/cuda alone: ATen/cuda/CUDAContext.h would want the headers of libraries that slim toolkits lack.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "checks.h"
#include "layer_norm.cuh"

namespace minillava {
namespace {

// Calls fn with the C++ types of x and of the parameters.
template <typename Fn>
void dispatch(const Tensor& x, const Tensor& weight, const Fn& fn) {
  const bool same = weight.scalar_type() == x.scalar_type();
  switch (x.scalar_type()) {
    case at::kDouble: return fn(double(), double());
    case at::kFloat: return fn(float(), float());
    case at::kBFloat16: return same ? fn(at::BFloat16(), at::BFloat16()) : fn(at::BFloat16(), float());
    case at::kHalf: return same ? fn(at::Half(), at::Half()) : fn(at::Half(), float());
    default: TORCH_CHECK_TYPE(false, "layer_norm takes fp16, bf16, fp32 or fp64, got ", x.scalar_type());
  }
}

std::tuple<Tensor, Tensor, Tensor> forward_cuda(const Tensor& x_, const Tensor& weight_, const Tensor& bias_,
                                                double eps, bool /*compensate*/) {
  check_forward(x_, weight_, bias_);
  const c10::cuda::CUDAGuard guard(x_.device());
  const Tensor x = x_.contiguous(), weight = weight_.contiguous(), bias = bias_.contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor mean = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(statistics_dtype(x)));
  Tensor rstd = at::empty_like(mean);
  dispatch(x, weight, [&](auto t, auto p) {
    using T = decltype(t);
    using P = decltype(p);
    using A = arithmetic_t<T>;
    C10_CUDA_CHECK((forward<T, P, A>(x.const_data_ptr<T>(), weight.const_data_ptr<P>(), bias.const_data_ptr<P>(),
                                     static_cast<A>(eps), y.mutable_data_ptr<T>(), mean.mutable_data_ptr<A>(),
                                     rstd.mutable_data_ptr<A>(), mean.numel(), x.size(-1),
                                     c10::cuda::getCurrentCUDAStream())));
  });
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> backward_cuda(const Tensor& dy_, const Tensor& x_, const Tensor& mean_,
                                                 const Tensor& rstd_, const Tensor& weight_, bool compensate) {
  check_backward(dy_, x_, mean_, rstd_, weight_);
  const c10::cuda::CUDAGuard guard(x_.device());
  const Tensor dy = dy_.contiguous(), x = x_.contiguous(), weight = weight_.contiguous();
  const Tensor mean = mean_.contiguous(), rstd = rstd_.contiguous();
  Tensor dx = at::empty(x.sizes(), x.options());
  Tensor dg = at::empty(weight.sizes(), weight.options()), db = at::empty_like(dg);
  const int64_t M = mean.numel(), D = x.size(-1);
  dispatch(x, weight, [&](auto t, auto p) {
    using T = decltype(t);
    using P = decltype(p);
    using A = arithmetic_t<T>;
    Tensor partial = at::empty({2, backward_partials<T>(M, D), D}, mean.options());
    C10_CUDA_CHECK((backward<T, P, A>(dy.const_data_ptr<T>(), x.const_data_ptr<T>(), mean.const_data_ptr<A>(),
                                      rstd.const_data_ptr<A>(), weight.const_data_ptr<P>(), compensate,
                                      dx.mutable_data_ptr<T>(), dg.mutable_data_ptr<P>(), db.mutable_data_ptr<P>(),
                                      partial.mutable_data_ptr<A>(), M, D, c10::cuda::getCurrentCUDAStream())));
  });
  return {dx, dg, db};
}

TORCH_LIBRARY_IMPL(minillava, CUDA, m) {
  m.impl("layer_norm", forward_cuda);
  m.impl("layer_norm_backward", backward_cuda);
}

}  // namespace
}  // namespace minillava
