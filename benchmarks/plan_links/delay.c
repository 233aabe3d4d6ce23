/* A network of hosts in namespaces that delivers each packet after a delay, for kernels without netem.

   delay FILE SPACE=ADDRESS…: creates an interface eth0 in each namespace and passes packets between them by their
   destination address. FILE holds the delay in microseconds as a 32-bit number, which may change at any time. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define HOSTS 16
#define MTU 9100
#define SLOTS 16384

struct packet { uint64_t due; int to, size; unsigned char data[MTU]; };

static struct packet *queue;
static uint32_t address[HOSTS];
static struct pollfd ends[HOSTS];

static void fail(const char *what) { perror(what); exit(1); }

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static int open_end(char *space) {
  char path[256];
  struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
  snprintf(path, sizeof path, "/run/netns/%s", space);
  int place = open(path, O_RDONLY), end;
  if (place < 0 || setns(place, CLONE_NEWNET)) fail(path);
  close(place);
  if ((end = open("/dev/net/tun", O_RDWR | O_NONBLOCK)) < 0) fail("/dev/net/tun");
  strcpy(request.ifr_name, "eth0");
  if (ioctl(end, TUNSETIFF, &request)) fail("TUNSETIFF");
  return end;
}

int main(int count, char **words) {
  int hosts = count - 2, file = open(words[1], O_RDWR);
  if (hosts < 1 || hosts > HOSTS || file < 0) fail("usage: delay FILE SPACE=ADDRESS...");
  volatile uint32_t *delay_us = mmap(0, 4, PROT_READ, MAP_SHARED, file, 0);
  if (delay_us == MAP_FAILED || !(queue = calloc(SLOTS, sizeof *queue))) fail("memory");
  for (int i = 0; i < hosts; i++) {
    char *sign = strchr(words[i + 2], '=');
    if (!sign) fail("SPACE=ADDRESS");
    *sign = 0;
    address[i] = inet_addr(sign + 1);
    ends[i] = (struct pollfd){.fd = open_end(words[i + 2]), .events = POLLIN};
  }
  puts("ready");
  fflush(stdout);
  for (uint64_t first = 0, end = 0;;) {
    uint64_t time = now();
    while (first < end && queue[first % SLOTS].due <= time) {
      struct packet *next = &queue[first++ % SLOTS];
      if (write(ends[next->to].fd, next->data, next->size) < 0) continue; /* the host drops it */
    }
    int64_t wait = first < end ? (int64_t)(queue[first % SLOTS].due - time) : 1000000000;
    struct timespec timeout = {wait / 1000000000, wait % 1000000000};
    if (ppoll(ends, hosts, &timeout, 0) <= 0) continue;
    for (int i = 0; i < hosts; i++) {
      if (!(ends[i].revents & POLLIN)) continue;
      for (int taken = 0; taken < 16 && end - first < SLOTS; taken++) {
        struct packet *next = &queue[end % SLOTS];
        int size = read(ends[i].fd, next->data, MTU);
        if (size < 20) break;
        uint32_t wanted;
        memcpy(&wanted, next->data + 16, 4);
        for (int j = 0; j < hosts; j++) {
          if (address[j] != wanted) continue;
          next->to = j, next->size = size, next->due = now() + *delay_us * 1000ull;
          end++;
        }
      }
    }
  }
}
