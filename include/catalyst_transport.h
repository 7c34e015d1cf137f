/*
 * catalyst_transport.h: request and reply between a controller and a coprocessor, from C.
 *
 * The interface that programs compiled by PennyLane Catalyst call, in libcatalyst_transport.so
 * (`cargo build --release --features capi`). From Python see docs/catalyst.md.
 *
 * One round: the controller stages a payload, posts it, and collects the reply; the coprocessor answers from a thread of
 * its own. Bring-up of both sides in one process, without error handling:
 *
 *     void *ct = __catalyst__transport__create("memcpy", "", CATALYST_TRANSPORT_CONTROLLER, "pair");
 *     void *co = __catalyst__transport__create("memcpy", "", CATALYST_TRANSPORT_COPROCESSOR, "pair");
 *     int64_t token = __catalyst__transport__connect_async(co, "", 0);
 *     __catalyst__transport__connect(ct, "", 0);
 *     __catalyst__transport__await(token);
 *     token = __catalyst__transport__exchange_keys_async(co);
 *     __catalyst__transport__exchange_keys(ct);
 *     __catalyst__transport__await(token);
 *     __catalyst__transport__establish_channel(co, "");
 *     __catalyst__transport__establish_channel(ct, "");
 *     __catalyst__transport__set_coprocessor_fn(co, "");
 *     __catalyst__transport__set_message_sizes(ct, 0, 8, 8);
 *     __catalyst__transport__start(co);
 *     __catalyst__transport__start(ct);
 *
 *     __catalyst__transport__stage_payload(ct, syndrome, 8, decoder_id);
 *     __catalyst__transport__post(ct, 0);
 *     __catalyst__transport__collect(ct, correction, 8);
 *
 * Sessions. A session is a number in the shape of a pointer: it is looked up and never followed. NULL, a number that was
 * never given, or one that has been destroyed is an error, never a crash. Numbers are not used again.
 *
 * Errors. Functions that return int give one of the statuses below. Each failure is also one line on stderr
 * ("catalyst-transport: <call>: <what happened, and what to do>"), because generated code ignores statuses. After a failed
 * `collect` the reply buffer is zeroed, as is the reply slot: it never holds an old reply as if it were new.
 *
 * Threads. Any function may be called from any thread. A call on a session that another thread's call holds waits for it
 * for at most the session's stop_ms (default 5 s), then is CATALYST_TRANSPORT_STUCK. `stop` and `destroy` end a
 * `collect` that waits in another thread, `destroy` also a coprocessor's wait for its peer.
 *
 * Strings end with NUL and are UTF-8. A NULL string is the empty one.
 */
#ifndef CATALYST_TRANSPORT_H
#define CATALYST_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Statuses. */
enum {
    CATALYST_TRANSPORT_OK = 0,
    CATALYST_TRANSPORT_ERROR = -1,   /* none of those below */
    CATALYST_TRANSPORT_MEMORY = -2,  /* memory cannot be had or not be registered with the device */
    CATALYST_TRANSPORT_TIMEOUT = -3, /* a wait ended at its deadline */
    CATALYST_TRANSPORT_STUCK = -4    /* another call, or a coprocessor function, does not end */
};

/* Roles. */
enum { CATALYST_TRANSPORT_CONTROLLER = 0, CATALYST_TRANSPORT_COPROCESSOR = 1 };

/* Flags of start_benchmark; others are ignored. */
enum {
    CATALYST_TRANSPORT_SOFTWARE_CLOCK = 2, /* time the whole round, from staging to the reply */
    CATALYST_TRANSPORT_PROGRESS = 4        /* say ten times on stderr how far it is */
};

/* ---- Sessions -------------------------------------------------------------------------------------------------------- */

/*
 * Makes a session that is not yet connected; NULL on failure.
 *
 * backend_lib chooses the data path. It is a name, or a path that has the name in it (the file's own name counts first):
 *     cpu_verbs      RDMA, in the wire format of Catalyst's backend of this name
 *     memcpy         shared memory; the two sessions of this process that have the same key are a pair
 *     native_verbs   RDMA, in this library's own wire format
 *     native_shm     shared memory between processes of this host
 * Anything else is refused.
 *
 * config is "key=value;key=value": dev, port, gid (the RDMA device; found by themselves when left out), bind (where a
 * coprocessor listens; default 0.0.0.0, all IPv4 interfaces), depth (256), request and reply (the longest payloads; 8 and 8
 * bytes), accept_ms (60000; 0 is for ever), handshake_ms (5000), timeout_ms (collect, 1000), stop_ms (5000), liveness_ms
 * (5000), cpu or cpu_pin, rt, mlock, low_latency (for the engine's thread). cpu_verbs and memcpy ignore unknown keys
 * with a note on stderr, and cpu_pin and rt on a controller; the native ones refuse unknown keys.
 *
 * A key that is not empty is remembered with the role for get_session until destroy. A second session with the same role
 * and key takes the key over.
 */
void *__catalyst__transport__create(const char *backend_lib, const char *config, int32_t role, const char *key);

/* The session with this role and key; NULL if there is none. */
void *__catalyst__transport__get_session(int32_t role, const char *key);

/* Stops the session and releases everything. It takes milliseconds, and with a coprocessor function that does not return or a
 * call in another thread that cannot be ended at most three times stop_ms and half a second: that is told on stderr then, and
 * what is in use is released when it ends. */
void __catalyst__transport__destroy(void *session);

/* ---- Bring-up, in this order ----------------------------------------------------------------------------------------- */

/* The controller dials peer (host name, IPv4 or IPv6 address) and port; the coprocessor listens at port, for as long as
 * accept_ms. With memcpy neither counts. Where the data path cannot be brought up, this is where it shows. */
int __catalyst__transport__connect(void *session, const char *peer, uint16_t port);

/* The same in a thread of its own. Gives a token for await, or a status below 0. */
int64_t __catalyst__transport__connect_async(void *session, const char *peer, uint16_t port);

/* Registers a region of 16 KiB, or more where depth and message sizes need it, tells the peer, learns the peer's, and
 * proves that data passes in both directions. Both sides have to be in it at the same time. */
int __catalyst__transport__exchange_keys(void *session);

/* The same in a thread of its own. Gives a token for await, or a status below 0. */
int64_t __catalyst__transport__exchange_keys_async(void *session);

/* Waits for the end of an asynchronous call, gives its status and forgets the token. Bounded by the call's own deadlines.
 * A status below 0 in place of a token is given back as it is. */
int __catalyst__transport__await(int64_t token);

/* Lets the session go on with the channel. transport names the data path: rdma or "" for the backend's own, or cpu_verbs,
 * native_verbs, verbs, memcpy, native_shm, shm, which have to fit the backend. */
int __catalyst__transport__establish_channel(void *session, const char *transport);

/* Coprocessor: what answers from the next start on. "" echoes; another name is looked up among the process's symbols
 * (dlsym) and has the type below. May be called at any time while the session does not run, also before an
 * asynchronous connect has ended. */
int __catalyst__transport__set_coprocessor_fn(void *session, const char *symbol);

/* frame: the payload, padded with zeros to at least 8 bytes, then uint32_t decoder id, then uint32_t sequence number;
 * in_len bytes together (16 with payloads of 8). Writes the reply to out and returns its bytes, 1 to out_cap; 0 means that
 * it failed: that round fails at the controller and the session goes on. ctx is NULL. Called on the engine's thread; it
 * must not let a C++ exception out. */
typedef size_t catalyst_transport_function(const void *frame, size_t in_len, void *out, size_t out_cap, void *ctx);

/* Controller: sizes of the requests and replies of work item idx. At most what the configuration's request and reply say. */
int __catalyst__transport__set_message_sizes(void *session, uint32_t idx, uint64_t in_bytes, uint64_t out_bytes);

/* Starts; returns at once. A coprocessor serves in a thread of its own. A failure is told on stderr only. */
void __catalyst__transport__start(void *session);

/* Stops; may be called again, and start after it. Rounds in flight are given up. A failure is told on stderr only. */
void __catalyst__transport__stop(void *session);

/* ---- Rounds ---------------------------------------------------------------------------------------------------------- */

/* Controller: where the next round's request may be built in place, request bytes long (see config); NULL on failure. The
 * next post sends as many bytes as its work item has, with decoder id 0. To be asked for anew in each round; the address
 * stays the same until destroy. */
void *__catalyst__transport__request_slot(void *session);

/* Controller: copies the next round's request. A later call before the post takes its place. */
int __catalyst__transport__stage_payload(void *session, const void *payload, uint64_t bytes, uint32_t decoder_id);

/* Where collect leaves each reply, reply bytes long (see config); NULL on failure. The contents stay until the next
 * collect, the address until destroy. */
void *__catalyst__transport__reply_slot(void *session);

/* Controller: sends the staged request, with the sizes of work item idx. Up to depth rounds may be in flight. */
int __catalyst__transport__post(void *session, uint32_t idx);

/* Waits for the reply of the oldest round in flight (on a coprocessor: for the next reply that it has sent), at most
 * timeout_ms. Copies it to reply and zeroes what it leaves of the buffer; reply may be the reply slot, and then nothing is
 * copied twice. On failure all of the buffer is zeroed. A round that timed out is given up, its late reply dropped; a
 * reply longer than bytes is an error and kept for the next collect. */
int __catalyst__transport__collect(void *session, void *reply, uint64_t bytes);

/* Round-trip time of the last collected round in nanoseconds; 0 before the first. */
uint64_t __catalyst__transport__last_rtt_ns(void *session);

/* Controller, started, with no round in flight: iters rounds of work item 0, whose request is the number of the round, one
 * after the other. samples gets the time of each round in nanoseconds, as far as samples_bytes hold them (both may be 0);
 * rounds gets the count of those that succeeded. The first that fails ends it with its status; its sample and those after
 * it are 0. */
int __catalyst__transport__start_benchmark(void *session, uint32_t iters, uint32_t decoder_id, uint32_t flags,
                                           uint64_t *samples, uint64_t samples_bytes, uint64_t *rounds);

/* ---- Entry points of compiled code ----------------------------------------------------------------------------------- */

/*
 * Each function has a second entry point, `<name>__call`. Every pointer in args and results is to an array:
 */
struct catalyst_transport_array {
    int64_t rank;
    void *data;
    int8_t dtype;
};
/*
 * A number is an array of one element, a session or an address a uint64_t, a string 256 bytes padded with NUL. The first
 * result is the function's value (int32_t 0 for start, stop, destroy). collect takes (session, bytes) and gives (int32_t,
 * the reply); start_benchmark takes (session, iters, decoder_id, flags, samples_bytes) and gives (int32_t, samples, rounds).
 */
typedef void catalyst_transport_call(void **args, void **results);

catalyst_transport_call __catalyst__transport__create__call, __catalyst__transport__get_session__call,
    __catalyst__transport__connect__call, __catalyst__transport__connect_async__call,
    __catalyst__transport__exchange_keys__call, __catalyst__transport__exchange_keys_async__call,
    __catalyst__transport__await__call, __catalyst__transport__establish_channel__call,
    __catalyst__transport__set_coprocessor_fn__call, __catalyst__transport__set_message_sizes__call,
    __catalyst__transport__request_slot__call, __catalyst__transport__stage_payload__call,
    __catalyst__transport__reply_slot__call, __catalyst__transport__post__call, __catalyst__transport__start__call,
    __catalyst__transport__collect__call, __catalyst__transport__last_rtt_ns__call, __catalyst__transport__stop__call,
    __catalyst__transport__destroy__call, __catalyst__transport__start_benchmark__call;

/*
 * Fourteen also have `<name>__wrapper`. Arguments stand one behind the other without gaps, strings as 256 bytes. A result
 * of up to 8 bytes stands in place; a longer one (start_benchmark: int32_t status, samples, uint64_t rounds) is at ptr.
 * When the call could not be made, size is 0 and ptr a text. What is at ptr is the caller's to free().
 */
struct catalyst_transport_packed {
    union {
        char *ptr;
        char bytes[8]; /* `inline` in the executor's own words, which C keeps for itself */
    } value;
    size_t size;
};
typedef struct catalyst_transport_packed catalyst_transport_wrapper(const char *data, size_t size);

catalyst_transport_wrapper __catalyst__transport__create__wrapper, __catalyst__transport__get_session__wrapper,
    __catalyst__transport__connect__wrapper, __catalyst__transport__connect_async__wrapper,
    __catalyst__transport__exchange_keys__wrapper, __catalyst__transport__exchange_keys_async__wrapper,
    __catalyst__transport__await__wrapper, __catalyst__transport__establish_channel__wrapper,
    __catalyst__transport__set_coprocessor_fn__wrapper, __catalyst__transport__set_message_sizes__wrapper,
    __catalyst__transport__start__wrapper, __catalyst__transport__stop__wrapper, __catalyst__transport__destroy__wrapper,
    __catalyst__transport__start_benchmark__wrapper;

/* ---- The plugin of Catalyst's C++ runtime ---------------------------------------------------------------------------- */

/*
 * Each makes a C++ object (catalyst::transport::ControllerSession, CoprocessorSession) for the runtime; NULL on failure. To be
 * deleted by C++. The configuration is that of create; without path and wire it is Catalyst's cpu_verbs, path=verbs;wire=native
 * and path=shm choose the native wire format. convention=per_request or launch_once fixes what a coprocessor says that it
 * takes; without it, it takes either.
 */
void *CatalystTransportControllerFactory(const char *config);
void *CatalystTransportCoprocessorFactory(const char *config);

#ifdef __cplusplus
}
#endif

#endif
