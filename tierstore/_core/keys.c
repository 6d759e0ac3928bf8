/* Finding keys. A batch is worked on in blocks: while the memory of the last keys comes, that of
   the first has come. A key's row is read from a place, then checked against the code of that row,
   and where keys are texts against its text: each is a place in memory of its own. */
#include "core.h"
#include "memory.h"
#include "pool.h"

enum { BLOCK = 64, AHEAD = 16, LOOKED = 128 /* bytes that move while a key is found, in time */ };

#define PREFETCH(p) __builtin_prefetch(p)

/* 32 well mixed bits of a code. */
static inline uint32_t mixed(uint64_t code) {
    code *= 0x9E3779B97F4A7C15u;
    code ^= code >> 32;
    return (uint32_t)(code * 0xD6E8FEB86659FD93u >> 32);
}

/* Where the probes of a key are: in one segment, an odd distance apart. */
typedef struct {
    int64_t segment;
    uint32_t at, step;
} probe;

/* The smallest power of two that is not below the number of segments. */
static uint32_t next_power(int64_t segments) {
    uint32_t every = 1;
    while (every < segments) every <<= 1;
    return every;
}

static inline probe first_probe(const ts_keys *k, uint32_t every, uint64_t code) {
    const uint32_t hash = mixed(code);
    int64_t segment = hash & (every - 1);
    if (segment >= k->segments) segment -= every >> 1; /* which is not split yet */
    return (probe){segment << k->bits, hash >> (32 - k->bits),
                   hash * 0x9E3779B1u >> (32 - k->bits) | 1};
}

static inline uint8_t *place_of(const ts_keys *k, const probe *p) {
    CHECK(p->segment + p->at < k->segments << k->bits);
    return k->places + 4 * (p->segment + p->at);
}

static inline void go_on(const ts_keys *k, probe *p) {
    p->at = (p->at + p->step) & ((1u << k->bits) - 1);
}

/* A text, or NULL if its offsets are none. */
static inline const uint8_t *text_at(const ts_texts *t, int64_t i, int64_t *length) {
    CHECK(i >= 0 && i < t->n);
    const int64_t begin = (int64_t)load64(t->offsets + 8 * i);
    const int64_t end = (int64_t)load64(t->offsets + 8 * i + 8);
    if (begin < 0 || end < begin || end > t->bytes) return NULL;
    *length = end - begin;
    return t->blob + begin;
}

/* Whether a row has a key, given its code and, if keys are texts, the text at i. */
static inline int has_key(const ts_keys *k, int64_t row, uint64_t code, const ts_texts *t, int64_t i) {
    if (row >= k->rows || load64(k->codes + 8 * row) != code) return 0;
    if (!k->texts.blob) return 1;
    int64_t length, other;
    const uint8_t *text = text_at(t, i, &length);
    if (!text || row >= k->texts.n) return 0;
    const uint8_t *own = text_at(&k->texts, row, &other);
    return own && length == other && !memcmp(own, text, (size_t)length);
}

typedef struct {
    const ts_keys *keys;
    const uint8_t *codes;
    const ts_texts *texts;
    uint8_t *found;
} search;

static int64_t find_part(void *work, int64_t begin, int64_t end) {
    const search *w = work;
    const ts_keys *k = w->keys;
    const uint8_t *codes = w->codes;
    const uint32_t every = next_power(k->segments);
    probe probes[BLOCK];
    uint32_t held[BLOCK];
    for (; begin < end; begin += BLOCK) {
        const int count = end - begin < BLOCK ? (int)(end - begin) : BLOCK;
        for (int i = 0; i < count; i++) {
            probes[i] = first_probe(k, every, load64(codes + 8 * (begin + i)));
            PREFETCH(place_of(k, &probes[i]));
        }
        for (int i = 0; i < count; i++) {
            held[i] = load32(place_of(k, &probes[i]));
            const int64_t row = (int64_t)held[i] - 1;
            if (row < 0 || row >= k->rows) continue;
            PREFETCH(k->codes + 8 * row);
            if (row < k->texts.n) PREFETCH(k->texts.offsets + 8 * row);
        }
        for (int i = 0; i < count && k->texts.blob; i++) {
            const int64_t row = (int64_t)held[i] - 1;
            int64_t length;
            const uint8_t *own = row >= 0 && row < k->texts.n ? text_at(&k->texts, row, &length) : NULL;
            if (own) PREFETCH(own);
        }
        for (int i = 0; i < count; i++) {
            const uint64_t code = load64(codes + 8 * (begin + i));
            int64_t row = -1;
            uint32_t entry = held[i];
            for (int tried = 1; entry; tried++) {
                if (has_key(k, (int64_t)entry - 1, code, w->texts, begin + i)) {
                    row = (int64_t)entry - 1;
                    break;
                }
                if (tried == k->probes) break;
                go_on(k, &probes[i]);
                entry = load32(place_of(k, &probes[i]));
            }
            store64(w->found + 8 * (begin + i), (uint64_t)row);
        }
    }
    return end;
}

void ts_find_keys(const ts_keys *k, const uint8_t *codes, const ts_texts *t, int64_t n, uint8_t *found) {
    search work = {k, codes, t, found};
    ts_in_parts(find_part, &work, n, n * LOOKED);
}

void ts_enter_keys(const ts_keys *k, int64_t first, int64_t n, int dense, int64_t *at, int64_t *next,
                   uint8_t *found) {
    const uint32_t every = next_power(k->segments);
    int64_t i = *at, row = *next;
    for (; i < n; i++) {
        CHECK(row <= first + i && first + i < k->rows);
        if (i + AHEAD < n) {
            const probe ahead = first_probe(k, every, load64(k->codes + 8 * (first + i + AHEAD)));
            PREFETCH(place_of(k, &ahead));
        }
        const uint64_t code = load64(k->codes + 8 * (first + i));
        probe p = first_probe(k, every, code);
        int64_t holder = -1;
        for (int tried = 0; tried < k->probes && holder < 0; tried++, go_on(k, &p)) {
            uint8_t *place = place_of(k, &p);
            const int64_t other = (int64_t)load32(place) - 1;
            if (other < 0) {
                store32(place, (uint32_t)(row + 1));
                if (row < first + i) store64(k->codes + 8 * row, code);
                holder = row;
            } else if (has_key(k, other, code, &k->texts, first + i)) {
                holder = other;
            }
        }
        if (holder < 0) break;
        store64(found + 8 * i, (uint64_t)holder);
        row += !dense || holder == row;
    }
    *at = i;
    *next = row;
}

int64_t ts_place_keys(const ts_keys *k, const uint8_t *entries, int64_t n, uint8_t *left) {
    const uint32_t every = next_power(k->segments);
    int64_t lost = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = (int64_t)load32(entries + 4 * i) - 1;
        if (row < 0 || row >= k->rows) continue; /* no row has it */
        probe p = first_probe(k, every, load64(k->codes + 8 * row));
        int tried = 0;
        for (; tried < k->probes && load32(place_of(k, &p)); tried++) go_on(k, &p);
        if (tried < k->probes)
            store32(place_of(k, &p), (uint32_t)(row + 1));
        else
            store64(left + 8 * lost++, (uint64_t)row);
    }
    return lost;
}

int64_t ts_take_texts(const ts_texts *t, const uint8_t *at, int64_t n, uint8_t *offsets, uint8_t *out) {
    int64_t end = 0;
    store64(offsets, 0);
    for (int64_t i = 0; i < n; i++) {
        const int64_t number = (int64_t)load64(at + 8 * i);
        int64_t length = 0;
        const uint8_t *text = number >= 0 && number < t->n ? text_at(t, number, &length) : NULL;
        if (!text || length > INT64_MAX - end) return -(i + 1);
        if (out) memcpy(out + end, text, (size_t)length);
        end += length;
        store64(offsets + 8 * (i + 1), (uint64_t)end);
    }
    return end;
}

/* MurmurHash3, by Austin Appleby, who placed it in the public domain. */
static inline uint64_t rotated(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static inline uint64_t finished(uint64_t x) {
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCDu;
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53u;
    return x ^ x >> 33;
}

static uint64_t murmur(const uint8_t *p, int64_t length) {
    const uint64_t c1 = 0x87C37B91114253D5u, c2 = 0x4CF5AD432745937Fu;
    uint64_t first = 0, second = 0;
    int64_t left = length;
    for (; left >= 16; left -= 16, p += 16) {
        first ^= rotated(load64(p) * c1, 31) * c2;
        first = (rotated(first, 27) + second) * 5 + 0x52DCE729;
        second ^= rotated(load64(p + 8) * c2, 33) * c1;
        second = (rotated(second, 31) + first) * 5 + 0x38495AB5;
    }
    uint8_t tail[16] = {0};
    memcpy(tail, p, (size_t)left);
    second ^= rotated(load64(tail + 8) * c2, 33) * c1;
    first ^= rotated(load64(tail) * c1, 31) * c2;
    first ^= (uint64_t)length;
    second ^= (uint64_t)length;
    first += second;
    second += first;
    return finished(first) + finished(second);
}

int64_t ts_hash_texts(const ts_texts *t, int64_t longest, uint8_t *hashes) {
    int64_t longer = 0;
    for (int64_t i = 0; i < t->n; i++) {
        int64_t length = 0;
        const uint8_t *text = text_at(t, i, &length);
        const int is_longer = length > longest;
        store64(hashes + 8 * i, text && !is_longer ? murmur(text, length) : 0);
        longer += is_longer;
    }
    return longer;
}
