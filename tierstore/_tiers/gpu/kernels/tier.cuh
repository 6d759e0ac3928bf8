// The GPU tier: the meaning of its maps and marks, and the interface of the host and its kernels.
//
// A batch takes two launches. `probe` finds the rows that are in slots and claims the others;
// `promote` fetches the claimed rows over the link, copies the resident ones meanwhile, and finishes
// the batch. Neither reports to the host: counts stay on the device. If the host tier is itself a
// cache, `promote` stops after the part that the device can do alone; the host supplies the other rows
// through staging, and `install` and `complete` end the batch.
//
// The map holds an entry for each row: a slot, or ABSENT, or for the length of a batch CLAIMED and then
// FIRST - m for the m-th missed row. It is the array slot_of over all rows, or, if that would take too
// much of the memory, `places` of the rows of recent batches; see map.cuh. If it pays, missed rows are
// numbered by their place in host memory, so that neighbours are copied at about the same time; see
// order.cuh. KEPT marks a row that a lease uses directly in host memory; it must not be promoted before
// the lease ends.
//
// Victims are the evictable slots of lowest rank; see select.cuh. The rank is the stamp, the number of
// the batch that used the slot last, or, if the policy scores rows, the score of the slot's row.
// Each batch adds `on_use` to the scores of the rows it uses, and a row that takes a slot gets the
// score `on_arrival`, if that is not 0. An empty slot has stamp 0 and goes first. Two bits of a stamp
// pin the slot: HELD while leases use it, AHEAD from when a prefetch chose it until it is used, or
// until the prefetch is `window` prefetches old.
//
// abi.py reads the structures and constants below: Python declares none of them again.

static const i32 ABSENT = -1, CLAIMED = -2, FIRST = -3, KEPT = -2147483647 - 1;
static const i32 DEFERRED = -1, OUTSIDE = -2;  // Batch.entry
static const u32 AHEAD = 0x40000000u, NUMBER = 0x3fffffffu;  // of a stamp, beside HELD
static const u64 NO_POSITION = ~0ull;
static const i64 FOREIGN = -(1ll << 62);  // FOREIGN - id: an id that is a row of another extent

static const u32 READ = 0, WRITE = 1, LEASE = 2, PREFETCH = 3;  // Batch.mode
static const u32 CLAIMS = 1, WAITS = 2;     // Batch.in_order
static const u32 CERTAIN = 1, LACKING = 2;  // *Batch.verdict

static const u32 THREADS = 256;   // a block, everywhere
static const u32 BINS = 2048;     // of one pass of the radix select, at most
static const u32 PASSES = 3;      // 8, 11 and 11 bits of a number
static const u32 WINDOW = 64;     // most prefetches whose rows may be pinned
static const u32 REGIONS = 4096;  // of host memory, at most
static const u32 LINK_BLOCKS = 64;  // blocks that use the link at once: more do not make it faster

// Counts that outlive a launch. `gate` and the counts by bin or region are zero between batches. The
// scalars come first: the host reads those alone.
struct Counters {
    u64 bad_position;             // of the first id outside the table, in its batch
    i64 bad_row;                  // that id, or FOREIGN less it
    i64 bad_start;                // where its extent starts
    u64 missed_ids, missed_rows, evicted_rows, written_rows;  // since the host last looked
    u64 leased_rows, leased_misses;  // distinct rows of leases, and the missed ones
    i64 fault_id, fault_start, fault_position;  // the first id that replays could not read
    u32 bad;                      // 1 once bad_row is filled in
    u32 fault;                    // the fault of that id; see replay.cu
    u32 logged;                   // rows that replays have read since the host last looked
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
    u32 claims_in[REGIONS], waits_in[REGIONS];      // of each region: how many there are,
    u32 claims_done[REGIONS], waits_done[REGIONS];  // and how many are in order
};

// A map by open addressing. A row keeps its place until the host sweeps the map, regardless of its
// entry.
struct Places {
    i64 *rows;                    // [count], -1 = free
    i32 *entries;                 // [count], ABSENT where it is free
    u64 count;                    // below 2^32, and above that of the rows in it
    u64 taken;                    // places that are not free, at most; beyond count in a map not yet made
    u64 sweeping;                 // 1 while kernels empty it and enter its rows again
};

// The part that stays the same as long as a tier lives.
struct Tier {
    u8 *slots;                    // [capacity][record]
    i32 *slot_of;                 // [rows]; null where the map is `places`, compiled with SPARSE
    Places *places;               // in device memory: it gets new arrays when it grows
    i64 *row_of;                  // [capacity], -1 = empty
    u32 *stamp, *pins;            // [capacity]
    u32 *arrival;                 // [capacity]: number of the prefetch that filled it, where AHEAD
    u32 *mark;                    // [capacity]: winner of a write, index in a lease; 0 between batches
    u8 *dirty;                    // [capacity]
    u8 *host;                     // the host tier's records, its map and marks
    const i32 *host_slot_of;      // slot + 1; null where the host tier is direct or its map no array
    u8 *host_dirty;
    u32 *host_changed;            // direct: a bit a row, which `report` turns into host_dirty
    Counters *counters;
    const u8 *poison;             // [record] of 0xff: NaN in every float type
    float *score;                 // [rows], of those without a slot, or null: least recently used
    float *key;                   // [capacity]: the score of the row in the slot
    i64 rows, record;
    u32 capacity, direct;
    u32 region_bits;              // 2^region_bits neighbouring rows are one region of host memory
};

// One batch, its workspace, and members for a lease or the staging.
struct Batch {
    i64 *ids;                     // [n]: rows
    const i64 *arriving;          // [n]: ids in pinned host memory, of an extent after the first, or
                                  // of features, which `probe` turns into rows in `ids`; or null: ids
                                  // are rows
    // Ids of several features, each of a table of its own; see features.cu.
    const i64 *ends;              // [features]: the position after the last id of each
    const i64 *bounds;            // [3][features]: the first row of the feature's table, how many
                                  // rows it has, and the number that encodes the feature in a bad id
    i64 n;
    i64 start, bound;             // ids are 0 to bound - 1, and row start the first
    u8 *data;                     // [n][bytes]: bytes [lo, lo + bytes) of each record; a lease may
                                  // have none
    i64 lo, bytes;
    // Workspace, n entries each.
    u32 *deferred;                // positions that must wait for a copy
    i64 *missed;                  // claimed rows; ~row where the row is KEPT
    i32 *place;                   // their slots
    u32 *contest;                 // for rows without a slot: like `mark` of a slot
    i32 *entry;                   // READ: slot of each position, or DEFERRED, or OUTSIDE
    i64 *leaving;                 // prefetch: dirty row that must leave the slot first, or -1
    // A lease: its distinct records in some order.
    u64 *records;                 // address of each record
    i64 *rows;                    // its row; of a replayed read: the log, `limit` entries
    i32 *held;                    // its slot, or -1; of a prefetch: slots it keeps for its batch
    i32 *positions;               // [n]: index of each id's record; until then like `entry`
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
    u32 mode, load, last;         // load: present records are needed; last: the final chunk
    u32 in_order;                 // the lists to order: CLAIMS, WAITS or both
    u32 admit;                    // missed rows are promoted, not only accessed in place
    u32 features;                 // their number; 0: ids are those of one extent
    u32 alone;                    // the device can finish the batch without the host
    u32 arrival;                  // number of this, or the last, prefetch
    u32 expired;                  // number of the last prefetch whose pins have run out
    float on_use;                 // added, once, to the score of each row it uses
    float on_arrival;             // the score of a row that takes a slot; 0: the one it has
    float rescale;                // factor by which `rescale` multiplies all scores
};
