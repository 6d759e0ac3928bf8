/* Threads that help callers with long calls. They are started when a call first asks for them, wait as
   long as the process lives, take no signals, and know nothing of Python: so they never wait for its
   lock, and nothing waits for them at exit. Every thread that is free takes the next part, so that none
   waits for a busy one, or for one that the system has not woken yet.

   Callers and helpers together are never more than the limit, and each caller gets its share of them: 16
   threads that call on 16 cores work each by itself. Reads of 65,536 rows took 0.9 of the time of helping
   each other so where all rows are in memory, and 0.64 where a cache has half of them.

   A forked child has none of the threads, and the lock in whatever state it was at that moment: it
   begins with an empty pool of its own, which it needs when the number of its process is another. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sched_getaffinity, pthread_setname_np */
#endif
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <unistd.h>

#include "core.h"

enum {
    MOST = 64,
    STACK = 256 << 10,
    PARTS = 4,     /* for each thread: some end earlier than others */
    TOGETHER = 64, /* items of a part: no two write to the same line of memory */
    /* Two threads for 1.3 MiB take no less time than one, and more of processors. For more, 16 threads
       take half of the time of those that 1 MiB each would need: benchmarks/bench_core_parts.py. */
    SHARED_BYTES = 2 << 20,
    PART_BYTES = 256 << 10
};

typedef struct job {
    ts_part part;
    void *work;
    int64_t n, step;
    int64_t next, refused; /* atomic: the first item that no thread has taken, or that was refused */
    int open, inside;      /* helpers that may still come, and that are at work; with the lock */
    struct job *following;
} job;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t more, over;
    job *jobs;                           /* those with `open` helpers */
    int started, idle, callers, helpers; /* helpers: at work, or about to come */
} pool;

#define EMPTY {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0, 0, 0}
static pool all = EMPTY;
static int64_t process; /* atomic: whose pool it is, by number; negative: which one empties it; 0: none */
static int most = MOST;
static int64_t least = PART_BYTES, shared = SHARED_BYTES;

void ts_set_threads(int threads, int64_t part_bytes) {
    __atomic_store_n(&most, threads < 1 ? 1 : threads < MOST ? threads : MOST, __ATOMIC_RELAXED);
    __atomic_store_n(&least, part_bytes < 1 ? PART_BYTES : part_bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&shared, part_bytes < 1 ? SHARED_BYTES : 2 * part_bytes, __ATOMIC_RELAXED);
}

/* How many threads may work, the caller included. */
static int limit(void) {
    const int allowed = __atomic_load_n(&most, __ATOMIC_RELAXED);
#ifdef TS_CORES /* of a test, where there are fewer */
    return TS_CORES < allowed ? TS_CORES : allowed;
#endif
    cpu_set_t cores;
    if (allowed < 2 || sched_getaffinity(0, sizeof cores, &cores)) return allowed;
    const int count = CPU_COUNT(&cores);
    return count < allowed ? count : allowed;
}

/* Have a pool that is this process's. */
static void enter(void) {
    const int64_t mine = getpid();
    int64_t known = __atomic_load_n(&process, __ATOMIC_ACQUIRE);
    while (known != mine) { /* a fork may come between any two of these lines, in another thread */
        if (known != -mine && __atomic_compare_exchange_n(&process, &known, -mine, 0, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE)) {
            all = (pool)EMPTY;
            __atomic_store_n(&process, mine, __ATOMIC_RELEASE);
        }
        known = __atomic_load_n(&process, __ATOMIC_ACQUIRE);
    }
    pthread_mutex_lock(&all.lock);
}

static void leave(void) { pthread_mutex_unlock(&all.lock); }

static void do_parts(job *j) {
    for (;;) {
        const int64_t begin = __atomic_fetch_add(&j->next, j->step, __ATOMIC_RELAXED);
        if (begin >= j->n) return;
        const int64_t end = j->n - begin < j->step ? j->n : begin + j->step;
        const int64_t done = j->part(j->work, begin, end);
        int64_t known = __atomic_load_n(&j->refused, __ATOMIC_RELAXED);
        while (done < end && done < known &&
               !__atomic_compare_exchange_n(&j->refused, &known, done, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    }
}

/* Let no more helpers come; with the lock. */
static void shut(job *j) {
    all.helpers -= j->open;
    j->open = 0;
    job **at = &all.jobs;
    while (*at && *at != j) at = &(*at)->following;
    if (*at) *at = j->following;
}

static void *help(void *given) {
    pthread_mutex_lock(&all.lock);
    for (;;) {
        while (!all.jobs) {
            all.idle++;
            pthread_cond_wait(&all.more, &all.lock);
            all.idle--;
        }
        job *j = all.jobs;
        j->inside++;
        if (!--j->open) shut(j);
        leave();
        do_parts(j);
        pthread_mutex_lock(&all.lock);
        all.helpers--;
        if (!--j->inside) pthread_cond_broadcast(&all.over);
    }
    return given;
}

/* Start some threads, if the system gives them; with the lock. They take no signals: a handler would
   find no Python there. */
static void start(int threads) {
    sigset_t every, before;
    pthread_attr_t attributes;
    if (threads < 1 || pthread_attr_init(&attributes)) return;
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    pthread_t thread;
    for (; threads > 0 && !pthread_create(&thread, &attributes, help, NULL); threads--) {
        pthread_setname_np(thread, "tierstore");
        all.started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* How many helpers come for a job in so many parts, a caller's share of all; with the lock, and
   `callers` counted. */
static int helpers_for(int64_t parts, int threads) {
    const int64_t wanted = smaller(parts, threads / all.callers) - 1;
    const int64_t room = threads - all.callers - all.helpers;
    const int64_t helpers = smaller(wanted, room);
    return helpers > 0 ? (int)helpers : 0;
}

int64_t ts_in_parts(ts_part part, void *work, int64_t n, int64_t nbytes) {
    const int64_t parts = smaller(n, nbytes / __atomic_load_n(&least, __ATOMIC_RELAXED));
    const int alone = parts < 2 || nbytes < __atomic_load_n(&shared, __ATOMIC_RELAXED);
    const int threads = alone ? 1 : limit();
    if (threads < 2) return part(work, 0, n);
    job j = {.part = part, .work = work, .n = n, .refused = n};
    enter();
    all.callers++;
    const int helpers = j.open = helpers_for(parts, threads);
    all.helpers += helpers;
    if (helpers) {
        const int64_t pieces = smaller(parts, PARTS * (1 + helpers));
        j.step = (n + pieces - 1) / pieces;
        if (j.step > TOGETHER) j.step = (j.step + TOGETHER - 1) / TOGETHER * TOGETHER;
        j.following = all.jobs;
        all.jobs = &j;
        start(smaller(helpers - all.idle, threads - 1 - all.started));
        for (int i = 0; i < helpers; i++) pthread_cond_signal(&all.more);
    }
    leave();
    if (helpers)
        do_parts(&j);
    else
        j.refused = part(work, 0, n);
    pthread_mutex_lock(&all.lock);
    all.callers--;
    if (helpers) shut(&j);
    while (j.inside) pthread_cond_wait(&all.over, &all.lock);
    leave();
    return smaller(j.refused, n);
}
