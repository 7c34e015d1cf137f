// A host of transport plugins, as Catalyst's runtime is one: finds both libraries in the folder that CATALYST_TRANSPORT_PATH
// names, makes both objects, and calls every virtual method of both roles. Written from what is known of the interface.
// Exits 0 and says "hosted ..." when all was as it has to be.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <stdexcept>
#include <string>
#include <thread>
#include <typeinfo>
#include <unistd.h>
#include <vector>

namespace catalyst {
namespace transport {

struct ConnectInfo {
    std::string peer;
    std::uint16_t oob_port;
};
struct MemRegion {
    void *addr;
    std::size_t size;
    std::uint32_t lkey, rkey;
    int kind;
};
struct PeerRef {
    std::uint32_t rkey;
    std::uint64_t remote_addr;
    std::size_t size;
};
struct ChannelDesc {
    std::string data_path;
};
static_assert(sizeof(ConnectInfo) == 40 && sizeof(MemRegion) == 32 && sizeof(PeerRef) == 24 && sizeof(ChannelDesc) == 32);

class TransportSession {
  public:
    virtual ~TransportSession() = default;
    virtual int connect(const ConnectInfo &info) = 0;
    virtual MemRegion alloc_memory(std::size_t size, int kind) = 0;
    virtual int preferred_mem_kind() const = 0;
    virtual PeerRef exchange_keys(const MemRegion &local) = 0;
    virtual void establish_channel(const ChannelDesc &desc, const MemRegion &local, const PeerRef &peer) = 0;
    virtual void start() = 0;
    virtual int collect(void *const *replies, const std::uint64_t *capacities, std::size_t count) = 0;
    virtual void stop() = 0;
    virtual std::uint64_t last_rtt_ns() const = 0;
};

class ControllerSession : public TransportSession {
  public:
    virtual void commit_work_item(std::uint32_t idx, std::uint64_t in_bytes, std::uint64_t out_bytes) = 0;
    virtual int kick(std::uint32_t idx) = 0;
    virtual void *data_slot() = 0;
    virtual void write_data_slot(const void *src, std::uint64_t bytes, std::uint32_t decoder_id) = 0;
    virtual void *reply_slot() = 0;
};

using Function = std::size_t (*)(const void *frame, std::size_t in_len, void *out, std::size_t out_cap, void *ctx);

struct Launch {
    void *ring;
    std::uint32_t ring_slots;
    void *handoff;
    const int *stop;
    std::uint64_t total;
    void *stream;
};
using Launcher = int (*)(const Launch *launch, void *ctx);

class CoprocessorSession : public TransportSession {
  public:
    virtual void set_coprocessor_fn(Function fn, void *ctx) = 0;
    virtual void set_coprocessor_launcher(Launcher fn, void *ctx) = 0;
    virtual std::int32_t coprocessor_fn_convention() const = 0;
};

} // namespace transport
} // namespace catalyst

using namespace catalyst::transport;

static std::atomic<int> checks{0};

#define CHECK(condition)                                                                                                     \
    do {                                                                                                                     \
        checks++;                                                                                                            \
        if (!(condition)) {                                                                                                  \
            std::fprintf(stderr, "plugin.cpp:%d: %s\n", __LINE__, #condition);                                              \
            std::_Exit(1);                                                                                                   \
        }                                                                                                                    \
    } while (0)

// A call that throws a std::runtime_error whose text has the word. Objects on the way out are destroyed.
#define THROWS(call, word)                                                                                                   \
    do {                                                                                                                     \
        bool destroyed_ = false, caught_ = false;                                                                            \
        try {                                                                                                                \
            struct Guard {                                                                                                   \
                bool &flag;                                                                                                  \
                ~Guard() { flag = true; }                                                                                    \
            } guard_{destroyed_};                                                                                            \
            (void)(call);                                                                                                    \
        } catch (const std::runtime_error &error) {                                                                          \
            caught_ = true;                                                                                                  \
            if (!std::strstr(error.what(), word) || std::strncmp(error.what(), "catalyst-transport: ", 20)) {                 \
                std::fprintf(stderr, "plugin.cpp:%d: '%s' is not in: %s\n", __LINE__, word, error.what());                   \
                std::_Exit(1);                                                                                               \
            }                                                                                                                \
        }                                                                                                                    \
        CHECK(caught_ &&destroyed_);                                                                                         \
    } while (0)

using Factory = TransportSession *(*)(const char *config);

static Factory factory(const char *role, const char *symbol) {
    const char *folder = std::getenv("CATALYST_TRANSPORT_PATH");
    CHECK(folder);
    std::string path = std::string(folder) + "/libcatalyst_transport_cpu_verbs_" + role + ".so";
    void *library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (!library) std::fprintf(stderr, "%s\n", dlerror());
    CHECK(library);
    // The runtime takes each factory from its own role's library; both are in both.
    CHECK(dlsym(library, "CatalystTransportControllerFactory") && dlsym(library, "CatalystTransportCoprocessorFactory"));
    return reinterpret_cast<Factory>(dlsym(library, symbol));
}

// ---- Coprocessor functions ----

static std::size_t add(const void *frame, std::size_t in_len, void *out, std::size_t out_cap, void *ctx) {
    CHECK(in_len == 16 && out_cap == 8);
    std::uint64_t value;
    std::uint32_t decoder, sequence;
    std::memcpy(&value, frame, 8);
    std::memcpy(&decoder, static_cast<const char *>(frame) + 8, 4);
    std::memcpy(&sequence, static_cast<const char *>(frame) + 12, 4);
    CHECK(sequence > 0);
    value += decoder + *static_cast<std::uint64_t *>(ctx);
    std::memcpy(out, &value, 8);
    return 8;
}

// A worker launched once, such as a kernel on a device: a thread that answers with the complement.
struct Worker {
    std::thread thread;
    std::atomic<int> served{0};
};

struct Slot {
    std::uint64_t value;
    std::uint32_t decoder, seq;
    char rest[48];
};

static int launch(const Launch *given, void *ctx) {
    auto *worker = static_cast<Worker *>(ctx);
    Launch launch = *given;
    CHECK(launch.ring && launch.handoff && launch.ring_slots == 256 && *launch.stop == 0 && launch.total == 0);
    worker->thread = std::thread([=] {
        auto *ring = static_cast<Slot *>(launch.ring), *handoff = static_cast<Slot *>(launch.handoff);
        for (std::uint32_t next = 0; !__atomic_load_n(launch.stop, __ATOMIC_ACQUIRE);) {
            Slot &in = ring[next % 256], &out = handoff[next % 256];
            if (__atomic_load_n(&in.seq, __ATOMIC_ACQUIRE) != next + 1) {
                std::this_thread::yield();
                continue;
            }
            __atomic_store_n(&out.value, ~__atomic_load_n(&in.value, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
            __atomic_store_n(&out.decoder, __atomic_load_n(&in.decoder, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
            __atomic_store_n(&out.seq, ++next, __ATOMIC_RELEASE);
            worker->served++;
        }
    });
    return 0;
}

static int refuse(const Launch *, void *) { return 5; }

// ---- Parts ----

struct Pair {
    ControllerSession *controller;
    CoprocessorSession *coprocessor;
    MemRegion controller_region, coprocessor_region;
    PeerRef controller_peer, coprocessor_peer;
};

static Pair make(Factory controllers, Factory coprocessors, const std::string &config, const char *more = "") {
    Pair pair{};
    TransportSession *a = controllers((config + ";pair=p").c_str());
    TransportSession *b = coprocessors((config + more + ";pair=p").c_str());
    CHECK(a && b);
    // As the runtime does: from the base to the role, and not to the other.
    pair.controller = dynamic_cast<ControllerSession *>(a);
    pair.coprocessor = dynamic_cast<CoprocessorSession *>(b);
    CHECK(pair.controller == a && pair.coprocessor == b);
    CHECK(!dynamic_cast<CoprocessorSession *>(a) && !dynamic_cast<ControllerSession *>(b));
    CHECK(dynamic_cast<TransportSession *>(pair.controller) == a && dynamic_cast<void *>(a) == static_cast<void *>(a));
    CHECK(std::string(typeid(*a).name()) == "N18catalyst_transport10ControllerE");
    CHECK(typeid(*a) != typeid(*b) && typeid(*a) == typeid(*pair.controller));
    return pair;
}

static void bring_up(Pair &pair, std::uint16_t port) {
    ChannelDesc desc{"cpu_verbs"}, shm{"shm"};
    const ConnectInfo info{"a peer's name that is too long for a short string, and which a coprocessor ignores", port};
    int status = -1;
    std::thread other([&] { status = pair.coprocessor->connect(info); });
    CHECK(pair.controller->connect(ConnectInfo{"127.0.0.1", port}) == 0);
    other.join();
    CHECK(status == 0);
    CHECK(pair.controller->preferred_mem_kind() == 0 && pair.coprocessor->preferred_mem_kind() == 0);
    pair.controller_region = pair.controller->alloc_memory(16384, 0);
    pair.coprocessor_region = pair.coprocessor->alloc_memory(16384, 0);
    CHECK(pair.controller_region.addr && pair.controller_region.size >= 16384 && pair.controller_region.kind == 0);
    MemRegion wrong = pair.controller_region;
    wrong.addr = static_cast<char *>(wrong.addr) + 64;
    THROWS(pair.controller->exchange_keys(wrong), "local region");
    other = std::thread([&] { pair.coprocessor_peer = pair.coprocessor->exchange_keys(pair.coprocessor_region); });
    pair.controller_peer = pair.controller->exchange_keys(pair.controller_region);
    other.join();
    CHECK(pair.controller_peer.size >= 16384 && pair.coprocessor_peer.size >= 16384);
    THROWS(pair.controller->establish_channel(desc, pair.controller_region, pair.controller_peer), "native_shm");
    // One after the other, the coprocessor first.
    pair.coprocessor->establish_channel(shm, pair.coprocessor_region, pair.coprocessor_peer);
    pair.controller->establish_channel(ChannelDesc{""}, pair.controller_region, pair.controller_peer);
    pair.controller->commit_work_item(0, 8, 8);
}

static void rounds(Pair &pair, std::uint64_t (*wanted)(std::uint64_t value, std::uint32_t decoder)) {
    for (std::uint64_t i = 0; i < 200; i++) {
        std::uint64_t value = i * 0x123456789, low = 0;
        std::uint32_t decoder = i % 3, high = 0;
        pair.controller->write_data_slot(&value, 8, decoder);
        CHECK(pair.controller->kick(0) == 0);
        void *slot = pair.controller->reply_slot();
        std::uint64_t capacity = 8;
        if (i % 2) {
            // Into the slot itself.
            CHECK(pair.controller->collect(&slot, &capacity, 1) == 0);
            std::memcpy(&low, slot, 8);
            CHECK(low == wanted(value, decoder));
        } else {
            // Scattered over three buffers, the last of which gets nothing.
            char rest[4] = {1, 1, 1, 1};
            low = 0;
            void *buffers[] = {&low, &high, rest};
            const std::uint64_t capacities[] = {4, 4, 4};
            CHECK(pair.controller->collect(buffers, capacities, 3) == 0);
            CHECK((low | std::uint64_t(high) << 32) == wanted(value, decoder));
            CHECK(!std::memcmp(rest, "\0\0\0\0", 4) && !std::memcmp(slot, buffers[0], 4));
        }
        CHECK(pair.controller->last_rtt_ns() > 0);
    }
}

static void end(Pair &pair) {
    pair.controller->stop();
    pair.coprocessor->stop();
    pair.controller->stop();
    delete static_cast<TransportSession *>(pair.controller);
    delete pair.coprocessor;
}

int main() {
    alarm(300);
    const std::string config = "path=shm;handshake_ms=3000;accept_ms=3000;timeout_ms=3000;bind=127.0.0.1";
    Factory controllers = factory("controller", "CatalystTransportControllerFactory");
    Factory coprocessors = factory("coprocessor", "CatalystTransportCoprocessorFactory");
    std::uint64_t offset = 1000;

    // Both refuse what they cannot make, and are Catalyst's own backend by default.
    CHECK(!controllers("path=pigeon") && !controllers("path=shm;colour=blue") && !coprocessors("path=shm;convention=x"));
    TransportSession *session = controllers("dev=nothing0;gid=1;colour=blue;pair=p");
    CHECK(session && session->connect(ConnectInfo{"127.0.0.1", 0}) == -1);
    delete session;
    session = coprocessors(nullptr);
    CHECK(session);
    delete session;

    // Out of order: statuses, and exceptions from methods that have none.
    Pair pair = make(controllers, coprocessors, config);
    std::uint64_t value = 5, capacity = 8;
    void *buffer = &value;
    THROWS(pair.controller->alloc_memory(16384, 0), "connect comes first");
    THROWS(pair.controller->exchange_keys(MemRegion{}), "local region");
    THROWS(pair.controller->establish_channel(ChannelDesc{"shm"}, MemRegion{}, PeerRef{}), "exchange_keys comes first");
    THROWS(pair.controller->start(), "exchange_keys comes first");
    THROWS(pair.controller->commit_work_item(0, 8, 8), "exchange_keys comes first");
    THROWS(pair.controller->write_data_slot(&value, 8, 0), "exchange_keys comes first");
    CHECK(pair.controller->kick(0) == -1 && !pair.controller->data_slot());
    CHECK(pair.controller->collect(&buffer, &capacity, 1) == -1 && value == 0);
    CHECK(pair.controller->collect(nullptr, nullptr, 1) == -1);
    CHECK(pair.controller->last_rtt_ns() == 0);
    CHECK(pair.controller->connect(ConnectInfo{"127.0.0.1", 9}) == -3);
    CHECK(pair.coprocessor->coprocessor_fn_convention() == 0);
    THROWS(pair.coprocessor->set_coprocessor_fn(nullptr, nullptr), "NULL");
    THROWS(pair.coprocessor->set_coprocessor_launcher(nullptr, nullptr), "NULL");

    // One call per request.
    pair.coprocessor->set_coprocessor_fn(add, &offset);
    THROWS(pair.coprocessor->set_coprocessor_launcher(launch, nullptr), "other convention");
    bring_up(pair, 18481);
    THROWS(pair.controller->commit_work_item(1, 9, 8), "request=");
    pair.coprocessor->start();
    pair.controller->start();
    THROWS(pair.controller->start(), "start");
    THROWS(pair.coprocessor->set_coprocessor_fn(add, nullptr), "stop it first");
    THROWS(pair.controller->write_data_slot(&value, 9, 0), "9 bytes");
    THROWS(pair.controller->alloc_memory(64, 7), "memory kind 7");
    CHECK(pair.controller->kick(3) == -1);
    rounds(pair, [](std::uint64_t value, std::uint32_t decoder) { return value + decoder + 1000; });
    auto *slot = static_cast<std::uint64_t *>(pair.controller->data_slot());
    *slot = 77;
    CHECK(pair.controller->kick(0) == 0 && pair.controller->collect(&buffer, &capacity, 1) == 0 && value == 1077);
    value = 9;
    CHECK(pair.controller->collect(&buffer, &capacity, 1) == -1 && value == 0);
    CHECK(pair.coprocessor->collect(&buffer, &capacity, 1) == 0 && value == 1000);
    end(pair);

    // Launched once, over two starts.
    pair = make(controllers, coprocessors, config, ";convention=launch_once");
    CHECK(pair.coprocessor->coprocessor_fn_convention() == 1);
    THROWS(pair.coprocessor->set_coprocessor_fn(add, &offset), "other convention");
    Worker worker;
    pair.coprocessor->set_coprocessor_launcher(launch, &worker);
    CHECK(pair.coprocessor->coprocessor_fn_convention() == 1);
    bring_up(pair, 18482);
    for (int turn = 1; turn <= 2; turn++) {
        pair.coprocessor->start();
        pair.controller->start();
        rounds(pair, [](std::uint64_t value, std::uint32_t) { return ~value; });
        pair.controller->stop();
        pair.coprocessor->stop();
        worker.thread.join();
        CHECK(worker.served == 200 * turn);
    }
    end(pair);

    // A launcher that fails.
    pair = make(controllers, coprocessors, config);
    pair.coprocessor->set_coprocessor_launcher(refuse, nullptr);
    CHECK(pair.coprocessor->coprocessor_fn_convention() == 1);
    bring_up(pair, 18483);
    THROWS(pair.coprocessor->start(), "returned 5");
    end(pair);

    // The complete destructor alone leaves the object's memory, for which no C++ is responsible here; the deleting one then
    // frees it.
    session = controllers(config.c_str());
    session->~TransportSession();
    delete session;

    // Many, without a trace.
    for (int i = 0; i < 50; i++) {
        pair = make(controllers, coprocessors, config);
        delete pair.controller;
        delete static_cast<TransportSession *>(pair.coprocessor);
    }
    std::printf("hosted: %d checks\n", checks.load());
    return 0;
}
