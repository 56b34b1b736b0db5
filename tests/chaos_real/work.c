/* A task that tells what it does: work LEDGER MILLISECONDS EXIT_CODE [DETACHED]

It appends lines `task attempt node word at_ns begun_ns pid` to LEDGER, each with one write: `start`, `beat` every 50 ms,
`stop`. The kernel puts the writes of all tasks of all nodes into one order, which is therefore the order in which they
were executed. at_ns is CLOCK_MONOTONIC: the time namespaces of the machines shift CLOCK_BOOTTIME alone, so that this one
can be compared between them. begun_ns tells the runs of one attempt apart. With DETACHED a child in a session of its
own writes `child` lines as long as its parent lives, as work does that hides from its process group. */

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BEAT_NS = 50000000, NS = 1000000000 };

static int ledger;
static long long begun_ns;
static char who[256];

static long long now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long long)now.tv_sec * NS + now.tv_nsec;
}

static void note(const char *word)
{
    char line[384];
    int size = snprintf(line, sizeof line, "%s %s %lld %lld %d\n", who, word, now_ns(), begun_ns, (int)getpid());
    if (write(ledger, line, size) != size)
        _exit(99);
}

static void pause_ns(long long ns)
{
    struct timespec time = {ns / NS, ns % NS};
    nanosleep(&time, NULL);
}

static const char *variable(const char *name)
{
    const char *value = getenv(name);
    return value ? value : "-";
}

int main(int count, char **word)
{
    if (count < 4 || (ledger = open(word[1], O_WRONLY | O_APPEND | O_CLOEXEC)) < 0)
        return 98;
    long long left_ns = atoll(word[2]) * 1000000;
    snprintf(who, sizeof who, "%.80s %.20s %.40s", variable("PEERLOAD_TASK_ID"), variable("PEERLOAD_ATTEMPT"),
             variable("PEERLOAD_NODE"));
    begun_ns = now_ns();
    note("start");
    int parent = getpid();
    if (count > 4 && fork() == 0) {
        setsid();
        while (getppid() == parent) {
            note("child");
            pause_ns(BEAT_NS);
        }
        _exit(0);
    }
    while (left_ns > BEAT_NS) {
        pause_ns(BEAT_NS);
        left_ns -= BEAT_NS;
        note("beat");
    }
    pause_ns(left_ns);
    note("stop");
    dprintf(1, "out %s\n", variable("PEERLOAD_TASK_ID"));
    return atoi(word[3]);
}
