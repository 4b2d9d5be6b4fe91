// libnccl.so.2: collectives between the processes of this machine, over shared memory.
//
// A collective begins on the device when each rank gets there and ends when the last one has, plus the time of a ring.
// The call returns at once: when the last rank gets there is found out later (a Meeting, see sim.h). Payloads up to
// kSmall bytes a rank really travel and are reduced; larger ones (gradients) are left as they are. Inside a captured
// graph a collective takes the time of its ring and waits for nobody.
#include "sim.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <vector>

using namespace sim;

namespace {

const size_t kSmall = 256 << 10;
const int kRounds = 16, kMaxRanks = 64, kLetters = 64;  // collectives and letters that can be under way at a time
const size_t kLetterBytes = 16 << 10;

struct Entry { std::atomic<uint64_t> round; ns_t ready; };
struct Letter { std::atomic<uint64_t> number; ns_t ready; };  // point to point

struct Shared {
    std::atomic<int> joined;
    std::atomic<int> aborted;
    Entry entries[kRounds][kMaxRanks];
    Letter letters[8][8][kLetters];  // from, to: for eight ranks at most
    // then: data[kRounds][ranks][kSmall], mail[8][8][kLetters][kLetterBytes]
};

struct UniqueId { char internal[128]; };

struct Comm {
    int rank, ranks, device;
    bool is_local;             // all ranks in this process: nobody to wait for
    std::string name;
    Shared* shared = nullptr;
    size_t size = 0;
    uint64_t round = 0;
    std::vector<uint64_t> sent, received;
    char* data(uint64_t round_, int rank_) {
        return (char*)(shared + 1) + ((round_ % kRounds) * (size_t)ranks + (size_t)rank_) * kSmall;
    }
    char* mail(int from, int to, uint64_t number) {
        return (char*)(shared + 1) + kRounds * (size_t)ranks * kSmall +
               (((size_t)from * 8 + (size_t)to) * kLetters + number % kLetters) * kLetterBytes;
    }
};

void nap() {
    timespec t{0, 20000};
    nanosleep(&t, nullptr);
}

int join(Comm* comm) {
    comm->size = sizeof(Shared) + kRounds * (size_t)comm->ranks * kSmall + 64 * kLetters * kLetterBytes;
    std::string path = "/dev/shm/simnccl-" + comm->name;
    int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, (off_t)comm->size)) return 2;
    void* memory = mmap(nullptr, comm->size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return 2;
    comm->shared = (Shared*)memory;
    comm->shared->joined++;
    ns_t deadline = now() + 600ull * 1000000000ull;
    while (comm->shared->joined < comm->ranks) {
        if (now() > deadline) return 2;
        nap();
    }
    if (comm->rank == 0) unlink(path.c_str());
    log("nccl: rank %d of %d joined %s", comm->rank, comm->ranks, comm->name.c_str());
    return 0;
}

size_t bytes_of(int type) {
    static const size_t table[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < 12 ? table[type] : 4;
}
const char* type_name(int type) {
    static const char* table[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "f8e4m3", "f8e5m2"};
    return type >= 0 && type < 12 ? table[type] : "f32";
}

template <class T> void reduce(char* into, const char* from, size_t count, int op) {
    T* a = (T*)into;
    const T* b = (const T*)from;
    for (size_t i = 0; i < count; i++)
        a[i] = op == 1 ? a[i] * b[i] : op == 2 ? std::max(a[i], b[i]) : op == 3 ? std::min(a[i], b[i]) : (T)(a[i] + b[i]);
}
void reduce_any(char* into, const char* from, size_t count, int type, int op) {
    switch (type) {
        case 0: return reduce<int8_t>(into, from, count, op);
        case 1: return reduce<uint8_t>(into, from, count, op);
        case 2: return reduce<int32_t>(into, from, count, op);
        case 3: return reduce<uint32_t>(into, from, count, op);
        case 4: return reduce<int64_t>(into, from, count, op);
        case 5: return reduce<uint64_t>(into, from, count, op);
        case 7: return reduce<float>(into, from, count, op);
        case 8: return reduce<double>(into, from, count, op);
        case 9:
            for (size_t i = 0; i < count; i++) {
                float a, b;
                uint32_t x = (uint32_t)((uint16_t*)into)[i] << 16, y = (uint32_t)((const uint16_t*)from)[i] << 16;
                memcpy(&a, &x, 4);
                memcpy(&b, &y, 4);
                a = op == 1 ? a * b : op == 2 ? std::max(a, b) : op == 3 ? std::min(a, b) : a + b;
                memcpy(&x, &a, 4);
                ((uint16_t*)into)[i] = (uint16_t)((x + 0x8000) >> 16);
            }
            return;
        default: return;
    }
}
void divide(char* data, size_t count, int type, int by) {
    for (size_t i = 0; i < count; i++) {
        if (type == 7) ((float*)data)[i] /= (float)by;
        else if (type == 8) ((double*)data)[i] /= by;
        else if (type == 9) {
            float a;
            uint32_t x = (uint32_t)((uint16_t*)data)[i] << 16;
            memcpy(&a, &x, 4);
            a /= (float)by;
            memcpy(&x, &a, 4);
            ((uint16_t*)data)[i] = (uint16_t)((x + 0x8000) >> 16);
        } else if (type == 4) ((int64_t*)data)[i] /= by;
        else if (type == 2) ((int32_t*)data)[i] /= by;
    }
}

const char* kernel(const char* what, int type, const char* op) {
    static std::mutex lock;
    static std::map<std::string, char*> names;
    char text[160];
    snprintf(text, sizeof text, "ncclDevKernel_%s%s%s%s%s_RING_LL(ncclDevKernelArgsStorage<4096ul>)", what, *op ? "_" : "",
             op, *op ? "_" : "", *op ? type_name(type) : "");
    std::lock_guard<std::mutex> hold(lock);
    char*& kept = names[text];
    if (!kept) kept = strdup(text);
    return kept;
}

enum What { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kAllToAll };

// What this rank receives, from what all ranks have sent.
std::vector<char> outcome(Comm* comm, uint64_t round, What what, size_t each, size_t count, int type, int op, int root) {
    std::vector<char> out;
    auto data = [&](int r) { return comm->data(round, r); };
    size_t mine = what == kReduceScatter || what == kAllToAll ? each * (size_t)comm->rank : 0;  // where my piece begins
    switch (what) {
        case kAllReduce: case kReduce: case kReduceScatter:
            out.assign(data(0) + mine, data(0) + mine + each);
            for (int r = 1; r < comm->ranks; r++) reduce_any(out.data(), data(r) + mine, count, type, op);
            if (op == 4) divide(out.data(), count, type, comm->ranks);
            break;
        case kBroadcast: out.assign(data(root), data(root) + each); break;
        case kAllGather: case kAllToAll:
            for (int r = 0; r < comm->ranks; r++) out.insert(out.end(), data(r) + mine, data(r) + mine + each);
            break;
    }
    return out;
}

int collective(Comm* comm, Stream* stream, What what, const void* send, void* receive, size_t count, int type, int op,
               int root) {
    static const char* names[] = {"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AlltoAll"};
    static const char* ops[] = {"Sum", "Prod", "Max", "Min", "Sum"};
    size_t each = count * bytes_of(type);  // of one rank's piece
    size_t n = (size_t)comm->ranks;
    size_t mine = what == kReduceScatter || what == kAllToAll ? each * n : each;
    double share = n > 1 ? (double)(n - 1) / (double)n : 0;
    double wire = what == kAllReduce ? 2 * share * (double)each
                  : what == kAllGather || what == kReduceScatter || what == kAllToAll ? share * (double)n * (double)each
                                                                                      : share * (double)each;
    Work work;
    bool reduces = what == kAllReduce || what == kReduce || what == kReduceScatter;
    work.name = kernel(names[what], type, reduces ? ops[std::clamp(op, 0, 4)] : "");
    work.grid[0] = 16;
    work.block[0] = 512;
    ns_t transfer = (ns_t)(12000 + wire / settings().nvlink_gb_s);
    work.duration = transfer;
    ApiCall call(0, 430, "cudaLaunchKernelExC");
    if (is_capturing(stream) || comm->is_local || n == 1) {
        if (n == 1 && send != receive && each) {
            work.effect = [=] { memmove(receive, send, each); };
        }
        return enqueue(stream, std::move(work)) ? 1 : 0;
    }
    Shared* shared = comm->shared;
    uint64_t round = ++comm->round;
    bool small = mine <= kSmall;
    Meeting meeting;
    meeting.arrive = [=](ns_t ready) {
        if (small && mine) {
            run_effects(ready);  // what is on its way to the device is part of the message
            memcpy(comm->data(round, comm->rank), send, mine);
        }
        Entry& entry = shared->entries[round % kRounds][comm->rank];
        entry.ready = ready;
        entry.round.store(round, std::memory_order_release);
    };
    meeting.is_met = [=](Work& met, ns_t ready) {
        ns_t last = ready;
        for (int r = 0; r < comm->ranks; r++) {
            Entry& other = shared->entries[round % kRounds][r];
            if (other.round.load(std::memory_order_acquire) < round) return shared->aborted.load() != 0;
            last = std::max(last, other.ready);
        }
        met.duration = transfer + (last - ready);
        if (small && each && (what != kReduce || comm->rank == root)) {
            auto result = std::make_shared<std::vector<char>>(outcome(comm, round, what, each, count, type, op, root));
            met.effect = [=] { memcpy(receive, result->data(), result->size()); };
        }
        return true;
    };
    return enqueue_meeting(stream, std::move(work), std::move(meeting)) ? 1 : 0;
}

struct Parcel { bool is_send; Comm* comm; Stream* stream; void* data; size_t bytes; int peer; };
thread_local int t_group = 0;
thread_local std::vector<Parcel> t_parcels;

// A letter is posted when the sender's stream comes to it, and opened when the receiver's has and it is there.
int deliver(const Parcel& p) {
    Work work;
    work.name = kernel("SendRecv", 7, "");
    work.grid[0] = 2;
    work.block[0] = 640;
    work.duration = (ns_t)(10000 + (double)p.bytes / settings().nvlink_gb_s);
    ApiCall call(0, 430, "cudaLaunchKernelExC");
    Comm* comm = p.comm;
    if (comm->is_local || p.peer >= 8 || comm->rank >= 8 || is_capturing(p.stream))
        return enqueue(p.stream, std::move(work)) ? 1 : 0;
    uint64_t number = ++(p.is_send ? comm->sent : comm->received)[(size_t)p.peer];
    int from = p.is_send ? comm->rank : p.peer, to = p.is_send ? p.peer : comm->rank;
    Letter& letter = comm->shared->letters[from][to][number % kLetters];
    char* mail = comm->mail(from, to, number);
    bool small = p.bytes <= kLetterBytes;
    Meeting meeting;
    meeting.arrive = [=, &letter](ns_t ready) {
        if (!p.is_send) return;
        letter.ready = ready;
        if (small) {
            run_effects(ready);
            memcpy(mail, p.data, p.bytes);
        }
        letter.number.store(number, std::memory_order_release);
    };
    meeting.is_met = [=, &letter](Work& met, ns_t ready) {
        if (p.is_send) return true;
        if (letter.number.load(std::memory_order_acquire) < number) return comm->shared->aborted.load() != 0;
        if (letter.ready > ready) met.duration += letter.ready - ready;
        if (small) {
            auto kept = std::make_shared<std::vector<char>>(mail, mail + p.bytes);
            void* into = p.data;
            met.effect = [=] { memcpy(into, kept->data(), kept->size()); };
        }
        return true;
    };
    return enqueue_meeting(p.stream, std::move(work), std::move(meeting)) ? 1 : 0;
}

// What a group sends goes before what it receives: else two ranks would wait for each other.
int flush_parcels() {
    std::vector<Parcel> parcels;
    parcels.swap(t_parcels);
    for (bool sends : {true, false})
        for (const Parcel& p : parcels)
            if (p.is_send == sends)
                if (int error = deliver(p)) return error;
    return 0;
}

Comm* make(int rank, int ranks, const std::string& name, bool is_local) {
    auto* comm = new Comm;
    comm->rank = rank;
    comm->ranks = ranks;
    comm->device = current_device();
    comm->is_local = is_local;
    comm->name = name;
    comm->sent.assign(64, 0);
    comm->received.assign(64, 0);
    return comm;
}

}  // namespace

SIM_API int ncclGetVersion(int* version) { *version = 22907; return 0; }
SIM_API const char* ncclGetErrorString(int code) { return code == 0 ? "no error" : code == 6 ? "remote process exited or there was a network error" : "simulated NCCL error"; }
SIM_API const char* ncclGetLastError(Comm*) { return ""; }
SIM_API int ncclGetUniqueId(UniqueId* id) {
    memset(id, 0, sizeof *id);
    std::random_device random;
    snprintf(id->internal, sizeof id->internal, "%08x%08x%08x", random(), random(), (unsigned)getpid());
    return 0;
}
SIM_API int ncclCommInitRankConfig(Comm** comm, int ranks, UniqueId id, int rank, void*) {
    if (ranks > kMaxRanks) return 4;
    *comm = make(rank, ranks, id.internal, false);
    activate(current_device());
    return ranks > 1 ? join(*comm) : 0;
}
SIM_API int ncclCommInitRank(Comm** comm, int ranks, UniqueId id, int rank) {
    return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}
SIM_API int ncclCommInitRankScalable(Comm** comm, int ranks, int rank, int, UniqueId* ids, void*) {
    return ncclCommInitRankConfig(comm, ranks, ids[0], rank, nullptr);
}
SIM_API int ncclCommInitAll(Comm** comms, int devices, const int* list) {
    for (int i = 0; i < devices; i++) {
        comms[i] = make(i, devices, "", true);
        comms[i]->device = list ? list[i] : i;
    }
    return 0;
}
SIM_API int ncclCommSplit(Comm* comm, int color, int key, Comm** made, void*) {
    // Everybody tells its colour and key over a collective of the old communicator, on the default stream.
    if (comm->ranks == 1 || comm->is_local) {
        *made = color < 0 ? nullptr : make(0, 1, comm->name, true);
        return 0;
    }
    int mine[2] = {color, key};
    std::vector<int> all((size_t)comm->ranks * 2);
    if (int error = collective(comm, nullptr, kAllGather, mine, all.data(), 2, 2, 0, 0)) return error;
    stream_synchronize(nullptr);
    std::vector<std::pair<int, int>> members;
    for (int r = 0; r < comm->ranks; r++)
        if (all[(size_t)r * 2] == color) members.push_back({all[(size_t)r * 2 + 1], r});
    std::sort(members.begin(), members.end());
    *made = nullptr;
    if (color < 0) return 0;
    int rank = 0;
    for (size_t i = 0; i < members.size(); i++)
        if (members[i].second == comm->rank) rank = (int)i;
    std::string name = comm->name + "." + std::to_string(comm->round) + "." + std::to_string(color);
    *made = make(rank, (int)members.size(), name, false);
    return members.size() > 1 ? join(*made) : 0;
}
SIM_API int ncclCommFinalize(Comm*) { return 0; }
SIM_API int ncclCommDestroy(Comm*) { return 0; }  // kept: work that never met its others may still look at it
SIM_API int ncclCommAbort(Comm* comm) {
    if (comm->shared) comm->shared->aborted = 1;
    return 0;
}
SIM_API int ncclCommGetAsyncError(Comm* comm, int* error) {
    *error = comm->shared && comm->shared->aborted ? 6 : 0;  // ncclRemoteError
    return 0;
}
SIM_API int ncclCommCount(Comm* comm, int* count) { *count = comm->ranks; return 0; }
SIM_API int ncclCommUserRank(Comm* comm, int* rank) { *rank = comm->rank; return 0; }
SIM_API int ncclCommCuDevice(Comm* comm, int* device) { *device = comm->device; return 0; }
SIM_API int ncclCommRegister(Comm*, void*, size_t, void** handle) { *handle = nullptr; return 0; }
SIM_API int ncclCommDeregister(Comm*, void*) { return 0; }
SIM_API int ncclMemAlloc(void** pointer, size_t size) { return allocate(pointer, size, current_device()) ? 1 : 0; }
SIM_API int ncclMemFree(void* pointer) { return release(pointer) ? 1 : 0; }
SIM_API int ncclRedOpCreatePreMulSum(int* op, void*, int, int, Comm*) { *op = 0; return 0; }
SIM_API int ncclRedOpDestroy(int, Comm*) { return 0; }

SIM_API int ncclAllReduce(const void* send, void* receive, size_t count, int type, int op, Comm* comm, Stream* stream) {
    return collective(comm, stream, kAllReduce, send, receive, count, type, op, 0);
}
SIM_API int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, Comm* comm, Stream* stream) {
    return collective(comm, stream, kBroadcast, send, receive, count, type, 0, root);
}
SIM_API int ncclBcast(void* data, size_t count, int type, int root, Comm* comm, Stream* stream) {
    return collective(comm, stream, kBroadcast, data, data, count, type, 0, root);
}
SIM_API int ncclReduce(const void* send, void* receive, size_t count, int type, int op, int root, Comm* comm, Stream* stream) {
    return collective(comm, stream, kReduce, send, receive, count, type, op, root);
}
SIM_API int ncclAllGather(const void* send, void* receive, size_t count, int type, Comm* comm, Stream* stream) {
    return collective(comm, stream, kAllGather, send, receive, count, type, 0, 0);
}
SIM_API int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int op, Comm* comm, Stream* stream) {
    return collective(comm, stream, kReduceScatter, send, receive, count, type, op, 0);
}
SIM_API int ncclAlltoAll(const void* send, void* receive, size_t count, int type, Comm* comm, Stream* stream) {
    return collective(comm, stream, kAllToAll, send, receive, count, type, 0, 0);
}
SIM_API int ncclSend(const void* send, size_t count, int type, int peer, Comm* comm, Stream* stream) {
    t_parcels.push_back({true, comm, stream, (void*)send, count * bytes_of(type), peer});
    return t_group ? 0 : flush_parcels();
}
SIM_API int ncclRecv(void* receive, size_t count, int type, int peer, Comm* comm, Stream* stream) {
    t_parcels.push_back({false, comm, stream, receive, count * bytes_of(type), peer});
    return t_group ? 0 : flush_parcels();
}
SIM_API int ncclGroupStart() { t_group++; return 0; }
SIM_API int ncclGroupEnd() { return --t_group ? 0 : flush_parcels(); }
