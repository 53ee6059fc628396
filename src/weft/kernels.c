/* Loops that NumPy makes in several passes, or without an eye on memory.

   Who calls has checked addresses and lengths. Integers are unsigned: signed ones wrap around to
   the same bits. kernels.py is the Python side; everything works, more slowly, where this was not
   compiled. */

#include <stdint.h>
#include <string.h>
#include <time.h>

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

/* what a line is written past the cache by, and must begin at a multiple of */
#define QUARTER (LINE / 4)

/* Write as much as a line past the cache, where that can be done. */
static inline void write_line(char *to, const void *line)
{
#ifdef __SSE2__
    __m128i parts[4];
    for (int i = 0; i < 4; i++)
        parts[i] = _mm_loadu_si128((const __m128i *)line + i);
    for (int i = 0; i < 4; i++)
        _mm_stream_si128((__m128i *)to + i, parts[i]);
#else
    memcpy(to, line, LINE);
#endif
}

/* For after the last line, before anything that says that it is done. */
static inline void finish_writing(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}

static void copy(char *to, const char *from, int64_t count)
{
    int64_t head = (int64_t)(-(uintptr_t)to % LINE);
    if (head > count)
        head = count;
    memcpy(to, from, (size_t)head);
    for (to += head, from += head, count -= head; count >= LINE;
         to += LINE, from += LINE, count -= LINE) {
        __builtin_prefetch(from + COPY_AHEAD, 0, 0);
        write_line(to, from);
    }
    finish_writing();
    memcpy(to, from, (size_t)count);
}


/* Hash bytes, by which arrays are compared with what they were. There are LANES hashes, side by side,
   each of every LANES-th word: one product would take longer than memory takes to deliver the next
   word. A step is a bijection of the word, and of the hash so far: if one word has changed, the
   hash has. It multiplies twice: once would let a changed sign cancel out with another bit of the
   word LANES later. */

#define LANES (LINE / 8)

static inline uint64_t hash_step(uint64_t hash, uint64_t word)
{
    uint64_t product = (hash ^ word) * 0x8FD1C9A7E34B5D65u;
    return (product << 31 | product >> 33) * 0xB5297A4D3F84D5B9u;
}

static void hash_buffer(const char *data, int64_t size, uint64_t hash[2])
{
    uint64_t lanes[LANES], words[LANES];
    for (uint64_t i = 0; i < LANES; i++)
        lanes[i] = hash_step(hash[i % 2], i);
    int64_t left = size;
    for (; left >= LINE; left -= LINE, data += LINE) {
        memcpy(words, data, LINE);
        for (int i = 0; i < LANES; i++)
            lanes[i] = hash_step(lanes[i], words[i]);
    }
    memset(words, 0, LINE);
    memcpy(words, data, (size_t)left);
    hash[0] = hash[1] = (uint64_t)size;
    for (int i = 0; i < LANES; i++) {
        lanes[i] = hash_step(lanes[i], words[i]);
        hash[0] = hash_step(hash[0], lanes[i]);
        hash[1] = hash_step(hash[1], ~lanes[i]);
    }
}

/* Hash several buffers, one after the other. `hash` is what the result depends on besides their
   bytes, and becomes the result. */
void hash_buffers(const char *const *buffers, const int64_t *sizes, int64_t count, uint64_t hash[2])
{
    for (int64_t i = 0; i < count; i++)
        hash_buffer(buffers[i], sizes[i], hash);
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


/* What several processes do together with arrays of their own, through memory that all of them see,
   a chunk at a time. In a broadcast the root gives each chunk and the others take it over; in a sum

       every rank, chunk by chunk
         gives        what others add up of its chunk, by copying it into its place
         adds up      its own part, once all have given theirs; the sums are its result, and go
                      where its place has kept that part free
         takes over   the others' parts of the result, once all have added up

   It does so with the oldest chunk first, and is at most CHUNKS chunks ahead of the slowest rank.
   `joint_*` returns when there was nothing to do for some time: who calls looks why, and calls
   again. A rank may go on to the next sum, or the next broadcast, of a call while others are still
   busy with the one before; between a sum and a broadcast all meet.

   Where cores share a cache, what is given and added up had best stay in it. Where they do not, it
   is six times quicker past the caches, because each line would have to be taken away from the core
   that has read it last. Where processes run can change at any time, so each rank times what it
   gives: if that takes much longer than it takes to take over as much, several times in a row, all
   write past the caches for a while. */

#define CHUNKS 4
/* after how many chunks in a row places are written past the caches: one may be an interruption, and
   where ranks share cores even two */
#define IN_A_ROW 6
/* after how many times the chunks of a sum it is tried again whether caches are quicker */
#define WHILE 8

/* how many chunks a rank is done with, in all sums of its group; on lines of its own, as others
   look at it */
struct counts {
    int64_t given, added, taken;
    int64_t past_cache; /* until which count places are to be written past the caches */
    int64_t pace;       /* nanoseconds for a megabyte that it has taken over, not past them */
    int64_t slowly;     /* how many chunks in a row it took much longer to give */
    int64_t unused[10];
};
#define COUNTS (sizeof(struct counts) / sizeof(int64_t))

/* one sum or broadcast, as one rank sees it; kernels.py has the same */
struct joint {
    int64_t rank, ranks;
    int64_t root;       /* of a broadcast */
    const char *source; /* NULL if this rank gives nothing */
    char *target;       /* the source, or apart from it; NULL if this rank gets no result */
    int64_t size;       /* of either */
    double divisor;     /* of the sum, for a mean; else 1 */
    char *memory;       /* that all see: the counts of each rank, then CHUNKS places of each */
    int64_t chunk;      /* bytes of a chunk: lines for each rank */
    int64_t chunks;     /* how many */
    int64_t before;     /* what the counts were when this began */
    int64_t slow;       /* how many times longer it may take to give than to take over */
    int64_t given, added, taken;
};

/* Adds parts up, of this many bytes, to `sums` and, if it is not NULL, to `target`; past the cache
   to each of them or not. */
typedef void add_parts(char *const *parts, int64_t ranks, int64_t size, double divisor, char *sums,
                       int sums_past_cache, char *target, int target_past_cache);

static struct counts *counts_of(const struct joint *work, int64_t rank)
{
    return (struct counts *)work->memory + rank;
}

/* How many chunks of this all ranks are done with: `count` is the first rank's. */
static int64_t done_by_all(const struct joint *work, const int64_t *count)
{
    int64_t least = INT64_MAX;
    for (int64_t rank = 0; rank < work->ranks; rank++, count += COUNTS) {
        int64_t done = __atomic_load_n(count, __ATOMIC_ACQUIRE) - work->before;
        least = done < least ? done : least;
    }
    return least;
}

static void say(int64_t *count, int64_t value)
{
    __atomic_store_n(count, value, __ATOMIC_RELEASE);
}

/* a chunk, and where it is in the arrays */
struct chunk {
    int64_t number, at, size;
};

static struct chunk chunk_of(const struct joint *work, int64_t number)
{
    const int64_t at = number * work->chunk, left = work->size - at;
    return (struct chunk){number, at, left < work->chunk ? left : work->chunk};
}

/* Where a rank's part of a chunk begins; it ends where the next one's does. */
static int64_t part_of(const struct joint *work, struct chunk chunk, int64_t rank)
{
    const int64_t begin = rank * (work->chunk / work->ranks);
    return begin < chunk.size ? begin : chunk.size;
}

static char *place(const struct joint *work, int64_t number)
{
    return work->memory + work->ranks * (int64_t)sizeof(struct counts) + number * work->chunk;
}

/* Where a rank gives a chunk, and the sums of its part. */
static char *place_of(const struct joint *work, int64_t rank, struct chunk chunk)
{
    return place(work, chunk.number % CHUNKS * work->ranks + rank);
}

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Whether the result is to be written past the cache: not where the source has just been read. */
static int target_past_cache(const struct joint *work)
{
    return work->target != work->source;
}

/* Whether places are. */
static int places_past_cache(const struct joint *work)
{
    for (int64_t rank = 0; rank < work->ranks; rank++)
        if (__atomic_load_n(&counts_of(work, rank)->past_cache, __ATOMIC_RELAXED) >
            work->before + work->given)
            return 1;
    return 0;
}

static void copy_to(char *to, const char *from, int64_t count, int past_cache)
{
    if (past_cache)
        copy(to, from, count);
    else
        memcpy(to, from, (size_t)count);
}

/* Nanoseconds for a megabyte, if this many bytes took since then. */
static int64_t pace(int64_t began, int64_t bytes)
{
    return ((now() - began) << 20) / (bytes + 1);
}

/* Note how long it took to take over, or to give, so many bytes of a chunk through a cache. */

static void note_taking(struct joint *work, struct chunk chunk, int64_t bytes, int64_t began)
{
    if (chunk.size == work->chunk && work->target)
        say(&counts_of(work, work->rank)->pace, pace(began, bytes));
}

static void note_giving(struct joint *work, struct chunk chunk, int64_t bytes, int64_t began)
{
    struct counts *own = counts_of(work, work->rank);
    int64_t usual = own->pace;
    for (int64_t rank = 0; rank < work->ranks && !usual; rank++) /* a root may only give */
        usual = __atomic_load_n(&counts_of(work, rank)->pace, __ATOMIC_RELAXED);
    if (!usual || chunk.size < work->chunk)
        return;
    own->slowly = pace(began, bytes) > work->slow * usual ? own->slowly + 1 : 0;
    if (own->slowly == IN_A_ROW) {
        own->slowly = 0;
        say(&own->past_cache, work->before + work->given + WHILE * work->chunks);
    }
}

/* Each of these does its work on one chunk, if it can; whether it could. */

static int take_over(struct joint *work)
{
    const struct chunk chunk = chunk_of(work, work->taken);
    if (chunk.number == work->added ||
        chunk.number >= done_by_all(work, &counts_of(work, 0)->added))
        return 0;
    const int64_t began = now();
    for (int64_t rank = 0; rank < work->ranks && work->target; rank++) {
        const int64_t begin = part_of(work, chunk, rank), end = part_of(work, chunk, rank + 1);
        if (rank != work->rank)
            copy_to(work->target + chunk.at + begin, place_of(work, rank, chunk) + begin,
                    end - begin, target_past_cache(work));
    }
    if (!places_past_cache(work))
        note_taking(work, chunk, chunk.size - work->chunk / work->ranks, began);
    say(&counts_of(work, work->rank)->taken, work->before + ++work->taken);
    return 1;
}

static int add_own_part(struct joint *work, add_parts *add)
{
    const struct chunk chunk = chunk_of(work, work->added);
    if (chunk.number == work->given ||
        chunk.number >= done_by_all(work, &counts_of(work, 0)->given) ||
        chunk.number - done_by_all(work, &counts_of(work, 0)->taken) >= CHUNKS)
        return 0;
    const int64_t begin = part_of(work, chunk, work->rank);
    const int64_t end = part_of(work, chunk, work->rank + 1);
    char *parts[work->ranks];
    for (int64_t rank = 0; rank < work->ranks; rank++)
        parts[rank] = place_of(work, rank, chunk) + begin;
    parts[work->rank] = (char *)work->source + chunk.at + begin;
    add(parts, work->ranks, end - begin, work->divisor, place_of(work, work->rank, chunk) + begin,
        places_past_cache(work), work->target ? work->target + chunk.at + begin : NULL,
        target_past_cache(work));
    say(&counts_of(work, work->rank)->added, work->before + ++work->added);
    return 1;
}

static int give(struct joint *work)
{
    const struct chunk chunk = chunk_of(work, work->given);
    if (chunk.number == work->chunks ||
        chunk.number - done_by_all(work, &counts_of(work, 0)->added) >= CHUNKS)
        return 0;
    const int64_t begin = part_of(work, chunk, work->rank);
    const int64_t end = part_of(work, chunk, work->rank + 1);
    const char *source = work->source + chunk.at;
    char *to = place_of(work, work->rank, chunk);
    const int past_cache = places_past_cache(work);
    const int64_t began = now();
    copy_to(to, source, begin, past_cache);
    copy_to(to + end, source + end, chunk.size - end, past_cache);
    if (!past_cache)
        note_giving(work, chunk, begin + chunk.size - end, began);
    say(&counts_of(work, work->rank)->given, work->before + ++work->given);
    return 1;
}

static int broadcast(struct joint *work)
{
    const struct chunk chunk = chunk_of(work, work->taken);
    const int64_t places = CHUNKS * work->ranks;
    char *at = place(work, (work->before + chunk.number) % places);
    struct counts *own = counts_of(work, work->rank);
    const int past_cache = places_past_cache(work), gives = work->rank == work->root;
    const int64_t *given = &counts_of(work, work->root)->given;
    if (gives ? chunk.number - done_by_all(work, &counts_of(work, 0)->taken) >= places
              : chunk.number >= __atomic_load_n(given, __ATOMIC_ACQUIRE) - work->before)
        return 0;
    const int64_t began = now();
    if (gives)
        copy_to(at, work->source + chunk.at, chunk.size, past_cache);
    else
        copy(work->target + chunk.at, at, chunk.size);
    if (!past_cache)
        (gives ? note_giving : note_taking)(work, chunk, chunk.size, began);
    work->given = work->added = ++work->taken;
    say(&own->given, work->before + work->taken);
    say(&own->added, work->before + work->taken);
    say(&own->taken, work->before + work->taken);
    return 1;
}

typedef int step(struct joint *work);

/* Do up to `steps` chunks' work, and return if nothing could be done at `looks` looks; whether all
   is done. */
static int go_on(struct joint *work, step *next, int64_t steps, int64_t looks)
{
    for (int64_t idle = 0; work->taken < work->chunks && steps > 0 && idle < looks;) {
        if (next(work)) {
            steps--;
            idle = 0;
        } else {
            idle++;
#ifdef __SSE2__
            _mm_pause();
#endif
        }
    }
    return work->taken == work->chunks;
}

int joint_broadcast(struct joint *work, int64_t steps, int64_t looks)
{
    return go_on(work, broadcast, steps, looks);
}

/* What the parts' numbers at a place come to, a number or a line: `all`. */
#define SUM_AT(kind, place)                                                                     \
    kind all = *(const kind *)(parts[0] + place);                                               \
    for (int64_t rank = 1; rank < ranks; rank++)                                                \
        all += *(const kind *)(parts[rank] + place);                                            \
    if (by != 1)                                                                                \
        all /= by;

#define JOINT_SUM(name, type)                                                                   \
    WIDEST static void add_parts_##name(char *const *parts, int64_t ranks, int64_t size,        \
                                        double divisor, char *sums, int sums_past_cache,        \
                                        char *target, int target_past_cache)                    \
    {                                                                                           \
        typedef LINE_OF(type) line;                                                             \
        const type by = (type)divisor;                                                          \
        const int64_t head = target ? (int64_t)(-(uintptr_t)target % LINE) : 0;                 \
        sums_past_cache = sums_past_cache && (uintptr_t)(sums + head) % QUARTER == 0;           \
        for (int64_t at = 0; at < size;) {                                                      \
            if (at < head || size - at < LINE) {                                                \
                SUM_AT(type, at)                                                                \
                *(type *)(sums + at) = all;                                                     \
                if (target)                                                                     \
                    *(type *)(target + at) = all;                                               \
                at += (int64_t)sizeof(type);                                                    \
            } else {                                                                            \
                SUM_AT(line, at)                                                                \
                if (sums_past_cache)                                                            \
                    write_line(sums + at, &all);                                                \
                else                                                                            \
                    *(line *)(sums + at) = all;                                                 \
                if (target && target_past_cache)                                                \
                    write_line(target + at, &all);                                              \
                else if (target)                                                                \
                    *(line *)(target + at) = all;                                               \
                at += LINE;                                                                     \
            }                                                                                   \
        }                                                                                       \
        finish_writing();                                                                       \
    }                                                                                           \
    static int sum_##name(struct joint *work)                                                   \
    {                                                                                           \
        return take_over(work) || add_own_part(work, add_parts_##name) || give(work);           \
    }                                                                                           \
    int joint_sum_##name(struct joint *work, int64_t steps, int64_t looks)                      \
    {                                                                                           \
        return go_on(work, sum_##name, steps, looks);                                           \
    }

/* The bytes of the memory for so many ranks, in chunks of this size. */
int64_t joint_bytes(int64_t ranks, int64_t chunk)
{
    return ranks * ((int64_t)sizeof(struct counts) + CHUNKS * chunk);
}

/* Whether a rank needs nobody any more. */
int joint_is_done(const struct joint *work, int64_t rank)
{
    return __atomic_load_n(&counts_of(work, rank)->taken, __ATOMIC_ACQUIRE) >=
           work->before + work->chunks;
}

/* Whether places are written past the caches, after work that is done. Who asks before it meets the
   others again gets the same answer as they. */
int joint_past_cache(const struct joint *work)
{
    return places_past_cache(work);
}

/* Try again whether caches are quicker, as far as this rank is concerned. */
void joint_use_cache(char *memory, int64_t rank)
{
    say(&((struct counts *)memory)[rank].past_cache, 0);
}

JOINT_SUM(float32, float)
JOINT_SUM(float64, double)
JOINT_SUM(int32, uint32_t)
JOINT_SUM(int64, uint64_t)


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
   written once. `arrays` are rows, state and delta; `factors` are what _core/updaters.py makes of an
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
