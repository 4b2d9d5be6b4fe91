// Simulated CUDA: what the stand-in libraries share. Implemented in core.cpp (libsimcuda.so).
//
// Device memory is host memory, kernels do nothing, and time on the device is bookkeeping: every stream is a queue
// whose tail says when its last operation ends. All times are nanoseconds of CLOCK_MONOTONIC, on every rank of a
// machine the same clock.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#define SIM_API extern "C" __attribute__((visibility("default")))
#define SIM_SHARED __attribute__((visibility("default")))

namespace sim {

typedef uint64_t ns_t;

// CUDA's error numbers; the runtime's and the driver's are the same since CUDA 12 for all that is used here.
enum Error {
    kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kInvalidConfiguration = 9,
    kInvalidSymbol = 13, kInvalidDeviceFunction = 98, kNoDevice = 100, kInvalidDevice = 101, kInvalidHandle = 400,
    kNotFound = 500, kNotReady = 600, kIllegalAddress = 700, kPeerAlreadyEnabled = 704, kAssert = 710,
    kLaunchFailure = 719, kNotSupported = 801, kCaptureUnsupported = 900, kCaptureInvalidated = 901,
    kCaptureMerge = 902, kCaptureUnmatched = 903, kCaptureUnjoined = 904, kCaptureIsolation = 905,
    kCaptureImplicit = 906, kCapturedEvent = 907, kCaptureWrongThread = 908,
};

const int kMaxDevices = 16;

struct Settings {
    int devices;              // SIMCUDA_DEVICES
    double tflops;            // SIMCUDA_TFLOPS: dense bf16 peak; the other dtypes follow in the ratios of an H100
    double efficiency;        // SIMCUDA_EFFICIENCY: share of the peak that a large product reaches
    double kernel_us;         // SIMCUDA_KERNEL_US: the least that any kernel takes
    double launch_us;         // SIMCUDA_LAUNCH_US: from the host's call to the start on an idle device
    double host_us;           // SIMCUDA_HOST_US: what a launch costs the host on top of torch's own work (busy wait)
    double hbm_gb_s;          // SIMCUDA_HBM_GBS
    double pcie_gb_s;         // SIMCUDA_PCIE_GBS
    double nvlink_gb_s;       // SIMCUDA_NVLINK_GBS
    double memory_gb;         // SIMCUDA_MEMORY_GB
    double context_mb;        // SIMCUDA_CONTEXT_MB: what a context takes
    int queue;                // SIMCUDA_QUEUE: launches that fit into a stream's queue before the host must wait
    bool log;                 // SIMCUDA_LOG
    bool mig;                 // SIMCUDA_MIG: each device is a slice of its board, with a UUID of its own
    bool fills;               // SIMCUDA_FILLS: whether kernels that fill memory do; without, all results are zeros
    std::string name;         // SIMCUDA_NAME
    std::string fail;         // SIMCUDA_FAIL=part-of-kernel-name@n:error
    std::string rules;        // SIMCUDA_RULES=part-of-name=us,part-of-name=us
};
SIM_SHARED const Settings& settings();

SIM_SHARED ns_t now();
SIM_SHARED void wait_until(ns_t when);
SIM_SHARED void log(const char* format, ...);
SIM_SHARED int unknown(const char* name);  // what a generated stub calls

// ---- devices
SIM_SHARED int num_devices();
SIM_SHARED int physical(int device);   // index before CUDA_VISIBLE_DEVICES
SIM_SHARED int current_device();
SIM_SHARED int set_device(int device);
SIM_SHARED bool context_active(int device);
SIM_SHARED void activate(int device);
SIM_SHARED void uuid_of(int physical_device, unsigned char* bytes16);  // that CUDA gives: of the slice, if it is one
SIM_SHARED std::string uuid_text(int physical_device, bool of_slice);    // as NVML writes it
SIM_SHARED int device_attribute(int attribute, int device, int* value);
SIM_SHARED int sticky();               // the error that a kernel left behind, once the device has got there

// ---- memory
enum MemoryType { kUnregistered = 0, kHost = 1, kDevice = 2 };
struct Pointer { MemoryType type; int device; uintptr_t base; size_t size; };
SIM_SHARED int allocate(void** pointer, size_t size, int device);
SIM_SHARED int release(void* pointer);
SIM_SHARED int allocate_host(void** pointer, size_t size);
SIM_SHARED int release_host(void* pointer);
SIM_SHARED int register_host(void* pointer, size_t size);
SIM_SHARED int unregister_host(void* pointer);
SIM_SHARED Pointer lookup(const void* pointer);
SIM_SHARED void memory_info(int device, size_t* free_bytes, size_t* total_bytes);

// What all processes on this machine use of a device: for NVML.
struct Usage { uint64_t bytes; uint64_t busy_ns; };
struct ProcessUsage { int pid; uint64_t bytes; };
SIM_SHARED Usage usage(int physical_device);
SIM_SHARED std::vector<ProcessUsage> processes(int physical_device);

// ---- streams and events. Handles given out are these pointers; NULL, 1 and 2 are the default stream.
struct Stream;
struct Event;
struct Graph;
struct GraphExec;
SIM_SHARED int stream_create(Stream** stream, unsigned flags, int priority);
SIM_SHARED int stream_destroy(Stream* stream);
SIM_SHARED int stream_query(Stream* stream);
SIM_SHARED int stream_synchronize(Stream* stream);
SIM_SHARED int device_synchronize();
SIM_SHARED int stream_wait_event(Stream* stream, Event* event);
SIM_SHARED int stream_priority(Stream* stream);
SIM_SHARED int stream_device(Stream* stream);
SIM_SHARED unsigned stream_id(Stream* stream);

SIM_SHARED int event_create(Event** event, unsigned flags);
SIM_SHARED int event_destroy(Event* event);
SIM_SHARED int event_record(Event* event, Stream* stream, bool external);
SIM_SHARED int event_query(Event* event);
SIM_SHARED int event_synchronize(Event* event);
SIM_SHARED int event_elapsed(float* ms, Event* first, Event* second);

// ---- work
enum Engine { kNoEngine, kTensorCores, kCopyIn, kCopyOut };
struct Work {
    const char* name = nullptr;   // mangled name of a kernel, kept for good; null for a copy
    ns_t duration = 0;
    Engine engine = kNoEngine;    // two works of one engine do not overlap, whatever their streams
    unsigned grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
    unsigned shared = 0;
    enum Kind { Kernel, Memcpy, Memset, HostFunction, Empty } kind = Kernel;
    int copy_kind = 0;            // CUpti_ActivityMemcpyKind
    int src_kind = 0, dst_kind = 0;
    uint64_t bytes = 0;
    uint32_t value = 0;
    std::function<void()> effect; // done when the device gets there
    bool effect_on_thread = false;// a host function: on a thread of its own, without the lock
};
SIM_SHARED int enqueue(Stream* stream, Work work);

// Work that begins when other processes have come as far, too. Nobody knows yet when that is, so it and all that follows
// it on its stream (and what waits for those) is kept in line; the host goes on.
struct Meeting {
    std::function<void(ns_t ready)> arrive;             // called once, when this stream has come to it
    std::function<bool(Work& work, ns_t ready)> is_met; // whether the others are there; then it sets the duration
};
SIM_SHARED int enqueue_meeting(Stream* stream, Work work, Meeting meeting);
SIM_SHARED void run_effects(ns_t until);                // of all that ends by then
SIM_SHARED bool is_capturing(Stream* stream);
SIM_SHARED int copy(Stream* stream, void* dst, const void* src, size_t bytes, bool wait);
SIM_SHARED int copy_2d(Stream* stream, void* dst, size_t dpitch, const void* src, size_t spitch, size_t width,
                       size_t height, bool wait);
SIM_SHARED int fill(Stream* stream, void* dst, uint32_t value, int value_bytes, size_t count, bool wait);

SIM_SHARED ns_t kernel_ns(const char* name, uint64_t threads);
SIM_SHARED ns_t product_ns(double flop, double peak_tflops, double bytes);
SIM_SHARED double peak_tflops(int data_type, int compute_type, bool allow_tf32);

// ---- kernels
SIM_SHARED void register_kernel(const void* host_function, const char* name);
SIM_SHARED const char* kernel_name(const void* host_function);
SIM_SHARED int launch(Stream* stream, const char* name, const unsigned* grid, const unsigned* block, unsigned shared,
                      void** args);

// ---- capture and graphs
SIM_SHARED int begin_capture(Stream* stream, int mode, Graph* into);
SIM_SHARED int end_capture(Stream* stream, Graph** graph);
SIM_SHARED int capture_status(Stream* stream, int* status, unsigned long long* id, Graph** graph);
SIM_SHARED int exchange_capture_mode(int* mode);
SIM_SHARED int unsafe_call();                    // an error while a capture forbids it, which it then spoils
SIM_SHARED Graph* graph_create();
SIM_SHARED void graph_destroy(Graph* graph);
SIM_SHARED size_t graph_num_nodes(Graph* graph);
SIM_SHARED GraphExec* graph_instantiate(Graph* graph);
SIM_SHARED void graph_exec_destroy(GraphExec* exec);
SIM_SHARED int graph_launch(GraphExec* exec, Stream* stream);

// ---- tracing: what CUPTI hands out
struct Record {
    enum Kind { Kernel, Memcpy, Memset, Runtime, Driver, External, Sync } kind;
    ns_t start, end, queued;
    uint32_t correlation;
    int device; unsigned stream;
    Work work;                     // without its effect
    uint32_t cbid; uint32_t thread; uint32_t result;
    int external_kind; uint64_t external_id;
    uint32_t graph; uint64_t graph_node;
};
SIM_SHARED extern bool tracing;
SIM_SHARED void trace_start(unsigned kinds_mask_unused);
SIM_SHARED void trace_stop();
SIM_SHARED std::vector<Record> trace_take(ns_t ended_before);
SIM_SHARED void trace_push(int kind, uint64_t id);
SIM_SHARED bool trace_pop(int kind, uint64_t* id);
SIM_SHARED extern void (*api_callback)(int domain, uint32_t cbid, const char* name, bool is_exit, uint32_t correlation);

// A call of the API, from its begin to its end; without a trace it costs a test.
struct SIM_SHARED ApiCall {
    ApiCall(int domain, uint32_t cbid, const char* name);
    ~ApiCall();
    int domain; uint32_t cbid; const char* name; ns_t start; uint32_t correlation; uint32_t outer; bool active;
};
SIM_SHARED uint32_t current_correlation();

}  // namespace sim
