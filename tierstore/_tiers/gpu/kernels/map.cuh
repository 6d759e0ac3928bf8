// The place of a record, and the marks of a batch on its slot.

__device__ u64 slot_address(const Tier &t, i64 slot) { return (u64)(t.slots + slot * t.record); }
__device__ u64 host_address(const Tier &t, i64 slot) { return (u64)(t.host + slot * t.record); }

// The slot of a row in the host tier; -1 if it has none, or if only the host can tell.
__device__ i64 host_slot(const Tier &t, i64 row) {
    if (t.direct) return row;
    return t.host_slot_of ? (i64)t.host_slot_of[row] - 1 : -1;
}

// The word with the entry of a row; null if the row has no place and `takes` is false.
#ifdef SPARSE
__device__ i32 *entry_at(const Tier &t, i64 row, bool takes) {
    const Places map = *t.places;
    u64 x = (u64)row;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    for (u64 at = (x >> 32) * map.count >> 32;; at = at + 1 == map.count ? 0 : at + 1) {
        i64 held = *(volatile i64 *)(map.rows + at);
        if (held == -1 && takes) {
            held = (i64)atomicCAS((u64 *)map.rows + at, ~0ull, (u64)row);
            if (held == -1) held = row;
        }
        if (held == row) return map.entries + at;
        if (held == -1) return 0;
    }
}
#else
__device__ i32 *entry_at(const Tier &t, i64 row, bool takes) { return t.slot_of + row; }
#endif

__device__ i32 entry_of(const Tier &t, i64 row) {
    const i32 *const entry = entry_at(t, row, false);
#ifdef SPARSE
    if (!entry) return ABSENT;
#endif
    return *entry;
}

// Set the entry of a row that has a place.
__device__ void set_entry(const Tier &t, i64 row, i32 entry) { *entry_at(t, row, false) = entry; }

// Note that a record in host memory has changed. A direct host tier looks at its marks only after a
// report; a byte sent over the link for each record would take as long as a tenth of the record.
__device__ void mark_host(const Tier &t, i64 slot) {
    if (t.direct) atomicOr(t.host_changed + (slot >> 5), 1u << (slot & 31));
    else t.host_dirty[slot] = 1;
}

// Address of the record of a row by its entry in the map, once its miss has been handled; 0 if that
// happens in another chunk. `contest` gets the word that decides between writers.
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

// Whether the slot's record has arrived.
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
    if (old >= 0) set_entry(t, old, ABSENT);
    t.row_of[slot] = row;
}

// Touch and hold, `keeping` some bits; true for exactly one of all callers in a batch.
__device__ bool touch_first(const Tier &t, i32 slot, u32 stamp, u32 now, u32 keeping) {
    const u32 stamped = now | HELD | (stamp & keeping);
    return (stamp & NUMBER) != now && (atomicExch(t.stamp + slot, stamped) & NUMBER) != now;
}

// Writers of one record: the last position wins.
__device__ void compete(u32 *contest, u32 position) {
    if (*(volatile u32 *)contest < position + 1) atomicMax(contest, position + 1);
}

// Pin the slot of record k, or of none (-1), until the batch is released.
__device__ void hold(const Tier &t, const Batch &b, u32 k, i32 slot) {
    b.held[k] = slot;
    if (slot < 0) return;
    ++t.pins[slot];
    if (b.on_use != 0) t.key[slot] += b.on_use;
}

// Make a record the k-th of the lease and pin its slot; *mark becomes k + 1.
__device__ void enrol(const Tier &t, const Batch &b, u32 k, i64 row, i32 slot, u64 address, u32 *mark) {
    hold(t, b, k, slot);
    b.records[k] = address;
    b.rows[k] = row;
    *mark = k + 1;
}
