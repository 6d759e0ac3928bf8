// The order of a batch's copies through host memory; link.py decides when ordering pays.

// The lists that are to be ordered: positions that wait, and positions that claimed a row, or ~position
// where it is KEPT. They use memory that is free until then: victims are listed there afterwards.
__device__ u32 *listed_waits(const Batch &b) { return (u32 *)b.place; }
__device__ i32 *listed_claims(const Batch &b) {
    return b.in_order & WAITS ? (i32 *)b.deferred : b.place;
}

// first[s] = number of items in the regions before s. Every block computes this for itself.
__device__ void begin_regions(const u32 *items_in, u32 *first) {
    const u32 each = REGIONS / THREADS;
    u32 *const mine = first + threadIdx.x * each;
    for (u32 s = threadIdx.x; s < REGIONS; s += THREADS) first[s] = items_in[s];
    __syncthreads();
    u32 sum = 0, total;
    for (u32 j = 0; j < each; ++j) sum += mine[j];
    u32 before = block_sum(sum, &total) - sum;
    for (u32 j = 0; j < each; ++j) {
        const u32 here = mine[j];
        mine[j] = before;
        before += here;
    }
    __syncthreads();
}

// Number the claimed rows, and list the waiting positions, region by region of host memory, so that
// copies which run side by side need few translations of addresses; see link.py. A counting sort.
__device__ void put_in_order(const Tier &t, const Batch &b, u32 missed, u32 deferred) {
    __shared__ u32 first[REGIONS];
    Counters *const c = t.counters;
    if (b.in_order & CLAIMS) {
        if (blockIdx.x * blockDim.x < missed) begin_regions(c->claims_in, first);
        for (u32 i = thread(); i < missed; i += threads()) {
            const i32 claim = listed_claims(b)[i];
            const i64 row = b.ids[claim < 0 ? ~claim : claim], s = row >> t.region_bits;
            const u32 m = first[s] + atomicAdd(c->claims_done + s, 1u);
            b.missed[m] = claim < 0 ? ~row : row;
            set_entry(t, row, FIRST - (i32)m);
        }
        grid_barrier(&c->gate);
    }
    if (b.in_order & WAITS) {
        if (blockIdx.x * blockDim.x < deferred) begin_regions(c->waits_in, first);
        for (u32 i = thread(); i < deferred; i += threads()) {
            const u32 position = listed_waits(b)[i];
            const i64 s = b.ids[position] >> t.region_bits;
            b.deferred[first[s] + atomicAdd(c->waits_done + s, 1u)] = position;
        }
        grid_barrier(&c->gate);
    }
}
