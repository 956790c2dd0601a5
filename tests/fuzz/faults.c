// Fails calls that write, for tests: built with `cc -shared -fPIC`, loaded with LD_PRELOAD. Counts
// calls on files whose path begins with a prefix; one of them fails, or writes half of its bytes.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { WRITE, FSYNC, RENAME, OPEN, CHMOD, CALLS };
static char prefix[1024];
static int wanted = -1, error_wanted;
static long at, every, count[CALLS];

// Fail call number `n` of kind `call` with `error` (0: write half), all from then on if `always`.
void faults_arm(const char* below, int call, long n, int error, int always) {
  strncpy(prefix, below, sizeof prefix - 1);
  memset(count, 0, sizeof count);
  wanted = call, at = n, error_wanted = error, every = always;
}

long faults_count(int call) { return count[call]; }

static int ours(const char* path) { return *prefix && !strncmp(path, prefix, strlen(prefix)); }

static int ours_open(int fd) {
  char link[64], path[1024];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return ours(path);
}

static int now(int call) {
  const long n = ++count[call];
  return call == wanted && (n == at || (every && n > at));
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void* data, size_t size) {
  REAL(write);
  if (ours_open(fd) && now(WRITE)) {
    if (error_wanted) return errno = error_wanted, -1;
    if (size > 1) size /= 2;
  }
  return real(fd, data, size);
}

int fsync(int fd) {
  REAL(fsync);
  if (ours_open(fd) && now(FSYNC)) return errno = error_wanted ? error_wanted : EIO, -1;
  return real(fd);
}

int rename(const char* from, const char* to) {
  REAL(rename);
  if (ours(to) && now(RENAME)) return errno = error_wanted ? error_wanted : EIO, -1;
  return real(from, to);
}

int open64(const char* path, int flags, ...) {
  REAL(open64);
  va_list more;
  va_start(more, flags);
  const int mode = va_arg(more, int);
  va_end(more);
  if (flags & O_CREAT && ours(path) && now(OPEN))
    return errno = error_wanted ? error_wanted : EIO, -1;
  return real(path, flags, mode);
}

int chmod(const char* path, mode_t mode) {
  REAL(chmod);
  if (ours(path) && now(CHMOD)) return errno = error_wanted ? error_wanted : EIO, -1;
  return real(path, mode);
}
