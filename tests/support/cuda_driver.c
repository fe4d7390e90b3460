/* A stand-in for the CUDA driver's memory functions, on a machine without a GPU. It is compiled against the real cuda.h,
   so its signatures and structures are the driver's. An allocation is a sealed memfd, and a mapping of one is ordinary
   memory; what is unmapped cannot be touched any more, as on a device. */
#define _GNU_SOURCE
#include <cuda.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { UNIT = 1 << 21, MOST = 1024, DEVICES = 2 };
static struct { int fd, device; size_t size; } held[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t mapped_bytes, limit_bytes = (size_t)1 << 30;
static int missing_attribute;

/* ---- for tests ---- */

size_t stand_in_mapped(void) { return mapped_bytes; }
void stand_in_limit(size_t bytes) { limit_bytes = bytes; }
void stand_in_misses(int attribute) { missing_attribute = attribute; }
size_t stand_in_handles(void) {
    size_t count = 0;
    for (int i = 0; i < MOST; i++) count += held[i].size != 0;
    return count;
}
size_t stand_in_layout(int which) {
    const size_t numbers[] = {
        sizeof(CUmemAllocationProp), offsetof(CUmemAllocationProp, location), offsetof(CUmemAllocationProp, win32HandleMetaData),
        offsetof(CUmemAllocationProp, allocFlags), sizeof(CUmemAccessDesc), offsetof(CUmemAccessDesc, flags),
        sizeof(CUmemLocation), sizeof(CUuuid), sizeof(CUmemGenericAllocationHandle), sizeof(CUdeviceptr), sizeof(CUdevice),
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    };
    return numbers[which];
}

/* ---- the driver ---- */

CUresult CUDAAPI cuInit(unsigned int flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
    if (ordinal < 0 || ordinal >= DEVICES) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { /* cuda.h makes this cuDeviceGetUuid_v2 */
    memset(uuid->bytes, 0, sizeof uuid->bytes);
    uuid->bytes[3] = (char)(device + 1);
    uuid->bytes[15] = (char)0xfe;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    *value = (int)attribute != missing_attribute;
    return CUDA_SUCCESS;
}

static int is_good(const CUmemAllocationProp *wanted) {
    return wanted->type == CU_MEM_ALLOCATION_TYPE_PINNED
        && wanted->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        && wanted->location.type == CU_MEM_LOCATION_TYPE_DEVICE && wanted->location.id >= 0
        && wanted->location.id < DEVICES && !wanted->win32HandleMetaData && !wanted->allocFlags.compressionType
        && !wanted->allocFlags.gpuDirectRDMACapable && !wanted->allocFlags.usage;
}

CUresult CUDAAPI cuMemGetAllocationGranularity(
    size_t *granularity, const CUmemAllocationProp *wanted, CUmemAllocationGranularity_flags option) {
    if (!is_good(wanted) || option != CU_MEM_ALLOC_GRANULARITY_MINIMUM) return CUDA_ERROR_INVALID_VALUE;
    *granularity = UNIT;
    return CUDA_SUCCESS;
}

static CUresult keep(CUmemGenericAllocationHandle *handle, int fd, int device, size_t size) {
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST && result; i++)
        if (!held[i].size) {
            held[i].fd = fd, held[i].device = device, held[i].size = size, *handle = (CUmemGenericAllocationHandle)i + 1;
            result = CUDA_SUCCESS;
        }
    pthread_mutex_unlock(&lock);
    if (result) close(fd);
    return result;
}

CUresult CUDAAPI cuMemCreate(
    CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *wanted, unsigned long long flags) {
    if (!is_good(wanted) || flags || !size || size % UNIT) return CUDA_ERROR_INVALID_VALUE;
    if (size > limit_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    char name[] = "gpu0"; /* The descriptor itself says which device's memory it is. */
    name[3] += (char)wanted->location.id;
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    if (ftruncate(fd, (off_t)size) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) {
        close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    /* What another process has left in the memory. */
    void *here = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (here != MAP_FAILED) memset(here, 0x5a, size), munmap(here, size);
    return keep(handle, fd, wanted->location.id, size);
}

static int number(CUmemGenericAllocationHandle handle) {
    return handle >= 1 && handle <= MOST && held[handle - 1].size ? (int)handle - 1 : -1;
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    int one = number(handle);
    if (one < 0) return CUDA_ERROR_INVALID_VALUE;
    close(held[one].fd);
    held[one].size = 0;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemExportToShareableHandle(
    void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags) {
    int one = number(handle);
    if (one < 0 || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    *(int *)shareable = dup(held[one].fd); /* The real driver may not set close-on-exec, either. */
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemImportFromShareableHandle(
    CUmemGenericAllocationHandle *handle, void *os_handle, CUmemAllocationHandleType type) {
    struct stat found;
    char path[64], target[64] = "";
    int fd = (int)(intptr_t)os_handle;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fcntl(fd, F_GET_SEALS) != (F_SEAL_SHRINK | F_SEAL_GROW)
        || fstat(fd, &found) || readlink(path, target, sizeof target - 1) < 0 || strncmp(target, "/memfd:gpu", 10))
        return CUDA_ERROR_INVALID_VALUE;
    return keep(handle, fcntl(fd, F_DUPFD_CLOEXEC, 0), target[10] - '0', (size_t)found.st_size);
}

CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *found, CUmemGenericAllocationHandle handle) {
    int one = number(handle);
    if (one < 0) return CUDA_ERROR_INVALID_VALUE;
    memset(found, 0, sizeof *found);
    found->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    found->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    found->location.id = held[one].device;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressReserve(
    CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    if (!size || size % UNIT || alignment || wanted || flags) return CUDA_ERROR_INVALID_VALUE;
    void *here = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (here == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = (CUdeviceptr)(uintptr_t)here;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t size) {
    return munmap((void *)(uintptr_t)address, size) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemMap(
    CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    int one = number(handle);
    if (one < 0 || offset || flags || held[one].size < size) return CUDA_ERROR_INVALID_VALUE;
    void *here = mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, held[one].fd, 0);
    if (here == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    __sync_fetch_and_add(&mapped_bytes, size);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    if (count != 1 || access->location.type != CU_MEM_LOCATION_TYPE_DEVICE
        || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return CUDA_ERROR_INVALID_VALUE;
    return mprotect((void *)(uintptr_t)address, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t size) {
    void *here = mmap(
        (void *)(uintptr_t)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (here == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
    __sync_fetch_and_sub(&mapped_bytes, size);
    return CUDA_SUCCESS;
}
