/* The core as a module of Python's stable ABI. Arrays come as buffers, and their sizes are checked
   against each other here: whatever a caller passes, the core stays inside of them. compiled.pyi
   says what the functions do. */
#include <stdlib.h>

#include "abi.h"
#include "core.h"
#include "map.h"

#ifndef TS_SOURCES
#error "built by hatch_build.py, which names the hash of the sources"
#endif
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

enum {
    READ = 0,
    WRITE = PyBUF_WRITABLE,
    MANY_BYTES = 64 << 10,  /* to let other threads run costs as much as work on some 10 KiB */
    MOST_BYTES = 64 << 20,  /* some ten milliseconds */
    SORTED_BYTES = 32,      /* that move while an id is sorted */
    KEY_BYTES = 128         /* memory that a key reads: as long as that takes, others wait */
};
static const int64_t MOST_KEYS = (1LL << 32) - 2; /* a place holds a row + 1 */

/* One argument: a buffer that is held until it is dropped, and its shape. */
typedef struct {
    Py_buffer view;
    uint8_t *data;
    int64_t n, width, stride;
} array;

static int refuse(const char *what, const char *why) {
    PyErr_Format(PyExc_ValueError, "%s: %s", what, why);
    return 0;
}

/* Hold a contiguous buffer of items of `size` bytes, `n` of them unless it is -1. */
static int items(array *a, PyObject *object, const char *what, int size, int64_t n, int mode) {
    if (PyObject_GetBuffer(object, &a->view, PyBUF_SIMPLE | mode)) return 0;
    if (a->view.len % size || (size > 1 && a->view.itemsize != size))
        return refuse(what, "items of another size");
    a->data = a->view.buf ? a->view.buf : (void *)""; /* of nothing */
    a->n = a->view.len / size;
    return n < 0 || a->n == n ? 1 : refuse(what, "not as many as rows");
}

/* Hold what may be None. */
static int maybe(array *a, PyObject *object, const char *what, int size, int64_t n, int mode) {
    return object == Py_None || items(a, object, what, size, n, mode);
}

/* Hold records (n, width) of bytes, those of one side by side; `n` of them unless it is -1. */
static int records(array *a, PyObject *object, const char *what, int64_t n, int mode) {
    if (PyObject_GetBuffer(object, &a->view, PyBUF_STRIDES | mode)) return 0;
    const Py_buffer *v = &a->view;
    if (v->ndim != 2 || v->itemsize != 1) return refuse(what, "not (n, bytes) of uint8");
    if (v->shape[1] > 1 && v->strides[1] != 1) return refuse(what, "bytes of a record are apart");
    a->data = v->buf;
    a->n = v->shape[0];
    a->width = v->shape[1];
    a->stride = v->strides[0];
    return n < 0 || a->n == n ? 1 : refuse(what, "not as many as rows");
}

/* Hold the bytes of `n` texts, or of any number if it is -1, and their offsets; two arguments. */
static int texts_of(ts_texts *t, array *a, PyObject *const *given, int64_t n) {
    if (!items(&a[0], given[0], "blob", 1, -1, READ) || !items(&a[1], given[1], "offsets", 8, -1, READ))
        return 0;
    if (a[1].n < 1 || (n >= 0 && a[1].n != n + 1)) return refuse("offsets", "not one more than texts");
    *t = (ts_texts){a[0].data, a[0].n, a[1].data, a[1].n - 1};
    return 1;
}

static void drop(array *arrays, int count) {
    for (int i = 0; i < count; i++) PyBuffer_Release(&arrays[i].view); /* nothing if not held */
}

static int takes(const char *name, Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, given);
    return 0;
}

static PyObject *answer(int64_t found) {
    if (found >= 0) return PyLong_FromLongLong(found);
    return PyErr_Format(PyExc_IndexError, "position %lld: outside of the source",
                        (long long)-(found + 1));
}

static PyThreadState *let_others_run(int64_t n, int64_t width) { /* n * width may be too large */
    return n && width >= MANY_BYTES / n ? PyEval_SaveThread() : NULL;
}

/* What a call read without the interpreter's lock was read before anything after it: readers ask
   then whether others wrote meanwhile. */
static void go_on(PyThreadState *state) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (state) PyEval_RestoreThread(state);
}

static PyObject *crc32c(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 1 && !takes("crc32c", count, 2)) return NULL;
    const long long value = count == 2 ? PyLong_AsLongLong(given[1]) : 0;
    if (value == -1 && PyErr_Occurred()) return NULL;
    if (value < 0 || value > UINT32_MAX)
        return PyErr_Format(PyExc_ValueError, "value: %lld is no uint32", value);
    array data = {0};
    if (!items(&data, given[0], "data", 1, -1, READ)) return NULL;
    int64_t found = value, at = 0;
    do { /* whole files come here: in pieces, between which Ctrl-C ends it */
        const int64_t n = data.n - at < MOST_BYTES ? data.n - at : MOST_BYTES;
        PyThreadState *state = let_others_run(n, 1);
        found = ts_crc32c((uint32_t)found, data.data + at, n);
        go_on(state);
        at += n;
    } while (at < data.n && !PyErr_CheckSignals());
    drop(&data, 1);
    return at < data.n ? NULL : answer(found);
}

static PyObject *sum_rows(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (!takes("sum_rows", count, 3)) return NULL;
    enum { ROWS, RECORDS, SUMS, ALL };
    array a[ALL] = {0};
    PyObject *result = NULL;
    if (items(&a[ROWS], given[0], "rows", 8, -1, READ) &&
        records(&a[RECORDS], given[1], "records", a[ROWS].n, READ) &&
        items(&a[SUMS], given[2], "sums", 4, a[ROWS].n, WRITE)) {
        const ts_records all = {.n = a[ROWS].n,
                                .rows = a[ROWS].data,
                                .source = a[RECORDS].data,
                                .count = a[RECORDS].n,
                                .stride = a[RECORDS].stride,
                                .width = a[RECORDS].width};
        PyThreadState *state = let_others_run(all.n, all.width);
        const int64_t found = ts_sum_rows(&all, a[SUMS].data);
        go_on(state);
        result = answer(found);
    }
    drop(a, ALL);
    return result;
}

static PyObject *check_rows(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (!takes("check_rows", count, 5)) return NULL;
    enum { ROWS, RECORDS, SUMS, BAD, ALL };
    array a[ALL] = {0};
    PyObject *result = NULL;
    const int sparse = PyObject_IsTrue(given[3]);
    if (sparse >= 0 && items(&a[ROWS], given[0], "rows", 8, -1, READ) &&
        records(&a[RECORDS], given[1], "records", a[ROWS].n, READ) &&
        items(&a[SUMS], given[2], "sums", 4, a[ROWS].n, READ) &&
        items(&a[BAD], given[4], "bad", 8, a[ROWS].n, WRITE)) {
        const ts_records all = {.n = a[ROWS].n,
                                .rows = a[ROWS].data,
                                .source = a[RECORDS].data,
                                .count = a[RECORDS].n,
                                .stride = a[RECORDS].stride,
                                .width = a[RECORDS].width};
        PyThreadState *state = let_others_run(all.n, all.width);
        const int64_t found = ts_check_rows(&all, a[SUMS].data, sparse, a[BAD].data);
        go_on(state);
        result = answer(found);
    }
    drop(a, ALL);
    return result;
}

static PyObject *copy_rows(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (!takes("copy_rows", count, 8)) return NULL;
    enum { SOURCE, AT, ROWS, SUMS, OUT, TO, BAD, ALL };
    array a[ALL] = {0};
    PyObject *result = NULL;
    const int sparse = PyObject_IsTrue(given[4]);
    if (sparse >= 0 && records(&a[SOURCE], given[0], "source", -1, READ) &&
        items(&a[AT], given[1], "at", 8, -1, READ) &&
        items(&a[ROWS], given[2], "rows", 8, a[AT].n, READ) &&
        items(&a[SUMS], given[3], "sums", 4, a[AT].n, READ) &&
        records(&a[OUT], given[5], "out", given[6] == Py_None ? a[AT].n : -1, WRITE) &&
        maybe(&a[TO], given[6], "to", 8, a[AT].n, READ) &&
        items(&a[BAD], given[7], "bad", 8, a[AT].n, WRITE) &&
        (a[OUT].width == a[SOURCE].width || refuse("out", "records of another width"))) {
        const ts_records all = {.n = a[AT].n,
                                .rows = a[ROWS].data,
                                .at = a[AT].data,
                                .source = a[SOURCE].data,
                                .count = a[SOURCE].n,
                                .stride = a[SOURCE].stride,
                                .width = a[SOURCE].width,
                                .out = a[OUT].data,
                                .to = a[TO].data,
                                .room = a[OUT].n,
                                .out_stride = a[OUT].stride};
        PyThreadState *state = let_others_run(all.n, all.width);
        const int64_t found = ts_check_rows(&all, a[SUMS].data, sparse, a[BAD].data);
        go_on(state);
        result = answer(found);
    }
    drop(a, ALL);
    return result;
}

/* The map of a call: places, bits, probes, codes come first, and texts where `given` says, if any.
   Fills a[0] to a[3]. */
static int map(ts_keys *k, array *a, PyObject *const *given, PyObject *const *texts, int places, int codes) {
    const long long bits = PyLong_AsLongLong(given[1]), probes = PyLong_AsLongLong(given[2]);
    if (PyErr_Occurred()) return 0;
    if (bits < 1 || bits > 31) return refuse("bits", "not from 1 to 31");
    if (probes < 1 || probes > 1 << 16) return refuse("probes", "not from 1 to 65,536");
    if (!items(&a[0], given[0], "places", 4, -1, places) || !items(&a[1], given[3], "codes", 8, -1, codes))
        return 0;
    const int64_t segments = a[0].n >> bits;
    if (!segments || a[0].n != segments << bits || a[0].n > 1LL << 32)
        return refuse("places", "not of whole segments");
    if (a[1].n > MOST_KEYS) return refuse("codes", "too many");
    *k = (ts_keys){.places = a[0].data,
                   .segments = segments,
                   .bits = (int)bits,
                   .probes = (int)probes,
                   .codes = a[1].data,
                   .rows = a[1].n};
    return !texts || texts_of(&k->texts, &a[2], texts, -1);
}

static PyObject *find_keys(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 10 && !takes("find_keys", count, 6)) return NULL;
    enum { MAP = 4, ASKED = MAP, FOUND, TEXTS, ALL = TEXTS + 2 };
    array a[ALL] = {0};
    ts_keys keys;
    ts_texts texts = {0};
    PyObject *result = NULL;
    if (map(&keys, a, given, count == 10 ? given + 6 : NULL, READ, READ) &&
        items(&a[ASKED], given[4], "asked", 8, -1, READ) &&
        items(&a[FOUND], given[5], "found", 8, a[ASKED].n, WRITE) &&
        (count == 6 || texts_of(&texts, &a[TEXTS], given + 8, a[ASKED].n))) {
        PyThreadState *state = let_others_run(a[ASKED].n, KEY_BYTES);
        ts_find_keys(&keys, a[ASKED].data, &texts, a[ASKED].n, a[FOUND].data);
        go_on(state);
        result = answer(a[ASKED].n);
    }
    drop(a, ALL);
    return result;
}

static PyObject *enter_keys(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 10 && !takes("enter_keys", count, 8)) return NULL;
    enum { MAP = 4, FOUND = MAP, PROGRESS, ALL };
    array a[ALL] = {0};
    ts_keys keys;
    PyObject *result = NULL;
    const long long first = PyLong_AsLongLong(given[4]);
    const int dense = PyObject_IsTrue(given[5]);
    if (dense >= 0 && !PyErr_Occurred() && map(&keys, a, given, count == 10 ? given + 8 : NULL, WRITE, dense ? WRITE : READ) &&
        items(&a[FOUND], given[6], "found", 8, -1, WRITE) &&
        items(&a[PROGRESS], given[7], "progress", 8, 2, WRITE)) {
        uint8_t *progress = a[PROGRESS].data;
        int64_t at = (int64_t)load64(progress), next = (int64_t)load64(progress + 8);
        const int64_t n = a[FOUND].n;
        const int64_t room = count == 10 && keys.texts.n < keys.rows ? keys.texts.n : keys.rows;
        if (first < 0 || first > room - n)
            refuse("first", "the codes end before");
        else if (at < 0 || at > n || next < 0 || next > first + at)
            refuse("progress", "not within the codes");
        else {
            PyThreadState *state = let_others_run(n - at, KEY_BYTES);
            ts_enter_keys(&keys, first, n, dense, &at, &next, a[FOUND].data);
            go_on(state);
            store64(progress, (uint64_t)at);
            store64(progress + 8, (uint64_t)next);
            result = answer(at);
        }
    }
    drop(a, ALL);
    return result;
}

static PyObject *place_keys(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (!takes("place_keys", count, 6)) return NULL;
    enum { MAP = 4, ENTRIES = MAP, LEFT, ALL };
    array a[ALL] = {0};
    ts_keys keys;
    PyObject *result = NULL;
    if (map(&keys, a, given, NULL, WRITE, READ) && items(&a[ENTRIES], given[4], "entries", 4, -1, READ) &&
        items(&a[LEFT], given[5], "left", 8, a[ENTRIES].n, WRITE)) {
        PyThreadState *state = let_others_run(a[ENTRIES].n, KEY_BYTES);
        const int64_t found = ts_place_keys(&keys, a[ENTRIES].data, a[ENTRIES].n, a[LEFT].data);
        go_on(state);
        result = answer(found);
    }
    drop(a, ALL);
    return result;
}

static PyObject *hash_texts(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (!takes("hash_texts", count, 4)) return NULL;
    enum { TEXTS, HASHES = 2, ALL };
    array a[ALL] = {0};
    ts_texts texts;
    PyObject *result = NULL;
    const long long longest = PyLong_AsLongLong(given[2]);
    if (!PyErr_Occurred() && texts_of(&texts, &a[TEXTS], given, -1) &&
        items(&a[HASHES], given[3], "hashes", 8, texts.n, WRITE)) {
        PyThreadState *state = let_others_run(texts.n, KEY_BYTES);
        const int64_t found = ts_hash_texts(&texts, longest, a[HASHES].data);
        go_on(state);
        result = answer(found);
    }
    drop(a, ALL);
    return result;
}

static PyObject *take_texts(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (!takes("take_texts", count, 4)) return NULL;
    enum { TEXTS, AT = 2, OFFSETS, ALL };
    array a[ALL] = {0};
    ts_texts texts;
    PyObject *result = NULL;
    if (texts_of(&texts, &a[TEXTS], given, -1) && items(&a[AT], given[2], "at", 8, -1, READ) &&
        items(&a[OFFSETS], given[3], "offsets", 8, a[AT].n + 1, WRITE)) {
        const int64_t bytes = ts_take_texts(&texts, a[AT].data, a[AT].n, a[OFFSETS].data, NULL);
        if (bytes < 0)
            answer(bytes);
        else if ((result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes)))
            ts_take_texts(&texts, a[AT].data, a[AT].n, a[OFFSETS].data, (uint8_t *)PyBytes_AsString(result));
    }
    drop(a, ALL);
    return result;
}

/* The bytes of `n` strings of a list, from `first` on; ends[i] gets where each ends. */
static PyObject *packed(PyObject *list, int64_t first, int64_t n, int64_t longest, uint8_t *ends) {
    int64_t bytes = 0;
    Py_ssize_t length;
    for (int64_t i = 0; i < n; i++) {
        if (!PyUnicode_AsUTF8AndSize(PyList_GetItem(list, first + i), &length)) return NULL;
        if (length > longest)
            return PyErr_Format(PyExc_ValueError, "text %lld: %zd bytes", (long long)(first + i), length);
        bytes += length;
        store64(ends + 8 * i, (uint64_t)bytes);
    }
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    char *out = result ? PyBytes_AsString(result) : NULL;
    for (int64_t i = 0; i < n && out; i++) { /* each has its UTF-8 by now: no call fails */
        const char *text = PyUnicode_AsUTF8AndSize(PyList_GetItem(list, first + i), &length);
        memcpy(out, text, (size_t)length);
        out += length;
    }
    return result;
}

static PyObject *pack_texts(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (!takes("pack_texts", count, 4)) return NULL;
    array ends = {0};
    PyObject *result = NULL;
    const long long first = PyLong_AsLongLong(given[1]), longest = PyLong_AsLongLong(given[2]);
    const Py_ssize_t size = PyList_Size(given[0]);
    if (size < 0) return PyErr_Format(PyExc_TypeError, "texts: not a list");
    if (!PyErr_Occurred() && items(&ends, given[3], "ends", 8, -1, WRITE)) {
        if (first < 0 || first > size - ends.n)
            refuse("first", "the list ends before");
        else
            result = packed(given[0], first, ends.n, longest, ends.data);
    }
    drop(&ends, 1);
    return result;
}

/* The map that is in a held buffer: numbers by row, or entries. */
static int map_in(ts_map *m, array *a) {
    const int64_t size = a->view.itemsize;
    if (size != 4 && size != ENTRY) return refuse("places", "items of another size");
    *m = (ts_map){a->data, a->n /= size, size == ENTRY};
    return m->count <= UINT32_MAX || !m->hashed ? 1 : refuse("places", "more than 2 ** 32 - 1 entries");
}

/* The places of a call: None, marks (a byte for each row), or a map. */
static int places(ts_slots *s, array *a, PyObject *given) {
    if (given == Py_None) return s->rows = s->slots, 1;
    if (!items(a, given, "places", 1, -1, READ)) return 0;
    if (a->view.itemsize == 1) return s->present = a->data, s->rows = a->n, 1;
    if (!map_in(&s->map, a)) return 0;
    return s->rows = s->map.hashed ? INT64_MAX : s->map.count, 1;
}

static PyObject *set_numbers(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (!takes("set_numbers", count, 5)) return NULL;
    enum { PLACES, ROWS, NUMBERS, ALL };
    array a[ALL] = {0};
    PyObject *result = NULL;
    ts_map map = {0};
    const int raise = PyObject_IsTrue(given[3]);
    const long long before = PyLong_AsLongLong(given[4]);
    int64_t held = before;
    if (!PyErr_Occurred() && items(&a[PLACES], given[0], "places", 1, -1, WRITE) && map_in(&map, &a[PLACES]) &&
        items(&a[ROWS], given[1], "rows", 8, -1, READ) &&
        maybe(&a[NUMBERS], given[2], "numbers", 4, a[ROWS].n, READ)) {
        if (before < 0 || before > map.count)
            refuse("held", "not from 0 to the number of places");
        else {
            PyThreadState *state = let_others_run(a[ROWS].n, KEY_BYTES);
            const int64_t set = ts_set_numbers(&map, a[ROWS].data, a[ROWS].n, a[NUMBERS].data, raise, &held);
            go_on(state);
            result = set < 0 ? answer(set) : answer(held);
        }
    }
    drop(a, ALL);
    return result;
}

/* A number of a batch. */
static int batch_of(PyObject *given, uint32_t *batch) {
    const long long number = PyLong_AsLongLong(given);
    if (number == -1 && PyErr_Occurred()) return 0;
    if (number < 1 || number > UINT32_MAX) return refuse("batch", "not from 1 to 2 ** 32 - 1");
    *batch = (uint32_t)number;
    return 1;
}

static PyObject *read_slots(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (!takes("read_slots", count, 11)) return NULL;
    enum { RECORDS, PLACES, IDS, OUT, SLOTS, STAMPS, AHEAD, ALL };
    array a[ALL] = {0};
    PyObject *result = NULL;
    const long long first = PyLong_AsLongLong(given[3]), most = PyLong_AsLongLong(given[4]);
    const long long lo = PyLong_AsLongLong(given[5]);
    uint32_t batch;
    ts_slots s = {0};
    if (!PyErr_Occurred() && batch_of(given[9], &batch) && records(&a[RECORDS], given[0], "records", -1, READ)) {
        s.records = a[RECORDS].data, s.slots = a[RECORDS].n, s.stride = a[RECORDS].stride;
        if (places(&s, &a[PLACES], given[1]) && items(&a[IDS], given[2], "ids", 8, -1, READ) &&
            maybe(&a[OUT], given[6], "out", 1, -1, WRITE) &&
            maybe(&a[SLOTS], given[7], "slots", 4, a[IDS].n, WRITE) &&
            maybe(&a[STAMPS], given[8], "stamps", 4, s.slots, WRITE) &&
            maybe(&a[AHEAD], given[10], "ahead", 4, s.slots, WRITE)) {
            const int64_t n = a[IDS].n, width = n ? a[OUT].n / n : 0;
            if (first < 0 || most < 0 || first > s.rows || most > s.rows - first)
                refuse("most", "not within the rows");
            else if (width * n != a[OUT].n || lo < 0 || width > a[RECORDS].width - lo)
                refuse("out", "not bytes within a record for each id");
            else {
                PyThreadState *state = let_others_run(n, width + KEY_BYTES);
                const int64_t found = ts_read_slots(&s, a[IDS].data, n, first, most, lo, width, a[OUT].data,
                                                    a[SLOTS].data, a[STAMPS].data, batch, a[AHEAD].data);
                go_on(state);
                result = answer(found);
            }
        }
    }
    drop(a, ALL);
    return result;
}

static PyObject *find_slots(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (!takes("find_slots", count, 4)) return NULL;
    enum { PLACES, ROWS, FOUND, ALL };
    array a[ALL] = {0};
    PyObject *result = NULL;
    ts_slots s = {.slots = PyLong_AsLongLong(given[1])};
    if (!PyErr_Occurred() && places(&s, &a[PLACES], given[0]) && items(&a[ROWS], given[2], "rows", 8, -1, READ) &&
        items(&a[FOUND], given[3], "found", 1, -1, WRITE)) {
        const int64_t n = a[ROWS].n, size = a[FOUND].view.itemsize;
        if ((size != 4 && size != 8) || a[FOUND].n != size * n)
            refuse("found", "not an int32 or int64 for each row");
        else if (s.slots < 0 || (size == 4 && s.slots > INT32_MAX))
            refuse("slots", "not from 0 to the most that `found` holds");
        else {
            PyThreadState *state = let_others_run(n, KEY_BYTES);
            const int64_t missing = ts_find_slots(&s, a[ROWS].data, n, a[FOUND].data, (int)size);
            go_on(state);
            result = answer(missing);
        }
    }
    drop(a, ALL);
    return result;
}

/* A call of gather(records, slots, lo, out) or scatter(records, slots, lo, values). */
static PyObject *copies(PyObject *const *given, int64_t (*call)(const ts_copies *), int from, int to) {
    enum { RECORDS, SLOTS, DATA, ALL };
    array a[ALL] = {0};
    PyObject *result = NULL;
    const long long lo = PyLong_AsLongLong(given[2]);
    if (!PyErr_Occurred() && records(&a[RECORDS], given[0], "records", -1, from) &&
        items(&a[SLOTS], given[1], "slots", 1, -1, READ) && items(&a[DATA], given[3], "data", 1, -1, to)) {
        const int64_t size = a[SLOTS].view.itemsize, n = a[SLOTS].n / size;
        const int64_t width = n ? a[DATA].n / n : 0;
        if (size != 4 && size != 8)
            refuse("slots", "items of another size");
        else if (width * n != a[DATA].n || lo < 0 || width > a[RECORDS].width - lo)
            refuse("data", "not bytes within a record for each slot");
        else {
            const ts_copies all = {.records = a[RECORDS].data,
                                   .count = a[RECORDS].n,
                                   .stride = a[RECORDS].stride,
                                   .slots = a[SLOTS].data,
                                   .size = (int)size,
                                   .n = n,
                                   .lo = lo,
                                   .width = width,
                                   .data = a[DATA].data};
            PyThreadState *state = let_others_run(n, width);
            const int64_t found = call(&all);
            go_on(state);
            result = answer(found);
        }
    }
    drop(a, ALL);
    return result;
}

static PyObject *gather(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    return takes("gather", count, 4) ? copies(given, ts_gather, READ, WRITE) : NULL;
}

static PyObject *scatter(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    return takes("scatter", count, 4) ? copies(given, ts_scatter, WRITE, READ) : NULL;
}

static PyObject *oldest_slots(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (!takes("oldest_slots", count, 3)) return NULL;
    array a[2] = {0};
    PyObject *result = NULL;
    uint32_t batch;
    if (batch_of(given[1], &batch) && items(&a[0], given[0], "stamps", 4, -1, READ) &&
        items(&a[1], given[2], "oldest", 4, -1, WRITE)) {
        if (a[0].n > INT32_MAX)
            refuse("stamps", "more than 2 ** 31 - 1");
        else {
            PyThreadState *state = let_others_run(a[0].n, 4);
            const int64_t found = ts_oldest_slots(a[0].data, a[0].n, batch, a[1].n, a[1].data);
            go_on(state);
            result = answer(found);
        }
    }
    drop(a, 2);
    return result;
}

static int is_tuple_of(PyObject *object, int64_t n, const char *what) {
    const int known = PyObject_IsInstance(object, &PyTuple_Type);
    return (known == 1 && PyTuple_Size(object) == n) || (known >= 0 && refuse(what, "no tuple of so many"));
}

static int fuses; /* asked once: in a virtual machine that takes 10 us */

/* A half of a step: begin_step or end_step(rule, flags, numbers, records, slots, starts, gradient,
   trained, roots). The type of the gradient is that of all fields. */
static PyObject *steps(PyObject *const *given, int64_t (*half)(const ts_step *)) {
    enum { RECORDS, SLOTS, GRADIENT, TRAINED, ROOTS, ALL };
    array a[ALL] = {0};
    PyObject *result = NULL;
    ts_step s = {.rule = (int)PyLong_AsLongLong(given[0]), .flags = (int)PyLong_AsLongLong(given[1])};
    const int rowwise = s.rule == TS_ROWWISE, momentum = s.rule == TS_SGD && s.flags & TS_MOMENTUM;
    const int64_t fields = s.rule == TS_ADAM ? 3 : s.rule == TS_SGD && !momentum ? 1 : 2;
    int64_t starts[1 + TS_STATES] = {0};
    if (PyErr_Occurred() || !is_tuple_of(given[2], TS_NUMBERS, "numbers") ||
        !is_tuple_of(given[5], fields, "starts"))
        return NULL;
    for (int i = 0; i < TS_NUMBERS; i++) s.numbers[i] = PyFloat_AsDouble(PyTuple_GetItem(given[2], i));
    for (int i = 0; i < fields; i++) starts[i] = PyLong_AsLongLong(PyTuple_GetItem(given[5], i));
    if (!PyErr_Occurred() && records(&a[RECORDS], given[3], "records", -1, WRITE) &&
        items(&a[SLOTS], given[4], "slots", 1, -1, READ) &&
        items(&a[GRADIENT], given[6], "gradient", 1, -1, READ)) {
        const int64_t size = a[SLOTS].view.itemsize, real = a[GRADIENT].view.itemsize;
        const int64_t n = a[SLOTS].n / size, dim = n ? a[GRADIENT].n / real / n : 0;
        int apart = a[RECORDS].stride % real || (uintptr_t)a[RECORDS].data % real;
        s.lo = starts[0];
        for (int i = 0; i < fields; i++) {
            const int64_t width = (rowwise && i ? 1 : dim) * real;
            apart |= starts[i] < 0 || starts[i] % real || width > a[RECORDS].width - starts[i];
            if (starts[i] < s.lo) s.lo = starts[i];
            if (starts[i] + width > s.hi) s.hi = starts[i] + width;
        }
        if (!fuses)
            refuse("rule", "this processor does not multiply and add at once");
        else if (s.rule < TS_SGD || s.rule > TS_ROWWISE)
            refuse("rule", "unknown");
        else if ((size != 4 && size != 8) || (real != 4 && real != 8))
            refuse("slots", "items of another size");
        else if (dim * n * real != a[GRADIENT].n || (uintptr_t)a[GRADIENT].data % real || apart)
            refuse("gradient", "not numbers of a field within a record for each slot");
        else if (maybe(&a[TRAINED], given[7], "trained", 1, n, READ) &&
                 maybe(&a[ROOTS], given[8], "roots", (int)real, rowwise ? n : dim * n, WRITE)) {
            if ((uintptr_t)a[ROOTS].data % real || (!a[ROOTS].data && s.rule != TS_SGD))
                refuse("roots", "not numbers");
            else {
                s.records = a[RECORDS].data, s.count = a[RECORDS].n, s.stride = a[RECORDS].stride;
                s.slots = a[SLOTS].data, s.size = (int)size, s.real = (int)real, s.n = n, s.dim = dim;
                s.weight = starts[0], s.states[0] = starts[1], s.states[1] = starts[2];
                s.gradient = a[GRADIENT].data, s.trained = a[TRAINED].data, s.roots = a[ROOTS].data;
                PyThreadState *state = let_others_run(n, s.hi - s.lo);
                const int64_t found = half(&s);
                go_on(state);
                result = answer(found);
            }
        }
    }
    drop(a, ALL);
    return result;
}

static PyObject *begin_step(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    return takes("begin_step", count, 9) ? steps(given, ts_begin_step) : NULL;
}

static PyObject *end_step(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    return takes("end_step", count, 9) ? steps(given, ts_end_step) : NULL;
}

static PyObject *group(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (!takes("group", count, 4)) return NULL;
    enum { IDS, ORDER, STARTS, ROWS, ALL };
    array a[ALL] = {0};
    PyObject *result = NULL;
    if (items(&a[IDS], given[0], "ids", 8, -1, READ) && items(&a[ORDER], given[1], "order", 8, a[IDS].n, WRITE) &&
        items(&a[STARTS], given[2], "starts", 8, a[IDS].n + 1, WRITE) &&
        items(&a[ROWS], given[3], "rows", 8, a[IDS].n, WRITE)) {
        PyThreadState *state = let_others_run(a[IDS].n, SORTED_BYTES);
        const int64_t found = ts_group(a[IDS].data, a[IDS].n, a[ORDER].data, a[STARTS].data, a[ROWS].data);
        go_on(state);
        result = answer(found);
    }
    drop(a, ALL);
    return result;
}

/* Hold rows of numbers, (n, dim) of `real` bytes, those of one side by side. */
static int values(array *a, PyObject *object, int64_t dim, int64_t real) {
    if (PyObject_GetBuffer(object, &a->view, PyBUF_STRIDES)) return 0;
    const Py_buffer *v = &a->view;
    if (v->ndim != 2 || v->itemsize != real || v->shape[1] != dim)
        return refuse("parts", "not (n, dim) of the sums' numbers");
    if ((dim > 1 && v->strides[1] != real) || v->strides[0] % real || (uintptr_t)v->buf % real)
        return refuse("parts", "numbers of a row are apart");
    a->data = v->buf, a->n = v->shape[0], a->stride = v->strides[0];
    return 1;
}

static PyObject *sum_groups(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (!takes("sum_groups", count, 4)) return NULL;
    enum { ORDER, STARTS, SUMS, ALL };
    const Py_ssize_t parts = PyList_Size(given[0]);
    if (parts < 0) return PyErr_Format(PyExc_TypeError, "parts: not a list");
    array a[ALL] = {0}, *of = calloc((size_t)parts + 1, sizeof *of);
    ts_values *each = calloc((size_t)parts + 1, sizeof *each);
    PyObject *result = NULL;
    Py_ssize_t held = 0;
    if (!of || !each)
        PyErr_NoMemory();
    else if (items(&a[ORDER], given[1], "order", 8, -1, READ) &&
             items(&a[STARTS], given[2], "starts", 8, -1, READ) &&
             items(&a[SUMS], given[3], "sums", 1, -1, WRITE)) {
        const int64_t real = a[SUMS].view.itemsize, groups = a[STARTS].n - 1;
        const int64_t dim = groups > 0 ? a[SUMS].n / real / groups : 0;
        ts_sums s = {each, 0, a[ORDER].n, groups, dim, a[ORDER].data, a[STARTS].data, a[SUMS].data, (int)real};
        if ((real != 4 && real != 8) || groups < 0 || dim * groups * real != a[SUMS].n)
            refuse("sums", "not numbers for each group");
        else if ((uintptr_t)a[SUMS].data % real)
            refuse("sums", "not aligned");
        else {
            int fits = 1;
            while (held < parts && fits) {
                PyObject *part = PyList_GetItem(given[0], held); /* which a buffer may have cut short */
                fits = part && values(&of[held], part, dim, real);
                each[held] = (ts_values){of[held].data, s.count, of[held].n, of[held].stride};
                s.count += of[held++].n;
            }
            if (fits) {
                PyThreadState *state = let_others_run(s.n, real * dim);
                const int64_t found = ts_sum_groups(&s);
                go_on(state);
                result = answer(found);
            }
        }
    }
    if (of) drop(of, (int)held);
    drop(a, ALL);
    free(of);
    free(each);
    return result;
}

static PyObject *in_memory(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (!takes("in_memory", count, 2)) return NULL;
    array a[2] = {0};
    PyObject *result = NULL;
    if (records(&a[0], given[0], "records", -1, READ) && items(&a[1], given[1], "rows", 8, -1, READ)) {
        if (a[0].stride != a[0].width)
            refuse("records", "lie apart");
        else
            result = answer(ts_in_memory(a[0].data, a[0].n, a[0].width, a[1].data, a[1].n));
    }
    drop(a, 2);
    return result;
}

static PyObject *set_threads(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (!takes("set_threads", count, 2)) return NULL;
    const long long threads = PyLong_AsLongLong(given[0]), part = PyLong_AsLongLong(given[1]);
    if (PyErr_Occurred()) return NULL;
    if (threads < 1 || threads > INT32_MAX || part < 0)
        return PyErr_Format(PyExc_ValueError, "threads: %lld, or bytes: %lld, are out of range", threads, part);
    ts_set_threads((int)threads, part);
    return answer(threads);
}

static PyMethodDef methods[] = {
    {"begin_step", begin_step, METH_FASTCALL,
     "begin_step(rule, flags, numbers, records, slots, starts, gradient, trained, roots)"},
    {"check_rows", check_rows, METH_FASTCALL, "check_rows(rows, records, sums, sparse, bad)"},
    {"copy_rows", copy_rows, METH_FASTCALL, "copy_rows(source, at, rows, sums, sparse, out, to, bad)"},
    {"crc32c", crc32c, METH_FASTCALL, "crc32c(data, value)"},
    {"end_step", end_step, METH_FASTCALL,
     "end_step(rule, flags, numbers, records, slots, starts, gradient, trained, roots)"},
    {"enter_keys", enter_keys, METH_FASTCALL,
     "enter_keys(places, bits, probes, codes, first, dense, found, progress, blob, offsets)"},
    {"find_keys", find_keys, METH_FASTCALL,
     "find_keys(places, bits, probes, codes, asked, found, blob, offsets, asked_blob, asked_offsets)"},
    {"find_slots", find_slots, METH_FASTCALL, "find_slots(places, slots, rows, found)"},
    {"gather", gather, METH_FASTCALL, "gather(records, slots, lo, out)"},
    {"group", group, METH_FASTCALL, "group(ids, order, starts, rows)"},
    {"hash_texts", hash_texts, METH_FASTCALL, "hash_texts(blob, offsets, longest, hashes)"},
    {"in_memory", in_memory, METH_FASTCALL, "in_memory(records, rows)"},
    {"oldest_slots", oldest_slots, METH_FASTCALL, "oldest_slots(stamps, batch, oldest)"},
    {"pack_texts", pack_texts, METH_FASTCALL, "pack_texts(texts, first, longest, ends)"},
    {"place_keys", place_keys, METH_FASTCALL,
     "place_keys(places, bits, probes, codes, entries, left)"},
    {"read_slots", read_slots, METH_FASTCALL,
     "read_slots(records, places, ids, first, most, lo, out, slots, stamps, batch, ahead)"},
    {"scatter", scatter, METH_FASTCALL, "scatter(records, slots, lo, values)"},
    {"set_numbers", set_numbers, METH_FASTCALL, "set_numbers(places, rows, numbers, raise, held)"},
    {"set_threads", set_threads, METH_FASTCALL, "set_threads(threads, part_bytes)"},
    {"sum_groups", sum_groups, METH_FASTCALL, "sum_groups(parts, order, starts, sums)"},
    {"sum_rows", sum_rows, METH_FASTCALL, "sum_rows(rows, records, sums)"},
    {"take_texts", take_texts, METH_FASTCALL, "take_texts(blob, offsets, at, taken)"},
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *module) {
    if (PyModule_AddStringConstant(module, "DISPATCH", ts_start(NULL))) return -1;
    fuses = ts_fuses();
    if (PyModule_AddIntConstant(module, "FUSES", fuses)) return -1;
    return PyModule_AddStringConstant(module, "SOURCES", TEXT(TS_SOURCES));
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)start}, {0, NULL}};

static PyModuleDef definition = {
    .m_base = {.ob_refcnt = 1},
    .m_name = "compiled",
    .m_doc = "Loops over rows and bytes, compiled from core.c.",
    .m_methods = methods,
    .m_slots = slots,
};

__attribute__((visibility("default"))) PyObject *PyInit_compiled(void) {
    return PyModuleDef_Init(&definition);
}
