/*
 * Rounds over Catalyst's own backend until a call fails: `killed controller PORT` or `killed coprocessor PORT`, on rxe0 at
 * 10.9.0.1. Says "rounds go on" on stderr after some rounds; then on stdout which call failed, its status, how many
 * seconds it took and those of destroy. Exits 0 when a call has failed after these rounds.
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "catalyst_transport.h"

#define F(name) __catalyst__transport__##name

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static double began;

/* The status of a call, whose begin is kept. */
#define TIMED(call) (began = now(), (call))
#define MUST(call)                                                                                                           \
    do {                                                                                                                     \
        if ((call) != CATALYST_TRANSPORT_OK) return fprintf(stderr, "%s\n", #call), 1;                                       \
    } while (0)

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    int controller = !strcmp(argv[1], "controller");
    uint16_t port = (uint16_t)atoi(argv[2]);
    alarm(150);
    void *session = F(create)("cpu_verbs", "dev=rxe0;gid=1;handshake_ms=30000;accept_ms=60000;timeout_ms=60000",
                              controller ? CATALYST_TRANSPORT_CONTROLLER : CATALYST_TRANSPORT_COPROCESSOR, "killed");
    if (!session) return 1;
    MUST(F(connect)(session, "10.9.0.1", port));
    MUST(F(exchange_keys)(session));
    MUST(F(establish_channel)(session, "rdma"));
    MUST(controller ? F(set_message_sizes)(session, 0, 8, 8) : F(set_coprocessor_fn)(session, ""));
    F(start)(session);
    const char *call;
    int status;
    uint64_t round = 0, reply;
    for (;; round++) {
        if (controller) {
            if ((call = "stage_payload", status = TIMED(F(stage_payload)(session, &round, 8, 0)))) break;
            if ((call = "post", status = TIMED(F(post)(session, 0)))) break;
        }
        if ((call = "collect", status = TIMED(F(collect)(session, &reply, 8)))) break;
        if (controller && reply != round) return fprintf(stderr, "round %llu is wrong\n", (unsigned long long)round), 1;
        if (round == 100) fprintf(stderr, "rounds go on\n");
    }
    double took = now() - began;
    began = now();
    F(destroy)(session);
    printf("%s %d after %.3f s, destroyed in %.3f s, %llu rounds\n", call, status, took, now() - began,
           (unsigned long long)round);
    return round > 100 ? 0 : 1;
}
