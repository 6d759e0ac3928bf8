// Victims: the slots of lowest rank, by a radix select over all slots.

static const u32 STAMPS = 8;  // that a thread looks at together

__device__ bool evictable(const Tier &t, const Batch &b, u64 slot, u32 stamp) {
    if ((stamp & HELD) || (stamp & NUMBER) == b.now) return false;
    return !(stamp & AHEAD) || (i32)(t.arrival[slot] - b.expired) <= 0;
}

// Load the words of neighbouring slots; those after the last slot are `otherwise`.
__device__ void load_words(const Tier &t, const u32 *words, u64 first, u32 otherwise, u32 *word) {
    if (first + STAMPS <= t.capacity) {
        const uint4 *const source = (const uint4 *)(words + first);
#pragma unroll
        for (u32 i = 0; i < STAMPS / 4; ++i) {
            const uint4 four = source[i];
            word[4 * i] = four.x, word[4 * i + 1] = four.y;
            word[4 * i + 2] = four.z, word[4 * i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < STAMPS; ++i)
            word[i] = first + i < t.capacity ? words[first + i] : otherwise;
    }
}

// Load the stamps and ranks of neighbouring slots; those after the last one count as pinned. A rank has
// 30 bits, as a batch number has. Floats that are not negative order as their bits do, here shifted
// right by one; rank 0 is for empty slots.
template <bool SCORED>
__device__ void load_slots(const Tier &t, u64 first, u32 *stamp, u32 *rank) {
    load_words(t, t.stamp, first, HELD, stamp);
    if (SCORED) load_words(t, (const u32 *)t.key, first, 0, rank);
#pragma unroll
    for (u32 i = 0; i < STAMPS; ++i) {
        const u32 number = stamp[i] & NUMBER;
        rank[i] = !SCORED ? number : number ? (rank[i] >> 1) + 1 : 0;
    }
}

// Count the evictable slots by the bits of their rank at `shift`, among those that agree with
// `prefix` above. Neighbouring slots often fall together, so each thread adds up runs.
template <bool SCORED>
__device__ void count_ranks(const Tier &t, const Batch &b, u32 prefix, u32 above, u32 shift,
                            u32 bins, u32 *histogram) {
    __shared__ u32 local[BINS];
    for (u32 i = threadIdx.x; i < bins; i += blockDim.x) local[i] = 0;
    __syncthreads();
    u32 run_bin = 0, run = 0;
    for (u64 first = (u64)thread() * STAMPS; first < t.capacity; first += (u64)threads() * STAMPS) {
        u32 stamp[STAMPS], rank[STAMPS];
        load_slots<SCORED>(t, first, stamp, rank);
#pragma unroll
        for (u32 i = 0; i < STAMPS; ++i) {
            if ((rank[i] & above) != prefix || !evictable(t, b, first + i, stamp[i])) continue;
            const u32 bin = (rank[i] >> shift) & (bins - 1);
            if (bin != run_bin && run) { atomicAdd(local + run_bin, run); run = 0; }
            run_bin = bin;
            ++run;
        }
    }
    if (run) atomicAdd(local + run_bin, run);
    __syncthreads();
    for (u32 i = threadIdx.x; i < bins; i += blockDim.x)
        if (local[i]) atomicAdd(histogram + i, local[i]);
}

// Find the bin that holds the wanted-th item: result = {bin, items below it}. Clips *wanted to the
// number of items. Every block computes this for itself.
__device__ void pick_bin(const u32 *histogram, u32 bins, u32 *wanted, u32 *result) {
    const u32 each = bins / THREADS;
    u32 sum = 0, total;
    for (u32 j = 0; j < each; ++j) sum += histogram[threadIdx.x * each + j];
    const u32 through = block_sum(sum, &total);
    if (*wanted > total) *wanted = total;
    u32 below = through - sum;
    if (below < *wanted && *wanted <= through) {
        u32 bin = threadIdx.x * each;
        while (below + histogram[bin] < *wanted) below += histogram[bin++];
        result[0] = bin;
        result[1] = below;
    }
    __syncthreads();
}

// List in b.place the `wanted` slots of lowest rank, or as many as may be evicted. No stamp exceeds
// b.now, so bits above its highest need no pass.
template <bool SCORED>
__device__ void select_victims(const Tier &t, const Batch &b, u32 wanted) {
    __shared__ u32 picked[2];
    Counters *const c = t.counters;
    u32 prefix = 0, above = 0, shift = 30;
    for (u32 pass = 0; pass < PASSES; ++pass) {
        const u32 bits = pass == 0 ? 8 : 11, bins = 1u << bits;
        shift -= bits;
        above |= (bins - 1) << shift;
        if (!SCORED && b.now >> shift == 0) continue;
        u32 *const histogram = c->histogram[pass];
        count_ranks<SCORED>(t, b, prefix, above & ~((bins - 1) << shift), shift, bins, histogram);
        grid_barrier(&c->gate);
        pick_bin(histogram, bins, &wanted, picked);
        if (wanted == 0) return;
        prefix |= picked[0] << shift;
        wanted -= picked[1];
    }
    for (u64 base = (u64)(thread() - lane()) * STAMPS; base < t.capacity;
         base += (u64)threads() * STAMPS) {
        const u64 first = base + lane() * STAMPS;
        u32 stamp[STAMPS], rank[STAMPS], below = 0, tied = 0;
        load_slots<SCORED>(t, first, stamp, rank);
#pragma unroll
        for (u32 i = 0; i < STAMPS; ++i) {
            if (rank[i] > prefix || !evictable(t, b, first + i, stamp[i])) continue;
            if (rank[i] < prefix) below |= 1u << i;
            else tied |= 1u << i;
        }
        u32 tie = append_all(&c->ties, __popc(tied));
        for (; tied && tie < wanted; tied &= tied - 1, ++tie) below |= tied & -tied;
        u32 v = append_all(&c->victims, __popc(below));
        for (; below; below &= below - 1) b.place[v++] = (i32)(first + __ffs(below) - 1);
    }
}
