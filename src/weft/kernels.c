/* Loops that NumPy makes in several passes, or without an eye on memory.

   Who calls has checked addresses and lengths. Integers are unsigned: signed ones wrap around to
   the same bits. kernels.py is the Python side; everything works, more slowly, where this was not
   compiled. */

#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* the checksum of this file, by which kernels.py tells that the library was made from it */
const uint32_t kernels_source = SOURCE;

/* one library for all processors: the widest instructions are chosen when it is loaded, where the
   C library can do so */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

#define LINE 64


/* Copy past the cache: what is written is not read before, as it would be to change a part of a
   line. C libraries do so too, but some only with arrays of hundreds of megabytes. */

/* how far ahead memory is asked for */
#define COPY_AHEAD 4096

void copy(char *to, const char *from, int64_t count)
{
#ifdef __SSE2__
    int64_t head = (int64_t)(-(uintptr_t)to % LINE);
    if (head > count)
        head = count;
    memcpy(to, from, (size_t)head);
    for (to += head, from += head, count -= head; count >= LINE;
         to += LINE, from += LINE, count -= LINE) {
        _mm_prefetch(from + COPY_AHEAD, _MM_HINT_NTA);
        __m128i parts[4];
        for (int i = 0; i < 4; i++)
            parts[i] = _mm_loadu_si128((const __m128i *)from + i);
        for (int i = 0; i < 4; i++)
            _mm_stream_si128((__m128i *)to + i, parts[i]);
    }
    _mm_sfence(); /* before anything that says that it is done */
#endif
    memcpy(to, from, (size_t)count);
}


/* Add an array to another, in blocks, of each of which STREAMS parts are worked on side by side. A
   processor that reads on several pages at once has more requests to memory under way: an Intel
   Xeon is done with arrays that are in no cache in three quarters of the time. An AMD EPYC foresees
   enough of two arrays that are read from the beginning to the end, and needs a sixth longer. */

#define STREAMS 8
/* lines by which one part is ahead of the other: the nearest cache has room for few lines whose
   addresses end alike */
#define APART 9
#define BLOCK (256 << 10)

/* a line of memory, wherever it begins */
#define LINE_OF(type) type __attribute__((vector_size(LINE), aligned(sizeof(type)), may_alias))

#define ADD(name, type)                                                                         \
    WIDEST void add_##name(type *to, const type *delta, int64_t count)                          \
    {                                                                                           \
        typedef LINE_OF(type) line;                                                             \
        const int64_t lines = BLOCK / STREAMS / LINE, in_line = LINE / (int64_t)sizeof(type);   \
        const int64_t block = lines * in_line * STREAMS;                                        \
        for (; count >= block; count -= block, to += block, delta += block)                     \
            for (int64_t i = 0; i < lines; i++)                                                 \
                for (int64_t part = 0; part < STREAMS; part++) {                                \
                    int64_t at = (part * lines + (i + part * APART) % lines) * in_line;         \
                    *(line *)(to + at) += *(const line *)(delta + at);                          \
                }                                                                               \
        for (int64_t i = 0; i < count; i++)                                                     \
            to[i] += delta[i];                                                                  \
    }

ADD(float32, float)
ADD(float64, double)
ADD(int32, uint32_t)
ADD(int64, uint64_t)

/* Whether this processor is one on which that is quicker than one part after the other. */
int adding_side_by_side_pays(void)
{
#ifdef __x86_64__
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") != 0;
#else
    return 0;
#endif
}


/* Add several arrays up, in their order, and have each of them be the sums: a few numbers at a
   time, so that memory is read and written once. */

#define FEW 512

#define ADD_UP(name, type)                                                                      \
    WIDEST void add_up_##name(type *const *arrays, int64_t n_arrays, int64_t count)             \
    {                                                                                           \
        type sums[FEW];                                                                         \
        for (int64_t at = 0; at < count; at += FEW) {                                           \
            const int64_t few = count - at < FEW ? count - at : FEW;                            \
            memcpy(sums, arrays[0] + at, (size_t)few * sizeof(type));                           \
            for (int64_t k = 1; k < n_arrays; k++)                                              \
                for (int64_t i = 0; i < few; i++)                                               \
                    sums[i] += arrays[k][at + i];                                               \
            for (int64_t k = 0; k < n_arrays; k++)                                              \
                memcpy(arrays[k] + at, sums, (size_t)few * sizeof(type));                       \
        }                                                                                       \
    }

ADD_UP(float32, float)
ADD_UP(float64, double)
ADD_UP(int32, uint32_t)
ADD_UP(int64, uint64_t)


/* Add one row of `delta` after the other to the rows of a table that are named; returns how many
   were added. It ends early at an id that is not in the table: they were checked, but the array is
   the user's, and another thread may have changed it since. */

/* how many rows ahead memory is asked for, and how many bytes of each at most */
#define AHEAD 8
#define MOST_AHEAD 1024

/* An id, looked at once: what is checked is what is used. */
static inline int64_t id_at(const int64_t *ids, int64_t i)
{
    return __atomic_load_n(ids + i, __ATOMIC_RELAXED);
}

/* Ask for a row. Nothing is read, so the id may be any number. */
static inline void fetch(const void *table, int64_t id, int64_t bytes)
{
    uintptr_t row = (uintptr_t)table + (uintptr_t)id * (uintptr_t)bytes;
    for (int64_t at = 0; at < bytes && at < MOST_AHEAD; at += LINE)
        __builtin_prefetch((const void *)(row + at), 1);
}

#define ADD_ROWS(name, type)                                                                    \
    WIDEST int64_t add_rows_##name(type *table, int64_t n_rows, const int64_t *ids,             \
                                   int64_t count, const type *delta, int64_t columns)           \
    {                                                                                           \
        for (int64_t i = 0; i < count; i++) {                                                   \
            if (i + AHEAD < count)                                                              \
                fetch(table, id_at(ids, i + AHEAD), columns * (int64_t)sizeof(type));           \
            int64_t id = id_at(ids, i);                                                         \
            if ((uint64_t)id >= (uint64_t)n_rows)                                               \
                return i;                                                                       \
            type *restrict row = table + id * columns;                                          \
            const type *restrict given = delta + i * columns;                                   \
            for (int64_t j = 0; j < columns; j++)                                               \
                row[j] += given[j];                                                             \
        }                                                                                       \
        return count;                                                                           \
    }

ADD_ROWS(float32, float)
ADD_ROWS(float64, double)
ADD_ROWS(int32, uint32_t)
ADD_ROWS(int64, uint64_t)


/* The rules of updaters: all terms for one number before the next, so that memory is read and
   written once. `arrays` are rows, state and delta; `factors` are what _core/rules.py makes of an
   updater's options, in its order. Roundings are the same as there: each operation rounds to its
   type, as the compiler is told not to join a product and a sum. */

/* The numbers of all arrays, one after the other: `d` is the delta's, `first` and `second` are the
   arrays of state, where there are so many. */

#define FOR_EACH(type, n_state, body)                                                           \
    do {                                                                                        \
        type *rows = arrays[0], *first = arrays[n_state > 0], *second = arrays[n_state];        \
        const type *delta = arrays[n_state + 1];                                                \
        (void)first, (void)second;                                                              \
        for (int64_t i = 0; i < count; i++) {                                                   \
            type d = delta[i];                                                                  \
            body                                                                                \
        }                                                                                       \
    } while (0)

#define RULE(rule, name)                                                                        \
    WIDEST void rule##_##name(void *const *arrays, int64_t count, const double *factors)

#define RULES(name, type, root)                                                                 \
    RULE(sgd, name)                                                                             \
    {                                                                                           \
        const type lr = (type)factors[0];                                                       \
        FOR_EACH(type, 0, { rows[i] -= d * lr; });                                              \
    }                                                                                           \
    RULE(momentum, name)                                                                        \
    {                                                                                           \
        const type lr = (type)factors[0], momentum = (type)factors[1];                          \
        if (factors[2] != 0) /* nesterov */                                                     \
            FOR_EACH(type, 1, {                                                                 \
                type velocity = first[i] = first[i] * momentum + d;                             \
                rows[i] -= (velocity * momentum + d) * lr;                                      \
            });                                                                                 \
        else                                                                                    \
            FOR_EACH(type, 1, {                                                                 \
                type velocity = first[i] = first[i] * momentum + d;                             \
                rows[i] -= velocity * lr;                                                       \
            });                                                                                 \
    }                                                                                           \
    RULE(adagrad, name)                                                                         \
    {                                                                                           \
        const type lr = (type)factors[0], eps = (type)factors[1];                               \
        FOR_EACH(type, 1, {                                                                     \
            type square = first[i] = first[i] + d * d;                                          \
            rows[i] -= d / (root(square) + eps) * lr;                                           \
        });                                                                                     \
    }                                                                                           \
    RULE(rmsprop, name)                                                                         \
    {                                                                                           \
        const type lr = (type)factors[0], eps = (type)factors[1];                               \
        const type kept = (type)factors[2], new = (type)factors[3];                             \
        FOR_EACH(type, 1, {                                                                     \
            type square = first[i] = first[i] * kept + d * d * new;                             \
            rows[i] -= d / (root(square) + eps) * lr;                                           \
        });                                                                                     \
    }                                                                                           \
    RULE(adam, name)                                                                            \
    {                                                                                           \
        const type lr = (type)factors[0], eps = (type)factors[1];                               \
        const type kept = (type)factors[2], new = (type)factors[3];                             \
        const type kept_square = (type)factors[4], new_square = (type)factors[5];               \
        FOR_EACH(type, 2, {                                                                     \
            type mean = first[i] = first[i] * kept + d * new;                                   \
            type square = second[i] = second[i] * kept_square + d * d * new_square;             \
            rows[i] -= mean / (root(square) + eps) * lr;                                        \
        });                                                                                     \
    }

RULES(float32, float, __builtin_sqrtf)
RULES(float64, double, __builtin_sqrt)
