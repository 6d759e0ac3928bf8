/* The ids of a batch by row, and sums of what belongs to each id. */
#include "core.h"
#include "memory.h"
#include "pool.h"

enum {
    SHORT = 4096, /* ids below which counting more digits takes longer than another pass */
    DIGIT = 11,   /* bits by which many are sorted at a time, and few */
    SHORT_DIGIT = 8,
    AHEAD = 8,    /* values that are asked for early */
    LINE = 64
};

#define INLINE static inline __attribute__((always_inline))

static int bits_of(uint64_t x) { return x ? 64 - __builtin_clzll(x) : 0; }

/* An item is an id and, in the `shift` bits below it, its position; or, without a shift, where both have
   no room in a word, its position alone. One that was changed meanwhile stays inside. */
INLINE uint64_t id_of(const uint8_t *ids, int64_t n, uint64_t item, int shift) {
    return shift ? item >> shift : load64(ids + 8 * (item < (uint64_t)n ? item : 0));
}

/* Sort n items by the digits of their ids, of so many bits, the lowest first: Knuth, TAOCP 3, 5.2.5.
   Returns where they are then, `from` or `to`. */
INLINE uint8_t *by_digits(const uint8_t *ids, int64_t n, uint8_t *from, uint8_t *to, int bits, int shift) {
    const int most = n < SHORT ? SHORT_DIGIT : DIGIT, passes = (bits + most - 1) / most;
    const int width = passes ? (bits + passes - 1) / passes : 1;
    const uint64_t mask = ((uint64_t)1 << width) - 1;
    for (int low = 0; low < bits; low += width) {
        int64_t counts[1 << DIGIT];
        memset(counts, 0, sizeof *counts << width);
        for (int64_t i = 0; i < n; i++) counts[id_of(ids, n, load64(from + 8 * i), shift) >> low & mask]++;
        for (int64_t d = 0, sum = 0; d <= (int64_t)mask; d++) {
            const int64_t count = counts[d];
            counts[d] = sum;
            sum += count;
        }
        for (int64_t i = 0; i < n; i++) {
            const uint64_t item = load64(from + 8 * i);
            const int64_t at = counts[id_of(ids, n, item, shift) >> low & mask]++;
            store64(to + 8 * (at < n ? at : 0), item);
        }
        uint8_t *sorted = to;
        to = from;
        from = sorted;
    }
    return from;
}

/* Order, starts and rows, given the items in order, which may be in either of the memories. */
INLINE int64_t divided(const uint8_t *ids, int64_t n, const uint8_t *items, int shift, uint8_t *order,
                       uint8_t *starts, uint8_t *rows) {
    const uint64_t mask = shift ? ((uint64_t)1 << shift) - 1 : UINT64_MAX;
    int64_t distinct = 0;
    uint64_t last = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t item = load64(items + 8 * i), id = id_of(ids, n, item, shift);
        store64(order + 8 * i, item & mask);
        if (i && id == last) continue;
        store64(starts + 8 * distinct, (uint64_t)i);
        store64(rows + 8 * distinct++, last = id); /* which is not behind item i */
    }
    store64(starts + 8 * distinct, (uint64_t)n);
    return distinct;
}

int64_t ts_group(const uint8_t *ids, int64_t n, uint8_t *order, uint8_t *starts, uint8_t *rows) {
    const int below = bits_of(n > 1 ? (uint64_t)n - 1 : 0);
    uint64_t any = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t id = load64(ids + 8 * i);
        any |= id;
        store64(order + 8 * i, id << below | (uint64_t)i);
    }
    for (int64_t i = 0; any >> 63 && i < n; i++)
        if (load64(ids + 8 * i) >> 63) return -(i + 1);
    const int bits = bits_of(any);
    if (below && bits + below <= 64)
        return divided(ids, n, by_digits(ids, n, order, rows, bits, below), below, order, starts, rows);
    for (int64_t i = 0; i < n; i++) store64(order + 8 * i, (uint64_t)i);
    return divided(ids, n, by_digits(ids, n, order, rows, bits, 0), 0, order, starts, rows);
}

/* The value that is number i in order; `part` is where the one before it was, most are in the same. */
INLINE const uint8_t *value_of(const ts_sums *s, int64_t i, int64_t *part) {
    const uint64_t given = load64(s->order + 8 * i); /* checked before, but others may write to it */
    const int64_t number = given < (uint64_t)s->count ? (int64_t)given : 0;
    int64_t k = number < s->parts[*part].first ? 0 : *part;
    while (number - s->parts[k].first >= s->parts[k].n) k++;
    *part = k;
    return s->parts[k].values + (number - s->parts[k].first) * s->parts[k].stride;
}

/* Adds start from zero, as torch's do: a sum of one value that is -0 is 0. */
#define SUMS(NAME, REAL)                                                                                     \
    static void NAME(const ts_sums *s, int64_t group, int64_t end) {                                         \
        const int64_t dim = s->dim;                                                                          \
        int64_t here = 0, ahead = 0;                                                                         \
        for (; group < s->groups; group++) {                                                                 \
            const int64_t first = (int64_t)load64(s->starts + 8 * group);                                    \
            const uint64_t behind = load64(s->starts + 8 * (group + 1));                                     \
            const int64_t stop = behind < (uint64_t)s->n ? (int64_t)behind : s->n;                           \
            if (first < 0 || first >= end) break;                                                            \
            REAL *restrict to = (REAL *)s->sums + group * dim;                                               \
            for (int64_t k = 0; k < dim; k++) to[k] = 0;                                                     \
            for (int64_t i = first; i < stop; i++) {                                                         \
                if (i + AHEAD < s->n) {                                                                      \
                    const uint8_t *next = value_of(s, i + AHEAD, &ahead);                                    \
                    for (int64_t at = 0; at < s->real * dim; at += LINE) __builtin_prefetch(next + at);      \
                }                                                                                            \
                const REAL *restrict value = (const REAL *)value_of(s, i, &here);                            \
                for (int64_t k = 0; k < dim; k++) to[k] += value[k];                                         \
            }                                                                                                \
        }                                                                                                    \
    }

SUMS(sums_of_floats, float)
SUMS(sums_of_doubles, double)

/* A part has the groups that begin in it: so parts take as long as each other, whatever repeats. */
static int64_t sum_part(void *work, int64_t begin, int64_t end) {
    const ts_sums s = *(const ts_sums *)work;
    int64_t low = 0, high = s.groups; /* the first that begins there */
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if ((int64_t)load64(s.starts + 8 * middle) < begin)
            low = middle + 1;
        else
            high = middle;
    }
    s.real == sizeof(float) ? sums_of_floats(&s, low, end) : sums_of_doubles(&s, low, end);
    return end;
}

int64_t ts_sum_groups(const ts_sums *s) {
    for (int64_t i = 0; i < s->n; i++)
        if (load64(s->order + 8 * i) >= (uint64_t)s->count) return -(i + 1);
    int64_t before = -1;
    for (int64_t g = 0; g <= s->groups; g++) {
        const int64_t start = (int64_t)load64(s->starts + 8 * g);
        if (start <= before || (g ? start > s->n : start) || (g == s->groups && start != s->n)) return -(g + 1);
        before = start;
    }
    return ts_in_parts(sum_part, (void *)s, s->n, s->n * s->dim * s->real);
}
