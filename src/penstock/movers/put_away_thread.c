/* A thread that puts parts away, for `packing.py`. Compiled together with parts.c.

   It runs no Python and never asks for the interpreter's lock, so the engine's thread goes on
   meanwhile. Jobs are done in the order in which they were submitted.

   `bell` is an eventfd: readable from the end of a job until `penstock_thread_collect`. Who submits
   a job keeps all its memory until the job was collected. */

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#define JOBS 64 /* Not collected yet; `packing.py` has the same number. */

typedef struct {
    const strip_t *strips;
    int64_t strip_count;
    const segment_t *segments;
    int64_t segment_count;
    const int64_t *slots;
    const uint64_t *key_seeds;
    int64_t count;
    const uint8_t *packed;
    const int64_t *places;
    const uint64_t *expected;
    uint64_t *found;
    int64_t cells;
    uint8_t *scratch;
} job_t;

typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t submitted_more;
    int bell;
    int stops;
    uint64_t submitted;
    uint64_t done;
    uint64_t collected;
    job_t jobs[JOBS];
    int64_t results[JOBS];
} thread_t;

static void *work(void *given)
{
    thread_t *mine = given;
    pthread_mutex_lock(&mine->lock);
    for (;;) {
        while (mine->done == mine->submitted && !mine->stops)
            pthread_cond_wait(&mine->submitted_more, &mine->lock);
        if (mine->done == mine->submitted)
            break;
        const job_t *job = mine->jobs + mine->done % JOBS;
        pthread_mutex_unlock(&mine->lock);
        int64_t result =
            penstock_put_away(job->strips, job->strip_count, job->segments, job->segment_count,
                              job->slots, job->key_seeds, job->count, job->packed, job->places,
                              job->expected, job->found, job->cells, job->scratch);
        pthread_mutex_lock(&mine->lock);
        mine->results[mine->done % JOBS] = result;
        if (mine->done++ == mine->collected) {
            uint64_t one = 1;
            /* It cannot fail: the counter is 0, since the last ones were collected. */
            (void)!write(mine->bell, &one, sizeof one);
        }
    }
    pthread_mutex_unlock(&mine->lock);
    return NULL;
}

/* Starts a thread that takes no signals: those are for the interpreter's. NULL if there is none. */
void *penstock_thread_start(int bell)
{
    thread_t *made = calloc(1, sizeof *made);
    if (made == NULL)
        return NULL;
    made->bell = bell;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->submitted_more, NULL);
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    int failed = pthread_create(&made->thread, NULL, work, made);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free(made);
        return NULL;
    }
    return made;
}

/* Whether there was room for the job. */
int64_t penstock_thread_submit(thread_t *thread, const strip_t *strips, int64_t strip_count,
                               const segment_t *segments, int64_t segment_count,
                               const int64_t *slots, const uint64_t *key_seeds, int64_t count,
                               const uint8_t *packed, const int64_t *places,
                               const uint64_t *expected, uint64_t *found, int64_t cells,
                               uint8_t *scratch)
{
    job_t job = {strips, strip_count, segments, segment_count, slots,  key_seeds, count,
                 packed, places,      expected, found,         cells, scratch};
    pthread_mutex_lock(&thread->lock);
    int64_t room = thread->submitted - thread->collected < JOBS;
    if (room) {
        thread->jobs[thread->submitted++ % JOBS] = job;
        pthread_cond_signal(&thread->submitted_more);
    }
    pthread_mutex_unlock(&thread->lock);
    return room;
}

/* The results of the jobs that have ended since, in their order; returns how many. */
int64_t penstock_thread_collect(thread_t *thread, int64_t *results)
{
    pthread_mutex_lock(&thread->lock);
    int64_t count = 0;
    for (; thread->collected < thread->done; count++)
        results[count] = thread->results[thread->collected++ % JOBS];
    uint64_t rung;
    if (count)
        (void)!read(thread->bell, &rung, sizeof rung);
    pthread_mutex_unlock(&thread->lock);
    return count;
}

/* Ends the thread, after it has done what was submitted. */
void penstock_thread_stop(thread_t *thread)
{
    pthread_mutex_lock(&thread->lock);
    thread->stops = 1;
    pthread_cond_signal(&thread->submitted_more);
    pthread_mutex_unlock(&thread->lock);
    pthread_join(thread->thread, NULL);
    pthread_cond_destroy(&thread->submitted_more);
    pthread_mutex_destroy(&thread->lock);
    free(thread);
}
