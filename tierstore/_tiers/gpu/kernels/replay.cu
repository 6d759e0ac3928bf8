// Reads that CUDA graphs replay: no host code runs, so nothing is promoted and nothing waits.

static const u32 FOUND = 0, STRAY = 1, LOST = 2;  // Counters.fault

// Note the first unreadable id since the host last looked.
__device__ void note_fault(const Tier &t, const Batch &b, u32 fault, i64 position, i64 id) {
    Counters *const c = t.counters;
    if (atomicCAS(&c->fault, FOUND, fault) != FOUND) return;
    c->fault_id = id;
    c->fault_start = b.start;
    c->fault_position = position;
}

// Copy to each position of data the bytes of its id's record, from its slot or from host memory; 0xff
// for ids outside the table and rows that are in neither. Log the rows for `adapt`, in b.rows.
extern "C" __global__ void tierstore_look_up(const Tier t, const Batch b) {
    const Team team = everyone();
    const u32 span = span_for(team, b.n);
    for (i64 base = (i64)team.warp * span; base < b.n; base += (i64)team.warps * span) {
        const i64 position = base + lane();
        const bool mine = lane() < span && position < b.n;
        const i64 id = mine ? b.ids[position] : 0;
        const bool inside = mine && (u64)id < (u64)b.bound;
        const i64 row = b.start + id;
        const i32 slot = inside ? entry_of(t, row) : ABSENT;
        const i64 home = inside && slot < 0 ? host_slot(t, row) : -1;
        u64 source = (u64)t.poison, target = 0;
        if (slot >= 0) source = slot_address(t, slot) + b.lo;
        else if (home >= 0) source = host_address(t, home) + b.lo;
        else if (mine) note_fault(t, b, inside ? LOST : STRAY, position, id);
        if (mine) target = (u64)(b.data + position * b.bytes);
        const u32 at = append(&t.counters->logged, inside);
        if (inside) b.rows[at & (b.limit - 1)] = row;
        copy(mine ? source : 0, target, span, b.bytes, b.width);
    }
}
