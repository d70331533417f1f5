/* Makes the CUDA calls of a batch one after the other, without Python in between.
 *
 * Python writes down what is to be done as 64-bit words, an operation after the other (calls.py):
 *
 *     WAIT    stream event                      the stream waits for the event
 *     RECORD  stream event                      the event stands for the stream's work so far
 *     COPY    stream target source length       one DMA
 *     CLEAR   stream address length             zeros
 *     LAUNCH  stream function x y threads shared n argument...   a kernel of x * y programs
 *     FOLLOW  link event                        the next turn of the link waits for the event
 *     MARK    link event                        the event stands for all turns so far
 *     TURNS   link turn_bytes n (target source length)...        copies in turns, in order
 *     RING    stream descriptor                 an eventfd is readable when the stream gets there
 *
 * It decides nothing but where extents are cut into turns. The one rule:
 * the calls are made in the order in which they were written down, and none after one that failed.
 *
 * The driver is found at run time, so neither CUDA's headers nor its libraries are needed to
 * compile this.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

enum { WAIT = 1, RECORD, COPY, CLEAR, LAUNCH, FOLLOW, MARK, TURNS, RING };

enum {
    SUCCESS = 0,
    NOT_READY = 600,        /* CUDA_ERROR_NOT_READY */
    MALFORMED = 0xffff,     /* not of CUDA, whose errors are smaller: words that make no sense */
    ARGUMENTS_MAX = 32,     /* of a kernel; ours have up to 11 */
    EXTENTS_MAX = 1024,     /* of one turn; a batch has no more blocks than that */
    PAGE_BYTES = 4096,
};

typedef int64_t word;

/* Two streams that take turns; the first of each pair is that of the last turn. */
struct link {
    void *streams[2];
    void *ends[2];
};

/* CUmemcpyAttributes. */
struct copy_attributes {
    int source_order;       /* 1: the source is read in the order of the stream */
    int source_hint[2];
    int target_hint[2];
    unsigned flags;
};

static struct {
    int (*wait)(void *stream, void *event, unsigned flags);
    int (*record)(void *event, void *stream);
    int (*query)(void *event);
    int (*copy)(uint64_t target, uint64_t source, size_t length, void *stream);
    int (*clear)(uint64_t address, unsigned char value, size_t length, void *stream);
    int (*launch)(void *function, unsigned x, unsigned y, unsigned z, unsigned threads,
                  unsigned threads_y, unsigned threads_z, unsigned shared, void *stream,
                  void **arguments, void **extra);
    int (*host)(void *stream, void (*function)(void *), void *argument);
    int (*parameter)(void *function, size_t number, size_t *offset, size_t *length);
    /* The second form came with CUDA 13; without either, extents are copied one by one. */
    int (*copy_batch)(uint64_t *targets, uint64_t *sources, size_t *lengths, size_t count,
                      struct copy_attributes *attributes, size_t *firsts, size_t kinds,
                      size_t *failed, void *stream);
    int (*copy_batch_2)(uint64_t *targets, uint64_t *sources, size_t *lengths, size_t count,
                        struct copy_attributes *attributes, size_t *firsts, size_t kinds,
                        void *stream);
} cuda;

/* Finds the driver's functions. Returns how many it lacks; -1 if it is not there. */
int penstock_open(const char *library)
{
    void *driver = dlopen(library, RTLD_NOW);
    if (!driver)
        return -1;
    int missing = 0;
#define FIND(member, name) missing += !(*(void **)&cuda.member = dlsym(driver, name))
    FIND(wait, "cuStreamWaitEvent");
    FIND(record, "cuEventRecord");
    FIND(query, "cuEventQuery");
    FIND(copy, "cuMemcpyAsync");
    FIND(clear, "cuMemsetD8Async");
    FIND(launch, "cuLaunchKernel");
    FIND(host, "cuLaunchHostFunc");
    FIND(parameter, "cuFuncGetParamInfo");
#undef FIND
    *(void **)&cuda.copy_batch = dlsym(driver, "cuMemcpyBatchAsync");
    *(void **)&cuda.copy_batch_2 = dlsym(driver, "cuMemcpyBatchAsync_v2");
    return missing;
}

/* How many parameters a compiled kernel takes. */
int penstock_parameters(void *function)
{
    size_t offset, length;
    int count = 0;
    while (count < ARGUMENTS_MAX && cuda.parameter(function, count, &offset, &length) == SUCCESS)
        count++;
    return count;
}

/* How many of these events, which are reached in order, were; an error as a negative number. */
int penstock_reached(const word *events, word count)
{
    int number = 0;
    for (; number < count; number++) {
        int status = cuda.query((void *)events[number]);
        if (status == NOT_READY)
            break;
        if (status != SUCCESS)
            return -status;
    }
    return number;
}

static int copy_extents(uint64_t *targets, uint64_t *sources, size_t *lengths, size_t count,
                        void *stream)
{
    struct copy_attributes in_order = {.source_order = 1};
    size_t first = 0, failed;
    if (count > 1 && cuda.copy_batch_2)
        return cuda.copy_batch_2(targets, sources, lengths, count, &in_order, &first, 1, stream);
    if (count > 1 && cuda.copy_batch)
        return cuda.copy_batch(targets, sources, lengths, count, &in_order, &first, 1, &failed,
                               stream);
    int status = SUCCESS;
    for (size_t number = 0; number < count && status == SUCCESS; number++)
        status = cuda.copy(targets[number], sources[number], lengths[number], stream);
    return status;
}

/* What is copied before another stream may have the link. */
struct turn {
    size_t count;
    size_t room;
    uint64_t targets[EXTENTS_MAX], sources[EXTENTS_MAX];
    size_t lengths[EXTENTS_MAX];
};

/* Takes a turn in the stream that did not have the last one, behind that one. */
static int take_turn(struct link *link, struct turn *turn)
{
    if (turn->count == 0)
        return SUCCESS;
    void *stream = link->streams[1], *before = link->ends[0], *end = link->ends[1];
    int status = cuda.wait(stream, before, 0);
    if (status == SUCCESS)
        status = copy_extents(turn->targets, turn->sources, turn->lengths, turn->count, stream);
    if (status == SUCCESS)
        status = cuda.record(end, stream);
    link->streams[1] = link->streams[0];
    link->streams[0] = stream;
    link->ends[1] = before;
    link->ends[0] = end;
    turn->count = 0;
    return status;
}

/* An extent longer than a turn goes in about equal parts, of whole pages where they can be. */
static size_t part_bytes(size_t length, size_t turn_bytes)
{
    if (length <= turn_bytes)
        return length;
    size_t parts = (length + turn_bytes - 1) / turn_bytes;
    size_t step = (length + parts - 1) / parts;
    size_t in_pages = (step + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    return in_pages <= turn_bytes ? in_pages : step;
}

static int copy_in_turns(struct link *link, size_t turn_bytes, const word *extents, word count)
{
    struct turn turn;
    turn.count = turn.room = 0;
    int status = SUCCESS;
    for (word number = 0; number < count; number++) {
        uint64_t target = extents[3 * number], source = extents[3 * number + 1];
        size_t length = extents[3 * number + 2], step = part_bytes(length, turn_bytes);
        for (size_t at = 0; at < length; at += step) {
            size_t part = length - at < step ? length - at : step;
            if (part > turn.room || turn.count == EXTENTS_MAX) {
                if ((status = take_turn(link, &turn)) != SUCCESS)
                    return status;
                turn.room = turn_bytes;
            }
            turn.targets[turn.count] = target + at;
            turn.sources[turn.count] = source + at;
            turn.lengths[turn.count++] = part;
            turn.room -= part;
        }
    }
    return take_turn(link, &turn);
}

/* Runs in a thread of the driver, without the interpreter. An eventfd that is full is readable. */
static void ring(void *descriptor)
{
    uint64_t one = 1;
    ssize_t written = write((int)(intptr_t)descriptor, &one, sizeof one);
    (void)written;
}

static int launch(const word *at)
{
    void *arguments[ARGUMENTS_MAX];
    if (at[6] > ARGUMENTS_MAX)
        return MALFORMED;
    /* Little-endian: a parameter of 32 bits is the first half of its word. */
    for (word number = 0; number < at[6]; number++)
        arguments[number] = (void *)&at[7 + number];
    return cuda.launch((void *)at[1], at[2], at[3], 1, at[4], 1, 1, at[5], (void *)at[0],
                       arguments, NULL);
}

/* Makes the calls. Returns 0, or the error of the one that failed, with where it is written in
 * the bits above the 16th. */
word penstock_make(const word *words, word count)
{
    int status = SUCCESS;
    word at = 0, began = 0;
    while (at < count && status == SUCCESS) {
        const word *one = words + at + 1;
        began = at;
        switch (words[at]) {
        case WAIT:
            status = cuda.wait((void *)one[0], (void *)one[1], 0);
            at += 3;
            break;
        case RECORD:
            status = cuda.record((void *)one[1], (void *)one[0]);
            at += 3;
            break;
        case COPY:
            status = cuda.copy(one[1], one[2], one[3], (void *)one[0]);
            at += 5;
            break;
        case CLEAR:
            status = cuda.clear(one[1], 0, one[2], (void *)one[0]);
            at += 4;
            break;
        case LAUNCH:
            status = launch(one);
            at += 8 + one[6];
            break;
        case FOLLOW:
            status = cuda.wait(((struct link *)one[0])->streams[1], (void *)one[1], 0);
            at += 3;
            break;
        case MARK:
            status = cuda.record((void *)one[1], ((struct link *)one[0])->streams[0]);
            at += 3;
            break;
        case TURNS:
            status = copy_in_turns((struct link *)one[0], one[1], one + 3, one[2]);
            at += 4 + 3 * one[2];
            break;
        case RING:
            status = cuda.host((void *)one[0], ring, (void *)one[1]);
            at += 3;
            break;
        default:
            status = MALFORMED;
        }
    }
    return status == SUCCESS ? 0 : began << 16 | status;
}
