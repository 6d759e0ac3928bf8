// A map from keys to rows in device memory, by open addressing: a key is requested from the host once.
//
// A slot is the code of a key and its row + 1, or 0 if it is empty; 16 bytes, which one access reads.
// At most half of the slots are in use, and keys are never removed one by one. `seed` is drawn when the
// map is made, so that keys cannot be chosen to collide.

struct KeyMap {
    u64 *slots;           // [capacity][2]
    u64 capacity, seed;   // capacity < 2^32
};

struct Keys {
    const u64 *codes;     // [n]
    i64 *rows;            // [n]; `find`: -1 where the map lacks a key
    u32 *missing;         // `find`: positions that it lacks, in any order, or null: then rows are 0
                          // where it lacks a key; `enter`: positions of the keys
    u64 *missing_codes;   // and their codes
    u32 *count;           // their number, counted from 0
    u32 *lacks;           // in host memory: set to 1 if there are any
    i64 *all_rows;        // `enter`: where rows go, each at its position in `missing`, or null
    i64 n;
};

__device__ u64 first_slot(const KeyMap &map, u64 code) {
    u64 x = code ^ map.seed;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull + map.seed;
    x ^= x >> 31;
    return (x >> 32) * map.capacity >> 32;
}

__device__ u64 next_slot(const KeyMap &map, u64 at) { return at + 1 == map.capacity ? 0 : at + 1; }

__device__ u64 joined(u32 low, u32 high) { return (u64)high << 32 | low; }

// A thread a key. No key is entered meanwhile: launches of both kinds are in one order.
extern "C" __global__ void tierstore_find_keys(const KeyMap map, const Keys keys) {
    for (u64 i = wide_thread(); i < (u64)keys.n; i += wide_threads()) {
        const u64 code = keys.codes[i];
        i64 row = -1;
        for (u64 at = first_slot(map, code);; at = next_slot(map, at)) {
            const uint4 slot = ((const uint4 *)map.slots)[at];
            const u64 held = joined(slot.z, slot.w);
            if (held == 0) break;
            if (joined(slot.x, slot.y) == code) {
                row = (i64)held - 1;
                break;
            }
        }
        if (row < 0 && !keys.missing) {
            *(volatile u32 *)keys.lacks = 1;
            row = 0;
        }
        keys.rows[i] = row;
        if (row < 0) {
            const u32 k = atomicAdd(keys.count, 1u);
            if (k == 0) *(volatile u32 *)keys.lacks = 1;
            keys.missing[k] = (u32)i;
            keys.missing_codes[k] = code;
        }
    }
}

// Enter keys with the rows that the host gave them; those with the row -1 have none. A key may come
// twice: equal rows are of equal keys.
extern "C" __global__ void tierstore_enter_keys(const KeyMap map, const Keys keys) {
    for (u64 i = wide_thread(); i < (u64)keys.n; i += wide_threads()) {
        const i64 row = keys.rows[i];
        if (keys.all_rows) keys.all_rows[keys.missing[i]] = row;
        if (row < 0 || !map.capacity) continue;
        const u64 code = keys.codes[i], entry = (u64)row + 1;
        for (u64 at = first_slot(map, code);; at = next_slot(map, at)) {
            u64 *const slot = map.slots + 2 * at;
            u64 held = *(volatile u64 *)(slot + 1);
            if (held == 0) held = atomicCAS(slot + 1, 0ull, entry);
            if (held == 0) slot[0] = code;
            if (held == 0 || held == entry) break;
        }
    }
}
