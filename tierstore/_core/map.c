/* Changes of a map from rows to numbers, by row or hashed. */
#include "map.h"
#include "core.h"

/* Empty an entry: the next one that need not be behind it moves here, and so on. */
static void removed(uint8_t *entries, int64_t count, uint64_t hole) {
    uint64_t i = hole;
    for (int64_t probes = 1; probes < count; probes++) {
        if (++i == (uint64_t)count) i = 0;
        const uint8_t *entry = entries + ENTRY * i;
        const uint32_t number = load32(entry + NUMBER_AT);
        if (!number) break;
        const uint64_t row = load64(entry), home = home_of(row, count);
        /* it stays where its home is after the hole, around the end */
        if (hole < i ? hole < home && home <= i : hole < home || home <= i) continue;
        store64(entries + ENTRY * hole, row);
        store32(entries + ENTRY * hole + NUMBER_AT, number);
        hole = i;
    }
    store32(entries + ENTRY * hole + NUMBER_AT, 0);
}

static int set_hashed(const ts_map *m, uint64_t row, uint32_t number, int raise, int64_t *held) {
    uint32_t known;
    const uint64_t i = entry_of(m->places, m->count, row, &known);
    if (raise && known >= number) return 1;
    if (!number) {
        if (known) removed(m->places, m->count, i), --*held;
        return 1;
    }
    if (!known) {
        /* one stays empty, where searches end; there may be none, whatever `held` says */
        if (i == (uint64_t)m->count || *held + 1 >= m->count) return 0;
        store64(m->places + ENTRY * i, row);
        ++*held;
    }
    store32(m->places + ENTRY * i + NUMBER_AT, number);
    return 1;
}

static int set_by_row(const ts_map *m, uint64_t row, uint32_t number, int raise, int64_t *held) {
    if (row >= (uint64_t)m->count) return 0;
    const uint32_t known = load32(m->places + 4 * row);
    if (raise && known >= number) return 1;
    *held += (number != 0) - (known != 0);
    store32(m->places + 4 * row, number);
    return 1;
}

int64_t ts_set_numbers(const ts_map *m, const uint8_t *rows, int64_t n, const uint8_t *numbers, int raise,
                       int64_t *held) {
    for (int64_t i = 0; i < n; i++) {
        if (i + AHEAD < n) {
            const uint64_t next = load64(rows + 8 * (i + AHEAD));
            if (m->hashed)
                prefetch_entry(m->places, m->count, next);
            else if (next < (uint64_t)m->count)
                __builtin_prefetch(m->places + 4 * next);
        }
        const uint32_t number = numbers ? load32(numbers + 4 * i) : 0;
        const uint64_t row = load64(rows + 8 * i);
        if (!(m->hashed ? set_hashed : set_by_row)(m, row, number, raise, held)) return -(i + 1);
    }
    return n;
}
