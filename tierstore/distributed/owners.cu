// The distinct ids of a batch by the ranks that own them, and the rows of ids on their owner.
//
// An id of a table has a number, unlike those of all other tables. A table of hashes finds the
// distinct ones: `ask` counts those of each owner, `tell` makes a message of that for each rank, and
// `place` puts every number after the others of its owner. Counts and keys are zero before.
// `arrive` turns the numbers that come from the ranks into rows, and `expand` has a row for each id.

// Where rows are; see partitioning.py.
struct Places {
    const i64 *start;        // of each feature: the first number of its table
    const i64 *rows;         // of each feature: how many rows the table has
    const i64 *end;          // of each table: the number after its last
    const i64 *first_row;    // of each table: where its rows start on this rank
    i64 partitions;          // of a table
    i64 ranks;
    i64 first, count;        // the partitions of this rank
    u32 features, tables;
    u32 shift;               // if not 0, ids have their owner above so many bits, and their row below
    u32 narrow;              // whether numbers are sent as i32, else as i64
};

// The ids of all features, one feature after another, or numbers that came.
struct Asked {
    const i64 *ids;          // [n]
    const i64 *end;          // of each feature: the position after its last id
    i64 n;
    u64 *keys;               // [mask + 1]: a number + 1, or 0
    u64 *found;              // [mask + 1]: the owner of the number << 32 | which of the owner's it is
    u64 mask;
    u32 *counts;             // [ranks + 1]: distinct ids of each owner, and whether an id is of no row
    const i64 *told;         // [width - 2]: what every rank is told besides
    i64 *message;            // [ranks][width]: for each rank its count, whether ids failed, and that
    i32 *positions;          // [n]: the place of each id among the rows
    void *numbers;           // distinct ones by owner; those that came, [n]
    i64 *arrived;            // [n]: the row of each of these
    i64 width;               // words of a message, or units of a row
    const uint4 *rows;       // those that came, [][width]
    uint4 *expanded;         // the row of each id, [n][width]
};

// As `mix` in partitioning.py.
__device__ u64 mixed(u64 block) {
    u64 x = block * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 32)) * 0xbf58476d1ce4e5b9ull;
    return x >> 33;
}

// The first of some whose end is after `at`.
__device__ u32 holder(const i64 *end, u32 count, i64 at) {
    u32 low = 0, last = count - 1;
    while (low < last) {
        const u32 middle = (low + last) / 2;
        if (end[middle] > at) last = middle;
        else low = middle + 1;
    }
    return low;
}

__device__ u32 owner_of(const Places &places, u64 id) {
    if (places.shift) return (u32)(id >> places.shift);
    const u64 partitions = (u64)places.partitions;
    return (u32)((id + mixed(id / partitions)) % partitions * (u64)places.ranks / partitions);
}

// A warp takes 32 ids at a time, so that one thread counts for all that meet an owner.
extern "C" __global__ void tierstore_ask(const Places places, const Asked asked) {
    const u32 lane = threadIdx.x & 31;
    for (i64 base = (i64)wide_thread() - lane; base < asked.n; base += (i64)wide_threads()) {
        const i64 i = base + lane;
        bool is_new = false;
        u32 owner = 0;
        u64 at = 0;
        if (i < asked.n) {
            const u32 feature = holder(asked.end, places.features, i);
            const i64 id = asked.ids[i];
            if ((u64)id >= (u64)places.rows[feature]) {
                asked.counts[places.ranks] = 1;
                asked.positions[i] = -1;
            } else {
                const u64 key = (u64)(places.start[feature] + id) + 1;
                at = mixed(key) & asked.mask;
                for (;; at = (at + 1) & asked.mask) {
                    u64 before = *(volatile u64 *)(asked.keys + at);
                    if (before == 0) before = atomicCAS(asked.keys + at, (u64)0, key);
                    is_new = before == 0;
                    if (is_new || before == key) break;
                }
                if (is_new) owner = owner_of(places, (u64)id);
                asked.positions[i] = (i32)at;
            }
        }
        const u32 same = __match_any_sync(0xffffffffu, is_new ? owner : 0xffffffffu);
        const u32 leader = __ffs(same) - 1;
        u32 first = 0;
        if (is_new && lane == leader) first = atomicAdd(asked.counts + owner, (u32)__popc(same));
        first = __shfl_sync(0xffffffffu, first, leader);
        if (is_new) {
            const u32 number = first + __popc(same & ((1u << lane) - 1));
            asked.found[at] = (u64)owner << 32 | number;
        }
    }
}

extern "C" __global__ void tierstore_tell(const Places places, const Asked asked) {
    const i64 all = places.ranks * asked.width;
    for (i64 i = (i64)wide_thread(); i < all; i += (i64)wide_threads()) {
        const i64 rank = i / asked.width, word = i % asked.width;
        asked.message[i] = word == 0   ? (i64)asked.counts[rank]
                           : word == 1 ? (i64)asked.counts[places.ranks]
                                       : asked.told[word - 2];
    }
}

extern "C" __global__ void tierstore_place(const Places places, const Asked asked) {
    u32 known = 0;  // the owner whose first place is known
    i64 first = 0;
    for (u64 i = wide_thread(); i < (u64)asked.n; i += wide_threads()) {
        const i32 at = asked.positions[i];
        if (at < 0) continue;
        const u64 found = asked.found[at];
        const u32 owner = (u32)(found >> 32);
        while (known < owner) first += asked.counts[known++];
        while (known > owner) first -= asked.counts[--known];
        const i64 place = first + (u32)found, number = (i64)asked.keys[at] - 1;
        if (places.narrow) ((i32 *)asked.numbers)[place] = (i32)number;
        else ((i64 *)asked.numbers)[place] = number;
        asked.positions[i] = (i32)place;
    }
}

// A thread a number.
extern "C" __global__ void tierstore_arrive(const Places places, const Asked asked) {
    for (u64 i = wide_thread(); i < (u64)asked.n; i += wide_threads()) {
        const i64 number =
            places.narrow ? (i64)((const i32 *)asked.numbers)[i] : ((const i64 *)asked.numbers)[i];
        const u32 table = holder(places.end, places.tables, number);
        const i64 id = number - (table ? places.end[table - 1] : 0);
        i64 row = id & ((1ll << places.shift) - 1);
        if (!places.shift) {
            const i64 partitions = places.partitions, block = id / partitions;
            const i64 place = id % partitions;
            i64 start = (places.first - (i64)mixed((u64)block)) % partitions;
            if (start < 0) start += partitions;
            const i64 over = start + places.count - partitions, wrapped = over > 0 ? over : 0;
            row = block * places.count + place - (place >= wrapped ? start - wrapped : 0);
        }
        asked.arrived[i] = places.first_row[table] + row;
    }
}

// A warp takes 32 ids at a time; about as many lanes share a row as it has units.
extern "C" __global__ void tierstore_expand(const Places places, const Asked asked) {
    const u32 lane = threadIdx.x & 31, units = (u32)asked.width;
    u32 lanes = 32;
    while (lanes > 1 && lanes / 2 >= units) lanes /= 2;
    const u32 together = 32 / lanes, first = lane % lanes;
    for (i64 base = (i64)wide_thread() - lane; base < asked.n; base += (i64)wide_threads()) {
        const i32 mine = base + lane < asked.n ? asked.positions[base + lane] : -1;
        for (u32 k = 0; k < 32; k += together) {
            const u32 id = k + lane / lanes;
            const i32 row = __shfl_sync(0xffffffffu, mine, id);
            if (row < 0) continue;
            for (u32 unit = first; unit < units; unit += lanes)
                asked.expanded[((u64)base + id) * units + unit] = asked.rows[(u64)row * units + unit];
        }
    }
}
