/* A switch in user space. It forwards frames between TAP devices with a delay and a rate limit.

     switch DELAY_NS BITS_PER_SECOND PORTS

   It creates the TAP devices port0, port1, ... in its network namespace, prints "ready", and forwards frames until
   SIGTERM or the death of its parent. Then it prints how many frames it forwarded and dropped. Port p has the MAC
   address 02:00:00:00:HH:LL, where HHLL is p + 1; a frame to any other address is flooded to all other ports.

   Each port has a queue per direction: `up` from the sender, `down` to the receiver. A queue passes at most
   BITS_PER_SECOND (0: no limit), and a frame arrives DELAY_NS after it was sent. Frames have a virtio header and up to
   64 KB: segmentation and checksum offload is enabled, so one frame replaces about forty on a real wire. */

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
    MAX_FRAME = HEADER + 18 + 65536,
    QUEUE_BYTES = 32 << 20, /* capacity of a queue; further frames are dropped */
    BURST = 64,            /* frames read from one port before the next port is served */
};
#define NEVER UINT64_MAX

typedef struct frame {
    struct frame *next;
    uint64_t due; /* in an up queue: when sending begins; in a down queue: when it has arrived */
    int to;
    int length; /* including the virtio header */
    uint8_t data[];
} frame;

/* A FIFO. Frames are due in this order too, because delay and rate are the same for all. */
typedef struct {
    frame *first, **last;
    uint64_t free_at; /* when the previous frames have passed */
    long bytes;
} queue;

typedef struct {
    int fd;
    queue up, down;
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

static uint64_t max_time(uint64_t a, uint64_t b) { return a > b ? a : b; }

static uint64_t transfer_ns(const frame *f) { return (uint64_t)((f->length - HEADER) * ns_per_byte); }

/* Appends a frame whose due time is set, or drops it if the queue is full. */
static void push(queue *q, frame *f) {
    if (q->bytes + f->length > QUEUE_BYTES) {
        dropped++;
        free(f);
        return;
    }
    f->next = NULL;
    *q->last = f;
    q->last = &f->next;
    q->bytes += f->length;
}

/* Removes and returns the first frame if it is due, otherwise NULL. */
static frame *pop_due(queue *q, uint64_t time) {
    frame *f = q->first;
    if (f == NULL || f->due > time) return NULL;
    q->first = f->next;
    if (q->first == NULL) q->last = &q->first;
    q->bytes -= f->length;
    return f;
}

static void send_up(int from, int to, const uint8_t *data, int length, uint64_t time) {
    frame *f = malloc(sizeof *f + (size_t)length);
    if (f == NULL) fail("malloc");
    memcpy(f->data, data, (size_t)length);
    f->length = length;
    f->to = to;
    queue *up = &ports[from].up;
    f->due = max_time(time, up->free_at);
    up->free_at = f->due + transfer_ns(f);
    push(up, f);
}

/* Returns the port of a destination address, or -1 for all ports. */
static int find_port(const uint8_t *address) {
    static const uint8_t ours[4] = {2, 0, 0, 0};
    int number = address[4] << 8 | address[5];
    return memcmp(address, ours, sizeof ours) == 0 && number >= 1 && number <= count ? number - 1 : -1;
}

static void receive(int from) {
    static uint8_t data[MAX_FRAME];
    for (int i = 0; i < BURST; i++) {
        ssize_t length = read(ports[from].fd, data, sizeof data);
        if (length < HEADER + ETHERNET) return;
        uint64_t time = now();
        int to = find_port(data + HEADER);
        for (int p = 0; p < count; p++)
            if (p == to || (to < 0 && p != from)) send_up(from, p, data, (int)length, time);
    }
}

/* Moves the frames that are due, and returns when the next one will be. A frame enters the down queue when sending
   begins, not when it ends, so its transfer time counts once although two queues have the same rate. */
static uint64_t forward(uint64_t time) {
    uint64_t next = NEVER;
    for (int p = 0; p < count; p++) {
        frame *f;
        while ((f = pop_due(&ports[p].up, time)) != NULL) {
            queue *down = &ports[f->to].down;
            f->due = max_time(f->due + delay, down->free_at) + transfer_ns(f);
            down->free_at = f->due;
            push(down, f);
        }
        if (ports[p].up.first != NULL && ports[p].up.first->due < next) next = ports[p].up.first->due;
    }
    for (int p = 0; p < count; p++) {
        frame *f;
        while ((f = pop_due(&ports[p].down, time)) != NULL) {
            if (write(ports[p].fd, f->data, (size_t)f->length) == f->length)
                forwarded++;
            else if (errno != EIO) /* EIO: the device is not up on the host */
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

static void add_to_epoll(int poll, int fd, uint32_t source) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = source};
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
    /* Higher priority than the ranks, which would otherwise delay their own network. Without permission for it, the delay
       is less exact. */
    sched_setscheduler(0, SCHED_RR, &(struct sched_param){.sched_priority = 2});

    enum { TIMER = MAX_PORTS, END };
    int poll = epoll_create1(EPOLL_CLOEXEC), timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (poll < 0 || timer < 0) fail("epoll");
    sigset_t ends;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    sigprocmask(SIG_BLOCK, &ends, NULL);
    add_to_epoll(poll, signalfd(-1, &ends, SFD_CLOEXEC), END);
    add_to_epoll(poll, timer, TIMER);
    for (int p = 0; p < count; p++) {
        ports[p].fd = open_tap(p);
        ports[p].up.last = &ports[p].up.first;
        ports[p].down.last = &ports[p].down.first;
        add_to_epoll(poll, ports[p].fd, (uint32_t)p);
    }
    printf("ready\n");
    fflush(stdout);

    for (uint64_t armed = NEVER;;) {
        struct epoll_event events[MAX_PORTS + 2];
        int found = epoll_wait(poll, events, MAX_PORTS + 2, -1);
        if (found < 0 && errno != EINTR) fail("epoll");
        for (int i = 0; i < found; i++) {
            uint32_t source = events[i].data.u32;
            uint64_t ticks;
            if (source == END) {
                printf("forwarded %lu dropped %lu\n", forwarded, dropped);
                return 0;
            }
            if (source == TIMER) {
                if (read(timer, &ticks, sizeof ticks) > 0) armed = NEVER;
            } else {
                receive((int)source);
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
