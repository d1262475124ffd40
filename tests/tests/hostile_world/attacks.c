// What hostile code tries from inside a sandbox: one function for each behaviour. Prints what worked, one
// line each, and nothing when everything was refused. Static; needs no file of the image.
//
//   attacks NAME [ARGUMENTS]

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static void worked(const char *what) { printf("%s\n", what); }

// The extents of two files change places: what one holds becomes the content of the other.
struct xfs_time { int64_t seconds; int32_t nanos; int32_t pad; };
struct xfs_stat {
    uint64_t ino; uint16_t mode, nlink; uint32_t uid, gid, rdev; int32_t blksize; int64_t size;
    struct xfs_time atime, mtime, ctime; int64_t blocks; uint32_t xflags; int32_t extsize, extents;
    uint32_t gen; uint16_t projid_lo, forkoff, projid_hi; uint8_t pad[6]; uint32_t cowextsize, dmevmask;
    uint16_t dmstate, aextents;
};
struct xfs_swapext {
    int64_t version, fdtarget, fdtmp, offset, length; char pad[16]; struct xfs_stat stat;
};
static int swap_extents(int argc, char **argv) {
    if (argc < 2) return 2;
    struct stat known;
    int one = open(argv[0], O_RDWR), other = open(argv[1], O_RDWR);
    if (one < 0 || other < 0 || fstat(one, &known) < 0) { perror("open"); return 2; }
    struct xfs_swapext swap = { .version = 0, .fdtarget = one, .fdtmp = other, .length = known.st_size };
    swap.stat.ino = known.st_ino;
    swap.stat.size = known.st_size;
    swap.stat.mtime = (struct xfs_time){ known.st_mtim.tv_sec, known.st_mtim.tv_nsec, 0 };
    swap.stat.ctime = (struct xfs_time){ known.st_ctim.tv_sec, known.st_ctim.tv_nsec, 0 };
    if (ioctl(one, _IOWR('X', 109, struct xfs_swapext), &swap) == 0) worked("extents were swapped");
    else printf("errno %d\n", errno);
    return 0;
}

static int connect_to(const struct sockaddr *address, socklen_t length, int kind) {
    int fd = socket(address->sa_family, kind | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    int result = connect(fd, address, length);
    if (result < 0 && errno == EINPROGRESS) {
        struct pollfd wait = { .fd = fd, .events = POLLOUT };
        int error = ETIMEDOUT; socklen_t size = sizeof error;
        if (poll(&wait, 1, 300) > 0) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
        result = error ? -1 : 0;
    }
    if (result == 0) {
        // Something that a daemon of ours would answer.
        send(fd, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24, MSG_NOSIGNAL);
    }
    close(fd);
    return result;
}

// An abstract name that somebody on the host listens at.
static int abstract_socket(int argc, char **argv) {
    if (argc < 1) return 2;
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    strncpy(address.sun_path + 1, argv[0], sizeof address.sun_path - 2);
    socklen_t length = offsetof(struct sockaddr_un, sun_path) + 1 + strlen(argv[0]);
    int kinds[] = { SOCK_STREAM, SOCK_SEQPACKET, SOCK_DGRAM };
    for (int i = 0; i < 3; i++)
        if (connect_to((struct sockaddr *)&address, length, kinds[i]) == 0) worked("an abstract socket answers");
    return 0;
}

// Every socket in the file system, and every one that the kernel lists.
static int visit_socket(const char *path, const struct stat *stat, int kind, struct FTW *state) {
    (void)kind; (void)state;
    if (!S_ISSOCK(stat->st_mode)) return 0;
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    if (connect_to((struct sockaddr *)&address, sizeof address, SOCK_STREAM) == 0) worked(path);
    return 0;
}
static int every_socket(int argc, char **argv) {
    (void)argc; (void)argv;
    nftw("/", visit_socket, 64, FTW_PHYS);
    FILE *list = fopen("/proc/net/unix", "r");
    char line[512];
    while (list && fgets(line, sizeof line, list))
        if (!strstr(line, "Inode")) worked(line);
    return 0;
}

// What is beyond the sandbox, by every protocol; and every port of its own loopback.
static int scan(int argc, char **argv) {
    (void)argc; (void)argv;
    const char *hosts[] = { "1.1.1.1", "8.8.8.8", "169.254.169.254", "10.0.0.1", "172.17.0.1", "192.168.0.1" };
    int ports[] = { 22, 53, 80, 443, 8080 };
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++)
        for (size_t j = 0; j < sizeof ports / sizeof *ports; j++) {
            struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(ports[j]) };
            inet_pton(AF_INET, hosts[i], &to.sin_addr);
            if (connect_to((struct sockaddr *)&to, sizeof to, SOCK_STREAM) == 0) worked(hosts[i]);
            if (connect_to((struct sockaddr *)&to, sizeof to, SOCK_DGRAM) == 0) worked(hosts[i]);
        }
    const char *six[] = { "2606:4700:4700::1111", "fe80::1", "ff02::1" };
    for (size_t i = 0; i < 3; i++) {
        struct sockaddr_in6 to = { .sin6_family = AF_INET6, .sin6_port = htons(53), .sin6_scope_id = 1 };
        inet_pton(AF_INET6, six[i], &to.sin6_addr);
        if (connect_to((struct sockaddr *)&to, sizeof to, SOCK_STREAM) == 0) worked(six[i]);
    }
    for (int port = 1; port < 65536; port++) {
        struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port) };
        to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd < 0) break;
        struct sockaddr_in own; socklen_t size = sizeof own;
        // A socket can meet itself, by a port that the kernel chose.
        if (connect(fd, (struct sockaddr *)&to, sizeof to) == 0
            && getsockname(fd, (struct sockaddr *)&own, &size) == 0 && own.sin_port != to.sin_port)
            printf("loopback port %d\n", port);
        close(fd);
    }
    int families[] = { AF_PACKET, AF_VSOCK, AF_ALG, AF_TIPC, AF_RDS, AF_CAN, AF_BLUETOOTH, AF_KEY, AF_XDP };
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (socket(families[i], SOCK_DGRAM, 0) >= 0) printf("socket of family %d\n", families[i]);
    if (socket(AF_INET, SOCK_RAW, IPPROTO_ICMP) >= 0) worked("raw socket");
    if (socket(AF_INET6, SOCK_RAW, IPPROTO_ICMPV6) >= 0) worked("raw socket, IPv6");
    return 0;
}

// Calls that reach beyond a sandbox, with arguments that a kernel without our filter would look at.
static int calls(int argc, char **argv) {
    (void)argc; (void)argv;
    char room[4096] = { 0 };
#define TRY(name, ...) do { if (syscall(SYS_##name, ##__VA_ARGS__) >= 0) worked(#name); } while (0)
    TRY(bpf, 0, room, 128);
    TRY(userfaultfd, 1);
    TRY(add_key, "user", "lamella", "x", 1, -3);
    TRY(keyctl, 0, -3, 1);
    TRY(request_key, "user", "lamella", 0, -3);
    TRY(io_uring_setup, 4, room);
    TRY(perf_event_open, room, 0, -1, -1, 0);
    TRY(mount, "none", "/tmp", "tmpfs", 0, 0);
    TRY(umount2, "/proc", 2);
    TRY(fsopen, "tmpfs", 0);
    TRY(open_tree, AT_FDCWD, "/", 1);
    TRY(pivot_root, "/tmp", "/tmp");
    TRY(unshare, CLONE_NEWUSER);
    TRY(unshare, CLONE_NEWNS);
    TRY(setns, open("/proc/1/ns/mnt", O_RDONLY), 0);
    TRY(open_by_handle_at, AT_FDCWD, room, O_RDONLY);
    TRY(fanotify_init, 0, 0);
    TRY(init_module, room, 10, "");
    TRY(kexec_load, 0, 0, 0, 0);
    TRY(swapon, "/tmp/x", 0);
    TRY(reboot, 0xfee1dead, 672274793, 0, 0);
    TRY(sethostname, "other", 5);
    TRY(settimeofday, room, 0);
    TRY(acct, "/tmp/x");
    TRY(quotactl, 0x80000100, "/dev/null", 0, room);
    TRY(iopl, 3);
    TRY(syslog, 3, room, sizeof room);
    TRY(kcmp, getpid(), 1, 0, 0, 0);
    TRY(memfd_secret, 0);
    TRY(modify_ldt, 0, room, 16);
#undef TRY
    // 32-bit calls go past a filter that looks at numbers only.
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(20) : "memory");
    if (result >= 0) worked("getpid of the 32-bit ABI");
    result = syscall(0x40000000 | SYS_getpid);
    if (result >= 0) worked("getpid of the x32 ABI");
    for (unsigned long flag = 0x00020000; flag <= 0x40000000; flag <<= 1) {
        if (!(flag & 0x7e020000)) continue;
        long child = syscall(SYS_clone, flag | SIGCHLD, 0, 0, 0, 0);
        if (child == 0) _exit(0);
        if (child > 0) printf("clone with %#lx\n", flag);
    }
    return 0;
}

// Whether a process is one that starts commands, or the init; its name.
static int is_ours(int pid, char *name, size_t room) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/comm", pid);
    int comm = open(path, O_RDONLY);
    ssize_t bytes = comm < 0 ? -1 : read(comm, name, room - 1);
    if (comm >= 0) close(comm);
    if (bytes <= 0) return 0;
    name[bytes] = 0;
    return strncmp(name, "lamella", 7) == 0 || strcmp(name, "init\n") == 0;
}

// The processes that start commands: their memory, program, descriptors, folders. Runs until /tmp/enough exists.
static int hunt(int argc, char **argv) {
    (void)argc; (void)argv;
    long looked = 0;
    while (access("/tmp/enough", F_OK) != 0) {
        DIR *all = opendir("/proc");
        for (struct dirent *entry; all && (entry = readdir(all));) {
            int pid = atoi(entry->d_name);
            char path[64], name[32] = { 0 };
            if (pid <= 0) continue;
            if (!is_ours(pid, name, sizeof name)) continue;
            looked++;
            // What has become its command meanwhile is the sandbox's own.
#define OURS is_ours(pid, name, sizeof name)
            const char *parts[] = { "exe", "mem", "fd/0", "fd/3", "fd/4", "cwd/x", "root/x", "environ", "maps" };
            for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
                for (int how = 0; how < 2; how++) {
                    snprintf(path, sizeof path, "/proc/%d/%s", pid, parts[i]);
                    int fd = open(path, how ? O_WRONLY : O_RDONLY);
                    char byte;
                    if (fd >= 0 && (how || read(fd, &byte, 1) > 0) && OURS) printf("%s of %s", path, name);
                    if (fd >= 0) close(fd);
                }
            if (ptrace(PTRACE_SEIZE, pid, 0, 0) == 0) {
                if (OURS) printf("traced %s", name);
                // One that is traced must stop to be let go, or be waited for.
                ptrace(PTRACE_INTERRUPT, pid, 0, 0);
                waitpid(pid, NULL, __WALL);
                ptrace(PTRACE_DETACH, pid, 0, 0);
            }
            char byte; struct iovec own = { &byte, 1 }, far = { (void *)0x400000, 1 };
            if (process_vm_readv(pid, &own, 1, &far, 1, 0) > 0 && OURS) printf("read memory of %s", name);
            int pidfd = syscall(SYS_pidfd_open, pid, 0);
            for (int fd = 0; pidfd >= 0 && fd < 16; fd++) {
                int copy = syscall(SYS_pidfd_getfd, pidfd, fd, 0);
                if (copy >= 0 && OURS) printf("took descriptor %d of %s", fd, name);
                if (copy >= 0) close(copy);
            }
            if (pidfd >= 0) close(pidfd);
#undef OURS
        }
        if (all) closedir(all);
    }
    fprintf(stderr, "looked at %ld\n", looked);
    return 0;
}

// Device nodes, in every folder that takes files.
static int devices(int argc, char **argv) {
    (void)argc; (void)argv;
    const char *folders[] = { "/tmp", "/dev", "/dev/shm", "/dev/mqueue", "/", "/root", "/proc", "/sys" };
    struct { mode_t kind; int major, minor; } nodes[] = {
        { S_IFBLK, 8, 0 }, { S_IFBLK, 7, 0 }, { S_IFBLK, 254, 0 }, { S_IFBLK, 259, 0 }, { S_IFCHR, 1, 1 },
        { S_IFCHR, 1, 11 }, { S_IFCHR, 10, 229 }, { S_IFCHR, 10, 232 }, { S_IFCHR, 1, 3 },
    };
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        for (size_t j = 0; j < sizeof nodes / sizeof *nodes; j++) {
            char path[64];
            snprintf(path, sizeof path, "%s/node%zu", folders[i], j);
            if (mknod(path, nodes[j].kind | 0666, makedev(nodes[j].major, nodes[j].minor)) < 0) continue;
            int fd = open(path, O_RDONLY | O_NONBLOCK);
            if (fd >= 0) { printf("opened %s\n", path); close(fd); }
            unlink(path);
        }
    return 0;
}

// A dump program of the host would start for a process whose limit is zero.
static int core_dump(int argc, char **argv) {
    (void)argc; (void)argv;
    struct rlimit limit = { 0, 0 }, wide = { RLIM_INFINITY, RLIM_INFINITY };
    if (setrlimit(RLIMIT_CORE, &limit) < 0) worked("a program that asks for no dumps is refused");
    prlimit(0, RLIMIT_CORE, &limit, NULL);
    syscall(SYS_setrlimit, RLIMIT_CORE, &limit);
    prlimit(0, RLIMIT_CORE, &wide, NULL);
    getrlimit(RLIMIT_CORE, &limit);
    if (limit.rlim_cur != 1 || limit.rlim_max != 1) printf("the limit is %lu\n", (unsigned long)limit.rlim_cur);
    pid_t child = fork();
    if (child == 0) abort();
    int status;
    if (child < 0 || waitpid(child, &status, 0) < 0 || !WIFSIGNALED(status)) return 2;
    if (WCOREDUMP(status)) worked("a core was dumped");
    return 0;
}

// Typing into the terminal of whoever looks.
static int type_ahead(int argc, char **argv) {
    (void)argc; (void)argv;
    if (ioctl(0, TIOCSTI, "x") == 0) worked("typed");
    // The kernel takes the low half of the number only; a filter must not look at more.
    if (syscall(SYS_ioctl, 0, 0x100000000ul | TIOCSTI, "x") == 0) worked("typed with a wide number");
    return 0;
}

// Becoming somebody else, and reaching other commands of the sandbox.
static int neighbours(int argc, char **argv) {
    if (argc < 1) return 2;
    int pid = atoi(argv[0]);
    if (kill(pid, 0) == 0) worked("signal");
    if (ptrace(PTRACE_SEIZE, pid, 0, 0) == 0) worked("ptrace");
    if (setuid(1000) == 0) worked("setuid");
    if (chroot("/tmp") == 0) worked("chroot");
    if (socket(AF_INET, SOCK_STREAM, 0) >= 0) worked("internet socket");
    if (socket(AF_NETLINK, SOCK_RAW, 0) >= 0) worked("netlink socket");
    if (mknod("/tmp/null", S_IFCHR | 0666, makedev(1, 3)) == 0) worked("device");
    return 0;
}

static const struct { const char *name; int (*run)(int, char **); } ATTACKS[] = {
    { "swap-extents", swap_extents }, { "abstract-socket", abstract_socket }, { "every-socket", every_socket },
    { "scan", scan }, { "calls", calls }, { "hunt", hunt }, { "devices", devices }, { "core-dump", core_dump },
    { "type-ahead", type_ahead }, { "neighbours", neighbours },
};

int main(int argc, char **argv) {
    for (size_t i = 0; argc > 1 && i < sizeof ATTACKS / sizeof *ATTACKS; i++)
        if (strcmp(argv[1], ATTACKS[i].name) == 0) return ATTACKS[i].run(argc - 2, argv + 2);
    fprintf(stderr, "no such attack\n");
    return 2;
}
