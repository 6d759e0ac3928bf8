// Rows of 8-bit elements with scales, as floats.
//
// Macros:
//   ELEMENT  type of the elements: E4M3FN, E5M2, I8 or U8
//   SCALE    type of the scales: F32 or E8M0
//   OUT      type of the result: F32, BF16 or F16
//   DIM      elements of a row
//   BLOCK    elements that share a scale
//   SCALES   byte of a row at which its scales begin
//   BYTES    bytes of a row
//   VECTOR   elements that a thread converts: a power of two to 16 that divides DIM, BLOCK and BYTES

struct Scaled {
    u8 *rows;       // [count][BYTES], aligned to 16 bytes
    u8 *out;        // [count][DIM], likewise
    u64 count;
};

struct Nothing {
    u64 unused;
};

struct I8 { u8 bits; };
struct U8 { u8 bits; };
struct E8M0 { u8 bits; };

// A float with M bits of mantissa; with infinities as in IEEE 754, or with one NaN for each sign.
template <u32 M, bool INFINITIES>
struct Float8 { u8 bits; };
using E4M3FN = Float8<3, false>;
using E5M2 = Float8<2, true>;

__device__ float value(I8 x) { return (float)(signed char)x.bits; }
__device__ float value(U8 x) { return (float)x.bits; }

__device__ float value(E8M0 x) {
    const u32 code = x.bits;
    return __uint_as_float(code == 0 ? 0x00400000 : code == 255 ? 0x7fc00000 : code << 23);
}

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

// A product that keeps subnormals, whether or not the source is compiled to flush them.
__device__ float product(float x, float y) {
#ifdef __CUDA_ARCH__
    float found;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(found) : "f"(x), "f"(y));
    return found;
#else
    return x * y;
#endif
}

struct alignas(VECTOR) Elements {
    ELEMENT each[VECTOR];
};

struct alignas(VECTOR * sizeof(OUT) < 16 ? VECTOR * sizeof(OUT) : 16) Values {
    OUT each[VECTOR];
};

extern "C" __global__ void tierstore_unscale(const Scaled work, const Nothing nothing) {
    constexpr u32 PARTS = DIM / VECTOR;
    for (u64 i = wide_thread(); i < work.count * PARTS; i += wide_threads()) {
        const u64 row = i / PARTS;
        const u32 within = (u32)(i - row * PARTS) * VECTOR;
        const u8 *const bytes = work.rows + row * BYTES;
        const Elements elements = *(const Elements *)(bytes + within);
        const float scale = value(*(const SCALE *)(bytes + SCALES + within / BLOCK * sizeof(SCALE)));
        Values values;
        for (u32 k = 0; k < VECTOR; ++k) set(values.each[k], product(value(elements.each[k]), scale));
        ((Values *)work.out)[i] = values;
    }
}
