/* Steps of optimizers on the records of rows. Each is what torch does on the CPU, operation by
   operation and rounded where torch rounds, but for the square root: torch's own, which is not the
   same on all processors, is taken by the caller, of numbers without gaps. So a step has two halves:
   ts_begin_step changes the states and writes what roots are to be taken of, ts_end_step changes the
   weights, given the roots.

   torch multiplies and adds in one operation where the processor can, and so do the loops here;
   where it cannot, ts_fuses() says so, and no step may be called. */
#include "core.h"
#include "memory.h"
#include "pool.h"

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF /* as gcc has it where it keeps to the standard */
#endif

#ifdef __x86_64__
#include <cpuid.h>
#define FUSED __attribute__((target("avx2,fma")))

/* Asked of the processor, and of the system, which must keep the wide registers. */
int ts_fuses(void) {
    unsigned a, b, c, d, low, high;
    const unsigned wanted = bit_FMA | bit_OSXSAVE | bit_AVX;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & wanted) != wanted) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & 6) == 6;
}
#else
#define FUSED
int ts_fuses(void) { return 1; }
#endif

#define INLINE static inline __attribute__((always_inline)) FUSED

enum { AHEAD = 8, LINE = 64, LANES = 32 }; /* records that are asked for early; torch's columns */

static inline int64_t slot_at(const ts_step *s, int64_t i) {
    return s->size == 4 ? (int32_t)load32(s->slots + 4 * i) : (int64_t)load64(s->slots + 8 * i);
}

/* The record of row i; asks for that of a later row. */
static inline uint8_t *record_of(const ts_step *s, int64_t i) {
    if (i + AHEAD < s->n) {
        const uint64_t slot = (uint64_t)slot_at(s, i + AHEAD);
        const uint8_t *next = s->records + (slot < (uint64_t)s->count ? (int64_t)slot : 0) * s->stride;
        for (int64_t at = s->lo; at < s->hi; at += LINE) __builtin_prefetch(next + at, 1);
    }
    const uint64_t slot = (uint64_t)slot_at(s, i); /* checked before, but others may write to it */
    return s->records + (slot < (uint64_t)s->count ? (int64_t)slot : 0) * s->stride;
}

#define REAL float
#define NAMED(name) name##_float
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
#include "step.h"
#undef REAL
#undef NAMED
#undef FMA

#define REAL double
#define NAMED(name) name##_double
#define FMA(a, b, c) __builtin_fma(a, b, c)
#include "step.h"

/* Rows `begin` to `end` of a step, as a step of their own. */
static ts_step some_of(const ts_step *s, int64_t begin, int64_t end) {
    ts_step some = *s;
    const int64_t roots = s->rule == TS_ROWWISE ? 1 : s->dim;
    some.n = end - begin;
    some.slots += s->size * begin;
    some.gradient += s->real * s->dim * begin;
    if (s->trained) some.trained += begin;
    if (s->roots) some.roots += s->real * roots * begin;
    return some;
}

static int64_t begin_part(void *work, int64_t begin, int64_t end) {
    const ts_step s = some_of(work, begin, end);
    s.real == sizeof(float) ? begin_float(&s) : begin_double(&s);
    return end;
}

static int64_t end_part(void *work, int64_t begin, int64_t end) {
    const ts_step s = some_of(work, begin, end);
    s.real == sizeof(float) ? end_float(&s) : end_double(&s);
    return end;
}

static int64_t step(const ts_step *s, ts_part part) {
    for (int64_t i = 0; i < s->n; i++)
        if ((uint64_t)slot_at(s, i) >= (uint64_t)s->count) return -(i + 1);
    return ts_in_parts(part, (void *)s, s->n, s->n * (s->hi - s->lo));
}

int64_t ts_begin_step(const ts_step *s) { return step(s, begin_part); }
int64_t ts_end_step(const ts_step *s) { return step(s, end_part); }
