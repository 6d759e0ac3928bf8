/* What the core can do, in plain memory. It knows no Python, allocates nothing, keeps nothing but
   the tables and the choice that ts_start makes and the threads of pool.h, and trusts the sizes that it
   is given: binding.c checks them. What stands in the arrays it does not trust. Numbers in memory are
   little-endian and need no alignment. */
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
    uint8_t *out;           /* `room` records, `out_stride` bytes apart; NULL: nothing is copied */
    const uint8_t *to;      /* n int64, distinct: where in `out` each goes; NULL: in order */
    int64_t room, out_stride;
} ts_records;

/* Make the tables and choose a dispatch: "sse4.2", "armv8" or "table". NULL: the best that this
   processor has. Returns its name, or NULL if the processor lacks it. Results never differ. */
const char *ts_start(const char *dispatch);

/* From now on, let at most so many threads work on one call, on 1 to 64, and no more than the caller may
   use cores; each on at least so many bytes, or on as many as pay off where that is 0, which also says
   from how many on a call is shared. */
void ts_set_threads(int threads, int64_t part_bytes);

/* crc32c of `n` bytes, continuing from `value`, the crc32c of what is before them. */
uint32_t ts_crc32c(uint32_t value, const uint8_t *data, int64_t n);

/* Copy each record to `out`, if there is one, and write crc32c(row as int64, record) to `sums`, n
   uint32. Returns n, or -(i + 1) for the first place `at[i]` outside of the source, or `to[i]` outside
   of `out`; then nothing was read. */
int64_t ts_sum_rows(const ts_records *records, uint8_t *sums);

/* The same, but compare with the checksums `sums`. Writes the positions of those that differ to
   `bad`, n int64, and returns how many; or as ts_sum_rows. Where `sparse`, a record of zeros whose
   checksum is 0 was never written and counts as equal. */
int64_t ts_check_rows(const ts_records *records, const uint8_t *sums, int sparse, uint8_t *bad);

/* Texts, one after another: text i is blob[offsets[i]:offsets[i + 1]]. */
typedef struct {
    const uint8_t *blob;    /* NULL: there are none */
    int64_t bytes;
    const uint8_t *offsets; /* n + 1 int64 */
    int64_t n;
} ts_texts;

/* A map from keys to rows, by open addressing: see ../_keys/hashmap.py. The code of a row's key is
   at codes[row]. Where there are texts, they are the keys, by row, and codes are their hashes. */
typedef struct {
    uint8_t *places;        /* segments << bits uint32: a row + 1, or 0 */
    int64_t segments;
    int bits, probes;       /* of a place within a segment; and how many a key has */
    uint8_t *codes;         /* rows uint64 */
    int64_t rows;
    ts_texts texts;
} ts_keys;

/* Write the row of each of n keys, with these codes (n uint64) and texts, to `found`, n int64; -1
   where no place leads to one. */
void ts_find_keys(const ts_keys *keys, const uint8_t *codes, const ts_texts *texts, int64_t n,
                  uint8_t *found);

/* Enter the keys whose codes stand at codes[first + at], from *at to n, with texts likewise: each
   gets row *next, which goes up by one. Write the row that has its key to found[at]; that is an
   earlier one if the key repeats. Where `dense`, a repeated key takes no row: the codes move up.
   Ends before a key that finds no place in all its probes. */
void ts_enter_keys(const ts_keys *keys, int64_t first, int64_t n, int dense, int64_t *at,
                   int64_t *next, uint8_t *found);

/* Place n rows whose keys are not in the map, given as entries, row + 1 as uint32. Writes those
   that find no place to `left`, n int64, and returns how many. */
int64_t ts_place_keys(const ts_keys *keys, const uint8_t *entries, int64_t n, uint8_t *left);

/* Write where n texts end, those at `at`, n int64, one after another, to `offsets`, n + 1 int64 of
   which the first is 0; and where `out` is not NULL, copy them there. Returns how many bytes they
   have, or -(i + 1) for the first at[i] that is no text: then it wrote no more. */
int64_t ts_take_texts(const ts_texts *texts, const uint8_t *at, int64_t n, uint8_t *offsets,
                      uint8_t *out);

/* Write the first half of MurmurHash3_x64_128, seed 0, of each text to `hashes`, n uint64; 0 for
   one longer than `longest`. Returns how many are. */
int64_t ts_hash_texts(const ts_texts *texts, int64_t longest, uint8_t *hashes);

/* A number for each row, uint32, or 0: by row, or hashed, in entries of 12 bytes; see map.h. */
typedef struct {
    uint8_t *places;
    int64_t count;          /* places: rows, or entries */
    int hashed;
} ts_map;

/* Give n rows their `numbers`, n uint32, or none where that is 0 or NULL; with `raise` only where it
   is larger than the row's. Counts in `held` how many rows have a number. Returns n, or -(i + 1) for
   the first row that is not below `count`, or for which no entry is free: those before it have
   theirs. Of rows that repeat, the last counts. */
int64_t ts_set_numbers(const ts_map *map, const uint8_t *rows, int64_t n, const uint8_t *numbers, int raise,
                       int64_t *held);

/* Rows in slots. A row has the slot that is one less than its number, or none where that is 0. */
typedef struct {
    const uint8_t *records; /* slots records of `stride` bytes */
    int64_t slots, stride;
    ts_map map;             /* without places, rows are slots */
    int64_t rows;
    const uint8_t *present; /* uint8 for each row; NULL, or 0 where it has no slot */
} ts_slots;

/* Read a batch. Return the first of n whose id is not below `most` or whose row, first + id, has no
   slot: then nothing was read or written. Else return n: bytes [lo, lo + width) of the record of
   each are in `out`, one after another; its slot is in `slots`, n int32; and at its slot, uint32
   each, the number `batch` is in `stamps` and 0 in `ahead`. Each of these may be NULL. */
int64_t ts_read_slots(const ts_slots *s, const uint8_t *ids, int64_t n, int64_t first, int64_t most,
                      int64_t lo, int64_t width, uint8_t *out, uint8_t *slots, uint8_t *stamps,
                      uint32_t batch, uint8_t *ahead);

/* Write the slot of each of n rows, or -1, to `found`, n int32 or int64, of `size` bytes. Returns how
   many have none. */
int64_t ts_find_slots(const ts_slots *s, const uint8_t *rows, int64_t n, uint8_t *found, int size);

/* Bytes [lo, lo + width) of the records in slots, and the same bytes one after another in `data`. */
typedef struct {
    uint8_t *records;       /* count records of `stride` bytes */
    int64_t count, stride;
    const uint8_t *slots;   /* n int32 or int64, of `size` bytes */
    int size;
    int64_t n, lo, width;
    uint8_t *data;
} ts_copies;

/* Copy from the records to `data`, or back to the records. Returns n, or -(i + 1) for the first slot
   that is none: then nothing was copied. Those that are copied to are distinct. */
int64_t ts_gather(const ts_copies *c);
int64_t ts_scatter(const ts_copies *c);

/* Write, of the slots whose stamps are from 1 to `batch` - 1, the n with the lowest ones, in the
   order of slots, to `oldest`, n int32; of equal ones the first slots. Returns how many. */
int64_t ts_oldest_slots(const uint8_t *stamps, int64_t slots, uint32_t batch, int64_t n, uint8_t *oldest);

/* Group n ids, int64 from 0 on, by row: write their positions, those of one row after those of another,
   to `order`, n int64; where each row's begin, and n, to `starts`, up to n + 1 int64; and the distinct
   rows, ascending, to `rows`, up to n int64, all of which it uses. Returns how many are distinct, or
   -(i + 1) for the first id that is negative: then what was written means nothing. */
int64_t ts_group(const uint8_t *ids, int64_t n, uint8_t *order, uint8_t *starts, uint8_t *rows);

/* Values of number `first` and those after it, `n` of them: `dim` numbers each, `stride` bytes apart. */
typedef struct {
    const uint8_t *values;
    int64_t first, n, stride;
} ts_values;

/* Sums of n values by group: those of the numbers order[starts[g]:starts[g + 1]] go to sums[g]. What is
   added is float or double, of `real` bytes, and aligned. */
typedef struct {
    const ts_values *parts; /* `count` values, one part after another; at least one */
    int64_t count, n, groups, dim;
    const uint8_t *order, *starts; /* n, and groups + 1 int64 */
    uint8_t *sums;          /* groups x dim */
    int real;
} ts_sums;

/* Add from zero, in that order. Returns n, or -(i + 1) for the first item of `order` that is the number
   of no value, or else of `starts` that is not more than the one before it, from 0 to n. */
int64_t ts_sum_groups(const ts_sums *s);

/* Whether the pages of a sample of n rows of mapped memory, of `count` records of `width` bytes, are all
   in memory: 1 or 0; or -(i + 1) for the first row that is none. */
int64_t ts_in_memory(const uint8_t *records, int64_t count, int64_t width, const uint8_t *rows, int64_t n);

/* Optimizers, and what a step of one does besides. */
enum { TS_SGD = 1, TS_ADAM, TS_ADAGRAD, TS_ROWWISE };
enum { TS_MAXIMIZE = 1, TS_DECOUPLED = 2, TS_MOMENTUM = 4, TS_NESTEROV = 8 };
enum { TS_NUMBERS = 8, TS_STATES = 2 };

/* A step on the records of n rows. Fields are of float or double, as `real` says, and lie in the
   bytes [lo, hi) of a record; all of these, strides and addresses are multiples of `real`. */
typedef struct {
    uint8_t *records;       /* count records of `stride` bytes */
    int64_t count, stride, lo, hi;
    const uint8_t *slots;   /* n int32 or int64, of `size` bytes; distinct */
    int size, real;
    int64_t n, dim;         /* numbers of a weight, and of each state; of row-wise states one */
    int64_t weight, states[TS_STATES]; /* the first byte of each */
    const uint8_t *gradient; /* n x dim */
    const uint8_t *trained; /* n uint8, 0 for rows that are left alone; NULL: for none */
    uint8_t *roots;         /* n x dim; of row-wise n */
    int rule, flags;
    double numbers[TS_NUMBERS]; /* those of step.cu, in its order */
} ts_step;

/* Whether this processor multiplies and adds in one operation; no step may be called otherwise. */
int ts_fuses(void);

/* The halves of a step. The first changes the states and writes to `roots` what the square roots
   are to be taken of; SGD has none. The second changes the weights, and the state of SGD, given the
   roots. Each returns n, or -(i + 1) for the first slot that is none: then nothing was changed. */
int64_t ts_begin_step(const ts_step *s);
int64_t ts_end_step(const ts_step *s);

#endif
