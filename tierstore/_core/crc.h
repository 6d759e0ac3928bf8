/* The loops over bytes, included once for each way to compute crc32c. Whoever includes it defines
   NAME(name), TARGET, STEP64(crc, x) and STEP8(crc, x): the crc register after 8 bytes or one. */

TARGET static inline uint64_t NAME(some)(uint64_t crc, const uint8_t *p, int64_t n) {
    for (; n >= 8; n -= 8, p += 8) crc = STEP64(crc, load64(p));
    for (; n; n--, p++) crc = STEP8(crc, *p);
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

/* Checksums of records `begin` to `begin + n`; each word is loaded once, to be checked and copied. */
TARGET static inline __attribute__((always_inline)) void NAME(each)(
    const ts_records *given, int64_t begin, int64_t n, uint32_t *sums, const int copies) {
    const ts_records here = *given, *r = &here; /* which nothing that is written may change */
    const int64_t words = r->width & ~(int64_t)7;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const uint8_t *from[LANES];
        uint8_t *to[LANES];
        uint64_t crc[LANES];
        for (int j = 0; j < LANES; j++) {
            const int64_t at = begin + i + j;
            from[j] = record_at(r, at);
            to[j] = copies ? r->out + at * r->out_stride : NULL;
            crc[j] = STEP64(0xFFFFFFFFu, load64(r->rows + 8 * at));
            if (r->at && at + AHEAD < r->n) __builtin_prefetch(record_at(r, at + AHEAD), 0, 3);
        }
        for (int64_t k = 0; k < words; k += 8)
            for (int j = 0; j < LANES; j++) {
                const uint64_t x = load64(from[j] + k);
                crc[j] = STEP64(crc[j], x);
                if (copies) store64(to[j] + k, x);
            }
        for (int j = 0; j < LANES; j++) {
            for (int64_t k = words; k < r->width; k++) {
                const uint8_t x = from[j][k];
                crc[j] = STEP8(crc[j], x);
                if (copies) to[j][k] = x;
            }
            sums[i + j] = ~(uint32_t)crc[j];
        }
    }
    for (; i < n; i++) {
        const uint8_t *from = record_at(r, begin + i);
        if (copies) from = memcpy(r->out + (begin + i) * r->out_stride, from, (size_t)r->width);
        const uint64_t crc = STEP64(0xFFFFFFFFu, load64(r->rows + 8 * (begin + i)));
        sums[i] = ~(uint32_t)NAME(some)(crc, from, r->width);
    }
}

TARGET static void NAME(rows)(const ts_records *r, int64_t begin, int64_t n, uint32_t *sums) {
    if (r->out)
        NAME(each)(r, begin, n, sums, 1);
    else
        NAME(each)(r, begin, n, sums, 0);
}

#undef NAME
#undef TARGET
#undef STEP64
#undef STEP8
