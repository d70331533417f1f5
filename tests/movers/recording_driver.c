/* Stands in for the CUDA driver where there is no GPU: writes down the calls it is given. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

static char told[1 << 20];
static size_t at;
static int countdown = -1;      /* Calls until one fails; none while negative. */

const char *recorded(void) { return told; }
void forget(void) { at = 0; told[0] = 0; countdown = -1; }
void fail_after(int calls) { countdown = calls; }

#define TELL(...) (at += snprintf(told + at, sizeof told - at, __VA_ARGS__))
static int answer(void) { return countdown >= 0 && countdown-- == 0 ? 700 : 0; }

int cuStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    TELL("wait %zu %zu %u\n", (size_t)stream, (size_t)event, flags);
    return answer();
}
int cuEventRecord(void *event, void *stream)
{
    TELL("record %zu %zu\n", (size_t)event, (size_t)stream);
    return answer();
}
/* Events up to 100 are reached, those from 900 on are broken. */
int cuEventQuery(void *event) { return (size_t)event >= 900 ? 719 : (size_t)event > 100 ? 600 : 0; }
int cuMemcpyAsync(uint64_t target, uint64_t source, size_t length, void *stream)
{
    TELL("copy %zu %zu %zu %zu\n", (size_t)target, (size_t)source, length, (size_t)stream);
    return answer();
}
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t length, void *stream)
{
    TELL("clear %zu %u %zu %zu\n", (size_t)address, value, length, (size_t)stream);
    return answer();
}
/* A function's number is how many parameters it takes: the last of 32 bits, the others of 64. */
int cuFuncGetParamInfo(void *function, size_t number, size_t *offset, size_t *length)
{
    *offset = 8 * number;
    *length = number + 1 == (size_t)function ? 4 : 8;
    return number < (size_t)function ? 0 : 1;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads,
                   unsigned threads_y, unsigned threads_z, unsigned shared, void *stream,
                   void **arguments, void **extra)
{
    TELL("launch %zu %u,%u,%u %u,%u,%u %u %zu %d:", (size_t)function, x, y, z, threads, threads_y,
         threads_z, shared, (size_t)stream, extra != NULL);
    size_t count = (size_t)function;
    for (size_t number = 0; number + 1 < count; number++)
        TELL(" %lld", (long long)*(int64_t *)arguments[number]);
    TELL(" %d\n", *(int32_t *)arguments[count - 1]);
    return answer();
}
int cuLaunchHostFunc(void *stream, void (*function)(void *), void *argument)
{
    TELL("host %zu %zu\n", (size_t)stream, (size_t)argument);
    function(argument);
    return answer();
}
#ifndef WITHOUT_BATCHES
int cuMemcpyBatchAsync_v2(uint64_t *targets, uint64_t *sources, size_t *lengths, size_t count,
                          int *attributes, size_t *firsts, size_t kinds, void *stream)
{
    TELL("batch %zu in order %d from %zu of %zu:", (size_t)stream, attributes[0], firsts[0], kinds);
    for (size_t number = 0; number < count; number++)
        TELL(" %zu<%zu:%zu", (size_t)targets[number], (size_t)sources[number], lengths[number]);
    TELL("\n");
    return answer();
}
#endif
