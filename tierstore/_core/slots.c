/* Rows in slots: look-up, copy, and which slots were used longest ago. A read goes over its ids
   twice: first it only asks whether each row has a slot, so that what fails has changed nothing;
   then, in blocks, it asks for the memory of all records of a block before it copies the first.
   Each row is in a place in memory of its own, and waiting for these is most of the time. */
#include "core.h"
#include "map.h"
#include "pool.h"

enum {
    BLOCK = 32,   /* rows whose memory is asked for at a time */
    NUMBER = 4,
    LINE = 64,    /* bytes that memory gives at a time */
    FETCHED = 4 * LINE,
    LONG = 128,   /* bytes from which the C library's copy is the faster one */
    LOOKED = 128, /* bytes that move while a row is looked up, in time */
    BINS = 2048
};

#define INLINE static inline __attribute__((always_inline))

typedef enum { ROWS, NUMBERS, HASHED } kind; /* of a map; loops are compiled for each */

static kind kind_of(const ts_slots *s) { return !s->map.places ? ROWS : s->map.hashed ? HASHED : NUMBERS; }

/* The slot of a row that is below s->rows, or -1. */
INLINE int64_t slot_of(const ts_slots *s, uint64_t row, kind map) {
    CHECK(row < (uint64_t)s->rows);
    if (map == ROWS)
        return (s->present && !s->present[row]) || row >= (uint64_t)s->slots ? -1 : (int64_t)row;
    uint32_t number = 0;
    if (map == HASHED)
        number = number_of(s->map.places, s->map.count, row);
    else if (row < (uint64_t)s->map.count)
        number = load32(s->map.places + NUMBER * row);
    const int64_t slot = (int64_t)number - 1;
    return slot < s->slots ? slot : -1;
}

INLINE int64_t found_by(const ts_slots *s, const uint8_t *rows, int64_t n, uint8_t *found, int size, kind map) {
    int64_t missing = 0;
    for (int64_t i = 0; i < n; i++) {
        if (map == HASHED && i + AHEAD < n)
            prefetch_entry(s->map.places, s->map.count, load64(rows + 8 * (i + AHEAD)));
        const uint64_t row = load64(rows + 8 * i);
        const int64_t slot = row < (uint64_t)s->rows ? slot_of(s, row, map) : -1;
        missing += slot < 0;
        if (size == 4)
            store32(found + 4 * i, (uint32_t)slot);
        else
            store64(found + 8 * i, (uint64_t)slot);
    }
    return missing;
}

typedef struct {
    ts_slots s;
    const uint8_t *rows;
    uint8_t *found;
    int size;
    int64_t missing; /* atomic */
} search;

/* Parts work on copies of what they are given, which nothing that is written can change. */
static int64_t find_part(void *work, int64_t begin, int64_t end) {
    search *w = work;
    const ts_slots s = w->s;
    const uint8_t *rows = w->rows + 8 * begin;
    const int size = w->size;
    uint8_t *found = w->found + size * begin;
    int64_t missing;
    switch (kind_of(&s)) {
    case ROWS: missing = found_by(&s, rows, end - begin, found, size, ROWS); break;
    case NUMBERS: missing = found_by(&s, rows, end - begin, found, size, NUMBERS); break;
    default: missing = found_by(&s, rows, end - begin, found, size, HASHED);
    }
    __atomic_fetch_add(&w->missing, missing, __ATOMIC_RELAXED);
    return end;
}

int64_t ts_find_slots(const ts_slots *s, const uint8_t *rows, int64_t n, uint8_t *found, int size) {
    search work = {*s, rows, found, size, 0};
    ts_in_parts(find_part, &work, n, n * LOOKED);
    return work.missing;
}

/* Ask for the first lines of a record; the processor itself asks for those behind them. */
static inline void prefetch(const uint8_t *record, int64_t width) {
    const int64_t n = width < FETCHED ? width : FETCHED;
    for (int64_t line = 0; line < n; line += LINE) __builtin_prefetch(record + line);
}

/* Copy a record; most are some words long. */
static inline void copy(uint8_t *to, const uint8_t *from, int64_t n) {
    if (n >= LONG) {
        racing_copy(to, from, n);
        return;
    }
    for (; n >= 32; n -= 32, to += 32, from += 32) racing_copy(to, from, 32);
    if (n & 16) racing_copy(to, from, 16), to += 16, from += 16;
    if (n & 8) racing_copy(to, from, 8), to += 8, from += 8;
    if (n & 4) racing_copy(to, from, 4), to += 4, from += 4;
    for (n &= 3; n; n--, to++, from++) racing_copy(to, from, 1);
}

typedef struct {
    ts_slots s;
    const uint8_t *ids;
    int64_t n, first, most, lo, width;
    uint8_t *out, *slots, *stamps, *ahead;
    uint32_t number;
} batch;

/* The first of ids `begin` to `end` that is bad, or whose row has no slot; or `end`. */
INLINE int64_t first_missing(const batch *b, int64_t begin, int64_t end, kind map) {
    const ts_slots *s = &b->s;
    for (int64_t i = begin; i < end; i++) {
        if (map == HASHED && i + AHEAD < end)
            prefetch_entry(s->map.places, s->map.count, (uint64_t)b->first + load64(b->ids + 8 * (i + AHEAD)));
        const uint64_t id = load64(b->ids + 8 * i);
        if (id >= (uint64_t)b->most || slot_of(s, (uint64_t)b->first + id, map) < 0) return i;
    }
    return end;
}

INLINE void read_some(const batch *b, int64_t begin, int64_t end, kind map) {
    const ts_slots *s = &b->s;
    int64_t slots[BLOCK];
    for (; begin < end; begin += BLOCK) {
        const int count = end - begin < BLOCK ? (int)(end - begin) : BLOCK;
        for (int i = 0; i < count; i++) {
            /* others may write to the ids meanwhile: one that is bad now means some record */
            const uint64_t id = load64(b->ids + 8 * (begin + i));
            const int64_t slot = id < (uint64_t)b->most ? slot_of(s, (uint64_t)b->first + id, map) : 0;
            slots[i] = slot < 0 ? 0 : slot;
            CHECK(slots[i] < s->slots);
            prefetch(s->records + slots[i] * s->stride + b->lo, b->width);
        }
        for (int i = 0; b->slots && i < count; i++)
            store32(b->slots + NUMBER * (begin + i), (uint32_t)slots[i]);
        for (int i = 0; b->stamps && i < count; i++) store32(b->stamps + NUMBER * slots[i], b->number);
        for (int i = 0; b->ahead && i < count; i++) store32(b->ahead + NUMBER * slots[i], 0);
        for (int i = 0; b->out && i < count; i++)
            copy(b->out + (begin + i) * b->width, s->records + slots[i] * s->stride + b->lo, b->width);
    }
}

static int64_t missing_part(void *work, int64_t begin, int64_t end) {
    const batch b = *(const batch *)work;
    switch (kind_of(&b.s)) {
    case ROWS: return first_missing(&b, begin, end, ROWS);
    case NUMBERS: return first_missing(&b, begin, end, NUMBERS);
    default: return first_missing(&b, begin, end, HASHED);
    }
}

static int64_t read_part(void *work, int64_t begin, int64_t end) {
    const batch b = *(const batch *)work;
    switch (kind_of(&b.s)) {
    case ROWS: read_some(&b, begin, end, ROWS); break;
    case NUMBERS: read_some(&b, begin, end, NUMBERS); break;
    default: read_some(&b, begin, end, HASHED);
    }
    return end;
}

int64_t ts_read_slots(const ts_slots *s, const uint8_t *ids, int64_t n, int64_t first, int64_t most,
                      int64_t lo, int64_t width, uint8_t *out, uint8_t *slots, uint8_t *stamps,
                      uint32_t number, uint8_t *ahead) {
    batch all = {*s, ids, n, first, most, lo, width, out, slots, stamps, ahead, number};
    const int64_t nbytes = n * (width + LOOKED), good = ts_in_parts(missing_part, &all, n, nbytes);
    return good < n ? good : ts_in_parts(read_part, &all, n, nbytes);
}

/* -- copies by slot */

INLINE int64_t slot_at(const ts_copies *c, int64_t i, int size) {
    return size == 4 ? (int32_t)load32(c->slots + 4 * i) : (int64_t)load64(c->slots + 8 * i);
}

INLINE void copy_some(const ts_copies *c, int64_t begin, int64_t end, int size, int back) {
    uint8_t *records[BLOCK];
    for (; begin < end; begin += BLOCK) {
        const int count = end - begin < BLOCK ? (int)(end - begin) : BLOCK;
        for (int i = 0; i < count; i++) {
            const uint64_t slot = (uint64_t)slot_at(c, begin + i, size);
            records[i] = c->records + (slot < (uint64_t)c->count ? (int64_t)slot : 0) * c->stride + c->lo;
            prefetch(records[i], c->width);
        }
        uint8_t *data = c->data + begin * c->width;
        for (int i = 0; i < count; i++, data += c->width)
            if (back)
                copy(records[i], data, c->width);
            else
                copy(data, records[i], c->width);
    }
}

static int64_t gather_part(void *work, int64_t begin, int64_t end) {
    const ts_copies c = *(const ts_copies *)work;
    c.size == 4 ? copy_some(&c, begin, end, 4, 0) : copy_some(&c, begin, end, 8, 0);
    return end;
}

static int64_t scatter_part(void *work, int64_t begin, int64_t end) {
    const ts_copies c = *(const ts_copies *)work;
    c.size == 4 ? copy_some(&c, begin, end, 4, 1) : copy_some(&c, begin, end, 8, 1);
    return end;
}

static int64_t copied(const ts_copies *c, ts_part part) {
    for (int64_t i = 0; i < c->n; i++)
        if ((uint64_t)slot_at(c, i, c->size) >= (uint64_t)c->count) return -(i + 1);
    return ts_in_parts(part, (void *)c, c->n, c->n * c->width);
}

int64_t ts_gather(const ts_copies *c) { return copied(c, gather_part); }
int64_t ts_scatter(const ts_copies *c) { return copied(c, scatter_part); }

/* -- which slots were used longest ago */

/* Whether a stamp is from 1 to limit - 1: 0 is none, and wraps. */
static inline int is_below(uint32_t stamp, uint32_t limit) { return stamp - 1 < limit - 1; }

/* The least stamp from `low` to `high` up to which there are n, or `high`. Counted in bins, then
   again within the bin that it is in, until that holds one number. Leaves in n how many are to be
   taken of the stamps that are equal to it. */
static uint32_t limit_of(const uint8_t *stamps, int64_t slots, uint32_t low, uint32_t high, int64_t *n) {
    for (;;) {
        int64_t bins[BINS] = {0};
        int shift = 0;
        while ((high - low) >> shift >= BINS) shift++;
        for (int64_t i = 0; i < slots; i++) {
            const uint32_t above = load32(stamps + NUMBER * i) - low;
            if (above <= high - low) bins[above >> shift]++;
        }
        uint32_t bin = 0;
        for (; bin < (high - low) >> shift && bins[bin] < *n; bin++) *n -= bins[bin];
        low += bin << shift;
        if (!shift) return low;
        if ((high - low) >> shift) high = low + ((1u << shift) - 1);
    }
}

int64_t ts_oldest_slots(const uint8_t *stamps, int64_t slots, uint32_t batch, int64_t n, uint8_t *oldest) {
    if (n < 1 || batch < 2) return 0;
    uint32_t least = batch - 1;
    for (int64_t i = 0; i < slots; i++) {
        const uint32_t stamp = load32(stamps + NUMBER * i);
        if (is_below(stamp, least)) least = stamp;
    }
    int64_t found = 0, equal = n;
    const uint32_t limit = limit_of(stamps, slots, least, batch - 1, &equal);
    for (int64_t i = 0; i < slots && found < n; i++) { /* without a branch: which way it goes is random */
        const uint32_t stamp = load32(stamps + NUMBER * i);
        const int same = stamp == limit && equal > 0;
        store32(oldest + NUMBER * found, (uint32_t)i);
        found += is_below(stamp, limit) | same;
        equal -= same;
    }
    return found;
}
