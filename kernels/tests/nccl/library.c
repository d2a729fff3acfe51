/* A stand-in for NCCL of which ranks join at once, are refused, come late or never come, as the first byte of the
 * group's name says. Whoever comes late does so when rank 1 has joined at once. In a group named 's' the first operation
 * waits for ranks until the group is left. */
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef struct { char bytes[128]; } Id;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int joined, aborted, stuck;

int ncclGetVersion(int *version) {
    *version = 22809;
    return 0;
}

int ncclGetUniqueId(Id *id) {
    id->bytes[0] = 'n';
    return 0;
}

int ncclCommInitRank(void **group, int world, Id id, int rank) {
    if (id.bytes[0] == 'r') return 2;
    if (id.bytes[0] == 'a')
        for (;;) pause();
    pthread_mutex_lock(&lock);
    if (id.bytes[0] == 'l')
        while (!joined) pthread_cond_wait(&changed, &lock);
    else
        joined = 1;
    stuck = id.bytes[0] == 's';
    *group = malloc(1);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return 0;
}

int ncclCommAbort(void *group) {
    pthread_mutex_lock(&lock);
    free(group);
    aborted++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Of the tests: returns when so many have left, or after a minute; how many have. */
int await_aborts(int count) {
    struct timespec end = {time(NULL) + 60, 0};
    pthread_mutex_lock(&lock);
    while (aborted < count && !pthread_cond_timedwait(&changed, &lock, &end)) {}
    int left = aborted;
    pthread_mutex_unlock(&lock);
    return left;
}

int ncclCommDestroy(void *group) { return 1; }
int ncclCommGetAsyncError(void *group, int *status) { return 1; }
const char *ncclGetErrorString(int status) { return status == 2 ? "unhandled system error" : "no error"; }
int ncclAllGather(const void *from, void *to, size_t n, int kind, void *group, void *stream) {
    pthread_mutex_lock(&lock);
    int before = aborted;
    while (stuck && aborted == before) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return stuck ? 6 : 0;
}
int ncclReduceScatter(const void *from, void *to, size_t n, int kind, int op, void *group, void *stream) { return 1; }
int ncclAllReduce(const void *from, void *to, size_t n, int kind, int op, void *group, void *stream) { return 1; }
