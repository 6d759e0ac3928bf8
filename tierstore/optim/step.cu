// A step of an optimizer on the records of a batch, in place.
//
// Every operation is that of torch's optimizers over lists of tensors, in their order and rounded as
// theirs are: fused where nvcc fuses them there, and to the type of the weights wherever they store.
// Compiled for each optimizer and the types of its fields, which are macros:
//   OPTIMIZER              SGD, ADAM, ADAGRAD, ROWWISE or RMSPROP
//   WEIGHT                 type of the weight: F32, BF16 or F16
//   COMPUTED               type of what torch computes with: F32, or that of the weight
//   GIVEN                  type of the gradient: COMPUTED, or one that widens to it
//   STOCHASTIC             0 or 1: round the weight, BF16, up or down at random
//   NARROW                 0 or 1: the same for the states, BF16 too, or with SCALED 1 of 8 bits
//   SCALED                 0 or 1: a float after the elements of each state scales those of a row
//   FIRST, SECOND, THIRD   types of the states' fields, None where there is no such state
//   VECTOR                 elements that a thread moves in one access: 4 or 1
//   SQUARES_FUSED          0 or 1: whether this torch adds a square in one operation
//   MAXIMIZE, DECOUPLED, AMSGRAD, NESTEROV, MOMENTUM, CENTERED      0 or 1 each

#define SGD 1
#define ADAM 2
#define ADAGRAD 3
#define ROWWISE 4
#define RMSPROP 5

struct Step {
    u8 *gradient;            // of each record, [count][dim]
    const u8 *trained;       // [count], or null where all are
    const i64 *rows;         // [count]: row of each record; only where STOCHASTIC or NARROW
    u32 dim;
    u32 count;               // of steps, this one included
    u32 weight, state[3];    // first byte of each field within a record
    u32 seed, column[3];     // for random bits: of all, and the first column of each state
    float number[8];         // what the host has computed for all rows
    float share;             // 1 / dim
    u32 clears;              // whether the gradient, of which all rows are trained, becomes zeros
};

// ------------------------------------------------------------------------------- types of a field

struct None {};

__device__ float value(None) { return 0; }
__device__ void set(None &, float) {}

// Random bits for a row in a step, and for a column of it; those of rounding.py.
__device__ u32 mixed(u32 x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}
__device__ u32 key_of(const Step &step, u64 row) {
    if (!STOCHASTIC && !NARROW) return 0;
    const u64 own = step.rows[row];
    const u32 high = (u32)(own >> 32) + step.seed * 0x85ebca6bu;
    return mixed(mixed((u32)own + step.count * 0x9e3779b9u) + high);
}
template <u32 BITS>
__device__ u32 noise(u32 key, u32 column) {
    return mixed(key ^ column * 0x9e3779b9u) >> (32 - BITS);
}

// Round away from zero with a probability that is the part of the gap that is cut off.
template <class Type>
__device__ void set_at_random(Type &x, float to, u32 key, u32 column) {
    x.bits = to != to ? 0x7fff : (u16)((__float_as_uint(to) + noise<16>(key, column)) >> 16);
}
__device__ void set_at_random(None &, float, u32, u32) {}

__device__ void set_weight(WEIGHT &x, float to, u32 key, u32 element) {
#if STOCHASTIC
    set_at_random(x, to, key, element);
#else
    set(x, to);
#endif
}

template <class Type>
__device__ void set_state(Type &x, float to, u32 key, u32 column) {
#if NARROW
    set_at_random(x, to, key, column);
#else
    set(x, to);
#endif
}

// Neighbouring elements, moved in one access.
template <class Type>
struct alignas(sizeof(Type) * VECTOR) Pack {
    Type at[VECTOR];
};

template <class Type>
__device__ void load(Pack<Type> &into, const u8 *field, u64 pack) {
    into = ((const Pack<Type> *)field)[pack];
}
template <class Type>
__device__ void store(const Pack<Type> &from, u8 *field, u64 pack) {
    ((Pack<Type> *)field)[pack] = from;
}
__device__ void load(Pack<None> &, const u8 *, u64) {}
__device__ void store(const Pack<None> &, u8 *, u64) {}

// -------------------------------------------------------------- torch's operations on an element

// A result as torch stores it before the next operation.
__device__ float stored(float result) {
    COMPUTED field;
    set(field, result);
    return value(field);
}

__device__ float mul(float a, float by) { return stored(__fmul_rn(a, by)); }
__device__ float add(float a, float b, float times) { return stored(__fmaf_rn(times, b, a)); }
__device__ float add(float a, float b) { return stored(__fadd_rn(a, b)); }
__device__ float div(float a, float by) { return stored(__fdiv_rn(a, by)); }
__device__ float root(float a) { return stored(__fsqrt_rn(a)); }

__device__ float addcmul(float a, float b, float c, float times) {
    return stored(__fmaf_rn(times, __fmul_rn(b, c), a));
}

__device__ float addcdiv(float a, float b, float c, float times) {
    return stored(__fmaf_rn(times, __fdiv_rn(b, c), a));
}

__device__ float lerp(float from, float to, float part) {
    const float way = __fsub_rn(to, from);
    return stored(part < 0.5f ? __fmaf_rn(part, way, from)
                              : __fmaf_rn(-way, __fsub_rn(1, part), to));
}

// ------------------------------------------------------------------------------------ optimizers

// Every optimizer's beginning, for gradient g and weight p.
__device__ float prepared(float g, float p, float decay) {
    if (MAXIMIZE) g = -g;
    return decay != 0 ? add(g, p, decay) : g;
}

// Element p of the weight with gradient g and states a, b and c.
__device__ void update(const float *number, float &p, float g, float &a, float &b, float &c) {
#if OPTIMIZER == SGD
    const float minus_lr = number[1], momentum = number[2], undamped = number[3];
    const bool first = number[4] != 0;
    g = prepared(g, p, number[0]);
    if (MOMENTUM) {
        a = first ? g : add(mul(a, momentum), g, undamped);
        g = NESTEROV ? add(g, a, momentum) : a;
    }
    p = add(p, g, minus_lr);
#elif OPTIMIZER == ADAM
    const float minus_step = number[1], toward = number[2], beta = number[3], other = number[4];
    const float correction = number[5], eps = number[6], kept = number[7];
    if (DECOUPLED && kept != 1) p = mul(p, kept);
    g = prepared(g, p, number[0]);
    a = lerp(a, g, toward);
    b = addcmul(mul(b, beta), g, g, other);
    if (AMSGRAD) c = c != c || b != b ? c + b : c > b ? c : b;
    p = addcdiv(p, a, add(div(root(AMSGRAD ? c : b), correction), eps), minus_step);
#elif OPTIMIZER == ADAGRAD
    g = prepared(g, p, number[0]);
    a = SQUARES_FUSED ? stored(__fmaf_rn(g, g, a)) : addcmul(a, g, g, 1);
    p = addcdiv(p, mul(g, number[1]), add(root(a), number[2]), 1);
#elif OPTIMIZER == RMSPROP
    const float minus_lr = number[1], alpha = number[2], other = number[3], eps = number[4];
    const float momentum = number[5];
    g = prepared(g, p, number[0]);
    a = addcmul(mul(a, alpha), g, g, other);
    if (CENTERED) b = lerp(b, g, other);
    const float average = add(root(CENTERED ? addcmul(a, b, b, -1) : a), eps);
    float &buffer = CENTERED ? c : b;
    if (MOMENTUM) buffer = addcdiv(mul(buffer, momentum), g, average, 1);
    p = MOMENTUM ? add(p, buffer, minus_lr) : addcdiv(p, g, average, minus_lr);
#endif
}

#if OPTIMIZER == ROWWISE

// A warp a row. The state is one number: over the steps, the mean square of the gradient, summed as
// RowWiseAdagrad does: by columns 32 apart in order, then halves.
extern "C" __global__ void tierstore_step(const Rows rows, const Step step) {
    const u32 lane = threadIdx.x & 31;
    for (u64 row = wide_thread() >> 5; row < *rows.count; row += wide_threads() >> 5) {
        if (lane == 0) unpin(rows, row);
        if (step.trained && !step.trained[row]) continue;
        if (lane == 0) changed(rows, row);
        u8 *const record = (u8 *)rows.records[row];
        WEIGHT *const weight = (WEIGHT *)(record + step.weight);
        GIVEN *const gradient = (GIVEN *)step.gradient + row * step.dim;
        const u32 key = key_of(step, row);
        float squares = 0;
        for (u32 k = lane; k < step.dim; k += 32) {
            const float g = prepared(value(gradient[k]), value(weight[k]), step.number[0]);
            squares = k < 32 ? mul(g, g) : add(squares, mul(g, g));
        }
        for (u32 d = 16; d; d >>= 1)
            squares = add(squares, __shfl_xor_sync(0xffffffffu, squares, d));
        FIRST &state = *(FIRST *)(record + step.state[0]);
        const float sum = add(stored(value(state)), mul(squares, step.share));
        const float deviation = add(root(sum), step.number[2]);
        __syncwarp();
        if (lane == 0) set_state(state, sum, key, step.column[0]);
        for (u32 k = lane; k < step.dim; k += 32) {
            const float p = value(weight[k]);
            const float g = prepared(value(gradient[k]), p, step.number[0]);
            if (step.clears) gradient[k] = GIVEN();
            set_weight(weight[k], addcdiv(p, mul(g, step.number[1]), deviation, 1), key, k);
        }
    }
}

#elif SCALED

// The functions below do what float8.py does.

__device__ float scale_of(None, const u8 *, u32) { return 0; }
template <u32 M, bool INFINITIES>
__device__ float scale_of(Float8<M, INFINITIES>, const u8 *field, u32 dim) {
    return ((const float *)field)[(dim + 3) / 4];
}

// Set the scale of a row whose largest number is `most` to the least power of two that fits.
__device__ float scaled(None, u8 *, u32, float) { return 0; }
template <u32 M, bool INFINITIES>
__device__ float scaled(Float8<M, INFINITIES>, u8 *field, u32 dim, float most) {
    constexpr i32 LARGEST = INFINITIES ? 15 : 8;
    const u32 bits = __float_as_uint(most);
    const i32 exponent = (i32)(bits >> 23) + ((bits & 0x7fffff) > 0x600000) - LARGEST;
    const u32 code = bits == 0 ? 127 : exponent > 1 ? exponent : 1;
    ((float *)field)[(dim + 3) / 4] = __uint_as_float(code << 23);
    return __uint_as_float(code << 23);
}

__device__ void set_scaled(None &, float, float, u32, u32) {}
template <u32 M, bool INFINITIES>
__device__ void set_scaled(Float8<M, INFINITIES> &x, float to, float scale, u32 key, u32 column) {
    constexpr u32 DROPPED = 23 - M, BIAS = (1u << (6 - M)) - 1;
    const u32 bits = __float_as_uint(to), sign = bits >> 31 << 7, size = bits & 0x7fffffff;
    if (size >= 0x7f800000) {
        x.bits = (u8)(sign | (INFINITIES && size == 0x7f800000 ? 0x7c : 0x7f));
        return;
    }
    const float part = __fdiv_rn(__uint_as_float(size), scale);
    const u32 whole = part < __uint_as_float((128 - BIAS) << 23)
        ? (u32)__fmul_rn(part, __uint_as_float((126 + BIAS + M + DROPPED) << 23))
        : __float_as_uint(part) - ((127 - BIAS) << 23);
    const u32 code = (whole + noise<DROPPED>(key, column)) >> DROPPED;
    // An optimizer divides by what is never negative, and a row whose size became zero would leap.
    x.bits = (u8)(sign | (INFINITIES && size && !code ? 1 : code));
}

__device__ float larger(float most, float y) {
    const float size = __uint_as_float(__float_as_uint(y) & 0x7fffffff);
    return size > most && size < __uint_as_float(0x7f800000) ? size : most;
}

// A warp a row. Its largest numbers decide its scales, so that everything is computed twice.
extern "C" __global__ void tierstore_step(const Rows rows, const Step step) {
    const u32 lane = threadIdx.x & 31, packs = step.dim / VECTOR;
    for (u64 row = wide_thread() >> 5; row < *rows.count; row += wide_threads() >> 5) {
        if (lane == 0) unpin(rows, row);
        if (step.trained && !step.trained[row]) continue;
        if (lane == 0) changed(rows, row);
        u8 *const record = (u8 *)rows.records[row];
        u8 *const state[] = {record + step.state[0], record + step.state[1], record + step.state[2]};
        const u32 key = key_of(step, row);
        const float before[] = {
            scale_of(FIRST(), state[0], step.dim),
            scale_of(SECOND(), state[1], step.dim),
            scale_of(THIRD(), state[2], step.dim),
        };
        float most[3] = {}, after[3] = {};
        for (u32 last = 0; last < 2; ++last) {
            for (u32 pack = lane; pack < packs; pack += 32) {
                Pack<GIVEN> g;
                Pack<WEIGHT> p;
                Pack<FIRST> a;
                Pack<SECOND> b;
                Pack<THIRD> c;
                load(g, step.gradient, row * packs + pack);
                load(p, record + step.weight, pack);
                load(a, state[0], pack);
                load(b, state[1], pack);
                load(c, state[2], pack);
                for (u32 k = 0; k < VECTOR; ++k) {
                    float x = value(p.at[k]);
                    float y[] = {__fmul_rn(value(a.at[k]), before[0]),
                                 __fmul_rn(value(b.at[k]), before[1]),
                                 __fmul_rn(value(c.at[k]), before[2])};
                    update(step.number, x, value(g.at[k]), y[0], y[1], y[2]);
                    if (!last) {
                        for (u32 each = 0; each < 3; ++each) most[each] = larger(most[each], y[each]);
                        continue;
                    }
                    const u32 column = pack * VECTOR + k;
                    set_weight(p.at[k], x, key, column);
                    set_scaled(a.at[k], y[0], after[0], key, step.column[0] + column);
                    set_scaled(b.at[k], y[1], after[1], key, step.column[1] + column);
                    set_scaled(c.at[k], y[2], after[2], key, step.column[2] + column);
                }
                if (!last) continue;
                if (step.clears) store(Pack<GIVEN>(), step.gradient, row * packs + pack);
                store(p, record + step.weight, pack);
                store(a, state[0], pack);
                store(b, state[1], pack);
                store(c, state[2], pack);
            }
            if (last) break;
            for (u32 each = 0; each < 3; ++each)
                for (u32 d = 16; d; d >>= 1)
                    most[each] =
                        larger(most[each], __shfl_xor_sync(0xffffffffu, most[each], d));
            __syncwarp();
            after[0] = scaled(FIRST(), state[0], step.dim, most[0]);
            after[1] = scaled(SECOND(), state[1], step.dim, most[1]);
            after[2] = scaled(THIRD(), state[2], step.dim, most[2]);
        }
    }
}

#else

// A thread a pack of elements.
extern "C" __global__ void tierstore_step(const Rows rows, const Step step) {
    const u32 packs = step.dim / VECTOR;
    const u64 all = (u64)*rows.count * packs;
    for (u64 i = wide_thread(); i < all; i += wide_threads()) {
        const u64 row = all >> 32 ? i / packs : (u32)i / packs;
        const u32 pack = (u32)(i - row * packs);
        if (pack == 0) unpin(rows, row);
        if (step.trained && !step.trained[row]) continue;
        if (pack == 0) changed(rows, row);
        u8 *const record = (u8 *)rows.records[row];
        const u32 key = key_of(step, row);
        Pack<GIVEN> g;
        Pack<WEIGHT> p;
        Pack<FIRST> a;
        Pack<SECOND> b;
        Pack<THIRD> c;
        load(g, step.gradient, i);
        if (step.clears) store(Pack<GIVEN>(), step.gradient, i);
        load(p, record + step.weight, pack);
        load(a, record + step.state[0], pack);
        load(b, record + step.state[1], pack);
        load(c, record + step.state[2], pack);
        for (u32 k = 0; k < VECTOR; ++k) {
            float x = value(p.at[k]);
            float y[] = {stored(value(a.at[k])), stored(value(b.at[k])), stored(value(c.at[k]))};
            update(step.number, x, value(g.at[k]), y[0], y[1], y[2]);
            const u32 column = pack * VECTOR + k;
            set_weight(p.at[k], x, key, column);
            set_state(a.at[k], y[0], key, step.column[0] + column);
            set_state(b.at[k], y[1], key, step.column[1] + column);
            set_state(c.at[k], y[2], key, step.column[2] + column);
        }
        store(p, record + step.weight, pack);
        store(a, record + step.state[0], pack);
        store(b, record + step.state[1], pack);
        store(c, record + step.state[2], pack);
    }
}

#endif
