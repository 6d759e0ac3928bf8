/* The loops over bytes, included once for each way to compute crc32c. Whoever includes it defines
   NAME(name), TARGET, STEP64(crc, x) and STEP8(crc, x): the crc register after 8 bytes or one. */

TARGET static inline uint64_t NAME(some)(uint64_t crc, const uint8_t *p, int64_t n) {
    for (; n >= 8; n -= 8, p += 8) crc = STEP64(crc, load64(p));
    for (; n; n--, p++) crc = STEP8(crc, *p);
    return crc;
}

/* The same, and the bytes copied. Each is read once: what is checked is what arrives, whoever writes
   to them meanwhile. */
TARGET static inline __attribute__((always_inline)) uint64_t NAME(some_copied)(
    uint64_t crc, const uint8_t *p, uint8_t *to, int64_t n) {
    for (; n >= 8; n -= 8, p += 8, to += 8) {
        const uint64_t x = load64(p);
        store64(to, x);
        crc = STEP64(crc, x);
    }
    for (; n; n--, p++, to++) crc = STEP8(crc, *to = *p);
    return crc;
}

/* The register after many bytes. An instruction takes three cycles, but one can begin each cycle:
   three lanes at a time, which are joined by what the bytes behind them make of their registers. */
TARGET static uint32_t NAME(bytes)(uint32_t value, const uint8_t *p, int64_t n) {
    uint64_t crc = value;
    for (; n >= 3 * LANE; n -= 3 * LANE, p += 3 * LANE) {
        uint64_t second = 0, third = 0;
        for (int64_t k = 0; k < LANE; k += 8) {
            crc = STEP64(crc, load64(p + k));
            second = STEP64(second, load64(p + LANE + k));
            third = STEP64(third, load64(p + 2 * LANE + k));
        }
        crc = over_lane(over_lane((uint32_t)crc) ^ (uint32_t)second) ^ third;
    }
    return (uint32_t)NAME(some)(crc, p, n);
}

/* Checksums of n records, three at a time for the same reason. */
TARGET static void NAME(sum)(const uint8_t *rows, const uint8_t *records, int64_t stride,
                             int64_t width, int64_t n, uint32_t *sums) {
    for (; n >= 3; n -= 3, rows += 24, records += 3 * stride, sums += 3) {
        const uint8_t *p = records, *q = p + stride, *s = q + stride;
        uint64_t a = STEP64(ONES, load64(rows)), b = STEP64(ONES, load64(rows + 8));
        uint64_t c = STEP64(ONES, load64(rows + 16));
        int64_t left = width;
        for (; left >= LINE; left -= LINE, p += LINE, q += LINE, s += LINE)
            for (int k = 0; k < LINE; k += 8) {
                a = STEP64(a, load64(p + k));
                b = STEP64(b, load64(q + k));
                c = STEP64(c, load64(s + k));
            }
        sums[0] = ~(uint32_t)NAME(some)(a, p, left);
        sums[1] = ~(uint32_t)NAME(some)(b, q, left);
        sums[2] = ~(uint32_t)NAME(some)(c, s, left);
    }
    for (; n; n--, rows += 8, records += stride)
        *sums++ = ~(uint32_t)NAME(some)(STEP64(ONES, load64(rows)), records, width);
}

/* The same of records from `begin` on, which are copied, a line of memory at a time: to store words
   to three of them by turns takes longer. */
TARGET static void NAME(copy)(const ts_records *r, int64_t begin, int64_t n, uint32_t *sums) {
    const uint8_t *rows = r->rows + 8 * begin, *at = r->at + 8 * begin;
    const int64_t width = r->width, whole = width & -LINE;
    int64_t i = begin;
    for (; n >= 3; n -= 3, i += 3, rows += 24, at += 24, sums += 3) {
        const uint8_t *p = placed(r, at), *q = placed(r, at + 8), *s = placed(r, at + 16);
        uint8_t *to = arrived(r, i), *next = arrived(r, i + 1), *last = arrived(r, i + 2);
        for (int j = AHEAD; n >= AHEAD + 3 && j < AHEAD + 3; j++) {
            __builtin_prefetch(placed(r, at + 8 * j));
            __builtin_prefetch(arrived(r, i + j), 1);
        }
        uint64_t a = STEP64(ONES, load64(rows)), b = STEP64(ONES, load64(rows + 8));
        uint64_t c = STEP64(ONES, load64(rows + 16));
        for (int64_t k = 0; k < whole; k += LINE) {
            a = NAME(some_copied)(a, p + k, to + k, LINE);
            b = NAME(some_copied)(b, q + k, next + k, LINE);
            c = NAME(some_copied)(c, s + k, last + k, LINE);
        }
        sums[0] = ~(uint32_t)NAME(some_copied)(a, p + whole, to + whole, width - whole);
        sums[1] = ~(uint32_t)NAME(some_copied)(b, q + whole, next + whole, width - whole);
        sums[2] = ~(uint32_t)NAME(some_copied)(c, s + whole, last + whole, width - whole);
    }
    for (; n; n--, i++, rows += 8, at += 8) {
        const uint64_t a = STEP64(ONES, load64(rows));
        *sums++ = ~(uint32_t)NAME(some_copied)(a, placed(r, at), arrived(r, i), width);
    }
}

/* Checksums of records `begin` to `begin + n`. */
TARGET static void NAME(rows)(const ts_records *given, int64_t begin, int64_t n, uint32_t *sums) {
    const ts_records here = *given, *r = &here; /* which nothing that is written may change */
    CHECK(begin >= 0 && n >= 0 && begin + n <= r->n && (r->out || r->n <= r->count));
    if (r->out)
        NAME(copy)(r, begin, n, sums);
    else
        NAME(sum)(r->rows + 8 * begin, r->source + begin * r->stride, r->stride, r->width, n, sums);
}

#undef NAME
#undef TARGET
#undef STEP64
#undef STEP8
