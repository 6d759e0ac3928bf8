// Bags of rows, pooled where the records are: no row is written out for an id, in either direction.
//
// What must move for n ids in `all` bags, s bytes a stored element and o bytes one that comes out:
//   pool      n (4 + 8 + dim s) + all (8 + dim o); rows that repeat come from the caches
//   scatter   n (4 + 2 dim 4) + all (8 + dim o); the sums of rows that repeat stay in the L2 cache
// A row per id would add n dim o for writing and for reading, in either direction.
//
// Macros:
//   ROW       type of the field: F32, BF16 or F16
//   OUT       type of what comes out, and of its gradient
//   VECTOR    elements that a thread moves in one access: a power of two
//   COLUMNS   elements, at most as many, that the first column of every feature is a multiple of
//   MAXIMA    0 or 1: whether the mode of any feature is MAX

static const u32 SUM = 0, MEAN = 1, MAX = 2;

// The bags of a feature follow one another, `batch` of each feature; its rows are `dim` columns.
struct Pool {
    u8 *bags;                // [batch][width] of OUT: what the bags come to, or the gradient of that
    const i64 *offsets;      // [all + 1]: where each bag begins among the ids
    const u32 *features;     // [all / batch][2]: first column of each feature, and SUM, MEAN or MAX
    const float *weights;    // [n]: factor of each id, or null where all are 1
    float *share;            // [all]: what an id gets of the gradient of its bag; null out of training
    i32 *chosen;             // [all][dim]: the id that each maximum is of, or -1; null likewise
    float *total;            // [count][dim]: gradient of each record
    const u8 *rows;          // [count][dim] of ROW: the records as they were pooled
    float *of_weights;       // [n]: gradient of the weights
    u32 all, batch, dim, width;
    u32 start;               // first byte of the field within a record
};

template <class Type, u32 ALIGNED = VECTOR>
struct alignas(sizeof(Type) * ALIGNED < 16 ? sizeof(Type) * ALIGNED : 16) Pack {
    Type at[VECTOR];
};
using Pooled = Pack<OUT, COLUMNS>;

// Threads that share a bag, or an id, as a power of two: one for each pack of a row, at most a warp.
__device__ u32 shift_for(u32 packs) {
    u32 shift = 5;
    while (shift && 1u << (shift - 1) >= packs) --shift;
    return shift;
}

// Where the columns of a bag begin in `bags`.
__device__ u64 place_of(const Pool &pool, u32 bag) {
    return (u64)(bag % pool.batch) * pool.width + pool.features[bag / pool.batch * 2];
}

__device__ u32 mode_of(const Pool &pool, u32 bag) { return pool.features[bag / pool.batch * 2 + 1]; }

// An offset that is among the ids, whatever was given.
__device__ i64 offset(const Rows &rows, const Pool &pool, u32 bag) {
    const i64 found = pool.offsets[bag];
    return found < 0 ? 0 : found < rows.n ? found : rows.n;
}

// The bag of an id, or -1.
__device__ i64 bag_of(const Pool &pool, i64 id) {
    if (id < pool.offsets[0] || id >= pool.offsets[pool.all]) return -1;
    u32 first = 0, behind = pool.all;
    while (behind - first > 1) {
        const u32 middle = first + (behind - first) / 2;
        (pool.offsets[middle] <= id ? first : behind) = middle;
    }
    return first;
}

__device__ bool is_maximum(const Pool &pool, u32 bag) { return MAXIMA && mode_of(pool, bag) == MAX; }

static constexpr u32 TOGETHER = 4;

// Where the fields of some ids of a bag are, null after its end and for ids without a row.
__device__ void find(const Rows &rows, const Pool &pool, i64 id, i64 end, const u8 *(&field)[TOGETHER]) {
    i32 position[TOGETHER];
#pragma unroll
    for (u32 k = 0; k < TOGETHER; ++k) position[k] = id + k < end ? rows.positions[id + k] : -1;
#pragma unroll
    for (u32 k = 0; k < TOGETHER; ++k)
        field[k] = position[k] < 0 ? nullptr : (const u8 *)rows.records[position[k]] + pool.start;
}

// Threads look for the next rows of a bag while some are on their way.
extern "C" __global__ void tierstore_pool(const Rows rows, const Pool pool) {
    const u32 packs = pool.dim / VECTOR, shift = shift_for(packs), lanes = 1u << shift;
    const u32 first = threadIdx.x & (lanes - 1);
    for (u64 i = wide_thread() >> shift; i < pool.all; i += wide_threads() >> shift) {
        const u32 bag = (u32)i;
        const bool maximum = is_maximum(pool, bag);
        const i64 begin = offset(rows, pool, bag), end = offset(rows, pool, bag + 1);
        Pooled *const out = (Pooled *)((OUT *)pool.bags + place_of(pool, bag));
        for (u32 pack = first; pack < packs; pack += lanes) {
            float sum[VECTOR] = {};
            i32 chosen[VECTOR];
            u32 counted = 0;
            const u8 *field[TOGETHER], *next[TOGETHER];
            for (u32 e = 0; e < VECTOR; ++e) chosen[e] = -1;
            find(rows, pool, begin, end, field);
            for (i64 id = begin; id < end; id += TOGETHER) {
                Pack<ROW> part[TOGETHER];
#pragma unroll
                for (u32 k = 0; k < TOGETHER; ++k)
                    if (field[k]) part[k] = ((const Pack<ROW> *)field[k])[pack];
                find(rows, pool, id + TOGETHER, end, next);
#pragma unroll
                for (u32 k = 0; k < TOGETHER; ++k) {
                    if (!field[k]) continue;
                    const float weight = pool.weights ? pool.weights[id + k] : 1;
                    ++counted;
                    for (u32 e = 0; e < VECTOR; ++e) {
                        const float x = value(part[k].at[e]);
                        if (!maximum) {
                            sum[e] += weight * x;
                        } else if (chosen[e] < 0 || x > sum[e]) {
                            sum[e] = x;
                            chosen[e] = (i32)(id + k);
                        }
                    }
                }
#pragma unroll
                for (u32 k = 0; k < TOGETHER; ++k) field[k] = next[k];
            }
            const bool divided = counted && mode_of(pool, bag) == MEAN;
            Pooled result;
            for (u32 e = 0; e < VECTOR; ++e) set(result.at[e], divided ? sum[e] / counted : sum[e]);
            out[pack] = result;
            if (pool.share && pack == 0) pool.share[bag] = divided ? 1.0f / counted : 1;
            if (maximum && pool.chosen)
                for (u32 e = 0; e < VECTOR; ++e)
                    pool.chosen[(u64)bag * pool.dim + pack * VECTOR + e] = chosen[e];
        }
    }
}

// A warp takes 32 ids at a time and adds up what goes to the same row by itself, as in sum.cu.
extern "C" __global__ void tierstore_scatter(const Rows rows, const Pool pool) {
    __shared__ u64 place_in[256];
    __shared__ float share_in[256];
    __shared__ i32 maximum_in[256];      // the bag of each id where it is a maximum, or -1
    const u32 warp = threadIdx.x & ~31u;
    u64 *const place = place_in + warp;
    float *const share = share_in + warp;
    i32 *const maximum = maximum_in + warp;
    const u32 packs = pool.dim / VECTOR, shift = shift_for(packs), lanes = 1u << shift;
    const u32 first = threadIdx.x & (lanes - 1);
    for (i64 base = (i64)(wide_thread() >> 5) * 32; base < rows.n; base += (i64)wide_threads()) {
        const i64 own = base + lane();
        i32 mine = own < rows.n ? rows.positions[own] : -1;
        const i64 bag = mine < 0 ? -1 : bag_of(pool, own);
        __syncwarp();
        if (bag < 0) {
            mine = -1;
        } else {
            place[lane()] = place_of(pool, (u32)bag);
            share[lane()] = pool.share[bag] * (pool.weights ? pool.weights[own] : 1);
            maximum[lane()] = is_maximum(pool, (u32)bag) ? (i32)bag : -1;
        }
        __syncwarp();
        const u32 same = __match_any_sync(0xffffffffu, mine);
        for (u32 k = 0; k < 32; k += 32 >> shift) {
            const u32 id = k + (lane() >> shift);
            const i32 row = __shfl_sync(0xffffffffu, mine, id);
            const u32 ids = __shfl_sync(0xffffffffu, same, id);
            if (row < 0 || __ffs(ids) - 1 != id) continue;
            for (u32 pack = first; pack < packs; pack += lanes) {
                float sum[VECTOR] = {};
                bool changes = false;
                for (u32 left = ids; left; left &= left - 1) {
                    const u32 other = __ffs(left) - 1;
                    const i32 bag_of_maximum = MAXIMA ? maximum[other] : -1;
                    const i32 *const chosen =
                        pool.chosen + (u64)bag_of_maximum * pool.dim + pack * VECTOR;
                    const Pooled part = ((const Pooled *)((const OUT *)pool.bags + place[other]))[pack];
                    for (u32 e = 0; e < VECTOR; ++e) {
                        if (bag_of_maximum >= 0 && chosen[e] != base + other) continue;
                        sum[e] += share[other] * value(part.at[e]);
                        changes = true;
                    }
                }
                if (changes) accumulate(pool.total + (u64)row * pool.dim + pack * VECTOR, sum);
            }
        }
    }
}

// The gradient of each weight: the row of its id times the gradient of its bag.
extern "C" __global__ void tierstore_weigh(const Rows rows, const Pool pool) {
    const u32 packs = pool.dim / VECTOR, shift = shift_for(packs), lanes = 1u << shift;
    const u32 first = threadIdx.x & (lanes - 1);
    const u32 together = 32 >> shift;
    const i64 ids = (i64)(wide_threads() >> 5) * together;
    for (i64 base = (i64)(wide_thread() >> 5) * together; base < rows.n; base += ids) {
        const i64 id = base + (lane() >> shift);
        const i32 position = id < rows.n ? rows.positions[id] : -1;
        const i64 bag = position < 0 ? -1 : bag_of(pool, id);
        float sum = 0;
        if (bag >= 0) {
            const OUT *const own = (const OUT *)pool.bags + place_of(pool, (u32)bag);
            const Pack<ROW> *const row = (const Pack<ROW> *)pool.rows + (u64)position * packs;
            for (u32 pack = first; pack < packs; pack += lanes) {
                const Pack<ROW> x = row[pack];
                const Pooled g = ((const Pooled *)own)[pack];
                for (u32 e = 0; e < VECTOR; ++e) sum += value(x.at[e]) * value(g.at[e]);
            }
            sum *= pool.share[bag];
        }
        for (u32 d = lanes / 2; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
        if (id < rows.n && first == 0) pool.of_weights[id] = sum;
    }
}
