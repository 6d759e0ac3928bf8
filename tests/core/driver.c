/* Replays programs of tests/core/programs.py on the core, without Python: each call with memory of
   exactly its size, by each dispatch that this processor has, and compared with the results in the
   file. With -DFUZZ it is a target of libFuzzer, which makes up the arguments instead.
   usage: driver DISPATCH FILE [REPEAT] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

enum { SUM_BYTES, SUM_ROWS, CHECK_ROWS, COPY_ROWS, FIND_KEYS, ENTER_KEYS, PLACE_KEYS, HASH_TEXTS };
enum { READ_SLOTS = 8, FIND_SLOTS, OLDEST_SLOTS, GATHER, SCATTER, SET_NUMBERS, BEGIN_STEP, END_STEP };
enum { GROUP = 16, SUM_GROUPS };
/* see programs.py */

static void *room(int64_t n) {
    void *made = malloc(n > 0 ? (size_t)n : 1);
    if (!made) abort();
    return made;
}

#ifdef FUZZ

static const uint8_t *left;
static size_t size_left;

static void take(void *to, size_t n) { /* what is missing of the input repeats its last byte */
    const size_t some = n < size_left ? n : size_left;
    memcpy(to, left, some);
    memset((uint8_t *)to + some, some ? left[some - 1] : 0, n - some);
    left += some;
    size_left -= some;
}

static void *taken(int64_t n) {
    void *made = room(n);
    take(made, (size_t)n);
    return made;
}

static ts_texts taken_texts(int64_t n, int64_t bytes) {
    uint8_t *offsets = taken(8 * (n + 1));
    for (int64_t i = 0; i <= n; i++) { /* mostly texts: short ones, that overlap */
        const int64_t inside = bytes ? (offsets[8 * i] >> 2) % bytes : 0;
        if (offsets[8 * i] & 3) memcpy(offsets + 8 * i, &inside, 8);
    }
    return (ts_texts){taken(bytes), bytes, offsets, n};
}

static void drop_texts(const ts_texts *t) { free((void *)t->blob), free((void *)t->offsets); }

static void use_keys(void) {
    uint8_t head[8];
    take(head, sizeof head);
    const int bits = 1 + (head[0] & 3), segments = 1 + (head[0] >> 2 & 7), is_text = head[0] >> 5 & 1;
    const int64_t rows = head[1] & 31, n = head[2] & 31, bytes = head[3] & 63, size = segments << bits;
    ts_texts own = taken_texts(rows, bytes), asked = taken_texts(n, bytes);
    ts_keys keys = {taken(4 * size), segments, bits, 1 + (head[4] & 31), taken(8 * rows), rows, {0}};
    for (int64_t i = 0; i < size; i++) { /* mostly empty, or of a row */
        const uint32_t inside = keys.places[4 * i] & 1 ? 0 : keys.places[4 * i] % (rows + 1);
        if (keys.places[4 * i] & 6) memcpy(keys.places + 4 * i, &inside, 4);
    }
    if (is_text) keys.texts = own;
    uint8_t *codes = taken(8 * n), *found = room(8 * (n > rows ? n : rows)), *entries = taken(4 * n);
    for (int64_t i = 0; i < n && rows && head[4] & 32; i++)
        memcpy(codes + 8 * i, keys.codes + 8 * (codes[8 * i] % rows), 8);
    for (int64_t i = 0; i < n && rows && head[4] & 16; i++) { /* numbers of texts */
        const uint64_t number = codes[8 * i] % (unsigned)rows;
        memcpy(codes + 8 * i, &number, 8);
    }
    const int64_t first = rows ? head[5] % (rows + 1) : 0, count = rows - first;
    int64_t at = head[6] % (count + 1), next = head[7] % (first + at + 1);
    uint8_t *offsets = room(8 * (n + 1));
    const int64_t size_of = ts_take_texts(&own, codes, n, offsets, NULL);
    uint8_t *some = room(size_of);
    if (size_of >= 0 && ts_take_texts(&own, codes, n, offsets, some) != size_of) abort();
    ts_hash_texts(&asked, head[6], found);
    ts_find_keys(&keys, codes, &asked, n, found);
    ts_enter_keys(&keys, first, count, head[4] >> 6 & 1, &at, &next, found);
    ts_place_keys(&keys, entries, n, found);
    drop_texts(&own), drop_texts(&asked);
    free(offsets), free(some), free(keys.places), free(keys.codes), free(codes), free(found), free(entries);
}

static void use_slots(void) {
    uint8_t head[10];
    take(head, sizeof head);
    const int64_t slots = head[0] & 31, n = head[1] & 31, rows = head[2] & 127, places = head[3] & 31;
    const int64_t width = head[4] & 63, lo = head[5] & 7, first = rows ? head[6] % (rows + 1) : 0;
    const int map = head[7] & 3;
    ts_slots s = {taken(slots * (lo + width)), slots, lo + width, {0}, rows, NULL};
    uint8_t *numbers = taken(4 * rows), *present = taken(rows), *entries = taken(12 * places);
    uint8_t *ids = taken(8 * n), *given = taken(4 * n);
    for (int64_t i = 0; i < rows; i++) /* mostly of a slot, or of none */
        if (numbers[4 * i] & 64) numbers[4 * i] &= 31, memset(numbers + 4 * i + 1, 0, 3);
    for (int64_t i = 0; i < places; i++) { /* mostly of one of the rows, and of a slot or none */
        if (entries[12 * i] & 64) entries[12 * i] &= 63, memset(entries + 12 * i + 1, 0, 7);
        if (entries[12 * i + 8] & 64) entries[12 * i + 8] &= 31, memset(entries + 12 * i + 9, 0, 3);
    }
    for (int64_t i = 0; i < n && head[7] & 4; i++) memset(ids + 8 * i + 1, 0, 7);
    if (map == 3) s.present = present;
    if (map == 1) s.map = (ts_map){numbers, rows, 0};
    if (map == 2) s.map = (ts_map){entries, places, 1}, s.rows = INT64_MAX;
    uint8_t *out = room(n * width), *found = room(4 * n), *stamps = taken(4 * slots), *ahead = room(4 * slots);
    uint32_t batch;
    take(&batch, 4);
    const ts_copies copies = {(uint8_t *)s.records, slots, lo + width, ids, head[8] & 1 ? 4 : 8, n, lo, width, out};
    ts_gather(&copies), ts_scatter(&copies);
    ts_find_slots(&s, ids, n, found, 4);
    ts_oldest_slots(stamps, slots, batch ? batch : 1, n, found);
    ts_read_slots(&s, ids, n, first, s.rows - first, lo, width, out, found, stamps, 1, ahead);
    int64_t held = s.map.count / 2;
    if (map == 1 || map == 2) ts_set_numbers(&s.map, ids, n, head[8] & 2 ? given : NULL, head[8] & 4, &held);
    free((void *)s.records), free(numbers), free(present), free(entries), free(given), free(ids);
    free(out), free(found), free(stamps), free(ahead);
}

static void use_step(void) {
    uint8_t head[8];
    take(head, sizeof head);
    const int64_t count = 1 + (head[0] & 15), n = head[1] & 15, dim = 1 + (head[2] & 63), real = head[3] & 1 ? 4 : 8;
    const int rule = 1 + (head[4] & 3), size = head[3] & 2 ? 4 : 8;
    const int64_t stride = 3 * dim * real, roots = rule == TS_ROWWISE ? n : n * dim;
    ts_step s = {.records = taken(count * stride), .count = count, .stride = stride, .hi = stride};
    s.slots = taken(size * n), s.size = size, s.real = (int)real, s.n = n, s.dim = dim;
    s.states[0] = dim * real, s.states[1] = 2 * dim * real, s.rule = rule, s.flags = head[5];
    for (int64_t i = 0; i < n && head[6]; i++) { /* mostly slots */
        const int64_t slot = s.slots[size * i] % count;
        if (i + 1 != head[6]) memcpy((uint8_t *)s.slots + size * i, &slot, (size_t)size);
    }
    s.gradient = taken(n * dim * real), s.trained = head[3] & 4 ? taken(n) : NULL, s.roots = taken(roots * real);
    take(s.numbers, sizeof s.numbers);
    if (ts_fuses()) ts_begin_step(&s), ts_end_step(&s);
    free(s.records), free((void *)s.slots), free((void *)s.gradient), free((void *)s.trained), free(s.roots);
}

static void use_groups(void) {
    uint8_t head[8];
    take(head, sizeof head);
    const int64_t n = head[0] & 63, count = head[1] & 63, groups = head[2] & 63, dim = head[3] & 15;
    const int64_t real = head[4] & 1 ? 4 : 8, first = count ? head[5] % count : 0, stride = (dim + (head[4] >> 1 & 3)) * real;
    uint8_t *ids = taken(8 * n), *order = room(8 * n), *starts = room(8 * (n + 1)), *rows = room(8 * n);
    for (int64_t i = 0; i < n; i++) ids[8 * i + 7] &= head[6] & 128 ? 255 : 127; /* mostly none negative */
    const int64_t distinct = ts_group(ids, n, order, starts, rows);
    uint8_t *values = taken(count * stride), *asked = taken(8 * n), *cuts = taken(8 * (groups + 1));
    for (int64_t i = 0; i < n && count; i++) { /* mostly numbers of values */
        const int64_t inside = asked[8 * i] % count;
        if (i != head[6]) memcpy(asked + 8 * i, &inside, 8);
    }
    for (int64_t i = 0; i <= groups && head[7] & 1; i++) { /* mostly ascending */
        const int64_t start = i < groups ? i : n;
        if (i != head[7] >> 1) memcpy(cuts + 8 * i, &start, 8);
    }
    uint8_t *sums = room((groups > n ? groups : n) * dim * real);
    const ts_values parts[] = {{values, 0, first, stride}, {values, first, 0, stride}, {values + first * stride, first, count - first, stride}};
    ts_sum_groups(&(ts_sums){parts, count, n, groups, dim, asked, cuts, sums, (int)real});
    if (distinct >= 0) ts_sum_groups(&(ts_sums){parts, count, n, distinct, dim, order, starts, sums, (int)real});
    free(ids), free(order), free(starts), free(rows), free(values), free(asked), free(cuts), free(sums);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    left = data;
    size_left = size;
    uint8_t head[7];
    take(head, sizeof head);
    void (*const uses[])(void) = {use_keys, use_slots, use_step, use_groups};
    if (head[6] >> 7) return uses[head[6] >> 5 & 3](), 0;
    const int kind = head[0] & 3, sparse = head[0] >> 2 & 1, apart = head[0] >> 3 & 7;
    const int most = head[2] & 62 ? 15 : 255; /* few calls are large: millions are made */
    const int64_t width = (head[1] | (head[2] & 1) << 8) & (8 * most + 7);
    const int64_t n = head[3] & most, count = head[4] & most;
    const int back = head[0] >> 7; /* records in descending order, as NumPy's [::-1] */
    const int64_t far = head[0] & 64 ? 0 : width + apart, out_far = width + (head[5] & 7);
    const int64_t extent = count ? (count - 1) * far + width : 0;
    const int64_t out_extent = n ? (n - 1) * out_far + width : 0;
    const int64_t stride = back ? -far : far, out_stride = back ? -out_far : out_far;
    uint8_t *rows = taken(8 * n), *sums = taken(4 * n), *at = taken(8 * n);
    for (int64_t i = 0; i < n && head[6] & 1; i++) { /* mostly inside */
        const int64_t inside = count ? at[8 * i] % count : 0;
        if (i != head[6]) memcpy(at + 8 * i, &inside, 8);
    }
    uint8_t *source = taken(extent), *out = room(out_extent), *bad = room(8 * n);
    uint8_t *first = back && count ? source + extent - width : source;
    uint8_t *to = back && n ? out + out_extent - width : out;
    uint8_t *found[2] = {room(4 * n), room(4 * n)};
    uint8_t *places = head[0] & 8 ? taken(8 * n) : NULL; /* where copies go */
    for (int64_t i = 0; places && i < n; i++) {
        const int64_t inside = places[8 * i] % n;
        if (i != head[5]) memcpy(places + 8 * i, &inside, 8);
    }
    const ts_records copies = {n, rows, at, first, count, stride, width, to, places, n, out_stride};
    const ts_records records = {.n = count < n ? count : n, .rows = rows, .source = first, .count = count, .stride = stride, .width = width};
    int64_t answers[2] = {0, 0};
    for (int hardware = 0; hardware < 2; hardware++) {
        ts_start(hardware ? NULL : "table");
        if (kind == SUM_BYTES) answers[hardware] = ts_crc32c(head[5], source, count ? width : 0);
        if (kind == SUM_ROWS) answers[hardware] = ts_sum_rows(&records, found[hardware]);
        if (kind == CHECK_ROWS) answers[hardware] = ts_check_rows(&records, sums, sparse, bad);
        if (kind == COPY_ROWS) answers[hardware] = ts_check_rows(&copies, sums, sparse, bad);
    }
    if (answers[0] != answers[1]) abort();
    if (kind == SUM_ROWS && memcmp(found[0], found[1], 4 * (size_t)records.n)) abort();
    free(rows), free(sums), free(at), free(source), free(out), free(bad), free(found[0]), free(found[1]);
    free(places);
    return 0;
}

#else

static FILE *file;

static void *loaded(int64_t n) {
    void *made = room(n);
    if (fread(made, 1, (size_t)n, file) != (size_t)n) {
        fprintf(stderr, "the program ends early\n");
        exit(2);
    }
    return made;
}

static void expect(int holds, int64_t step, const char *what) {
    if (holds) return;
    fprintf(stderr, "step %lld: other %s\n", (long long)step, what);
    exit(1);
}

/* Rows in slots, of a map of the kind that head[3] says. */
static void places_of(ts_slots *s, const int64_t *head, uint8_t **a, const int64_t *sizes) {
    s->slots = head[4], s->rows = head[5];
    if (!head[3])
        s->present = sizes[0] ? a[0] : NULL;
    else
        s->map = (ts_map){a[0], sizes[0] / (head[3] == 2 ? 12 : 4), head[3] == 2};
}

static void replay_slots(const int64_t *head, const int64_t *more, uint8_t **a, const int64_t *sizes, int64_t step) {
    const int64_t n = head[1];
    ts_slots s = {0};
    uint8_t *found = room(4 * n);
    if (head[0] == GATHER || head[0] == SCATTER) {
        const int64_t lo = head[5], width = head[6], apart = head[7];
        const ts_copies copies = {a[0], head[3], lo + width + apart, a[1], (int)head[4], n, lo, width, a[2]};
        const int64_t result = (head[0] == GATHER ? ts_gather : ts_scatter)(&copies);
        expect(result == more[0], step, "result");
        expect(!memcmp(a[0], a[3], (size_t)sizes[0]), step, "records");
        expect(!memcmp(a[2], a[4], (size_t)sizes[2]), step, "copies");
    } else if (head[0] == OLDEST_SLOTS) {
        const int64_t oldest = ts_oldest_slots(a[0], head[3], (uint32_t)head[4], n, found);
        expect(oldest == head[5], step, "number of slots");
        expect(!memcmp(found, a[1], (size_t)sizes[1]), step, "slots");
    } else if (head[0] == SET_NUMBERS) {
        places_of(&s, head, a, sizes);
        int64_t held = head[4];
        const int64_t set = ts_set_numbers(&s.map, a[1], n, head[6] ? NULL : a[2], (int)head[5], &held);
        expect(set == head[7] && held == more[0], step, "result");
        for (int64_t i = 0; i < sizes[4] / 8; i++) /* an entry may be anywhere */
            ts_find_slots(&(ts_slots){.slots = INT32_MAX, .map = s.map, .rows = INT64_MAX}, a[4] + 8 * i, 1, a[3] + 8 * i, 8);
        expect(!memcmp(a[3], a[5], (size_t)sizes[5]), step, "numbers");
    } else if (head[0] == FIND_SLOTS) {
        places_of(&s, head, a, sizes);
        const int size = (int)(sizes[2] / (n ? n : 1));
        uint8_t *wide = room(8 * n);
        expect(ts_find_slots(&s, a[1], n, wide, size) == head[6], step, "number of rows without a slot");
        expect(!memcmp(wide, a[2], (size_t)sizes[2]), step, "slots");
        free(wide);
    } else {
        places_of(&s, head, a, sizes);
        const int64_t first = head[6], most = head[7], lo = more[0], width = more[1], apart = more[2];
        uint8_t **b = a + 1, *out = room(n * width);
        s.records = b[1], s.stride = lo + width + apart;
        const int64_t result = ts_read_slots(&s, b[0], n, first, most, lo, width, out, found, b[2], (uint32_t)more[3], b[3]);
        expect(result == more[4], step, "result");
        expect(!memcmp(out, b[4], (size_t)sizes[5]), step, "records");
        expect(!memcmp(found, b[5], (size_t)sizes[6]), step, "slots");
        expect(!memcmp(b[2], b[6], (size_t)sizes[7]), step, "stamps");
        expect(!memcmp(b[3], b[7], (size_t)sizes[8]), step, "slots fetched ahead");
        expect(ts_read_slots(&s, b[0], n, first, most, lo, width, NULL, NULL, NULL, 1, NULL) == result, step, "result of nothing");
        free(out);
    }
    free(found);
}

static void replay_step(const int64_t *head, const int64_t *more, uint8_t **a, const int64_t *sizes, int64_t step) {
    const int64_t n = head[1], real = head[5], dim = head[6], stride = head[7] * real;
    ts_step s = {.records = a[0], .count = head[3], .stride = stride, .hi = stride, .slots = a[1]};
    s.size = (int)head[4], s.real = (int)real, s.n = n, s.dim = dim, s.gradient = a[2];
    s.trained = sizes[3] ? a[3] : NULL, s.roots = a[4], s.rule = (int)more[0], s.flags = (int)more[1];
    memcpy(&s.weight, a[5], 8), memcpy(s.states, a[5] + 8, 16), memcpy(s.numbers, a[6], 64);
    if (!ts_fuses()) return;
    expect((head[0] == BEGIN_STEP ? ts_begin_step : ts_end_step)(&s) == more[2], step, "result");
    expect(!memcmp(a[0], a[7], (size_t)sizes[7]), step, "records");
    expect(!memcmp(a[4], a[8], (size_t)sizes[8]), step, "roots");
}

static void replay_groups(const int64_t *head, const int64_t *more, uint8_t **a, const int64_t *sizes, int64_t step) {
    const int64_t n = head[1];
    if (head[0] == GROUP) {
        uint8_t *order = room(8 * n), *starts = room(8 * (n + 1)), *rows = room(8 * n);
        const int64_t distinct = ts_group(a[0], n, order, starts, rows);
        expect(distinct == head[3], step, "number of rows");
        expect(distinct < 0 || !memcmp(order, a[1], (size_t)sizes[1]), step, "order");
        expect(distinct < 0 || !memcmp(starts, a[2], (size_t)sizes[2]), step, "starts");
        expect(distinct < 0 || !memcmp(rows, a[3], (size_t)sizes[3]), step, "rows");
        free(order), free(starts), free(rows);
        return;
    }
    const int64_t real = head[6], stride = head[5] * real, parts = sizes[3] / 8 - 1;
    ts_values *of = room(parts * (int64_t)sizeof *of);
    int64_t edges[8];
    memcpy(edges, a[3], (size_t)sizes[3]);
    for (int64_t k = 0; k < parts; k++) of[k] = (ts_values){a[0] + edges[k] * stride, edges[k], edges[k + 1] - edges[k], stride};
    uint8_t *sums = room(sizes[4]);
    const ts_sums s = {of, edges[parts], n, head[3], head[4], a[1], a[2], sums, (int)real};
    const int64_t result = ts_sum_groups(&s);
    expect(result == head[7], step, "result");
    expect(result < 0 || !memcmp(sums, a[4], (size_t)sizes[4]), step, "sums");
    free(of), free(sums);
    (void)more;
}

/* A call of the map of keys or of slots: after the head of 8 numbers come 8 more, the sizes of arrays, these. */
static void replay_keys(const int64_t *head, int64_t step) {
    int64_t more[8], sizes[16];
    uint8_t *a[16];
    if (fread(more, sizeof more, 1, file) != 1 || head[2] > 16) exit(2);
    if (fread(sizes, 8, (size_t)head[2], file) != (size_t)head[2]) exit(2);
    for (int i = 0; i < head[2]; i++) a[i] = loaded(sizes[i]);
    const int64_t kind = head[0], n = head[1], count = head[2];
    uint8_t *found = room(8 * n);
    if (kind >= GROUP) {
        replay_groups(head, more, a, sizes, step);
    } else if (kind >= BEGIN_STEP) {
        replay_step(head, more, a, sizes, step);
    } else if (kind >= READ_SLOTS) {
        replay_slots(head, more, a, sizes, step);
    } else if (kind == HASH_TEXTS) {
        const ts_texts texts = {a[1], sizes[1], a[0], n};
        expect(ts_hash_texts(&texts, head[3], found) == head[4], step, "number of long texts");
        expect(!memcmp(found, a[2], (size_t)sizes[2]), step, "hashes");
        uint8_t *offsets = room(sizes[4]), *taken = room(sizes[5]);
        for (int i = 0; i < 2; i++) {
            const int64_t bytes = ts_take_texts(&texts, a[3], sizes[3] / 8, offsets, i ? taken : NULL);
            expect(bytes == sizes[5], step, "bytes of texts");
        }
        expect(!memcmp(offsets, a[4], (size_t)sizes[4]), step, "offsets of texts");
        expect(!memcmp(taken, a[5], (size_t)sizes[5]), step, "texts");
        free(offsets), free(taken);
    } else {
        const int64_t rows = head[6], texts = head[7], at = texts < 0 ? 2 : 4;
        ts_keys keys = {a[0], head[3], (int)head[4], (int)head[5], a[1], rows, {0}};
        if (texts >= 0) keys.texts = (ts_texts){a[3], sizes[3], a[2], texts};
        if (kind == FIND_KEYS) {
            ts_texts asked = {0};
            if (texts >= 0) asked = (ts_texts){a[at + 2], sizes[at + 2], a[at + 1], n};
            ts_find_keys(&keys, a[at], &asked, n, found);
            expect(!memcmp(found, a[count - 1], (size_t)(8 * n)), step, "rows");
        } else {
            const uint8_t *wanted = a[at + (kind == PLACE_KEYS)];
            if (kind == ENTER_KEYS) {
                int64_t done = 0, next = more[0];
                ts_enter_keys(&keys, more[0], n, (int)more[1], &done, &next, found);
                expect(done == more[2] && next == more[3], step, "progress");
                expect(!memcmp(found, wanted, (size_t)(8 * done)), step, "rows");
            } else {
                const int64_t left = ts_place_keys(&keys, a[at], n, found);
                expect(left == more[0], step, "number of rows left");
                expect(!memcmp(found, wanted, (size_t)(8 * left)), step, "rows left");
            }
            expect(!memcmp(a[0], a[count - 2], (size_t)sizes[0]), step, "places");
            expect(!memcmp(a[1], a[count - 1], (size_t)sizes[1]), step, "codes");
        }
    }
    for (int i = 0; i < head[2]; i++) free(a[i]);
    free(found);
}

int main(int count, char **given) {
    if (count < 3 || !(file = fopen(given[2], "rb"))) return 2;
    if (!ts_start(given[1])) {
        fprintf(stderr, "this processor has no %s\n", given[1]);
        return 3;
    }
    const int repeat = count > 3 ? atoi(given[3]) : 1;
    ts_set_threads(count > 4 ? atoi(given[4]) : 1, 1); /* of the smallest calls, too */
    int64_t head[8];
    for (int64_t step = 0; fread(head, sizeof head, 1, file) == 1; step++) {
        if (head[0] >= FIND_KEYS) {
            replay_keys(head, step);
            continue;
        }
        const int64_t kind = head[0], n = head[1], records = head[2], stride = head[3];
        const int64_t width = head[4], sparse = head[5], result = head[6], placed = head[7];
        const int64_t apart = stride < 0 ? -stride : stride, back = stride < 0;
        const int64_t extent = records ? (records - 1) * apart + width : 0;
        const int64_t more = placed == 2 ? n + 3 : n; /* records of room */
        const int64_t room_out = more ? (more - 1) * apart + width : 0;
        uint8_t *rows = loaded(8 * n), *at = placed ? loaded(8 * n) : NULL;
        uint8_t *places = placed == 2 ? loaded(8 * n) : NULL;
        uint8_t *source = loaded(extent), *sums = loaded(4 * n);
        uint8_t *worse = loaded(result > 0 && kind > SUM_ROWS ? 8 * result : 0);
        uint8_t *bad = room(8 * n), *found = room(4 * n), *out = room(room_out);
        uint8_t *first = back && records ? source + extent - width : source;
        uint8_t *to = back && more ? out + room_out - width : out;
        const ts_records all = {n, rows, at, first, records, stride, width, kind == COPY_ROWS ? to : NULL, places, more, stride};
        for (int i = 0; i < repeat; i++) {
            if (kind == SUM_BYTES) {
                expect(ts_crc32c((uint32_t)sparse, source, extent) == result, step, "checksum");
                continue;
            }
            if (kind == SUM_ROWS) {
                expect(ts_sum_rows(&all, found) == result, step, "result");
                expect(result < 0 || !memcmp(found, sums, 4 * (size_t)n), step, "checksums");
                continue;
            }
            expect(ts_check_rows(&all, sums, (int)sparse, bad) == result, step, "result");
            expect(result < 0 || !memcmp(bad, worse, 8 * (size_t)result), step, "positions");
        }
        for (int64_t i = 0; kind == COPY_ROWS && result >= 0 && i < n; i++) {
            int64_t here, there = i;
            memcpy(&here, at + 8 * i, 8);
            if (places) memcpy(&there, places + 8 * i, 8);
            expect(!memcmp(to + there * stride, first + here * stride, (size_t)width), step, "copy");
        }
        free(rows), free(at), free(places), free(source), free(sums), free(worse), free(bad), free(found), free(out);
    }
    fclose(file);
    return 0;
}

#endif
