// Copy some fields of the records of a batch to arrays of their own in one pass, or back.
//
// Macros:
//   UNITS    how many units each field takes, in a list: 32,32,32
//   WIDTH    bytes of a unit, which a thread moves in one access: 16, 8, 4, 2 or 1

static constexpr u32 EACH[] = {UNITS}, FIELDS = sizeof EACH / sizeof *EACH;

struct Columns {
    u8 *array[FIELDS];       // of each record, [count][units]
    u32 start[FIELDS];       // first byte of the field within a record
};

struct alignas(WIDTH) Unit {
    u8 bytes[WIDTH];
};

__device__ constexpr bool alike() {
    for (u32 field = 1; field < FIELDS; ++field)
        if (EACH[field] != EACH[0]) return false;
    return true;
}

// Copy fields [FIRST, FIRST + TOGETHER), which are alike; a thread a unit of each.
template <bool BACK, u32 FIRST, u32 TOGETHER>
__device__ void copy(const Rows &rows, const Columns &columns) {
    const u64 all = (u64)*rows.count * EACH[FIRST];
    for (u64 i = wide_thread(); i < all; i += wide_threads()) {
        const u64 row = all >> 32 ? i / EACH[FIRST] : (u32)i / EACH[FIRST];
        const u32 within = (u32)(i - row * EACH[FIRST]);
        u8 *const record = (u8 *)rows.records[row];
        Unit value[TOGETHER];
        for (u32 k = 0; k < TOGETHER; ++k) {
            const Unit *const column = (const Unit *)columns.array[FIRST + k] + i;
            value[k] = BACK ? *column : ((const Unit *)(record + columns.start[FIRST + k]))[within];
        }
        for (u32 k = 0; k < TOGETHER; ++k) {
            Unit *const column = (Unit *)columns.array[FIRST + k] + i;
            *(BACK ? (Unit *)(record + columns.start[FIRST + k]) + within : column) = value[k];
        }
        if (BACK && FIRST == 0 && within == 0) changed(rows, row);
    }
}

template <bool BACK, u32 FIRST = 0>
__device__ void copy_all(const Rows &rows, const Columns &columns) {
    if constexpr (alike()) {
        copy<BACK, 0, FIELDS>(rows, columns);
    } else if constexpr (FIRST < FIELDS) {
        copy<BACK, FIRST, 1>(rows, columns);
        copy_all<BACK, FIRST + 1>(rows, columns);
    }
}

extern "C" __global__ void tierstore_gather(const Rows rows, const Columns columns) {
    copy_all<false>(rows, columns);
}

extern "C" __global__ void tierstore_scatter(const Rows rows, const Columns columns) {
    copy_all<true>(rows, columns);
}
