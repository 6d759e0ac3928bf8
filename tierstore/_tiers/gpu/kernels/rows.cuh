// The records of a lease, for kernels that know the fields of a record and are not the tier's own.

// The distinct rows of a batch, as their lease describes them.
struct Rows {
    const u64 *records;      // address of each record
    const u32 *count;        // how many there are
    const i32 *positions;    // [n]: index of each id's record, negative for none
    i64 n;
    // For `changed`.
    const i32 *held;         // slot of each record, or -1
    u8 *dirty;               // of each slot
    u32 *host_changed;       // a bit a row, for records without a slot, which are in the host tier; or null
    u64 host;                // address of row 0 there
    i64 record;              // bytes
    // For `unpin`: of each slot; null if the lease continues after the kernel.
    u32 *stamp, *pins;
};

// Note that record k was written. Called by one of the threads that write it.
__device__ void changed(const Rows &rows, u64 k) {
    const i32 slot = rows.held[k];
    if (slot >= 0) {
        rows.dirty[slot] = 1;
    } else if (rows.host_changed) {
        const u64 row = (rows.records[k] - rows.host) / rows.record;
        atomicOr(rows.host_changed + (row >> 5), 1u << (row & 31));
    }
}

// Unpin record k if the lease ends with the kernel. Called by one thread a record.
__device__ void unpin(const Rows &rows, u64 k) {
    const i32 slot = rows.pins ? rows.held[k] : -1;
    if (slot >= 0 && --rows.pins[slot] == 0) rows.stamp[slot] &= ~HELD;
}
