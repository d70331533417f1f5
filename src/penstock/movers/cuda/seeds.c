/* The seeds of a batch's keys: XXH3-64 of a prefix and each key, as checksums.py defines them.
 *
 * In Python they take longer than all other work on a batch together. XXH3 treats inputs of 17
 * to 128 bytes in a way of its own, which is all that is written here; whoever has other keys
 * takes the way of checksums.py. The one rule: the numbers are those of XXH3, bit for bit.
 */
#include <stdint.h>
#include <string.h>

enum { SHORTEST = 17, LONGEST = 128, STRIPE = 16 };

/* The first half of the constant that XXH3 calls its default secret. */
static const unsigned char secret[LONGEST] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
};

static uint64_t number_at(const unsigned char *bytes)
{
    uint64_t number;
    memcpy(&number, bytes, sizeof number);      /* Little-endian, as wherever CUDA runs. */
    return number;
}

/* Both halves of the product of 16 bytes of input and of the secret. */
static uint64_t mixed(const unsigned char *input, const unsigned char *with)
{
    unsigned __int128 product = (unsigned __int128)(number_at(input) ^ number_at(with)) *
                                (number_at(input + 8) ^ number_at(with + 8));
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Stripes from both ends towards the middle, which overlap there. */
static uint64_t xxh3(const unsigned char *input, size_t length)
{
    uint64_t sum = length * 0x9E3779B185EBCA87u;
    for (size_t pair = 0; 2 * STRIPE * pair < length; pair++) {
        sum += mixed(input + STRIPE * pair, secret + 2 * STRIPE * pair);
        sum += mixed(input + length - STRIPE * (pair + 1), secret + 2 * STRIPE * pair + STRIPE);
    }
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9u;
    return sum ^ sum >> 32;
}

/* Writes the seeds of `count` keys that lie one after the other; returns how many it wrote. */
int penstock_seeds(const unsigned char *prefix, size_t prefix_bytes, const unsigned char *keys,
                   size_t key_bytes, size_t count, uint64_t *seeds)
{
    unsigned char input[LONGEST];
    size_t length = prefix_bytes + key_bytes;
    if (length < SHORTEST || length > LONGEST)
        return 0;
    memcpy(input, prefix, prefix_bytes);
    for (size_t number = 0; number < count; number++) {
        memcpy(input + prefix_bytes, keys + number * key_bytes, key_bytes);
        seeds[number] = xxh3(input, length);
    }
    return (int)count;
}
