// The kernels of layer_norm.cuh behind plain C functions, for ctypes (and for main below): forward_<x>_<parameters> and
// backward_<x>_<parameters>. `rung` says which: 0 the one that the op would take, 4 the same with two blocks only, so
// that each takes many rows; else the rung of that number on the ladder of layer_norm.cuh.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include LAYER_NORM_CUH

using namespace minillava;

namespace {

#ifdef SANITIZED  // ThreadSanitizer bears some thousand fibres a launch; the sum of wide rows would take more
constexpr int64_t kMaxSummedColumns = 64;
#else
constexpr int64_t kMaxSummedColumns = INT64_MAX;
#endif

template <typename T, typename P, typename A>
void run_forward(int rung, const T* x, const P* g, const P* b, double eps, T* y, A* mean, A* rstd, int64_t M,
                 int64_t D) {
  const A e = static_cast<A>(eps);
  if (rung == 0) {
    forward<T, P, A>(x, g, b, e, y, mean, rstd, M, D, nullptr);
  } else if (rung == 1) {
    launch(forward_1<T, P, A>, dim3(ceil_div(M, 64)), dim3(64), nullptr, x, g, b, e, y, mean, rstd, M, D);
  } else if (rung == 2) {
    launch(forward_2<T, P, A>, dim3(ceil_div(M, 4)), dim3(kWarp, 4), nullptr, x, g, b, e, y, mean, rstd, M, D);
  } else if (rung == 3) {
    launch(forward_3<T, P, false, A>, dim3(2), dim3(64, 2), nullptr, x, g, b, e, y, mean, rstd, M, D);
  } else if (all_aligned(D, x, g, b, y)) {
    launch_forward<T, P, true, A>(x, g, b, e, y, mean, rstd, M, D, 2, nullptr);
  } else {
    launch_forward<T, P, false, A>(x, g, b, e, y, mean, rstd, M, D, 2, nullptr);
  }
}

template <typename T, typename P, typename A>
void run_backward(int rung, const T* dy, const T* x, const A* mean, const A* rstd, const P* g, bool compensate, T* dx,
                  P* dg, P* db, int64_t M, int64_t D) {
  int64_t count = backward_partials<T>(M, D);
  if (rung == 2 || (rung == 4 && count > 2)) count = 2;
  A* partial = static_cast<A*>(malloc(sizeof(A) * 2 * (count * D)));
  if (rung == 0) {
    backward<T, P, A>(dy, x, mean, rstd, g, compensate, dx, dg, db, partial, M, D, nullptr);
  } else if (rung == 1) {
    launch(backward_1_rows<T, P, A>, dim3(ceil_div(M, 64)), dim3(64), nullptr, dy, x, mean, rstd, g, compensate, dx, M,
           D);
    launch(backward_1_columns<T, P, A>, dim3(ceil_div(D, 64)), dim3(64), nullptr, dy, x, mean, rstd, dg, db, M, D);
  } else {
    if (rung == 2)
      launch(backward_2<T, P, false, A>, dim3(count), dim3(64), nullptr, dy, x, mean, rstd, g, compensate, dx, partial,
             M, D);
    else if (all_aligned(D, dy, x, g, dx))
      launch_backward<T, P, true, A>(dy, x, mean, rstd, g, compensate, dx, partial, count, M, D, nullptr);
    else
      launch_backward<T, P, false, A>(dy, x, mean, rstd, g, compensate, dx, partial, count, M, D, nullptr);
    if (D <= kMaxSummedColumns)
      launch(backward_sum<P, A>, dim3(ceil_div(D, kWarp), 2), dim3(kWarp, kSumRows), nullptr,
             static_cast<const A*>(partial), dg, db, count, D);
  }
  free(partial);
}

}  // namespace

#define EXPORT(name, T, P, A)                                                                                          \
  extern "C" void forward_##name(int rung, const T* x, const P* g, const P* b, double eps, T* y, A* mean, A* rstd,      \
                                 int64_t M, int64_t D) {                                                               \
    run_forward<T, P, A>(rung, x, g, b, eps, y, mean, rstd, M, D);                                                     \
  }                                                                                                                    \
  extern "C" void backward_##name(int rung, const T* dy, const T* x, const A* mean, const A* rstd, const P* g,          \
                                  bool compensate, T* dx, P* dg, P* db, int64_t M, int64_t D) {                         \
    run_backward<T, P, A>(rung, dy, x, mean, rstd, g, compensate, dx, dg, db, M, D);                                   \
  }

#ifndef SANITIZED
EXPORT(float32_float32, float, float, float)
EXPORT(bfloat16_float32, c10::BFloat16, float, float)
EXPORT(bfloat16_bfloat16, c10::BFloat16, c10::BFloat16, float)
EXPORT(float16_float16, c10::Half, c10::Half, float)
EXPORT(float16_float32, c10::Half, float, float)
EXPORT(float64_float64, double, double, double)
#else

// Runs a rung on one shape, in buffers of exactly the right size. The sanitizer does the judging. One 32-bit and one
// 16-bit type are enough for it: the others are the same code.
template <typename T>
void exercise(int rung, int64_t M, int64_t D) {
  const auto buffer = [](auto kind, int64_t n) {
    auto* p = static_cast<decltype(kind)*>(malloc(sizeof(kind) * n));
    for (int64_t i = 0; i < n; ++i) p[i] = static_cast<decltype(kind)>(static_cast<float>(i * 37 % 101) / 50.0f - 1.0f);
    return p;
  };
  T *x = buffer(T(), M * D), *dy = buffer(T(), M * D), *y = buffer(T(), M * D), *dx = buffer(T(), M * D);
  float *g = buffer(0.0f, D), *b = buffer(0.0f, D), *dg = buffer(0.0f, D), *db = buffer(0.0f, D);
  float *mean = buffer(0.0f, M), *rstd = buffer(0.0f, M);
  run_forward<T, float, float>(rung, x, g, b, 1e-5, y, mean, rstd, M, D);
  run_backward<T, float, float>(rung, dy, x, mean, rstd, g, true, dx, dg, db, M, D);
  for (void* p : {(void*)x, (void*)dy, (void*)y, (void*)dx, (void*)g, (void*)b, (void*)dg, (void*)db, (void*)mean,
                  (void*)rstd})
    free(p);
}

// Wide rows come with two blocks only (rung 4), and with rows enough for several turns of each.
int main() {
#ifdef PLANTED  // a fault in the source: fewer shapes and one type find it as well
  for (int rung = 0; rung < 5; ++rung) exercise<float>(rung, 5, 40);
  exercise<float>(4, 20, 7);
  exercise<float>(4, 20, 1024);
#else
  const int64_t small[][2] = {{1, 1}, {5, 40}};
  for (const auto& s : small)
    for (int rung = 0; rung < 5; ++rung) {
      exercise<float>(rung, s[0], s[1]);
      exercise<c10::BFloat16>(rung, s[0], s[1]);
    }
  exercise<float>(4, 20, 7);
  exercise<c10::BFloat16>(4, 35, 250);    // one warp a row, misaligned
  exercise<c10::BFloat16>(4, 10, 520);    // four warps a row
  exercise<float>(4, 20, 1024);
  exercise<c10::BFloat16>(4, 5, 4104);    // two packs a thread
  exercise<c10::BFloat16>(4, 3, 5001);    // the same, misaligned
  exercise<float>(4, 3, 8200);            // too long for registers
#endif
  puts("done");
}
#endif
