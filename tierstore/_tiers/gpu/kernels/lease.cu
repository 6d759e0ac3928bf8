// The records of a lease: gather, scatter, read, release.

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
        if (b.held[k] < 0) set_entry(t, (i64)(b.records[k] - (u64)t.host) / t.record, ABSENT);
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
