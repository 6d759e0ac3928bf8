// The row of the space for each id of some features, checked against the feature's own table.

// The ids of all features, one behind the other.
struct Ids {
    const i64 *ids;          // [n]
    i64 *rows;               // [n]
    const i64 *end;          // of each feature: the position behind its last id
    i64 n;
    u32 features;
};

struct Bounds {
    const i64 *start;        // of each feature: the first row of its table in the space
    const i64 *rows;         // how many rows the table has
    const i64 *number;       // by which a bad id tells the feature
};

static const u32 ID_BITS = 44;

// What stands for a bad id, and is no row of any space; memory.py reads it.
__device__ i64 encoded(i64 id, i64 number) {
    const i64 half = 1ll << (ID_BITS - 1);
    const i64 clamped = id < -half ? -half : id >= half ? half - 1 : id;
    return -(0x2d9all << 48) - (number << ID_BITS) - (clamped + half);
}

// A thread an id.
extern "C" __global__ void tierstore_in_space(const Ids ids, const Bounds bounds) {
    for (u64 i = wide_thread(); i < (u64)ids.n; i += wide_threads()) {
        u32 feature = 0, last = ids.features - 1;
        while (feature < last) {  // the first whose end is behind
            const u32 middle = (feature + last) / 2;
            if ((u64)ids.end[middle] > i) last = middle;
            else feature = middle + 1;
        }
        const i64 id = ids.ids[i];
        const bool good = (u64)id < (u64)bounds.rows[feature];
        ids.rows[i] = good ? bounds.start[feature] + id : encoded(id, bounds.number[feature]);
    }
}
