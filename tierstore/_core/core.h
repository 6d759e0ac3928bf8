/* What the core can do, in plain memory. It knows no Python, allocates nothing, keeps nothing but
   the tables and the choice that ts_start makes, and trusts the sizes that it is given: binding.c
   checks them. Numbers in memory are little-endian and need no alignment. */
#ifndef TS_CORE_H
#define TS_CORE_H

#include <stdint.h>

/* Records, one for each of `n` rows. */
typedef struct {
    int64_t n;              /* rows, and records that are read */
    const uint8_t *rows;    /* n int64: the row id of each */
    const uint8_t *at;      /* n int64: where in the source each is; NULL, like `out`: in order */
    const uint8_t *source;  /* `count` records of `width` bytes, `stride` bytes apart */
    int64_t count, stride, width;
    uint8_t *out;           /* n records, `out_stride` bytes apart; NULL: nothing is copied */
    int64_t out_stride;
} ts_records;

/* Make the tables and choose a dispatch: "sse4.2", "armv8" or "table". NULL: the best that this
   processor has. Returns its name, or NULL if the processor lacks it. Results never differ. */
const char *ts_start(const char *dispatch);

/* crc32c of `n` bytes, continuing from `value`, the crc32c of what is before them. */
uint32_t ts_crc32c(uint32_t value, const uint8_t *data, int64_t n);

/* Copy each record to `out`, if there is one, and write crc32c(row as int64, record) to `sums`, n
   uint32. Returns n, or -(i + 1) for the first place `at[i]` outside of the source; then nothing
   was read. */
int64_t ts_sum_rows(const ts_records *records, uint8_t *sums);

/* The same, but compare with the checksums `sums`. Writes the positions of those that differ to
   `bad`, n int64, and returns how many; or as ts_sum_rows. Where `sparse`, a record of zeros whose
   checksum is 0 was never written and counts as equal. */
int64_t ts_check_rows(const ts_records *records, const uint8_t *sums, int sparse, uint8_t *bad);

#endif
