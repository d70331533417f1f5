/* What a disk tier looks at in every block: trailers, rows, and the index; `store/disk/format.py`
   describes them, `io.py` and `index.py` there call it. Sums are those of `parts.c`. */

#define TRAILER_HEAD_BYTES 256
#define TRAILER_KEY_AT 8
#define TRAILER_SPACE_AT 40
#define TRAILER_GENERATION_AT 56
#define TRAILER_SLOT_AT 72
#define TRAILER_CELLS_AT 76
#define TRAILER_NAMED 80 /* Up to there it says whose block it is; then how it is encrypted. */
#define TRAILER_SUM_AT 248
#define KEY_FIELD_BYTES 32

/* What is wrong with a stored block. */
enum { IS_RIGHT, IS_ANOTHER, IS_CORRUPT };

static inline uint32_t read32(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

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

/* Begins trailers of neighbouring slots: whose block lies before each, and its cell sums. `named`
   is the beginning of the first one, in which the key may be any. */
void penstock_begin_trailers(uint8_t *trailers, int64_t stride, int64_t count, int64_t cells,
                             const uint8_t *named, const uint8_t *keys, const uint64_t *sums)
{
    for (int64_t n = 0; n < count; n++, trailers += stride) {
        uint32_t slot = read32(named + TRAILER_SLOT_AT) + (uint32_t)n;
        memcpy(trailers, named, TRAILER_NAMED);
        memcpy(trailers + TRAILER_KEY_AT, keys + n * KEY_FIELD_BYTES, KEY_FIELD_BYTES);
        memcpy(trailers + TRAILER_SLOT_AT, &slot, 4);
        memcpy(trailers + TRAILER_HEAD_BYTES, sums + n * cells, (size_t)cells * 8);
    }
}

/* Ends them by their sums, which `sums` has, too. */
void penstock_end_trailers(uint8_t *trailers, int64_t stride, int64_t count, int64_t cells,
                           uint8_t *scratch, uint64_t *sums)
{
    pair_t pair = find_pair();
    for (int64_t n = 0; n < count; n++, trailers += stride) {
        sums[n] = trailer_sum(trailers, cells, scratch, pair);
        memcpy(trailers + TRAILER_SUM_AT, &sums[n], 8);
    }
}

/* Finds out which trailers are whole and of the blocks that were asked for, named as above. */
void penstock_check_trailers(const uint8_t *trailers, int64_t stride, int64_t count, int64_t cells,
                             const uint8_t *named, const uint8_t *keys, uint8_t *scratch,
                             uint8_t *wrong)
{
    pair_t pair = find_pair();
    for (int64_t n = 0; n < count; n++, trailers += stride) {
        int is_whole = read64(trailers) == read64(named) &&
                       read64(trailers + TRAILER_GENERATION_AT) ==
                           read64(named + TRAILER_GENERATION_AT) &&
                       read32(trailers + TRAILER_SLOT_AT) ==
                           read32(named + TRAILER_SLOT_AT) + (uint32_t)n &&
                       read32(trailers + TRAILER_CELLS_AT) == read32(named + TRAILER_CELLS_AT) &&
                       trailer_sum(trailers, cells, scratch, pair) ==
                           read64(trailers + TRAILER_SUM_AT);
        int is_its = !memcmp(trailers + TRAILER_KEY_AT, keys + n * KEY_FIELD_BYTES,
                             KEY_FIELD_BYTES) &&
                     !memcmp(trailers + TRAILER_SPACE_AT, named + TRAILER_SPACE_AT, 16);
        wrong[n] = !is_whole ? IS_CORRUPT : !is_its ? IS_ANOTHER : IS_RIGHT;
    }
}

#define ROW_BYTES 256
#define ROW_SUM_AT 248
#define ROW_KEY_AT 8
#define ROW_SPACE_AT 72
#define ROW_GENERATION_AT 88
#define ROW_SLOT_AT 112
#define NAME_BYTES 56 /* Space, generation, part, key: 16, 8, 16 and 16 bytes. */

static inline uint64_t mix_16(const uint8_t *in, int secret_at)
{
    return fold(read64(in) ^ secret_words[secret_at], read64(in + 8) ^ secret_words[secret_at + 1]);
}

/* XXH3 with 64 bits and no seed, of 33 to 64 bytes. */
static uint64_t xxh3_name(const uint8_t *in)
{
    uint64_t sum = NAME_BYTES * P64_1;
    sum += mix_16(in + 16, 4) + mix_16(in + NAME_BYTES - 32, 6);
    sum += mix_16(in, 0) + mix_16(in + NAME_BYTES - 16, 2);
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9ULL;
    return sum ^ sum >> 32;
}

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
        digests[n] = xxh3_name(name);
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
