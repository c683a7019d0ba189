/* Preloaded into a server: its wall clock is off by the seconds in the file that STOKER_CLOCK names. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset;

__attribute__((constructor)) static void open_offset(void) {
    const char *path = getenv("STOKER_CLOCK");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file >= 0) {
        void *page = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
        offset = page == MAP_FAILED ? NULL : page;
    }
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && offset && clock == CLOCK_REALTIME)
        now->tv_sec += *offset;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (out)
        *out = precise.tv_sec;
    return precise.tv_sec;
}
