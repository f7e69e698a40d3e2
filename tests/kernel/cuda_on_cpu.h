// As much of CUDA as layer_norm.cuh uses, on one CPU thread, so that g++ and its sanitizers can judge the kernels.
//
// Each CUDA thread is a fibre (ucontext) that runs until it has to wait for others: at a barrier or a shuffle. Blocks
// run one after the other. ThreadSanitizer is told what CUDA promises and no more: that a barrier orders the threads
// of its block, or of its warp, and that a launch comes after the one before. A shuffle orders nothing, and neither
// does the order in which the fibres happen to run, so a missing barrier is a race even where the result is right.
//
//   g++ -include cuda_on_cpu.h ...                        (-fsanitize=thread, or address)
//
// What keeps the sanitizer from seeing this file instead of the kernels: functions marked INTERNAL are not
// instrumented and call nothing that is; fibres, their stacks and the shared memory live until the launch is over, so
// that no address means two things; all of it is allocated before the first fibre starts.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <initializer_list>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#define INTERNAL __attribute__((no_sanitize("thread", "address"), noinline))
#define __global__
#define __device__
#define __launch_bounds__(...)
#define __syncthreads() cuda_on_cpu::wait(cuda_on_cpu::kBlock, __FILE__, __LINE__)
#define __syncwarp() cuda_on_cpu::wait(cuda_on_cpu::kWarpWide, __FILE__, __LINE__)
#define SHARED_ARRAY(type, name, count) \
  type* name = static_cast<type*>(cuda_on_cpu::shared_array(sizeof(type) * (count), __LINE__))

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace cuda_on_cpu {

enum State { kReady, kBlock, kWarpWide, kShuffle, kDone };

struct Fibre {
  ucontext_t context;
  void* tsan;
  dim3 thread;
  State state;
  const char* file;  // where it waits
  int line;
  int turns[2];       // how many block and warp barriers it has passed: two sync addresses take turns
  uint64_t slots[2];  // what it holds out for others to shuffle, again two in turn
  int shuffles;
};

constexpr size_t kStack = 128 << 10, kSharedBytes = 64 << 10, kRedZone = 64;
constexpr int kMaxArrays = 8;

inline ucontext_t scheduler;
inline void* scheduler_tsan;
inline Fibre *fibres, *current;  // of the block that runs
inline char *shared_memory, *block_sync, *warp_sync;
inline struct { int line; size_t offset; } arrays[kMaxArrays];
inline size_t shared_used;
inline void (*kernel_body)(void*);
inline void* kernel_closure;

INTERNAL inline void fail(const char* file, int line, const char* what) {
  fprintf(stderr, "%s:%d: %s\n", file, line, what);
  _exit(70);
}

INTERNAL inline void switch_to(Fibre* to) {
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(to ? to->tsan : scheduler_tsan, 1);  // 1: switching is not synchronising
#endif
  if (to) {
    current = to, threadIdx = to->thread;
    swapcontext(&scheduler, &to->context);
  } else {
    swapcontext(&current->context, &scheduler);
  }
}

INTERNAL inline int thread_number(const Fibre* f) { return f->thread.x + f->thread.y * blockDim.x; }

// Stops this fibre until all threads of its block, or warp, have come to the same place. The order that this gives
// memory is the acquire after the release, at addresses that take turns, so that a fibre which is already on its way
// to the next barrier lends none of what it does there to one that has yet to leave this one.
INTERNAL inline void wait(State kind, const char* file, int line) {
  Fibre* self = current;
  [[maybe_unused]] char* sync = nullptr;
  if (kind == kBlock) sync = block_sync + (self->turns[0]++ & 1);
  if (kind == kWarpWide) sync = warp_sync + thread_number(self) / 32 * 2 + (self->turns[1]++ & 1);
  self->state = kind, self->file = file, self->line = line;
#ifdef __SANITIZE_THREAD__
  if (sync) __tsan_release(sync);
#endif
  switch_to(nullptr);
#ifdef __SANITIZE_THREAD__
  if (sync) __tsan_acquire(sync);
#endif
}

INTERNAL inline uint64_t exchange(uint64_t bits, int lane_mask, const char* file, int line) {
  Fibre* self = current;
  const int turn = self->shuffles++ & 1;
  self->slots[turn] = bits;
  wait(kShuffle, file, line);
  return fibres[thread_number(self) ^ lane_mask].slots[turn];
}

template <typename T>
INTERNAL T shuffle_xor(T value, int lane_mask, const char* file, int line) {
  union { uint64_t bits; T value; } in{0}, out{0};
  in.value = value;
  out.bits = exchange(in.bits, lane_mask, file, line);
  return out.value;
}
#define __shfl_xor_sync(mask, value, offset) cuda_on_cpu::shuffle_xor(value, offset, __FILE__, __LINE__)

// The block's array that is declared in this line: the first thread to ask makes it, the others get the same one.
INTERNAL inline void* shared_array(size_t bytes, int line) {
  int i = 0;
  for (; i < kMaxArrays && arrays[i].line; ++i)
    if (arrays[i].line == line) return shared_memory + arrays[i].offset;
  if (i == kMaxArrays || shared_used + bytes + kRedZone > kSharedBytes) fail(__FILE__, line, "too much shared memory");
  arrays[i] = {line, shared_used};
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(shared_memory + shared_used, bytes);
#endif
  shared_used += (bytes + kRedZone + 63) / 64 * 64;
  return shared_memory + arrays[i].offset;
}

INTERNAL inline void fibre_main() {
  kernel_body(kernel_closure);
  current->state = kDone;
#ifdef __SANITIZE_THREAD__
  __tsan_release(&kernel_body);  // the end of the launch, which the host waits for
#endif
  switch_to(nullptr);
}

// Lets the `count` fibres from `first` go on if all of them wait for `kind`. It is an error if only some can ever come.
INTERNAL inline bool release(Fibre* first, int count, State kind) {
  int waiting = 0, done = 0;
  Fibre* at = nullptr;
  for (Fibre* f = first; f < first + count; ++f) {
    waiting += f->state == kind, done += f->state == kDone;
    if (f->state == kind && !at) at = f;
    if (f->state == kind && f->line != at->line) fail(f->file, f->line, "threads wait at different barriers");
  }
  if (waiting && done) fail(at->file, at->line, "a barrier or shuffle that other threads have returned before");
  if (waiting < count) return false;
  for (Fibre* f = first; f < first + count; ++f) f->state = kReady;
  return true;
}

INTERNAL inline void run_block(int count) {
  for (bool progress = true; progress;) {
    progress = false;
    for (int i = 0; i < count; ++i)
      if (fibres[i].state == kReady) switch_to(&fibres[i]), progress = true;
    for (int w = 0; w < count; w += 32)
      for (State kind : {kShuffle, kWarpWide}) progress |= release(fibres + w, 32, kind);
    progress |= release(fibres, count, kBlock);
  }
  for (int i = 0; i < count; ++i)
    if (fibres[i].state != kDone) fail(fibres[i].file, fibres[i].line, "stuck: the threads wait for different things");
}

INTERNAL inline void place(dim3 grid, dim3 block, dim3 index) { gridDim = grid, blockDim = block, blockIdx = index; }

inline char* pages(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail(__FILE__, __LINE__, "out of memory");
  return static_cast<char*>(p);
}

// Only a sanitizer needs every block to have fibres, stacks and shared memory of its own.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kReuse = false;
#else
constexpr bool kReuse = true;
#endif

inline void run_grid(dim3 grid, dim3 block, void (*body)(void*), void* closure) {
  const int count = block.x * block.y, blocks = grid.x * grid.y, kept = kReuse ? 1 : blocks;
  if (count % 32) fail(__FILE__, __LINE__, "this stand-in wants whole warps");
  const size_t stacks = size_t(count) * kStack, records = (sizeof(Fibre) * count + 63) / 64 * 64, syncs = 64 + (count / 32 * 2 + 63) / 64 * 64;
  char* memory = pages(kept * (stacks + records + kSharedBytes + syncs));
  kernel_body = body, kernel_closure = closure;
#ifdef __SANITIZE_THREAD__
  scheduler_tsan = __tsan_get_current_fiber();
#endif
  for (int b = 0; b < blocks; ++b) {
    char* base = memory + (kReuse ? 0 : b) * (stacks + records + kSharedBytes + syncs);
    fibres = reinterpret_cast<Fibre*>(base + stacks);
    shared_memory = base + stacks + records, block_sync = shared_memory + kSharedBytes, warp_sync = block_sync + 64;
    memset(shared_memory, 0xFF, kSharedBytes);  // what is read before it is written shows as NaN
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(shared_memory, kSharedBytes);
#endif
    memset(arrays, 0, sizeof arrays), shared_used = 0;
    place(grid, block, dim3(b % grid.x, b / grid.x));
    for (int i = 0; i < count; ++i) {
      Fibre& f = fibres[i];
      f = Fibre{};
      f.thread = dim3(i % block.x, i / block.x);
#ifdef __SANITIZE_THREAD__
      f.tsan = __tsan_create_fiber(0);
#endif
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = base + i * kStack, f.context.uc_stack.ss_size = kStack;
      makecontext(&f.context, fibre_main, 0);
    }
    run_block(count);
  }
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(&kernel_body);
  for (int b = 0; b < blocks; ++b) {
    Fibre* all = reinterpret_cast<Fibre*>(memory + b * (stacks + records + kSharedBytes + syncs) + stacks);
    for (int i = 0; i < count; ++i) __tsan_destroy_fiber(all[i].tsan);
  }
#endif
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(memory, kept * (stacks + records + kSharedBytes + syncs));
#endif
  munmap(memory, kept * (stacks + records + kSharedBytes + syncs));
}

}  // namespace cuda_on_cpu

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t, Arguments... arguments) {
  auto body = [&] { kernel(arguments...); };
  cuda_on_cpu::run_grid(grid, block, [](void* closure) { (*static_cast<decltype(body)*>(closure))(); }, &body);
}
