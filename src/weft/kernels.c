/* Loops that NumPy makes in several passes, or without an eye on memory.

   Nothing is allocated here and nothing fails: who calls has checked addresses, row ids and
   lengths. Integers are unsigned: signed ones wrap around to the same bits. kernels.py is the
   Python side; everything works, more slowly, where this was not compiled. */

#include <stdint.h>

/* one library for all processors: the widest instructions are chosen when it is loaded */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

#define LINE 64


/* Add an array to another, in blocks, of each of which STREAMS parts are worked on side by side. A
   processor that reads on several pages at once has more requests to memory under way, and is done
   with arrays that are in no cache in three quarters of the time. */

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


/* Add one row of `delta` after the other to the rows of a table that are named. */

/* how many rows ahead memory is asked for, and how many bytes of each at most */
#define AHEAD 8
#define MOST_AHEAD 1024

static inline void fetch(const char *row, int64_t bytes)
{
    const char *end = row + (bytes < MOST_AHEAD ? bytes : MOST_AHEAD);
    for (; row < end; row += LINE)
        __builtin_prefetch(row, 1);
}

#define ADD_ROWS(name, type)                                                                    \
    WIDEST void add_rows_##name(type *table, const int64_t *ids, int64_t count,                 \
                                const type *delta, int64_t columns)                             \
    {                                                                                           \
        for (int64_t i = 0; i < count; i++) {                                                   \
            if (i + AHEAD < count)                                                              \
                fetch((const char *)(table + ids[i + AHEAD] * columns),                         \
                      columns * (int64_t)sizeof(type));                                         \
            type *restrict row = table + ids[i] * columns;                                      \
            const type *restrict given = delta + i * columns;                                   \
            for (int64_t j = 0; j < columns; j++)                                               \
                row[j] += given[j];                                                             \
        }                                                                                       \
    }

ADD_ROWS(float32, float)
ADD_ROWS(float64, double)
ADD_ROWS(int32, uint32_t)
ADD_ROWS(int64, uint64_t)
