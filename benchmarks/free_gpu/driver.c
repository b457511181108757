/* NVIDIA's driver, as far as Triton's launcher calls it, on a machine without a GPU: everything succeeds and nothing runs.
 * benchmarks/host_time.py measures what the host does around it. */
#include <stdint.h>
#include <string.h>

typedef int Result;
enum { SUCCESS = 0 };

static char context, module, function;

Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
Result cuGetErrorString(Result error, const char **text) { *text = "no error"; return SUCCESS; }

Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return SUCCESS; }
Result cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
/* An H100's shared memory is the one attribute that decides anything: whether a kernel fits. */
Result cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 227 * 1024; return SUCCESS; }
Result cuDevicePrimaryCtxRetain(void **out, int device) { *out = &context; return SUCCESS; }

Result cuCtxGetCurrent(void **out) { *out = &context; return SUCCESS; }
Result cuCtxSetCurrent(void *given) { return SUCCESS; }
Result cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
Result cuCtxGetLimit(size_t *value, int limit) { *value = 0; return SUCCESS; }
Result cuCtxSetLimit(int limit, size_t value) { return SUCCESS; }

Result cuModuleLoadData(void **out, const void *image) { *out = &module; return SUCCESS; }
Result cuModuleGetFunction(void **out, void *given, const char *name) { *out = &function; return SUCCESS; }
Result cuModuleUnload(void *given) { return SUCCESS; }

Result cuFuncGetAttribute(int *value, int attribute, void *given) { *value = attribute == 0 ? 1024 : 0; return SUCCESS; }
Result cuFuncSetAttribute(void *given, int attribute, int value) { return SUCCESS; }
Result cuFuncSetCacheConfig(void *given, int config) { return SUCCESS; }
Result cuOccupancyMaxActiveClusters(int *count, void *given, const void *config) { *count = 1; return SUCCESS; }

Result cuStreamIsCapturing(void *stream, int *status) { *status = 0; return SUCCESS; }
Result cuPointerGetAttribute(void *out, int attribute, uint64_t pointer) { memcpy(out, &pointer, 8); return SUCCESS; }
Result cuTensorMapEncodeTiled(void) { return SUCCESS; }
Result cuTensorMapEncodeIm2col(void) { return SUCCESS; }

static unsigned long launches;
unsigned long free_gpu_launches(void) { return launches; }
Result cuLaunchKernelEx(const void *config, void *given, void **arguments, void **extra) { ++launches; return SUCCESS; }
Result cuLaunchKernel(void *given) { ++launches; return SUCCESS; }
