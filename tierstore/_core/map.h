/* A number for each of some rows, by linear probing: an entry is a row, int64, and its number, uint32,
   or 0 where there is none. Memory of zeros is an empty map. A row is found from its home on, before
   the next entry that is empty: so what is removed is replaced by what stands behind it and is at
   home before it. Readers that take no lock may find anything meanwhile, but end. */
#ifndef TS_MAP_H
#define TS_MAP_H

#include "memory.h"

enum { ENTRY = 12, NUMBER_AT = 8, FIRST = 2, AHEAD = 16 /* rows whose entries are asked for ahead */ };

/* Fibonacci hashing, and the product's high bits in place of a remainder: Knuth, TAOCP 3, 6.4. */
static inline uint64_t home_of(uint64_t row, int64_t count) {
    const uint64_t mixed = (row ^ row >> 32) * 0x9E3779B97F4A7C15u;
    return (mixed >> 32) * (uint64_t)count >> 32;
}

/* The entry of a row or, where it has none, the first empty one from its home on; `count` if none is
   empty. */
static inline uint64_t entry_of(const uint8_t *entries, int64_t count, uint64_t row, uint32_t *number) {
    uint64_t i = home_of(row, count);
    for (int64_t probes = 0; probes < count; probes++) {
        const uint8_t *entry = entries + ENTRY * i;
        *number = load32(entry + NUMBER_AT);
        if (!*number || load64(entry) == row) return i;
        if (++i == (uint64_t)count) i = 0;
    }
    *number = 0;
    return (uint64_t)count;
}

/* The number of a row, or 0. Most rows are in the first entries from their home on, and which of
   these it is cannot be foreseen: all are looked at, without a branch for each. With two of them 2,048
   look-ups took 22 us, with three or four 24, one by one 36. */
static inline uint32_t number_of(const uint8_t *entries, int64_t count, uint64_t row) {
    const uint64_t i = home_of(row, count);
    uint32_t number = 0, ended = 0;
    if (i + FIRST <= (uint64_t)count) {
        const uint8_t *entry = entries + ENTRY * i;
        for (int k = 0; k < FIRST; k++, entry += ENTRY) {
            const uint32_t n = load32(entry + NUMBER_AT);
            ended |= !n;
            number |= n & (0 - (uint32_t)(load64(entry) == row));
        }
        if (ended | number) return number; /* an empty entry may keep a row that has gone */
    }
    entry_of(entries, count, row, &number);
    return number;
}

/* Ask for the entry of a row that is looked up soon. */
static inline void prefetch_entry(const uint8_t *entries, int64_t count, uint64_t row) {
    __builtin_prefetch(entries + ENTRY * home_of(row, count));
}

#endif
