// The GPU tier: which rows are in its slots, which must leave, and every copy of a record.
//
// A batch is two launches: `probe`, which finds the rows that are there and claims the others, and
// `promote`, which fetches what was claimed over the link, beside that copies what was there, and
// finishes the batch. Neither tells the host anything: counts stay on the device. Where the host tier
// is itself a cache, `promote` stops after what it can do alone; the host supplies the rest through
// staging, and `install` and `complete` end the batch.
//
// The direct map slot_of[row] holds a slot, or ABSENT, or for the length of a batch CLAIMED and then
// FIRST - m for the m-th missed row. Where that pays, missed rows are numbered as they lie in host
// memory, so that neighbours are copied at about the same time; see `put_in_order`. KEPT marks a row
// that a lease uses in host memory itself; it must not be promoted before the lease ends.
//
// Least recently used: stamp[slot] is the number of the batch that used it last. Victims are the
// slots of lowest rank, found by a radix select over all of them. The rank is the stamp, or, where a
// tier goes by scores, the score of the row in the slot: each batch that uses a row adds `on_use` to
// that, which grows from batch to batch (least frequently used) or is 0 (given counts). An empty
// slot has stamp 0 and goes first. Two bits of a stamp pin the slot: HELD while leases use it, AHEAD
// from when a prefetch chose it until it is used, or until the prefetch is `window` prefetches old.
//
// Offsets are 64-bit throughout. No header is included: NVRTC needs no CUDA toolkit.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

static const i32 ABSENT = -1, CLAIMED = -2, FIRST = -3, KEPT = -2147483647 - 1;
static const i32 DEFERRED = -1, OUTSIDE = -2;  // Batch.entry
static const u32 HELD = 0x80000000u, AHEAD = 0x40000000u, NUMBER = 0x3fffffffu;  // of a stamp
static const u32 EVERY_LANE = 0xffffffffu;
static const u64 NO_POSITION = ~0ull;

static const u32 READ = 0, WRITE = 1, LEASE = 2, PREFETCH = 3;  // Batch.mode
static const u32 CLAIMS = 1, WAITS = 2;     // Batch.in_order
static const u32 CERTAIN = 1, LACKING = 2;  // *Batch.verdict

static const u32 THREADS = 256;   // a block, everywhere
static const u32 MOST_ITEMS = 16, MOST_MISSES = 8;  // that a warp copies before it turns to others
static const u32 BINS = 2048;     // of one pass of the radix select, at most
static const u32 PASSES = 3;        // 8, 11 and 11 bits of a number
static const u32 STAMPS = 8;      // that a thread looks at together
static const u32 WINDOW = 64;     // most prefetches whose rows may be pinned
static const u32 REGIONS = 4096;  // of host memory, at most
static const u32 LINK_BLOCKS = 64, LINK_ROWS = 64;  // blocks that use the link at once; rows for each

// What happens between launches stays here. `gate` and all that counts by bins or stretches are zero
// whenever no batch is under way.
struct Counters {
    u64 bad_position;             // of the first id outside the table, in its batch
    i64 bad_row;                  // that id
    u64 missed_ids, missed_rows, evicted_rows, written_rows;  // since the host last looked
    u64 leased_rows, leased_misses;  // distinct rows of leases, and those that were not there
    u32 bad;                      // 1 once bad_row is filled in
    u32 missed, deferred;         // this batch: distinct rows claimed, positions not yet served
    u32 victims, ties;            // slots chosen for them
    u32 distinct;                 // this lease: records enrolled
    u32 absent, evicted;          // this chunk: rows to read from, and write to, the host tier
    u32 filled;                   // slots that are not empty
    u32 done;                     // number of the last prefetch whose rows have arrived
    u32 lacking;                  // this prefetch: positions whose row will have no slot
    u32 gate;                     // grid_barrier
    u32 moves[WINDOW];            // slots that each recent prefetch took
    u32 histogram[PASSES][BINS];
    u32 claims_in[REGIONS], waits_in[REGIONS];    // each stretch; how many there are
    u32 claims_done[REGIONS], waits_done[REGIONS];  // how many of them are in order
};

struct Tier {
    u8 *slots;                    // [capacity][record]
    i32 *slot_of;                 // [rows]
    i64 *row_of;                  // [capacity], -1 = empty
    u32 *stamp, *pins;            // [capacity]
    u32 *arrival;                 // [capacity]: number of the prefetch that filled it, where AHEAD
    u32 *mark;                    // [capacity]: winner of a write, index in a lease; 0 between batches
    u8 *dirty;                    // [capacity]
    u8 *host;                     // the host tier's records, its map and marks
    const i32 *host_slot_of;      // null where the host tier is direct: slot = row
    u8 *host_dirty;
    u32 *host_changed;            // direct: a bit a row, which `report` turns into host_dirty
    Counters *counters;
    const u8 *poison;             // [record] of 0xff: NaN in every float type
    float *score;                 // [rows], of those without a slot, or null: least recently used
    float *key;                   // [capacity]: the score of the row in the slot
    i64 rows, record;
    u32 capacity, direct;
    u32 stretch;                  // 2^stretch rows follow each other in one stretch of host memory
};

struct Batch {
    i64 *ids;                     // [n]
    const i64 *arriving;          // [n]: ids in pinned host memory, which `probe` copies to `ids`, or null
    i64 n;
    u8 *data;                     // [n][bytes]: bytes [lo, lo + bytes) of each record
    i64 lo, bytes;
    // Workspace, n entries each.
    u32 *deferred;                // positions that must wait for a copy
    i64 *missed;                  // claimed rows; ~row where the row is KEPT
    i32 *place;                   // their slots
    u32 *contest;                 // for rows without a slot: what mark is for a slot
    i32 *entry;                   // READ: slot of each position, or DEFERRED, or OUTSIDE
    i64 *leaving;                 // prefetch: dirty row that the slot must first give up, or -1
    // A lease: its distinct records in some order.
    u64 *records;                 // address of each record
    i64 *rows;                    // its row
    i32 *held;                    // its slot, or -1; of a prefetch: slots it keeps for its batch
    i32 *positions;               // [n]: index of each id's record
    u32 *count;                   // their number; of a prefetch: slots to fill, slots it keeps
    u32 *verdict;                 // a prefetch that keeps slots tells the host: CERTAIN or LACKING
    // Staging, in pinned host memory, `limit` entries each; null where the host tier is direct.
    u8 *staged, *evicted;
    i64 *staged_rows, *evicted_rows;
    i32 *staged_place;            // slot that waits for it, or -1 - index among rows without one
    u8 *spill;                    // lease: room for its rows without a slot
    u32 first, limit;             // misses [first, first + limit) are being handled
    u32 width;                    // bytes that one access may move: 16, 8, 4, 2 or 1
    u32 now;                      // number of this batch
    u32 mode, load, last;         // load: records are wanted as they are; last: the final chunk
    u32 in_order;                 // what is put in order: CLAIMS, WAITS or both
    u32 admit;                    // missed rows are promoted, not just read or written where they are
    u32 alone;                    // the device can finish the batch without the host
    u32 arrival;                  // number of this, or the last, prefetch
    u32 expired;                  // number of the last prefetch whose pins have run out
    float on_use;                 // added, once, to the score of each row it uses
    float on_arrival;             // the score of a row that takes a slot; 0: the one it has
    float rescale;                // what `rescale` multiplies all scores by
};

// ---------------------------------------------------------------------------------- a warp, a grid

// The warps of some neighbouring blocks, and the caller's number among them.
struct Team {
    u32 warp, warps;
};

__device__ u32 lane() { return threadIdx.x & 31; }
__device__ u32 thread() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ u32 threads() { return gridDim.x * blockDim.x; }

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

// Give every lane that asks an index of its own, counting on from *count.
__device__ u32 append(u32 *count, bool asks) {
    const u32 asking = __ballot_sync(EVERY_LANE, asks);
    if (asking == 0) return 0;
    const u32 leader = __ffs(asking) - 1;
    u32 first = 0;
    if (lane() == leader) first = atomicAdd(count, (u32)__popc(asking));
    first = __shfl_sync(EVERY_LANE, first, leader);
    return first + __popc(asking & ((1u << lane()) - 1));
}

// The same for all threads of a block together, which takes one atomic operation.
__device__ u32 block_append(u32 *count, bool asks) {
    __shared__ u32 firsts[THREADS / 32];
    const u32 asking = __ballot_sync(EVERY_LANE, asks), warp = threadIdx.x >> 5;
    if (lane() == 0) firsts[warp] = __popc(asking);
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 all = 0;
        for (u32 w = 0; w < THREADS / 32; ++w) all += firsts[w];
        u32 first = all ? atomicAdd(count, all) : 0;
        for (u32 w = 0; w < THREADS / 32; ++w) {
            const u32 here = firsts[w];
            firsts[w] = first;
            first += here;
        }
    }
    __syncthreads();
    const u32 index = firsts[warp] + __popc(asking & ((1u << lane()) - 1));
    __syncthreads();
    return index;
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

// How many of n items a warp takes at a time: enough to keep its copies long, but few enough for every
// warp to get some, and so that all get about as many.
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

// ------------------------------------------------------------------------------------------ copies

// Copy `span` pieces of `units` Units each; lane j holds the ends of piece j, 0 where there is none.
// The warp runs through all units of all pieces in a row, so every lane has work at any size.
template <class Unit>
__device__ void copy_units(u64 from, u64 to, u32 span, u32 units) {
    const u32 UNROLL = 4;
    const u32 pieces_on = 32 / units, units_on = 32 % units;
    const u32 steps = (span * units + 31) / 32;
    u32 piece = lane() / units, unit = lane() % units;
    for (u32 step = 0; step < steps; step += UNROLL) {
        Unit value[UNROLL];
        u64 target[UNROLL];
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k) {
            const u64 source = __shfl_sync(EVERY_LANE, from, piece & 31);
            target[k] = __shfl_sync(EVERY_LANE, to, piece & 31);
            if (piece >= span || source == 0) target[k] = 0;
            if (target[k]) {
                value[k] = *(const Unit *)(source + (u64)unit * sizeof(Unit));
                target[k] += (u64)unit * sizeof(Unit);
            }
            piece += pieces_on;
            unit += units_on;
            if (unit >= units) { unit -= units; ++piece; }
        }
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k)
            if (target[k]) *(Unit *)target[k] = value[k];
    }
}

__device__ void copy(u64 from, u64 to, u32 span, u64 bytes, u32 width) {
    if (__ballot_sync(EVERY_LANE, from != 0 && to != 0) == 0) return;
    const u32 units = (u32)(bytes / width);
    switch (width) {
        case 16: copy_units<uint4>(from, to, span, units); break;
        case 8: copy_units<uint2>(from, to, span, units); break;
        case 4: copy_units<u32>(from, to, span, units); break;
        case 2: copy_units<u16>(from, to, span, units); break;
        default: copy_units<u8>(from, to, span, units);
    }
}

// -------------------------------------------------------------------------------- where a record is

__device__ u64 slot_address(const Tier &t, i64 slot) { return (u64)(t.slots + slot * t.record); }
__device__ u64 host_address(const Tier &t, i64 slot) { return (u64)(t.host + slot * t.record); }
__device__ i64 host_slot(const Tier &t, i64 row) { return t.direct ? row : t.host_slot_of[row]; }

// Note that a record in host memory has changed. A direct host tier looks at its marks only after a
// report; a byte sent over the link for each record would take as long as a tenth of the record.
__device__ void mark_host(const Tier &t, i64 slot) {
    if (t.direct) atomicOr(t.host_changed + (slot >> 5), 1u << (slot & 31));
    else t.host_dirty[slot] = 1;
}

// Address of the record of a row by its entry in the map, once its miss has been handled; 0 where
// that happens in another chunk. `contest` gets the word that decides between writers.
__device__ u64 locate(const Tier &t, const Batch &b, i64 row, i32 entry, u32 **contest) {
    if (entry >= 0) {
        *contest = t.mark + entry;
        return b.last ? slot_address(t, entry) : 0;
    }
    const u32 m = (u32)(FIRST - entry);
    *contest = b.contest + m;
    if (m < b.first || m - b.first >= b.limit) return 0;
    return t.direct ? host_address(t, row) : (u64)(b.staged + (i64)(-1 - b.place[m]) * t.record);
}

// Whether the slot's record is there, not still on its way.
__device__ bool arrived(const Tier &t, i32 slot, u32 stamp, u32 done) {
    return !(stamp & AHEAD) || (i32)(t.arrival[slot] - done) <= 0;
}

// Note that this batch uses the slot, which ends the pin of a prefetch; `keeping` some bits.
__device__ void touch(const Tier &t, const Batch &b, i32 slot, u32 stamp, u32 keeping) {
    const u32 stamped = b.now | (stamp & keeping);
    if (stamp == stamped) return;
    if (b.on_use == 0) t.stamp[slot] = stamped;
    else if ((atomicExch(t.stamp + slot, stamped) & NUMBER) != b.now) t.key[slot] += b.on_use;
}

// Give the slot of an old row, or -1, to another.
__device__ void change_row(const Tier &t, const Batch &b, i32 slot, i64 old, i64 row) {
    if (t.score) {
        if (old >= 0) t.score[old] = t.key[slot];
        t.key[slot] = b.on_arrival != 0 ? b.on_arrival
                                        : t.score[row] + (b.mode == LEASE ? 0 : b.on_use);  // `hold` adds it
    }
    if (old >= 0) t.slot_of[old] = ABSENT;
    t.row_of[slot] = row;
}

// Touch and hold, `keeping` some bits; true for exactly one of all that do so in a batch.
__device__ bool touch_first(const Tier &t, i32 slot, u32 stamp, u32 now, u32 keeping) {
    const u32 stamped = now | HELD | (stamp & keeping);
    return (stamp & NUMBER) != now && (atomicExch(t.stamp + slot, stamped) & NUMBER) != now;
}

// Writers of one record: the last position wins.
__device__ void compete(u32 *contest, u32 position) {
    if (*(volatile u32 *)contest < position + 1) atomicMax(contest, position + 1);
}

// Pin the slot of a record until the batch is released; returns the record's index.
__device__ u32 hold(const Tier &t, const Batch &b, bool mine, i32 slot) {
    const u32 k = append(&t.counters->distinct, mine);
    if (mine) b.held[k] = slot;
    if (mine && slot >= 0) {
        ++t.pins[slot];
        if (b.on_use != 0) t.key[slot] += b.on_use;
    }
    return k;
}

// Take up a record in the lease and pin its slot; *mark becomes its index + 1.
__device__ void enrol(const Tier &t, const Batch &b, bool mine, i64 row, i32 slot, u64 address,
                      u32 *mark) {
    const u32 k = hold(t, b, mine, slot);
    if (!mine) return;
    b.records[k] = address;
    b.rows[k] = row;
    *mark = k + 1;
}

// ------------------------------------------------------------------------------------------- probe

// Before they are in order, positions that wait, and positions that claimed a row, or ~position where
// it is KEPT, are where nothing else is at the time: victims come when both are in order.
__device__ u32 *listed_waits(const Batch &b) { return (u32 *)b.place; }
__device__ i32 *listed_claims(const Batch &b) {
    return b.in_order & WAITS ? (i32 *)b.deferred : b.place;
}

// Find each id's row, an id a lane. READ notes its slot; WRITE lets the positions compete for it; LEASE
// enrols each record once. What is not there is claimed, by one of those that ask, and deferred.
extern "C" __global__ void tierstore_probe(const Tier t, const Batch b) {
    Counters *const c = t.counters;
    const u32 done = *(volatile u32 *)&c->done;
    __threadfence();
    const i64 position = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const bool mine = position < b.n;
    const i64 row = !mine ? 0 : b.arriving ? b.arriving[position] : b.ids[position];
    if (mine && b.arriving) b.ids[position] = row;
    const bool outside = (u64)row >= (u64)t.rows;
    i32 slot = ABSENT;
    bool waits = false, claims = false, holds = false, kept = false, lacks = false;
    if (outside) {
        if (!c->bad) atomicMin(&c->bad_position, (u64)position);
    } else if (mine) {
        slot = t.slot_of[row];
        const u32 stamp = slot >= 0 ? t.stamp[slot] : 0;
        if (slot >= 0 && (b.mode == PREFETCH || arrived(t, slot, stamp, done))) {
            const u32 keeping = b.mode == PREFETCH ? AHEAD : 0;
            if (b.held) holds = touch_first(t, slot, stamp, b.now, keeping);
            else touch(t, b, slot, stamp, HELD | keeping);
            if (b.mode == WRITE) compete(t.mark + slot, (u32)position);
        } else if (b.mode == PREFETCH) {
            const bool near = slot != ABSENT || host_slot(t, row) >= 0;
            lacks = !near || slot == KEPT;
            claims = slot == ABSENT && near &&
                     atomicCAS(t.slot_of + row, ABSENT, CLAIMED) == ABSENT;
        } else {
            waits = true;
            kept = slot == KEPT;
            claims = (kept || slot == ABSENT) && atomicCAS(t.slot_of + row, slot, CLAIMED) == slot;
        }
    }
    const u32 d = block_append(&c->deferred, waits);
    if (waits) {
        (b.in_order & WAITS ? listed_waits(b) : b.deferred)[d] = (u32)position;
        if (b.in_order & WAITS) atomicAdd(c->waits_in + (row >> t.stretch), 1u);
    }
    const u32 m = block_append(&c->missed, claims);
    if (claims) {
        if (b.in_order & CLAIMS) {
            listed_claims(b)[m] = kept ? ~(i32)position : (i32)position;
            atomicAdd(c->claims_in + (row >> t.stretch), 1u);
        } else {
            b.missed[m] = kept ? ~row : row;
            t.slot_of[row] = FIRST - (i32)m;
        }
        if (b.mode == WRITE || b.mode == LEASE) b.contest[m] = 0;
    }
    if (b.mode == READ && mine) b.entry[position] = outside ? OUTSIDE : waits ? DEFERRED : slot;
    if (b.mode == LEASE) enrol(t, b, holds, row, slot, slot_address(t, slot), t.mark + slot);
    else if (b.held) hold(t, b, holds, slot);
    if (b.mode == PREFETCH) append(&c->lacking, lacks);
}

// Copy the rows of a READ that were there.
__device__ void serve_hits(const Tier &t, const Batch &b, Team team) {
    const u32 span = span_for(team, b.n);
    for (i64 base = (i64)team.warp * span; base < b.n; base += (i64)team.warps * span) {
        const i64 position = base + lane();
        u64 source = 0, target = 0;
        if (lane() < span && position < b.n) {
            const i32 entry = b.entry[position];
            if (entry >= 0) source = slot_address(t, entry) + b.lo;
            else if (entry == OUTSIDE) source = (u64)t.poison;
            target = (u64)(b.data + position * b.bytes);
        }
        copy(source, target, span, b.bytes, b.width);
    }
}

// ------------------------------------------------------------------------------------------- order

// first[s] = how many items lie in the stretches before s. Every block does this for itself.
__device__ void begin_stretches(const u32 *items_in, u32 *first) {
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

// Number the claimed rows, and list the waiting positions, stretch by stretch of host memory, so that
// copies which run side by side need few translations of addresses; see ordering.py. A counting sort.
__device__ void put_in_order(const Tier &t, const Batch &b, u32 missed, u32 deferred) {
    __shared__ u32 first[REGIONS];
    Counters *const c = t.counters;
    if (b.in_order & CLAIMS) {
        if (blockIdx.x * blockDim.x < missed) begin_stretches(c->claims_in, first);
        for (u32 i = thread(); i < missed; i += threads()) {
            const i32 claim = listed_claims(b)[i];
            const i64 row = b.ids[claim < 0 ? ~claim : claim], s = row >> t.stretch;
            const u32 m = first[s] + atomicAdd(c->claims_done + s, 1u);
            b.missed[m] = claim < 0 ? ~row : row;
            t.slot_of[row] = FIRST - (i32)m;
        }
        grid_barrier(&c->gate);
    }
    if (b.in_order & WAITS) {
        if (blockIdx.x * blockDim.x < deferred) begin_stretches(c->waits_in, first);
        for (u32 i = thread(); i < deferred; i += threads()) {
            const u32 position = listed_waits(b)[i];
            const i64 s = b.ids[position] >> t.stretch;
            b.deferred[first[s] + atomicAdd(c->waits_done + s, 1u)] = position;
        }
        grid_barrier(&c->gate);
    }
}

// ----------------------------------------------------------------------------------------- victims

__device__ bool evictable(const Tier &t, const Batch &b, u64 slot, u32 stamp) {
    if ((stamp & HELD) || (stamp & NUMBER) == b.now) return false;
    return !(stamp & AHEAD) || (i32)(t.arrival[slot] - b.expired) <= 0;
}

// Load the words of neighbouring slots; what lies behind the last slot is `otherwise`.
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

// Load the stamps and ranks of neighbouring slots; those behind the last one count as pinned. The
// bits of floats that are not negative have their order; half of them fit beside the pins.
template <bool WORTH>
__device__ void load_slots(const Tier &t, u64 first, u32 *stamp, u32 *rank) {
    load_words(t, t.stamp, first, HELD, stamp);
    if (WORTH) load_words(t, (const u32 *)t.key, first, 0, rank);
#pragma unroll
    for (u32 i = 0; i < STAMPS; ++i) {
        const u32 number = stamp[i] & NUMBER;
        rank[i] = !WORTH ? number : number ? (rank[i] >> 1) + 1 : 0;
    }
}

// Count the evictable slots by the bits of their rank at `shift`, among those that agree with
// `prefix` above. Neighbouring slots often fall together, so each thread adds up runs.
template <bool WORTH>
__device__ void count_ranks(const Tier &t, const Batch &b, u32 prefix, u32 above, u32 shift,
                            u32 bins, u32 *histogram) {
    __shared__ u32 local[BINS];
    for (u32 i = threadIdx.x; i < bins; i += blockDim.x) local[i] = 0;
    __syncthreads();
    u32 run_bin = 0, run = 0;
    for (u64 first = (u64)thread() * STAMPS; first < t.capacity; first += (u64)threads() * STAMPS) {
        u32 stamp[STAMPS], rank[STAMPS];
        load_slots<WORTH>(t, first, stamp, rank);
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

// Find the bin that holds the wanted-th item: result = {bin, items below it}. Clips *wanted to what
// there is. Every block does this for itself.
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
template <bool WORTH>
__device__ void select_victims(const Tier &t, const Batch &b, u32 wanted) {
    __shared__ u32 picked[2];
    Counters *const c = t.counters;
    u32 prefix = 0, above = 0, shift = 30;
    for (u32 pass = 0; pass < PASSES; ++pass) {
        const u32 bits = pass == 0 ? 8 : 11, bins = 1u << bits;
        shift -= bits;
        above |= (bins - 1) << shift;
        if (!WORTH && b.now >> shift == 0) continue;
        u32 *const histogram = c->histogram[pass];
        count_ranks<WORTH>(t, b, prefix, above & ~((bins - 1) << shift), shift, bins, histogram);
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
        load_slots<WORTH>(t, first, stamp, rank);
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

// -------------------------------------------------------------------------------------------- swap

// Give the misses of this chunk their slots: write back what was dirty there, load what was missed,
// mend the maps. What only the host can do goes on its lists.
__device__ void swap_records(const Tier &t, const Batch &b, Team team) {
    Counters *const c = t.counters;
    // Rows without a slot stay where a direct host tier has them; only a lease takes note of them.
    const u32 victims = c->victims, all = t.direct && b.mode != LEASE ? victims : c->missed;
    const u32 behind = all - b.first, misses = behind < b.limit ? behind : b.limit;
    const u32 span = span_for(team, misses, MOST_MISSES);
    for (u64 base = (u64)team.warp * span; base < misses; base += (u64)team.warps * span) {
        const u64 index = base + lane();
        const bool mine = lane() < span && index < misses;
        const u32 m = b.first + (u32)index;
        i64 row = 0, old = -1;
        i32 slot = -1;
        u64 source = 0, refuge = 0;
        bool asks = false, listed = false;
        if (mine) {
            row = b.missed[m];
            if (row < 0) row = ~row;
            else if (m < victims) slot = b.place[m];
            if (slot >= 0) {
                old = t.row_of[slot];
                if (t.dirty[slot]) {
                    t.dirty[slot] = 0;
                    const i64 home = host_slot(t, old);
                    listed = home < 0;
                    if (!listed) {
                        refuge = host_address(t, home);
                        mark_host(t, home);
                    }
                }
                change_row(t, b, slot, old, row);
                t.stamp[slot] = b.mode == LEASE ? b.now | HELD : b.now;
            }
            const i64 home = slot >= 0 && b.load ? host_slot(t, row) : -1;
            if (home >= 0) source = host_address(t, home);
            else asks = !t.direct && (slot < 0 || b.load);
        }
        const u32 e = append(&c->evicted, listed);
        if (listed) {
            b.evicted_rows[e] = old;
            refuge = (u64)(b.evicted + (i64)e * t.record);
        }
        const u32 a = append(&c->absent, asks);
        if (asks) {
            b.staged_rows[a] = row;
            b.staged_place[a] = slot >= 0 ? slot : -1 - (i32)(m - victims);
            if (slot < 0) b.place[m] = -1 - (i32)a;
        }
        append(&c->filled, slot >= 0 && old < 0);
        tally(&c->evicted_rows, old >= 0);
        tally(&c->written_rows, refuge != 0);
        const u64 target = slot >= 0 ? slot_address(t, slot) : 0;
        copy(target, refuge, span, t.record, 16);
        copy(source, target, span, t.record, 16);
        if (mine && slot >= 0) t.slot_of[row] = slot;
        if (b.mode == LEASE)
            enrol(t, b, mine, row, slot, slot >= 0 ? target : host_address(t, row),
                  slot >= 0 ? t.mark + slot : b.contest + m);
    }
}

// Plan the moves of a prefetch: maps and pins now, the copies by `move` on another stream. Rows for
// which there is no room, or whose victim only the host could take in, are let go. Over a host tier
// that is a cache the prefetch may hold what it has: if it lacks nothing, its batch will find every
// row in a slot, and the host need not be asked.
__device__ void plan_moves(const Tier &t, const Batch &b) {
    const Team team = everyone();
    const u32 victims = t.counters->victims, missed = t.counters->missed;
    for (u64 base = (u64)team.warp * 32; base < missed; base += (u64)team.warps * 32) {
        const u32 m = (u32)base + lane();
        const bool mine = m < missed;
        const i64 row = mine ? b.missed[m] : 0;
        i32 slot = mine && m < victims ? b.place[m] : -1;
        const i64 old = slot >= 0 ? t.row_of[slot] : -1;
        const bool dirty = slot >= 0 && t.dirty[slot];
        if (dirty && host_slot(t, old) < 0) slot = -1;
        if (slot >= 0) {
            t.dirty[slot] = 0;
            change_row(t, b, slot, old, row);
            t.arrival[slot] = b.arrival;
            t.stamp[slot] = b.now | AHEAD | (b.held ? HELD : 0);
        }
        if (mine) {
            t.slot_of[row] = slot >= 0 ? slot : ABSENT;
            b.place[m] = slot;
            b.leaving[m] = dirty ? old : -1;
        }
        if (b.held) hold(t, b, slot >= 0, slot);
        append(&t.counters->lacking, mine && slot < 0);
        append(&t.counters->filled, slot >= 0 && old < 0);
        tally(&t.counters->evicted_rows, slot >= 0 && old >= 0);
        tally(&t.counters->written_rows, slot >= 0 && dirty);
    }
}

// How many more slots prefetches may pin: together at most half of them.
__device__ u32 prefetch_room(const Tier &t, const Batch &b) {
    u32 room = t.capacity / 2;
    for (u32 p = b.expired + 1; p != b.arrival; ++p) {
        const u32 taken = t.counters->moves[p % WINDOW];
        room -= taken < room ? taken : room;
    }
    return room;
}

// ---------------------------------------------------------------------------------------- complete

// Copy the rows of a READ that had to be waited for, those in slots, those in host memory, or both.
__device__ void serve_deferred(const Tier &t, const Batch &b, Team team, bool slots, bool host) {
    const u32 deferred = t.counters->deferred;
    const u32 span = span_for(team, deferred);
    for (u64 base = (u64)team.warp * span; base < deferred; base += (u64)team.warps * span) {
        const u64 d = base + lane();
        u64 source = 0, target = 0;
        if (lane() < span && d < deferred) {
            const u32 position = b.deferred[d];
            const i64 row = b.ids[position];
            const i32 entry = t.slot_of[row];
            u32 *contest;
            if (entry >= 0 ? slots : host) source = locate(t, b, row, entry, &contest);
            if (source) source += b.lo;
            target = (u64)(b.data + (i64)position * b.bytes);
            if (entry >= 0 && slots) touch(t, b, entry, t.stamp[entry], HELD);
        }
        copy(source, target, span, b.bytes, b.width);
    }
}

// The deferred positions of a write compete, or their records join the lease, as in `probe`.
__device__ void admit_deferred(const Tier &t, const Batch &b) {
    const Team team = everyone();
    const u32 deferred = t.counters->deferred;
    for (u64 base = (u64)team.warp * 32; base < deferred; base += (u64)team.warps * 32) {
        const u64 d = base + lane();
        i64 row = -1;
        i32 entry = -1;
        bool enrols = false;
        if (d < deferred) {
            const u32 position = b.deferred[d];
            row = b.ids[position];
            entry = t.slot_of[row];
            if (b.mode == LEASE) {
                enrols = entry >= 0 && touch_first(t, entry, t.stamp[entry], b.now, 0);
            } else {
                u32 *contest;
                if (entry >= 0) touch(t, b, entry, t.stamp[entry], HELD);
                locate(t, b, row, entry, &contest);
                compete(contest, position);
            }
        }
        if (b.mode == LEASE) enrol(t, b, enrols, row, entry, slot_address(t, entry), t.mark + entry);
    }
}

// Copy what won into its record, and mark that dirty: records in slots, those in host memory, which
// only deferred positions have, or both.
__device__ void write_winners(const Tier &t, const Batch &b, Team team, bool slots, bool host) {
    const u64 items = slots ? b.n : t.counters->deferred;
    const u32 span = span_for(team, items);
    for (u64 base = (u64)team.warp * span; base < items; base += (u64)team.warps * span) {
        const u64 item = base + lane();
        i64 position = 0;
        u64 target = 0;
        if (lane() < span && item < items) {
            position = slots ? item : b.deferred[item];
            const i64 row = b.ids[position];
            const i32 entry = (u64)row < (u64)t.rows ? t.slot_of[row] : ABSENT;
            u32 *contest;
            if (entry >= 0 ? slots : host && entry <= FIRST)
                target = locate(t, b, row, entry, &contest);
            if (target && *(volatile u32 *)contest == (u32)position + 1) {
                *contest = 0;
                target += b.lo;
                if (entry >= 0) t.dirty[entry] = 1;
                else if (t.direct) mark_host(t, row);
            } else {
                target = 0;
            }
        }
        copy(target ? (u64)(b.data + position * b.bytes) : 0, target, span, b.bytes, b.width);
    }
}

// Tell every id of a lease which record is its own; -1 for ids outside the table.
__device__ void write_positions(const Tier &t, const Batch &b) {
    for (i64 i = thread(); i < b.n; i += threads()) {
        const i64 row = b.ids[i];
        i32 index = -1;
        if ((u64)row < (u64)t.rows) {
            const i32 entry = t.slot_of[row];
            index = (i32)(entry >= 0 ? t.mark[entry] : b.contest[FIRST - entry]) - 1;
        }
        b.positions[i] = index;
    }
}

// Leave every mark, claim and counter as the next batch expects them. A lease keeps its rows in
// direct host memory KEPT until it ends.
__device__ void tidy(const Tier &t, const Batch &b) {
    Counters *const c = t.counters;
    const u32 missed = c->missed, deferred = c->deferred, distinct = c->distinct;
    grid_barrier(&c->gate);
    if (b.mode == LEASE)
        for (u32 k = thread(); k < distinct; k += threads())
            if (b.held[k] >= 0) t.mark[b.held[k]] = 0;
    for (u32 m = thread(); m < missed; m += threads()) {
        const bool kept = b.missed[m] < 0;
        const i64 row = kept ? ~b.missed[m] : b.missed[m];
        if (t.slot_of[row] <= FIRST)
            t.slot_of[row] = kept || (b.mode == LEASE && t.direct) ? KEPT : ABSENT;
    }
    if (missed)
        for (u32 i = thread(); i < PASSES * BINS; i += threads()) c->histogram[0][i] = 0;
    for (u32 i = thread(); b.in_order && i < REGIONS; i += threads())
        c->claims_in[i] = c->waits_in[i] = c->claims_done[i] = c->waits_done[i] = 0;
    if (thread() == 0) {
        c->missed_ids += deferred;
        c->missed_rows += missed;
        c->missed = c->deferred = c->victims = c->ties = c->distinct = c->absent = c->evicted = 0;
        if (b.mode == LEASE) {
            *b.count = distinct;
            c->leased_rows += distinct;
            c->leased_misses += missed;
        }
    }
}

// How many blocks use the link for a number of misses, of at least two in all: more do not make it
// faster, less so where few at a time keep to the order, and the others have hits to copy.
__device__ u32 link_blocks(const Batch &b, u32 missed) {
    const u32 most = b.in_order ? LINK_BLOCKS / 2 : LINK_BLOCKS;
    u32 blocks = (missed + LINK_ROWS - 1) / LINK_ROWS;
    if (blocks > most) blocks = most;
    return blocks < gridDim.x ? blocks : gridDim.x - 1;
}

__device__ void finish(const Tier &t, const Batch &b) {
    Counters *const c = t.counters;
    const bool waiting = c->deferred != 0;
    if (waiting && b.mode != READ) {
        admit_deferred(t, b);
        grid_barrier(&c->gate);
    }
    if (b.mode == LEASE) {
        if (b.last) write_positions(t, b);
    } else if (waiting || b.mode == WRITE) {
        // Where rows stay in host memory, some blocks copy those, and all others what is in slots.
        const u32 link = link_blocks(b, c->missed - c->victims);
        const bool far = blockIdx.x < link, both = link == 0;
        const Team part = far ? team(0, link) : team(link, gridDim.x - link);
        if (b.mode == READ) serve_deferred(t, b, part, !far, far || both);
        else write_winners(t, b, part, !far, far || both);
    }
    if (b.last && (waiting || b.mode == LEASE)) tidy(t, b);
}

// Fetch what was claimed, and copy beside that what was there. Cooperative.
extern "C" __global__ __launch_bounds__(THREADS, 3) void tierstore_promote(const Tier t, const Batch b) {
    Counters *const c = t.counters;
    const u32 missed = c->missed, deferred = c->deferred;
    if (thread() == 0 && !c->bad && c->bad_position != NO_POSITION) {
        c->bad_row = b.ids[c->bad_position];
        c->bad = 1;
    }
    if (b.in_order && (missed || deferred)) put_in_order(t, b, missed, deferred);
    if (missed) {
        const u32 room = b.mode == PREFETCH ? prefetch_room(t, b) : b.admit ? missed : 0;
        if (room) {
            const u32 wanted = missed < room ? missed : room;
            if (t.score) select_victims<true>(t, b, wanted);
            else select_victims<false>(t, b, wanted);
            grid_barrier(&c->gate);
        }
        const bool stays = room == 0 && t.direct && b.mode != LEASE;
        const u32 link = stays ? 0 : link_blocks(b, missed);
        if (b.mode == PREFETCH) plan_moves(t, b);
        else if (blockIdx.x < link) swap_records(t, b, team(0, link));
        else if (b.mode == READ) serve_hits(t, b, team(link, gridDim.x - link));
        grid_barrier(&c->gate);
    } else if (b.mode == READ) {
        serve_hits(t, b, everyone());
    }
    if (b.mode == PREFETCH) {
        if (thread() == 0) {
            b.count[0] = c->moves[b.arrival % WINDOW] = c->victims;
            b.count[1] = c->distinct;
            if (b.verdict) *b.verdict = c->lacking ? LACKING : CERTAIN;
            c->lacking = 0;
        }
        tidy(t, b);
    } else if (b.alone) {
        finish(t, b);
    }
}

// ---------------------------------------------------------------- a host tier that is itself a cache

// Handle the next chunk of misses. [b.limit entries]
extern "C" __global__ void tierstore_swap_chunk(const Tier t, const Batch b) {
    swap_records(t, b, everyone());
}

// Copy `limit` staged records to the slots, or the lease's spill, that wait for them.
extern "C" __global__ void tierstore_install(const Tier t, const Batch b) {
    const Team team = everyone();
    const u32 span = span_for(team, b.limit);
    for (u64 base = (u64)team.warp * span; base < b.limit; base += (u64)team.warps * span) {
        const u64 k = base + lane();
        u64 source = 0, target = 0;
        if (lane() < span && k < b.limit) {
            const i32 place = b.staged_place[k];
            source = (u64)(b.staged + (i64)k * t.record);
            if (place >= 0) target = slot_address(t, place);
            else if (b.spill) target = (u64)(b.spill + (i64)(-1 - place) * t.record);
        }
        copy(source, target, span, t.record, 16);
    }
}

// Tell the lease where its rows without a slot lie, once there is room for them.
extern "C" __global__ void tierstore_place_spill(const Tier t, const Batch b) {
    const u32 victims = t.counters->victims, missed = t.counters->missed;
    for (u64 m = victims + thread(); m < missed; m += threads())
        b.records[b.contest[m] - 1] = (u64)(b.spill + (i64)(m - victims) * t.record);
}

// End a batch, or one chunk of its rows without a slot. Cooperative.
extern "C" __global__ void tierstore_complete(const Tier t, const Batch b) { finish(t, b); }

// Undo a batch that the host could not finish: the first `limit` staged rows did not come, so their
// slots are empty. Rows that did come stay. Cooperative.
extern "C" __global__ void tierstore_abandon(const Tier t, const Batch b) {
    const u32 distinct = t.counters->distinct;
    if (b.mode == LEASE)
        for (u32 k = thread(); k < distinct; k += threads()) {
            const i32 slot = b.held[k];
            if (slot >= 0 && --t.pins[slot] == 0) t.stamp[slot] &= ~HELD;
        }
    if (b.mode == WRITE)
        for (i64 i = thread(); i < b.n; i += threads()) {
            const i64 row = b.ids[i];
            const i32 entry = (u64)row < (u64)t.rows ? t.slot_of[row] : ABSENT;
            if (entry >= 0) t.mark[entry] = 0;
        }
    tidy(t, b);
    for (u32 k = thread(); k < b.limit; k += threads()) {
        const i32 slot = b.staged_place[k];
        if (slot < 0) continue;
        t.slot_of[b.staged_rows[k]] = ABSENT;
        if (t.score) t.score[b.staged_rows[k]] = t.key[slot];
        atomicSub(&t.counters->filled, 1u);
        t.row_of[slot] = -1;
        t.stamp[slot] = 0;
    }
}

// ---------------------------------------------------------------------------------------- prefetch

// Copy the planned records, old one out, new one in. Runs beside compute, on few blocks.
extern "C" __global__ void tierstore_move(const Tier t, const Batch b) {
    const Team team = everyone();
    const u32 moves = *b.count;
    const u32 span = span_for(team, moves);
    for (u64 base = (u64)team.warp * span; base < moves; base += (u64)team.warps * span) {
        const u64 m = base + lane();
        u64 source = 0, target = 0, refuge = 0;
        if (lane() < span && m < moves && b.place[m] >= 0) {
            // Nothing takes these rows out of the host tier meanwhile: it waits. If something did, no
            // copy may go astray.
            const i64 from = host_slot(t, b.missed[m]);
            const i64 home = b.leaving[m] >= 0 ? host_slot(t, b.leaving[m]) : -1;
            target = slot_address(t, b.place[m]);
            if (from >= 0) source = host_address(t, from);
            if (home >= 0) {
                refuge = host_address(t, home);
                mark_host(t, home);
            }
        }
        copy(target, refuge, span, t.record, 16);
        copy(source, target, span, t.record, 16);
    }
}

// The copies of prefetch number b.arrival are over.
extern "C" __global__ void tierstore_announce(const Tier t, const Batch b) {
    __threadfence();
    *(volatile u32 *)&t.counters->done = b.arrival;
}

// One thread: if the batch lacks anything, hold the stream until the prefetches up to number
// b.arrival are over; then their rows are in place and their victims safe in the host tier. They were
// launched earlier and wait for nothing later, so they end.
extern "C" __global__ void tierstore_fence(const Tier t, const Batch b) {
    if (t.counters->missed == 0 && t.counters->deferred == 0) return;
    while ((i32)(b.arrival - *(volatile u32 *)&t.counters->done) > 0) __nanosleep(1000);
    __threadfence();
}

// ------------------------------------------------------------------------------------------- leases

// Unpin the records of a lease, or of a prefetch.
extern "C" __global__ void tierstore_release(const Tier t, const Batch b) {
    const u32 count = *b.count;
    for (u64 k = thread(); k < count; k += threads()) {
        const i32 slot = b.held[k];
        if (slot >= 0 && --t.pins[slot] == 0) t.stamp[slot] &= ~HELD;
    }
}

// Rows that ended leases kept in host memory may be promoted again.
extern "C" __global__ void tierstore_forget(const Tier t, const Batch b) {
    const u32 count = *b.count;
    for (u64 k = thread(); k < count; k += threads())
        if (b.held[k] < 0) t.slot_of[(i64)(b.records[k] - (u64)t.host) / t.record] = ABSENT;
}

// Copy bytes [lo, lo + bytes) of each leased record to the k-th row of data.
extern "C" __global__ void tierstore_lease_gather(const Tier t, const Batch b) {
    const Team team = everyone();
    const u32 count = *b.count, span = span_for(team, count);
    for (u64 base = (u64)team.warp * span; base < count; base += (u64)team.warps * span) {
        const u64 k = base + lane();
        const bool mine = lane() < span && k < count;
        copy(mine ? b.records[k] + b.lo : 0, mine ? (u64)(b.data + (i64)k * b.bytes) : 0, span,
             b.bytes, b.width);
    }
}

// The reverse, marking the records dirty.
extern "C" __global__ void tierstore_lease_scatter(const Tier t, const Batch b) {
    const Team team = everyone();
    const u32 count = *b.count, span = span_for(team, count);
    for (u64 base = (u64)team.warp * span; base < count; base += (u64)team.warps * span) {
        const u64 k = base + lane();
        const bool mine = lane() < span && k < count;
        if (mine && b.held[k] >= 0) t.dirty[b.held[k]] = 1;
        else if (mine && t.direct) mark_host(t, (i64)(b.records[k] - (u64)t.host) / t.record);
        copy(mine ? (u64)(b.data + (i64)k * b.bytes) : 0, mine ? b.records[k] + b.lo : 0,
             span, b.bytes, b.width);
    }
}

// Copy to each position of data the bytes of its id's record.
extern "C" __global__ void tierstore_lease_read(const Tier t, const Batch b) {
    const Team team = everyone();
    const u32 span = span_for(team, b.n);
    for (i64 base = (i64)team.warp * span; base < b.n; base += (i64)team.warps * span) {
        const i64 position = base + lane();
        u64 source = 0, target = 0;
        if (lane() < span && position < b.n) {
            const i32 k = b.positions[position];
            source = k >= 0 ? b.records[k] + b.lo : (u64)t.poison;
            target = (u64)(b.data + position * b.bytes);
        }
        copy(source, target, span, b.bytes, b.width);
    }
}

// ------------------------------------------------------------------- flush, report, rebase, rescale

// Write dirty records to the host tier, those it has no place for to staging. Where `evicted` exceeds
// b.limit afterwards, some are left for another launch.
extern "C" __global__ void tierstore_flush(const Tier t, const Batch b) {
    const Team team = everyone();
    Counters *const c = t.counters;
    for (u64 base = (u64)team.warp * 32; base < t.capacity; base += (u64)team.warps * 32) {
        const u64 s = base + lane();
        const bool leaves = s < t.capacity && t.dirty[s];
        const i64 row = leaves ? t.row_of[s] : 0;
        const i64 home = leaves ? host_slot(t, row) : 0;
        u64 refuge = leaves && home >= 0 ? host_address(t, home) : 0;
        if (refuge) t.host_dirty[home] = 1;
        const u32 e = append(&c->evicted, leaves && home < 0);
        if (leaves && home < 0 && e < b.limit) {
            b.evicted_rows[e] = row;
            refuge = (u64)(b.evicted + (i64)e * t.record);
        }
        if (refuge) t.dirty[s] = 0;
        tally(&c->written_rows, refuge != 0);
        copy(refuge ? slot_address(t, (i64)s) : 0, refuge, 32, t.record, 16);
    }
}

// Tell a direct host tier which of its records have changed.
extern "C" __global__ void tierstore_report(const Tier t, const Batch b) {
    for (u64 word = thread(); word < (u64)(t.rows + 31) / 32; word += threads()) {
        for (u32 bits = t.host_changed[word]; bits; bits &= bits - 1)
            t.host_dirty[word * 32 + __ffs(bits) - 1] = 1;
        t.host_changed[word] = 0;
    }
}

// Move all stamps back by b.now, keeping their order, before the batch numbers run out.
extern "C" __global__ void tierstore_rebase(const Tier t, const Batch b) {
    for (u64 s = thread(); s < t.capacity; s += threads()) {
        const u32 number = t.stamp[s] & NUMBER, bits = t.stamp[s] & ~NUMBER;
        t.stamp[s] = bits | (number > b.now ? number - b.now : number ? 1 : 0);
    }
}

// Multiply all scores by b.rescale, before they grow too large.
extern "C" __global__ void tierstore_rescale(const Tier t, const Batch b) {
    for (u64 r = thread(); r < (u64)t.rows; r += threads()) t.score[r] *= b.rescale;
    for (u64 s = thread(); s < t.capacity; s += threads()) t.key[s] *= b.rescale;
}
