// The beginning of every source of kernels: names of types, and the number of a thread.
//
// Offsets are 64-bit throughout. No header is included: NVRTC needs no CUDA toolkit. The sources of a
// translation unit are concatenated; see abi.py.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

static const u32 HELD = 0x80000000u;  // of the stamp of a slot: while leases use it

__device__ u32 lane() { return threadIdx.x & 31; }

// The number of a thread, and how many there are, where all blocks of a grid run at a time: 32 bits, which
// takes `promote` fewer registers than 64.
__device__ u32 thread() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ u32 threads() { return gridDim.x * blockDim.x; }

// The same for grids as large as the work: columns.cu starts a thread for each unit it copies.
__device__ u64 wide_thread() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ u64 wide_threads() { return (u64)gridDim.x * blockDim.x; }
