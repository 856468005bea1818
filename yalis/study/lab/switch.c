/* A switch in user space: frames between TAP devices, each through its sender's line and its receiver's, with a delay.

     switch DELAY_NS BITS_PER_SECOND PORTS

   It makes the TAPs port0, port1, ... in the network namespace it runs in, writes "ready", and forwards until it is
   ended (SIGTERM, or its parent's death); then it writes how many frames it forwarded and dropped. Port p has the
   address 02:00:00:00:HH:LL, where HHLL is p + 1; a frame to any other address goes to all ports but its own.

   A port has a line in each direction. At most BITS_PER_SECOND pass a line (0: no limit), and a frame is there DELAY_NS
   after it was sent. Frames come with a virtio header and may be as large as 64 KB: hosts leave segments and checksums
   to a card that is not there, so that a transfer costs one frame where a wire would take forty. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_PORTS = 256,
    HEADER = sizeof(struct virtio_net_hdr),
    ETHERNET = 14,
    LARGEST = HEADER + 18 + 65536,
    LINE_BYTES = 32 << 20, /* what a line holds; more is dropped, as in any switch */
    BURST = 64,            /* frames read from one port before the others have their turn */
};
#define NEVER UINT64_MAX

typedef struct frame {
    struct frame *next;
    uint64_t due; /* on an up line: when it begins to be sent; on a down line: when it has arrived */
    int to;
    int length; /* with the header */
    uint8_t data[];
} frame;

/* First in, first out: frames leave in the order of their due times, since delay and rate are the same for all. */
typedef struct {
    frame *first, **last;
    uint64_t free_at; /* when the frames before have passed */
    long bytes;
} line;

typedef struct {
    int fd;
    line up, down;
} port;

static port ports[MAX_PORTS];
static int count;
static uint64_t delay;
static double ns_per_byte;
static unsigned long forwarded, dropped;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

static uint64_t passing(const frame *f) { return (uint64_t)((f->length - HEADER) * ns_per_byte); }

/* The line takes the frame, whose due time is set, or drops it. */
static void put(line *l, frame *f) {
    if (l->bytes + f->length > LINE_BYTES) {
        dropped++;
        free(f);
        return;
    }
    f->next = NULL;
    *l->last = f;
    l->last = &f->next;
    l->bytes += f->length;
}

/* The first frame, if it is due. */
static frame *take(line *l, uint64_t time) {
    frame *f = l->first;
    if (f == NULL || f->due > time) return NULL;
    l->first = f->next;
    if (l->first == NULL) l->last = &l->first;
    l->bytes -= f->length;
    return f;
}

static void send_up(int from, int to, const uint8_t *data, int length, uint64_t time) {
    frame *f = malloc(sizeof *f + (size_t)length);
    if (f == NULL) fail("malloc");
    memcpy(f->data, data, (size_t)length);
    f->length = length;
    f->to = to;
    line *up = &ports[from].up;
    f->due = later(time, up->free_at);
    up->free_at = f->due + passing(f);
    put(up, f);
}

/* The port of a destination address; -1 for all. */
static int find_port(const uint8_t *address) {
    static const uint8_t ours[4] = {2, 0, 0, 0};
    int number = address[4] << 8 | address[5];
    return memcmp(address, ours, sizeof ours) == 0 && number >= 1 && number <= count ? number - 1 : -1;
}

static void receive(int from) {
    static uint8_t data[LARGEST];
    for (int i = 0; i < BURST; i++) {
        ssize_t length = read(ports[from].fd, data, sizeof data);
        if (length < HEADER + ETHERNET) return;
        uint64_t time = now();
        int to = find_port(data + HEADER);
        for (int p = 0; p < count; p++)
            if (p == to || (to < 0 && p != from)) send_up(from, p, data, (int)length, time);
    }
}

/* Moves what is due. A frame goes on to its receiver's line when it begins to be sent, so that two lines of the same
   rate pass it once, not twice. Returns when something will be due next. */
static uint64_t forward(uint64_t time) {
    uint64_t next = NEVER;
    for (int p = 0; p < count; p++) {
        frame *f;
        while ((f = take(&ports[p].up, time)) != NULL) {
            line *down = &ports[f->to].down;
            f->due = later(f->due + delay, down->free_at) + passing(f);
            down->free_at = f->due;
            put(down, f);
        }
        if (ports[p].up.first != NULL && ports[p].up.first->due < next) next = ports[p].up.first->due;
    }
    for (int p = 0; p < count; p++) {
        frame *f;
        while ((f = take(&ports[p].down, time)) != NULL) {
            if (write(ports[p].fd, f->data, (size_t)f->length) == f->length)
                forwarded++;
            else if (errno != EIO) /* which says that the host's side is not up */
                dropped++;
            free(f);
        }
        if (ports[p].down.first != NULL && ports[p].down.first->due < next) next = ports[p].down.first->due;
    }
    return next;
}

static int open_tap(int number) {
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) fail("/dev/net/tun");
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    snprintf(request.ifr_name, IFNAMSIZ, "port%d", number);
    if (ioctl(fd, TUNSETIFF, &request) < 0) fail(request.ifr_name);
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) < 0) fail("TUNSETOFFLOAD");
    return fd;
}

static void watch(int poll, int fd, uint32_t what) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = what};
    if (epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event) < 0) fail("epoll");
}

int main(int argc, char **argv) {
    if (argc != 4 || (count = atoi(argv[3])) < 1 || count > MAX_PORTS) {
        fprintf(stderr, "usage: switch DELAY_NS BITS_PER_SECOND PORTS\n");
        return 2;
    }
    delay = strtoull(argv[1], NULL, 10);
    double rate = strtod(argv[2], NULL);
    ns_per_byte = rate > 0 ? 8e9 / rate : 0;

    prctl(PR_SET_PDEATHSIG, SIGTERM);
    prctl(PR_SET_TIMERSLACK, 1UL);
    /* Before the ranks, which would hold up their own network; where that is not allowed, the delay is less exact. */
    sched_setscheduler(0, SCHED_RR, &(struct sched_param){.sched_priority = 2});

    enum { TIMER = MAX_PORTS, END };
    int poll = epoll_create1(EPOLL_CLOEXEC), timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (poll < 0 || timer < 0) fail("epoll");
    sigset_t ends;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    sigprocmask(SIG_BLOCK, &ends, NULL);
    watch(poll, signalfd(-1, &ends, SFD_CLOEXEC), END);
    watch(poll, timer, TIMER);
    for (int p = 0; p < count; p++) {
        ports[p].fd = open_tap(p);
        ports[p].up.last = &ports[p].up.first;
        ports[p].down.last = &ports[p].down.first;
        watch(poll, ports[p].fd, (uint32_t)p);
    }
    printf("ready\n");
    fflush(stdout);

    for (uint64_t armed = NEVER;;) {
        struct epoll_event events[MAX_PORTS + 2];
        int found = epoll_wait(poll, events, MAX_PORTS + 2, -1);
        if (found < 0 && errno != EINTR) fail("epoll");
        for (int i = 0; i < found; i++) {
            uint32_t what = events[i].data.u32;
            uint64_t ticks;
            if (what == END) {
                printf("forwarded %lu dropped %lu\n", forwarded, dropped);
                return 0;
            }
            if (what == TIMER) {
                if (read(timer, &ticks, sizeof ticks) > 0) armed = NEVER;
            } else {
                receive((int)what);
            }
        }
        uint64_t next = forward(now());
        if (next != NEVER && next != armed) {
            struct itimerspec when = {.it_value = {(time_t)(next / 1000000000u), (long)(next % 1000000000u)}};
            timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL);
            armed = next;
        }
    }
}
