/* A step of each optimizer on numbers of one type, REAL: included by steps.c for each. */

INLINE REAL NAMED(add)(REAL a, REAL b, REAL times) { return FMA(times, b, a); }
INLINE REAL NAMED(addcmul)(REAL a, REAL b, REAL c, REAL times) { return FMA(times * b, c, a); }
INLINE REAL NAMED(addcdiv)(REAL a, REAL b, REAL c, REAL times) { return a + times * b / c; }
INLINE REAL NAMED(lerp)(REAL from, REAL to, REAL part) {
    return part < (REAL)0.5 ? FMA(part, to - from, from) : FMA(part - 1, to - from, to);
}

/* The gradient, as every optimizer begins with it. */
INLINE REAL NAMED(prepared)(REAL g, REAL p, REAL decay, int flags) {
    if (flags & TS_MAXIMIZE) g = -g;
    return decay != 0 ? NAMED(add)(g, p, decay) : g;
}

/* The mean square of a row's gradient: by columns 32 apart in order, then halves. */
INLINE REAL NAMED(mean_square)(const REAL *g, const REAL *p, int64_t dim, REAL decay, int flags) {
    REAL sums[LANES] = {0};
    for (int64_t at = 0; at < dim; at += LANES) {
        const int64_t n = dim - at < LANES ? dim - at : LANES;
        for (int64_t k = 0; k < n; k++) {
            const REAL x = NAMED(prepared)(g[at + k], p[at + k], decay, flags);
            sums[k] += x * x;
        }
    }
    for (int half = LANES / 2; half; half /= 2)
        for (int k = 0; k < half; k++) sums[k] += sums[half + k];
    return sums[0] * (REAL)(1 / (double)dim);
}

/* The first half of a step on a row, with states a and b. */
INLINE void NAMED(begin_row)(int rule, int flags, const REAL *number, int64_t dim, const REAL *restrict p,
                             const REAL *restrict gradient, REAL *restrict a, REAL *restrict b,
                             REAL *restrict root) {
    const REAL decay = number[0], toward = number[2], beta = number[3], other = number[4];
    if (rule == TS_ROWWISE) {
        *a += NAMED(mean_square)(gradient, p, dim, decay, flags);
        *root = *a;
        return;
    }
    for (int64_t k = 0; k < dim; k++) {
        const REAL g = NAMED(prepared)(gradient[k], p[k], decay, flags);
        if (rule == TS_ADAM) {
            a[k] = NAMED(lerp)(a[k], g, toward);
            root[k] = b[k] = NAMED(addcmul)(b[k] * beta, g, g, other);
        } else
            root[k] = a[k] = NAMED(addcmul)(a[k], g, g, 1);
    }
}

/* The second half. SGD changes its state, a, here. */
INLINE void NAMED(end_row)(int rule, int flags, const REAL *number, int64_t dim, REAL *restrict p,
                           const REAL *restrict gradient, REAL *restrict a, const REAL *restrict root) {
    const REAL decay = number[0], rate = number[1];
    for (int64_t k = 0; k < dim; k++) {
        if (rule == TS_ADAM) {
            const REAL kept = flags & TS_DECOUPLED ? p[k] * number[7] : p[k];
            p[k] = NAMED(addcdiv)(kept, a[k], root[k] / number[5] + number[6], rate);
            continue;
        }
        REAL g = NAMED(prepared)(gradient[k], p[k], decay, flags);
        if (rule == TS_ADAGRAD)
            p[k] = NAMED(addcdiv)(p[k], g, root[k] + number[2], rate);
        else if (rule == TS_ROWWISE)
            p[k] = NAMED(addcdiv)(p[k], g * rate, *root + number[2], 1);
        else {
            if (flags & TS_MOMENTUM) {
                a[k] = number[4] != 0 ? g : NAMED(add)(a[k] * number[2], g, number[3]);
                g = flags & TS_NESTEROV ? NAMED(add)(g, a[k], number[2]) : a[k];
            }
            p[k] = NAMED(add)(p[k], g, rate);
        }
    }
}

INLINE void NAMED(half)(const ts_step *s, int rule, int begins) {
    const int64_t dim = s->dim, roots = rule == TS_ROWWISE ? 1 : dim;
    REAL number[TS_NUMBERS];
    for (int i = 0; i < TS_NUMBERS; i++) number[i] = (REAL)s->numbers[i];
    for (int64_t i = 0; i < s->n; i++) {
        uint8_t *record = record_of(s, i);
        const REAL *gradient = (const REAL *)s->gradient + i * dim;
        REAL *p = (REAL *)(record + s->weight), *root = (REAL *)s->roots + i * roots;
        REAL *a = (REAL *)(record + s->states[0]), *b = (REAL *)(record + s->states[1]);
        if (s->trained && !s->trained[i])
            for (int64_t k = 0; k < roots && begins; k++) root[k] = 0;
        else if (begins)
            NAMED(begin_row)(rule, s->flags, number, dim, p, gradient, a, b, root);
        else
            NAMED(end_row)(rule, s->flags, number, dim, p, gradient, a, root);
    }
}

static FUSED void NAMED(begin)(const ts_step *s) {
    switch (s->rule) {
    case TS_ADAM: NAMED(half)(s, TS_ADAM, 1); break;
    case TS_ADAGRAD: NAMED(half)(s, TS_ADAGRAD, 1); break;
    case TS_ROWWISE: NAMED(half)(s, TS_ROWWISE, 1); break;
    }
}

static FUSED void NAMED(end)(const ts_step *s) {
    switch (s->rule) {
    case TS_SGD: NAMED(half)(s, TS_SGD, 0); break;
    case TS_ADAM: NAMED(half)(s, TS_ADAM, 0); break;
    case TS_ADAGRAD: NAMED(half)(s, TS_ADAGRAD, 0); break;
    case TS_ROWWISE: NAMED(half)(s, TS_ROWWISE, 0); break;
    }
}
