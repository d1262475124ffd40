// Two programs for calls: `leave` leaves behind all that a process can, `look` tells everything that could be
// left of others. What `look` prints depends on nothing else, so two of them print the same.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define KEY 0x5ec
#define SECRET "SECRET"

static const char *PLACES[] = {"/secret",     "/tmp/secret",      "/root/secret",   "/home/ann/secret", "/etc/secret",
                               "/bin/secret", "/dev/shm/secret", "/dev/secret",    "/proc/secret",     "/sys/secret",
                               "/dev/mqueue/secret", "/dev/pts/secret", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf",
                               "/etc/passwd"};

static void put(const char *path) {
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0666);
    if (file >= 0) {
        write(file, SECRET, strlen(SECRET));
        close(file);
    }
    chmod(path, 0606);
}

static int unix_socket(struct sockaddr_un *name) {
    memset(name, 0, sizeof *name);
    name->sun_family = AF_UNIX;
    memcpy(name->sun_path, "\0secret", 7);
    return socket(AF_UNIX, SOCK_STREAM, 0);
}

static struct sockaddr_in address(int port) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(port)};
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return name;
}

// Sockets that stay open in whoever called.
static void serve(void) {
    struct sockaddr_in tcp = address(4711), udp = address(4712);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    bind(listener, (struct sockaddr *)&tcp, sizeof tcp);
    listen(listener, 5);
    int client = socket(AF_INET, SOCK_STREAM, 0);
    connect(client, (struct sockaddr *)&tcp, sizeof tcp);
    write(client, SECRET, 6);
    bind(socket(AF_INET, SOCK_DGRAM, 0), (struct sockaddr *)&udp, sizeof udp);
    struct sockaddr_un name;
    int stream = unix_socket(&name);
    bind(stream, (struct sockaddr *)&name, sizeof(sa_family_t) + 7);
    listen(stream, 5);
}

static int leave(void) {
    setvbuf(stdout, NULL, _IONBF, 0);
    for (size_t i = 0; i < sizeof PLACES / sizeof *PLACES; i++)
        put(PLACES[i]);
    unlink("/bin/ls");
    mkdir("/tmp/deep", 0777);
    symlink("/secret", "/tmp/deep/link");
    int memory = shmget(KEY, 1 << 16, IPC_CREAT | 0666);
    char *shared = shmat(memory, NULL, 0);
    if (shared != (void *)-1)
        strcpy(shared, SECRET);
    semget(KEY, 3, IPC_CREAT | 0666);
    struct { long kind; char text[8]; } message = {1, SECRET};
    msgsnd(msgget(KEY, IPC_CREAT | 0666), &message, sizeof message.text, 0);
    mqd_t queue = mq_open("/secret", O_CREAT | O_RDWR, 0666, NULL);
    mq_send(queue, SECRET, 6, 1);
    long key = syscall(SYS_add_key, "user", "secret", SECRET, 6L, -4L);
    printf("key %s\n", key < 0 ? "refused" : "made");
    sethostname("secret", 6);
    setpriority(PRIO_PROCESS, 1, 15);
    setpriority(PRIO_PROCESS, 0, 15);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(0, &one);
    sched_setaffinity(1, sizeof one, &one);
    struct rlimit few = {20, 20};
    prlimit(1, RLIMIT_NOFILE, &few, NULL);
    setrlimit(RLIMIT_NOFILE, &few);
    umask(0777);
    chdir("/tmp");
    setenv("SECRET", "1", 1);
    struct itimerval soon = {.it_value = {3600, 0}};
    setitimer(ITIMER_REAL, &soon, NULL);
    timer_t timer;
    timer_create(CLOCK_MONOTONIC, NULL, &timer);
    int region = memfd_create("secret", 0);
    ftruncate(region, 4 << 20);
    char *mapped = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, region, 0);
    memset(mapped, 'S', 4 << 20);
    // A server and a daemon in sessions of their own, one stopped, one traced by another.
    for (int i = 0; i < 4; i++) {
        if (fork() != 0)
            continue;
        setsid();
        if (fork() != 0)
            _exit(0);
        signal(SIGHUP, SIG_IGN);
        signal(SIGTERM, SIG_IGN);
        if (i == 0)
            serve();
        if (i == 1)
            raise(SIGSTOP);
        if (i == 2) {
            pid_t traced = fork();
            if (traced == 0) {
                ptrace(PTRACE_TRACEME, 0, 0, 0);
                raise(SIGSTOP);
            } else {
                waitpid(traced, NULL, 0);
            }
        }
        for (;;)
            pause();
    }
    usleep(50000);
    printf("left\n");
    return 0;
}

static void list(const char *folder) {
    DIR *open = opendir(folder);
    struct dirent *entry;
    char *names[1000];
    size_t count = 0;
    while (open && count < 1000 && (entry = readdir(open)))
        names[count++] = strdup(entry->d_name);
    int compare(const void *a, const void *b) { return strcmp(*(char **)a, *(char **)b); }
    qsort(names, count, sizeof *names, compare);
    printf("%s:", folder);
    for (size_t i = 0; i < count; i++)
        if (strcmp(folder, "/proc") != 0 || (names[i][0] >= '0' && names[i][0] <= '9'))
            printf(" %s", names[i]);
    printf("\n");
    if (open)
        closedir(open);
}

static void show(const char *path) {
    char text[8192];
    int file = open(path, O_RDONLY);
    ssize_t count = file < 0 ? 0 : read(file, text, sizeof text);
    printf("%s: %.*s\n", path, count > 0 ? (int)count : 0, text);
    close(file);
}

static int look(void) {
    for (size_t i = 0; i < sizeof PLACES / sizeof *PLACES; i++) {
        struct stat found;
        if (stat(PLACES[i], &found) == 0) {
            printf("mode %o ", found.st_mode);
            show(PLACES[i]);
        }
    }
    const char *folders[] = {"/",        "/tmp",        "/root",    "/home/ann", "/etc",  "/bin",
                             "/dev/shm", "/dev/mqueue", "/dev/pts", "/dev",      "/proc"};
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        list(folders[i]);
    const char *tables[] = {"/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg", "/proc/net/tcp",
                            "/proc/net/udp", "/proc/net/unix", "/proc/net/dev", "/proc/net/snmp",
                            "/proc/self/timers", "/proc/self/environ", "/proc/self/cgroup"};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        show(tables[i]);
    printf("shm %d sem %d msg %d mq %d\n", shmget(KEY, 0, 0), semget(KEY, 0, 0), msgget(KEY, 0),
           mq_open("/secret", O_RDONLY));
    struct sockaddr_in tcp = address(4711), udp = address(4712);
    int client = socket(AF_INET, SOCK_STREAM, 0);
    // Only asks whether the port is free: what connects would be counted.
    printf("tcp %d", bind(client, (struct sockaddr *)&tcp, sizeof tcp));
    printf(" udp %d", bind(socket(AF_INET, SOCK_DGRAM, 0), (struct sockaddr *)&udp, sizeof udp));
    struct sockaddr_un name;
    int stream = unix_socket(&name);
    printf(" unix %d\n", connect(stream, (struct sockaddr *)&name, sizeof(sa_family_t) + 7));
    mode_t mask = umask(022);
    char host[65] = "", folder[4096] = "";
    gethostname(host, sizeof host);
    getcwd(folder, sizeof folder);
    printf("pid %d mask %o host %s folder %s secret %s nice %d %d\n", getpid(), mask, host, folder,
           getenv("SECRET") ? "yes" : "no", getpriority(PRIO_PROCESS, 0), getpriority(PRIO_PROCESS, 1));
    cpu_set_t all;
    sched_getaffinity(1, sizeof all, &all);
    printf("processors of 1: %d, own: ", CPU_COUNT(&all));
    sched_getaffinity(0, sizeof all, &all);
    printf("%d\n", CPU_COUNT(&all));
    for (int i = 0; i < RLIMIT_NLIMITS; i++) {
        struct rlimit limit;
        getrlimit(i, &limit);
        printf("%d:%llu/%llu ", i, (unsigned long long)limit.rlim_cur, (unsigned long long)limit.rlim_max);
    }
    struct itimerval timer;
    getitimer(ITIMER_REAL, &timer);
    struct statvfs room;
    statvfs("/dev/shm", &room);
    printf("timer %ld shm free %lu of %lu\n", (long)timer.it_value.tv_sec, (unsigned long)room.f_bfree,
           (unsigned long)room.f_blocks);
    return 0;
}

int main(int count, char **words) {
    if (count == 2 && strcmp(words[1], "leave") == 0)
        return leave();
    if (count == 2 && strcmp(words[1], "look") == 0)
        return look();
    return 2;
}
