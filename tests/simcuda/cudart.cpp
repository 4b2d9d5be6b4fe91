// libcudart.so.13: the runtime API on top of the engine.
#include "sim.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <dlfcn.h>

using namespace sim;

struct dim3 { unsigned x, y, z; };
struct uint3 { unsigned x, y, z; };

static thread_local int t_last = 0;

// Every failed call is kept for cudaGetLastError, as the real one does; "not ready" is not kept.
static int done(int error) {
    if (error && error != kNotReady) t_last = error;
    return error;
}
#define API(cbid, name) ApiCall call_(0, cbid, name)

// ---------------------------------------------------------------- devices

SIM_API int cudaGetDeviceCount(int* count) {
    *count = num_devices();
    return done(*count ? kSuccess : kNoDevice);
}
SIM_API int cudaGetDevice(int* device) { *device = current_device(); return kSuccess; }
SIM_API int cudaSetDevice(int device) { return done(set_device(device)); }
SIM_API int cudaInitDevice(int device, unsigned, unsigned) {
    activate(device);
    return kSuccess;
}
SIM_API int cudaDeviceGetAttribute(int* value, int attribute, int device) {
    return done(device_attribute(attribute, device, value));
}
SIM_API int cudaDeviceCanAccessPeer(int* can, int device, int peer) { *can = device != peer; return kSuccess; }
SIM_API int cudaDeviceEnablePeerAccess(int, unsigned) { return kSuccess; }
SIM_API int cudaDeviceGetPCIBusId(char* id, int length, int device) {
    int bus = 0;
    device_attribute(33, device, &bus);
    snprintf(id, (size_t)length, "0000:%02X:00.0", bus);
    return kSuccess;
}
SIM_API int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return kSuccess;
}
SIM_API int cudaDriverGetVersion(int* version) { *version = 13000; return kSuccess; }
SIM_API int cudaRuntimeGetVersion(int* version) { *version = 13000; return kSuccess; }
SIM_API int cudaDeviceSynchronize() {
    API(165, "cudaDeviceSynchronize");
    return done(device_synchronize());
}
SIM_API int cudaDeviceReset() { return kSuccess; }
SIM_API int cudaGetDeviceFlags(unsigned* flags) { *flags = 0; return kSuccess; }
SIM_API int cudaSetDeviceFlags(unsigned) { return kSuccess; }
SIM_API int cudaProfilerStart() { return kSuccess; }
SIM_API int cudaProfilerStop() { return kSuccess; }

// The layout of CUDA 13.0.
#include "device_prop.h"

SIM_API int cudaGetDeviceProperties(DeviceProp* prop, int device) {
    if (device < 0 || device >= num_devices()) return done(kInvalidDevice);
    memset(prop, 0, sizeof *prop);
    snprintf(prop->name, sizeof prop->name, "%s", settings().name.c_str());
    uuid_of(physical(device), prop->uuid);
    prop->totalGlobalMem = (size_t)(settings().memory_gb * 1e9 * 1.073741824);
    auto attribute = [&](int which) { int value = 0; device_attribute(which, device, &value); return value; };
    prop->sharedMemPerBlock = (size_t)attribute(8);
    prop->regsPerBlock = attribute(12);
    prop->warpSize = 32;
    prop->memPitch = (size_t)attribute(11);
    prop->maxThreadsPerBlock = 1024;
    for (int i = 0; i < 3; i++) prop->maxThreadsDim[i] = attribute(2 + i), prop->maxGridSize[i] = attribute(5 + i);
    prop->totalConstMem = 65536;
    prop->major = 9;
    prop->minor = 0;
    prop->textureAlignment = 512;
    prop->texturePitchAlignment = 32;
    prop->multiProcessorCount = attribute(16);
    prop->canMapHostMemory = prop->concurrentKernels = prop->ECCEnabled = prop->unifiedAddressing = 1;
    prop->pciBusID = attribute(33);
    prop->asyncEngineCount = 3;
    prop->memoryBusWidth = 5120;
    prop->l2CacheSize = attribute(38);
    prop->persistingL2CacheMaxSize = attribute(108);
    prop->maxThreadsPerMultiProcessor = 2048;
    prop->streamPrioritiesSupported = prop->globalL1CacheSupported = prop->localL1CacheSupported = 1;
    prop->sharedMemPerMultiprocessor = (size_t)attribute(81);
    prop->regsPerMultiprocessor = 65536;
    prop->managedMemory = prop->concurrentManagedAccess = prop->computePreemptionSupported = 1;
    prop->canUseHostPointerForRegisteredMem = prop->cooperativeLaunch = 1;
    prop->sharedMemPerBlockOptin = (size_t)attribute(97);
    prop->maxBlocksPerMultiProcessor = 32;
    prop->accessPolicyMaxWindowSize = attribute(109);
    prop->reservedSharedMemPerBlock = 1024;
    prop->hostRegisterSupported = prop->memoryPoolsSupported = prop->ipcEventSupported = prop->clusterLaunch = 1;
    return kSuccess;
}

// ---------------------------------------------------------------- errors

struct ErrorText { int code; const char* name; const char* text; };
static const ErrorText kErrors[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {13, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {500, "cudaErrorSymbolNotFound", "named symbol not found"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {704, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {902, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
    {903, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
    {904, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {905, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {906, "cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"},
};
static const ErrorText& error_text(int code) {
    static const ErrorText other = {999, "cudaErrorUnknown", "unknown error"};
    for (const ErrorText& each : kErrors)
        if (each.code == code) return each;
    return other;
}
SIM_API const char* cudaGetErrorName(int error) { return error_text(error).name; }
SIM_API const char* cudaGetErrorString(int error) { return error_text(error).text; }
SIM_API int cudaGetLastError() {
    int last = t_last;
    t_last = 0;
    if (int error = sticky()) return error;
    return last;
}
SIM_API int cudaPeekAtLastError() {
    if (int error = sticky()) return error;
    return t_last;
}

// ---------------------------------------------------------------- memory

SIM_API int cudaMalloc(void** pointer, size_t size) {
    API(20, "cudaMalloc");
    if (int error = sticky()) return done(error);
    if (int error = unsafe_call()) return done(error);
    return done(allocate(pointer, size, current_device()));
}
SIM_API int cudaFree(void* pointer) {
    API(22, "cudaFree");
    if (int error = sticky()) return done(error);
    activate(current_device());
    if (pointer)
        if (int error = unsafe_call()) return done(error);
    return done(release(pointer));
}
SIM_API int cudaMallocAsync(void** pointer, size_t size, Stream*) {
    API(373, "cudaMallocAsync");
    return done(allocate(pointer, size, current_device()));
}
SIM_API int cudaFreeAsync(void* pointer, Stream*) { return done(release(pointer)); }
SIM_API int cudaHostAlloc(void** pointer, size_t size, unsigned) {
    API(27, "cudaHostAlloc");
    if (int error = sticky()) return done(error);
    if (int error = unsafe_call()) return done(error);
    return done(allocate_host(pointer, size));
}
SIM_API int cudaMallocHost(void** pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }
SIM_API int cudaFreeHost(void* pointer) { return done(release_host(pointer)); }
SIM_API int cudaHostRegister(void* pointer, size_t size, unsigned) { return done(register_host(pointer, size)); }
SIM_API int cudaHostUnregister(void* pointer) { return done(unregister_host(pointer)); }
SIM_API int cudaHostGetDevicePointer(void** device, void* host, unsigned) { *device = host; return kSuccess; }
SIM_API int cudaMemGetInfo(size_t* free_bytes, size_t* total) {
    if (int error = sticky()) return done(error);
    memory_info(current_device(), free_bytes, total);
    return kSuccess;
}

struct PointerAttributes { int type; int device; void* devicePointer; void* hostPointer; long reserved[8]; };
SIM_API int cudaPointerGetAttributes(PointerAttributes* attributes, const void* pointer) {
    Pointer found = lookup(pointer);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = found.type;
    attributes->device = found.type == kUnregistered ? -2 : found.device;
    attributes->devicePointer = found.type == kUnregistered ? nullptr : (void*)pointer;
    attributes->hostPointer = found.type == kDevice ? nullptr : (void*)pointer;
    return kSuccess;
}

SIM_API int cudaMemcpyAsync(void* dst, const void* src, size_t bytes, int, Stream* stream) {
    API(41, "cudaMemcpyAsync");
    return done(copy(stream, dst, src, bytes, false));
}
SIM_API int cudaMemcpy(void* dst, const void* src, size_t bytes, int) {
    API(31, "cudaMemcpy");
    return done(copy(nullptr, dst, src, bytes, true));
}
SIM_API int cudaMemcpy2DAsync(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height, int,
                              Stream* stream) {
    API(44, "cudaMemcpy2DAsync");
    return done(copy_2d(stream, dst, dpitch, src, spitch, width, height, false));
}
SIM_API int cudaMemcpyPeerAsync(void* dst, int, const void* src, int, size_t bytes, Stream* stream) {
    API(161, "cudaMemcpyPeerAsync");
    return done(copy(stream, dst, src, bytes, false));
}
SIM_API int cudaMemset(void* dst, int value, size_t bytes) {
    API(49, "cudaMemset");
    return done(fill(nullptr, dst, (uint32_t)(value & 255), 1, bytes, false));
}
SIM_API int cudaMemsetAsync(void* dst, int value, size_t bytes, Stream* stream) {
    API(51, "cudaMemsetAsync");
    return done(fill(stream, dst, (uint32_t)(value & 255), 1, bytes, false));
}

// Memory pools: one that is never looked into.
SIM_API int cudaDeviceGetDefaultMemPool(void** pool, int) { static int one; *pool = &one; return kSuccess; }
SIM_API int cudaMemPoolGetAttribute(void*, int, void* value) { *(uint64_t*)value = 0; return kSuccess; }
SIM_API int cudaMemPoolSetAttribute(void*, int, void*) { return kSuccess; }
SIM_API int cudaMemPoolSetAccess(void*, const void*, size_t) { return kSuccess; }
SIM_API int cudaMemPoolTrimTo(void*, size_t) { return kSuccess; }

// Sharing memory and events with other processes is not simulated.
SIM_API int cudaIpcGetMemHandle(void*, void*) { return done(kNotSupported); }
SIM_API int cudaIpcOpenMemHandle(void**, void*, unsigned) { return done(kNotSupported); }
SIM_API int cudaIpcCloseMemHandle(void*) { return done(kNotSupported); }
SIM_API int cudaIpcGetEventHandle(void*, Event*) { return done(kNotSupported); }
SIM_API int cudaIpcOpenEventHandle(Event**, void*) { return done(kNotSupported); }

// ---------------------------------------------------------------- streams and events

SIM_API int cudaStreamCreateWithPriority(Stream** stream, unsigned flags, int priority) {
    if (int error = sticky()) return done(error);
    return done(stream_create(stream, flags, priority));
}
SIM_API int cudaStreamCreateWithFlags(Stream** stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
SIM_API int cudaStreamCreate(Stream** stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
SIM_API int cudaStreamDestroy(Stream* stream) { return done(stream_destroy(stream)); }
SIM_API int cudaStreamGetPriority(Stream* stream, int* priority) { *priority = stream_priority(stream); return kSuccess; }
SIM_API int cudaStreamGetDevice(Stream* stream, int* device) { *device = stream_device(stream); return kSuccess; }
SIM_API int cudaStreamGetId(Stream* stream, unsigned long long* id) { *id = stream_id(stream); return kSuccess; }
SIM_API int cudaStreamQuery(Stream* stream) {
    API(132, "cudaStreamQuery");
    return done(stream_query(stream));
}
SIM_API int cudaStreamSynchronize(Stream* stream) {
    API(131, "cudaStreamSynchronize");
    return done(stream_synchronize(stream));
}
SIM_API int cudaStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    API(147, "cudaStreamWaitEvent");
    return done(stream_wait_event(stream, event));
}
SIM_API int cudaEventCreateWithFlags(Event** event, unsigned flags) {
    API(134, "cudaEventCreateWithFlags");
    if (int error = sticky()) return done(error);
    return done(event_create(event, flags));
}
SIM_API int cudaEventCreate(Event** event) { return cudaEventCreateWithFlags(event, 0); }
SIM_API int cudaEventDestroy(Event* event) { return done(event_destroy(event)); }
SIM_API int cudaEventRecord(Event* event, Stream* stream) {
    API(135, "cudaEventRecord");
    return done(event_record(event, stream, false));
}
SIM_API int cudaEventRecordWithFlags(Event* event, Stream* stream, unsigned flags) {
    API(370, "cudaEventRecordWithFlags");
    return done(event_record(event, stream, flags & 1));
}
SIM_API int cudaEventQuery(Event* event) {
    API(138, "cudaEventQuery");
    return done(event_query(event));
}
SIM_API int cudaEventSynchronize(Event* event) {
    API(137, "cudaEventSynchronize");
    return done(event_synchronize(event));
}
SIM_API int cudaEventElapsedTime(float* ms, Event* first, Event* second) {
    API(486, "cudaEventElapsedTime");
    return done(event_elapsed(ms, first, second));
}
SIM_API int cudaLaunchHostFunc(Stream* stream, void (*function)(void*), void* data) {
    API(284, "cudaLaunchHostFunc");
    Work work;
    work.kind = Work::HostFunction;
    work.duration = 5000;
    work.effect = [=] { function(data); };
    work.effect_on_thread = true;
    return done(enqueue(stream, std::move(work)));
}
SIM_API int cudaStreamAddCallback(Stream* stream, void (*function)(Stream*, int, void*), void* data, unsigned) {
    Work work;
    work.kind = Work::HostFunction;
    work.duration = 5000;
    work.effect = [=] { function(stream, 0, data); };
    work.effect_on_thread = true;
    return done(enqueue(stream, std::move(work)));
}

// ---------------------------------------------------------------- kernels

static int launch_one(uint32_t cbid, const char* api, const void* function, dim3 grid, dim3 block, size_t shared,
                      Stream* stream, void** args) {
    ApiCall call(0, cbid, api);
    unsigned g[3] = {grid.x, grid.y, grid.z}, b[3] = {block.x, block.y, block.z};
    return done(launch(stream, kernel_name(function), g, b, (unsigned)shared, args));
}

static thread_local struct { dim3 grid, block; size_t shared; Stream* stream; } t_config[8];
static thread_local int t_depth = 0;

SIM_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, Stream* stream) {
    if (t_depth < 8) t_config[t_depth++] = {grid, block, shared, stream};
    return 0;
}
SIM_API int __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    if (!t_depth) return kInvalidConfiguration;
    t_depth--;
    *grid = t_config[t_depth].grid;
    *block = t_config[t_depth].block;
    *shared = t_config[t_depth].shared;
    *(Stream**)stream = t_config[t_depth].stream;
    return kSuccess;
}
SIM_API int __cudaGetKernel(const void** kernel, const void* function) { *kernel = function; return kSuccess; }
SIM_API int __cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t shared, Stream* stream) {
    return launch_one(505, "__cudaLaunchKernel", kernel, grid, block, shared, stream, args);
}
SIM_API int cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** args, size_t shared, Stream* stream) {
    return launch_one(211, "cudaLaunchKernel", function, grid, block, shared, stream, args);
}
SIM_API int cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** args, size_t shared,
                                        Stream* stream) {
    return launch_one(269, "cudaLaunchCooperativeKernel", function, grid, block, shared, stream, args);
}
struct LaunchConfig { dim3 grid, block; size_t shared; Stream* stream; void* attributes; unsigned num_attributes; };
SIM_API int cudaLaunchKernelExC(const LaunchConfig* config, const void* function, void** args) {
    return launch_one(430, "cudaLaunchKernelExC", function, config->grid, config->block, config->shared, config->stream,
                      args);
}

SIM_API void** __cudaRegisterFatBinary(void* binary) {
    void** handle = (void**)malloc(sizeof(void*));
    *handle = binary;
    return handle;
}
SIM_API void __cudaRegisterFatBinaryEnd(void**) {}
SIM_API void __cudaUnregisterFatBinary(void**) {}
SIM_API char __cudaInitModule(void**) { return 1; }
SIM_API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*,
                                    dim3*, int*) {
    register_kernel(function, name);
}

static std::mutex variables_lock;
static std::map<const void*, std::pair<void*, size_t>> variables;
SIM_API void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t size, int, int) {
    std::lock_guard<std::mutex> hold(variables_lock);
    variables[host] = {calloc(1, size + 256), size};
}
SIM_API void __cudaRegisterManagedVar(void**, void** host, char*, const char*, int, size_t size, int, int) {
    *host = calloc(1, size + 256);
}
SIM_API int cudaGetSymbolAddress(void** pointer, const void* symbol) {
    std::lock_guard<std::mutex> hold(variables_lock);
    auto found = variables.find(symbol);
    if (found == variables.end()) return done(kInvalidSymbol);
    *pointer = found->second.first;
    return kSuccess;
}
SIM_API int cudaMemcpyToSymbol(const void* symbol, const void* src, size_t bytes, size_t offset, int) {
    void* pointer;
    if (int error = cudaGetSymbolAddress(&pointer, symbol)) return error;
    memcpy((char*)pointer + offset, src, bytes);
    return kSuccess;
}

struct FuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
    int preferredShmemCarveout, clusterDimMustBeSet, requiredClusterWidth, requiredClusterHeight, requiredClusterDepth;
    int clusterSchedulingPolicyPreference, nonPortableClusterSizeAllowed, reserved[16];
};
SIM_API int cudaFuncGetAttributes(FuncAttributes* attributes, const void*) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    attributes->maxDynamicSharedSizeBytes = 49152;
    return kSuccess;
}
SIM_API int cudaFuncSetAttribute(const void*, int, int) { return kSuccess; }
SIM_API int cudaFuncSetCacheConfig(const void*, int) { return kSuccess; }
SIM_API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int block_size, size_t) {
    *blocks = block_size > 0 ? std::max(1, std::min(32, 2048 / block_size)) : 1;
    return kSuccess;
}
SIM_API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int size,
                                                                   size_t shared, unsigned) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, size, shared);
}
SIM_API int cudaOccupancyMaxActiveClusters(int* clusters, const void*, const void*) { *clusters = 16; return kSuccess; }

// Code loaded at run time: a kernel is its name.
SIM_API int cudaLibraryLoadData(void** library, const void* code, void*, void**, unsigned, void*, void**, unsigned) {
    *library = (void*)code;
    return kSuccess;
}
SIM_API int cudaLibraryUnload(void*) { return kSuccess; }
SIM_API int cudaLibraryGetKernel(const void** kernel, void*, const char* name) {
    char* kept = strdup(name);
    register_kernel(kept, kept);
    *kernel = kept;
    return kSuccess;
}
SIM_API int cudaKernelSetAttributeForDevice(const void*, int, int, int) { return kSuccess; }

// ---------------------------------------------------------------- capture and graphs

SIM_API int cudaStreamBeginCapture(Stream* stream, int mode) { return done(begin_capture(stream, mode, nullptr)); }
SIM_API int cudaStreamBeginCaptureToGraph(Stream* stream, Graph* graph, void*, void*, size_t, int mode) {
    return done(begin_capture(stream, mode, graph));
}
SIM_API int cudaStreamEndCapture(Stream* stream, Graph** graph) { return done(end_capture(stream, graph)); }
SIM_API int cudaStreamIsCapturing(Stream* stream, int* status) {
    API(317, "cudaStreamIsCapturing");
    if (int error = sticky()) return done(error);
    return done(capture_status(stream, status, nullptr, nullptr));
}
SIM_API int cudaStreamGetCaptureInfo(Stream* stream, int* status, unsigned long long* id, Graph** graph,
                                     void*** dependencies, void** edges, size_t* count) {
    API(461, "cudaStreamGetCaptureInfo");
    if (int error = sticky()) return done(error);
    if (dependencies) *dependencies = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return done(capture_status(stream, status, id, graph));
}
SIM_API int cudaStreamUpdateCaptureDependencies(Stream*, void**, const void*, size_t, unsigned) { return kSuccess; }
SIM_API int cudaThreadExchangeStreamCaptureMode(int* mode) { return done(exchange_capture_mode(mode)); }
SIM_API int cudaGraphCreate(Graph** graph, unsigned) { *graph = graph_create(); return kSuccess; }
SIM_API int cudaGraphDestroy(Graph* graph) { graph_destroy(graph); return kSuccess; }
SIM_API int cudaGraphInstantiateWithFlags(GraphExec** exec, Graph* graph, unsigned long long) {
    API(418, "cudaGraphInstantiateWithFlags");
    *exec = graph_instantiate(graph);
    return kSuccess;
}
SIM_API int cudaGraphInstantiate(GraphExec** exec, Graph* graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(exec, graph, flags);
}
SIM_API int cudaGraphExecDestroy(GraphExec* exec) { graph_exec_destroy(exec); return kSuccess; }
SIM_API int cudaGraphLaunch(GraphExec* exec, Stream* stream) {
    API(311, "cudaGraphLaunch");
    return done(graph_launch(exec, stream));
}
SIM_API int cudaGraphUpload(GraphExec*, Stream*) { return kSuccess; }
SIM_API int cudaGraphGetNodes(Graph* graph, void** nodes, size_t* count) {
    size_t have = graph_num_nodes(graph);
    if (nodes)
        for (size_t i = 0; i < *count && i < have; i++) nodes[i] = (void*)(i + 1);
    *count = have;
    return kSuccess;
}
SIM_API int cudaGraphNodeGetDependencies(void*, void**, void*, size_t* count) { *count = 0; return kSuccess; }
SIM_API int cudaGraphDebugDotPrint(Graph*, const char*, unsigned) { return kSuccess; }
SIM_API int cudaGraphAddNode(void**, Graph*, const void*, const void*, size_t, void*) { return done(kNotSupported); }
SIM_API int cudaGraphConditionalHandleCreate(void*, Graph*, unsigned, unsigned) { return done(kNotSupported); }

// ---------------------------------------------------------------- the way to the driver

SIM_API int cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long, int* status) {
    static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    *function = nullptr;
    if (driver) {
        std::string versioned = std::string(symbol) + "_v2";
        *function = dlsym(driver, symbol);
        if (!*function) *function = dlsym(driver, versioned.c_str());
    }
    if (!*function) log("no entry point: %s", symbol);
    if (status) *status = *function ? 0 : 1;
    return kSuccess;
}
SIM_API int cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags, int* status) {
    return cudaGetDriverEntryPointByVersion(symbol, function, 13000, flags, status);
}
