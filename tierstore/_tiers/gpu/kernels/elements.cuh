// Elements of a field, which are stored in 8, 16 or 32 bits and computed with in float32.

struct F32 { u32 bits; };
struct BF16 { u16 bits; };
struct F16 { u16 bits; };

__device__ float value(F32 x) { return __uint_as_float(x.bits); }
__device__ float value(BF16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ void set(F32 &x, float to) { x.bits = __float_as_uint(to); }

// Round to nearest, ties to even; a NaN stays a NaN.
__device__ void set(BF16 &x, float to) {
    const u32 bits = __float_as_uint(to);
    x.bits = to != to ? 0x7fff : (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#ifdef __CUDA_ARCH__
__device__ float value(F16 x) {
    float found;
    asm("cvt.f32.f16 %0, %1;" : "=f"(found) : "h"(x.bits));
    return found;
}
__device__ void set(F16 &x, float to) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x.bits) : "f"(to)); }
#else
__device__ float value(F16 x) { return half_to_float(x.bits); }
__device__ void set(F16 &x, float to) { x.bits = float_to_half(to); }
#endif

// A float with M bits of mantissa; with infinities as in IEEE 754, or with one NaN for each sign.
template <u32 M, bool INFINITIES>
struct Float8 { u8 bits; };
using E4M3FN = Float8<3, false>;
using E5M2 = Float8<2, true>;

template <u32 M, bool INFINITIES>
__device__ float value(Float8<M, INFINITIES> x) {
    constexpr u32 BIAS = (1u << (6 - M)) - 1, TOP = ((1u << (7 - M)) - 1) << M;
    const u32 sign = (u32)(x.bits & 0x80) << 24, code = x.bits & 0x7f;
    if (INFINITIES ? code > TOP : code == 0x7f) return __uint_as_float(sign | 0x7fc00000);
    if (INFINITIES && code == TOP) return __uint_as_float(sign | 0x7f800000);
    if (code >> M) return __uint_as_float(sign | ((code << (23 - M)) + ((127 - BIAS) << 23)));
    // A subnormal: a whole number of steps, which the conversion of integers rounds to itself.
    const float steps = (float)code * __uint_as_float((128 - BIAS - M) << 23);
    return __uint_as_float(sign | __float_as_uint(steps));
}

// Add neighbouring elements to float32 numbers that other threads add to as well.
template <u32 N>
__device__ void accumulate(float *target, const float (&part)[N]) {
    u32 k = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    for (; N % 4 == 0 && k < N; k += 4)
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target + k), "f"(part[k]),
                     "f"(part[k + 1]), "f"(part[k + 2]), "f"(part[k + 3]) : "memory");
#endif
    for (; k < N; ++k) atomicAdd(target + k, part[k]);
}
