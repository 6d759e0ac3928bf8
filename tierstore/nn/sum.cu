// The gradient of each distinct row: the sum of those of its ids, in no particular order.
//
// Macros:
//   EACH     type of the gradients of ids: F32, BF16 or F16; they are added in float32
//   VECTOR   elements that a thread moves in one access: 4 or 1

struct Sum {
    u8 *each;                // gradient of each id, [n][dim]; for `narrow` of each record, [count]
    float *total;            // of each record, [count][dim]
    u32 dim;
};

struct alignas(4 * VECTOR) Pack {
    float at[VECTOR];
};

struct alignas(sizeof(EACH) * VECTOR) Given {
    EACH at[VECTOR];
};

// Rows after the distinct ones stay as they are.
extern "C" __global__ void tierstore_clear(const Rows rows, const Sum sum) {
    const u64 packs = (u64)*rows.count * (sum.dim / VECTOR);
    for (u64 i = wide_thread(); i < packs; i += wide_threads()) ((Pack *)sum.total)[i] = Pack{};
}

// Round the sums to the type of the gradients.
extern "C" __global__ void tierstore_narrow(const Rows rows, const Sum sum) {
    const u64 packs = (u64)*rows.count * (sum.dim / VECTOR);
    for (u64 i = wide_thread(); i < packs; i += wide_threads()) {
        const Pack total = ((const Pack *)sum.total)[i];
        Given narrow;
        for (u32 e = 0; e < VECTOR; ++e) set(narrow.at[e], total.at[e]);
        ((Given *)sum.each)[i] = narrow;
    }
}

// A warp takes 32 ids at a time and adds up those of the same row by itself: otherwise, additions
// to the most frequent rows would wait for one another in memory. About as many lanes share a row
// as it has packs.
extern "C" __global__ void tierstore_sum(const Rows rows, const Sum sum) {
    const u32 lane = threadIdx.x & 31, packs = sum.dim / VECTOR;
    u32 lanes = 32;
    while (lanes > 1 && lanes / 2 >= packs) lanes /= 2;
    const u32 together = 32 / lanes, first = lane % lanes;
    for (i64 base = (i64)(wide_thread() >> 5) * 32; base < rows.n; base += (i64)wide_threads()) {
        const i32 mine = base + lane < rows.n ? rows.positions[base + lane] : -1;
        const u32 same = __match_any_sync(0xffffffffu, mine);
        for (u32 k = 0; k < 32; k += together) {
            const u32 id = k + lane / lanes;
            const i32 row = __shfl_sync(0xffffffffu, mine, id);
            const u32 ids = __shfl_sync(0xffffffffu, same, id);
            if (row < 0 || __ffs(ids) - 1 != id) continue;
            for (u32 pack = first; pack < packs; pack += lanes) {
                Pack part{};
                for (u32 left = ids; left; left &= left - 1) {
                    const u64 other = (u64)base + __ffs(left) - 1;
                    const Given more = ((const Given *)sum.each)[other * packs + pack];
                    for (u32 e = 0; e < VECTOR; ++e) part.at[e] += value(more.at[e]);
                }
                accumulate(sum.total + (u64)row * sum.dim + (u64)pack * VECTOR, part.at);
            }
        }
    }
}
