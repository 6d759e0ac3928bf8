// Runs kernels on the CPU: every CUDA thread is a fiber, every block an OS thread of its own where
// the launch is cooperative. Warps meet in their collectives and blocks in their barriers as on a GPU;
// what it cannot show are races between plain accesses, and speed.
//
// C's headers alone: those of C++ would take as long to compile as a source of kernels.
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct Index { unsigned x; };

#define __global__
#define __device__ [[maybe_unused]] static
#define __shared__ static thread_local
#define __launch_bounds__(...)

static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr unsigned kMaxThreads = 256;
constexpr size_t kStack = 64 << 10;

struct Warp {
    uint64_t value[2][32];
    unsigned arrived = 0, generation = 0;
};

struct Block {
    ucontext_t start[kMaxThreads];
    jmp_buf scheduler, fiber[kMaxThreads];
    bool started[kMaxThreads];
    bool done[kMaxThreads];
    Warp warp[kMaxThreads / 32];
    unsigned waiting = 0, generation = 0;
    // Not filled with zeros: a launch touches a page or two of each.
    char *stacks = new char[kMaxThreads * kStack];

    ~Block() { delete[] stacks; }
};

thread_local Block *block;

// Between fibers there are jumps: swapcontext would call the system each time, for the signal mask.
void yield_fiber() {
    if (!_setjmp(block->fiber[threadIdx.x])) _longjmp(block->scheduler, 1);
}

void resume_fiber(unsigned i) {
    if (_setjmp(block->scheduler)) return;
    if (block->started[i]) _longjmp(block->fiber[i], 1);
    block->started[i] = true;
    setcontext(&block->start[i]);
}

const uint64_t *meet(uint64_t value) {
    Warp &warp = block->warp[threadIdx.x / 32];
    const unsigned generation = warp.generation;
    warp.value[generation & 1][threadIdx.x % 32] = value;
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        ++warp.generation;
    } else {
        while (warp.generation == generation) yield_fiber();
    }
    return warp.value[generation & 1];
}

}  // namespace

static void __syncthreads() {
    const unsigned generation = block->generation;
    if (++block->waiting == blockDim.x) {
        block->waiting = 0;
        ++block->generation;
    } else {
        while (block->generation == generation) yield_fiber();
    }
}

static unsigned __ballot_sync(unsigned, bool vote) {
    const uint64_t *votes = meet(vote);
    unsigned result = 0;
    for (unsigned lane = 0; lane < 32; ++lane) result |= (unsigned)votes[lane] << lane;
    return result;
}

template <class T>
static unsigned __match_any_sync(unsigned, T value) {
    const uint64_t *values = meet((uint64_t)value);
    unsigned result = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        result |= (unsigned)(values[lane] == (uint64_t)value) << lane;
    return result;
}

template <class T>
static T __shfl_sync(unsigned, T value, unsigned lane) {
    return (T)meet((uint64_t)value)[lane & 31];
}

template <class T>
static T __shfl_up_sync(unsigned, T value, unsigned delta) {
    const unsigned lane = threadIdx.x % 32;
    return (T)meet((uint64_t)value)[lane < delta ? lane : lane - delta];
}

template <class T>
static T __shfl_xor_sync(unsigned, T value, unsigned mask) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = meet(bits)[(threadIdx.x % 32) ^ mask];
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void __syncwarp() { meet(0); }

static unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static float half_to_float(uint16_t bits) {
    _Float16 x;
    memcpy(&x, &bits, 2);
    return x;
}
static uint16_t float_to_half(float x) {
    const _Float16 half = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __ffs(unsigned x) { return __builtin_ffs((int)x); }
static void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static void __nanosleep(unsigned) { sched_yield(); }

template <class T>
static T atomicAdd(T *p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
[[maybe_unused]] static float atomicAdd(float *p, float v) {
    const float before = *p;  // not atomic: these kernels' blocks run one after another
    *p = before + v;
    return before;
}
template <class T>
static T atomicSub(T *p, T v) { return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST); }
template <class T>
static T atomicOr(T *p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }
template <class T>
static T atomicExch(T *p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
template <class T>
static T atomicCAS(T *p, T expected, T v) {
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}
template <class T>
static T atomicMax(T *p, T v) {
    T seen = *p;
    while (seen < v && !__atomic_compare_exchange_n(p, &seen, v, false, 5, 5)) {}
    return seen;
}
template <class T>
static T atomicMin(T *p, T v) {
    T seen = *p;
    while (v < seen && !__atomic_compare_exchange_n(p, &seen, v, false, 5, 5)) {}
    return seen;
}

#include KERNELS

typedef void (*Kernel)(FIRST_TYPE, SECOND_TYPE);
static thread_local Kernel kernel;
static thread_local const FIRST_TYPE *first_argument;
static thread_local const SECOND_TYPE *second_argument;

static void fiber_main() {
    kernel(*first_argument, *second_argument);
    block->done[threadIdx.x] = true;
    for (;;) yield_fiber();
}

static void run_block(unsigned index, unsigned blocks, unsigned threads, unsigned seed) {
    static thread_local Block storage;
    block = &storage;
    block->waiting = 0;
    blockIdx.x = index;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (unsigned w = 0; w < threads / 32; ++w) block->warp[w].arrived = 0;
    for (unsigned i = 0; i < threads; ++i) {
        block->done[i] = block->started[i] = false;
        getcontext(&block->start[i]);
        block->start[i].uc_stack.ss_sp = block->stacks + i * kStack;
        block->start[i].uc_stack.ss_size = kStack;
        block->start[i].uc_link = nullptr;
        makecontext(&block->start[i], fiber_main, 0);
    }
    // An odd stride visits all threads, in an order that depends on the seed.
    const unsigned stride = seed * 2 + 1;
    for (unsigned running = threads; running;) {
        running = 0;
        for (unsigned j = 0; j < threads; ++j) {
            const unsigned i = (j * stride + seed) % threads;
            if (block->done[i]) continue;
            threadIdx.x = i;
            resume_fiber(i);
            running += !block->done[i];
        }
    }
}

struct Launch {
    Kernel which;
    const void *const *arguments;
    unsigned blocks, threads, seed;
};

// Some blocks of a launch, for one OS thread.
struct Share {
    const Launch *launch;
    unsigned first, count;
};

static void *run_share(void *given) {
    const Share &share = *(const Share *)given;
    const Launch &launch = *share.launch;
    kernel = launch.which;
    first_argument = (const FIRST_TYPE *)launch.arguments[0];
    second_argument = (const SECOND_TYPE *)launch.arguments[1];
    for (unsigned i = share.first; i < share.first + share.count; ++i)
        run_block(i, launch.blocks, launch.threads, launch.seed);
    return nullptr;
}

extern "C" void emulate(Kernel which, unsigned blocks, unsigned threads, const void *const *arguments,
                        int cooperative, unsigned seed) {
    const Launch launch{which, arguments, blocks, threads, seed};
    if (!cooperative) {
        Share all{&launch, 0, blocks};
        run_share(&all);
        return;
    }
    Share *const shares = new Share[blocks];
    pthread_t *const others = new pthread_t[blocks];
    for (unsigned i = 0; i < blocks; ++i) shares[i] = Share{&launch, i, 1};
    for (unsigned i = 1; i < blocks; ++i)
        if (pthread_create(others + i, nullptr, run_share, shares + i)) __builtin_abort();
    run_share(shares);
    for (unsigned i = 1; i < blocks; ++i) pthread_join(others[i], nullptr);
    delete[] others;
    delete[] shares;
}

extern "C" uint64_t size_of_first() { return sizeof(FIRST_TYPE); }
extern "C" uint64_t size_of_second() { return sizeof(SECOND_TYPE); }
#ifdef COUNTERS_TYPE
extern "C" uint64_t size_of_counters() { return sizeof(COUNTERS_TYPE); }
#endif
