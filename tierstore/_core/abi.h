/* The names of Python's stable ABI, of 3.11, that binding.c uses. Many a machine has a Python and a
   compiler but not the headers of Python; what is declared here no later Python may change. */
#ifndef TS_ABI_H
#define TS_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef ptrdiff_t Py_ssize_t;
typedef struct _object PyObject;
typedef struct _ts PyThreadState;

typedef struct {
    void *buf;
    PyObject *obj;
    Py_ssize_t len, itemsize;
    int readonly, ndim;
    char *format;
    Py_ssize_t *shape, *strides, *suboffsets;
    void *internal;
} Py_buffer;

typedef struct {
    const char *ml_name;
    PyObject *(*ml_meth)(PyObject *, PyObject *const *, Py_ssize_t);
    int ml_flags;
    const char *ml_doc;
} PyMethodDef;

typedef struct {
    int slot;
    void *value;
} PyModuleDef_Slot;

typedef struct {
    struct {
        Py_ssize_t ob_refcnt;
        void *ob_type;
        void *m_init;
        Py_ssize_t m_index;
        PyObject *m_copy;
    } m_base;
    const char *m_name, *m_doc;
    Py_ssize_t m_size;
    PyMethodDef *m_methods;
    PyModuleDef_Slot *m_slots;
    void *m_traverse, *m_clear, *m_free;
} PyModuleDef;

enum { METH_FASTCALL = 0x80, PyBUF_SIMPLE = 0, PyBUF_WRITABLE = 1, PyBUF_STRIDES = 0x18 };
enum { Py_mod_exec = 2 };

extern PyObject _Py_NoneStruct, PyTuple_Type; /* whatever they are made of */
#define Py_None (&_Py_NoneStruct)
extern PyObject *PyExc_IndexError, *PyExc_TypeError, *PyExc_ValueError;

void PyBuffer_Release(Py_buffer *);
char *PyBytes_AsString(PyObject *);
PyObject *PyBytes_FromStringAndSize(const char *, Py_ssize_t);
int PyErr_CheckSignals(void);
PyObject *PyErr_Format(PyObject *, const char *, ...);
PyObject *PyErr_NoMemory(void);
PyObject *PyErr_Occurred(void);
void PyEval_RestoreThread(PyThreadState *);
PyThreadState *PyEval_SaveThread(void);
double PyFloat_AsDouble(PyObject *);
PyObject *PyList_GetItem(PyObject *, Py_ssize_t);
Py_ssize_t PyList_Size(PyObject *);
long long PyLong_AsLongLong(PyObject *);
PyObject *PyLong_FromLongLong(long long);
PyObject *PyModuleDef_Init(PyModuleDef *);
int PyModule_AddIntConstant(PyObject *, const char *, long);
int PyModule_AddStringConstant(PyObject *, const char *, const char *);
int PyObject_CheckBuffer(PyObject *);
int PyObject_GetBuffer(PyObject *, Py_buffer *, int);
int PyObject_IsInstance(PyObject *, PyObject *);
int PyObject_IsTrue(PyObject *);
PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
Py_ssize_t PyTuple_Size(PyObject *);
const char *PyUnicode_AsUTF8AndSize(PyObject *, Py_ssize_t *);

#endif
