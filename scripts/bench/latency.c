/* Simulates a slow disk for the program that preloads it (bench_input.py --latency). It adds
 * LATENCY_US microseconds to each open and stat by name, and to each read that Linux's read-ahead
 * would not have served, if the path begins with one of LATENCY_PATHS (separated by colons). As on a
 * network disk, calls of several threads wait side by side. It covers the calls by which Python reads
 * image files and tar files. It does not cover preadv, or fopen and mmap, which C libraries may use.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define FILES 65536
#define READ_AHEAD (128 << 10) /* bytes, Linux's default; a longer read gets its full length */
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* For each open file: 0 if it is fast, else 1 + the offset up to which it has been read ahead. */
static off_t known[FILES];

static void wait_for_server(void) {
    const char *text = getenv("LATENCY_US");
    long us = text ? atol(text) : 0;
    struct timespec left = {us / 1000000, us % 1000000 * 1000};
    while (us && nanosleep(&left, &left) && errno == EINTR) {
    }
}

static int is_slow(const char *path) {
    const char *slow = getenv("LATENCY_PATHS");
    for (size_t length; slow && path; slow = slow[length] ? slow + length + 1 : NULL) {
        length = strcspn(slow, ":");
        if (length && !strncmp(path, slow, length))
            return 1;
    }
    return 0;
}

static void before_read(int file, off_t place, size_t count) {
    if (file < 0 || file >= FILES || place < 0 || !known[file])
        return;
    off_t end = known[file] - 1;
    if (place < end && place + (off_t)count <= end)
        return;
    wait_for_server();
    known[file] = 1 + place + (off_t)(count > READ_AHEAD ? count : READ_AHEAD);
}

#define OPEN(name)                                                            \
    int name(const char *path, int flags, ...) {                              \
        va_list more;                                                         \
        va_start(more, flags);                                                \
        mode_t mode = va_arg(more, int);                                      \
        va_end(more);                                                         \
        int slow = is_slow(path);                                             \
        if (slow)                                                             \
            wait_for_server();                                                \
        int file = REAL(name)(path, flags, mode);                             \
        if (file >= 0 && file < FILES)                                        \
            known[file] = slow;                                               \
        return file;                                                          \
    }
#define STAT(name, buffer)                                                    \
    int name(const char *path, struct buffer *status) {                       \
        if (is_slow(path))                                                    \
            wait_for_server();                                                \
        return REAL(name)(path, status);                                      \
    }
#define PREAD(name, offset)                                                   \
    ssize_t name(int file, void *data, size_t count, offset place) {          \
        before_read(file, place, count);                                      \
        return REAL(name)(file, data, count, place);                          \
    }
OPEN(open)
OPEN(open64)
STAT(stat, stat)
STAT(stat64, stat64)
PREAD(pread, off_t)
PREAD(pread64, off64_t)

ssize_t read(int file, void *data, size_t count) {
    before_read(file, lseek(file, 0, SEEK_CUR), count);
    return REAL(read)(file, data, count);
}
