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
//   APART    whether the scales are elsewhere, for every row of the table; then BYTES is DIM

struct Scaled {
    u8 *rows;       // [count][BYTES], aligned to 16 bytes
    u8 *out;        // [count][DIM], likewise
    u64 count;
};

// Scales stored separately from the elements of their rows.
struct Scales {
    u8 *scales;     // [bound][pitch], from the first scale
    i64 *ids;       // [count]: the row of each; NaN for one that is not 0 to bound - 1
    i64 bound;
    u32 pitch;
};

struct I8 { u8 bits; };
struct U8 { u8 bits; };
struct E8M0 { u8 bits; };

__device__ float value(I8 x) { return (float)(signed char)x.bits; }
__device__ float value(U8 x) { return (float)x.bits; }

__device__ float value(E8M0 x) {
    const u32 code = x.bits;
    return __uint_as_float(code == 0 ? 0x00400000 : code == 255 ? 0x7fc00000 : code << 23);
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

extern "C" __global__ void tierstore_unscale(const Scaled work, const Scales apart) {
    constexpr u32 PARTS = DIM / VECTOR;
    for (u64 i = wide_thread(); i < work.count * PARTS; i += wide_threads()) {
        const u64 row = i / PARTS;
        const u32 within = (u32)(i - row * PARTS) * VECTOR;
        const u8 *const bytes = work.rows + row * BYTES;
        const Elements elements = *(const Elements *)(bytes + within);
        const u8 *scales = bytes + SCALES;
        bool known = true;
        if (APART) {
            const i64 id = apart.ids[row];
            known = (u64)id < (u64)apart.bound;
            scales = apart.scales + (known ? id : 0) * apart.pitch;
        }
        const SCALE *const own = (const SCALE *)scales + within / BLOCK;
        const float scale = known ? value(*own) : __uint_as_float(0x7fc00000);
        Values values;
        for (u32 k = 0; k < VECTOR; ++k) set(values.each[k], product(value(elements.each[k]), scale));
        ((Values *)work.out)[i] = values;
    }
}
