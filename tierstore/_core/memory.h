/* Numbers in memory that may be anywhere, and the check of a debug build. */
#ifndef TS_MEMORY_H
#define TS_MEMORY_H

#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __SIZEOF_POINTER__ != 8
#error "tierstore needs a little-endian machine of 64 bits"
#endif

/* A build with TS_DEBUG ends the process where a loop would leave its memory. */
#ifdef TS_DEBUG
#define CHECK(condition) ((condition) ? (void)0 : __builtin_trap())
#else
#define CHECK(condition) ((void)0)
#endif

static inline uint64_t load64(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

static inline uint32_t load32(const uint8_t *p) {
    uint32_t x;
    memcpy(&x, p, 4);
    return x;
}

static inline void store64(uint8_t *p, uint64_t x) { memcpy(p, &x, 8); }
static inline void store32(uint8_t *p, uint32_t x) { memcpy(p, &x, 4); }

#endif
