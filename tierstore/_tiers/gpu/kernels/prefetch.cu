// Prefetch: planned in the caller's stream by `promote`, copied beside it.

// The number of further slots that prefetches may pin: together at most half of them.
__device__ u32 prefetch_room(const Tier &t, const Batch &b) {
    u32 room = t.capacity / 2;
    for (u32 p = b.expired + 1; p != b.arrival; ++p) {
        const u32 taken = t.counters->moves[p % WINDOW];
        room -= taken < room ? taken : room;
    }
    return room;
}

// Plan the moves of a prefetch: maps and pins now, the copies by `move` on another stream. Rows without
// room, and rows whose victim only the host can take in, are dropped from the prefetch. Over a host
// tier that is a cache the prefetch may hold its rows: if it lacks none, its batch will find every row
// in a slot, and the host need not be asked.
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
            set_entry(t, row, slot >= 0 ? slot : ABSENT);
            b.place[m] = slot;
            b.leaving[m] = dirty ? old : -1;
        }
        if (b.held) {
            const u32 k = append(&t.counters->distinct, slot >= 0);
            if (slot >= 0) hold(t, b, k, slot);
        }
        append(&t.counters->lacking, mine && slot < 0);
        append(&t.counters->filled, slot >= 0 && old < 0);
        tally(&t.counters->evicted_rows, slot >= 0 && old >= 0);
        tally(&t.counters->written_rows, slot >= 0 && dirty);
    }
}

// Copy the planned records, old one out, new one in. Runs beside compute, on few blocks.
extern "C" __global__ void tierstore_move(const Tier t, const Batch b) {
    const Team team = everyone();
    const u32 moves = *b.count;
    const u32 span = span_for(team, moves);
    for (u64 base = (u64)team.warp * span; base < moves; base += (u64)team.warps * span) {
        const u64 m = base + lane();
        u64 source = 0, target = 0, refuge = 0;
        if (lane() < span && m < moves && b.place[m] >= 0) {
            // The host tier waits, so these rows stay in it meanwhile. Check, so that no copy goes astray.
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
