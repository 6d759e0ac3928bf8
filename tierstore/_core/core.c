#include "core.h"

#include <stddef.h>

#include "memory.h"
#include "pool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

enum {
    LANE = 512,  /* bytes of each of the three lanes of long data */
    LINE = 64,   /* bytes that memory gives and takes at a time */
    AHEAD = 16,  /* records from the one in hand to those which are fetched from memory */
    BLOCK = 192  /* checksums at a time, on the stack */
};
static const uint32_t ONES = 0xFFFFFFFF; /* the register before the first byte */

static uint32_t steps[8][256]; /* what eight bytes add to the register, by position and value */
static uint32_t lanes[4][256]; /* what LANE zeros make of each byte of the register */

/* The record whose place in the source is at `at`. All places were inside when the call began, but
   others may write to them since: one that is outside now means the first record. */
static inline const uint8_t *placed(const ts_records *r, const uint8_t *at) {
    CHECK(at >= r->at && at < r->at + 8 * r->n);
    const uint64_t place = load64(at);
    return r->source + (place < (uint64_t)r->count ? (int64_t)place : 0) * r->stride;
}

/* Where record i arrives, in the same way. */
static inline uint8_t *arrived(const ts_records *r, int64_t i) {
    if (!r->to) return r->out + i * r->out_stride;
    const uint64_t place = load64(r->to + 8 * i);
    return r->out + (place < (uint64_t)r->room ? (int64_t)place : 0) * r->out_stride;
}

static inline uint32_t over_lane(uint32_t crc) {
    return lanes[0][crc & 255] ^ lanes[1][crc >> 8 & 255] ^ lanes[2][crc >> 16 & 255] ^
           lanes[3][crc >> 24];
}

static inline uint32_t step8(uint32_t crc, uint8_t x) {
    return crc >> 8 ^ steps[0][(crc ^ x) & 255];
}

static inline uint32_t step64(uint32_t crc, uint64_t x) {
    x ^= crc;
    return steps[7][x & 255] ^ steps[6][x >> 8 & 255] ^ steps[5][x >> 16 & 255] ^
           steps[4][x >> 24 & 255] ^ steps[3][x >> 32 & 255] ^ steps[2][x >> 40 & 255] ^
           steps[1][x >> 48 & 255] ^ steps[0][x >> 56];
}

#define NAME(name) table_##name
#define TARGET
#define STEP64(crc, x) step64((uint32_t)(crc), x)
#define STEP8(crc, x) step8((uint32_t)(crc), x)
#include "crc.h"

#if defined(__x86_64__)
#define HARDWARE "sse4.2"
#define NAME(name) hardware_##name
#if defined(__clang__)
#define TARGET __attribute__((target("sse4.2,crc32")))
#else
#define TARGET __attribute__((target("sse4.2")))
#endif
#define STEP64(crc, x) __builtin_ia32_crc32di(crc, x)
#define STEP8(crc, x) __builtin_ia32_crc32qi((uint32_t)(crc), x)
#include "crc.h"

/* Asked of the processor: zig's __builtin_cpu_supports says no to everything. */
static int has_instruction(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_SSE4_2;
}

#elif defined(__aarch64__)
#define HARDWARE "armv8"
#define NAME(name) hardware_##name
#if defined(__clang__)
#define TARGET __attribute__((target("crc")))
#define STEP64(crc, x) __builtin_arm_crc32cd((uint32_t)(crc), x)
#define STEP8(crc, x) __builtin_arm_crc32cb((uint32_t)(crc), x)
#else
#define TARGET __attribute__((target("+crc")))
#define STEP64(crc, x) __builtin_aarch64_crc32cx((uint32_t)(crc), x)
#define STEP8(crc, x) __builtin_aarch64_crc32cb((uint32_t)(crc), x)
#endif
#include "crc.h"

static int has_instruction(void) { return (getauxval(AT_HWCAP) & 1 << 7) != 0; } /* CRC32 */
#endif

typedef struct {
    const char *name;
    uint32_t (*bytes)(uint32_t, const uint8_t *, int64_t);
    void (*rows)(const ts_records *, int64_t, int64_t, uint32_t *);
} ts_dispatch;

static const ts_dispatch by_table = {"table", table_bytes, table_rows};
#ifdef HARDWARE
static const ts_dispatch by_instruction = {HARDWARE, hardware_bytes, hardware_rows};
#endif
static const ts_dispatch *chosen = &by_table;

static void make_tables(void) {
    if (lanes[3][255]) return; /* made before: this one is the last */
    for (uint32_t value = 0; value < 256; value++) {
        uint32_t crc = value;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
        steps[0][value] = crc;
    }
    for (int byte = 1; byte < 8; byte++)
        for (int value = 0; value < 256; value++)
            steps[byte][value] = step8(steps[byte - 1][value], 0);
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t value = 0; value < 256; value++) {
            uint32_t crc = value << 8 * byte;
            for (int k = 0; k < LANE; k += 8) crc = step64(crc, 0);
            lanes[byte][value] = crc;
        }
}

const char *ts_start(const char *dispatch) {
    make_tables();
#ifdef HARDWARE
    if ((!dispatch || !strcmp(dispatch, HARDWARE)) && has_instruction()) {
        chosen = &by_instruction;
        return chosen->name;
    }
#endif
    if (dispatch && strcmp(dispatch, by_table.name)) return NULL;
    chosen = &by_table;
    return chosen->name;
}

uint32_t ts_crc32c(uint32_t value, const uint8_t *data, int64_t n) {
    return ~chosen->bytes(~value, data, n);
}

/* The first of n places that is not below `count`, or n. */
static int64_t first_beyond(const uint8_t *places, int64_t n, int64_t count) {
    uint64_t outside = 0; /* has its highest bit if a place does, or what is left after it */
    for (int64_t i = 0; places && i < n; i++) {
        const uint64_t at = load64(places + 8 * i);
        outside |= at | ((uint64_t)count - 1 - at);
    }
    int64_t i = outside >> 63 ? 0 : n;
    while (i < n && load64(places + 8 * i) < (uint64_t)count) i++;
    return i;
}

/* The position of the first place outside of the source, or of where it goes; or n. */
static int64_t first_outside(const ts_records *r) {
    const int64_t from = first_beyond(r->at, r->n, r->count), to = first_beyond(r->to, r->n, r->room);
    return from < to ? from : to;
}

typedef struct {
    const ts_records *records;
    uint8_t *sums;       /* found, or expected */
    int sparse;
} summed;

static int64_t sum_part(void *work, int64_t begin, int64_t end) {
    const summed *w = work;
    uint32_t found[BLOCK];
    for (; begin < end; begin += BLOCK) {
        const int64_t n = end - begin < BLOCK ? end - begin : BLOCK;
        chosen->rows(w->records, begin, n, found);
        memcpy(w->sums + 4 * begin, found, 4 * (size_t)n);
    }
    return end;
}

int64_t ts_sum_rows(const ts_records *r, uint8_t *sums) {
    const int64_t good = first_outside(r);
    if (good < r->n) return -(good + 1);
    summed work = {r, sums, 0};
    return ts_in_parts(sum_part, &work, r->n, r->n * (r->width + 8));
}

static int is_zero(const uint8_t *p, int64_t n) {
    uint64_t any = 0;
    for (; n >= 8; n -= 8, p += 8) any |= load64(p);
    for (; n; n--, p++) any |= *p;
    return !any;
}

/* Whether record i does not have the checksum that is expected, given the one that it has. */
static int is_wrong(const summed *w, int64_t i, uint32_t found) {
    const ts_records *r = w->records;
    const uint32_t expected = load32(w->sums + 4 * i);
    const uint8_t *record = r->out ? arrived(r, i) : r->source + i * r->stride;
    return found != expected && !(w->sparse && !expected && is_zero(record, r->width));
}

/* Ends before the first record that is wrong; all are copied in any case. */
static int64_t check_part(void *work, int64_t begin, int64_t end) {
    const summed *w = work;
    uint32_t found[BLOCK];
    int64_t good = end;
    for (; begin < end; begin += BLOCK) {
        const int64_t n = end - begin < BLOCK ? end - begin : BLOCK;
        chosen->rows(w->records, begin, n, found);
        if (good < end || !memcmp(found, w->sums + 4 * begin, 4 * (size_t)n)) continue;
        for (int64_t i = 0; i < n && good == end; i++)
            if (is_wrong(w, begin + i, found[i])) good = begin + i;
    }
    return good;
}

int64_t ts_check_rows(const ts_records *r, const uint8_t *sums, int sparse, uint8_t *bad) {
    int64_t good = first_outside(r);
    if (good < r->n) return -(good + 1);
    summed work = {r, (uint8_t *)sums, sparse};
    good = ts_in_parts(check_part, &work, r->n, r->n * (r->width + 8));
    /* which ones are wrong is asked of what arrived, by this thread alone: there are few, or the disk is
       lost */
    int64_t wrong = 0;
    for (int64_t i = good; i < r->n; i++) {
        const ts_records one = {.n = 1,
                                .rows = r->rows + 8 * i,
                                .source = r->out ? arrived(r, i) : r->source + i * r->stride,
                                .count = 1,
                                .width = r->width};
        uint32_t found;
        chosen->rows(&one, 0, 1, &found);
        if (!is_wrong(&work, i, found)) continue;
        CHECK(wrong < r->n);
        store64(bad + 8 * wrong++, (uint64_t)i);
    }
    return wrong;
}
