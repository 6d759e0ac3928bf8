/* Numbers in memory that may be anywhere and change meanwhile, and the check of a debug build. */
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

/* The copy of memory that others may write to, or read, meanwhile. Readers of slots take no lock: they
   ask afterwards whether anything changed, and then believe nothing of what they copied. What is read
   of a map is checked against its bounds at each use. So bytes may be those of any moment, each by
   itself: on every machine that compiles this, moves of words are at least that. ThreadSanitizer gets
   bytes that are atomic, and so reports every race that is none of these. */
static inline void racing_copy(uint8_t *to, const uint8_t *from, int64_t n) {
#if defined(__SANITIZE_THREAD__)
    for (int64_t i = 0; i < n; i++)
        __atomic_store_n(to + i, __atomic_load_n(from + i, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
#else
    memcpy(to, from, (size_t)n);
#endif
}

static inline uint64_t load64(const uint8_t *p) {
    uint64_t x;
    racing_copy((uint8_t *)&x, p, 8);
    return x;
}

static inline uint32_t load32(const uint8_t *p) {
    uint32_t x;
    racing_copy((uint8_t *)&x, p, 4);
    return x;
}

static inline void store64(uint8_t *p, uint64_t x) { racing_copy(p, (const uint8_t *)&x, 8); }
static inline void store32(uint8_t *p, uint32_t x) { racing_copy(p, (const uint8_t *)&x, 4); }

#endif
