/*
 * Walks the whole C interface, every error return included. `walk` runs all of it; `walk cycles N` makes, uses and destroys N
 * pairs of sessions and counts descriptors. Exits 0 and says "walked ..." when all was as it has to be.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "catalyst_transport.h"

#define F(name) __catalyst__transport__##name
#define OK CATALYST_TRANSPORT_OK
#define ERROR CATALYST_TRANSPORT_ERROR
#define CONTROLLER CATALYST_TRANSPORT_CONTROLLER
#define COPROCESSOR CATALYST_TRANSPORT_COPROCESSOR

static int checks, said_file, own_stderr;

static void die(int line, const char *format, ...) {
    va_list list;
    va_start(list, format);
    dup2(own_stderr, 2);
    fprintf(stderr, "walk.c:%d: ", line);
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
    _exit(1);
}

#define CHECK(condition)                                                                                                     \
    do {                                                                                                                     \
        checks++;                                                                                                            \
        if (!(condition)) die(__LINE__, "%s", #condition);                                                                   \
    } while (0)

#define IS(call, wanted)                                                                                                     \
    do {                                                                                                                     \
        long long got_ = (long long)(call), wanted_ = (long long)(wanted);                                                   \
        checks++;                                                                                                            \
        if (got_ != wanted_) die(__LINE__, "%s is %lld and not %lld", #call, got_, wanted_);                                 \
    } while (0)

/* What the library has said on stderr since the last look: exactly `lines` lines, with `word` in them. */
static void said(int line, int lines, const char *word) {
    static char text[1 << 16];
    ssize_t length = pread(said_file, text, sizeof text - 1, 0);
    if (length < 0) die(line, "stderr cannot be read");
    text[length] = 0;
    int count = 0;
    for (char *at = text; (at = strchr(at, '\n')); at++) count++;
    checks++;
    if (count != lines) die(line, "%d lines on stderr and not %d:\n%s", count, lines, text);
    if (lines && word && !strstr(text, word)) die(line, "'%s' is not in: %s", word, text);
    for (char *at = text; at && *at; at = strchr(at, '\n'), at = at ? at + 1 : at)
        if (strncmp(at, "catalyst-transport: ", 20)) die(line, "a line without its head: %s", at);
    if (ftruncate(said_file, 0) || lseek(said_file, 0, SEEK_SET)) die(line, "stderr cannot be emptied");
}
#define SAID(word) said(__LINE__, 1, word)
#define QUIET() said(__LINE__, 0, NULL)
/* A call that fails with this status, and one line that has the word. */
#define FAILS(call, status, word)                                                                                            \
    do {                                                                                                                     \
        IS(call, status);                                                                                                    \
        SAID(word);                                                                                                          \
    } while (0)

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static void pause_ms(int ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

/* ---- Coprocessor functions, found by their names ---- */

size_t walk_sum(const void *frame, size_t in_len, void *out, size_t out_cap, void *ctx) {
    const unsigned char *bytes = frame;
    uint32_t decoder;
    uint64_t sum = 0;
    memcpy(&decoder, bytes + in_len - 8, 4);
    for (size_t i = 0; i < in_len - 8; i++) sum += bytes[i];
    sum = sum * 1000 + decoder;
    if (out_cap < sizeof sum || ctx) return 0;
    memcpy(out, &sum, sizeof sum);
    return sizeof sum;
}

size_t walk_fail(const void *frame, size_t in_len, void *out, size_t out_cap, void *ctx) {
    (void)frame, (void)in_len, (void)out, (void)out_cap, (void)ctx;
    return 0;
}

static volatile int delay_ms;

size_t walk_late(const void *frame, size_t in_len, void *out, size_t out_cap, void *ctx) {
    (void)in_len, (void)ctx;
    pause_ms(delay_ms);
    memcpy(out, frame, out_cap < 8 ? out_cap : 8);
    return 8;
}

static volatile int hold;

size_t walk_hold(const void *frame, size_t in_len, void *out, size_t out_cap, void *ctx) {
    (void)frame, (void)in_len, (void)out, (void)ctx;
    while (hold) pause_ms(5);
    return out_cap < 8 ? out_cap : 8;
}

/* ---- A pair of sessions ---- */

struct pair {
    void *ct, *co;
};

static struct pair made(const char *backend, const char *config) {
    struct pair pair = {F(create)(backend, config, CONTROLLER, "walk"), F(create)(backend, config, COPROCESSOR, "walk")};
    CHECK(pair.ct && pair.co && pair.ct != pair.co);
    return pair;
}

static struct pair connected(const char *backend, const char *config, uint16_t port) {
    struct pair pair = made(backend, config);
    int64_t token = F(connect_async)(pair.co, "", port);
    CHECK(token > 0);
    IS(F(connect)(pair.ct, "127.0.0.1", port), OK);
    IS(F(await)(token), OK);
    token = F(exchange_keys_async)(pair.co);
    CHECK(token > 0);
    IS(F(exchange_keys)(pair.ct), OK);
    IS(F(await)(token), OK);
    IS(F(establish_channel)(pair.co, "rdma"), OK);
    IS(F(establish_channel)(pair.ct, "rdma"), OK);
    return pair;
}

static struct pair running(const char *config, const char *function) {
    struct pair pair = connected("memcpy", config, 0);
    IS(F(set_coprocessor_fn)(pair.co, function), OK);
    IS(F(set_message_sizes)(pair.ct, 0, 8, 8), OK);
    F(start)(pair.co);
    F(start)(pair.ct);
    QUIET();
    return pair;
}

static void end(struct pair pair) {
    F(stop)(pair.ct);
    F(destroy)(pair.ct);
    F(stop)(pair.co);
    F(destroy)(pair.co);
    QUIET();
}

static void round_trip(struct pair pair, uint64_t request, uint32_t decoder, uint64_t wanted) {
    uint64_t reply = ~0ull;
    IS(F(stage_payload)(pair.ct, &request, 8, decoder), OK);
    IS(F(post)(pair.ct, 0), OK);
    IS(F(collect)(pair.ct, &reply, 8), OK);
    IS(reply, wanted);
}

/* ---- The parts ---- */

/* As generated code does it: by key, into the reply slot's own pointer. */
static void rounds_as_generated(const char *backend, uint16_t port) {
    struct pair pair = connected(backend, "", port);
    IS(F(set_coprocessor_fn)(pair.co, ""), OK);
    IS(F(set_message_sizes)(pair.ct, 0, 8, 8), OK);
    F(start)(pair.co);
    F(start)(pair.ct);
    IS(F(last_rtt_ns)(pair.ct), 0);
    for (uint64_t i = 1; i <= 300; i++) {
        void *session = F(get_session)(CONTROLLER, "walk");
        CHECK(session == pair.ct);
        uint64_t payload = i * 0x0101010101010101;
        IS(F(stage_payload)(session, &payload, 8, (uint32_t)i), OK);
        IS(F(post)(session, 0), OK);
        uint64_t *slot = F(reply_slot)(session);
        IS(F(collect)(session, slot, 8), OK);
        IS(*slot, payload);
        CHECK(F(last_rtt_ns)(session) > 0);
    }
    CHECK(F(get_session)(COPROCESSOR, "walk") == pair.co);
    /* The coprocessor collects what it has served. */
    uint64_t served = 0;
    IS(F(collect)(pair.co, &served, 8), OK);
    IS(served, 0x0101010101010101);
    QUIET();
    end(pair);
    FAILS((intptr_t)F(get_session)(CONTROLLER, "walk"), 0, "walk");
}

static void creation(void) {
    FAILS((intptr_t)F(create)("gpu_verbs", "", CONTROLLER, ""), 0, "native_shm");
    FAILS((intptr_t)F(create)(NULL, NULL, CONTROLLER, NULL), 0, "cpu_verbs");
    FAILS((intptr_t)F(create)("native_shm", "", 2, ""), 0, "role 2");
    FAILS((intptr_t)F(create)("native_shm", "colour=blue", CONTROLLER, ""), 0, "colour");
    FAILS((intptr_t)F(create)("native_shm", "path=verbs", CONTROLLER, ""), 0, "path");
    FAILS((intptr_t)F(create)("native_shm", "depth=3", CONTROLLER, ""), 0, "power of two");
    FAILS((intptr_t)F(create)("native_shm", "", CONTROLLER, "\xff"), 0, "UTF-8");
    FAILS((intptr_t)F(create)("memcpy", "", CONTROLLER, ""), 0, "key");
    FAILS((intptr_t)F(get_session)(CONTROLLER, "nobody"), 0, "nobody");
    FAILS((intptr_t)F(get_session)(7, "nobody"), 0, "role 7");
    /* Catalyst's backends ignore what others may know, with a note. */
    void *session = F(create)("/opt/libcatalyst_transport_memcpy.so", "gid=1;dev=x;colour=blue", CONTROLLER, "k");
    CHECK(session);
    SAID("colour");
    /* A key is the newest one's, and ends with it. */
    void *newer = F(create)("memcpy", NULL, CONTROLLER, "k");
    CHECK(newer && newer != session && F(get_session)(CONTROLLER, "k") == newer);
    F(destroy)(session);
    CHECK(F(get_session)(CONTROLLER, "k") == newer);
    F(destroy)(newer);
    QUIET();
    FAILS((intptr_t)F(get_session)(CONTROLLER, "k"), 0, "'k'");
}

static void bad_handle(void *s, const char *word) {
    uint64_t reply = 0x5555, rounds = 9, sample = 7;
    FAILS(F(connect)(s, "127.0.0.1", 1), ERROR, word);
    FAILS(F(connect_async)(s, "127.0.0.1", 1), ERROR, word);
    FAILS(F(exchange_keys)(s), ERROR, word);
    FAILS(F(exchange_keys_async)(s), ERROR, word);
    FAILS(F(establish_channel)(s, ""), ERROR, word);
    FAILS(F(set_coprocessor_fn)(s, ""), ERROR, word);
    FAILS(F(set_message_sizes)(s, 0, 8, 8), ERROR, word);
    FAILS((intptr_t)F(request_slot)(s), 0, word);
    FAILS(F(stage_payload)(s, &reply, 8, 0), ERROR, word);
    FAILS((intptr_t)F(reply_slot)(s), 0, word);
    FAILS(F(post)(s, 0), ERROR, word);
    F(start)(s);
    SAID(word);
    FAILS(F(collect)(s, &reply, 8), ERROR, word);
    IS(reply, 0);
    FAILS(F(last_rtt_ns)(s), 0, word);
    FAILS(F(start_benchmark)(s, 1, 0, 0, &sample, 8, &rounds), ERROR, word);
    IS(rounds, 0);
    IS(sample, 0);
    F(stop)(s);
    SAID(word);
    F(destroy)(s);
    SAID(word);
}

static void handles(void) {
    int foreign = 0;
    struct pair pair = running("", "");
    round_trip(pair, 77, 0, 77);
    uint64_t *slot = F(reply_slot)(pair.ct);
    IS(*slot, 77);
    end(pair);
    bad_handle(NULL, "NULL");
    bad_handle(&foreign, "no session");
    bad_handle(pair.ct, "destroyed");
    /* The slot of a session that is gone: neither a crash nor a write into someone else's. */
    struct pair other = running("", "");
    round_trip(other, 78, 0, 78);
    FAILS(F(collect)(pair.ct, slot, 8), ERROR, "destroyed");
    round_trip(other, 79, 0, 79);
    IS(*(uint64_t *)F(reply_slot)(other.ct), 79);
    end(other);
}

static void order(void) {
    uint64_t reply = 5;
    void *s = F(create)("native_shm", "handshake_ms=300;accept_ms=300", CONTROLLER, "");
    CHECK(s);
    FAILS(F(exchange_keys)(s), ERROR, "connect comes first");
    FAILS(F(establish_channel)(s, ""), ERROR, "exchange_keys comes first");
    FAILS(F(set_message_sizes)(s, 0, 8, 8), ERROR, "exchange_keys comes first");
    FAILS(F(stage_payload)(s, &reply, 8, 0), ERROR, "exchange_keys comes first");
    FAILS((intptr_t)F(request_slot)(s), 0, "exchange_keys comes first");
    FAILS(F(post)(s, 0), ERROR, "exchange_keys comes first");
    FAILS(F(collect)(s, &reply, 8), ERROR, "exchange_keys comes first");
    IS(reply, 0);
    F(start)(s);
    SAID("exchange_keys comes first");
    FAILS(F(set_coprocessor_fn)(s, ""), ERROR, "controller");
    FAILS(F(connect)(s, "127.0.0.1", 0), ERROR, "port 0");
    /* Nobody listens. */
    FAILS(F(connect)(s, "127.0.0.1", 9), CATALYST_TRANSPORT_TIMEOUT, "127.0.0.1:9");
    F(stop)(s);
    F(stop)(s);
    F(destroy)(s);
    QUIET();
    /* Nobody comes; the other side's calls; the transport's name. */
    s = F(create)("native_shm", "accept_ms=200", COPROCESSOR, "");
    FAILS(F(connect)(s, "", 18477), CATALYST_TRANSPORT_TIMEOUT, "18477");
    int64_t token = F(connect_async)(s, "", 18477);
    IS(F(await)(token), CATALYST_TRANSPORT_TIMEOUT);
    SAID("connect_async");
    FAILS(F(await)(token), ERROR, "token");
    FAILS(F(await)(123456), ERROR, "token");
    IS(F(await)(CATALYST_TRANSPORT_TIMEOUT), CATALYST_TRANSPORT_TIMEOUT);
    QUIET();
    F(destroy)(s);
    struct pair pair = connected("memcpy", "", 0);
    FAILS(F(establish_channel)(pair.ct, "rdma"), ERROR, "has been called");
    FAILS(F(set_message_sizes)(pair.co, 0, 8, 8), ERROR, "controller's");
    FAILS(F(stage_payload)(pair.co, &reply, 8, 0), ERROR, "controller's");
    FAILS(F(post)(pair.co, 0), ERROR, "controller's");
    FAILS((intptr_t)F(request_slot)(pair.co), 0, "controller's");
    FAILS(F(connect)(pair.ct, "", 0), ERROR, "is connected");
    FAILS(F(exchange_keys)(pair.ct), ERROR, "exchange_keys");
    F(start)(pair.co);
    SAID("set_coprocessor_fn");
    FAILS(F(set_coprocessor_fn)(pair.co, "no_such_function"), ERROR, "no_such_function");
    end(pair);
    pair = made("memcpy", "handshake_ms=200;accept_ms=200");
    FAILS(F(connect)(pair.ct, "", 0), CATALYST_TRANSPORT_TIMEOUT, "same key");
    FAILS(F(establish_channel)(pair.ct, "carrier pigeon"), ERROR, "carrier pigeon");
    end(pair);
}

static void payloads(void) {
    struct pair pair = running("request=24;reply=40;depth=4", "walk_sum");
    unsigned char big[64] = {0}, reply[64];
    uint64_t sum;
    round_trip(pair, 0x0102, 7, 3007);
    FAILS(F(set_message_sizes)(pair.ct, 1, 25, 8), ERROR, "request=");
    FAILS(F(set_message_sizes)(pair.ct, 70000, 8, 8), ERROR, "70000");
    IS(F(set_message_sizes)(pair.ct, 1, 24, 40), OK);
    FAILS(F(stage_payload)(pair.ct, big, 25, 0), ERROR, "25 bytes");
    FAILS(F(stage_payload)(pair.ct, NULL, 8, 0), ERROR, "NULL");
    FAILS(F(post)(pair.ct, 0), ERROR, "could not be staged");
    FAILS(F(post)(pair.ct, 2), ERROR, "work item 2");
    FAILS(F(post)(pair.ct, 1), ERROR, "nothing has been written");
    memset(reply, 0xee, sizeof reply);
    FAILS(F(collect)(pair.ct, reply, sizeof reply), ERROR, "no round is in flight");
    for (size_t i = 0; i < sizeof reply; i++) IS(reply[i], 0);
    FAILS(F(collect)(pair.ct, NULL, 8), ERROR, "NULL");
    FAILS(F(collect)(pair.ct, reply, UINT64_MAX), ERROR, "so many bytes");
    /* In place, through the request slot; what the reply leaves of a buffer is zeroed. */
    unsigned char *slot = F(request_slot)(pair.ct);
    memset(slot, 2, 24);
    IS(F(post)(pair.ct, 1), OK);
    memset(reply, 0xee, sizeof reply);
    IS(F(collect)(pair.ct, reply, sizeof reply), OK);
    memcpy(&sum, reply, 8);
    IS(sum, 48000);
    for (size_t i = 8; i < sizeof reply; i++) IS(reply[i], 0);
    IS(memcmp(F(reply_slot)(pair.ct), reply, 40), 0);
    /* More than the slot has. */
    IS(F(stage_payload)(pair.ct, big, 8, 0), OK);
    IS(F(post)(pair.ct, 0), OK);
    FAILS(F(collect)(pair.ct, F(reply_slot)(pair.ct), 41), ERROR, "reply slot");
    /* A reply that does not fit is kept. */
    memset(reply, 0xee, sizeof reply);
    FAILS(F(collect)(pair.ct, reply, 4), ERROR, "8 bytes");
    IS(memcmp(reply, "\0\0\0\0\xee", 5), 0);
    IS(F(collect)(pair.ct, reply, 8), OK);
    /* As many in flight as the ring holds, and one more. */
    for (uint64_t i = 0; i < 4; i++) {
        IS(F(stage_payload)(pair.ct, &i, 8, 0), OK);
        IS(F(post)(pair.ct, 0), OK);
    }
    FAILS(F(stage_payload)(pair.ct, big, 8, 0), ERROR, "4 rounds are in flight");
    FAILS(F(post)(pair.ct, 0), ERROR, "could not be staged");
    FAILS(F(post)(pair.ct, 0), ERROR, "4 rounds are in flight");
    for (uint64_t i = 0; i < 4; i++) {
        IS(F(collect)(pair.ct, &sum, 8), OK);
        IS(sum, i * 1000);
    }
    /* While it runs the function stays; after a stop it may change, and the session goes on. */
    FAILS(F(set_coprocessor_fn)(pair.co, ""), ERROR, "stop it first");
    F(stop)(pair.ct);
    F(stop)(pair.co);
    /* What was staged in vain is not sent later in place of what could not be staged. */
    IS(F(stage_payload)(pair.ct, big, 8, 0), OK);
    FAILS(F(post)(pair.ct, 0), ERROR, "stopped");
    FAILS(F(stage_payload)(pair.ct, big, 25, 0), ERROR, "25 bytes");
    IS(F(set_coprocessor_fn)(pair.co, ""), OK);
    F(start)(pair.co);
    F(start)(pair.ct);
    FAILS(F(post)(pair.ct, 0), ERROR, "could not be staged");
    round_trip(pair, 11, 0, 11);
    end(pair);
}

static void failing_rounds(void) {
    struct pair pair = running("", "walk_fail");
    uint64_t request = 1, reply = 0x77, *slot = F(reply_slot)(pair.ct);
    *slot = 0x66;
    IS(F(stage_payload)(pair.ct, &request, 8, 3), OK);
    IS(F(post)(pair.ct, 0), OK);
    FAILS(F(collect)(pair.ct, &reply, 8), ERROR, "decoder 3");
    IS(reply, 0);
    IS(*slot, 0);
    end(pair);

    /* Too late: given up, and the late reply is not the next round's. */
    delay_ms = 600;
    pair = running("timeout_ms=150", "walk_late");
    slot = F(reply_slot)(pair.ct);
    *slot = 0x66;
    IS(F(stage_payload)(pair.ct, &request, 8, 0), OK);
    IS(F(post)(pair.ct, 0), OK);
    FAILS(F(collect)(pair.ct, slot, 8), CATALYST_TRANSPORT_TIMEOUT, "timeout_ms");
    IS(*slot, 0);
    delay_ms = 0;
    pause_ms(700);
    round_trip(pair, 42, 0, 42);
    /* The peer stops, and is destroyed. */
    F(stop)(pair.co);
    IS(F(stage_payload)(pair.ct, &request, 8, 0), OK);
    IS(F(post)(pair.ct, 0), OK);
    FAILS(F(collect)(pair.ct, slot, 8), ERROR, "stopped");
    F(destroy)(pair.co);
    pause_ms(100);
    IS(F(stage_payload)(pair.ct, &request, 8, 0), OK);
    IS(F(post)(pair.ct, 0), OK);
    reply = 0x77;
    FAILS(F(collect)(pair.ct, &reply, 8), ERROR, "closed");
    IS(reply, 0);
    F(destroy)(pair.ct);
    QUIET();
}

static void *waits(void *session) {
    uint64_t reply = 1;
    long status = F(collect)(session, &reply, 8);
    return (void *)(status * 2 + (reply != 0));
}

static void threads(void) {
    pthread_t thread;
    void *status;
    uint64_t request = 1;
    /* A session that another thread's collect holds: busy for others, but stop ends the wait. */
    hold = 1;
    struct pair pair = running("timeout_ms=60000;stop_ms=200", "walk_hold");
    IS(F(stage_payload)(pair.ct, &request, 8, 0), OK);
    IS(F(post)(pair.ct, 0), OK);
    CHECK(!pthread_create(&thread, NULL, waits, pair.ct));
    pause_ms(200);
    FAILS(F(stage_payload)(pair.ct, &request, 8, 0), CATALYST_TRANSPORT_STUCK, "another call");
    /* The slot is that collect's: one that does not get the session leaves it, and zeroes its own buffer alone. */
    uint64_t reply = 0x77, *slot = F(reply_slot)(pair.ct);
    *slot = 0x66;
    FAILS(F(collect)(pair.ct, &reply, 8), CATALYST_TRANSPORT_STUCK, "another call");
    IS(reply, 0);
    FAILS(F(collect)(pair.ct, slot, 8), CATALYST_TRANSPORT_STUCK, "another call");
    IS(*slot, 0x66);
    double began = now();
    F(stop)(pair.ct);
    pthread_join(thread, &status);
    IS((long)status, ERROR * 2);
    SAID("another thread");
    IS(*slot, 0);
    CHECK(now() - began < 30);
    /* A function that does not return: stop and destroy say so and come back. */
    F(stop)(pair.co);
    SAID("has not returned");
    F(destroy)(pair.ct);
    QUIET();
    F(destroy)(pair.co);
    SAID("has not returned");
    CHECK(now() - began < 40);
    hold = 0;
    pause_ms(50);

    /* destroy ends a collect, and a wait for a peer. */
    hold = 1;
    pair = running("timeout_ms=60000", "walk_hold");
    IS(F(stage_payload)(pair.ct, &request, 8, 0), OK);
    IS(F(post)(pair.ct, 0), OK);
    CHECK(!pthread_create(&thread, NULL, waits, pair.ct));
    pause_ms(200);
    began = now();
    F(destroy)(pair.ct);
    pthread_join(thread, &status);
    IS((long)status, ERROR * 2);
    SAID("another thread");
    hold = 0;
    F(destroy)(pair.co);
    QUIET();
    void *co = F(create)("native_shm", "accept_ms=0", COPROCESSOR, "");
    int64_t token = F(connect_async)(co, "", 18478);
    CHECK(token > 0);
    pause_ms(100);
    /* Its function may be set meanwhile, as on a remote coprocessor. */
    IS(F(set_coprocessor_fn)(co, "walk_sum"), OK);
    F(destroy)(co);
    SAID("destroyed");
    FAILS(F(await)(token), ERROR, "token");
    /* A controller's dialling cannot be ended; destroy does not wait for it. */
    void *ct = F(create)("native_shm", "handshake_ms=2000;stop_ms=100", CONTROLLER, "");
    token = F(connect_async)(ct, "127.0.0.1", 9);
    pause_ms(100);
    F(destroy)(ct);
    SAID("another call");
    pause_ms(3000);
    SAID("destroyed");
    CHECK(now() - began < 60);
}

static void memory(void) {
    /* A region that the limits of the process do not allow. */
    struct rlimit old, small = {65536, 65536};
    getrlimit(RLIMIT_FSIZE, &old);
    small.rlim_max = old.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    struct pair pair = made("memcpy", "request=65536;reply=65536;handshake_ms=1000");
    int64_t token = F(connect_async)(pair.co, "", 0);
    IS(F(connect)(pair.ct, "", 0), OK);
    IS(F(await)(token), OK);
    setrlimit(RLIMIT_FSIZE, &small);
    FAILS(F(exchange_keys)(pair.ct), CATALYST_TRANSPORT_MEMORY, "memory");
    setrlimit(RLIMIT_FSIZE, &old);
    token = F(exchange_keys_async)(pair.co);
    IS(F(await)(token), ERROR);
    SAID("exchange_keys");
    end(pair);
}

/* ---- Samples against a known delay ---- */

static void benchmark(void) {
    enum { ROUNDS = 20, DELAY_MS = 20 };
    uint64_t samples[ROUNDS + 1], rounds = 0, sum = 0, least = UINT64_MAX;
    struct pair pair = running("", "walk_late");
    for (uint32_t flags = 0; flags <= 2; flags += 2) {
        delay_ms = DELAY_MS;
        samples[ROUNDS] = 99;
        double began = now();
        IS(F(start_benchmark)(pair.ct, ROUNDS, 5, flags, samples, sizeof samples, &rounds), OK);
        double took = (now() - began) * 1e9;
        IS(rounds, ROUNDS);
        sum = 0;
        for (int i = 0; i < ROUNDS; i++) {
            CHECK(samples[i] >= DELAY_MS * 1000000ull);
            sum += samples[i];
        }
        IS(samples[ROUNDS], 99);
        CHECK(sum <= took);
        CHECK(F(last_rtt_ns)(pair.ct) >= DELAY_MS * 1000000ull);
        delay_ms = 0;
        IS(F(start_benchmark)(pair.ct, ROUNDS, 5, flags, samples, sizeof samples, &rounds), OK);
        for (int i = 0; i < ROUNDS; i++) least = samples[i] < least ? samples[i] : least;
        CHECK(least > 0 && least < DELAY_MS * 1000000ull);
    }
    QUIET();
    /* Fewer samples than rounds, none, and progress. */
    samples[1] = 99;
    IS(F(start_benchmark)(pair.ct, 10, 0, 0, samples, 8, &rounds), OK);
    CHECK(rounds == 10 && samples[1] == 99);
    IS(F(start_benchmark)(pair.ct, 10, 0, CATALYST_TRANSPORT_PROGRESS, NULL, 0, NULL), OK);
    said(__LINE__, 10, "10 of 10 rounds");
    FAILS(F(start_benchmark)(pair.ct, 1, 0, 0, NULL, 8, &rounds), ERROR, "NULL");
    FAILS(F(start_benchmark)(pair.co, 1, 0, 0, samples, 8, &rounds), ERROR, "controller's");
    /* Not among the rounds of others, which stay theirs. */
    uint64_t request = 41, reply = 0;
    IS(F(stage_payload)(pair.ct, &request, 8, 0), OK);
    IS(F(post)(pair.ct, 0), OK);
    FAILS(F(start_benchmark)(pair.ct, 1, 0, 0, samples, 8, &rounds), ERROR, "in flight");
    IS(rounds, 0);
    IS(F(collect)(pair.ct, &reply, 8), OK);
    IS(reply, 41);
    IS(F(start_benchmark)(pair.ct, 1, 0, 0, samples, 8, &rounds), OK);
    end(pair);
    /* The round that fails ends it, with its status and the count of those before. */
    pair = running("timeout_ms=200", "walk_late");
    delay_ms = 700;
    memset(samples, 1, sizeof samples);
    FAILS(F(start_benchmark)(pair.ct, ROUNDS, 0, 0, samples, sizeof samples, &rounds), CATALYST_TRANSPORT_TIMEOUT, "reply");
    CHECK(rounds == 0 && samples[0] == 0 && samples[ROUNDS - 1] == 0);
    delay_ms = 0;
    pause_ms(700);
    end(pair);
}

/* ---- __call ---- */

struct number {
    struct catalyst_transport_array array;
    uint64_t value;
};
static struct number numbers[16];
static int used;

static void *value_of(uint64_t value) {
    struct number *number = &numbers[used++];
    number->value = value;
    number->array = (struct catalyst_transport_array){1, &number->value, 7};
    return &number->array;
}

static void *text_of(const char *text) {
    static char fields[4][256];
    static struct catalyst_transport_array arrays[4];
    static int next;
    int index = next++ % 4;
    memset(fields[index], 0, 256);
    memcpy(fields[index], text, strlen(text));
    arrays[index] = (struct catalyst_transport_array){1, fields[index], 1};
    return &arrays[index];
}

#define V(value) value_of((uint64_t)(value))
#define T(text) text_of(text)
/* A call with one result; the arrays are used once. */
static uint64_t called(catalyst_transport_call *entry, void **args) {
    struct number result = {{1, &result.value, 7}, 0};
    void *results[] = {&result.array};
    entry(args, results);
    used = 0;
    return result.value;
}
#define CALL(name, ...) called(F(name##__call), (void *[]){__VA_ARGS__})
#define STATUS(name, ...) ((int32_t)CALL(name, __VA_ARGS__))

static void calls(void) {
    uint64_t ct = CALL(create, T("native_shm"), T("timeout_ms=1000"), V(CONTROLLER), T("calls"));
    uint64_t co = CALL(create, T("native_shm"), T(""), V(COPROCESSOR), T("calls"));
    CHECK(ct && co && ct != co);
    IS(CALL(get_session, V(CONTROLLER), T("calls")), ct);
    uint64_t token = CALL(connect_async, V(co), T(""), V(18479));
    IS(STATUS(connect, V(ct), T("127.0.0.1"), V(18479)), OK);
    IS(STATUS(await, V(token)), OK);
    token = CALL(exchange_keys_async, V(co));
    IS(STATUS(exchange_keys, V(ct)), OK);
    IS(STATUS(await, V(token)), OK);
    IS(STATUS(establish_channel, V(co), T("shm")), OK);
    IS(STATUS(establish_channel, V(ct), T("shm")), OK);
    IS(STATUS(set_coprocessor_fn, V(co), T("walk_sum")), OK);
    IS(STATUS(set_message_sizes, V(ct), V(0), V(8), V(8)), OK);
    IS(STATUS(start, V(co)), OK);
    IS(STATUS(start, V(ct)), OK);
    unsigned char payload[8] = {1, 2, 3}, *slot = (unsigned char *)CALL(reply_slot, V(ct));
    struct catalyst_transport_array array = {1, payload, 1};
    IS(STATUS(stage_payload, V(ct), &array, V(8), V(9)), OK);
    IS(STATUS(post, V(ct), V(0)), OK);
    uint64_t reply = 0x55;
    int32_t status = 9;
    struct catalyst_transport_array first = {1, &status, 5}, second = {1, &reply, 1}, third;
    void *results[3] = {&first, &second, &third};
    F(collect__call)((void *[]){V(ct), V(8)}, results), used = 0;
    IS(status, OK);
    IS(reply, 6009);
    IS(*(uint64_t *)slot, 6009);
    CHECK(CALL(last_rtt_ns, V(ct)) > 0);
    /* With nothing in flight: the reply is zeroed. */
    F(collect__call)((void *[]){V(ct), V(8)}, results), used = 0;
    IS(status, ERROR);
    IS(reply, 0);
    SAID("in flight");
    unsigned char *request = (unsigned char *)CALL(request_slot, V(ct));
    CHECK(request);
    memset(request, 1, 8);
    IS(STATUS(post, V(ct), V(0)), OK);
    F(collect__call)((void *[]){V(ct), V(8)}, results), used = 0;
    IS(status, OK);
    IS(reply, 8000);
    uint64_t samples[4] = {0}, rounds = 0;
    second.data = samples, third = (struct catalyst_transport_array){1, &rounds, 8};
    F(start_benchmark__call)((void *[]){V(ct), V(4), V(0), V(2), V(sizeof samples)}, results), used = 0;
    CHECK(status == OK && rounds == 4 && samples[0] && samples[3]);
    IS(STATUS(stop, V(ct)), OK);
    IS(STATUS(stop, V(co)), OK);
    IS(STATUS(destroy, V(ct)), OK);
    IS(STATUS(destroy, V(co)), OK);
    QUIET();
    /* Void functions give 0 whatever happened; a string fills its field. */
    IS(STATUS(destroy, V(co)), 0);
    SAID("destroyed");
    char full[257];
    memset(full, 'x', 256), full[256] = 0;
    IS(CALL(get_session, V(CONTROLLER), T(full)), 0);
    SAID("xxx'");
    /* What is missing is an error. */
    IS(CALL(create, T("memcpy"), NULL, V(0), T("x")), 0);
    SAID("slot 1");
    IS(STATUS(connect, V(ct), &(struct catalyst_transport_array){1, NULL, 1}, V(1)), ERROR);
    SAID("slot 1");
    F(post__call)(NULL, NULL);
    said(__LINE__, 2, "NULL");
}

/* ---- __wrapper ---- */

struct packer {
    char bytes[1024];
    size_t size;
};

static void pack(struct packer *packer, const void *bytes, size_t size) {
    memcpy(packer->bytes + packer->size, bytes, size);
    packer->size += size;
}

/* Format: s is a string, h u16, i 32 bits, l 64 bits. */
static struct catalyst_transport_packed wrapped(catalyst_transport_wrapper *entry, const char *format, ...) {
    struct packer packer = {.size = 0};
    va_list list;
    va_start(list, format);
    for (; *format; format++) {
        char field[256] = {0};
        uint16_t half;
        uint32_t word;
        uint64_t wide;
        switch (*format) {
        case 's': strncpy(field, va_arg(list, const char *), 255), pack(&packer, field, 256); break;
        case 'h': half = (uint16_t)va_arg(list, int), pack(&packer, &half, 2); break;
        case 'i': word = va_arg(list, uint32_t), pack(&packer, &word, 4); break;
        case 'l': wide = va_arg(list, uint64_t), pack(&packer, &wide, 8); break;
        }
    }
    va_end(list);
    /* Exactly as long as it is said to be, for whoever watches accesses. */
    char *exact = malloc(packer.size + 1);
    memcpy(exact, packer.bytes, packer.size);
    struct catalyst_transport_packed result = entry(exact, packer.size);
    free(exact);
    return result;
}

static int64_t in_place(struct catalyst_transport_packed packed, size_t size) {
    int64_t value = 0;
    if (packed.size != size) die(__LINE__, "a result of %zu bytes and not %zu", packed.size, size);
    memcpy(&value, packed.value.bytes, size);
    return size == 4 ? (int32_t)value : value;
}
#define WRAP8(name, ...) in_place(wrapped(F(name##__wrapper), __VA_ARGS__), 8)
#define WRAP4(name, ...) in_place(wrapped(F(name##__wrapper), __VA_ARGS__), 4)

static void refused(struct catalyst_transport_packed packed, const char *word) {
    CHECK(packed.size == 0 && packed.value.ptr && strstr(packed.value.ptr, word));
    free(packed.value.ptr);
    SAID(word);
}

static void wrappers(void) {
    uint64_t ct = (uint64_t)WRAP8(create, "ssis", "memcpy", "", CONTROLLER, "wrap");
    uint64_t co = (uint64_t)WRAP8(create, "ssis", "memcpy", "", COPROCESSOR, "wrap");
    CHECK(ct && co);
    IS(WRAP8(get_session, "is", COPROCESSOR, "wrap"), co);
    int64_t token = WRAP8(connect_async, "lsh", co, "", 0);
    IS(WRAP4(connect, "lsh", ct, "", 0), OK);
    IS(WRAP4(await, "l", token), OK);
    token = WRAP8(exchange_keys_async, "l", co);
    IS(WRAP4(exchange_keys, "l", ct), OK);
    IS(WRAP4(await, "l", token), OK);
    IS(WRAP4(establish_channel, "ls", co, "memcpy"), OK);
    IS(WRAP4(establish_channel, "ls", ct, "memcpy"), OK);
    IS(WRAP4(set_coprocessor_fn, "ls", co, ""), OK);
    IS(WRAP4(set_message_sizes, "lill", ct, 0, (uint64_t)8, (uint64_t)8), OK);
    IS(WRAP4(start, "l", co), 0);
    IS(WRAP4(start, "l", ct), 0);
    struct catalyst_transport_packed result =
        wrapped(F(start_benchmark__wrapper), "liiil", ct, 5, 0, 0, (uint64_t)40);
    IS(result.size, 4 + 40 + 8);
    int32_t status;
    uint64_t samples[5], rounds;
    memcpy(&status, result.value.ptr, 4);
    memcpy(samples, result.value.ptr + 4, 40);
    memcpy(&rounds, result.value.ptr + 44, 8);
    free(result.value.ptr);
    CHECK(status == OK && rounds == 5 && samples[0] && samples[4]);
    IS(WRAP4(stop, "l", ct), 0);
    IS(WRAP4(stop, "l", co), 0);
    IS(WRAP4(destroy, "l", ct), 0);
    IS(WRAP4(destroy, "l", co), 0);
    QUIET();
    /* What a function returns is its result, failures too; what cannot be read is an error. */
    IS(WRAP4(exchange_keys, "l", ct), ERROR);
    SAID("destroyed");
    refused(wrapped(F(connect__wrapper), "ls", ct, "x"), "264 bytes");
    refused(wrapped(F(exchange_keys__wrapper), "ll", ct, ct), "16 bytes");
    refused(F(await__wrapper)(NULL, 0), "0 bytes");
    refused(F(await__wrapper)(NULL, 8), "8 bytes");
    refused(wrapped(F(start_benchmark__wrapper), "liiil", ct, 5, 0, 0, UINT64_MAX), "allowed");
}

/* ---- Cycles ---- */

static int descriptors(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder)) count++;
    closedir(folder);
    return count;
}

static void cycles(int count) {
    int before = 0;
    for (int i = 0; i < count; i++) {
        /* All of it, on both ways; and every tenth time one that never connects. */
        struct pair pair = i % 2 ? running("", "walk_sum") : connected("native_shm", "", 18480);
        if (i % 2) round_trip(pair, 3, 4, 3004);
        if (i % 10 == 0) {
            void *s = F(create)("cpu_verbs", "", i % 20 ? CONTROLLER : COPROCESSOR, "cycle");
            CHECK(s);
            F(destroy)(s);
        }
        end(pair);
        /* The first have made what stays. */
        if (i == 20) before = descriptors();
    }
    IS(descriptors(), before);
    QUIET();
}

int main(int argc, char **argv) {
    FILE *file = tmpfile();
    setvbuf(stdout, NULL, _IONBF, 0);
    own_stderr = dup(2);
    said_file = dup(fileno(file));
    dup2(said_file, 2);
    fclose(file);
    alarm(500);
    if (argc == 3 && !strcmp(argv[1], "cycles")) {
        cycles(atoi(argv[2]));
    } else {
        struct {
            const char *name;
            void (*part)(void);
        } parts[] = {{"creation", creation}, {"handles", handles}, {"order", order}, {"payloads", payloads},
                     {"failing_rounds", failing_rounds}, {"threads", threads}, {"memory", memory},
                     {"benchmark", benchmark}, {"calls", calls}, {"wrappers", wrappers}};
        int all = argc == 1;
        if (all || !strcmp(argv[1], "rounds")) rounds_as_generated("memcpy", 0), rounds_as_generated("native_shm", 18476);
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
            if (all || !strcmp(argv[1], parts[i].name)) parts[i].part();
    }
    printf("walked: %d checks\n", checks);
    return 0;
}
