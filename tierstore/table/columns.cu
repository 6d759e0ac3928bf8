// Some fields of the records of a batch, copied to arrays of their own in one pass, or back.
//
// Macros:
//   UNITS    how many units each field takes, in a list: 32,32,32
//   WIDTH    bytes of a unit, which a thread moves in one access: 16, 8, 4, 2 or 1

static constexpr u32 EACH[] = {UNITS}, FIELDS = sizeof EACH / sizeof *EACH;
static constexpr u32 TOGETHER = 2;  // units that a thread reads before it writes the first

struct Columns {
    u8 *array[FIELDS];       // of each record, [count][units]
    u32 start[FIELDS];       // first byte of the field within a record
};

struct alignas(WIDTH) Unit {
    u8 bytes[WIDTH];
};

struct Move {
    Unit *record, *column;
    u64 row;
    bool first;              // of its row
};

// Where a unit lies, of those of all fields of all rows one after another.
__device__ Move find(const Rows &rows, const Columns &columns, u64 unit) {
    u32 of_row = 0;
    for (u32 field = 0; field < FIELDS; ++field) of_row += EACH[field];
    const u64 row = unit >> 32 ? unit / of_row : (u32)unit / of_row;
    u32 within = (u32)(unit - row * of_row);
    const u64 record = rows.records[row];
    Move move{nullptr, nullptr, row, within == 0};
    u32 before = 0;
    for (u32 field = 0; field < FIELDS; ++field) {
        if (within >= before && within < before + EACH[field]) {
            move.record = (Unit *)(record + columns.start[field]) + (within - before);
            move.column = (Unit *)columns.array[field] + row * EACH[field] + (within - before);
        }
        before += EACH[field];
    }
    return move;
}

__device__ u64 all_units(const Rows &rows) {
    u64 units = 0;
    for (u32 field = 0; field < FIELDS; ++field) units += EACH[field];
    return units * *rows.count;
}

// Blocks take neighbouring units (columns.py counts them), so that a record is read and written in one go.
template <bool BACK>
__device__ void copy(const Rows &rows, const Columns &columns) {
    const u64 all = all_units(rows), part = (u64)blockDim.x * TOGETHER;
    for (u64 first = blockIdx.x * part; first < all; first += gridDim.x * part) {
        Unit value[TOGETHER];
        Unit *to[TOGETHER];
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k) {
            const u64 unit = first + (u64)k * blockDim.x + threadIdx.x;
            to[k] = nullptr;
            if (unit < all) {
                const Move move = find(rows, columns, unit);
                value[k] = *(BACK ? move.column : move.record);
                to[k] = BACK ? move.record : move.column;
                if (BACK && move.first) changed(rows, move.row);
            }
        }
#pragma unroll
        for (u32 k = 0; k < TOGETHER; ++k)
            if (to[k]) *to[k] = value[k];
    }
}

extern "C" __global__ void tierstore_gather(const Rows rows, const Columns columns) {
    copy<false>(rows, columns);
}

extern "C" __global__ void tierstore_scatter(const Rows rows, const Columns columns) {
    copy<true>(rows, columns);
}
