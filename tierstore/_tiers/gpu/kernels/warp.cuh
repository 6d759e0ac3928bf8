// Warps, blocks and grids: sums, appends, shares of work, a barrier.

static const u32 EVERY_LANE = 0xffffffffu;
static const u32 MOST_ITEMS = 16;  // that a warp copies before it turns to others

// The warps of some neighbouring blocks, and the caller's number among them.
struct Team {
    u32 warp, warps;
};

__device__ Team team(u32 first_block, u32 blocks) {
    const u32 each = blockDim.x >> 5;
    return {(blockIdx.x - first_block) * each + (threadIdx.x >> 5), blocks * each};
}

__device__ Team everyone() { return team(0, gridDim.x); }

// The sum over the lanes up to the caller's.
__device__ u32 warp_sum(u32 value) {
    for (u32 d = 1; d < 32; d <<= 1) {
        const u32 left = __shfl_up_sync(EVERY_LANE, value, d);
        if (lane() >= d) value += left;
    }
    return value;
}

// The sum over the threads of the block up to the caller's; *total becomes that over all.
__device__ u32 block_sum(u32 value, u32 *total) {
    __shared__ u32 totals[THREADS / 32];
    u32 through = warp_sum(value);
    if (lane() == 31) totals[threadIdx.x >> 5] = through;
    __syncthreads();
    *total = 0;
    for (u32 w = 0; w < THREADS / 32; ++w) {
        if (w < threadIdx.x >> 5) through += totals[w];
        *total += totals[w];
    }
    __syncthreads();
    return through;
}

// Give every lane that asks an index of its own, counted from *count.
__device__ u32 append(u32 *count, bool asks) {
    const u32 asking = __ballot_sync(EVERY_LANE, asks);
    if (asking == 0) return 0;
    const u32 leader = __ffs(asking) - 1;
    u32 first = 0;
    if (lane() == leader) first = atomicAdd(count, (u32)__popc(asking));
    first = __shfl_sync(EVERY_LANE, first, leader);
    return first + __popc(asking & ((1u << lane()) - 1));
}

// The same for several counts and all threads of a block together: one atomic operation a count.
template <u32 N>
__device__ void block_append(u32 *const (&counts)[N], const bool (&asks)[N], u32 (&index)[N]) {
    __shared__ u32 firsts[N][THREADS / 32];
    const u32 warp = threadIdx.x >> 5;
    u32 asking[N];
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        asking[i] = __ballot_sync(EVERY_LANE, asks[i]);
        if (lane() == 0) firsts[i][warp] = __popc(asking[i]);
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        if (threadIdx.x != i * 32) continue;
        u32 all = 0;
        for (u32 w = 0; w < THREADS / 32; ++w) all += firsts[i][w];
        u32 first = all ? atomicAdd(counts[i], all) : 0;
        for (u32 w = 0; w < THREADS / 32; ++w) {
            const u32 here = firsts[i][w];
            firsts[i][w] = first;
            first += here;
        }
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < N; ++i)
        index[i] = firsts[i][warp] + __popc(asking[i] & ((1u << lane()) - 1));
    __syncthreads();
}

// The same as `append` for several indices a lane; returns the first.
__device__ u32 append_all(u32 *count, u32 asks) {
    const u32 through = warp_sum(asks), all = __shfl_sync(EVERY_LANE, through, 31);
    u32 first = 0;
    if (lane() == 31 && all) first = atomicAdd(count, all);
    return __shfl_sync(EVERY_LANE, first, 31) + through - asks;
}

__device__ void tally(u64 *total, bool counts) {
    const u32 counting = __ballot_sync(EVERY_LANE, counts);
    if (lane() == 0 && counting) atomicAdd(total, (u64)__popc(counting));
}

// The number of n items that a warp takes at a time: enough to keep its copies long, but few enough for
// every warp to get some, and so that all get about as many.
__device__ u32 span_for(Team team, u64 n, u32 most = MOST_ITEMS) {
    const u64 each = (n + team.warps - 1) / team.warps;
    if (each == 0) return 1;
    const u64 rounds = (each + most - 1) / most;
    return (u32)((each + rounds - 1) / rounds);
}

// All threads of a cooperative launch meet. Block 0 completes the sum that flips the top bit, so the
// gate is ready for the next meeting without being reset.
__device__ void grid_barrier(u32 *gate) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const u32 step = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
        const u32 before = atomicAdd(gate, step);
        while (((before ^ *(volatile u32 *)gate) & 0x80000000u) == 0) __nanosleep(64);
        __threadfence();
    }
    __syncthreads();
}
