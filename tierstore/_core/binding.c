/* The core as a module of Python's stable ABI. Arrays come as buffers, and their sizes are checked
   against each other here: whatever a caller passes, the core stays inside of them. compiled.pyi
   says what the functions do. */
#include "abi.h"
#include "core.h"

#ifndef TS_SOURCES
#error "built by hatch_build.py, which names the hash of the sources"
#endif
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

enum {
    READ = 0,
    WRITE = PyBUF_WRITABLE,
    MANY_BYTES = 64 << 10,  /* to let other threads run costs as much as work on some 10 KiB */
    MOST_BYTES = 64 << 20   /* some ten milliseconds */
};

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
    a->data = a->view.buf;
    a->n = a->view.len / size;
    return n < 0 || a->n == n ? 1 : refuse(what, "not as many as rows");
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

static void go_on(PyThreadState *state) {
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
    if (!takes("copy_rows", count, 7)) return NULL;
    enum { SOURCE, AT, ROWS, SUMS, OUT, BAD, ALL };
    array a[ALL] = {0};
    PyObject *result = NULL;
    const int sparse = PyObject_IsTrue(given[4]);
    if (sparse >= 0 && records(&a[SOURCE], given[0], "source", -1, READ) &&
        items(&a[AT], given[1], "at", 8, -1, READ) &&
        items(&a[ROWS], given[2], "rows", 8, a[AT].n, READ) &&
        items(&a[SUMS], given[3], "sums", 4, a[AT].n, READ) &&
        records(&a[OUT], given[5], "out", a[AT].n, WRITE) &&
        items(&a[BAD], given[6], "bad", 8, a[AT].n, WRITE) &&
        (a[OUT].width == a[SOURCE].width || refuse("out", "records of another width"))) {
        const ts_records all = {.n = a[AT].n,
                                .rows = a[ROWS].data,
                                .at = a[AT].data,
                                .source = a[SOURCE].data,
                                .count = a[SOURCE].n,
                                .stride = a[SOURCE].stride,
                                .width = a[SOURCE].width,
                                .out = a[OUT].data,
                                .out_stride = a[OUT].stride};
        PyThreadState *state = let_others_run(all.n, all.width);
        const int64_t found = ts_check_rows(&all, a[SUMS].data, sparse, a[BAD].data);
        go_on(state);
        result = answer(found);
    }
    drop(a, ALL);
    return result;
}

static PyMethodDef methods[] = {
    {"check_rows", check_rows, METH_FASTCALL, "check_rows(rows, records, sums, sparse, bad)"},
    {"copy_rows", copy_rows, METH_FASTCALL, "copy_rows(source, at, rows, sums, sparse, out, bad)"},
    {"crc32c", crc32c, METH_FASTCALL, "crc32c(data, value)"},
    {"sum_rows", sum_rows, METH_FASTCALL, "sum_rows(rows, records, sums)"},
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *module) {
    if (PyModule_AddStringConstant(module, "DISPATCH", ts_start(NULL))) return -1;
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
