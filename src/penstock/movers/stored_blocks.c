/* What a disk tier looks at in every block: trailers, rows, and the index; `store/disk/format.py`
   describes them, `io.py` and `index.py` there call it. Sums are those of `parts.c`. */

#include <errno.h>
#include <sys/uio.h>

#define TRAILER_HEAD_BYTES 256
#define TRAILER_KEY_AT 8
#define TRAILER_SPACE_AT 40
#define TRAILER_GENERATION_AT 56
#define TRAILER_SALT_AT 64
#define TRAILER_SLOT_AT 72
#define TRAILER_CELLS_AT 76
#define TRAILER_NAMED 80 /* Up to there it says whose block it is; then how it is encrypted. */
#define TRAILER_SUM_AT 248
#define KEY_FIELD_BYTES 32

/* What is wrong with a stored block. */
enum { IS_RIGHT, IS_ANOTHER, IS_CORRUPT };

/* The sum of a trailer: of its head but for the sum at the head's end, and of its cell sums, which
   are joined in `scratch`. */
static uint64_t trailer_sum(const uint8_t *trailer, int64_t cells, uint8_t *scratch, pair_t pair)
{
    static const uint64_t no_seeds[2] = {0, 0};
    uint64_t found[2];
    memcpy(scratch, trailer, TRAILER_SUM_AT);
    memcpy(scratch + TRAILER_SUM_AT, trailer + TRAILER_HEAD_BYTES, (size_t)cells * 8);
    xxh3_pair(scratch, TRAILER_SUM_AT + cells * 8, no_seeds, found, pair);
    return found[0];
}

/* What blocks of a call have in common; `io.py` writes it. Their arena is one grid of slots. */
typedef struct {
    uint8_t *blocks; /* Of arena slot 0, */
    int64_t stride;  /* and from there to the next. */
    uint64_t *sums;  /* The cell sums of the arena. */
    uint8_t *room;   /* Memory of the thread: for each block its trailer, or its slot as on the disk, */
    int64_t step;    /* which takes so much, */
    uint8_t *scratch; /* and then what sums are made in. */
    int64_t block_bytes;
    int64_t trailer_offset; /* In a slot on the disk. */
    int64_t trailer_bytes;
    int64_t cells;
    const segment_t *segments; /* Of a block, as it is summed. */
    int64_t segment_count;
    int64_t is_mix64;
    uint64_t salt; /* Of the sums in the arena. */
} blocks_t;

/* Neighbouring slots on the disk. */
typedef struct {
    int64_t file; /* A descriptor; below 0 somebody else reads and writes. */
    int64_t offset;
    uint64_t life;
    int64_t first;
    int64_t count;
} stretch_t;

/* What is wanted, in parts where blocks are encrypted in between. */
enum { TRAILERS = 1, REST = 2 };

#define PIECE_BYTES (1 << 20) /* Summed while it is in the cache. */
#define PIECE_SLOTS 512       /* Two buffers a slot; Linux takes 1024 in one call. */

static int is_in_place(const blocks_t *all)
{
    return all->step == all->trailer_bytes;
}

static int64_t piece_of(const blocks_t *all, int64_t left, int64_t most_bytes)
{
    int64_t slots = most_bytes / (all->trailer_offset + all->trailer_bytes);
    slots = slots < 1 ? 1 : slots > PIECE_SLOTS ? PIECE_SLOTS : slots;
    return slots < left ? slots : left;
}

/* Where blocks and trailers of neighbouring slots lie in memory, from block `n` on. */
static int buffers_of(const blocks_t *all, const int32_t *slots, int64_t n, int64_t count,
                      struct iovec *buffers)
{
    if (!is_in_place(all)) {
        buffers[0] = (struct iovec){all->room + n * all->step, (size_t)(count * all->step)};
        return 1;
    }
    for (int64_t i = 0; i < count; i++) {
        uint8_t *block = all->blocks + slots[n + i] * all->stride;
        buffers[2 * i] = (struct iovec){block, (size_t)all->trailer_offset};
        buffers[2 * i + 1] =
            (struct iovec){all->room + (n + i) * all->step, (size_t)all->trailer_bytes};
    }
    return (int)(2 * count);
}

/* Fills or writes all buffers, as far as the file goes; how many bytes, or the error below 0. */
static int64_t move_all(int64_t file, struct iovec *buffers, int count, int64_t offset, int writes)
{
    int64_t moved = 0;
    while (count) {
        ssize_t done = writes ? pwritev((int)file, buffers, count, offset + moved)
                              : preadv((int)file, buffers, count, offset + moved);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return -errno;
        if (done == 0)
            return writes ? -EIO : moved;
        moved += done;
        for (; count && (size_t)done >= buffers->iov_len; buffers++, count--)
            done -= (ssize_t)buffers->iov_len;
        if (count) {
            buffers->iov_base = (uint8_t *)buffers->iov_base + done;
            buffers->iov_len -= (size_t)done;
        }
    }
    return moved;
}

/* `named` is the beginning of a trailer, in which life, key and slot may be any. */
static int what_is_wrong(const uint8_t *trailer, const stretch_t *stretch, int64_t slot,
                         const uint8_t *named, const uint8_t *key, int64_t cells, uint8_t *scratch,
                         pair_t pair)
{
    int is_whole =
        read64(trailer) == stretch->life &&
        read64(trailer + TRAILER_GENERATION_AT) == read64(named + TRAILER_GENERATION_AT) &&
        read32(trailer + TRAILER_SLOT_AT) == (uint32_t)slot &&
        read32(trailer + TRAILER_CELLS_AT) == cells &&
        trailer_sum(trailer, cells, scratch, pair) == read64(trailer + TRAILER_SUM_AT);
    int is_its = !memcmp(trailer + TRAILER_KEY_AT, key, KEY_FIELD_BYTES) &&
                 !memcmp(trailer + TRAILER_SPACE_AT, named + TRAILER_SPACE_AT, 16);
    return !is_whole ? IS_CORRUPT : !is_its ? IS_ANOTHER : IS_RIGHT;
}

/* Whether a block in its arena slot has the sums of its trailer; then the arena gets its own. */
static int has_its_sums(const blocks_t *all, const uint8_t *trailer, int64_t slot,
                        uint64_t key_seed)
{
    uint64_t seeds[2] = {read64(trailer + TRAILER_SALT_AT) ^ key_seed, all->salt ^ key_seed};
    uint64_t *found = (uint64_t *)all->scratch;
    int64_t place = slot * all->stride;
    size_t length = (size_t)all->cells * 8;
    penstock_sum_pairs(all->segments, all->segment_count, seeds, 1, all->blocks, &place, found,
                       all->cells, all->is_mix64);
    if (memcmp(found, trailer + TRAILER_HEAD_BYTES, length))
        return 0;
    memcpy(all->sums + slot * all->cells, found + all->cells, length);
    return 1;
}

/* Reads blocks into their arena slots, says which are wrong, and gives the others their sums there.
   Returns 0, or why it could not: an errno. */
int64_t penstock_read_blocks(const blocks_t *all, const stretch_t *stretches, int64_t stretch_count,
                             const int32_t *slots, const uint8_t *named, const uint8_t *keys,
                             const uint64_t *key_seeds, uint8_t *wrong, int64_t steps)
{
    pair_t pair = find_pair();
    struct iovec buffers[2 * PIECE_SLOTS];
    int64_t slot_bytes = all->trailer_offset + all->trailer_bytes, n = 0;
    for (const stretch_t *each = stretches; each < stretches + stretch_count; each++)
        for (int64_t done = 0, piece; done < each->count; done += piece, n += piece) {
            piece = piece_of(all, each->count - done, PIECE_BYTES);
            int64_t whole = piece;
            if (steps & TRAILERS && each->file >= 0) {
                int count = buffers_of(all, slots, n, piece, buffers);
                int64_t offset = each->offset + done * slot_bytes;
                int64_t got = move_all(each->file, buffers, count, offset, 0);
                if (got < 0)
                    return -got;
                whole = got / slot_bytes;
            }
            for (int64_t i = 0; i < piece; i++) {
                uint8_t *trailer = all->room + (n + i + 1) * all->step - all->trailer_bytes;
                uint8_t *block = all->blocks + slots[n + i] * all->stride;
                if (steps & TRAILERS)
                    wrong[n + i] =
                        i >= whole ? IS_CORRUPT
                                   : what_is_wrong(trailer, each, each->first + done + i, named,
                                                   keys + (n + i) * KEY_FIELD_BYTES, all->cells,
                                                   all->scratch, pair);
                if (!(steps & REST) || wrong[n + i] != IS_RIGHT)
                    continue;
                if (steps & TRAILERS && !is_in_place(all))
                    memcpy(block, trailer - all->trailer_offset, (size_t)all->block_bytes);
                if (!has_its_sums(all, trailer, slots[n + i], key_seeds[n + i]))
                    wrong[n + i] = IS_CORRUPT;
            }
        }
    return 0;
}

/* Writes blocks out of their arena slots, with trailers whose sums `sums` gets. Returns as above. */
int64_t penstock_write_blocks(const blocks_t *all, const stretch_t *stretches,
                              int64_t stretch_count, const int32_t *slots, const uint8_t *named,
                              const uint8_t *keys, uint64_t *sums, int64_t steps)
{
    pair_t pair = find_pair();
    struct iovec buffers[2 * PIECE_SLOTS];
    int64_t slot_bytes = all->trailer_offset + all->trailer_bytes, n = 0;
    for (const stretch_t *each = stretches; each < stretches + stretch_count; each++)
        for (int64_t done = 0, piece; done < each->count; done += piece, n += piece) {
            piece = piece_of(all, each->count - done, INT64_MAX);
            for (int64_t i = 0; i < piece; i++) {
                uint8_t *trailer = all->room + (n + i + 1) * all->step - all->trailer_bytes;
                uint32_t number = (uint32_t)(each->first + done + i);
                if (steps & TRAILERS) {
                    memset(trailer, 0, (size_t)all->trailer_bytes);
                    memcpy(trailer, named, TRAILER_NAMED);
                    memcpy(trailer, &each->life, 8);
                    memcpy(trailer + TRAILER_KEY_AT, keys + (n + i) * KEY_FIELD_BYTES,
                           KEY_FIELD_BYTES);
                    memcpy(trailer + TRAILER_SLOT_AT, &number, 4);
                    memcpy(trailer + TRAILER_HEAD_BYTES, all->sums + slots[n + i] * all->cells,
                           (size_t)all->cells * 8);
                }
                if (steps == (TRAILERS | REST) && !is_in_place(all)) {
                    uint8_t *block = trailer - all->trailer_offset;
                    memcpy(block, all->blocks + slots[n + i] * all->stride,
                           (size_t)all->block_bytes);
                    memset(block + all->block_bytes, 0,
                           (size_t)(all->trailer_offset - all->block_bytes));
                }
                if (steps & REST) {
                    sums[n + i] = trailer_sum(trailer, all->cells, all->scratch, pair);
                    memcpy(trailer + TRAILER_SUM_AT, &sums[n + i], 8);
                }
            }
            if (!(steps & REST) || each->file < 0)
                continue;
            int count = buffers_of(all, slots, n, piece, buffers);
            int64_t offset = each->offset + done * slot_bytes;
            int64_t put = move_all(each->file, buffers, count, offset, 1);
            if (put < 0)
                return -put;
        }
    return 0;
}

#define ROW_BYTES 256
#define ROW_SUM_AT 248
#define ROW_KEY_AT 8
#define ROW_SPACE_AT 72
#define ROW_GENERATION_AT 88
#define ROW_SLOT_AT 112
#define NAME_BYTES 56 /* Space, generation, part, key: 16, 8, 16 and 16 bytes. */

/* Which rows were written in full, in this life and at their slot, and the digests of those. */
void penstock_check_rows(const uint8_t *rows, int64_t count, uint64_t life, const uint8_t *part,
                         uint8_t *sound, uint64_t *digests)
{
    mix64_t mix64 = find_mix64(0);
    for (int64_t n = 0; n < count; n++, rows += ROW_BYTES) {
        uint32_t slot;
        uint64_t sum;
        uint8_t name[NAME_BYTES];
        memcpy(&slot, rows + ROW_SLOT_AT, 4);
        sound[n] = 0;
        digests[n] = 0;
        if (slot != n || read64(rows) != life)
            continue;
        mix64(rows, ROW_SUM_AT, &life, &sum);
        if (sum != read64(rows + ROW_SUM_AT))
            continue;
        memcpy(name, rows + ROW_SPACE_AT, 16);
        memcpy(name + 16, rows + ROW_GENERATION_AT, 8);
        memcpy(name + 24, part, 16);
        memcpy(name + 40, rows + ROW_KEY_AT, 16);
        sound[n] = 1;
        digests[n] = xxh3_short(name, NAME_BYTES, 0);
    }
}

/* The index of a disk tier, a table with open addressing: see `store/disk/index.py`. */
#define NO_PLACE UINT64_MAX
#define OLD_PLACE (UINT64_MAX - 1)
#define FETCHED_AHEAD 16

/* Puts blocks into the table whose digests are not there; of equal ones the last. */
void penstock_insert(const uint64_t *digests, const uint64_t *places, int64_t count,
                     uint64_t *table_digests, uint64_t *table_places, uint64_t mask,
                     uint8_t *inserted)
{
    for (int64_t n = count - 1; n >= 0; n--) {
        if (n >= FETCHED_AHEAD) {
            uint64_t next = digests[n - FETCHED_AHEAD] & mask;
            __builtin_prefetch(table_digests + next, 1);
            __builtin_prefetch(table_places + next, 1);
        }
        inserted[n] = 0;
        uint64_t at = digests[n] & mask;
        while (table_places[at] != NO_PLACE &&
               (table_digests[at] != digests[n] || table_places[at] == OLD_PLACE))
            at = (at + 1) & mask;
        if (table_places[at] != NO_PLACE || digests[n] == 0)
            continue;
        table_digests[at] = digests[n];
        table_places[at] = places[n];
        inserted[n] = 1;
    }
}
