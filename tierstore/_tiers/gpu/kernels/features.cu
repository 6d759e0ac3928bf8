// Consecutive ids of several features, as rows of the space that their tables share.

static const u32 ID_BITS = 44;

// The code of a bad id, which is no row of any space; memory.py reads it.
__device__ i64 encoded(i64 id, i64 number) {
    const i64 half = 1ll << (ID_BITS - 1);
    const i64 clamped = id < -half ? -half : id >= half ? half - 1 : id;
    return -(0x2d9all << 48) - (number << ID_BITS) - (clamped + half);
}

// The row of the id at a position, checked against the table of its feature.
__device__ i64 row_of(const Batch &b, i64 position, i64 id) {
    u32 feature = 0, last = b.features - 1;
    while (feature < last) {  // the first whose end is after the position
        const u32 middle = (feature + last) / 2;
        if (b.ends[middle] > position) last = middle;
        else feature = middle + 1;
    }
    const i64 *const starts = b.bounds, *const rows = starts + b.features;
    const bool good = (u64)id < (u64)rows[feature];
    return good ? starts[feature] + id : encoded(id, rows[b.features + feature]);
}

// Write the row of each id that arrives. A thread an id.
extern "C" __global__ void tierstore_in_space(const Tier t, const Batch b) {
    for (u64 i = wide_thread(); i < (u64)b.n; i += wide_threads())
        b.ids[i] = row_of(b, (i64)i, b.arriving[i]);
}
