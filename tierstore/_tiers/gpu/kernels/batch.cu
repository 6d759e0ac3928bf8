// A batch: `probe` finds its rows, `promote` fetches what is missing, serves it, and tidies up.

static const u32 MOST_MISSES = 8;  // that a warp copies before it turns to others
static const u32 LINK_ROWS = 64;   // for each block that uses the link

// Find each id's row, an id a lane. READ and LEASE note its slot; WRITE lets the positions compete for
// it; LEASE enrols each record once. A missing row is claimed by one of its ids, and deferred.
extern "C" __global__ void tierstore_probe(const Tier t, const Batch b) {
    Counters *const c = t.counters;
    const u32 done = *(volatile u32 *)&c->done;
    __threadfence();
    const i64 position = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const bool mine = position < b.n;
    const i64 id = !mine ? 0 : b.arriving ? b.arriving[position] : b.ids[position];
    const i64 own = mine && b.features ? row_of(b, position, id) : id;
    const bool outside = (u64)own >= (u64)b.bound;
    const i64 row = !outside ? b.start + own : (u64)own < (u64)t.rows ? FOREIGN - own : own;
    if (mine && b.arriving) b.ids[position] = row;
    i32 slot = ABSENT;
    bool waits = false, claims = false, holds = false, kept = false, lacks = false;
    if (outside) {
        if (!c->bad) {
            atomicMin(&c->bad_position, (u64)position);
            c->bad_start = b.start;
        }
    } else if (mine) {
        slot = entry_of(t, row);
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
                     atomicCAS(entry_at(t, row, true), ABSENT, CLAIMED) == ABSENT;
        } else {
            waits = true;
            kept = slot == KEPT;
            claims = (kept || slot == ABSENT) &&
                     atomicCAS(entry_at(t, row, true), slot, CLAIMED) == slot;
        }
    }
    u32 index[3];
    block_append({&c->deferred, &c->missed, &c->distinct}, {waits, claims, holds}, index);
    const u32 d = index[0], m = index[1], k = index[2];
    if (waits) {
        (b.in_order & WAITS ? listed_waits(b) : b.deferred)[d] = (u32)position;
        if (b.in_order & WAITS) atomicAdd(c->waits_in + (row >> t.region_bits), 1u);
    }
    if (claims) {
        if (b.in_order & CLAIMS) {
            listed_claims(b)[m] = kept ? ~(i32)position : (i32)position;
            atomicAdd(c->claims_in + (row >> t.region_bits), 1u);
        } else {
            b.missed[m] = kept ? ~row : row;
            set_entry(t, row, FIRST - (i32)m);
        }
        if (b.mode == WRITE || b.mode == LEASE) b.contest[m] = 0;
    }
    if ((b.mode == READ || b.mode == LEASE) && mine)
        (b.mode == READ ? b.entry : b.positions)[position] =
            outside ? OUTSIDE : waits ? DEFERRED : slot;
    if (holds && b.mode == LEASE) enrol(t, b, k, row, slot, slot_address(t, slot), t.mark + slot);
    else if (holds) hold(t, b, k, slot);
    if (b.mode == PREFETCH) append(&c->lacking, lacks);
}

// Copy the rows of a READ that are in slots.
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

// Give the misses of this chunk their slots: write back dirty records there, load the missed rows,
// update the maps. Work that only the host can do goes on its lists.
__device__ void swap_records(const Tier &t, const Batch &b, Team team) {
    Counters *const c = t.counters;
    // Rows without a slot stay in the memory of a direct host tier; only a lease records them.
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
        if (mine && slot >= 0) set_entry(t, row, slot);
        if (b.mode == LEASE) {
            const u32 k = append(&c->distinct, mine);
            if (mine)
                enrol(t, b, k, row, slot, slot >= 0 ? target : host_address(t, row),
                      slot >= 0 ? t.mark + slot : b.contest + m);
        }
    }
}

// Copy the deferred rows of a READ: those in slots, those in host memory, or both.
__device__ void serve_deferred(const Tier &t, const Batch &b, Team team, bool slots, bool host) {
    const u32 deferred = t.counters->deferred;
    const u32 span = span_for(team, deferred);
    for (u64 base = (u64)team.warp * span; base < deferred; base += (u64)team.warps * span) {
        const u64 d = base + lane();
        u64 source = 0, target = 0;
        if (lane() < span && d < deferred) {
            const u32 position = b.deferred[d];
            const i64 row = b.ids[position];
            const i32 entry = entry_of(t, row);
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
            entry = entry_of(t, row);
            if (b.mode == LEASE) {
                enrols = entry >= 0 && touch_first(t, entry, t.stamp[entry], b.now, 0);
            } else {
                u32 *contest;
                if (entry >= 0) touch(t, b, entry, t.stamp[entry], HELD);
                locate(t, b, row, entry, &contest);
                compete(contest, position);
            }
        }
        if (b.mode == LEASE) {
            const u32 k = append(&t.counters->distinct, enrols);
            if (enrols) enrol(t, b, k, row, entry, slot_address(t, entry), t.mark + entry);
        }
    }
}

// Copy the winners into their records and mark these dirty: records in slots, those in host memory,
// which only deferred positions have, or both.
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
            const i32 entry = (u64)row < (u64)t.rows ? entry_of(t, row) : ABSENT;
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

// Write the index of its record for every id of a lease, -1 for ids outside the table, where `probe` put
// its slot, and copy bytes of that record to its position of data, if there is data.
__device__ void serve_lease(const Tier &t, const Batch &b) {
    const Team team = everyone();
    const u32 span = b.data ? span_for(team, b.n) : 32;
    for (i64 base = (i64)team.warp * span; base < b.n; base += (i64)team.warps * span) {
        const i64 position = base + lane();
        u64 source = 0, target = 0;
        if (lane() < span && position < b.n) {
            i32 entry = b.positions[position], index = -1;
            if (entry == DEFERRED) entry = entry_of(t, b.ids[position]);
            if (entry != OUTSIDE)
                index = (i32)(entry >= 0 ? t.mark[entry] : b.contest[FIRST - entry]) - 1;
            b.positions[position] = index;
            if (b.data) {
                source = index >= 0 ? b.records[index] + b.lo : (u64)t.poison;
                target = (u64)(b.data + position * b.bytes);
            }
        }
        if (b.data) copy(source, target, span, b.bytes, b.width);
    }
}

// Reset every mark, claim and counter for the next batch. A lease keeps its rows in direct host memory
// KEPT until it ends.
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
        if (entry_of(t, row) <= FIRST)
            set_entry(t, row, kept || (b.mode == LEASE && t.direct) ? KEPT : ABSENT);
    }
    if (missed)
        for (u32 i = thread(); i < PASSES * BINS; i += threads()) c->histogram[0][i] = 0;
    for (u32 i = thread(); b.in_order && i < REGIONS; i += threads())
        c->claims_in[i] = c->waits_in[i] = c->claims_done[i] = c->waits_done[i] = 0;
    if (thread() == 0) {
        c->missed_ids += deferred;
        c->missed_rows += missed;
#ifdef SPARSE
        t.places->taken += missed;
#endif
        c->missed = c->deferred = c->victims = c->ties = c->distinct = c->absent = c->evicted = 0;
        if (b.mode == LEASE) {
            *b.count = distinct;
            c->leased_rows += distinct;
            c->leased_misses += missed;
        }
    }
}

// The number of blocks, of at least two in all, that use the link for a number of misses: more blocks
// do not make it faster, and with ordered copies few at a time keep the order better. The others copy
// hits.
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
        if (b.last) serve_lease(t, b);
    } else if (waiting || b.mode == WRITE) {
        // If rows stay in host memory, some blocks copy those, and all others copy rows in slots.
        const u32 link = link_blocks(b, c->missed - c->victims);
        const bool far = blockIdx.x < link, both = link == 0;
        const Team part = far ? team(0, link) : team(link, gridDim.x - link);
        if (b.mode == READ) serve_deferred(t, b, part, !far, far || both);
        else write_winners(t, b, part, !far, far || both);
    }
    if (b.last && (waiting || b.mode == LEASE)) tidy(t, b);
}

// Fetch the claimed rows and copy the resident ones concurrently. Cooperative.
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
