// Two kernels of CUDA for tables. rows.ptx is made of this by NVIDIA's nvrtc 12.2 for compute_75, without
// the constants that its headers define; CUDA's driver compiles it for the GPU at hand.

// 1 << shift threads for each id: copy its row, in units of 16, 4 or 1 bytes
extern "C" __global__ void take_rows(const char* table, const long long* ids, char* out,
                                     long long count, long long n_rows, long long row_bytes,
                                     int unit, int shift, volatile int* wrong) {
    long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    long long lanes = 1LL << shift, row = thread >> shift, lane = thread & (lanes - 1);
    if (row >= count) return;
    long long id = ids[row];
    if (id < 0 || id >= n_rows) {
        *wrong = 1;
        return;
    }
    const char* from = table + id * row_bytes;
    char* to = out + row * row_bytes;
    for (long long k = lane * unit; k < row_bytes; k += lanes * unit)
        if (unit == 16)
            *(uint4*)(to + k) = *(const uint4*)(from + k);
        else if (unit == 4)
            *(unsigned*)(to + k) = *(const unsigned*)(from + k);
        else
            to[k] = from[k];
}

// one thread for each id: is it a row; has it come before in this call, whose stamp no other has;
// and the first ids for the host
extern "C" __global__ void check_ids(const long long* ids, long long count, long long n_rows,
                                     int* stamps, int stamp, volatile int* wrong,
                                     volatile int* repeated, volatile long long* names,
                                     long long named) {
    long long place = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (place >= count) return;
    long long id = ids[place];
    if (place < named) names[place] = id;
    if (id < 0 || id >= n_rows)
        *wrong = 1;
    else if (atomicExch(stamps + id, stamp) == stamp)
        *repeated = 1;
}
