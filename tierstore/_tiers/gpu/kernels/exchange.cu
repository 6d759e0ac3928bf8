// The rest of a batch if the host tier is itself a cache and supplies rows through staging.

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

// Give the lease the addresses of its rows without a slot, once there is room for them.
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
            const i32 entry = (u64)row < (u64)t.rows ? entry_of(t, row) : ABSENT;
            if (entry >= 0) t.mark[entry] = 0;
        }
    tidy(t, b);
    for (u32 k = thread(); k < b.limit; k += threads()) {
        const i32 slot = b.staged_place[k];
        if (slot < 0) continue;
        set_entry(t, b.staged_rows[k], ABSENT);
        if (t.score) t.score[b.staged_rows[k]] = t.key[slot];
        atomicSub(&t.counters->filled, 1u);
        t.row_of[slot] = -1;
        t.stamp[slot] = 0;
    }
}
