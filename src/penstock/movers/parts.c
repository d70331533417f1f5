/* Packing parts and putting them away, one pass over the bytes each.

   A part is blocks of segments. A segment is what one plane adds to a cell: rows of bytes at equal
   distances in a slot, one after the other in the packed block. The sums of a cell's segments are
   added by halves, as docs/checksums.md says.

   The packed part lies in memory that other processes can write at any time. So a block goes
   through `scratch`, memory of this process alone that stays in a core's own cache:

     pack:      slot -> scratch, then scratch -> part; each word is summed as it leaves scratch
     put away:  part -> scratch, each word summed as it is stored; then scratch -> slot

   Sums are XXH3 with 64 bits under a seed.

   Two rules: a sum is made of bytes of this process alone, never of the part, and each byte of the
   part is written once or read once; no byte of a block is put away before all sums of the block
   were found right. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define SECRET_BYTES 192
#define STRIPE_BYTES 64
#define SHORT_BYTES 240 /* What is longer is summed by stripes. */
#define STRIPES 16 /* Of a round, after which the lanes are scrambled. */
#define AHEAD_BYTES 4096 /* So far ahead of a sum the packed part is fetched; found by trial. */
#define READ_AHEAD_BYTES 2048 /* The same for copies. */
#define WRITE_AHEAD_BYTES 1024
#define LONG_BYTES 1024 /* A row of more lines than one or two that are written in part. */

#define P32_1 0x9E3779B1U
#define P32_2 0x85EBCA77U
#define P32_3 0xC2B2AE3DU
#define P64_1 0x9E3779B185EBCA87ULL
#define P64_2 0xC2B2AE3D27D4EB4FULL
#define P64_3 0x165667B19E3779F9ULL
#define P64_4 0x85EBCA77C2B2AE63ULL
#define P64_5 0x27D4EB2F165667C5ULL

/* The columns of a strip's row: one plane of one layer, all its heads. `packing.py` writes them. */
typedef struct {
    int64_t address;      /* Of its first number in slot 0. */
    int64_t block_stride; /* From one slot to the next. */
    int64_t heads;
    int64_t head_stride;
    int64_t rows; /* Of a head. */
    int64_t row_stride;
    int64_t row_bytes;
    int64_t start;      /* Of the first head in the packed block. */
    int64_t cell_bytes; /* From one head to the next there; rows follow each other. */
} strip_t;

/* The columns of a segment's row: one plane and head, as it is summed. */
typedef struct {
    int64_t start; /* In the packed block. */
    int64_t length;
    int64_t place; /* Layer, plane and head, as one number. */
    int64_t cell;
    int64_t strip; /* Of which strip it is a head, */
    int64_t head;  /* and of which number. */
} segment_t;

/* The algorithm's own constant: 192 bytes. */
static const uint64_t secret_words[SECRET_BYTES / 8] = {
    0xbe4ba423396cfeb8ULL, 0x1cad21f72c81017cULL, 0xdb979083e96dd4deULL, 0x1f67b3b7a4a44072ULL,
    0x78e5c0cc4ee679cbULL, 0x2172ffcc7dd05a82ULL, 0x8e2443f7744608b8ULL, 0x4c263a81e69035e0ULL,
    0xcb00c391bb52283cULL, 0xa32e531b8b65d088ULL, 0x4ef90da297486471ULL, 0xd8acdea946ef1938ULL,
    0x3f349ce33f76faa8ULL, 0x1d4f0bc7c7bbdcf9ULL, 0x3159b4cd4be0518aULL, 0x647378d9c97e9fc8ULL,
    0xc3ebd33483acc5eaULL, 0xeb6313faffa081c5ULL, 0x49daf0b751dd0d17ULL, 0x9e68d429265516d3ULL,
    0xfca1477d58be162bULL, 0xce31d07ad1b8f88fULL, 0x280416958f3acb45ULL, 0x7e404bbbcafbd7afULL,
};

static inline uint64_t read64(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

/* The same, and the compiler may not read it a second time. */
static inline uint64_t read_once64(const uint8_t *at)
{
    typedef uint64_t __attribute__((aligned(1), may_alias)) word_t;
    return *(const volatile word_t *)at;
}

static inline uint64_t fold(uint64_t one, uint64_t other)
{
    unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint32_t read32(const uint8_t *at)
{
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}

static inline uint64_t mixed_end(uint64_t sum)
{
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9ULL;
    return sum ^ sum >> 32;
}

static inline uint64_t mix_16(const uint8_t *in, const uint8_t *secret, uint64_t seed)
{
    return fold(read64(in) ^ (read64(secret) + seed), read64(in + 8) ^ (read64(secret + 8) - seed));
}

/* XXH3 of up to 240 bytes, which it sums in four ways by their number. Inlined, since most callers
   have one number of bytes. */
__attribute__((always_inline)) static inline uint64_t xxh3_short(const uint8_t *in, int64_t length, uint64_t seed)
{
    const uint8_t *secret = (const uint8_t *)secret_words, *end = in + length;
    uint64_t sum = (uint64_t)length * P64_1;
    if (length > 128) {
        for (int i = 0; i < 8; i++)
            sum += mix_16(in + 16 * i, secret + 16 * i, seed);
        sum = mixed_end(sum);
        for (int i = 8; i < length / 16; i++)
            sum += mix_16(in + 16 * i, secret + 16 * (i - 8) + 3, seed);
        return mixed_end(sum + mix_16(end - 16, secret + 119, seed));
    }
    if (length > 16) {
        /* From both ends towards the middle, where they overlap. */
        _Pragma("GCC unroll 4") for (int i = 0; 32 * i < length; i++)
            sum += mix_16(in + 16 * i, secret + 32 * i, seed) +
                   mix_16(end - 16 * (i + 1), secret + 32 * i + 16, seed);
        return mixed_end(sum);
    }
    if (length > 8) {
        uint64_t low = read64(in) ^ ((read64(secret + 24) ^ read64(secret + 32)) + seed);
        uint64_t high = read64(end - 8) ^ ((read64(secret + 40) ^ read64(secret + 48)) - seed);
        return mixed_end((uint64_t)length + __builtin_bswap64(low) + high + fold(low, high));
    }
    if (length > 3) {
        seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t word = read32(end - 4) + ((uint64_t)read32(in) << 32);
        word ^= (read64(secret + 8) ^ read64(secret + 16)) - seed;
        word ^= (word << 49 | word >> 15) ^ (word << 24 | word >> 40);
        word *= 0x9FB21C651E98DF25ULL;
        word = (word ^ ((word >> 35) + (uint64_t)length)) * 0x9FB21C651E98DF25ULL;
        return word ^ word >> 28;
    }
    uint64_t word = (read64(secret + 56) ^ read64(secret + 64)) ^ seed;
    if (length) {
        word = (uint32_t)in[0] << 16 | (uint32_t)in[length / 2] << 24 | end[-1] |
               (uint32_t)length << 8;
        word ^= (read32(secret) ^ read32(secret + 4)) + seed;
    }
    word = (word ^ word >> 33) * P64_2;
    word = (word ^ word >> 29) * P64_3;
    return word ^ word >> 32;
}

/* Where the stripes of a segment are read: rows of so many stripes, with a gap after each. */
typedef struct {
    const uint8_t *at;
    int64_t row_stripes;
    int64_t gap;
} rows_t;

typedef void (*lanes_t)(uint64_t *, rows_t, int64_t, const uint8_t *, const uint8_t *, uint8_t *);

/* All stripes of a segment but the last, into eight lanes, and copied to `out`. Each word is read
   once: what is summed is what is stored. As much from `ahead` on is fetched on the way: one core
   has only so many loads of far memory under way by itself. */
static void lanes_plain(uint64_t *acc, rows_t rows, int64_t stripes, const uint8_t *secret,
                        const uint8_t *ahead, uint8_t *out)
{
    (void)ahead;
    const uint8_t *in = rows.at;
    int64_t left = rows.row_stripes;
    for (int64_t n = 0; n < stripes; n++) {
        const uint8_t *key = secret + n % STRIPES * 8;
        for (int i = 0; i < 8; i++) {
            uint64_t value = read_once64(in + 8 * i);
            memcpy(out + n * STRIPE_BYTES + 8 * i, &value, 8);
            uint64_t mixed = value ^ read64(key + 8 * i);
            acc[i ^ 1] += value;
            acc[i] += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
        }
        in += STRIPE_BYTES;
        if (--left == 0) {
            in += rows.gap;
            left = rows.row_stripes;
        }
        if (n % STRIPES == STRIPES - 1)
            for (int i = 0; i < 8; i++) {
                uint64_t lane = acc[i] ^ acc[i] >> 47;
                acc[i] = (lane ^ read64(secret + SECRET_BYTES - STRIPE_BYTES + 8 * i)) * P32_1;
            }
    }
}

#if defined(__x86_64__)
/* Keeps a loaded value in its register: the compiler may not load it a second time. */
#define ONCE(value) __asm__ volatile("" : "+v"(value))

__attribute__((target("avx2"))) static void lanes_avx2(uint64_t *acc, rows_t rows, int64_t stripes,
                                                       const uint8_t *secret,
                                                       const uint8_t *ahead, uint8_t *out)
{
    const uint8_t *in = rows.at;
    int64_t left = rows.row_stripes;
    __m256i lane[2];
    const __m256i prime = _mm256_set1_epi32((int)P32_1);
    for (int i = 0; i < 2; i++)
        lane[i] = _mm256_loadu_si256((const __m256i *)acc + i);
    for (int64_t n = 0; n < stripes; n++) {
        const __m256i *key = (const __m256i *)(secret + n % STRIPES * 8);
        const __m256i *data = (const __m256i *)in;
        _mm_prefetch((const char *)(ahead + n * STRIPE_BYTES), _MM_HINT_T1);
        for (int i = 0; i < 2; i++) {
            __m256i value = _mm256_loadu_si256(data + i);
            ONCE(value);
            _mm256_storeu_si256((__m256i *)(out + n * STRIPE_BYTES) + i, value);
            __m256i mixed = _mm256_xor_si256(value, _mm256_loadu_si256(key + i));
            __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
            lane[i] = _mm256_add_epi64(lane[i], _mm256_shuffle_epi32(value, 0x4E));
            lane[i] = _mm256_add_epi64(lane[i], product);
        }
        in += STRIPE_BYTES;
        if (--left == 0) {
            in += rows.gap;
            left = rows.row_stripes;
        }
        if (n % STRIPES == STRIPES - 1) {
            key = (const __m256i *)(secret + SECRET_BYTES - STRIPE_BYTES);
            for (int i = 0; i < 2; i++) {
                __m256i x = _mm256_xor_si256(lane[i], _mm256_srli_epi64(lane[i], 47));
                x = _mm256_xor_si256(x, _mm256_loadu_si256(key + i));
                __m256i low = _mm256_mul_epu32(x, prime);
                __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
                lane[i] = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
            }
        }
    }
    for (int i = 0; i < 2; i++)
        _mm256_storeu_si256((__m256i *)acc + i, lane[i]);
}

__attribute__((target("avx512f"))) static void lanes_avx512(uint64_t *acc, rows_t rows,
                                                            int64_t stripes, const uint8_t *secret,
                                                            const uint8_t *ahead, uint8_t *out)
{
    const uint8_t *in = rows.at;
    int64_t left = rows.row_stripes;
    __m512i lane = _mm512_loadu_si512(acc);
    const __m512i prime = _mm512_set1_epi32((int)P32_1);
    const __m512i last = _mm512_loadu_si512(secret + SECRET_BYTES - STRIPE_BYTES);
    for (int64_t n = 0; n < stripes; n++) {
        _mm_prefetch((const char *)(ahead + n * STRIPE_BYTES), _MM_HINT_T1);
        __builtin_prefetch(out + n * STRIPE_BYTES + WRITE_AHEAD_BYTES, 1);
        __m512i value = _mm512_loadu_si512(in);
        ONCE(value);
        _mm512_storeu_si512(out + n * STRIPE_BYTES, value);
        __m512i mixed = _mm512_xor_si512(value, _mm512_loadu_si512(secret + n % STRIPES * 8));
        __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
        lane = _mm512_add_epi64(lane, _mm512_shuffle_epi32(value, (_MM_PERM_ENUM)0x4E));
        lane = _mm512_add_epi64(lane, product);
        in += STRIPE_BYTES;
        if (--left == 0) {
            in += rows.gap;
            left = rows.row_stripes;
        }
        if (n % STRIPES == STRIPES - 1) {
            __m512i x = _mm512_xor_si512(lane, _mm512_srli_epi64(lane, 47));
            x = _mm512_xor_si512(x, last);
            __m512i low = _mm512_mul_epu32(x, prime);
            __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), prime);
            lane = _mm512_add_epi64(low, _mm512_slli_epi64(high, 32));
        }
    }
    _mm512_storeu_si512(acc, lane);
}
#elif defined(__aarch64__)
#define ONCE(value) __asm__ volatile("" : "+w"(value))
#define UNROLLED _Pragma("GCC unroll 4") /* Otherwise the lanes are kept in memory. */

static inline uint64x2_t read_two64(const uint8_t *at)
{
    return vreinterpretq_u64_u8(vld1q_u8(at));
}

/* Four lanes and the words that are theirs: each other's words, and the products of the halves of
   their own. The halves are parted for two vectors at once. */
static inline void add_four(uint64x2_t *lane, uint64x2_t one, uint64x2_t other, const uint8_t *key)
{
    uint32x4_t mixed_one = vreinterpretq_u32_u64(veorq_u64(one, read_two64(key)));
    uint32x4_t mixed_other = vreinterpretq_u32_u64(veorq_u64(other, read_two64(key + 16)));
    uint32x4_t low = vuzp1q_u32(mixed_one, mixed_other);
    uint32x4_t high = vuzp2q_u32(mixed_one, mixed_other);
    lane[0] = vaddq_u64(lane[0], vextq_u64(one, one, 1));
    lane[1] = vaddq_u64(lane[1], vextq_u64(other, other, 1));
    lane[0] = vmlal_u32(lane[0], vget_low_u32(low), vget_low_u32(high));
    lane[1] = vmlal_high_u32(lane[1], low, high);
}

static inline uint64x2_t scrambled(uint64x2_t lane, const uint8_t *key)
{
    uint64x2_t x = veorq_u64(lane, vshrq_n_u64(lane, 47));
    x = veorq_u64(x, read_two64(key));
    uint64x2_t high = vmull_n_u32(vshrn_n_u64(x, 32), P32_1);
    return vmlal_n_u32(vshlq_n_u64(high, 32), vmovn_u64(x), P32_1);
}

/* Every arm64 processor has these instructions. */
static void lanes_neon(uint64_t *acc, rows_t rows, int64_t stripes, const uint8_t *secret,
                       const uint8_t *ahead, uint8_t *out)
{
    const uint8_t *in = rows.at;
    int64_t left = rows.row_stripes;
    uint64x2_t lane[4];
    UNROLLED for (int i = 0; i < 4; i++)
        lane[i] = vld1q_u64(acc + 2 * i);
    for (int64_t n = 0; n < stripes; n++) {
        const uint8_t *key = secret + n % STRIPES * 8;
        uint64x2_t value[4];
        __builtin_prefetch(ahead + n * STRIPE_BYTES);
        UNROLLED for (int i = 0; i < 4; i++) {
            value[i] = read_two64(in + 16 * i);
            ONCE(value[i]);
            vst1q_u8(out + n * STRIPE_BYTES + 16 * i, vreinterpretq_u8_u64(value[i]));
        }
        add_four(lane, value[0], value[1], key);
        add_four(lane + 2, value[2], value[3], key + 32);
        in += STRIPE_BYTES;
        if (--left == 0) {
            in += rows.gap;
            left = rows.row_stripes;
        }
        if (n % STRIPES == STRIPES - 1)
            UNROLLED for (int i = 0; i < 4; i++)
                lane[i] = scrambled(lane[i], secret + SECRET_BYTES - STRIPE_BYTES + 16 * i);
    }
    UNROLLED for (int i = 0; i < 4; i++)
        vst1q_u64(acc + 2 * i, lane[i]);
}
#endif

static lanes_t find_lanes(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        return lanes_avx512;
    if (__builtin_cpu_supports("avx2"))
        return lanes_avx2;
#elif defined(__aarch64__)
    return lanes_neon;
#endif
    return lanes_plain;
}

__attribute__((noinline)) static uint64_t sum_of_short(rows_t rows, uint8_t *out, int64_t length, uint64_t seed)
{
    uint8_t own[SHORT_BYTES];
    int64_t row_bytes = rows.gap ? rows.row_stripes * STRIPE_BYTES : length;
    for (int64_t done = 0; done < length; done += row_bytes, rows.at += row_bytes + rows.gap)
        memcpy(own + done, rows.at, (size_t)row_bytes);
    __asm__ volatile("" : : "r"(own) : "memory"); /* It is not read a second time. */
    memcpy(out, own, (size_t)length);
    return xxh3_short(own, length, seed);
}

/* Copies a segment and returns the sum of what was copied. One of the two, `own`, is memory of this
   process alone: what is needed a second time is read there. */
static uint64_t sum_of(rows_t rows, uint8_t *out, int out_is_own, int64_t length, uint64_t seed,
                       const uint8_t *ahead, lanes_t lanes)
{
    if (length <= SHORT_BYTES)
        return sum_of_short(rows, out, length, seed);
    uint64_t acc[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    uint64_t words[SECRET_BYTES / 8];
    const uint8_t *secret = (const uint8_t *)words;
    for (int i = 0; i < SECRET_BYTES / 8; i += 2) {
        words[i] = secret_words[i] + seed;
        words[i + 1] = secret_words[i + 1] - seed;
    }
    int64_t stripes = (length - 1) / STRIPE_BYTES, done = stripes * STRIPE_BYTES;
    lanes(acc, rows, stripes, secret, ahead, out);
    /* The last stripe ends with the segment, and has a key of its own. */
    const uint8_t *in = rows.at + done + stripes / rows.row_stripes * rows.gap;
    memcpy(out + done, in, (size_t)(length - done));
    const uint8_t *end = (out_is_own ? out + length : in + (length - done)) - STRIPE_BYTES;
    const uint8_t *key = secret + SECRET_BYTES - STRIPE_BYTES - 7;
    for (int i = 0; i < 8; i++) {
        uint64_t value = read64(end + 8 * i);
        uint64_t mixed = value ^ read64(key + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
    }
    uint64_t sum = (uint64_t)length * P64_1;
    for (int i = 0; i < 4; i++)
        sum += fold(acc[2 * i] ^ read64(secret + 11 + 16 * i),
                    acc[2 * i + 1] ^ read64(secret + 19 + 16 * i));
    return mixed_end(sum);
}

static inline uint64_t seed_of(uint64_t key_seed, int64_t place)
{
    uint64_t x = key_seed + (uint64_t)place * 0x9E3779B97F4A7C15ULL;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ x >> 27) * 0x94D049BB133111EBULL;
    return x ^ x >> 31;
}

static inline void add_by_halves(uint64_t *cell, uint64_t sum)
{
    uint64_t high = (*cell >> 32) + (sum >> 32);
    *cell = high << 32 | (uint32_t)(*cell + sum);
}

/* Rows of bytes from one grid to another, in the order in which they lie in the slot: its memory is
   far away, and the packed block is in a near cache. */
typedef void (*copy_t)(uint8_t *, const uint8_t *, int64_t);

static void copy_plain(uint8_t *to, const uint8_t *from, int64_t length)
{
    memcpy(to, from, (size_t)length);
}

#if defined(__x86_64__)
/* Out of far memory: what follows is fetched meanwhile, on both sides. */
__attribute__((target("avx512f"))) static void copy_near(uint8_t *to, const uint8_t *from,
                                                         int64_t length)
{
    int64_t at = 0;
    for (; at + 64 <= length; at += 64) {
        _mm_prefetch((const char *)(from + at + READ_AHEAD_BYTES), _MM_HINT_T0);
        __builtin_prefetch(to + at + WRITE_AHEAD_BYTES, 1);
        _mm512_storeu_si512(to + at, _mm512_loadu_si512(from + at));
    }
    memcpy(to + at, from + at, (size_t)(length - at));
}

/* Past the caches: nobody reads a slot soon, and its old bytes need not be fetched. Lines that are
   written in part go through them. */
__attribute__((target("avx512f"))) static void copy_past(uint8_t *to, const uint8_t *from,
                                                         int64_t length)
{
    int64_t at = -(int64_t)(uintptr_t)to & 63;
    memcpy(to, from, (size_t)at);
    for (; at + 64 <= length; at += 64)
        _mm512_stream_si512((__m512i *)(to + at), _mm512_loadu_si512(from + at));
    memcpy(to + at, from + at, (size_t)(length - at));
}
#elif defined(__aarch64__)
/* By cache lines: `memcpy` of rows of 256 bytes took 1.5 times as long (Neoverse N1). */
static void copy_lines(uint8_t *to, const uint8_t *from, int64_t length)
{
    int64_t at = 0;
    for (; at + 64 <= length; at += 64) {
        uint8x16x4_t line = vld1q_u8_x4(from + at);
        vst1q_u8_x4(to + at, line);
    }
    memcpy(to + at, from + at, (size_t)(length - at));
}
#endif

/* Whether rows of different heads take turns in a slot. */
static inline int are_interleaved(const strip_t *strip)
{
    return strip->head_stride < strip->row_stride;
}

static void copy_strip(const strip_t *strip, int64_t slot, uint8_t *packed, int into_slot,
                       copy_t copy)
{
    uint8_t *place = (uint8_t *)(strip->address + slot * strip->block_stride);
    int rows_outside = are_interleaved(strip);
    int64_t outer = rows_outside ? strip->rows : strip->heads;
    int64_t inner = rows_outside ? strip->heads : strip->rows;
    int64_t row_bytes = strip->row_bytes;
    for (int64_t i = 0; i < outer; i++)
        for (int64_t j = 0; j < inner; j++) {
            int64_t row = rows_outside ? i : j, head = rows_outside ? j : i;
            uint8_t *far = place + head * strip->head_stride + row * strip->row_stride;
            uint8_t *near = packed + strip->start + head * strip->cell_bytes + row * row_bytes;
            if (into_slot)
                copy(far, near, row_bytes);
            else
                copy(near, far, row_bytes);
        }
}

static copy_t copy_out_of_slots(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f"))
        return copy_near;
#elif defined(__aarch64__)
    return copy_lines;
#endif
    return copy_plain;
}

/* How a strip's rows go into slots: past the caches where rows are long, or whole lines. */
static copy_t copy_into_slots(const strip_t *strip)
{
    (void)strip; /* Where all strips are copied alike. */
#if defined(__x86_64__)
    int64_t bits = strip->address | strip->block_stride | strip->row_bytes;
    bits |= strip->heads > 1 ? strip->head_stride : 0;
    bits |= strip->rows > 1 ? strip->row_stride : 0;
    int whole = !(bits & 63) || strip->row_bytes >= LONG_BYTES;
    if (whole && __builtin_cpu_supports("avx512f"))
        return copy_past;
#elif defined(__aarch64__)
    return copy_lines;
#endif
    return copy_plain;
}

/* Whether the rows of a head are whole stripes, or one row: they are summed where they lie. */
static inline int are_stripes(const strip_t *strip)
{
    return strip->rows == 1 || strip->row_bytes % STRIPE_BYTES == 0;
}

/* Bytes without gaps. */
static inline rows_t one_row(const uint8_t *at)
{
    return (rows_t){at, INT64_MAX, 0};
}

/* Packs blocks out of their slots, each to its place in `packed`, counted in bytes. `sums` has `cells`
   numbers for each block; `scratch` has room for one block. Meanwhile the slot of the next block is fetched, where rows are too short for the
   processor to see that they follow each other. */
void penstock_pack(const strip_t *strips, int64_t strip_count, const segment_t *segments,
                   int64_t segment_count, const int64_t *slots, const uint64_t *key_seeds,
                   int64_t count, uint8_t *packed, const int64_t *places, uint64_t *sums,
                   int64_t cells, uint8_t *scratch)
{
    lanes_t lanes = find_lanes();
    copy_t copy = copy_out_of_slots();
    for (int64_t block = 0; block < count; block++, sums += cells) {
        int64_t slot = slots[block], next = slots[block + 1 < count ? block + 1 : block];
        for (int64_t n = 0; n < strip_count; n++)
            if (!are_stripes(strips + n))
                copy_strip(strips + n, slot, scratch, 0, copy);
        memset(sums, 0, (size_t)cells * 8);
        for (const segment_t *each = segments; each < segments + segment_count; each++) {
            const strip_t *strip = strips + each->strip;
            const uint8_t *place = (const uint8_t *)strip->address;
            rows_t rows = one_row(scratch + each->start);
            if (are_stripes(strip)) {
                rows = one_row(place + slot * strip->block_stride + each->head * strip->head_stride);
                if (strip->rows > 1) {
                    rows.row_stripes = strip->row_bytes / STRIPE_BYTES;
                    rows.gap = strip->row_stride - strip->row_bytes;
                }
            }
            const uint8_t *ahead = rows.at + READ_AHEAD_BYTES;
            if (are_interleaved(strip))
                ahead = place + next * strip->block_stride + each->head * each->length;
            uint64_t seed = seed_of(key_seeds[block], each->place);
            uint8_t *out = packed + places[block] + each->start;
            add_by_halves(sums + each->cell,
                          sum_of(rows, out, 0, each->length, seed, ahead, lanes));
        }
    }
}

/* Puts blocks away into their slots, each from its place in `packed`, and stops at the first whose sums are not those expected: returns
   its number, or -1. `found` has room for the sums of one block, `scratch` for its bytes. */
int64_t penstock_put_away(const strip_t *strips, int64_t strip_count, const segment_t *segments,
                          int64_t segment_count, const int64_t *slots, const uint64_t *key_seeds,
                          int64_t count, const uint8_t *packed, const int64_t *places,
                          const uint64_t *expected, uint64_t *found, int64_t cells, uint8_t *scratch)
{
    lanes_t lanes = find_lanes();
    int64_t bad = -1;
    for (int64_t block = 0; block < count; block++, expected += cells) {
        memset(found, 0, (size_t)cells * 8);
        for (const segment_t *each = segments; each < segments + segment_count; each++) {
            const uint8_t *in = packed + places[block] + each->start;
            uint64_t seed = seed_of(key_seeds[block], each->place);
            add_by_halves(found + each->cell,
                          sum_of(one_row(in), scratch + each->start, 1, each->length, seed,
                                 in + AHEAD_BYTES, lanes));
        }
        if (memcmp(found, expected, (size_t)cells * 8) != 0) {
            bad = block;
            break;
        }
        for (int64_t n = 0; n < strip_count; n++)
            copy_strip(strips + n, slots[block], scratch, 1, copy_into_slots(strips + n));
    }
#if defined(__x86_64__)
    _mm_sfence(); /* Whoever hears that the part is there sees its bytes. */
#endif
    return bad;
}

/* Sums of packed blocks where they lie, under two sets of seeds at once, for blocks that come from a
   disk: those that were written with them, and those of the life they come into. Nothing is copied;
   whoever calls owns the memory meanwhile. */

typedef void (*pair_t)(uint64_t *, uint64_t *, const uint8_t *, int64_t, const uint8_t *,
                       const uint8_t *);

static void pair_plain(uint64_t *one, uint64_t *other, const uint8_t *in, int64_t stripes,
                       const uint8_t *secret_one, const uint8_t *secret_other)
{
    for (int64_t n = 0; n < stripes; n++, in += STRIPE_BYTES) {
        const uint8_t *last = secret_one + SECRET_BYTES - STRIPE_BYTES;
        const uint8_t *key = secret_one + n % STRIPES * 8;
        uint64_t *acc = one;
        for (int set = 0; set < 2; set++) {
            for (int i = 0; i < 8; i++) {
                uint64_t value = read64(in + 8 * i), mixed = value ^ read64(key + 8 * i);
                acc[i ^ 1] += value;
                acc[i] += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
            }
            if (n % STRIPES == STRIPES - 1)
                for (int i = 0; i < 8; i++)
                    acc[i] = ((acc[i] ^ acc[i] >> 47) ^ read64(last + 8 * i)) * P32_1;
            acc = other;
            key = secret_other + n % STRIPES * 8;
            last = secret_other + SECRET_BYTES - STRIPE_BYTES;
        }
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void pair_avx2(uint64_t *one, uint64_t *other,
                                                      const uint8_t *in, int64_t stripes,
                                                      const uint8_t *secret_one,
                                                      const uint8_t *secret_other)
{
    __m256i lane[4];
    const __m256i prime = _mm256_set1_epi32((int)P32_1);
    for (int i = 0; i < 2; i++) {
        lane[i] = _mm256_loadu_si256((const __m256i *)one + i);
        lane[2 + i] = _mm256_loadu_si256((const __m256i *)other + i);
    }
    for (int64_t n = 0; n < stripes; n++, in += STRIPE_BYTES) {
        _mm_prefetch((const char *)(in + READ_AHEAD_BYTES), _MM_HINT_T0);
        for (int i = 0; i < 4; i++) {
            const uint8_t *secret = (i < 2 ? secret_one : secret_other) + n % STRIPES * 8;
            __m256i value = _mm256_loadu_si256((const __m256i *)in + i % 2);
            __m256i mixed =
                _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)secret + i % 2));
            __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
            lane[i] = _mm256_add_epi64(lane[i], _mm256_shuffle_epi32(value, 0x4E));
            lane[i] = _mm256_add_epi64(lane[i], product);
        }
        if (n % STRIPES == STRIPES - 1)
            for (int i = 0; i < 4; i++) {
                const uint8_t *secret = (i < 2 ? secret_one : secret_other) + SECRET_BYTES - 64;
                __m256i x = _mm256_xor_si256(lane[i], _mm256_srli_epi64(lane[i], 47));
                x = _mm256_xor_si256(x, _mm256_loadu_si256((const __m256i *)secret + i % 2));
                __m256i low = _mm256_mul_epu32(x, prime);
                __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
                lane[i] = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
            }
    }
    for (int i = 0; i < 2; i++) {
        _mm256_storeu_si256((__m256i *)one + i, lane[i]);
        _mm256_storeu_si256((__m256i *)other + i, lane[2 + i]);
    }
}

__attribute__((target("avx512f"))) static void pair_avx512(uint64_t *one, uint64_t *other,
                                                           const uint8_t *in, int64_t stripes,
                                                           const uint8_t *secret_one,
                                                           const uint8_t *secret_other)
{
    const uint8_t *secrets[2] = {secret_one, secret_other};
    __m512i lane[2] = {_mm512_loadu_si512(one), _mm512_loadu_si512(other)};
    const __m512i prime = _mm512_set1_epi32((int)P32_1);
    for (int64_t n = 0; n < stripes; n++, in += STRIPE_BYTES) {
        _mm_prefetch((const char *)(in + READ_AHEAD_BYTES), _MM_HINT_T0);
        __m512i value = _mm512_loadu_si512(in);
        __m512i turned = _mm512_shuffle_epi32(value, (_MM_PERM_ENUM)0x4E);
        for (int set = 0; set < 2; set++) {
            __m512i key = _mm512_loadu_si512(secrets[set] + n % STRIPES * 8);
            __m512i mixed = _mm512_xor_si512(value, key);
            __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
            lane[set] = _mm512_add_epi64(_mm512_add_epi64(lane[set], turned), product);
        }
        if (n % STRIPES == STRIPES - 1)
            for (int set = 0; set < 2; set++) {
                __m512i last = _mm512_loadu_si512(secrets[set] + SECRET_BYTES - STRIPE_BYTES);
                __m512i x = _mm512_xor_si512(lane[set], _mm512_srli_epi64(lane[set], 47));
                x = _mm512_xor_si512(x, last);
                __m512i low = _mm512_mul_epu32(x, prime);
                __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), prime);
                lane[set] = _mm512_add_epi64(low, _mm512_slli_epi64(high, 32));
            }
    }
    _mm512_storeu_si512(one, lane[0]);
    _mm512_storeu_si512(other, lane[1]);
}
#elif defined(__aarch64__)
static void pair_neon(uint64_t *one, uint64_t *other, const uint8_t *in, int64_t stripes,
                      const uint8_t *secret_one, const uint8_t *secret_other)
{
    uint64x2_t lane[8];
    UNROLLED for (int i = 0; i < 4; i++) {
        lane[i] = vld1q_u64(one + 2 * i);
        lane[4 + i] = vld1q_u64(other + 2 * i);
    }
    for (int64_t n = 0; n < stripes; n++, in += STRIPE_BYTES) {
        const uint8_t *key_one = secret_one + n % STRIPES * 8;
        const uint8_t *key_other = secret_other + n % STRIPES * 8;
        __builtin_prefetch(in + READ_AHEAD_BYTES);
        UNROLLED for (int i = 0; i < 4; i += 2) {
            uint64x2_t first = read_two64(in + 16 * i), second = read_two64(in + 16 * i + 16);
            add_four(lane + i, first, second, key_one + 16 * i);
            add_four(lane + 4 + i, first, second, key_other + 16 * i);
        }
        if (n % STRIPES == STRIPES - 1)
            UNROLLED for (int i = 0; i < 4; i++) {
                int last = SECRET_BYTES - STRIPE_BYTES + 16 * i;
                lane[i] = scrambled(lane[i], secret_one + last);
                lane[4 + i] = scrambled(lane[4 + i], secret_other + last);
            }
    }
    UNROLLED for (int i = 0; i < 4; i++) {
        vst1q_u64(one + 2 * i, lane[i]);
        vst1q_u64(other + 2 * i, lane[4 + i]);
    }
}
#endif

static pair_t find_pair(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        return pair_avx512;
    if (__builtin_cpu_supports("avx2"))
        return pair_avx2;
#elif defined(__aarch64__)
    return pair_neon;
#endif
    return pair_plain;
}

static uint64_t end_of_sum(uint64_t *acc, const uint8_t *end, int64_t length, const uint8_t *secret)
{
    const uint8_t *key = secret + SECRET_BYTES - STRIPE_BYTES - 7;
    for (int i = 0; i < 8; i++) {
        uint64_t value = read64(end - STRIPE_BYTES + 8 * i), mixed = value ^ read64(key + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
    }
    uint64_t sum = (uint64_t)length * P64_1;
    for (int i = 0; i < 4; i++)
        sum += fold(acc[2 * i] ^ read64(secret + 11 + 16 * i),
                    acc[2 * i + 1] ^ read64(secret + 19 + 16 * i));
    return mixed_end(sum);
}

__attribute__((noinline)) static void short_pair(const uint8_t *in, int64_t length,
                                                 const uint64_t *seeds, uint64_t *sums)
{
    for (int set = 0; set < 2; set++)
        sums[set] = xxh3_short(in, length, seeds[set]);
}

/* Of more than 240 bytes. */
static void xxh3_pair(const uint8_t *in, int64_t length, const uint64_t *seeds, uint64_t *sums,
                      pair_t pair)
{
    uint64_t acc[2][8], words[2][SECRET_BYTES / 8];
    static const uint64_t begin[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    for (int set = 0; set < 2; set++) {
        memcpy(acc[set], begin, sizeof begin);
        for (int i = 0; i < SECRET_BYTES / 8; i += 2) {
            words[set][i] = secret_words[i] + seeds[set];
            words[set][i + 1] = secret_words[i + 1] - seeds[set];
        }
    }
    pair(acc[0], acc[1], in, (length - 1) / STRIPE_BYTES, (const uint8_t *)words[0],
         (const uint8_t *)words[1]);
    for (int set = 0; set < 2; set++)
        sums[set] = end_of_sum(acc[set], in + length, length, (const uint8_t *)words[set]);
}

/* mix64, as `checksums.py` defines it, sixteen words at a time. The compiler makes of the vectors
   what the processor has. */
#define MIX_C0 0x9E3779B1U
#define MIX_C1 0x85EBCA77U
#define MIX_M0 0x7FEB352DU
#define MIX_M1 0x846CA68BU
#define MIX_M2 0xC2B2AE3DU
#define MIX_WORDS 16

typedef uint32_t words_t __attribute__((vector_size(4 * MIX_WORDS), may_alias));

static const words_t mix_steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

#define MIX_WORD(WORD, SEED)                                                                       \
    words_t x = (WORD) ^ (at_c0 + (uint32_t)(SEED));                                               \
    x = (x ^ x >> 11) * MIX_M0;                                                                    \
    x = (x ^ x >> 15) * MIX_M1;                                                                    \
    words_t term0 = x ^ x >> 15;                                                                   \
    x = (term0 ^ (at_c1 + (uint32_t)((SEED) >> 32))) * MIX_M2;                                     \
    words_t term1 = x ^ x >> 16

/* A macro, since a function would be made for the least processor before it is inlined. SETS is the
   number of seeds. */
#define DEFINE_MIX64(NAME, SETS)                                                                   \
    static void NAME(const uint8_t *in, int64_t length, const uint64_t *seeds, uint64_t *sums)     \
    {                                                                                              \
        words_t low[SETS] = {{0}}, high[SETS] = {{0}};                                             \
        words_t at_c0 = mix_steps * MIX_C0, at_c1 = mix_steps * MIX_C1;                            \
        int64_t words = (length + 3) / 4, at = 0;                                                  \
        for (; (at + MIX_WORDS) * 4 <= length; at += MIX_WORDS) {                                  \
            words_t word;                                                                          \
            memcpy(&word, in + at * 4, sizeof word);                                               \
            for (int set = 0; set < SETS; set++) {                                                 \
                MIX_WORD(word, seeds[set]);                                              \
                low[set] += term0;                                                                 \
                high[set] += term1;                                                                \
            }                                                                                      \
            at_c0 += MIX_WORDS * MIX_C0;                                                           \
            at_c1 += MIX_WORDS * MIX_C1;                                                           \
        }                                                                                          \
        /* What is left, and one more word: how many bytes there were. */                          \
        for (; at < words + 1; at += MIX_WORDS) {                                                  \
            words_t word = {0}, used = {0};                                                        \
            if (at * 4 < length)                                                                   \
                memcpy(&word, in + at * 4, (size_t)(length - at * 4));                             \
            for (int64_t i = 0; i < MIX_WORDS && at + i <= words; i++)                             \
                used[i] = ~0U;                                                                     \
            if (words - at < MIX_WORDS)                                                            \
                word[words - at] = (uint32_t)length;                                               \
            for (int set = 0; set < SETS; set++) {                                                 \
                MIX_WORD(word, seeds[set]);                                              \
                low[set] += term0 & used;                                                          \
                high[set] += term1 & used;                                                         \
            }                                                                                      \
            at_c0 += MIX_WORDS * MIX_C0;                                                           \
            at_c1 += MIX_WORDS * MIX_C1;                                                           \
        }                                                                                          \
        for (int set = 0; set < SETS; set++) {                                                     \
            uint32_t sum_low = 0, sum_high = 0;                                                    \
            for (int i = 0; i < MIX_WORDS; i++) {                                                  \
                sum_low += low[set][i];                                                            \
                sum_high += high[set][i];                                                          \
            }                                                                                      \
            sums[set] = (uint64_t)sum_high << 32 | sum_low;                                        \
        }                                                                                          \
    }

typedef void (*mix64_t)(const uint8_t *, int64_t, const uint64_t *, uint64_t *);

DEFINE_MIX64(mix64_pair_plain, 2)
DEFINE_MIX64(mix64_one_plain, 1)
#if defined(__x86_64__)
__attribute__((target("avx2"))) DEFINE_MIX64(mix64_pair_avx2, 2)
__attribute__((target("avx2"))) DEFINE_MIX64(mix64_one_avx2, 1)
__attribute__((target("avx512f"))) DEFINE_MIX64(mix64_pair_avx512, 2)
__attribute__((target("avx512f"))) DEFINE_MIX64(mix64_one_avx512, 1)
#endif

static mix64_t find_mix64(int is_pair)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        return is_pair ? mix64_pair_avx512 : mix64_one_avx512;
    if (__builtin_cpu_supports("avx2"))
        return is_pair ? mix64_pair_avx2 : mix64_one_avx2;
#endif
    return is_pair ? mix64_pair_plain : mix64_one_plain;
}

/* One segment under each of two seeds, by `mix64` or, if that is missing, by XXH3. */
static void sum_twice(const uint8_t *in, int64_t length, const uint64_t *seeds, uint64_t *found,
                      pair_t pair, mix64_t mix64)
{
    if (mix64)
        mix64(in, length, seeds, found);
    else if (length <= SHORT_BYTES)
        short_pair(in, length, seeds, found);
    else
        xxh3_pair(in, length, seeds, found, pair);
}

/* The cell sums of blocks in `memory`, each at its place, under each of two seeds of its key:
   `key_seeds` has `count` of one set, then `count` of the other, and so has `sums`. */
void penstock_sum_pairs(const segment_t *segments, int64_t segment_count, const uint64_t *key_seeds,
                        int64_t count, const uint8_t *memory, const int64_t *places, uint64_t *sums,
                        int64_t cells, int64_t is_mix64)
{
    pair_t pair = find_pair();
    mix64_t mix64 = find_mix64(1);
    memset(sums, 0, (size_t)(2 * count * cells) * 8);
    for (int64_t block = 0; block < count; block++)
        for (const segment_t *each = segments; each < segments + segment_count; each++) {
            const uint8_t *in = memory + places[block] + each->start;
            uint64_t found[2], seeds[2] = {seed_of(key_seeds[block], each->place),
                                           seed_of(key_seeds[count + block], each->place)};
            sum_twice(in, each->length, seeds, found, pair, is_mix64 ? mix64 : NULL);
            for (int set = 0; set < 2; set++)
                add_by_halves(sums + (set * count + block) * cells + each->cell, found[set]);
        }
}

/* The seeds of keys that lie one after the other: sums of a prefix and each key, as `checksums.py`
   defines them. In Python they take longer than all other work on a batch. `calls.py` checks that
   both together are no longer than SHORT_BYTES. */
void penstock_seeds(const uint8_t *prefix, int64_t prefix_bytes, const uint8_t *keys,
                    int64_t key_bytes, int64_t count, uint64_t *seeds)
{
    uint8_t input[SHORT_BYTES];
    memcpy(input, prefix, (size_t)prefix_bytes);
    for (int64_t n = 0; n < count; n++) {
        memcpy(input + prefix_bytes, keys + n * key_bytes, (size_t)key_bytes);
        seeds[n] = xxh3_short(input, prefix_bytes + key_bytes, 0);
    }
}

/* Copies packed blocks out of memory that another process may write meanwhile, and sums the copies:
   `right` are those that have the sums which lie at `expected` in that memory. They get their sums
   under the second seed. Of each block: where it and its sums lie there, and where here. */
void penstock_take_blocks(const segment_t *segments, int64_t segment_count, const uint64_t *key_seeds,
                          int64_t count, const uint8_t *from, uint8_t *to, const int64_t *places,
                          int64_t cells, int64_t is_mix64, uint64_t *room, uint8_t *right)
{
    pair_t pair = find_pair();
    mix64_t mix64 = find_mix64(1);
    size_t length = (size_t)cells * 8;
    for (int64_t block = 0; block < count; block++, places += 4) {
        memset(room, 0, 2 * length);
        for (const segment_t *each = segments; each < segments + segment_count; each++) {
            uint8_t *copy = to + places[2] + each->start;
            uint64_t found[2], seeds[2] = {seed_of(key_seeds[block], each->place),
                                           seed_of(key_seeds[count + block], each->place)};
            memcpy(copy, from + places[0] + each->start, (size_t)each->length);
            sum_twice(copy, each->length, seeds, found, pair, is_mix64 ? mix64 : NULL);
            for (int set = 0; set < 2; set++)
                add_by_halves(room + set * cells + each->cell, found[set]);
        }
        right[block] = !memcmp(room, from + places[1], length);
        if (right[block])
            memcpy(to + places[3], room + cells, length);
    }
}
