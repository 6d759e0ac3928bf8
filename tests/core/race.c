/* Readers of slots beside writers, as threads of the library use the core: for ThreadSanitizer, which
   knows the copies that may race, and would report any other access that does.
   A writer holds a lock, moves rows to other slots and writes records; the number of changes is odd
   meanwhile. A reader takes no lock; it believes what it read if the number was even and is still the
   same. All records carry their checksums with their rows.
   Larger reads are divided among helpers, whose pool is watched with the rest.
   usage: race READS KIND [BELIEVE]: of a map by "row" or of "entries"; with a third argument a reader
   believes what it read whatever the number is */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

enum { ROWS = 96, SLOTS = 64, WIDTH = 60, STRIDE = 64, PLACES = 86, MANY = 40, READERS = 4, WRITERS = 2 };

static uint8_t records[SLOTS * STRIDE], numbers[4 * ROWS], entries[12 * PLACES], stamps[4 * SLOTS];
static ts_map map;
static int64_t row_in[SLOTS], held, changes, torn, believed, reads;
static int believes;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t drawn(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

static void sign(int64_t row, uint8_t *record, uint64_t *state) {
    for (int i = 0; i < WIDTH; i++) record[i] = (uint8_t)drawn(state);
    const ts_records one = {.n = 1, .rows = (uint8_t *)&row, .source = record, .count = 1, .stride = STRIDE, .width = WIDTH};
    ts_sum_rows(&one, record + WIDTH);
}

static void set_number(int64_t row, uint32_t number) {
    ts_set_numbers(&map, (uint8_t *)&row, 1, (uint8_t *)&number, 0, &held);
}

static void *write_rows(void *given) {
    uint64_t state = (uint64_t)(size_t)given;
    while (__atomic_load_n(&reads, __ATOMIC_RELAXED) > 0) {
        pthread_mutex_lock(&lock);
        __atomic_add_fetch(&changes, 1, __ATOMIC_SEQ_CST);
        const int64_t slot = (int64_t)(drawn(&state) % SLOTS), row = (int64_t)(drawn(&state) % ROWS);
        int64_t now = slot;
        for (int64_t i = 0; i < SLOTS; i++) if (row_in[i] == row) now = i; /* it has one already */
        if (row_in[now] >= 0) set_number(row_in[now], 0);
        uint8_t record[STRIDE];
        sign(row, record, &state);
        const int32_t where = (int32_t)now;
        const ts_copies one = {records, SLOTS, STRIDE, (const uint8_t *)&where, 4, 1, 0, STRIDE, record};
        ts_scatter(&one);
        row_in[now] = row;
        set_number(row, (uint32_t)now + 1);
        __atomic_add_fetch(&changes, 1, __ATOMIC_SEQ_CST);
        pthread_mutex_unlock(&lock);
        const int64_t before = __atomic_load_n(&reads, __ATOMIC_RELAXED); /* some reads are to be believed */
        while (__atomic_load_n(&reads, __ATOMIC_RELAXED) > before - 2 * READERS && before > 2 * READERS) sched_yield();
        for (volatile int i = 0; i < 2000; i++) {}
    }
    return NULL;
}

static void *read_rows(void *given) {
    uint64_t state = (uint64_t)(size_t)given;
    int64_t ids[MANY], bad[MANY];
    uint8_t found[MANY * STRIDE], sums[4 * MANY];
    const ts_slots s = {.records = records, .slots = SLOTS, .stride = STRIDE, .map = map, .rows = ROWS};
    while (__atomic_sub_fetch(&reads, 1, __ATOMIC_RELAXED) > 0) {
        const int64_t before = __atomic_load_n(&changes, __ATOMIC_SEQ_CST);
        const int n = 1 + (int)(drawn(&state) % MANY);
        for (int i = 0; i < n; i++) ids[i] = (int64_t)(drawn(&state) % ROWS);
        for (int i = 0; i < n; i++) { /* those without a slot are asked for no more */
            uint8_t slot[4];
            if (ts_find_slots(&s, (uint8_t *)&ids[i], 1, slot, 4)) ids[i] = ids[0];
        }
        if (ts_read_slots(&s, (uint8_t *)ids, n, 0, ROWS, 0, STRIDE, found, NULL, stamps, 1, NULL) < n) continue;
        const int64_t after = __atomic_add_fetch(&changes, 0, __ATOMIC_SEQ_CST); /* after all loads */
        if ((after != before || before % 2) && !believes) continue;
        for (int i = 0; i < n; i++) memcpy(sums + 4 * i, found + i * STRIDE + WIDTH, 4);
        const ts_records all = {.n = n, .rows = (uint8_t *)ids, .source = found, .count = n, .stride = STRIDE, .width = WIDTH};
        __atomic_add_fetch(&torn, ts_check_rows(&all, sums, 0, (uint8_t *)bad), __ATOMIC_RELAXED);
        __atomic_add_fetch(&believed, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

int main(int count, char **given) {
    if (count < 3 || !ts_start(NULL)) return 2;
    reads = atoll(given[1]), believes = count > 3;
    ts_set_threads(6, 4 * MANY * WIDTH / 5); /* larger reads are in parts, if there is a thread for them */
    map = given[2][0] == 'r' ? (ts_map){numbers, ROWS, 0} : (ts_map){entries, PLACES, 1};
    uint64_t state = 7;
    for (int64_t i = 0; i < SLOTS; i++) {
        row_in[i] = i;
        sign(i, records + i * STRIDE, &state);
        set_number(i, (uint32_t)i + 1);
    }
    pthread_t threads[READERS + WRITERS];
    for (size_t i = 0; i < READERS + WRITERS; i++)
        pthread_create(&threads[i], NULL, i < WRITERS ? write_rows : read_rows, (void *)(i + 1));
    for (int i = 0; i < READERS + WRITERS; i++) pthread_join(threads[i], NULL);
    printf("%lld torn of %lld\n", (long long)torn, (long long)believed);
    return believed ? torn != 0 : 3;
}
