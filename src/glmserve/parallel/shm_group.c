// SPDX-License-Identifier: Apache-2.0
// The collectives of SharedMemoryGroup: one call a collective, from copying in to copying out.
//
// In Python the dozen calls of one small sum take longer than everything else in it: measured with
// 8 ranks on 2 cores, 0.30-0.45 ms in numpy and 0.12 ms here. `segment.py` says how the memory is
// laid out and why two buffers and one barrier an exchange are enough; `futex.py` how a wait word
// counts (steps of 2) and aborts (bit 0).

#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, TIMED_OUT = 1, ABORTED = 2, FAILED = 3 };
enum { STEP = 2, ABORT = 1 };
enum { BLOCK = 512 };  // elements summed at a time, so that the running sums stay in L1

typedef struct {
    uint32_t *counters[2];
    char *buffers[2];  // each: size slots of slot_bytes, in rank order
    int64_t slot_bytes;
    int64_t one_shot_bytes;
    int64_t timeout_ns;  // of one wait; negative = no limit
    int32_t rank, size;
    int32_t spins;  // looks at the counter before sleeping
    uint32_t phase;  // barriers passed, modulo 4
} group_t;

typedef enum { BF16, F32, F64, I32, I64 } dtype_t;
static const int64_t WIDTH[] = {2, 4, 8, 4, 8};

static inline void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// The counters take turns; each counts up to size and the next time back to 0, so that none is ever
// reset. The last rank to arrive wakes the others.
int group_barrier(group_t *g) {
    uint32_t *word = g->counters[g->phase & 1];
    const int up = g->phase < 2;
    const uint32_t target = up ? (uint32_t)g->size * STEP : 0;
    g->phase = (g->phase + 1) & 3;
    uint32_t value = __atomic_add_fetch(word, up ? STEP : -STEP, __ATOMIC_ACQ_REL);
    if (value == target) {
        syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
        return OK;
    }
    for (int i = 0; i < g->spins && !(value & ABORT); i++) {
        pause_cpu();
        value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
        if (value == target) return OK;
    }
    struct timespec until, *limit = NULL;
    if (g->timeout_ns >= 0) {
        clock_gettime(CLOCK_MONOTONIC, &until);
        const int64_t ns = until.tv_nsec + g->timeout_ns % 1000000000;
        until.tv_sec += g->timeout_ns / 1000000000 + ns / 1000000000;
        until.tv_nsec = ns % 1000000000;
        limit = &until;
    }
    for (;;) {
        value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
        if (value == target) return OK;
        if (value & ABORT) return ABORTED;
        if (syscall(SYS_futex, word, FUTEX_WAIT_BITSET, value, limit, NULL,
                    FUTEX_BITSET_MATCH_ANY) != 0) {
            if (errno == ETIMEDOUT) return TIMED_OUT;
            if (errno != EAGAIN && errno != EINTR) return FAILED;
        }
    }
}

static inline float from_bf16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static inline uint16_t to_bf16(float value) {  // nearest, ties to even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return value != value ? 0x7FC0 : (uint16_t)rounded;
}

#define SAME(x) (x)
// Sums elements [low, high) of all slots in rank order into dst.
#define DEFINE_SUM(NAME, TYPE, WIDE, LOAD, STORE)                                           \
    static void NAME(const char *slots, int64_t slot_bytes, int size, int64_t low,          \
                     int64_t high, void *out) {                                             \
        WIDE total[BLOCK];                                                                  \
        TYPE *dst = out;                                                                    \
        for (int64_t start = low; start < high; start += BLOCK) {                           \
            const int count = high - start < BLOCK ? (int)(high - start) : BLOCK;           \
            for (int rank = 0; rank < size; rank++) {                                       \
                const TYPE *slot = (const TYPE *)(slots + rank * slot_bytes) + start;       \
                if (rank == 0)                                                              \
                    for (int i = 0; i < count; i++) total[i] = LOAD(slot[i]);               \
                else                                                                        \
                    for (int i = 0; i < count; i++) total[i] += LOAD(slot[i]);              \
            }                                                                               \
            for (int i = 0; i < count; i++) dst[start - low + i] = STORE(total[i]);         \
        }                                                                                   \
    }

DEFINE_SUM(sum_bf16, uint16_t, float, from_bf16, to_bf16)
DEFINE_SUM(sum_f32, float, float, SAME, SAME)
DEFINE_SUM(sum_f64, double, double, SAME, SAME)
DEFINE_SUM(sum_i32, uint32_t, uint32_t, SAME, SAME)  // unsigned: overflow wraps, as in torch
DEFINE_SUM(sum_i64, uint64_t, uint64_t, SAME, SAME)

typedef void sum_t(const char *, int64_t, int, int64_t, int64_t, void *);
static sum_t *const SUMS[] = {sum_bf16, sum_f32, sum_f64, sum_i32, sum_i64};

// Publishes `bytes` of this rank and returns, through `slots`, the buffer that holds everybody's.
static int exchange(group_t *g, const void *src, int64_t bytes, char **slots) {
    *slots = g->buffers[g->phase & 1];
    memcpy(*slots + g->rank * g->slot_bytes, src, bytes);
    return group_barrier(g);
}

// One chunk, two-shot: this rank sums its share of the elements, then takes over everybody's sums.
static int reduce_by_shares(group_t *g, dtype_t dtype, const char *src, char *dst, int64_t count) {
    const int64_t width = WIDTH[dtype];
    char *slots;
    int status = exchange(g, src, count * width, &slots);
    if (status != OK) return status;
    char *sums = g->buffers[g->phase & 1];
    SUMS[dtype](slots, g->slot_bytes, g->size, count * g->rank / g->size,
                count * (g->rank + 1) / g->size, sums + g->rank * g->slot_bytes);
    status = group_barrier(g);
    for (int rank = 0; status == OK && rank < g->size; rank++) {
        const int64_t low = count * rank / g->size, high = count * (rank + 1) / g->size;
        memcpy(dst + low * width, sums + rank * g->slot_bytes, (high - low) * width);
    }
    return status;
}

int group_all_reduce(group_t *g, int dtype, const char *src, char *dst, int64_t count) {
    const int64_t width = WIDTH[dtype], step = g->slot_bytes / width;
    for (int64_t start = 0; start < count; start += step) {
        const int64_t chunk = count - start < step ? count - start : step;
        const char *in = src + start * width;
        char *out = dst + start * width, *slots;
        int status;
        if (chunk * width <= g->one_shot_bytes) {
            status = exchange(g, in, chunk * width, &slots);
            if (status == OK) SUMS[dtype](slots, g->slot_bytes, g->size, 0, chunk, out);
        } else {
            status = reduce_by_shares(g, dtype, in, out, chunk);
        }
        if (status != OK) return status;
    }
    return OK;
}

// dst: size rows of `bytes`.
int group_all_gather(group_t *g, const char *src, char *dst, int64_t bytes) {
    for (int64_t start = 0; start < bytes; start += g->slot_bytes) {
        const int64_t chunk = bytes - start < g->slot_bytes ? bytes - start : g->slot_bytes;
        char *slots;
        const int status = exchange(g, src + start, chunk, &slots);
        if (status != OK) return status;
        for (int rank = 0; rank < g->size; rank++)
            memcpy(dst + rank * bytes + start, slots + rank * g->slot_bytes, chunk);
    }
    return OK;
}

// data: read on rank `from`, written on the others.
int group_broadcast(group_t *g, char *data, int64_t bytes, int from) {
    for (int64_t start = 0; start < bytes; start += g->slot_bytes) {
        const int64_t chunk = bytes - start < g->slot_bytes ? bytes - start : g->slot_bytes;
        char *slots;
        const int status = exchange(g, data + start, g->rank == from ? chunk : 0, &slots);
        if (status != OK) return status;
        if (g->rank != from) memcpy(data + start, slots + from * g->slot_bytes, chunk);
    }
    return OK;
}
