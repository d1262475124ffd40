/* A test double of 3FS's libhf3fs_api_shared.so: the same C interface over any files.
 *
 * A "3FS" is a directory with a directory `3fs-virt` in it. Its file `3fs-virt/double` says how the double
 * behaves, one word and a number a line; it is read at every call:
 *   short N       answers bring at most N bytes
 *   errno N       answers are -N
 *   errno_every N only every Nth answer is (with errno)
 *   generation N  rings of another generation than this get no answers: their daemon is gone
 *   full N        a ring takes no more than N requests
 *   delay_ms N    answers come so late
 *   no_ring N     making a ring fails with -N
 * What happened is counted in `3fs-virt/count`: one letter each, R a ring was made, r an answer was given.
 *
 * It checks what the real library demands: registered descriptors, buffers inside the shared memory, no
 * request across the border of a block, the right direction, one thread at a time.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct hf3fs_iov {
  uint8_t *base;
  void *iovh;
  char id[16];
  char mount_point[256];
  size_t size;
  size_t block_size;
  int numa;
};

struct hf3fs_ior {
  struct hf3fs_iov iov;
  void *iorh;
  char mount_point[256];
  bool for_read;
  int io_depth;
  int priority;
  int timeout;
  uint64_t flags;
};

struct hf3fs_cqe {
  int32_t index;
  int32_t reserved;
  int64_t result;
  const void *userdata;
};

struct request {
  void *to;
  int fd;
  size_t offset;
  uint64_t length;
  const void *userdata;
};

struct ring {
  int entries;
  int prepared;
  int submitted;
  long generation;
  atomic_int users;
  struct request requests[];
};

#define MAX_FDS 65536
static atomic_bool registered[MAX_FDS];
static atomic_long answers;

static long setting(const char *mount, const char *word, long otherwise) {
  char path[512], found[64];
  long value, result = otherwise;
  snprintf(path, sizeof path, "%s/3fs-virt/double", mount);
  FILE *file = fopen(path, "re");
  if (!file) return otherwise;
  while (fscanf(file, "%63s %ld", found, &value) == 2)
    if (!strcmp(found, word)) result = value;
  fclose(file);
  return result;
}

static void count(const char *mount, char what) {
  char path[512];
  snprintf(path, sizeof path, "%s/3fs-virt/count", mount);
  int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return;
  if (write(fd, &what, 1) != 1) abort();
  close(fd);
}

int hf3fs_extract_mount_point(char *out, int size, const char *path) {
  char parent[512], virtual[600];
  struct stat found;
  if (!realpath(path, parent)) return -1;
  for (;;) {
    snprintf(virtual, sizeof virtual, "%s/3fs-virt", parent);
    if (!stat(virtual, &found) && S_ISDIR(found.st_mode)) break;
    char *slash = strrchr(parent, '/');
    if (!slash || slash == parent) return -1;
    *slash = 0;
  }
  int length = (int)strlen(parent) + 1;
  if (length <= size) memcpy(out, parent, length);
  return length;
}

int hf3fs_iovcreate(struct hf3fs_iov *iov, const char *mount, size_t size, size_t block_size, int numa) {
  memset(iov, 0, sizeof *iov);
  iov->base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (iov->base == MAP_FAILED) return -errno;
  snprintf(iov->mount_point, sizeof iov->mount_point, "%s", mount);
  iov->size = size;
  iov->block_size = block_size;
  iov->numa = numa;
  return 0;
}

void hf3fs_iovdestroy(struct hf3fs_iov *iov) {
  munmap(iov->base, iov->size);
  memset(iov, 0, sizeof *iov);
}

int hf3fs_iorcreate4(struct hf3fs_ior *ior, const char *mount, int entries, bool for_read, int io_depth,
                     int timeout, int numa, uint64_t flags) {
  (void)numa;
  long refused = setting(mount, "no_ring", 0);
  if (refused) return -(int)refused;
  if (!(flags & 2)) return -EINVAL; /* ours always forbids reading holes */
  memset(ior, 0, sizeof *ior);
  struct ring *ring = calloc(1, sizeof *ring + entries * sizeof(struct request));
  if (!ring) return -ENOMEM;
  ring->entries = entries;
  ring->generation = setting(mount, "generation", 0);
  ior->iorh = ring;
  snprintf(ior->mount_point, sizeof ior->mount_point, "%s", mount);
  ior->for_read = for_read;
  ior->io_depth = io_depth;
  ior->timeout = timeout;
  ior->flags = flags;
  count(mount, 'R');
  return 0;
}

void hf3fs_iordestroy(struct hf3fs_ior *ior) {
  free(ior->iorh);
  ior->iorh = NULL;
}

int hf3fs_reg_fd(int fd, uint64_t flags) {
  (void)flags;
  if (fd < 0 || fd >= MAX_FDS) return EBADF;
  if (atomic_exchange(&registered[fd], true)) return EINVAL;
  return -fd;
}

void hf3fs_dereg_fd(int fd) {
  if (fd >= 0 && fd < MAX_FDS) atomic_store(&registered[fd], false);
}

int hf3fs_prep_io(const struct hf3fs_ior *ior, const struct hf3fs_iov *iov, bool read, void *ptr, int fd,
                  size_t offset, uint64_t length, const void *userdata) {
  struct ring *ring = ior->iorh;
  if (atomic_fetch_add(&ring->users, 1)) abort(); /* two threads in one ring */
  int result;
  size_t start = (uint8_t *)ptr - iov->base;
  long room = setting(ior->mount_point, "full", ring->entries);
  if (read != ior->for_read) result = -EACCES;
  else if (fd < 0 || fd >= MAX_FDS || !atomic_load(&registered[fd])) result = -EBADF;
  else if (start > iov->size || length > iov->size - start) result = -EINVAL;
  else if (iov->block_size && start / iov->block_size != (start + length - 1) / iov->block_size) result = -EINVAL;
  else if (ring->prepared >= room) result = -EAGAIN;
  else {
    ring->requests[ring->prepared] = (struct request){ptr, fd, offset, length, userdata};
    result = ring->prepared++;
  }
  atomic_fetch_sub(&ring->users, 1);
  return result;
}

int hf3fs_submit_ios(const struct hf3fs_ior *ior) {
  struct ring *ring = ior->iorh;
  ring->submitted = ring->prepared;
  return 0;
}

int hf3fs_wait_for_ios(const struct hf3fs_ior *ior, struct hf3fs_cqe *cqes, int cqec, int min_results,
                       const struct timespec *abs_timeout) {
  struct ring *ring = ior->iorh;
  const char *mount = ior->mount_point;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  /* A deadline on another clock would be long past, or far away. */
  if (abs_timeout->tv_sec < now.tv_sec || abs_timeout->tv_sec > now.tv_sec + 3600) return -EINVAL;
  if (ring->generation != setting(mount, "generation", 0)) return -ETIMEDOUT;
  if (ring->submitted < min_results) return -ETIMEDOUT;
  long delay = setting(mount, "delay_ms", 0);
  if (delay) usleep(delay * 1000);
  long most = setting(mount, "short", INT32_MAX), wrong = setting(mount, "errno", 0);
  long every = setting(mount, "errno_every", 1);
  int done = 0;
  /* The last first, as answers come in any order. */
  while (done < cqec && ring->submitted > 0) {
    struct request *request = &ring->requests[--ring->submitted];
    uint64_t length = request->length < (uint64_t)most ? request->length : (uint64_t)most;
    int64_t result = pread(request->fd, request->to, length, (off_t)request->offset);
    if (result < 0) result = -errno;
    if (wrong && atomic_fetch_add(&answers, 1) % every == 0) result = -wrong;
    cqes[done++] = (struct hf3fs_cqe){ring->submitted, 0, result, request->userdata};
    count(mount, 'r');
  }
  ring->prepared = ring->submitted;
  return done;
}
