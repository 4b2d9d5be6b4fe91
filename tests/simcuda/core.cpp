// The engine: clocks, memory, streams, events, graphs and the trace. See sim.h.
#include "sim.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <queue>
#include <set>
#include <string_view>
#include <thread>
#include <unordered_map>

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

namespace sim {

// ---------------------------------------------------------------- settings, clock, log

static double number(const char* name, double otherwise) {
    const char* text = getenv(name);
    return text && *text ? atof(text) : otherwise;
}

static std::string text(const char* name, const char* otherwise) {
    const char* found = getenv(name);
    return found && *found ? found : otherwise;
}

const Settings& settings() {
    static const Settings* result = [] {
        auto* s = new Settings;
        s->devices = std::min<int>(kMaxDevices, (int)number("SIMCUDA_DEVICES", 1));
        s->tflops = number("SIMCUDA_TFLOPS", 989.4);
        s->efficiency = number("SIMCUDA_EFFICIENCY", 0.7);
        s->kernel_us = number("SIMCUDA_KERNEL_US", 2.0);
        s->launch_us = number("SIMCUDA_LAUNCH_US", 4.0);
        s->host_us = number("SIMCUDA_HOST_US", 0.0);
        s->hbm_gb_s = number("SIMCUDA_HBM_GBS", 3350);
        s->pcie_gb_s = number("SIMCUDA_PCIE_GBS", 50);
        s->nvlink_gb_s = number("SIMCUDA_NVLINK_GBS", 400);
        s->memory_gb = number("SIMCUDA_MEMORY_GB", 79.11);
        s->context_mb = number("SIMCUDA_CONTEXT_MB", 520);
        s->queue = std::max(1, (int)number("SIMCUDA_QUEUE", 1024));
        s->log = number("SIMCUDA_LOG", 0) != 0;
        s->fills = number("SIMCUDA_FILLS", 1) != 0;
        s->mig = number("SIMCUDA_MIG", 0) != 0;
        s->name = text("SIMCUDA_NAME", s->mig ? "NVIDIA H100 80GB HBM3 MIG 3g.40gb" : "NVIDIA H100 80GB HBM3");
        s->fail = text("SIMCUDA_FAIL", "");
        s->rules = text("SIMCUDA_RULES", "");
        return s;
    }();
    return *result;
}

ns_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (ns_t)t.tv_sec * 1000000000ull + (ns_t)t.tv_nsec;
}

void wait_until(ns_t when) {
    static const ns_t spin_ns = 30000;
    for (;;) {
        ns_t t = now();
        if (t >= when) return;
        if (when - t > spin_ns) {
            ns_t target = when - spin_ns;
            timespec until{(time_t)(target / 1000000000ull), (long)(target % 1000000000ull)};
            clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
        }
    }
}

static void busy_for(double us) {
    if (us <= 0) return;
    ns_t end = now() + (ns_t)(us * 1e3);
    while (now() < end) {}
}

void log(const char* format, ...) {
    if (!settings().log) return;
    va_list arguments;
    va_start(arguments, format);
    char line[1024];
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, "simcuda[%d]: %s\n", (int)getpid(), line);
}

int unknown(const char* name) {
    log("not simulated: %s", name);
    return 0;
}

// ---------------------------------------------------------------- what all processes share, for NVML

struct Slot {
    std::atomic<int> pid;
    std::atomic<uint64_t> bytes[kMaxDevices];
    std::atomic<uint64_t> busy_ns[kMaxDevices];
};
static const int kSlots = 256;
struct Board { Slot slots[kSlots]; };

static Board* board() {
    static Board* shared = [] {
        std::string path = text("SIMCUDA_BOARD", ("/dev/shm/simcuda-" + std::to_string(getuid())).c_str());
        int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
        void* memory = MAP_FAILED;
        if (file >= 0 && ftruncate(file, sizeof(Board)) == 0)
            memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        if (memory == MAP_FAILED) memory = calloc(1, sizeof(Board));
        return (Board*)memory;
    }();
    return shared;
}

static Slot* my_slot = nullptr;

static bool alive(int pid) { return pid > 0 && (kill(pid, 0) == 0 || errno == EPERM); }

static Slot* slot() {
    if (my_slot) return my_slot;
    static Slot spare;
    for (Slot& each : board()->slots) {
        int pid = each.pid.load();
        if (pid == getpid() || !alive(pid)) {
            if (!each.pid.compare_exchange_strong(pid, getpid())) continue;
            for (int d = 0; d < kMaxDevices; d++) each.bytes[d] = 0, each.busy_ns[d] = 0;
            return my_slot = &each;
        }
    }
    return my_slot = &spare;
}

Usage usage(int device) {
    Usage sum{0, 0};
    for (Slot& each : board()->slots)
        if (int pid = each.pid.load(); pid && alive(pid))
            sum.bytes += each.bytes[device], sum.busy_ns += each.busy_ns[device];
    return sum;
}

std::vector<ProcessUsage> processes(int device) {
    std::vector<ProcessUsage> found;
    for (Slot& each : board()->slots)
        if (int pid = each.pid.load(); pid && alive(pid) && each.bytes[device])
            found.push_back({pid, each.bytes[device]});
    return found;
}

// ---------------------------------------------------------------- state

struct Capture;

struct Stream {
    int device = 0;
    unsigned flags = 0;       // 1: does not wait for the default stream
    int priority = 0;
    unsigned id = 0;
    ns_t tail = 0;
    std::vector<ns_t> ring;   // ends of the last works: how much the host may be ahead
    size_t ring_at = 0;
    Capture* capture = nullptr;
    std::vector<int> tips;    // nodes of the capture that the next one depends on
    // What cannot be put on the time line yet, because it comes after a meeting with other processes that has not taken
    // place. Each is tried in order and returns false while it has to wait.
    std::deque<std::function<bool()>> line;
};

// When an event takes place that was recorded behind something in a line.
struct Moment { bool is_known = false; ns_t time = 0; };

struct Event {
    int device = -1;          // that of its first record
    bool timing = true;
    bool recorded = false;
    ns_t time = 0;
    std::shared_ptr<Moment> later;  // instead of the time, where the record stands in a line
    Capture* capture = nullptr;   // recorded while captured: of no use outside
    uint64_t capture_id = 0;
    std::vector<int> tips;
    bool is_known() const { return !later || later->is_known; }
    ns_t when() const { return later ? later->time : time; }
};

struct Node { Work work; std::vector<int> after; };

struct Graph { std::vector<Node> nodes; uint32_t id; };
struct GraphExec { std::vector<Node> nodes; uint32_t id; int device; };

struct Capture {
    uint64_t id;
    int mode;
    pthread_t owner;
    Stream* origin;
    Graph* graph;
    bool spoiled = false;
    std::set<Stream*> streams;
};

struct Pending {
    ns_t when; uint64_t order;
    std::function<void()> effect;
    bool operator<(const Pending& other) const { return when != other.when ? when > other.when : order > other.order; }
};

struct Device {
    bool active = false;
    Stream standard;          // the default stream
    std::set<Stream*> streams;
    ns_t engine_free[4] = {0, 0, 0, 0};
    uint64_t used = 0;
};

struct Allocation { size_t size; MemoryType type; int device; bool mapped; };

struct State {
    std::recursive_mutex lock;
    std::vector<int> visible;
    std::vector<std::unique_ptr<Device>> devices;
    std::map<uintptr_t, Allocation> memory;
    std::priority_queue<Pending> pending;
    std::atomic<ns_t> next_pending{~0ull};
    uint64_t order = 0;
    unsigned next_stream = 7;  // as the real driver numbers them: the default stream is 7
    std::vector<std::unique_ptr<Capture>> captures;
    std::atomic<int> num_captures{0};
    uint64_t next_capture = 1;
    uint32_t next_graph = 1;
    int fail_error = 0; ns_t fail_when = 0; int fail_left = 0; std::string fail_name;
    std::unordered_map<const void*, const char*> kernels;
    std::unordered_map<const char*, double> rule_of;
    std::set<Event*> events;
    std::set<Stream*> lines;   // streams with a line
    std::atomic<int> num_lines{0};
};

static std::atomic<bool> forked{false};
static bool context_made = false;

static void after_fork() {
    my_slot = nullptr;
    if (context_made) forked = true;
}

static State& state() {
    static State* result = [] {
        auto* s = new State;
        const char* visible = getenv("CUDA_VISIBLE_DEVICES");
        int all = settings().devices;
        if (!visible) {
            for (int i = 0; i < all; i++) s->visible.push_back(i);
        } else {
            std::string list = visible;
            size_t at = 0;
            while (at <= list.size() && !list.empty()) {
                size_t comma = std::min(list.find(',', at), list.size());
                std::string one = list.substr(at, comma - at);
                while (!one.empty() && one[0] == ' ') one.erase(0, 1);
                int index = -1;
                if (!one.empty() && isdigit(one[0])) index = atoi(one.c_str());
                else if (one.rfind("GPU-", 0) == 0 || one.rfind("MIG-", 0) == 0)
                    for (int i = 0; i < all; i++)
                        if (uuid_text(i, settings().mig).rfind(one, 0) == 0) index = i;
                if (index < 0 || index >= all) break;  // like the driver: the rest of the list is ignored
                s->visible.push_back(index);
                at = comma + 1;
            }
        }
        for (size_t i = 0; i < s->visible.size(); i++) {
            s->devices.push_back(std::make_unique<Device>());
            s->devices[i]->standard.device = (int)i;
            s->devices[i]->standard.id = 7;
        }
        const std::string& fail = settings().fail;
        size_t where = fail.rfind('@'), colon = fail.rfind(':');
        if (where != std::string::npos) {
            s->fail_name = fail.substr(0, where);
            s->fail_left = atoi(fail.c_str() + where + 1);
            s->fail_error = colon != std::string::npos && colon > where ? atoi(fail.c_str() + colon + 1) : kAssert;
        }
        prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
        pthread_atfork(nullptr, nullptr, after_fork);
        return s;
    }();
    return *result;
}

typedef std::lock_guard<std::recursive_mutex> Guard;

// ---------------------------------------------------------------- devices

static thread_local int t_device = 0;
static thread_local int t_capture_mode = 0;

int num_devices() { return (int)state().visible.size(); }
int physical(int device) { return device >= 0 && device < num_devices() ? state().visible[device] : device; }
int current_device() { return t_device; }

static void uuid_bytes(int device, bool of_slice, unsigned char* bytes) {
    static const unsigned char base[16] = {0x51, 0x6d, 0xc0, 0xda, 0x0e, 0x0d, 0x4f, 0x2a,
                                           0x9b, 0x11, 0x50, 0x1a, 0x7e, 0xd0, 0x00, 0x00};
    memcpy(bytes, base, 16);
    bytes[14] = of_slice;
    bytes[15] = (unsigned char)(device + 1);
}

void uuid_of(int device, unsigned char* bytes) { uuid_bytes(device, settings().mig, bytes); }

std::string uuid_text(int device, bool of_slice) {
    unsigned char bytes[16];
    uuid_bytes(device, of_slice, bytes);
    std::string text = of_slice ? "MIG" : "GPU";
    for (int i = 0; i < 16; i++) {
        char two[3];
        snprintf(two, sizeof two, "%02x", bytes[i]);
        text += std::string(i % 2 == 0 && i <= 10 && i != 2 ? "-" : "") + two;
    }
    return text;
}

void activate(int device) {
    State& s = state();
    if (device < 0 || device >= (int)s.devices.size() || s.devices[device]->active) return;
    Guard guard(s.lock);
    Device& d = *s.devices[device];
    if (d.active) return;
    d.active = context_made = true;
    d.used += (uint64_t)(settings().context_mb * 1e6);
    slot()->bytes[physical(device)] = d.used;
    log("context on device %d", device);
}

bool context_active(int device) {
    return device >= 0 && device < num_devices() && state().devices[device]->active;
}

int set_device(int device) {
    if (device < 0 || device >= num_devices()) return num_devices() ? kInvalidDevice : kNoDevice;
    t_device = device;
    activate(device);
    return forked ? kNotInitialized : kSuccess;
}

int sticky() {
    State& s = state();
    if (forked) return kNotInitialized;
    return s.fail_when && now() >= s.fail_when ? s.fail_error : kSuccess;
}

int device_attribute(int attribute, int device, int* value) {
    if (device < 0 || device >= num_devices()) return kInvalidDevice;
    static const std::map<int, int> table = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {9, 65536},
        {10, 32}, {11, 2147483647}, {12, 65536}, {13, 1980000}, {14, 512}, {15, 1}, {16, 132}, {19, 1}, {21, 131072},
        {22, 131072}, {23, 65536}, {30, 512}, {31, 1}, {32, 1}, {34, 0}, {36, 2619000}, {37, 5120}, {38, 52428800},
        {39, 2048}, {40, 3}, {41, 1}, {51, 32}, {75, 9}, {76, 0}, {78, 1}, {79, 1}, {80, 1}, {81, 233472}, {82, 65536},
        {83, 1}, {87, 2}, {89, 1}, {90, 1}, {91, 1}, {95, 1}, {97, 232448}, {98, 1}, {99, 1}, {102, 1}, {103, 1},
        {104, 0}, {106, 32}, {108, 33030144}, {109, 134213632}, {111, 1024}, {112, 1}, {113, 1}, {114, 1}, {115, 1},
        {116, 0}, {119, 1}, {120, 1}, {121, 1}, {123, 1}, {125, 1}, {126, 4}, {134, -1},
    };
    if (attribute == 33) { *value = 0x19 + 0x10 * physical(device); return kSuccess; }
    auto found = table.find(attribute);
    *value = found == table.end() ? 0 : found->second;
    return kSuccess;
}

// ---------------------------------------------------------------- memory

static const size_t kPage = 4096;

int allocate(void** pointer, size_t size, int device) {
    State& s = state();
    activate(device);
    if (size == 0) { *pointer = nullptr; return kSuccess; }
    Guard guard(s.lock);
    size_t rounded = (size + (2 << 20) - 1) / (2 << 20) * (2 << 20);
    size_t total = (size_t)(settings().memory_gb * 1e9 * 1.073741824);
    if (usage(physical(device)).bytes + rounded > total) return kOutOfMemory;
    // Kernels touch nothing, so that pages are only made for what is copied: 80 GB fit everywhere.
    void* memory = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return kOutOfMemory;
    s.memory[(uintptr_t)memory] = {rounded, kDevice, device, true};
    s.devices[device]->used += rounded;
    slot()->bytes[physical(device)] = s.devices[device]->used;
    *pointer = memory;
    return kSuccess;
}

int release(void* pointer) {
    if (!pointer) return kSuccess;
    device_synchronize();  // as the real one does
    State& s = state();
    Guard guard(s.lock);
    auto found = s.memory.find((uintptr_t)pointer);
    if (found == s.memory.end() || found->second.type != kDevice) return kInvalidValue;
    Device& d = *s.devices[found->second.device];
    d.used -= found->second.size;
    slot()->bytes[physical(found->second.device)] = d.used;
    munmap(pointer, found->second.size);
    s.memory.erase(found);
    return kSuccess;
}

int allocate_host(void** pointer, size_t size) {
    State& s = state();
    activate(t_device);
    size_t rounded = (std::max<size_t>(size, 1) + kPage - 1) / kPage * kPage;
    void* memory = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return kOutOfMemory;
    Guard guard(s.lock);
    s.memory[(uintptr_t)memory] = {rounded, kHost, t_device, true};
    *pointer = memory;
    return kSuccess;
}

int release_host(void* pointer) {
    if (!pointer) return kSuccess;
    device_synchronize();
    State& s = state();
    Guard guard(s.lock);
    auto found = s.memory.find((uintptr_t)pointer);
    if (found == s.memory.end()) return kInvalidValue;
    munmap(pointer, found->second.size);
    s.memory.erase(found);
    return kSuccess;
}

int register_host(void* pointer, size_t size) {
    State& s = state();
    Guard guard(s.lock);
    s.memory[(uintptr_t)pointer] = {size, kHost, t_device, false};
    return kSuccess;
}

int unregister_host(void* pointer) {
    State& s = state();
    Guard guard(s.lock);
    return s.memory.erase((uintptr_t)pointer) ? kSuccess : kInvalidValue;
}

Pointer lookup(const void* pointer) {
    State& s = state();
    Guard guard(s.lock);
    auto found = s.memory.upper_bound((uintptr_t)pointer);
    if (found == s.memory.begin()) return {kUnregistered, -1, 0, 0};
    --found;
    if ((uintptr_t)pointer >= found->first + found->second.size) return {kUnregistered, -1, 0, 0};
    return {found->second.type, found->second.device, found->first, found->second.size};
}

void memory_info(int device, size_t* free_bytes, size_t* total_bytes) {
    activate(device);
    size_t total = (size_t)(settings().memory_gb * 1e9 * 1.073741824);
    uint64_t used = usage(physical(device)).bytes;
    if (total_bytes) *total_bytes = total;
    if (free_bytes) *free_bytes = used < total ? total - used : 0;
}

// ---------------------------------------------------------------- effects that wait for their time

static void run_due(ns_t t) {
    State& s = state();
    if (t < s.next_pending.load(std::memory_order_relaxed)) return;
    Guard guard(s.lock);
    while (!s.pending.empty() && s.pending.top().when <= t) {
        auto effect = s.pending.top().effect;
        s.pending.pop();
        effect();
    }
    s.next_pending = s.pending.empty() ? ~0ull : s.pending.top().when;
}

static void defer(ns_t when, std::function<void()> effect) {
    State& s = state();
    s.pending.push({when, s.order++, std::move(effect)});
    s.next_pending = s.pending.top().when;
}

void run_effects(ns_t until) { run_due(until); }

// Host functions need somebody to call them, whether or not the program asks for anything.
struct Caller {
    std::mutex lock;
    std::condition_variable wake;
    std::multimap<ns_t, std::function<void()>> calls;
    Caller() { std::thread([this] { run(); }).detach(); }
    void run() {
        std::unique_lock<std::mutex> hold(lock);
        for (;;) {
            if (calls.empty()) { wake.wait(hold); continue; }
            ns_t when = calls.begin()->first;
            hold.unlock();
            ns_t t = now();
            if (t < when) {
                hold.lock();
                wake.wait_for(hold, std::chrono::nanoseconds(when - t));
                continue;
            }
            hold.lock();
            if (calls.empty() || calls.begin()->first > now()) continue;
            auto call = calls.begin()->second;
            calls.erase(calls.begin());
            hold.unlock();
            run_due(now());
            call();
            hold.lock();
        }
    }
    void add(ns_t when, std::function<void()> call) {
        std::lock_guard<std::mutex> hold(lock);
        calls.emplace(when, std::move(call));
        wake.notify_one();
    }
};

// ---------------------------------------------------------------- trace

bool tracing = false;
void (*api_callback)(int, uint32_t, const char*, bool, uint32_t) = nullptr;
static std::mutex trace_lock;
static std::vector<Record> records;
static std::atomic<uint32_t> next_correlation{1};
static thread_local uint32_t t_correlation = 0;
static thread_local std::vector<std::pair<int, uint64_t>> t_external;

static void add_record(Record record) {
    std::lock_guard<std::mutex> hold(trace_lock);
    records.push_back(std::move(record));
}

uint32_t current_correlation() { return t_correlation ? t_correlation : next_correlation++; }

void trace_start(unsigned) { tracing = true; }
void trace_stop() { tracing = false; }

std::vector<Record> trace_take(ns_t ended_before) {
    std::lock_guard<std::mutex> hold(trace_lock);
    std::vector<Record> taken, left;
    for (Record& record : records) (record.end <= ended_before ? taken : left).push_back(std::move(record));
    records.swap(left);
    return taken;
}

void trace_push(int kind, uint64_t id) { t_external.push_back({kind, id}); }

bool trace_pop(int kind, uint64_t* id) {
    for (size_t i = t_external.size(); i-- > 0;)
        if (t_external[i].first == kind) {
            if (id) *id = t_external[i].second;
            t_external.erase(t_external.begin() + (long)i);
            return true;
        }
    return false;
}

ApiCall::ApiCall(int domain_, uint32_t cbid_, const char* name_)
    : domain(domain_), cbid(cbid_), name(name_), start(0), correlation(0), outer(t_correlation), active(false) {
    if (!tracing && !api_callback) return;
    active = true;
    start = now();
    if (!outer) t_correlation = next_correlation++;
    correlation = t_correlation;
    if (api_callback) api_callback(domain, cbid, name, false, correlation);
    if (tracing && !outer) {
        std::set<int> kinds;
        for (size_t i = t_external.size(); i-- > 0;) {
            if (!kinds.insert(t_external[i].first).second) continue;
            Record r{};
            r.kind = Record::External;
            r.end = start;
            r.correlation = correlation;
            r.external_kind = t_external[i].first;
            r.external_id = t_external[i].second;
            add_record(std::move(r));
        }
    }
}

ApiCall::~ApiCall() {
    if (!active) return;
    if (tracing) {
        Record r{};
        r.kind = domain == 0 ? Record::Runtime : Record::Driver;
        r.start = start;
        r.end = now();
        r.correlation = correlation;
        r.cbid = cbid;
        r.thread = (uint32_t)pthread_self();
        add_record(std::move(r));
    }
    if (api_callback) api_callback(domain, cbid, name, true, correlation);
    t_correlation = outer;
}

// ---------------------------------------------------------------- streams

static Stream* resolve(Stream* stream) {
    if ((uintptr_t)stream <= 2) {
        activate(t_device);
        return &state().devices[t_device]->standard;
    }
    return stream;
}

int stream_create(Stream** stream, unsigned flags, int priority) {
    State& s = state();
    if (!num_devices()) return kNoDevice;
    activate(t_device);
    Guard guard(s.lock);
    auto* made = new Stream;
    made->device = t_device;
    made->flags = flags;
    made->priority = priority;
    made->id = ++s.next_stream;
    s.devices[t_device]->streams.insert(made);
    *stream = made;
    return kSuccess;
}

int stream_destroy(Stream* stream) {
    if ((uintptr_t)stream <= 2) return kInvalidHandle;
    State& s = state();
    Guard guard(s.lock);
    s.devices[stream->device]->streams.erase(stream);
    return kSuccess;  // not freed: events and captures may still name it
}

int stream_priority(Stream* stream) { return resolve(stream)->priority; }
int stream_device(Stream* stream) { return resolve(stream)->device; }
unsigned stream_id(Stream* stream) { return resolve(stream)->id; }
bool is_capturing(Stream* stream) { return resolve(stream)->capture != nullptr; }

// When work enqueued at `t` would begin. The default stream and the streams that do not opt out wait for each other.
static ns_t ready_at(Stream* stream, ns_t t) {
    State& s = state();
    Device& d = *s.devices[stream->device];
    ns_t ready = std::max(stream->tail, t);
    if (stream == &d.standard) {
        for (Stream* other : d.streams)
            if (!(other->flags & 1)) ready = std::max(ready, other->tail);
    } else if (!(stream->flags & 1)) {
        ready = std::max(ready, d.standard.tail);
    }
    return ready;
}

// Whether a stream that this one waits for by rule has a line.
static bool has_line_before(Stream* stream) {
    Device& d = *state().devices[stream->device];
    if (stream != &d.standard) return !(stream->flags & 1) && !d.standard.line.empty();
    for (Stream* other : d.streams)
        if (!(other->flags & 1) && !other->line.empty()) return true;
    return false;
}

// Puts on the time line what can be by now.
static void move_lines() {
    State& s = state();
    if (!s.num_lines) return;
    Guard guard(s.lock);
    for (bool has_moved = true; has_moved;) {
        has_moved = false;
        for (auto each = s.lines.begin(); each != s.lines.end();) {
            auto& line = (*each)->line;
            while (!line.empty() && line.front()()) line.pop_front(), has_moved = true;
            each = line.empty() ? s.lines.erase(each) : std::next(each);
        }
    }
    s.num_lines = (int)s.lines.size();
}

// Others wait for what this process has in line, also while its program is busy elsewhere: a thread looks after it.
struct LineKeeper {
    std::mutex lock;
    std::condition_variable wake;
    LineKeeper() { std::thread([this] { run(); }).detach(); }
    void run() {
        for (;;) {
            {
                std::unique_lock<std::mutex> hold(lock);
                wake.wait(hold, [] { return state().num_lines > 0; });
            }
            move_lines();
            timespec nap{0, 50000};
            nanosleep(&nap, nullptr);
        }
    }
};

static void stand_in_line(Stream* stream, std::function<bool()> attempt) {
    State& s = state();
    static LineKeeper* keeper = new LineKeeper;
    stream->line.push_back(std::move(attempt));
    s.lines.insert(stream);
    if (s.num_lines != (int)s.lines.size()) {
        {
            std::lock_guard<std::mutex> hold(keeper->lock);
            s.num_lines = (int)s.lines.size();
        }
        keeper->wake.notify_one();
    }
}

// The host waits until something in line has been put on the time line.
template <class Condition> static void wait_in_line(Condition is_over) {
    for (;;) {
        move_lines();
        {
            Guard guard(state().lock);
            if (is_over()) return;
        }
        timespec nap{0, 20000};
        nanosleep(&nap, nullptr);
    }
}

// Torch's own streams do not wait for the default one. Where one does and the other has a line, the host waits.
static void wait_for_lines_before(Stream* stream) {
    if (state().num_lines) wait_in_line([&] { return !has_line_before(stream); });
}

static void add_kernel_record(const Work& work, Stream* stream, ns_t queued, ns_t start, ns_t end, uint32_t correlation,
                              uint32_t graph, uint64_t node) {
    if (work.kind == Work::HostFunction || work.kind == Work::Empty) return;
    Record r{};
    r.kind = work.kind == Work::Kernel ? Record::Kernel : work.kind == Work::Memcpy ? Record::Memcpy : Record::Memset;
    r.start = start;
    r.end = end;
    r.queued = queued;
    r.correlation = correlation;
    r.device = stream->device;
    r.stream = stream->id;
    r.work = work;
    r.work.effect = nullptr;
    r.graph = graph;
    r.graph_node = node;
    add_record(std::move(r));
}

// The simulator's own account, if SIMCUDA_ACCOUNT names a file: a line for all that a device does, as it is decided.
static FILE* account() {
    static FILE* file = [] {
        const char* path = getenv("SIMCUDA_ACCOUNT");
        return path && *path ? fopen(path, "a") : nullptr;
    }();
    return file;
}

// Puts the work into the queue's bookkeeping and returns when it ends. With the lock held.
static ns_t place(Stream* stream, const Work& work, ns_t ready, ns_t* start_out) {
    Device& d = *state().devices[stream->device];
    ns_t start = ready;
    if (work.engine != kNoEngine) start = std::max(start, d.engine_free[work.engine]);
    ns_t end = start + work.duration;
    if (work.engine != kNoEngine) d.engine_free[work.engine] = end;
    if (work.kind == Work::Kernel) slot()->busy_ns[physical(stream->device)] += work.duration;
    if (FILE* file = account()) {
        const char* kinds[] = {"kernel", "memcpy", "memset", "host", "empty"};
        fprintf(file, "%d\t%llu\t%llu\t%s\t%d\t%s\n", physical(stream->device), (unsigned long long)start,
                (unsigned long long)end, kinds[work.kind], work.engine, work.name ? work.name : "");
    }
    *start_out = start;
    return end;
}

static void add_effect(const Work& work, ns_t end) {
    if (!work.effect) return;
    if (work.effect_on_thread) {
        static Caller* caller = new Caller;
        caller->add(end, work.effect);
    } else {
        defer(end, work.effect);
    }
}

// Puts work that the host handed over at `t` on its stream's time line. With the lock held.
static void place_work(Stream* stream, const Work& work, ns_t t, ns_t ready, uint32_t correlation) {
    State& s = state();
    ns_t start, end = place(stream, work, ready, &start);
    stream->tail = end;
    stream->ring[stream->ring_at] = end;
    stream->ring_at = (stream->ring_at + 1) % stream->ring.size();
    if (correlation) add_kernel_record(work, stream, t, start, end, correlation, 0, 0);
    add_effect(work, end);
    if (s.fail_left > 0 && work.name && strstr(work.name, s.fail_name.c_str()) && --s.fail_left == 0) {
        s.fail_when = end;
        log("device fails with %d in %s", s.fail_error, work.name);
    }
}

int enqueue(Stream* handle, Work work) { return enqueue_meeting(handle, std::move(work), {}); }

int enqueue_meeting(Stream* handle, Work work, Meeting meeting) {
    State& s = state();
    if (int error = sticky()) return error;
    Stream* stream = resolve(handle);
    activate(stream->device);
    busy_for(settings().host_us);
    if (stream->capture) {
        Guard guard(s.lock);
        Capture& c = *stream->capture;
        if (c.spoiled) return kCaptureInvalidated;
        c.graph->nodes.push_back({std::move(work), stream->tips});
        stream->tips = {(int)c.graph->nodes.size() - 1};
        return kSuccess;
    }
    ns_t t = now();
    run_due(t);
    ns_t full_until = 0;
    {
        Guard guard(s.lock);
        if (stream->ring.empty()) stream->ring.assign((size_t)settings().queue, 0);
        full_until = stream->ring[stream->ring_at];
    }
    if (full_until > t) {  // the queue is full: the host waits until its oldest entry is done
        wait_until(full_until);
        t = now();
        run_due(t);
    }
    if (s.num_lines) {
        wait_in_line([&] { return stream->line.size() < (size_t)settings().queue && !has_line_before(stream); });
        t = now();
    }
    Guard guard(s.lock);
    ns_t earliest = t + (ns_t)(settings().launch_us * 1e3);
    uint32_t correlation = tracing ? current_correlation() : 0;
    if (!meeting.arrive && stream->line.empty()) {
        place_work(stream, work, t, ready_at(stream, earliest), correlation);
        return kSuccess;
    }
    ns_t ready = 0;  // once this stream has come to it
    auto attempt = [=]() mutable {
        if (!ready) {
            ready = ready_at(stream, earliest);
            if (meeting.arrive) meeting.arrive(ready);
        }
        if (meeting.is_met && !meeting.is_met(work, ready)) return false;
        place_work(stream, work, t, ready, correlation);
        return true;
    };
    if (!stream->line.empty() || !attempt()) stand_in_line(stream, attempt);
    return kSuccess;
}

int stream_query(Stream* handle) {
    if (int error = sticky()) return error;
    Stream* stream = resolve(handle);
    if (stream->capture) { stream->capture->spoiled = true; return kCaptureUnsupported; }
    if (int error = unsafe_call()) return error;
    move_lines();
    ns_t t = now();
    run_due(t);
    Guard guard(state().lock);
    bool is_known = stream->line.empty() && !has_line_before(stream);
    return is_known && ready_at(stream, 0) <= t ? kSuccess : kNotReady;
}

static int wait_for(ns_t when) {
    State& s = state();
    if (s.fail_when && s.fail_when < when) when = s.fail_when;
    wait_until(when);
    run_due(now());
    return sticky();
}

// The host waits until the stream is through with everything.
static int finish(Stream* stream) {
    ns_t when = 0;
    wait_in_line([&] {
        if (!stream->line.empty() || has_line_before(stream)) return false;
        when = ready_at(stream, 0);
        return true;
    });
    return wait_for(when);
}

int stream_synchronize(Stream* handle) {
    if (int error = sticky()) return error;
    Stream* stream = resolve(handle);
    if (stream->capture) { stream->capture->spoiled = true; return kCaptureUnsupported; }
    if (int error = unsafe_call()) return error;
    return finish(stream);
}

int device_synchronize() {
    if (int error = sticky()) return error;
    if (int error = unsafe_call()) return error;
    if (!num_devices()) return kNoDevice;
    activate(t_device);
    ns_t when = 0;
    wait_in_line([&] {
        Device& d = *state().devices[t_device];
        bool is_known = d.standard.line.empty();
        when = d.standard.tail;
        for (Stream* stream : d.streams) when = std::max(when, stream->tail), is_known &= stream->line.empty();
        return is_known;
    });
    return wait_for(when);
}

// ---------------------------------------------------------------- events

int event_create(Event** event, unsigned flags) {
    if (forked) return kNotInitialized;
    if (!num_devices()) return kNoDevice;
    activate(t_device);
    auto* made = new Event;
    made->timing = !(flags & 2);
    made->device = t_device;
    Guard guard(state().lock);
    state().events.insert(made);
    *event = made;
    return kSuccess;
}

int event_destroy(Event* event) {
    Guard guard(state().lock);
    if (!state().events.erase(event)) return kInvalidHandle;
    delete event;
    return kSuccess;
}

int event_record(Event* event, Stream* handle, bool external) {
    if (int error = sticky()) return error;
    State& s = state();
    Stream* stream = resolve(handle);
    if (event->device != stream->device) return kInvalidHandle;
    wait_for_lines_before(stream);
    ns_t t = now();
    run_due(t);
    Guard guard(s.lock);
    if (stream->capture && !external) {
        if (stream->capture->spoiled) return kCaptureInvalidated;
        event->capture = stream->capture;
        event->capture_id = stream->capture->id;
        event->tips = stream->tips;
        event->recorded = true;
        return kSuccess;
    }
    if (stream->capture) {
        Work work;
        work.kind = Work::Empty;
        work.duration = 500;
        work.effect = [event] { event->time = now(); };
        stream->capture->graph->nodes.push_back({work, stream->tips});
        stream->tips = {(int)stream->capture->graph->nodes.size() - 1};
        return kSuccess;
    }
    event->capture = nullptr;
    event->recorded = true;
    event->later = nullptr;
    ns_t earliest = t + (ns_t)(settings().launch_us * 1e3);
    if (!stream->line.empty()) {
        auto later = event->later = std::make_shared<Moment>();
        stand_in_line(stream, [=] {
            later->time = stream->tail = ready_at(stream, earliest);
            return later->is_known = true;
        });
    } else {
        event->time = stream->tail = ready_at(stream, earliest);
    }
    return kSuccess;
}

int event_query(Event* event) {
    if (int error = sticky()) return error;
    if (event->capture) {
        event->capture->spoiled = true;
        return kCapturedEvent;
    }
    if (int error = unsafe_call()) return error;
    move_lines();
    ns_t t = now();
    run_due(t);
    Guard guard(state().lock);
    return !event->recorded || (event->is_known() && event->when() <= t) ? kSuccess : kNotReady;
}

int event_synchronize(Event* event) {
    if (int error = sticky()) return error;
    if (event->capture) {
        event->capture->spoiled = true;
        return kCapturedEvent;
    }
    if (int error = unsafe_call()) return error;
    if (!event->recorded) return kSuccess;
    wait_in_line([&] { return event->is_known(); });
    return wait_for(event->when());
}

int event_elapsed(float* ms, Event* first, Event* second) {
    if (int error = sticky()) return error;
    if (!first->timing || !second->timing || !first->recorded || !second->recorded) return kInvalidHandle;
    if (first->device != second->device) return kInvalidHandle;
    if (first->capture || second->capture) return kCapturedEvent;
    Guard guard(state().lock);
    if (!first->is_known() || !second->is_known() || std::max(first->when(), second->when()) > now()) return kNotReady;
    double ns = (double)(int64_t)(second->when() - first->when());
    *ms = (float)(std::round(ns / 32) * 32 / 1e6);  // the counter ticks every 32 ns
    return kSuccess;
}

int stream_wait_event(Stream* handle, Event* event) {
    if (int error = sticky()) return error;
    Stream* stream = resolve(handle);
    State& s = state();
    Guard guard(s.lock);
    if (event->capture) {
        Capture* c = event->capture;
        if (stream->capture && stream->capture != c) return kCaptureMerge;
        if (!stream->capture) {
            stream->capture = c;
            stream->tips.clear();
            c->streams.insert(stream);
        }
        for (int tip : event->tips)
            if (std::find(stream->tips.begin(), stream->tips.end(), tip) == stream->tips.end())
                stream->tips.push_back(tip);
        return kSuccess;
    }
    if (stream->capture) {
        if (event->recorded && (!event->is_known() || event->when() > now())) {  // work outside of the capture cannot be waited for inside
            stream->capture->spoiled = true;
            return kCaptureIsolation;
        }
        return kSuccess;
    }
    if (!event->recorded) return kSuccess;
    if (event->is_known() && stream->line.empty()) {
        stream->tail = std::max(stream->tail, event->when());
        return kSuccess;
    }
    auto moment = event->later;
    if (!moment) moment = std::make_shared<Moment>(Moment{true, event->time});
    stand_in_line(stream, [=] {
        if (moment->is_known) stream->tail = std::max(stream->tail, moment->time);
        return moment->is_known;
    });
    return kSuccess;
}

// ---------------------------------------------------------------- how long things take

ns_t kernel_ns(const char* name, uint64_t threads) {
    State& s = state();
    const Settings& set = settings();
    if (!set.rules.empty() && name) {
        Guard guard(s.lock);
        auto [found, is_new] = s.rule_of.try_emplace(name, -1);
        if (is_new) {
            size_t at = 0;
            while (at < set.rules.size()) {
                size_t comma = std::min(set.rules.find(',', at), set.rules.size());
                std::string rule = set.rules.substr(at, comma - at);
                size_t equal = rule.rfind('=');
                if (equal != std::string::npos && strstr(name, rule.substr(0, equal).c_str()))
                    found->second = atof(rule.c_str() + equal + 1);
                at = comma + 1;
            }
        }
        if (found->second >= 0) return (ns_t)(found->second * 1e3);
    }
    // An element-wise kernel reads and writes about 48 bytes a thread.
    return (ns_t)(set.kernel_us * 1e3 + 48.0 * (double)threads / set.hbm_gb_s);
}

ns_t product_ns(double flop, double peak, double bytes) {
    const Settings& set = settings();
    double compute_s = flop / (peak * 1e12 * set.efficiency), memory_s = bytes / (set.hbm_gb_s * 1e9);
    return (ns_t)(std::max({compute_s * 1e9, memory_s * 1e9, set.kernel_us * 1e3}));
}

double peak_tflops(int data_type, int compute_type, bool allow_tf32) {
    const double bf16 = settings().tflops;
    switch (data_type) {
        case 2: case 14: return bf16;                       // half, bfloat16
        case 3: case 28: case 29: return 2 * bf16;          // int8, float8
        case 33: return 2 * bf16;                           // float4, which an H100 has not
        case 1: return bf16 * 66.9 / 989.4;                 // double on tensor cores
        case 5: return bf16 * 66.9 / 989.4;
        default:
            if (compute_type == 77 || allow_tf32) return bf16 / 2;
            if (compute_type == 74 || compute_type == 75) return bf16;
            return bf16 * 66.9 / 989.4;
    }
}

// ---------------------------------------------------------------- kernels

void register_kernel(const void* host_function, const char* name) {
    State& s = state();
    Guard guard(s.lock);
    if (s.kernels.empty()) s.kernels.reserve(1 << 16);
    s.kernels[host_function] = name;
}

const char* kernel_name(const void* host_function) {
    State& s = state();
    Guard guard(s.lock);
    auto found = s.kernels.find(host_function);
    return found == s.kernels.end() ? nullptr : found->second;
}

// Beyond this, what is only on the device is not worth the host's time: kernels compute nothing with it.
static const size_t kLarge = 1 << 20;

static void zero(void* dst, size_t bytes) {
    uintptr_t first = ((uintptr_t)dst + kPage - 1) / kPage * kPage, last = ((uintptr_t)dst + bytes) / kPage * kPage;
    if (bytes > kLarge && lookup(dst).type == kDevice) {  // give the pages back: they come as zeros
        memset(dst, 0, first - (uintptr_t)dst);
        madvise((void*)first, last - first, MADV_DONTNEED);
        memset((void*)last, 0, (uintptr_t)dst + bytes - last);
    } else {
        memset(dst, 0, bytes);
    }
}

// Kernels whose result the host looks at often enough to be worth the trouble: fills.
static std::function<void()> effect_of(const char* name, void** args) {
    if (!args || !name) return nullptr;
    const char* fill = strstr(name, "11FillFunctorI");
    if (!fill || !strstr(name, "vectorized_elementwise_kernel")) return nullptr;
    const char* type = fill + strlen("11FillFunctorI");
    int size = 0;
    switch (*type) {
        case 'f': case 'i': case 'j': size = 4; break;
        case 'd': case 'l': case 'm': case 'x': case 'y': size = 8; break;
        case 's': case 't': size = 2; break;
        case 'a': case 'h': case 'b': case 'c': size = 1; break;
        default: if (!strncmp(type, "N3c104Half", 10) || !strncmp(type, "N3c108BFloat16", 14)) size = 2;
    }
    if (!size) return nullptr;
    int count = *(int*)args[0];
    uint64_t value = 0;
    memcpy(&value, args[1], (size_t)size);
    char* data = *(char**)args[2];
    size_t bytes = (size_t)count * (size_t)size;
    if (value == 0) return [=] { zero(data, bytes); };
    if (bytes > kLarge || !settings().fills) return nullptr;
    return [=] {
        for (int i = 0; i < count; i++) memcpy(data + (size_t)i * size, &value, (size_t)size);
    };
}

int launch(Stream* stream, const char* name, const unsigned* grid, const unsigned* block, unsigned shared, void** args) {
    Work work;
    work.name = name ? name : "unknown_kernel";
    memcpy(work.grid, grid, sizeof work.grid);
    memcpy(work.block, block, sizeof work.block);
    work.shared = shared;
    uint64_t threads = (uint64_t)grid[0] * grid[1] * grid[2] * block[0] * block[1] * block[2];
    work.duration = kernel_ns(work.name, threads);
    work.effect = effect_of(name, args);
    if (settings().log) log("launch %s <<<%ux%ux%u, %ux%ux%u>>> stream %u %.1f us", work.name, grid[0], grid[1], grid[2],
                            block[0], block[1], block[2], stream_id(stream), (double)work.duration / 1e3);
    return enqueue(stream, std::move(work));
}

// ---------------------------------------------------------------- copies

static void move_bytes(void* dst, const void* src, size_t bytes) { memmove(dst, src, bytes); }

int copy(Stream* handle, void* dst, const void* src, size_t bytes, bool wait) {
    return copy_2d(handle, dst, bytes, src, bytes, bytes, 1, wait);
}

int copy_2d(Stream* handle, void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height,
            bool wait) {
    if (int error = sticky()) return error;
    Stream* stream = resolve(handle);
    if (wait) {
        if (int error = unsafe_call()) return error;
    }
    Pointer from = lookup(src), to = lookup(dst);
    size_t bytes = width * height;
    Work work;
    work.kind = Work::Memcpy;
    work.bytes = bytes;
    const Settings& set = settings();
    bool to_device = to.type == kDevice, from_device = from.type == kDevice;
    work.copy_kind = to_device ? (from_device ? 8 : 1) : from_device ? 2 : 9;
    work.src_kind = from_device ? 3 : from.type == kHost ? 2 : 1;
    work.dst_kind = to_device ? 3 : to.type == kHost ? 2 : 1;
    double gb_s = to_device && from_device ? (from.device == to.device ? set.hbm_gb_s / 2 : set.nvlink_gb_s)
                  : from.type == kUnregistered || to.type == kUnregistered ? set.pcie_gb_s / 4 : set.pcie_gb_s;
    work.duration = (ns_t)(1200 + (double)bytes / gb_s);
    work.engine = to_device && from_device ? kNoEngine : to_device ? kCopyIn : from_device ? kCopyOut : kNoEngine;
    bool pageable_in = to_device && from.type == kUnregistered, pageable_out = from_device && to.type == kUnregistered;
    if (stream->capture && (pageable_in || pageable_out) && wait) return kCaptureUnsupported;
    if (pageable_in && !stream->capture) {
        // Staged: the source may change as soon as the call returns.
        auto staged = std::make_shared<std::vector<char>>(bytes);
        for (size_t row = 0; row < height; row++)
            memcpy(staged->data() + row * width, (const char*)src + row * spitch, width);
        work.effect = [=] {
            for (size_t row = 0; row < height; row++)
                memcpy((char*)dst + row * dpitch, staged->data() + row * width, width);
        };
        if (bytes > 65536) wait = true;
    } else if (!(to_device && from_device && bytes > kLarge)) {
        work.effect = [=] {
            for (size_t row = 0; row < height; row++)
                move_bytes((char*)dst + row * dpitch, (const char*)src + row * spitch, width);
        };
        if (pageable_out && !stream->capture) wait = true;
    }
    if (int error = enqueue(handle, std::move(work))) return error;
    return wait && !stream->capture ? finish(stream) : kSuccess;
}

int fill(Stream* handle, void* dst, uint32_t value, int value_bytes, size_t count, bool wait) {
    if (int error = sticky()) return error;
    Stream* stream = resolve(handle);
    Work work;
    work.kind = Work::Memset;
    work.bytes = count * (size_t)value_bytes;
    work.value = value;
    work.duration = (ns_t)(1500 + (double)work.bytes / settings().hbm_gb_s);
    work.effect = [=] {
        size_t bytes = count * (size_t)value_bytes;
        if (value == 0) {
            zero(dst, bytes);
        } else if (value_bytes == 1) {
            memset(dst, (int)value, bytes);
        } else {
            for (size_t i = 0; i < count; i++) memcpy((char*)dst + i * (size_t)value_bytes, &value, (size_t)value_bytes);
        }
    };
    if (int error = enqueue(handle, std::move(work))) return error;
    return wait && !stream->capture ? finish(stream) : kSuccess;
}

// ---------------------------------------------------------------- capture and graphs

int unsafe_call() {
    State& s = state();
    if (!s.num_captures.load(std::memory_order_relaxed)) return kSuccess;
    Guard guard(s.lock);
    if (t_capture_mode == 2) return kSuccess;
    for (auto& c : s.captures) {
        bool mine = pthread_equal(c->owner, pthread_self());
        if ((mine && c->mode != 2) || (!mine && c->mode == 0 && t_capture_mode == 0)) {
            c->spoiled = true;
            log("a call that a capture forbids");
            return kCaptureUnsupported;
        }
    }
    return kSuccess;
}

int exchange_capture_mode(int* mode) {
    std::swap(*mode, t_capture_mode);
    return kSuccess;
}

Graph* graph_create() {
    State& s = state();
    Guard guard(s.lock);
    return new Graph{{}, s.next_graph++};
}

int begin_capture(Stream* handle, int mode, Graph* into) {
    State& s = state();
    if ((uintptr_t)handle <= 2) return kCaptureUnsupported;  // the default stream cannot be captured
    if (int error = sticky()) return error;
    Guard guard(s.lock);
    if (handle->capture) return kInvalidValue;
    auto c = std::make_unique<Capture>();
    c->id = s.next_capture++;
    c->mode = mode;
    c->owner = pthread_self();
    c->origin = handle;
    c->graph = into ? into : graph_create();
    c->streams.insert(handle);
    handle->capture = c.get();
    handle->tips.clear();
    s.captures.push_back(std::move(c));
    s.num_captures = (int)s.captures.size();
    return kSuccess;
}

int end_capture(Stream* stream, Graph** graph) {
    State& s = state();
    Guard guard(s.lock);
    if ((uintptr_t)stream <= 2 || !stream->capture) return kInvalidValue;
    Capture* c = stream->capture;
    if (c->origin != stream) return kCaptureUnmatched;
    if (!pthread_equal(c->owner, pthread_self()) && c->mode != 2) return kCaptureWrongThread;
    int result = c->spoiled ? kCaptureInvalidated : kSuccess;
    std::set<int> joined(stream->tips.begin(), stream->tips.end());
    for (int i = (int)c->graph->nodes.size() - 1; i >= 0; i--)
        if (joined.count(i)) joined.insert(c->graph->nodes[i].after.begin(), c->graph->nodes[i].after.end());
    for (Stream* other : c->streams) {
        for (int tip : other->tips)
            if (!joined.count(tip) && !result) result = kCaptureUnjoined;
        other->capture = nullptr;
        other->tips.clear();
    }
    for (Event* event : s.events)
        if (event->capture == c) event->capture = nullptr, event->recorded = false;
    *graph = result ? nullptr : c->graph;
    s.captures.erase(std::find_if(s.captures.begin(), s.captures.end(), [&](auto& each) { return each.get() == c; }));
    s.num_captures = (int)s.captures.size();
    return result;
}

int capture_status(Stream* handle, int* status, unsigned long long* id, Graph** graph) {
    State& s = state();
    if ((uintptr_t)handle <= 2) {
        *status = 0;
        // Asking the default stream is itself an error while a stream is captured that waits for it.
        return kSuccess;
    }
    Guard guard(s.lock);
    Capture* c = handle->capture;
    *status = !c ? 0 : c->spoiled ? 2 : 1;
    if (c && id) *id = c->id;
    if (c && graph) *graph = c->graph;
    return kSuccess;
}

void graph_destroy(Graph* graph) { delete graph; }
size_t graph_num_nodes(Graph* graph) { return graph->nodes.size(); }

GraphExec* graph_instantiate(Graph* graph) { return new GraphExec{graph->nodes, graph->id, t_device}; }
void graph_exec_destroy(GraphExec* exec) { delete exec; }

int graph_launch(GraphExec* exec, Stream* handle) {
    State& s = state();
    if (int error = sticky()) return error;
    Stream* stream = resolve(handle);
    wait_for_lines_before(stream);
    ns_t t = now();
    run_due(t);
    Guard guard(s.lock);
    if (stream->capture) {  // as a child of another graph
        Capture& c = *stream->capture;
        int base = (int)c.graph->nodes.size();
        std::vector<int> before = stream->tips;
        std::set<int> tips;
        for (const Node& node : exec->nodes) {
            Node copied = node;
            for (int& each : copied.after) each += base;
            if (copied.after.empty()) copied.after = before;
            c.graph->nodes.push_back(std::move(copied));
        }
        if (!exec->nodes.empty()) stream->tips = {(int)c.graph->nodes.size() - 1};
        return kSuccess;
    }
    uint32_t correlation = tracing ? current_correlation() : 0;
    auto attempt = [stream, t, correlation, id = exec->id](const std::vector<Node>& nodes) {
        ns_t ready = ready_at(stream, t + (ns_t)(settings().launch_us * 1e3) + 2000), last = ready;
        std::vector<ns_t> ends(nodes.size());
        for (size_t i = 0; i < nodes.size(); i++) {
            ns_t begin = ready, start;
            for (int before : nodes[i].after) begin = std::max(begin, ends[(size_t)before] + 300);
            ends[i] = place(stream, nodes[i].work, begin, &start);
            last = std::max(last, ends[i]);
            if (correlation)
                add_kernel_record(nodes[i].work, stream, t, start, ends[i], correlation, id, ((uint64_t)id << 32) | i);
            add_effect(nodes[i].work, ends[i]);
        }
        stream->tail = last;
        return true;
    };
    if (!stream->line.empty()) stand_in_line(stream, [attempt, nodes = exec->nodes] { return attempt(nodes); });
    else attempt(exec->nodes);
    return kSuccess;
}

}  // namespace sim

extern "C" SIM_SHARED int sim_unknown(const char* name) { return sim::unknown(name); }
