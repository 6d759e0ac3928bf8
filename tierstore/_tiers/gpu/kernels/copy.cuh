// Copies of records by whole warps.

// Copy `span` pieces of `units` Units each; lane j holds the addresses of piece j, 0 for none. The warp
// runs through all units of all pieces in a row, so every lane has work at any size.
template <class Unit>
__device__ void copy_units(u64 from, u64 to, u32 span, u32 units) {
    const u32 UNROLL = 4;
    const u32 pieces_on = 32 / units, units_on = 32 % units;
    const u32 steps = (span * units + 31) / 32;
    u32 piece = lane() / units, unit = lane() % units;
    for (u32 step = 0; step < steps; step += UNROLL) {
        Unit value[UNROLL];
        u64 target[UNROLL];
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k) {
            const u64 source = __shfl_sync(EVERY_LANE, from, piece & 31);
            target[k] = __shfl_sync(EVERY_LANE, to, piece & 31);
            if (piece >= span || source == 0) target[k] = 0;
            if (target[k]) {
                value[k] = *(const Unit *)(source + (u64)unit * sizeof(Unit));
                target[k] += (u64)unit * sizeof(Unit);
            }
            piece += pieces_on;
            unit += units_on;
            if (unit >= units) { unit -= units; ++piece; }
        }
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k)
            if (target[k]) *(Unit *)target[k] = value[k];
    }
}

__device__ void copy(u64 from, u64 to, u32 span, u64 bytes, u32 width) {
    if (__ballot_sync(EVERY_LANE, from != 0 && to != 0) == 0) return;
    const u32 units = (u32)(bytes / width);
    switch (width) {
        case 16: copy_units<uint4>(from, to, span, units); break;
        case 8: copy_units<uint2>(from, to, span, units); break;
        case 4: copy_units<u32>(from, to, span, units); break;
        case 2: copy_units<u16>(from, to, span, units); break;
        default: copy_units<u8>(from, to, span, units);
    }
}
