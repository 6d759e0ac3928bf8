// Copy bytes of rows to their places in wider rows.

struct Move {
    u8 *source;      // [rows][pitch], from the first byte that is copied
    u8 *to;          // [count][wide], likewise
    u64 count;
    u32 pitch, wide, bytes;
    u32 width;       // bytes that one access may move: 16, 8, 4, 2 or 1
};

struct Choice {
    i64 *ids;        // [count]: the row of each; null for all of them in order
    i64 bound;       // rows are 0 to bound - 1; others read as bytes 0xff
    u32 *fault;      // note the first other row here as `stray`, and its id, `start` and position;
    i64 *faulty;     // null if another read of these ids does so
    i64 start;
    u32 stray;
};

template <u32 WIDTH>
struct alignas(WIDTH) Unit {
    u8 bytes[WIDTH];
};

template <u32 WIDTH>
__device__ void spread(const Move &move, const Choice &choice) {
    const u32 units = move.bytes / WIDTH;
    for (u64 i = wide_thread(); i < move.count * units; i += wide_threads()) {
        const u64 position = i / units;
        const u32 within = (u32)(i - position * units);
        const i64 row = choice.ids ? choice.ids[position] : (i64)position;
        Unit<WIDTH> value;
        if (!choice.ids || (u64)row < (u64)choice.bound) {
            value = ((const Unit<WIDTH> *)(move.source + (u64)row * move.pitch))[within];
        } else {
            for (u32 k = 0; k < WIDTH; ++k) value.bytes[k] = 0xff;
            if (choice.fault && within == 0 && atomicCAS(choice.fault, 0u, choice.stray) == 0) {
                choice.faulty[0] = row;
                choice.faulty[1] = choice.start;
                choice.faulty[2] = (i64)position;
            }
        }
        ((Unit<WIDTH> *)(move.to + position * move.wide))[within] = value;
    }
}

extern "C" __global__ void tierstore_spread(const Move move, const Choice choice) {
    switch (move.width) {
        case 16: spread<16>(move, choice); break;
        case 8: spread<8>(move, choice); break;
        case 4: spread<4>(move, choice); break;
        case 2: spread<2>(move, choice); break;
        default: spread<1>(move, choice);
    }
}
