/* Which pages of mapped files are in memory, asked of the system for a sample: a call for each row of a
   batch would take longer than copying them. */
#define _DEFAULT_SOURCE
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core.h"
#include "memory.h"

enum {
    AT_ONCE = 1024,      /* pages in a call of the system */
    NEAR = 16 << 20,     /* bytes of which asking for all pages takes less time than for some */
    CLOSE = 4,           /* pages between two samples that are asked for too: most have rows as well */
    SAMPLES = 64,
    ROWS_A_SAMPLE = 16
};

/* Whether all pages from the one of `first` to that of the byte before `end` are; not if the system does
   not say. */
static int are_in_memory(uintptr_t first, uintptr_t end, uintptr_t page) {
    unsigned char state[AT_ONCE];
    for (uintptr_t at = first / page * page; at < end; at += AT_ONCE * page) {
        const uintptr_t pages = (end - at + page - 1) / page, n = pages < AT_ONCE ? pages : AT_ONCE;
        if (mincore((void *)at, n * page, state)) return 0;
        for (uintptr_t i = 0; i < n; i++)
            if (!(state[i] & 1)) return 0;
    }
    return 1;
}

int64_t ts_in_memory(const uint8_t *records, int64_t count, int64_t width, const uint8_t *rows, int64_t n) {
    const uintptr_t start = (uintptr_t)records, page = (uintptr_t)sysconf(_SC_PAGESIZE);
    int64_t low = count, high = -1;
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = (int64_t)load64(rows + 8 * i);
        if ((uint64_t)row >= (uint64_t)count) return -(i + 1);
        low = row < low ? row : low, high = row > high ? row : high;
    }
    const uintptr_t from = start + (uintptr_t)(low * width), to = start + (uintptr_t)((high + 1) * width);
    if (high < low || (to - from <= NEAR && are_in_memory(from, to, page))) return 1;
    const int64_t samples = n / ROWS_A_SAMPLE < SAMPLES ? n / ROWS_A_SAMPLE + 1 : SAMPLES;
    uintptr_t first = 0, end = 0; /* of samples that lie close together */
    for (int64_t i = 0; i < n; i += n / samples) {
        const uint64_t row = load64(rows + 8 * i);
        const uintptr_t at = start + (uintptr_t)(row < (uint64_t)count ? row : 0) * (uintptr_t)width;
        if (end && (at < first || at > end + CLOSE * page)) {
            if (!are_in_memory(first, end, page)) return 0;
            end = 0;
        }
        if (!end) first = at;
        end = at + (uintptr_t)width > end ? at + (uintptr_t)width : end;
    }
    return are_in_memory(first, end, page);
}
