// The historical PagedAttention kernel as its document describes it, with the document's names.
//
// Attention of one query token per sequence over a cache of blocks, after Kwon et al., "Efficient Memory Management
// for Large Language Model Serving with PagedAttention", SOSP 2023. Thread by thread it does what thread_block.py
// does in NumPy; the numbers below are those of shape.py. One library holds one head size, block size and type.
//
//   q        [num_seqs, num_heads, HEAD_SIZE]; sequences q_stride apart
//   k_cache  [num_blocks, num_kv_heads, HEAD_SIZE / x, BLOCK_SIZE, x], x elements in 16 bytes
//   v_cache  [num_blocks, num_kv_heads, HEAD_SIZE, BLOCK_SIZE]
//   out      [num_seqs, num_heads, max_num_partitions, HEAD_SIZE]
//
// Bytes: K and V of the context once for every query head; query heads of one KV head meet in the cache at best.
// Offsets into the caches are 64 bits wide: a pool passes 2^31 elements.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>

#if !defined(HEAD_SIZE_) || !defined(BLOCK_SIZE_) || !defined(SCALAR_)
#error "build.py defines HEAD_SIZE_, BLOCK_SIZE_ and SCALAR_"
#endif

namespace {

using scalar_t = SCALAR_;
constexpr int WARP_SIZE = 32;
constexpr int FETCH_BYTES = 16;
constexpr int HEAD_SIZE = HEAD_SIZE_;
constexpr int BLOCK_SIZE = BLOCK_SIZE_;
constexpr int NUM_THREADS = 128;
constexpr int NUM_WARPS = NUM_THREADS / WARP_SIZE;
constexpr int PARTITION_TOKENS = 512;  // of v2; v1 has PARTITION_SIZE 0: no partitions

// Query and key: a thread group shares a token and reads 16 bytes of it at a time.
constexpr int THREAD_GROUP_SIZE = WARP_SIZE / BLOCK_SIZE > 1 ? WARP_SIZE / BLOCK_SIZE : 1;
constexpr int NUM_THREAD_GROUPS = NUM_THREADS / THREAD_GROUP_SIZE;
constexpr int X = FETCH_BYTES / int(sizeof(scalar_t));
constexpr int VEC_SIZE = X / THREAD_GROUP_SIZE;
constexpr int NUM_VECS_PER_THREAD = HEAD_SIZE / X;

// Value: a thread reads 16 bytes of one row, which is one head position of neighbouring tokens.
constexpr int V_VEC_SIZE = X < BLOCK_SIZE ? X : BLOCK_SIZE;
constexpr int NUM_V_VECS_PER_ROW = BLOCK_SIZE / V_VEC_SIZE;
constexpr int NUM_ROWS_PER_ITER = WARP_SIZE / NUM_V_VECS_PER_ROW;
constexpr int NUM_ROWS_PER_THREAD = (HEAD_SIZE + NUM_ROWS_PER_ITER - 1) / NUM_ROWS_PER_ITER;

static_assert(BLOCK_SIZE == 8 || BLOCK_SIZE == 16 || BLOCK_SIZE == 32, "block sizes of the document");
static_assert(HEAD_SIZE % X == 0, "a head is whole fetches");
static_assert(VEC_SIZE >= 1 && VEC_SIZE * THREAD_GROUP_SIZE == X, "a thread group reads x elements");
static_assert(PARTITION_TOKENS % BLOCK_SIZE == 0, "a partition is whole blocks");

constexpr float SUM_GUARD = 1e-6f;  // added to every sum before it divides
constexpr unsigned ALL_LANES = 0xffffffffu;

template <int SIZE>
struct alignas(sizeof(scalar_t) * SIZE) Vec {
    scalar_t at[SIZE];
};

template <int SIZE>
__device__ inline float dot(const Vec<SIZE>& a, const Vec<SIZE>& b, float sum) {
#pragma unroll
    for (int i = 0; i < SIZE; i++) sum = fmaf(float(a.at[i]), float(b.at[i]), sum);
    return sum;
}

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Sum over the thread block, in every thread. `red_smem` holds one number per warp.
__device__ float block_sum(float* red_smem, float sum) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int mask = WARP_SIZE / 2; mask >= 1; mask /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
    if (lane == 0) red_smem[warp] = sum;
    __syncthreads();
    sum = lane < NUM_WARPS ? red_smem[lane] : 0.0f;
#pragma unroll
    for (int mask = NUM_WARPS / 2; mask >= 1; mask /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
    return __shfl_sync(ALL_LANES, sum, 0);
}

// Maximum over the thread block, in every thread. Lanes below LAST of a group hold one value already.
template <int LAST>
__device__ float block_max(float* red_smem, float value) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int mask = WARP_SIZE / 2; mask >= LAST; mask /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, mask));
    if (lane == 0) red_smem[warp] = value;
    __syncthreads();
    value = lane < NUM_WARPS ? red_smem[lane] : -FLT_MAX;
#pragma unroll
    for (int mask = NUM_WARPS / 2; mask >= 1; mask /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, mask));
    return __shfl_sync(ALL_LANES, value, 0);
}

// Grid (num_heads, num_seqs, max_num_partitions): a thread block is one head, one sequence, one partition.
template <int PARTITION_SIZE>
__global__ void __launch_bounds__(NUM_THREADS) paged_attention_kernel(
    scalar_t* __restrict__ out,
    float* __restrict__ max_logits,  // [num_seqs, num_heads, max_num_partitions], as exp_sums: of v2
    float* __restrict__ exp_sums,
    const scalar_t* __restrict__ q,
    const scalar_t* __restrict__ k_cache,
    const scalar_t* __restrict__ v_cache,
    const int* __restrict__ physical_blocks,  // [num_seqs, table_stride]: block number of each logical block
    const int* __restrict__ context_lens,     // [num_seqs]
    float scale,
    int num_kv_heads,
    int table_stride,
    int64_t q_stride) {
    const int head_idx = blockIdx.x, seq_idx = blockIdx.y, partition_idx = blockIdx.z;
    const int num_heads = gridDim.x, max_num_partitions = gridDim.z;
    const int thread_idx = threadIdx.x, warp_idx = thread_idx / WARP_SIZE, lane = thread_idx % WARP_SIZE;

    const int context_len = context_lens[seq_idx];
    const int start_token = partition_idx * PARTITION_SIZE;
    if (PARTITION_SIZE > 0 && start_token >= context_len) return;  // a partition past the context
    const int end_token = PARTITION_SIZE > 0 ? min(start_token + PARTITION_SIZE, context_len) : context_len;
    const int num_tokens = end_token - start_token;
    const int start_block = start_token / BLOCK_SIZE;
    const int end_block = ceil_div(end_token, BLOCK_SIZE);

    const int kv_head_idx = head_idx / (num_heads / num_kv_heads);
    const int64_t kv_head_stride = int64_t(HEAD_SIZE) * BLOCK_SIZE;
    const int64_t kv_block_stride = num_kv_heads * kv_head_stride;
    const int* block_table = physical_blocks + int64_t(seq_idx) * table_stride;

    extern __shared__ char shared_memory[];
    float* logits = reinterpret_cast<float*>(shared_memory);  // [num_tokens in whole blocks]
    __shared__ Vec<VEC_SIZE> q_vecs[THREAD_GROUP_SIZE][NUM_VECS_PER_THREAD];
    __shared__ float red_smem[2 * NUM_WARPS];

    // Query: q_vecs[i] holds what member i of a thread group multiplies; neighbours read neighbouring memory.
    const int thread_group_idx = thread_idx / THREAD_GROUP_SIZE;
    const int thread_group_offset = thread_idx % THREAD_GROUP_SIZE;
    const scalar_t* q_ptr = q + seq_idx * q_stride + head_idx * HEAD_SIZE;
    for (int i = thread_group_idx; i < NUM_VECS_PER_THREAD; i += NUM_THREAD_GROUPS) {
        const int vec_idx = thread_group_offset + i * THREAD_GROUP_SIZE;
        q_vecs[thread_group_offset][i] = reinterpret_cast<const Vec<VEC_SIZE>*>(q_ptr)[vec_idx];
    }
    __syncthreads();

    // Query times keys: a warp takes a whole block at a time, round robin; a thread group takes one token of it.
    float qk_max = -FLT_MAX;
    const int key_offset = thread_group_idx % BLOCK_SIZE;
    for (int block_idx = start_block + warp_idx; block_idx < end_block; block_idx += NUM_WARPS) {
        const scalar_t* k_ptr =
            k_cache + int64_t(block_table[block_idx]) * kv_block_stride + kv_head_idx * kv_head_stride + key_offset * X;
        Vec<VEC_SIZE> k_vecs[NUM_VECS_PER_THREAD];
#pragma unroll
        for (int i = 0; i < NUM_VECS_PER_THREAD; i++) {
            // Vec i of every member of the group lies in the i-th x elements of the head.
            const scalar_t* fetch = k_ptr + i * BLOCK_SIZE * X + thread_group_offset * VEC_SIZE;
            k_vecs[i] = *reinterpret_cast<const Vec<VEC_SIZE>*>(fetch);
        }
        float qk = 0.0f;
#pragma unroll
        for (int i = 0; i < NUM_VECS_PER_THREAD; i++) qk = dot(q_vecs[thread_group_offset][i], k_vecs[i], qk);
#pragma unroll
        for (int mask = THREAD_GROUP_SIZE / 2; mask >= 1; mask /= 2) qk += __shfl_xor_sync(ALL_LANES, qk, mask);
        qk *= scale;
        if (thread_group_offset == 0) {
            const int token_idx = block_idx * BLOCK_SIZE + key_offset;
            const bool mask = token_idx >= context_len;  // K may be anything there: it must not reach qk_max
            logits[token_idx - start_token] = mask ? 0.0f : qk;
            qk_max = mask ? qk_max : fmaxf(qk_max, qk);
        }
    }

    // Softmax in two passes over the logits.
    qk_max = block_max<THREAD_GROUP_SIZE>(red_smem, qk_max);
    float exp_sum = 0.0f;
    for (int i = thread_idx; i < num_tokens; i += NUM_THREADS) {
        const float value = __expf(logits[i] - qk_max);
        logits[i] = value;
        exp_sum += value;
    }
    exp_sum = block_sum(red_smem + NUM_WARPS, exp_sum);
    const float inv_sum = __fdividef(1.0f, exp_sum + SUM_GUARD);
    for (int i = thread_idx; i < num_tokens; i += NUM_THREADS) logits[i] *= inv_sum;
    __syncthreads();
    const int64_t place = (int64_t(seq_idx) * num_heads + head_idx) * max_num_partitions + partition_idx;
    if (PARTITION_SIZE > 0 && thread_idx == 0) {
        max_logits[place] = qk_max;
        exp_sums[place] = exp_sum;
    }

    // Logits times values: a lane owns V_VEC_SIZE tokens (columns) and every NUM_ROWS_PER_ITER-th row.
    float accs[NUM_ROWS_PER_THREAD] = {};
    const int value_offset = lane % NUM_V_VECS_PER_ROW * V_VEC_SIZE;
    const int first_row = lane / NUM_V_VECS_PER_ROW;
    for (int block_idx = start_block + warp_idx; block_idx < end_block; block_idx += NUM_WARPS) {
        const int token_idx = block_idx * BLOCK_SIZE + value_offset;
        Vec<V_VEC_SIZE> logits_vec;
#pragma unroll
        for (int j = 0; j < V_VEC_SIZE; j++) logits_vec.at[j] = scalar_t(logits[token_idx - start_token + j]);
        const scalar_t* v_ptr =
            v_cache + int64_t(block_table[block_idx]) * kv_block_stride + kv_head_idx * kv_head_stride + value_offset;
        const bool is_last = token_idx + V_VEC_SIZE > context_len;
#pragma unroll
        for (int i = 0; i < NUM_ROWS_PER_THREAD; i++) {
            const int row_idx = first_row + i * NUM_ROWS_PER_ITER;
            if (row_idx < HEAD_SIZE) {
                Vec<V_VEC_SIZE> v_vec = *reinterpret_cast<const Vec<V_VEC_SIZE>*>(v_ptr + row_idx * BLOCK_SIZE);
                if (is_last) {
                    // Slots past the context were perhaps never written, and 0 * NaN is NaN.
#pragma unroll
                    for (int j = 0; j < V_VEC_SIZE; j++) {
                        if (token_idx + j >= context_len) v_vec.at[j] = scalar_t(0.0f);
                    }
                }
                accs[i] = dot(logits_vec, v_vec, accs[i]);
            }
        }
    }

    // LV: sum over the lanes of a row, then over warps, upper half to lower half, until warp 0 has it all.
#pragma unroll
    for (int i = 0; i < NUM_ROWS_PER_THREAD; i++) {
#pragma unroll
        for (int mask = NUM_V_VECS_PER_ROW / 2; mask >= 1; mask /= 2) accs[i] += __shfl_xor_sync(ALL_LANES, accs[i], mask);
    }
    __syncthreads();  // outputs take the place of logits that a slower warp may still read
    float* out_smem = reinterpret_cast<float*>(shared_memory);  // [NUM_WARPS / 2, HEAD_SIZE]
    const bool has_row = lane % NUM_V_VECS_PER_ROW == 0;
#pragma unroll
    for (int warps = NUM_WARPS; warps > 1; warps /= 2) {
        const int half = warps / 2;
        if (warp_idx >= half && warp_idx < warps && has_row) {
#pragma unroll
            for (int i = 0; i < NUM_ROWS_PER_THREAD; i++) {
                const int row_idx = first_row + i * NUM_ROWS_PER_ITER;
                if (row_idx < HEAD_SIZE) out_smem[(warp_idx - half) * HEAD_SIZE + row_idx] = accs[i];
            }
        }
        __syncthreads();
        if (warp_idx < half && has_row) {
#pragma unroll
            for (int i = 0; i < NUM_ROWS_PER_THREAD; i++) {
                const int row_idx = first_row + i * NUM_ROWS_PER_ITER;
                if (row_idx < HEAD_SIZE) accs[i] += out_smem[warp_idx * HEAD_SIZE + row_idx];
            }
        }
        __syncthreads();
    }
    if (warp_idx == 0 && has_row) {
        scalar_t* out_ptr = out + place * HEAD_SIZE;
#pragma unroll
        for (int i = 0; i < NUM_ROWS_PER_THREAD; i++) {
            const int row_idx = first_row + i * NUM_ROWS_PER_ITER;
            if (row_idx < HEAD_SIZE) out_ptr[row_idx] = scalar_t(accs[i]);
        }
    }
}

// Grid (num_heads, num_seqs): merges the partitions of v2, each weighed by exp(its maximum - the maximum).
__global__ void __launch_bounds__(NUM_THREADS) paged_attention_v2_reduce_kernel(
    scalar_t* __restrict__ out,  // [num_seqs, num_heads, HEAD_SIZE]
    const float* __restrict__ max_logits,
    const float* __restrict__ exp_sums,
    const scalar_t* __restrict__ part_out,  // [num_seqs, num_heads, max_num_partitions, HEAD_SIZE]
    const int* __restrict__ context_lens,
    int max_num_partitions) {
    const int head_idx = blockIdx.x, seq_idx = blockIdx.y, num_heads = gridDim.x;
    const int num_partitions = ceil_div(context_lens[seq_idx], PARTITION_TOKENS);
    const int64_t row = int64_t(seq_idx) * num_heads + head_idx;
    scalar_t* out_ptr = out + row * HEAD_SIZE;
    const scalar_t* part_ptr = part_out + row * max_num_partitions * HEAD_SIZE;
    if (num_partitions == 1) {
        for (int i = threadIdx.x; i < HEAD_SIZE; i += NUM_THREADS) out_ptr[i] = part_ptr[i];
        return;
    }

    extern __shared__ char shared_memory[];
    float* sums = reinterpret_cast<float*>(shared_memory);  // [num_partitions]
    __shared__ float red_smem[2 * NUM_WARPS];
    const float* max_ptr = max_logits + row * max_num_partitions;
    const float* sum_ptr = exp_sums + row * max_num_partitions;
    float max_logit = -FLT_MAX;
    for (int i = threadIdx.x; i < num_partitions; i += NUM_THREADS) max_logit = fmaxf(max_logit, max_ptr[i]);
    max_logit = block_max<1>(red_smem, max_logit);
    float total = 0.0f;
    for (int i = threadIdx.x; i < num_partitions; i += NUM_THREADS) {
        const float sum = sum_ptr[i] * __expf(max_ptr[i] - max_logit);
        sums[i] = sum;
        total += sum;
    }
    total = block_sum(red_smem + NUM_WARPS, total);  // its barrier also makes sums visible
    const float inv_sum = __fdividef(1.0f, total + SUM_GUARD);
    for (int i = threadIdx.x; i < HEAD_SIZE; i += NUM_THREADS) {
        float acc = 0.0f;
        for (int j = 0; j < num_partitions; j++) {
            acc = fmaf(float(part_ptr[int64_t(j) * HEAD_SIZE + i]), sums[j] * inv_sum, acc);
        }
        out_ptr[i] = scalar_t(acc);
    }
}

// One thread block per token: its K and V from rows into the caches. Slots below 0 are left out.
__global__ void __launch_bounds__(NUM_THREADS) store_kernel(
    const scalar_t* __restrict__ k,  // [num_tokens, num_kv_heads, HEAD_SIZE], tokens k_stride apart
    const scalar_t* __restrict__ v,
    scalar_t* __restrict__ k_cache,
    scalar_t* __restrict__ v_cache,
    const int* __restrict__ slots,  // [num_tokens]
    int num_kv_heads,
    int64_t k_stride,
    int64_t v_stride) {
    const int64_t token = blockIdx.x;
    const int slot = slots[token];
    if (slot < 0) return;
    const int64_t block = slot / BLOCK_SIZE;
    const int offset = slot % BLOCK_SIZE;
    for (int i = threadIdx.x; i < num_kv_heads * HEAD_SIZE; i += NUM_THREADS) {
        const int head = i / HEAD_SIZE, element = i % HEAD_SIZE;
        const int64_t first = (block * num_kv_heads + head) * (HEAD_SIZE * BLOCK_SIZE);
        k_cache[first + element / X * (BLOCK_SIZE * X) + offset * X + element % X] = k[token * k_stride + i];
        v_cache[first + element * BLOCK_SIZE + offset] = v[token * v_stride + i];
    }
}

int shared_bytes(int num_tokens) {
    const int logits = ceil_div(num_tokens, BLOCK_SIZE) * BLOCK_SIZE, outputs = NUM_WARPS / 2 * HEAD_SIZE;
    return int(sizeof(float)) * (logits > outputs ? logits : outputs);
}

// What a launch needs beyond its kernel: the tensors' device, and permission for much shared memory.
template <typename Kernel>
cudaError_t prepare(Kernel kernel, int device, int bytes) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace

extern "C" {

const char* paged_cuda_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

// The constants of this library, in the order of build.py, so that a test can hold them against shape.py.
void paged_cuda_constants(int* to) {
    const int constants[] = {
        HEAD_SIZE, BLOCK_SIZE, int(sizeof(scalar_t)), NUM_THREADS, PARTITION_TOKENS, THREAD_GROUP_SIZE, X, VEC_SIZE,
        NUM_VECS_PER_THREAD, V_VEC_SIZE, NUM_V_VECS_PER_ROW, NUM_ROWS_PER_ITER, NUM_ROWS_PER_THREAD,
    };
    for (int i = 0; i < int(sizeof(constants) / sizeof(int)); i++) to[i] = constants[i];
}

int paged_cuda_store(
    const void* k, const void* v, void* k_cache, void* v_cache, const int* slots, int num_tokens, int num_kv_heads,
    int64_t k_stride, int64_t v_stride, int device, void* stream) {
    if (num_tokens == 0) return cudaSuccess;
    const cudaError_t error = prepare(store_kernel, device, 0);
    if (error != cudaSuccess) return error;
    store_kernel<<<num_tokens, NUM_THREADS, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const scalar_t*>(k), static_cast<const scalar_t*>(v), static_cast<scalar_t*>(k_cache),
        static_cast<scalar_t*>(v_cache), slots, num_kv_heads, k_stride, v_stride);
    return cudaGetLastError();
}

int paged_cuda_v1(
    void* out, const void* q, const void* k_cache, const void* v_cache, const int* physical_blocks,
    const int* context_lens, int num_seqs, int num_heads, int num_kv_heads, int max_context_len, int table_stride,
    int64_t q_stride, float scale, int device, void* stream) {
    if (num_seqs == 0) return cudaSuccess;
    const int bytes = shared_bytes(max_context_len);
    const auto kernel = paged_attention_kernel<0>;
    const cudaError_t error = prepare(kernel, device, bytes);
    if (error != cudaSuccess) return error;
    kernel<<<dim3(num_heads, num_seqs, 1), NUM_THREADS, bytes, static_cast<cudaStream_t>(stream)>>>(
        static_cast<scalar_t*>(out), nullptr, nullptr, static_cast<const scalar_t*>(q),
        static_cast<const scalar_t*>(k_cache), static_cast<const scalar_t*>(v_cache), physical_blocks, context_lens,
        scale, num_kv_heads, table_stride, q_stride);
    return cudaGetLastError();
}

int paged_cuda_v2(
    void* out, void* part_out, float* max_logits, float* exp_sums, const void* q, const void* k_cache,
    const void* v_cache, const int* physical_blocks, const int* context_lens, int num_seqs, int num_heads,
    int num_kv_heads, int max_num_partitions, int table_stride, int64_t q_stride, float scale, int device,
    void* stream) {
    if (num_seqs == 0) return cudaSuccess;
    const auto kernel = paged_attention_kernel<PARTITION_TOKENS>;
    int bytes = shared_bytes(PARTITION_TOKENS);
    cudaError_t error = prepare(kernel, device, bytes);
    if (error != cudaSuccess) return error;
    const auto on = static_cast<cudaStream_t>(stream);
    kernel<<<dim3(num_heads, num_seqs, max_num_partitions), NUM_THREADS, bytes, on>>>(
        static_cast<scalar_t*>(part_out), max_logits, exp_sums, static_cast<const scalar_t*>(q),
        static_cast<const scalar_t*>(k_cache), static_cast<const scalar_t*>(v_cache), physical_blocks, context_lens,
        scale, num_kv_heads, table_stride, q_stride);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    bytes = int(sizeof(float)) * max_num_partitions;
    error = prepare(paged_attention_v2_reduce_kernel, device, bytes);
    if (error != cudaSuccess) return error;
    paged_attention_v2_reduce_kernel<<<dim3(num_heads, num_seqs), NUM_THREADS, bytes, on>>>(
        static_cast<scalar_t*>(out), max_logits, exp_sums, static_cast<const scalar_t*>(part_out), context_lens,
        max_num_partitions);
    return cudaGetLastError();
}

}  // extern "C"
