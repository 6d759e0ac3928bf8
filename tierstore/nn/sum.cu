// The gradient of each distinct row: the sum of those of its ids, in no particular order.
//
// VECTOR, a macro, is how many float32 elements a thread moves in one access: 4 or 1. Offsets are
// 64-bit throughout. No header is included: NVRTC needs no CUDA toolkit.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// The distinct rows of a batch, as their lease describes them.
struct Rows {
    const u64 *records;      // address of each record
    const u32 *count;        // how many there are
    const i32 *positions;    // [n]: index of each id's record, negative for none
    i64 n;
};

struct Sum {
    const float *each;       // gradient of each id, [n][dim]
    float *total;            // of each record, [count][dim]
    u32 dim;
};

struct alignas(4 * VECTOR) Pack {
    float at[VECTOR];
};

__device__ u64 thread() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ u64 threads() { return (u64)gridDim.x * blockDim.x; }

// What lies behind the distinct rows stays as it is.
extern "C" __global__ void tierstore_clear(const Rows rows, const Sum sum) {
    const u64 packs = (u64)*rows.count * (sum.dim / VECTOR);
    for (u64 i = thread(); i < packs; i += threads()) ((Pack *)sum.total)[i] = Pack{};
}

__device__ void add(float *target, const Pack &part) {
#if VECTOR == 4 && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(part.at[0]),
                 "f"(part.at[1]), "f"(part.at[2]), "f"(part.at[3]) : "memory");
#else
    for (u32 k = 0; k < VECTOR; ++k) atomicAdd(target + k, part.at[k]);
#endif
}

extern "C" __global__ void tierstore_sum(const Rows rows, const Sum sum) {
    const u32 packs = sum.dim / VECTOR;
    const u64 all = (u64)rows.n * packs;
    for (u64 i = thread(); i < all; i += threads()) {
        const u64 id = all >> 32 ? i / packs : (u32)i / packs;
        const i32 row = rows.positions[id];
        if (row < 0) continue;
        add(sum.total + (u64)row * sum.dim + (i - id * packs) * VECTOR, ((const Pack *)sum.each)[i]);
    }
}
