// LayerNorm on CUDA, from naive to fast. Nothing of torch in here: plain pointers and row-major shapes.
//
//   y  = x̂·g + b                                   x̂ = (x − mean)·rstd, over rows of D columns
//   dx = (1/μ)·rstd·(w − mean(w) − x̂·mean(w·x̂))    w = dy·g, μ = max(mean|g|, 1e-3), or 1 without compensation
//   dg = Σ dy·x̂        db = Σ dy                   over the M rows
//
// The op does almost no arithmetic, so its speed is the bytes it moves. With s bytes an element the least is 2s an
// element forward (x in, y out) and 3s backward (x and dy in, dx out). The steps, and what each buys:
//
//   forward 1   a thread a row         neighbouring threads read D apart: each 32-byte sector serves one number
//   forward 2   a warp a row           coalesced: 32 threads share each sector. x is read three times
//   forward 3   a block a row          more threads for long rows; sums by shuffle and one barrier. Any D, any type
//   forward 4   the row in registers   x is read once, 16 bytes a load: 2s, the least there is. D ≤ 8192
//   backward 1  a thread a row, then a thread a column        two kernels that both read x and dy: 5s
//   backward 2  both in one, partial sums in memory           reads x and dy twice, the second time from cache. Any D
//   backward 3  the row and the partial sums in registers     3s, and 2·P·D·4 bytes of partial sums. D ≤ 8192
//   backward sum  adds the partial sums of 2 and 3 in a fixed order
//
// `forward` and `backward` at the end pick among 3 and 4, 2 and 3. The naive ones stay as the first rungs of the
// ladder, and the tests hold every rung to the same reference.
//
// Rules that all of them keep: statistics and sums in fp32 (fp64 for fp64); corrected two-pass statistics; no atomics
// and a number of partial sums P that follows from M and D alone, so the same bits on every run and every GPU; 64-bit
// row offsets; every loop that holds a barrier runs equally often in all threads of its block.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define SHARED_ARRAY(type, name, count) __shared__ type name[count]

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream, Arguments... arguments) {
  kernel<<<grid, block, 0, stream>>>(arguments...);
}
#endif  // Without nvcc, tests/kernel/cuda_on_cpu.h has defined these and the rest of CUDA that is used here.

namespace minillava {

constexpr int kWarp = 32;
constexpr int kPack = 8;              // columns a thread takes at a time: one 16-byte load of a 16-bit type
constexpr int kMaxRowThreads = 512;   // threads that share a row
constexpr int kMaxWarps = kMaxRowThreads / kWarp;
constexpr int kMaxChunks = 2;         // packs of a row that one thread holds in registers
constexpr int64_t kMaxRegisterColumns = int64_t(kMaxRowThreads) * kPack * kMaxChunks;  // 8192
constexpr int kForwardThreads = 128;  // threads of a forward block, or more if the row needs more
constexpr int64_t kForwardBlocks = 132 * 16 * 4;  // four waves on an H200; a block then takes every 8448th row
constexpr int64_t kBackwardBlocks = 132 * 2;      // persistent: two a multiprocessor on an H200
constexpr int kSumRows = 16;                      // rows of partial sums that one block adds side by side
constexpr double kGainFloor = 1e-3;               // the smallest mean|g| that compensation divides by

template <typename T>
struct Arithmetic {
  using type = float;
};
template <>
struct Arithmetic<double> {
  using type = double;
};
template <typename T>
using arithmetic_t = typename Arithmetic<T>::type;

// ---- Loads and stores ----------------------------------------------------------------------------------------------

// kPack neighbouring columns. The alignment is what lets the compiler move 16 bytes with one instruction.
template <typename T>
struct alignas(16) Pack {
  T v[kPack];
};

// Columns col .. col + kPack of a row, zero past D. The slow path, for rows that are not 16-byte aligned, gives each
// thread the same columns, so that both paths add the same numbers in the same order: alignment never changes a bit.
// Where a row fits in registers, I is int: 64-bit columns would take registers that the row needs.
template <bool kAligned, typename T, typename I>
__device__ inline Pack<T> load(const T* row, I col, I D) {
  Pack<T> p;
  if (kAligned && col < D) return *reinterpret_cast<const Pack<T>*>(row + col);
  for (int k = 0; k < kPack; ++k) p.v[k] = !kAligned && col + k < D ? row[col + k] : static_cast<T>(0.0f);
  return p;
}

template <bool kAligned, typename T, typename I>
__device__ inline void store(const Pack<T>& p, T* row, I col, I D) {
  if (kAligned) {
    if (col < D) *reinterpret_cast<Pack<T>*>(row + col) = p;
  } else {
    for (int k = 0; k < kPack; ++k)
      if (col + k < D) row[col + k] = p.v[k];
  }
}

template <typename T>
__device__ inline arithmetic_t<T> widen(T value) {
  return static_cast<arithmetic_t<T>>(value);
}

// ---- Sums over a row -----------------------------------------------------------------------------------------------

__device__ inline float inverse_sqrt(float v) { return 1.0f / sqrtf(v); }  // rsqrtf is 2 ulp off, this is not
__device__ inline double inverse_sqrt(double v) { return 1.0 / sqrt(v); }

// Adds up, in every thread, the values of the `width` threads around it: log2(width) steps, no memory.
template <int N, typename A>
__device__ inline void butterfly(A (&v)[N], int width) {
  for (int offset = width / 2; offset > 0; offset /= 2)
    for (int k = 0; k < N; ++k) v[k] += __shfl_xor_sync(0xffffffffu, v[k], offset);
}

// N sums at once over the blockDim.x threads that share a row; every one of them gets the result. A butterfly in the
// warp, one exchange through shared memory, and a butterfly over the warps' sums. `slots` must not be the one of the
// call before: with two of them taking turns, the barrier of the next call is what keeps a fast warp from overwriting
// what a slow one still reads.
template <int N, typename A>
__device__ inline void row_sum(A (&v)[N], A* slots) {
  butterfly(v, kWarp);
  const int warps = blockDim.x / kWarp, lane = threadIdx.x % kWarp;
  if (warps == 1) return;  // the same for the whole block: no thread is left alone at the barrier
  A* row = slots + threadIdx.y * warps * N;
  if (lane == 0)
    for (int k = 0; k < N; ++k) row[threadIdx.x / kWarp * N + k] = v[k];
  __syncthreads();
  for (int k = 0; k < N; ++k) v[k] = lane % kMaxWarps < warps ? row[lane % kMaxWarps * N + k] : A(0);
  butterfly(v, kMaxWarps);
}

// What the two sums of the second pass say: δ is the mean of d = x − mean, which rounding keeps from being zero.
// `share` is 1/D here and below: a division is a subroutine with a dozen registers, and a mean that is off by one more
// rounding is what δ corrects.
template <typename A>
struct Statistics {
  A mean, delta, rstd;
};

template <typename A>
__device__ inline Statistics<A> statistics(A mean, A sum_d, A sum_d2, A share, A eps) {
  const A delta = sum_d * share;
  A var = sum_d2 * share - delta * delta;
  if (var < 0) var = 0;  // by rounding, in a constant row; written so that NaN stays NaN
  return {mean, delta, inverse_sqrt(var + eps)};
}

// max(mean|g|, floor), but a NaN stays NaN, which fmaxf would hide.
template <typename A>
__device__ inline A gain_scale(A sum_abs, int64_t D) {
  const A mu = sum_abs / D;
  return 1 / (mu < A(kGainFloor) ? A(kGainFloor) : mu);
}

// ---- Forward -------------------------------------------------------------------------------------------------------

// Forward 1: a thread a row. The three loops are the algorithm; everything below is about the order of the reads.
template <typename T, typename P, typename A = arithmetic_t<T>>
__global__ void forward_1(const T* x, const P* g, const P* b, A eps, T* y, A* mean, A* rstd, int64_t M, int64_t D) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= M) return;
  x += row * D, y += row * D;
  const A share = A(1) / D;
  A sum = 0, sum_d = 0, sum_d2 = 0;
  for (int64_t i = 0; i < D; ++i) sum += widen(x[i]);
  const A center = sum * share;
  for (int64_t i = 0; i < D; ++i) {
    const A d = widen(x[i]) - center;
    sum_d += d, sum_d2 += d * d;
  }
  const Statistics<A> s = statistics(center, sum_d, sum_d2, share, eps);
  for (int64_t i = 0; i < D; ++i)
    y[i] = static_cast<T>((widen(x[i]) - s.mean - s.delta) * s.rstd * A(g[i]) + A(b[i]));
  mean[row] = s.mean + s.delta, rstd[row] = s.rstd;
}

// A warp's sum through shared memory: halve the number of terms five times. Each __syncwarp is needed. Without the
// first, a thread adds a slot its owner has yet to write; without the last, a fast thread starts the next sum in a slot
// that a slow one has yet to read.
template <typename A>
__device__ inline A warp_sum_in_memory(A v, A* slots) {
  const int lane = threadIdx.x;
  slots[lane] = v;
  __syncwarp();
  for (int half = kWarp / 2; half > 0; half /= 2) {
    if (lane < half) slots[lane] += slots[lane + half];
    __syncwarp();
  }
  const A total = slots[0];
  __syncwarp();
  return total;
}

// Forward 2: a warp a row, blockDim.y rows a block. Neighbouring threads read neighbouring columns, so every byte that
// the memory sends is used.
template <typename T, typename P, typename A = arithmetic_t<T>>
__global__ void forward_2(const T* x, const P* g, const P* b, A eps, T* y, A* mean, A* rstd, int64_t M, int64_t D) {
  SHARED_ARRAY(A, memory, kForwardThreads);
  A* slots = memory + threadIdx.y * kWarp;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= M) return;  // a whole warp leaves: __syncwarp waits for this warp alone
  x += row * D, y += row * D;
  const A share = A(1) / D;
  A sum = 0, sum_d = 0, sum_d2 = 0;
  for (int64_t i = threadIdx.x; i < D; i += kWarp) sum += widen(x[i]);
  const A center = warp_sum_in_memory(sum, slots) * share;
  for (int64_t i = threadIdx.x; i < D; i += kWarp) {
    const A d = widen(x[i]) - center;
    sum_d += d, sum_d2 += d * d;
  }
  sum_d = warp_sum_in_memory(sum_d, slots);
  sum_d2 = warp_sum_in_memory(sum_d2, slots);
  const Statistics<A> s = statistics(center, sum_d, sum_d2, share, eps);
  for (int64_t i = threadIdx.x; i < D; i += kWarp)
    y[i] = static_cast<T>((widen(x[i]) - s.mean - s.delta) * s.rstd * A(g[i]) + A(b[i]));
  if (threadIdx.x == 0) mean[row] = s.mean + s.delta, rstd[row] = s.rstd;
}

// Forward 3: blockDim.x threads a row and packs of kPack columns. The second and third read of x come from the cache
// as long as the rows in flight fit there. Works for every D.
template <typename T, typename P, bool kAligned, typename A = arithmetic_t<T>>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    forward_3(const T* x, const P* g, const P* b, A eps, T* y, A* mean, A* rstd, int64_t M, int64_t D) {
  SHARED_ARRAY(A, slots, 2 * kMaxWarps * 2);
  const int64_t start = int64_t(threadIdx.x) * kPack, step = int64_t(blockDim.x) * kPack;
  const A share = A(1) / D;
  for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < M; first += int64_t(gridDim.x) * blockDim.y) {
    const int64_t row = first + threadIdx.y, width = row < M ? D : 0;  // no row left: stay for the barriers, do nothing
    const T* in = x + row * D;
    A sum[1] = {0}, sums[2] = {0, 0};
    for (int64_t col = start; col < width; col += step) {
      const Pack<T> p = load<kAligned>(in, col, D);
      for (int k = 0; k < kPack; ++k) sum[0] += widen(p.v[k]);
    }
    row_sum(sum, slots);
    const A center = sum[0] * share;
    for (int64_t col = start; col < width; col += step) {
      const Pack<T> p = load<kAligned>(in, col, D);
      for (int k = 0; k < kPack; ++k) {
        const A d = col + k < D ? widen(p.v[k]) - center : A(0);
        sums[0] += d, sums[1] += d * d;
      }
    }
    row_sum(sums, slots + kMaxWarps * 2);
    const Statistics<A> s = statistics(center, sums[0], sums[1], share, eps);
    for (int64_t col = start; col < width; col += step) {
      Pack<T> p = load<kAligned>(in, col, D);
      const Pack<P> gain = load<kAligned>(g, col, D), shift = load<kAligned>(b, col, D);
      for (int k = 0; k < kPack; ++k)
        p.v[k] = static_cast<T>((widen(p.v[k]) - s.mean - s.delta) * s.rstd * A(gain.v[k]) + A(shift.v[k]));
      store<kAligned>(p, y + row * D, col, D);
    }
    if (width && threadIdx.x == 0) mean[row] = s.mean + s.delta, rstd[row] = s.rstd;
  }
}

// Forward 4: the row in registers, kChunks packs a thread, so x is read once. g and b are read once a block: each block
// takes many rows. Raw 16-bit packs take half the registers of widened ones, and registers are what limits how many
// loads a multiprocessor has in flight: hence widen on use.
template <typename T, typename P, int kChunks, bool kAligned>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    forward_4(const T* x, const P* g, const P* b, float eps, T* y, float* mean, float* rstd, int64_t M, int64_t D) {
  SHARED_ARRAY(float, slots, 2 * kMaxWarps * 2);
  const int start = threadIdx.x * kPack, step = blockDim.x * kPack, columns = D;
  const float share = 1.0f / D;
  Pack<P> gain[kChunks], shift[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    gain[c] = load<kAligned>(g, start + c * step, columns);
    shift[c] = load<kAligned>(b, start + c * step, columns);
  }
  for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < M; first += int64_t(gridDim.x) * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const int width = row < M ? columns : 0;
    Pack<T> p[kChunks];
    float sum[1] = {0}, sums[2] = {0, 0};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) p[c] = load<kAligned>(x + row * D, start + c * step, width);
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      for (int k = 0; k < kPack; ++k) sum[0] += widen(p[c].v[k]);
    row_sum(sum, slots);
    const float center = sum[0] * share;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      for (int k = 0; k < kPack; ++k) {
        const float d = start + c * step + k < columns ? widen(p[c].v[k]) - center : 0.0f;
        sums[0] += d, sums[1] += d * d;
      }
    row_sum(sums, slots + kMaxWarps * 2);
    const Statistics<float> s = statistics(center, sums[0], sums[1], share, eps);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      for (int k = 0; k < kPack; ++k) {
        const float xhat = (widen(p[c].v[k]) - s.mean - s.delta) * s.rstd;
        p[c].v[k] = static_cast<T>(xhat * float(gain[c].v[k]) + float(shift[c].v[k]));
      }
      store<kAligned>(p[c], y + row * D, start + c * step, width);
    }
    if (width && threadIdx.x == 0) mean[row] = s.mean + s.delta, rstd[row] = s.rstd;
  }
}

// ---- Backward ------------------------------------------------------------------------------------------------------

// The three sums of a row's backward, taken together. δ is found again here: a mean rounded to fp32 is not exact enough
// to rebuild x̂. It is known only after the pass, but Σ w·(d − δ) = Σ w·d − δ·Σ w.
template <typename A>
struct RowGradient {
  A mean, delta, rstd, mean_w, mean_wx, scale;

  __device__ RowGradient(A mean, A rstd, A sum_d, A sum_w, A sum_wd, A scale, A share)
      : mean(mean), delta(sum_d * share), rstd(rstd), mean_w(sum_w * share), scale(rstd * scale) {
    mean_wx = (sum_wd - delta * sum_w) * rstd * share;
  }
  __device__ A xhat(A x) const { return (x - mean - delta) * rstd; }
  __device__ A dx(A w, A xhat) const { return (w - mean_w - xhat * mean_wx) * scale; }
};

// Backward 1, in two kernels, the obvious way: dx by rows, dg and db by columns. Each reads all of x and dy.
template <typename T, typename P, typename A = arithmetic_t<T>>
__global__ void backward_1_rows(const T* dy, const T* x, const A* mean, const A* rstd, const P* g, bool compensate,
                                T* dx, int64_t M, int64_t D) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= M) return;
  x += row * D, dy += row * D, dx += row * D;
  const A share = A(1) / D;
  A sum_d = 0, sum_w = 0, sum_wd = 0, sum_abs = 0;
  for (int64_t i = 0; i < D; ++i) {
    const A d = widen(x[i]) - mean[row], w = widen(dy[i]) * A(g[i]);
    sum_d += d, sum_w += w, sum_wd += w * d, sum_abs += g[i] < P(0.0f) ? -A(g[i]) : A(g[i]);
  }
  const A scale = compensate ? gain_scale(sum_abs, D) : A(1);
  const RowGradient<A> s(mean[row], rstd[row], sum_d, sum_w, sum_wd, scale, share);
  for (int64_t i = 0; i < D; ++i) dx[i] = static_cast<T>(s.dx(widen(dy[i]) * A(g[i]), s.xhat(widen(x[i]))));
}

template <typename T, typename P, typename A = arithmetic_t<T>>
__global__ void backward_1_columns(const T* dy, const T* x, const A* mean, const A* rstd, P* dg, P* db, int64_t M,
                                   int64_t D) {
  const int64_t col = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (col >= D) return;
  A sum_g = 0, sum_b = 0;
  for (int64_t row = 0; row < M; ++row) {
    sum_g += widen(dy[row * D + col]) * (widen(x[row * D + col]) - mean[row]) * rstd[row];
    sum_b += widen(dy[row * D + col]);
  }
  dg[col] = static_cast<P>(sum_g), db[col] = static_cast<P>(sum_b);
}

// 1/μ, from one sum over |g| by the threads of each row of the block.
template <bool kAligned, typename P, typename A>
__device__ inline A row_gain_scale(const P* g, int64_t D, A* slots) {
  A sum[1] = {0};
  for (int64_t col = int64_t(threadIdx.x) * kPack; col < D; col += int64_t(blockDim.x) * kPack) {
    const Pack<P> gain = load<kAligned>(g, col, D);
    for (int k = 0; k < kPack; ++k) sum[0] += A(gain.v[k]) < 0 ? -A(gain.v[k]) : A(gain.v[k]);
  }
  row_sum(sum, slots);
  return gain_scale(sum[0], D);
}

// Backward 2: P persistent blocks, block p takes rows p, p + P, ... and adds its share of dg and db into its own row of
// `partial` (2, P, D), which no other block touches. Works for every D.
template <typename T, typename P, bool kAligned, typename A = arithmetic_t<T>>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    backward_2(const T* dy, const T* x, const A* mean, const A* rstd, const P* g, bool compensate, T* dx, A* partial,
               int64_t M, int64_t D) {
  SHARED_ARRAY(A, slots, 2 * kMaxWarps * 3);
  const int64_t start = int64_t(threadIdx.x) * kPack, step = int64_t(blockDim.x) * kPack;
  const A share = A(1) / D;
  A* dg = partial + blockIdx.x * D;
  A* db = partial + (int64_t(gridDim.x) + blockIdx.x) * D;
  const A scale = compensate ? row_gain_scale<kAligned>(g, D, slots + kMaxWarps * 3) : A(1);
  int turn = 0;
  for (int64_t row = blockIdx.x; row < M; row += gridDim.x, turn ^= 1) {
    const T *in = x + row * D, *up = dy + row * D;
    A sums[3] = {0, 0, 0};
    for (int64_t col = start; col < D; col += step) {
      const Pack<T> px = load<kAligned>(in, col, D), pdy = load<kAligned>(up, col, D);
      const Pack<P> gain = load<kAligned>(g, col, D);
      for (int k = 0; k < kPack; ++k) {
        const A d = col + k < D ? widen(px.v[k]) - mean[row] : A(0), w = widen(pdy.v[k]) * A(gain.v[k]);
        sums[0] += d, sums[1] += w, sums[2] += w * d;
      }
    }
    row_sum(sums, slots + turn * kMaxWarps * 3);
    const RowGradient<A> s(mean[row], rstd[row], sums[0], sums[1], sums[2], scale, share);
    for (int64_t col = start; col < D; col += step) {
      Pack<T> px = load<kAligned>(in, col, D);
      const Pack<T> pdy = load<kAligned>(up, col, D);
      const Pack<P> gain = load<kAligned>(g, col, D);
      for (int k = 0; k < kPack && col + k < D; ++k) {
        const A xhat = s.xhat(widen(px.v[k])), dy_k = widen(pdy.v[k]);
        dg[col + k] = (row == blockIdx.x ? A(0) : dg[col + k]) + dy_k * xhat;
        db[col + k] = (row == blockIdx.x ? A(0) : db[col + k]) + dy_k;
        px.v[k] = static_cast<T>(s.dx(dy_k * A(gain.v[k]), xhat));
      }
      store<kAligned>(px, dx + row * D, col, D);
    }
  }
}

// Adds the partial sums of the blockDim.y rows that share a block, from the last to the first, and writes them out once.
// `fold` holds one row's worth at a time, [2·kPack][blockDim.x], so that neighbouring threads touch neighbouring words.
__device__ inline void write_partial(float (&sum)[2][kPack], float* fold, float* partial, int col, int64_t D) {
  for (unsigned y = blockDim.y - 1; y > 0; --y) {
    if (threadIdx.y == y)
      for (int k = 0; k < 2 * kPack; ++k) fold[k * blockDim.x + threadIdx.x] = sum[k / kPack][k % kPack];
    __syncthreads();
    if (threadIdx.y == 0)
      for (int k = 0; k < 2 * kPack; ++k) sum[k / kPack][k % kPack] += fold[k * blockDim.x + threadIdx.x];
    __syncthreads();
  }
  if (threadIdx.y > 0) return;
  for (int which = 0; which < 2; ++which)
    for (int k = 0; k < kPack; ++k)
      if (col + k < D) partial[(int64_t(which) * gridDim.x + blockIdx.x) * D + col + k] = sum[which][k];
}

// Backward 3: x, dy and the block's share of dg and db in registers: x and dy are read once. g is asked for again in
// each row; it sits in the first-level cache, and the registers it would take let two blocks live on a multiprocessor,
// so one loads while the other waits at its barrier (64 registers a thread is the limit for that). Rows of two packs a
// thread leave room for one block only; where they are 16-bit there are registers to ask for the next row before the
// sums of this one. kMaxRowThreads threads a block whatever D is, so short rows share a block.
template <typename T, typename P, int kChunks, bool kAligned>
__global__ void __launch_bounds__(kMaxRowThreads, kChunks == 1 && kAligned ? 2 : 1)
    backward_3(const T* dy, const T* x, const float* mean, const float* rstd, const P* g, bool compensate, T* dx,
               float* partial, int64_t M, int64_t D) {
  constexpr bool kAhead = kAligned && kChunks == 2 && sizeof(T) == 2;
  SHARED_ARRAY(float, slots, 2 * kMaxWarps * 3);
  SHARED_ARRAY(float, fold, 2 * kPack * kMaxRowThreads / 2);  // at most half the block's threads share a row then
  const int start = threadIdx.x * kPack, step = blockDim.x * kPack, columns = D;
  const float share = 1.0f / D;
  const int stride = gridDim.x * blockDim.y;
  const float scale = compensate ? row_gain_scale<kAligned>(g, D, slots + kMaxWarps * 3) : 1.0f;
  Pack<T> px[kChunks], pdy[kChunks];
  float sum[kChunks][2][kPack] = {};  // dg, then db

  const auto fetch = [&](int64_t row) {
    const int width = row < M ? columns : 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      px[c] = load<kAligned>(x + row * D, start + c * step, width);
      pdy[c] = load<kAligned>(dy + row * D, start + c * step, width);
    }
  };
  int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (kAhead) fetch(row);

  for (int turn = 0; row - threadIdx.y < M; row += stride, turn ^= 1) {  // the same bound for every row of the block
    const int width = row < M ? columns : 0;
    if (!kAhead) fetch(row);
    Pack<T> in[kChunks], up[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) in[c] = px[c], up[c] = pdy[c];
    if (kAhead) fetch(row + stride);
    const float center = width ? mean[row] : 0.0f;
    float sums[3] = {0, 0, 0};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const Pack<P> gain = load<kAligned>(g, start + c * step, columns);
      for (int k = 0; k < kPack; ++k) {
        const float d = start + c * step + k < width ? widen(in[c].v[k]) - center : 0.0f;
        const float w = widen(up[c].v[k]) * float(gain.v[k]);
        sums[0] += d, sums[1] += w, sums[2] += w * d;
      }
    }
    row_sum(sums, slots + turn * kMaxWarps * 3);
    const RowGradient<float> s(center, width ? rstd[row] : 0.0f, sums[0], sums[1], sums[2], scale, share);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const Pack<P> gain = load<kAligned>(g, start + c * step, columns);
      for (int k = 0; k < kPack; ++k) {
        const float xhat = s.xhat(widen(in[c].v[k])), dy_k = widen(up[c].v[k]);  // past the width dy is zero
        sum[c][0][k] += dy_k * xhat;
        sum[c][1][k] += dy_k;
        in[c].v[k] = static_cast<T>(s.dx(dy_k * float(gain.v[k]), xhat));
      }
      store<kAligned>(in[c], dx + row * D, start + c * step, width);
    }
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) write_partial(sum[c], fold, partial, start + c * step, D);
}

// Adds `partial` (2, P, D) over P: blockIdx.y says whether for dg or db, a thread takes a column and every kSumRows-th
// row, and the first row of threads adds up the rest. Without rows P is 0 and the sums come out as zero.
template <typename P, typename A>
__global__ void backward_sum(const A* partial, P* dg, P* db, int64_t count, int64_t D) {
  SHARED_ARRAY(A, sums, kSumRows * kWarp);
  const int64_t col = int64_t(blockIdx.x) * kWarp + threadIdx.x;
  partial += int64_t(blockIdx.y) * count * D;
  A sum = 0;
  if (col < D)
    for (int64_t p = threadIdx.y; p < count; p += kSumRows) sum += partial[p * D + col];
  sums[threadIdx.y * kWarp + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= D) return;
  for (int r = 1; r < kSumRows; ++r) sum += sums[r * kWarp + threadIdx.x];
  (blockIdx.y == 0 ? dg : db)[col] = static_cast<P>(sum);
}

// ---- Choosing and launching ----------------------------------------------------------------------------------------

inline int row_threads(int64_t D) {
  int threads = kWarp;
  while (threads < kMaxRowThreads && int64_t(threads) * kPack < D) threads *= 2;
  return threads;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename... Pointers>
bool all_aligned(int64_t D, Pointers... pointers) {
  const bool aligned[] = {reinterpret_cast<uintptr_t>(pointers) % 16 == 0 ...};
  for (bool a : aligned)
    if (!a) return false;
  return D % kPack == 0;
}

// Rows in registers are for fp32 and below: a row of fp64 would take twice the registers there are.
template <typename T>
bool fits_registers(int64_t D) {
  return sizeof(T) <= 4 && D <= kMaxRegisterColumns;
}

// The rows that a block of backward takes at a time, and P, the number of partial sums. Memory for `partial` and the
// launch both take P from here, and it follows from M and D (and the type) alone.
template <typename T>
int backward_rows(int64_t D) {
  return fits_registers<T>(D) ? kMaxRowThreads / row_threads(D) : 1;
}

template <typename T>
int64_t backward_partials(int64_t M, int64_t D) {
  const int64_t blocks = ceil_div(M, backward_rows<T>(D));
  return blocks < kBackwardBlocks ? blocks : kBackwardBlocks;
}

template <typename T, typename P, bool kAligned, typename A>
void launch_forward(const T* x, const P* g, const P* b, A eps, T* y, A* mean, A* rstd, int64_t M, int64_t D,
                    int64_t max_blocks, cudaStream_t stream) {
  const int threads = row_threads(D), rows = threads < kForwardThreads ? kForwardThreads / threads : 1;
  const int64_t blocks = ceil_div(M, rows);
  const dim3 grid(blocks < max_blocks ? blocks : max_blocks), block(threads, rows);
  if constexpr (sizeof(T) <= 4) {
    if (fits_registers<T>(D)) {
      auto kernel = D <= int64_t(threads) * kPack ? forward_4<T, P, 1, kAligned> : forward_4<T, P, 2, kAligned>;
      return launch(kernel, grid, block, stream, x, g, b, eps, y, mean, rstd, M, D);
    }
  }
  launch(forward_3<T, P, kAligned, A>, grid, block, stream, x, g, b, eps, y, mean, rstd, M, D);
}

// x, y (M, D), g, b (D), mean, rstd (M).
template <typename T, typename P, typename A = arithmetic_t<T>>
cudaError_t forward(const T* x, const P* g, const P* b, A eps, T* y, A* mean, A* rstd, int64_t M, int64_t D,
                    cudaStream_t stream) {
  if (M == 0) return cudaSuccess;
  if (all_aligned(D, x, g, b, y))
    launch_forward<T, P, true, A>(x, g, b, eps, y, mean, rstd, M, D, kForwardBlocks, stream);
  else
    launch_forward<T, P, false, A>(x, g, b, eps, y, mean, rstd, M, D, kForwardBlocks, stream);
  return cudaGetLastError();
}

template <typename T, typename P, bool kAligned, typename A>
void launch_backward(const T* dy, const T* x, const A* mean, const A* rstd, const P* g, bool compensate, T* dx,
                     A* partial, int64_t count, int64_t M, int64_t D, cudaStream_t stream) {
  const int threads = row_threads(D);
  const dim3 grid(count), block(threads, backward_rows<T>(D));
  if constexpr (sizeof(T) <= 4) {
    if (fits_registers<T>(D)) {
      auto kernel = D <= int64_t(threads) * kPack ? backward_3<T, P, 1, kAligned> : backward_3<T, P, 2, kAligned>;
      return launch(kernel, grid, block, stream, dy, x, mean, rstd, g, compensate, dx, partial, M, D);
    }
  }
  launch(backward_2<T, P, kAligned, A>, grid, block, stream, dy, x, mean, rstd, g, compensate, dx, partial, M, D);
}

// dy, x, dx (M, D), mean, rstd (M), g, dg, db (D), partial (2, backward_partials<T>(M, D), D).
template <typename T, typename P, typename A = arithmetic_t<T>>
cudaError_t backward(const T* dy, const T* x, const A* mean, const A* rstd, const P* g, bool compensate, T* dx, P* dg,
                     P* db, A* partial, int64_t M, int64_t D, cudaStream_t stream) {
  const int64_t count = backward_partials<T>(M, D);
  if (M > 0) {
    if (all_aligned(D, dy, x, g, dx))
      launch_backward<T, P, true, A>(dy, x, mean, rstd, g, compensate, dx, partial, count, M, D, stream);
    else
      launch_backward<T, P, false, A>(dy, x, mean, rstd, g, compensate, dx, partial, count, M, D, stream);
    if (const cudaError_t error = cudaGetLastError()) return error;
  }
  launch(backward_sum<P, A>, dim3(ceil_div(D, kWarp), 2), dim3(kWarp, kSumRows), stream,
         static_cast<const A*>(partial), dg, db, count, D);
  return cudaGetLastError();
}

}  // namespace minillava
