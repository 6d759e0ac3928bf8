// Work between batches: flush changed records, report them, renumber batches, rescale scores, sweep
// the map.

// Write dirty records to the host tier, or to staging if it has no place for them. If `evicted` exceeds
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

// A sweep of the map of places, in four launches: it is emptied only if a batch of b.n rows might not
// find as many free. The host counts ids; only the device knows how many of them took a place.
extern "C" __global__ void tierstore_sweep(const Tier t, const Batch b) {
    if (thread()) return;
    Places *const map = t.places;
    map->sweeping = map->taken + b.n > map->count * 3 / 4;
    if (map->sweeping) map->taken = 0;
}

extern "C" __global__ void tierstore_empty(const Tier t, const Batch b) {
    const Places map = *t.places;
    for (u64 at = thread(); map.sweeping && at < map.count; at += threads()) {
        map.rows[at] = -1;
        map.entries[at] = ABSENT;
    }
}

// Enter the rows of all slots.
extern "C" __global__ void tierstore_enter_slots(const Tier t, const Batch b) {
    const Team team = everyone();
    const u64 end = t.places->sweeping ? t.capacity : 0;
    for (u64 base = (u64)team.warp * 32; base < end; base += (u64)team.warps * 32) {
        const u64 s = base + lane();
        const i64 row = s < end ? t.row_of[s] : -1;
        if (row >= 0) *entry_at(t, row, true) = (i32)s;
        tally(&t.places->taken, row >= 0);
    }
}

// Enter the rows that a lease uses in direct host memory.
extern "C" __global__ void tierstore_enter_kept(const Tier t, const Batch b) {
    const Team team = everyone();
    const u32 end = t.places->sweeping ? *b.count : 0;
    for (u64 base = (u64)team.warp * 32; base < end; base += (u64)team.warps * 32) {
        const u64 k = base + lane();
        const bool keeps = k < end && b.held[k] < 0;
        if (keeps) *entry_at(t, b.rows[k], true) = KEPT;
        tally(&t.places->taken, keeps);
    }
}
