// Bags of rows, pooled where the records are: no row is written out for an id, in either direction.
//
// What must move for n ids in `all` bags, s bytes a stored element and o bytes one that comes out:
//   pool      n (4 + 8 + dim s) + all (8 + dim o); rows that repeat come from the caches
//   scatter   n 4 + d 2 dim 4 + all (8 + dim o), where d ids are the first of their row in a tile, a
//             third of all with the skew of Criteo's data; most of the sums stay in the L2 cache
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
    float *share;            // [all]: what an id gets of the gradient of its bag; null where that is
                             // all of it, and out of training
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

// The last of the bags from `first` that begins at an id or before it, or `first`.
__device__ u32 bag_from(const Pool &pool, i64 id, u32 first, u32 behind) {
    while (behind - first > 1) {
        const u32 middle = first + (behind - first) / 2;
        (pool.offsets[middle] <= id ? first : behind) = middle;
    }
    return first;
}

__device__ bool in_bag(const Pool &pool, i64 id) {
    return id >= pool.offsets[0] && id < pool.offsets[pool.all];
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

static constexpr u32 THREADS = 256;       // a block
static constexpr u32 TILE = 4 * THREADS;  // ids, at most, that a block takes at a time
static constexpr u32 GROUPS = 2 * TILE;   // of the ids of one row: a hash table
static constexpr u32 RANK = 16;           // first bit, of a group, of the number of its ids

// Neighbouring ids, what each adds to its row, and the order that puts those of one row together.
struct Tile {
    i64 base;            // the first id
    u32 size;
    u32 edge[2];         // bags of the first and the last id
    i32 row[TILE];       // -1 for ids without a row or a bag
    u64 place[TILE];     // where the columns of its bag begin
    float share[TILE];   // of the gradient there
    i32 maximum[MAXIMA ? TILE : 1];  // the bag where it is a maximum, or -1
    u32 groups[GROUPS];  // 1 + the first id of the group, and from RANK on how many it has; then the
                         // place in `order` of the first
    u16 order[TILE];
};

__device__ void begin(Tile &tile, const Rows &rows, const Pool &pool) {
    for (u32 k = threadIdx.x; k < GROUPS; k += THREADS) tile.groups[k] = 0;
    if (threadIdx.x < 2)
        tile.edge[threadIdx.x] = bag_from(pool, tile.base + threadIdx.x * (tile.size - 1), 0, pool.all);
    __syncthreads();
    for (u32 k = threadIdx.x; k < tile.size; k += THREADS) {
        const i64 id = tile.base + k;
        tile.row[k] = in_bag(pool, id) ? rows.positions[id] : -1;
        if (tile.row[k] < 0) continue;
        const u32 bag = bag_from(pool, id, tile.edge[0], tile.edge[1] + 1);
        tile.place[k] = place_of(pool, bag);
        tile.share[k] = (pool.share ? pool.share[bag] : 1) * (pool.weights ? pool.weights[id] : 1);
        if (MAXIMA) tile.maximum[k] = is_maximum(pool, bag) ? (i32)bag : -1;
    }
    __syncthreads();
}

// Enter an id into the group of its row; return how many came before it.
__device__ u32 enter(Tile &tile, u32 k, u32 &group) {
    const i32 row = tile.row[k];
    group = (u32)row * 0x9e3779b9u >> 16;
    for (;; ++group) {
        group %= GROUPS;
        const u32 first = atomicCAS(tile.groups + group, 0u, k + 1) & ((1u << RANK) - 1);
        if (!first || tile.row[first - 1] == row)
            return atomicAdd(tile.groups + group, 1u << RANK) >> RANK;
    }
}

// Give each group its place in `order`; return the number of all ids in groups.
__device__ u32 place_groups(Tile &tile) {
    __shared__ u32 totals[THREADS / 32];
    constexpr u32 EACH = GROUPS / THREADS;
    u32 *const own = tile.groups + threadIdx.x * EACH;
    u32 mine = 0, all = 0;
    for (u32 k = 0; k < EACH; ++k) {
        const u32 count = own[k] >> RANK;
        own[k] = mine;
        mine += count;
    }
    u32 through = mine;
    for (u32 d = 1; d < 32; d <<= 1) {
        const u32 left = __shfl_up_sync(0xffffffffu, through, d);
        if (lane() >= d) through += left;
    }
    if (lane() == 31) totals[threadIdx.x >> 5] = through;
    __syncthreads();
    u32 before = through - mine;
    for (u32 warp = 0; warp < THREADS / 32; ++warp) {
        if (warp < threadIdx.x >> 5) before += totals[warp];
        all += totals[warp];
    }
    for (u32 k = 0; k < EACH; ++k) own[k] += before;
    __syncthreads();
    return all;
}

// Fill `order`, for the ids of a row in no particular one; return how many there are.
__device__ u32 put_in_order(Tile &tile) {
    u32 group[TILE / THREADS], rank[TILE / THREADS];
#pragma unroll
    for (u32 i = 0; i < TILE / THREADS; ++i) {
        const u32 k = i * THREADS + threadIdx.x;
        rank[i] = k < tile.size && tile.row[k] >= 0 ? enter(tile, k, group[i]) : TILE;
    }
    __syncthreads();
    const u32 all = place_groups(tile);
#pragma unroll
    for (u32 i = 0; i < TILE / THREADS; ++i)
        if (rank[i] < TILE) tile.order[tile.groups[group[i]] + rank[i]] = (u16)(i * THREADS + threadIdx.x);
    __syncthreads();
    return all;
}

// Add up a pack of ids [k, end) in order, and to the total of their row where another follows.
__device__ void add_up(const Tile &tile, const Pool &pool, u32 pack, u32 k, u32 end) {
    float sum[VECTOR] = {};
    i32 row = -1;
    bool changes = false;
    for (; k < end; k += TOGETHER) {
        u32 id[TOGETHER];
        Pooled part[TOGETHER];
#pragma unroll
        for (u32 i = 0; i < TOGETHER; ++i) {
            if (k + i >= end) continue;
            id[i] = tile.order[k + i];
            part[i] = ((const Pooled *)((const OUT *)pool.bags + tile.place[id[i]]))[pack];
        }
#pragma unroll
        for (u32 i = 0; i < TOGETHER; ++i) {
            if (k + i >= end) continue;
            if (tile.row[id[i]] != row) {
                if (changes) accumulate(pool.total + (u64)row * pool.dim + pack * VECTOR, sum);
                row = tile.row[id[i]];
                changes = false;
                for (u32 e = 0; e < VECTOR; ++e) sum[e] = 0;
            }
            const i32 bag = MAXIMA ? tile.maximum[id[i]] : -1;
            const i32 *const chosen = pool.chosen + (u64)bag * pool.dim + pack * VECTOR;
            for (u32 e = 0; e < VECTOR; ++e) {
                if (bag >= 0 && chosen[e] != tile.base + id[i]) continue;
                sum[e] += tile.share[id[i]] * value(part[i].at[e]);
                changes = true;
            }
        }
    }
    if (changes) accumulate(pool.total + (u64)row * pool.dim + pack * VECTOR, sum);
}

// A block takes a tile of ids at a time; its teams add up equally many each. Otherwise the L2 cache would
// add to a row's total for nearly every id, and additions to the most frequent rows wait for one another.
extern "C" __global__ void tierstore_scatter(const Rows rows, const Pool pool) {
    __shared__ Tile tile;
    const u32 packs = pool.dim / VECTOR, shift = shift_for(packs), lanes = 1u << shift;
    const i64 fair = (rows.n + gridDim.x - 1) / gridDim.x;
    const u32 most = fair < TILE ? (u32)fair : TILE;
    for (i64 base = (i64)blockIdx.x * most; base < rows.n; base += (i64)gridDim.x * most) {
        if (threadIdx.x == 0) {
            tile.base = base;
            tile.size = rows.n - base < most ? (u32)(rows.n - base) : most;
        }
        __syncthreads();
        begin(tile, rows, pool);
        const u32 all = put_in_order(tile);
        const u32 teams = THREADS >> shift, each = (all + teams - 1) / teams;
        const u32 first = (threadIdx.x >> shift) * each;
        const u32 end = first + each < all ? first + each : all;
        for (u32 pack = threadIdx.x & (lanes - 1); pack < packs; pack += lanes)
            add_up(tile, pool, pack, first, end);
        __syncthreads();
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
        float sum = 0;
        if (position >= 0 && in_bag(pool, id)) {
            const u32 bag = bag_from(pool, id, 0, pool.all);
            const OUT *const own = (const OUT *)pool.bags + place_of(pool, bag);
            const Pack<ROW> *const row = (const Pack<ROW> *)pool.rows + (u64)position * packs;
            for (u32 pack = first; pack < packs; pack += lanes) {
                const Pack<ROW> x = row[pack];
                const Pooled g = ((const Pooled *)own)[pack];
                for (u32 e = 0; e < VECTOR; ++e) sum += value(x.at[e]) * value(g.at[e]);
            }
            if (pool.share) sum *= pool.share[bag];
        }
        for (u32 d = lanes / 2; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
        if (id < rows.n && first == 0) pool.of_weights[id] = sum;
    }
}
