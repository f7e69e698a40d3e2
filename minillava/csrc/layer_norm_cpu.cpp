// LayerNorm on the CPU: at::vec for the lanes, at::parallel_for for the cores.
//
// A few rows at a time, and everything they need stays in the first-level cache, so x is read from memory once in the
// forward (2 moves an element, with y) and x and dy once in the backward (3 moves, with dx). 16-bit rows are
// widened once, into scratch rows that stay in the cache; all arithmetic below is in fp32, or in fp64 when x is.
//
// The numbers do not depend on how many threads there are: a row is summed by one thread in a fixed order, and dg, db
// are summed in pieces whose number follows from the shape alone.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <Python.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "checks.h"

namespace minillava {
namespace {

using at::vec::Vectorized;

// The arithmetic's vector: two registers of A, which is what one register of a 16-bit type widens to. Plain members,
// not an array of two: gcc keeps those in registers.
template <typename A>
struct Wide {
  using V = Vectorized<A>;
  V lo, hi;

  Wide(const V& lo, const V& hi) : lo(lo), hi(hi) {}
  explicit Wide(A everywhere = 0) : lo(everywhere), hi(everywhere) {}
  static constexpr int64_t size() { return 2 * V::size(); }
  Wide abs() const { return {lo.abs(), hi.abs()}; }
  Wide operator+(const Wide& other) const { return {lo + other.lo, hi + other.hi}; }
  Wide operator-(const Wide& other) const { return {lo - other.lo, hi - other.hi}; }
  Wide operator*(const Wide& other) const { return {lo * other.lo, hi * other.hi}; }
};

constexpr double kGainFloor = 1e-3;         // the smallest mean|g| that compensation divides by
constexpr int64_t kElementsAThread = 32768;  // under this much work a second thread costs more than it saves
constexpr int64_t kElementsAPiece = 65536;  // backward: each piece costs two rows of partial sums besides
constexpr int64_t kMaxPieces = 64;           // and so there are never more than 2·64 of those

// ---- One row -------------------------------------------------------------------------------------------------------

// The columns i .. i + size of a row as one vector, whatever type the row has.
template <typename A>
struct FullColumns {
  int64_t i;

  template <typename T>
  C10_ALWAYS_INLINE Wide<A> operator()(const T* row) const {
    if constexpr (std::is_same_v<T, A>) {
      return {Vectorized<A>::loadu(row + i), Vectorized<A>::loadu(row + i + Vectorized<A>::size())};
    } else {
      static_assert(Vectorized<T>::size() == Wide<A>::size());
      const auto [lo, hi] = at::vec::convert_to_float<T>(Vectorized<T>::loadu(row + i));
      return {lo, hi};
    }
  }

  template <typename T>
  C10_ALWAYS_INLINE void store(const Wide<A>& v, T* row) const {
    if constexpr (std::is_same_v<T, A>) {
      v.lo.store(row + i);
      v.hi.store(row + i + Vectorized<A>::size());
    } else {
      at::vec::convert_from_float<T>(v.lo, v.hi).store(row + i);
    }
  }
};

// The n < size columns that are left at the end of a row, through a buffer of full size. Lanes past n load as zero.
template <typename A>
struct LastColumns {
  int64_t i, n;

  template <typename T>
  Wide<A> operator()(const T* row) const {
    T buffer[Wide<A>::size()] = {};
    std::copy_n(row + i, n, buffer);
    return FullColumns<A>{0}(buffer);
  }

  template <typename T>
  void store(const Wide<A>& v, T* row) const {
    T buffer[Wide<A>::size()];
    FullColumns<A>{0}.store(v, buffer);
    std::copy_n(buffer, n, row + i);
  }

  // v with zero in the lanes past n, so that they count nothing in a sum.
  Wide<A> masked(const Wide<A>& v) const {
    A buffer[Wide<A>::size()];
    FullColumns<A>{0}.store(v, buffer);
    return LastColumns<A>{0, n}(buffer);
  }
};

template <typename A, typename Body>
C10_ALWAYS_INLINE void for_columns(int64_t D, const Body& body) {
  int64_t i = 0;
  for (; i + Wide<A>::size() <= D; i += Wide<A>::size()) body(FullColumns<A>{i});
  if (i < D) body(LastColumns<A>{i, D - i});
}

// The sums over D columns of N terms at once; `terms(cols)` gives N vectors, loading its rows through `cols`.
template <int N, typename A, typename Terms>
C10_ALWAYS_INLINE std::array<A, N> sum_columns(int64_t D, const Terms& terms) {
  using Sums = std::array<Wide<A>, N>;
  constexpr int64_t W = Wide<A>::size();
  const auto add = [](Sums& total, const Sums& term) {
    for (int k = 0; k < N; ++k) total[k] = total[k] + term[k];
  };
  Sums even, odd;  // two chains of additions: one alone would wait out the latency of each
  int64_t i = 0;
  for (; i + 2 * W <= D; i += 2 * W) {
    add(even, terms(FullColumns<A>{i}));
    add(odd, terms(FullColumns<A>{i + W}));
  }
  if (i + W <= D) add(even, terms(FullColumns<A>{i})), i += W;
  if (i < D) {
    const LastColumns<A> last{i, D - i};
    Sums term = terms(last);
    for (Wide<A>& t : term) t = last.masked(t);
    add(odd, term);
  }
  add(even, odd);
  std::array<A, N> sums;
  for (int k = 0; k < N; ++k)
    sums[k] = at::vec::vec_reduce_all<A>([](const auto& a, const auto& b) { return a + b; }, even[k].lo + even[k].hi);
  return sums;
}

template <typename A>
struct Statistics {
  A mean, delta, rstd;
};

// Corrected two-pass. The first mean is rounded, so d = x − mean has a mean δ that is not quite zero; far from the
// origin it is the whole error. Taking δ out of the variance and of y leaves only the rounding of d itself.
template <typename A>
Statistics<A> statistics(const A* x, A mean, int64_t D, A eps) {
  const auto [d, d2] = sum_columns<2, A>(D, [=](const auto& cols) {
    const Wide<A> d = cols(x) - Wide<A>(mean);
    return std::array{d, d * d};
  });
  const A delta = d / D;
  A var = d2 / D - delta * delta;
  if (var < 0) var = 0;  // by rounding, in a constant row; written so that NaN stays NaN
  return {mean, delta, 1 / std::sqrt(var + eps)};
}

// The mean of one row as it rounds. A 16-bit row is widened on the way and kept in `scratch`.
template <typename A, typename T>
A first_mean(const T* x, A* scratch, int64_t D) {
  return sum_columns<1, A>(D, [=](const auto& cols) {
           const Wide<A> v = cols(x);
           if constexpr (!std::is_same_v<A, T>) cols.store(v, scratch);
           return std::array{v};
         })[0] / D;
}

template <typename A, typename T>
void write_row(const A* x, const Statistics<A>& s, const A* g, const A* b, T* y, int64_t D) {
  for_columns<A>(D, [=](const auto& cols) {
    const Wide<A> xhat = (cols(x) - Wide<A>(s.mean) - Wide<A>(s.delta)) * Wide<A>(s.rstd);
    cols.store(xhat * cols(g) + cols(b), y);
  });
}

template <typename A>
struct BackwardSums {
  A delta, mean_w, mean_wx;
};

// What dx of one row needs. δ is found again, since a mean rounded to fp32 is not exact enough to rebuild x̂; with δ
// known only after the pass, Σ w·x̂ comes from Σ w·d: Σ w·(d − δ) = Σ w·d − δ·Σ w.
// A 16-bit row is read once: d = x − mean and dy are kept, widened, in the two rows of `scratch`.
template <typename A, typename T>
BackwardSums<A> backward_sums(const T* dy, const T* x, A mean, A rstd, const A* g, A* scratch, int64_t D) {
  const auto [sum_d, sum_w, sum_wd] = sum_columns<3, A>(D, [=](const auto& cols) {
    const Wide<A> up = cols(dy), d = cols(x) - Wide<A>(mean), w = up * cols(g);
    if constexpr (!std::is_same_v<A, T>) cols.store(d, scratch), cols.store(up, scratch + D);
    return std::array{d, w, w * d};
  });
  const A delta = sum_d / D;
  return {delta, sum_w / D, (sum_wd - delta * sum_w) * rstd / D};
}

// dx of one row, and this row's share of dg and db added to theirs.
template <typename A, typename T>
void backward_row(const T* dy, const T* x, A mean, A rstd, const BackwardSums<A>& s, const A* g, A scale, T* dx, A* dg,
                  A* db, const A* scratch, int64_t D) {
  for_columns<A>(D, [=](const auto& cols) {
    Wide<A> up, d;
    if constexpr (std::is_same_v<A, T>)
      up = cols(dy), d = cols(x) - Wide<A>(mean);
    else
      up = cols(scratch + D), d = cols(scratch);
    const Wide<A> xhat = (d - Wide<A>(s.delta)) * Wide<A>(rstd);
    cols.store((up * cols(g) - Wide<A>(s.mean_w) - xhat * Wide<A>(s.mean_wx)) * Wide<A>(rstd * scale), dx);
    cols.store(up * xhat + cols(dg), dg);
    cols.store(up + cols(db), db);
  });
}

// ---- All rows ------------------------------------------------------------------------------------------------------

// A row's sums have to be known before it can be written, and a short row is over before they are. So short rows go
// through each pass a few at a time: the sums of one are finished while the next are added up.
constexpr int64_t kRowsInFlight = 8, kElementsInFlight = 512;

template <typename A, typename T>
int64_t rows_in_flight(int64_t D) {
  return std::is_same_v<A, T> ? 1 : std::clamp<int64_t>(kElementsInFlight / D, 1, kRowsInFlight);
}

// At least one, which without rows sums to zero.
int64_t pieces(int64_t M, int64_t D) {
  return std::max<int64_t>(1, std::min({M, kMaxPieces, M * D / kElementsAPiece}));
}

template <typename A, typename P>
std::vector<A> widened(const Tensor& p) {
  std::vector<A> out(p.numel());
  const P* data = p.const_data_ptr<P>();
  for (int64_t i = 0; i < p.numel(); ++i) out[i] = static_cast<A>(data[i]);
  return out;
}

template <typename T, typename P, typename A>
void forward_rows(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, Tensor& y, Tensor& mean,
                  Tensor& rstd) {
  const int64_t M = mean.numel(), D = x.size(-1);
  const std::vector<A> g = widened<A, P>(weight), b = widened<A, P>(bias);
  const T* xs = x.const_data_ptr<T>();
  T* ys = y.mutable_data_ptr<T>();
  A *means = mean.mutable_data_ptr<A>(), *rstds = rstd.mutable_data_ptr<A>();

  at::parallel_for(0, M, std::max<int64_t>(1, kElementsAThread / D), [&](int64_t begin, int64_t end) {
    constexpr bool kWiden = !std::is_same_v<A, T>;
    const int64_t B = rows_in_flight<A, T>(D);
    std::vector<A> scratch(kWiden ? B * D : 0);
    std::array<Statistics<A>, kRowsInFlight> s;
    for (int64_t first = begin; first < end; first += B) {
      const int64_t n = std::min(B, end - first);
      const T* block = xs + first * D;
      const A* rows;
      if constexpr (kWiden)
        rows = scratch.data();
      else
        rows = block;
      for (int64_t i = 0; i < n; ++i) s[i].mean = first_mean<A>(block + i * D, scratch.data() + i * D, D);
      for (int64_t i = 0; i < n; ++i) s[i] = statistics(rows + i * D, s[i].mean, D, static_cast<A>(eps));
      for (int64_t i = 0; i < n; ++i) {
        write_row(rows + i * D, s[i], g.data(), b.data(), ys + (first + i) * D, D);
        means[first + i] = s[i].mean + s[i].delta;
        rstds[first + i] = s[i].rstd;
      }
    }
  });
}

// Adds the pieces in order, in place, and rounds once to the type of the parameters.
template <typename P, typename A>
void sum_pieces(A* partial, int64_t count, int64_t D, P* dg, P* db) {
  at::parallel_for(0, 2 * D, kElementsAThread / count, [&](int64_t begin, int64_t end) {
    for (int64_t p = 1; p < count; ++p)
      for (int64_t i = begin; i < end; ++i) partial[i] += partial[p * 2 * D + i];
  });
  for (int64_t i = 0; i < D; ++i) {
    dg[i] = static_cast<P>(partial[i]);
    db[i] = static_cast<P>(partial[D + i]);
  }
}

template <typename T, typename P, typename A>
void backward_rows(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& weight,
                   bool compensate, Tensor& dx, Tensor& dg, Tensor& db) {
  const int64_t M = mean.numel(), D = x.size(-1), count = pieces(M, D);
  const std::vector<A> g = widened<A, P>(weight);
  A scale = 1;
  if (compensate) {
    const A* gs = g.data();
    A mu = sum_columns<1, A>(D, [=](const auto& cols) {
             return std::array{cols(gs).abs()};
           })[0] / D;
    if (mu < A(kGainFloor)) mu = A(kGainFloor);  // not fmax: a NaN gain must reach dx
    scale = 1 / mu;
  }
  const T *dys = dy.const_data_ptr<T>(), *xs = x.const_data_ptr<T>();
  T* dxs = dx.mutable_data_ptr<T>();
  const A *means = mean.const_data_ptr<A>(), *rstds = rstd.const_data_ptr<A>();

  const std::unique_ptr<A[]> partial(new A[count * 2 * D]);  // (count, 2, D): each piece's dg, then its db
  at::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
    const int64_t B = rows_in_flight<A, T>(D), kept = std::is_same_v<A, T> ? 0 : 2 * D;
    std::vector<A> scratch(B * kept);
    std::array<BackwardSums<A>, kRowsInFlight> s;
    for (int64_t p = first; p < last; ++p) {
      A *dg_p = partial.get() + p * 2 * D, *db_p = dg_p + D;
      std::fill_n(dg_p, 2 * D, A(0));
      const int64_t end = (p + 1) * M / count;
      for (int64_t m = p * M / count; m < end; m += B) {
        const int64_t n = std::min(B, end - m);
        for (int64_t i = 0; i < n; ++i)
          s[i] = backward_sums(dys + (m + i) * D, xs + (m + i) * D, means[m + i], rstds[m + i], g.data(),
                               scratch.data() + i * kept, D);
        for (int64_t i = 0; i < n; ++i)
          backward_row(dys + (m + i) * D, xs + (m + i) * D, means[m + i], rstds[m + i], s[i], g.data(), scale,
                       dxs + (m + i) * D, dg_p, db_p, scratch.data() + i * kept, D);
      }
    }
  });
  sum_pieces(partial.get(), count, D, dg.mutable_data_ptr<P>(), db.mutable_data_ptr<P>());
}

// ---- The ops -------------------------------------------------------------------------------------------------------

// Calls fn with the C++ types of x, of the parameters, and of the arithmetic.
template <typename Fn>
void dispatch(const Tensor& x, const Tensor& weight, const Fn& fn) {
  const auto with_x = [&](auto t) {
    using T = decltype(t);
    if (weight.scalar_type() == x.scalar_type()) return fn(t, t, float());
    return fn(T(), float(), float());
  };
  switch (x.scalar_type()) {
    case at::kDouble: return fn(double(), double(), double());
    case at::kFloat: return fn(float(), float(), float());
    case at::kBFloat16: return with_x(at::BFloat16());
    case at::kHalf: return with_x(at::Half());
    default: TORCH_CHECK_TYPE(false, "layer_norm takes fp16, bf16, fp32 or fp64, got ", x.scalar_type());
  }
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x_, const Tensor& weight_, const Tensor& bias_, double eps,
                                           bool /*compensate*/) {
  check_forward(x_, weight_, bias_);
  const Tensor x = x_.contiguous(), weight = weight_.contiguous(), bias = bias_.contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor mean = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(statistics_dtype(x)));
  Tensor rstd = at::empty_like(mean);
  dispatch(x, weight, [&](auto t, auto p, auto a) {
    forward_rows<decltype(t), decltype(p), decltype(a)>(x, weight, bias, eps, y, mean, rstd);
  });
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy_, const Tensor& x_, const Tensor& mean_,
                                            const Tensor& rstd_, const Tensor& weight_, bool compensate) {
  check_backward(dy_, x_, mean_, rstd_, weight_);
  // The gradient of cat, t or expand arrives strided: contiguous() is what makes reading it by rows right.
  const Tensor dy = dy_.contiguous(), x = x_.contiguous(), weight = weight_.contiguous();
  const Tensor mean = mean_.contiguous(), rstd = rstd_.contiguous();
  Tensor dx = at::empty(x.sizes(), x.options());
  Tensor dg = at::empty(weight.sizes(), weight.options()), db = at::empty_like(dg);
  dispatch(x, weight, [&](auto t, auto p, auto a) {
    backward_rows<decltype(t), decltype(p), decltype(a)>(dy, x, mean, rstd, weight, compensate, dx, dg, db);
  });
  return {dx, dg, db};
}

TORCH_LIBRARY_IMPL(minillava, CPU, m) {
  m.impl("layer_norm", forward);
  m.impl("layer_norm_backward", backward);
}

}  // namespace
}  // namespace minillava

// Importing `minillava._C` only loads this library, which registers the kernels; the module itself just says which
// torch it was built against.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  PyObject* module = PyModule_Create(&definition);
  if (module) PyModule_AddStringConstant(module, "torch_version", TORCH_VERSION);
  return module;
}
