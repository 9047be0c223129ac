// A CUDA driver library with two devices and no hardware, for tests of what surrounds it. Device 1 fails on request.
#include <stddef.h>
#include <string.h>

int enabled = 0, current = -1;

int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDriverGetVersion(int* version) { return *version = 12080, 0; }
int cuDeviceGetCount(int* count) { return *count = 2, 0; }
int cuDeviceGetName(char* name, int size, int device) {
    return strncpy(name, device ? "Fake Two" : "Fake One", size), device > 1 ? 101 : 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) { return *bytes = (size_t)(device + 1) << 33, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    switch (attribute) {
        case 8: return *value = 49152, 0;                      // shared memory per block
        case 10: return *value = 32, 0;                        // warp size
        case 16: return *value = 108 + device, 0;              // multiprocessors
        case 75: return *value = device ? 12 : 8, 0;           // compute capability
        case 76: return *value = device ? 0 : 6, 0;
        case 91: return *value = !device, 0;                   // registered memory at the host's address
        case 97: return *value = 101376, 0;                    // shared memory per block, opted in
    }
    return 1;
}
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)(size_t)(device + 100), 0; }
int cuCtxSetCurrent(void* context) { return current = (int)(size_t)context - 100, 0; }
int cuMemGetInfo_v2(size_t* free, size_t* total) {
    if (current < 0) return 201;
    *total = (size_t)(current + 1) << 33;
    return *free = *total / 2, 0;
}
int cuDeviceCanAccessPeer(int* can, int device, int peer) { return *can = device != peer, 0; }
int cuCtxEnablePeerAccess(void* context, unsigned flags) { return enabled++ ? 704 : 0; }
// One graph at a time: what a capture is asked to end after `broken` was set fails as the driver's does.
int capturing = 0, graphs = 0, launches = 0, broken = 0;
int cuStreamBeginCapture_v2(void* stream, int mode) { return capturing++ || mode != 2 ? 1 : 0; }
int cuStreamEndCapture(void* stream, void** graph) {
    *graph = (void*)8;
    return capturing-- == 1 && !broken ? 0 : 901;
}
int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long flags) {
    return *executable = (void*)16, graphs++, 0;
}
int cuGraphDestroy(void* graph) { return 0; }
int cuGraphExecDestroy(void* graph) { return graph == (void*)16 ? graphs--, 0 : 1; }
int cuGraphLaunch(void* graph, void* stream) { return graph == (void*)16 && stream == (void*)5 ? launches++, 0 : 1; }
// The last launch, of a kernel (void*, int, long long, float).
struct {
    unsigned grid[3], block[3], shared;
    void* stream;
    unsigned attributes, attribute, value;
    void* pointer;
    int number;
    long long wide;
    float real;
} launched;
struct Attribute {
    unsigned id, pad, value, rest[15];
};
struct Config {
    unsigned grid[3], block[3], shared;
    void* stream;
    struct Attribute* attributes;
    unsigned count;
};
struct {
    unsigned skew, type, dimensions, choices[4], box[3], steps[3];
    unsigned long long address, sizes[3], strides[2];
} encoded;
int cuTensorMapEncodeTiled(void* map, int type, unsigned dimensions, void* address, const unsigned long long* sizes,
                           const unsigned long long* strides, const unsigned* box, const unsigned* steps, int interleaving,
                           int permutation, int promotion, int outside) {
    if (box[2] > 256) return 1;
    encoded.skew = (size_t)map % 64, encoded.type = type, encoded.dimensions = dimensions;
    encoded.choices[0] = interleaving, encoded.choices[1] = permutation;
    encoded.choices[2] = promotion, encoded.choices[3] = outside;
    encoded.address = (size_t)address;
    memcpy(encoded.box, box, 12), memcpy(encoded.steps, steps, 12);
    memcpy(encoded.sizes, sizes, 24), memcpy(encoded.strides, strides, 16);
    for (int i = 0; i < 128; i++) ((unsigned char*)map)[i] = i + 1;
    return 0;
}
unsigned char launched_map[128];
int cuLaunchKernelEx(const struct Config* config, void* function, void** parameters, void** packed) {
    if (function == (void*)9) return memcpy(launched_map, parameters[1], 128), *(int*)parameters[2] != 5;
    if (function != (void*)7 || packed) return 400;
    memcpy(launched.grid, config->grid, 28);
    launched.stream = config->stream;
    launched.attributes = config->count;
    if (config->count) launched.attribute = config->attributes->id, launched.value = config->attributes->value;
    launched.pointer = *(void**)parameters[0], launched.number = *(int*)parameters[1];
    launched.wide = *(long long*)parameters[2], launched.real = *(float*)parameters[3];
    return 0;
}
int cuGetErrorString(int status, const char** text) {
    *text = status == 201 ? "invalid device context" : status == 901 ? "capture invalidated" : NULL;
    return *text ? 0 : 1;
}
