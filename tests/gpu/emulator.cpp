// Runs kernels on the CPU: every CUDA thread is a fiber, every block an OS thread of its own where
// the launch is cooperative. Fibers and OS threads stay for the next launch. Warps meet in their collectives and blocks in their barriers as on a GPU;
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
    jmp_buf scheduler, fiber[kMaxThreads];
    bool started[kMaxThreads] = {};
    bool done[kMaxThreads];
    // A fiber that waits is not resumed while this counter has the value that it found.
    const unsigned *awaited[kMaxThreads] = {};
    unsigned found[kMaxThreads];
    Warp warp[kMaxThreads / 32];
    unsigned waiting = 0, generation = 0;
    // Not filled with zeros: a launch touches a page or two of each.
    char *stacks = new char[kMaxThreads * kStack];

    ~Block() { delete[] stacks; }
};

thread_local Block *block;

void fiber_main();

// Between fibers there are jumps: swapcontext would call the system each time, for the signal mask.
void yield_fiber() {
    if (!_setjmp(block->fiber[threadIdx.x])) _longjmp(block->scheduler, 1);
}

void resume_fiber(unsigned i) {
    if (_setjmp(block->scheduler)) return;
    if (block->started[i]) _longjmp(block->fiber[i], 1);
    block->started[i] = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = block->stacks + i * kStack;
    start.uc_stack.ss_size = kStack;
    start.uc_link = nullptr;
    makecontext(&start, fiber_main, 0);
    setcontext(&start);
}

void await_change(const unsigned &generation, unsigned found) {
    block->found[threadIdx.x] = found;
    block->awaited[threadIdx.x] = &generation;
    yield_fiber();
    block->awaited[threadIdx.x] = nullptr;
}

const uint64_t *meet(uint64_t value) {
    Warp &warp = block->warp[threadIdx.x / 32];
    const unsigned generation = warp.generation;
    warp.value[generation & 1][threadIdx.x % 32] = value;
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        ++warp.generation;
    } else {
        await_change(warp.generation, generation);
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
        await_change(block->generation, generation);
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

namespace {

thread_local Kernel kernel;
thread_local const FIRST_TYPE *first_argument;
thread_local const SECOND_TYPE *second_argument;

// Once for every block that an OS thread runs, one behind the other.
void fiber_main() {
    for (;;) {
        kernel(*first_argument, *second_argument);
        block->done[threadIdx.x] = true;
        yield_fiber();
    }
}

}  // namespace

static void run_block(unsigned index, unsigned blocks, unsigned threads, unsigned seed) {
    static thread_local Block storage;
    block = &storage;
    block->waiting = 0;
    blockIdx.x = index;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (unsigned w = 0; w < threads / 32; ++w) block->warp[w].arrived = 0;
    for (unsigned i = 0; i < threads; ++i) block->done[i] = false;
    // An odd stride visits all threads, in an order that depends on the seed.
    const unsigned stride = seed * 2 + 1;
    for (unsigned running = threads; running;) {
        running = 0;
        for (unsigned j = 0; j < threads; ++j) {
            const unsigned i = (j * stride + seed) % threads;
            if (block->done[i]) continue;
            ++running;
            if (block->awaited[i] && *block->awaited[i] == block->found[i]) continue;
            threadIdx.x = i;
            resume_fiber(i);
            running -= block->done[i];
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

static void run_share(const Share *given) {
    const Share &share = *given;
    const Launch &launch = *share.launch;
    kernel = launch.which;
    first_argument = (const FIRST_TYPE *)launch.arguments[0];
    second_argument = (const SECOND_TYPE *)launch.arguments[1];
    for (unsigned i = share.first; i < share.first + share.count; ++i)
        run_block(i, launch.blocks, launch.threads, launch.seed);
}

// An OS thread that waits for shares.
struct Worker {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
    Share *share = nullptr;
    Worker *next = nullptr;

    void set(Share *given) {
        pthread_mutex_lock(&mutex);
        share = given;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&mutex);
    }

    Share *wait(bool given) {
        pthread_mutex_lock(&mutex);
        while (!share == given) pthread_cond_wait(&changed, &mutex);
        Share *const found = share;
        pthread_mutex_unlock(&mutex);
        return found;
    }
};

static void *work(void *given) {
    Worker &worker = *(Worker *)given;
    for (;;) {
        run_share(worker.wait(true));
        worker.set(nullptr);
    }
}

static pthread_mutex_t idle_mutex = PTHREAD_MUTEX_INITIALIZER;
static Worker *idle;

static Worker *hire() {
    pthread_mutex_lock(&idle_mutex);
    Worker *found = idle;
    if (found) idle = found->next;
    pthread_mutex_unlock(&idle_mutex);
    if (found) return found;
    pthread_t thread;
    found = new Worker;
    if (pthread_create(&thread, nullptr, work, found)) __builtin_abort();
    pthread_detach(thread);
    return found;
}

static void release(Worker *worker) {
    pthread_mutex_lock(&idle_mutex);
    worker->next = idle;
    idle = worker;
    pthread_mutex_unlock(&idle_mutex);
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
    Worker **const others = new Worker *[blocks];
    for (unsigned i = 0; i < blocks; ++i) shares[i] = Share{&launch, i, 1};
    for (unsigned i = 1; i < blocks; ++i) (others[i] = hire())->set(shares + i);
    run_share(shares);
    for (unsigned i = 1; i < blocks; ++i) {
        others[i]->wait(false);
        release(others[i]);
    }
    delete[] others;
    delete[] shares;
}

extern "C" uint64_t size_of_first() { return sizeof(FIRST_TYPE); }
extern "C" uint64_t size_of_second() { return sizeof(SECOND_TYPE); }
#ifdef COUNTERS_TYPE
extern "C" uint64_t size_of_counters() { return sizeof(COUNTERS_TYPE); }
#endif
