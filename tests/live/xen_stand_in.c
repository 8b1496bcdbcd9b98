/* Answers in the place of a Xen hypervisor what libvirt's driver for Xen asks when it starts, so that this driver can be asked
 * to convert documents on a host without Xen. Put before libxenlight by LD_PRELOAD; no guest can be started by it.
 * After libvirt's own tests/libxlmock.c. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <libxl.h>
#include <libxl_utils.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CAPABILITIES "/proc/xen/capabilities"
#define CPUS 8

/* -- a kernel that says it is the first domain's ------------------------------------------------------------------- */

static int capabilities(void)
{
    int fd = memfd_create("capabilities", MFD_CLOEXEC);
    if (fd < 0 || write(fd, "control_d\n", 10) != 10 || lseek(fd, 0, SEEK_SET) != 0)
        abort();
    return fd;
}

int access(const char *path, int mode)
{
    int (*real)(const char *, int) = dlsym(RTLD_NEXT, "access");
    return path && strcmp(path, CAPABILITIES) == 0 ? 0 : real(path, mode);
}

#define OPEN(name)                                                                            \
    int name(const char *path, int flags, ...)                                                \
    {                                                                                         \
        int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);                        \
        va_list rest;                                                                         \
        va_start(rest, flags);                                                                \
        int mode = va_arg(rest, int);                                                         \
        va_end(rest);                                                                         \
        return strcmp(path, CAPABILITIES) == 0 ? capabilities() : real(path, flags, mode);    \
    }
OPEN(open)
OPEN(open64)
int __open_2(const char *path, int flags) { return open(path, flags, 0); }
int __open64_2(const char *path, int flags) { return open64(path, flags, 0); }

/* -- a hypervisor with eight processors and nothing but the first domain --------------------------------------------- */

int libxl_ctx_alloc(libxl_ctx **ctx, int version, unsigned flags, xentoollog_logger *log)
{
    *ctx = calloc(1, 1 << 16);
    return 0;
}
int libxl_ctx_free(libxl_ctx *ctx) { return 0; }

const libxl_version_info *libxl_get_version_info(libxl_ctx *ctx)
{
    static libxl_version_info info;
    info.xen_version_major = 4;
    info.xen_version_minor = 17;
    info.xen_version_extra = info.compiler = info.compile_by = info.compile_domain = info.compile_date = "";
    info.changeset = info.commandline = info.build_id = "";
    info.pagesize = 4096;
    info.capabilities = strdup("xen-3.0-x86_64 hvm-3.0-x86_32 hvm-3.0-x86_32p hvm-3.0-x86_64"); /* it is cut in pieces */
    return &info;
}

int libxl_get_physinfo(libxl_ctx *ctx, libxl_physinfo *info)
{
    memset(info, 0, sizeof *info);
    info->threads_per_core = 1;
    info->cores_per_socket = info->nr_cpus = CPUS;
    info->max_cpu_id = CPUS - 1;
    info->cpu_khz = 2000000;
    info->total_pages = 1 << 20;
    info->free_pages = 1 << 18;
    info->nr_nodes = 1;
    info->cap_hvm = info->cap_pv = info->cap_hap = 1;
    return 0;
}

libxl_numainfo *libxl_get_numainfo(libxl_ctx *ctx, int *count)
{
    libxl_numainfo *info = calloc(1, sizeof *info);
    info->size = 1ull << 32;
    info->free = 1ull << 30;
    info->num_dists = 1;
    info->dists = calloc(1, sizeof *info->dists);
    info->dists[0] = 10;
    *count = 1;
    return info;
}

libxl_cputopology *libxl_get_cpu_topology(libxl_ctx *ctx, int *count)
{
    libxl_cputopology *found = calloc(CPUS, sizeof *found);
    for (int number = 0; number < CPUS; number++)
        found[number].core = number;
    *count = CPUS;
    return found;
}

int libxl_domain_info(libxl_ctx *ctx, libxl_dominfo *info, uint32_t id)
{
    memset(info, 0, sizeof *info);
    info->vcpu_online = CPUS;
    info->vcpu_max_id = CPUS - 1;
    info->current_memkb = info->max_memkb = 1 << 20;
    return 0;
}

libxl_vcpuinfo *libxl_list_vcpu(libxl_ctx *ctx, uint32_t id, int *count, int *cpus)
{
    *count = 0;
    *cpus = CPUS;
    return NULL;
}

int libxl_get_free_memory(libxl_ctx *ctx, uint64_t *kilobytes) { *kilobytes = 1 << 20; return 0; }
int libxl_get_max_cpus(libxl_ctx *ctx) { return CPUS; }
int libxl_get_max_nodes(libxl_ctx *ctx) { return 1; }
int libxl_cpu_bitmap_alloc(libxl_ctx *ctx, libxl_bitmap *map, int most) { return libxl_bitmap_alloc(ctx, map, CPUS); }
int libxl_node_bitmap_alloc(libxl_ctx *ctx, libxl_bitmap *map, int most) { return libxl_bitmap_alloc(ctx, map, CPUS); }
int libxl_userdata_retrieve(libxl_ctx *ctx, uint32_t id, const char *of, uint8_t **data, int *size) { *data = NULL; if (size) *size = 0; return 0; }
int libxl_userdata_store(libxl_ctx *ctx, uint32_t id, const char *of, const uint8_t *data, int size) { return 0; }
int libxl_retrieve_domain_configuration(libxl_ctx *ctx, uint32_t id, libxl_domain_config *it, const libxl_asyncop_how *how) { return ERROR_FAIL; }
int libxl_domain_get_nodeaffinity(libxl_ctx *ctx, uint32_t id, libxl_bitmap *map) { return ERROR_FAIL; }
int libxl_evenable_domain_death(libxl_ctx *ctx, uint32_t id, libxl_ev_user user, libxl_evgen_domain_death **made) { *made = NULL; return 0; }
void libxl_evdisable_domain_death(libxl_ctx *ctx, libxl_evgen_domain_death *made) {}
void libxl_childproc_setmode(libxl_ctx *ctx, const libxl_childproc_hooks *hooks, void *user) {}
void libxl_osevent_register_hooks(libxl_ctx *ctx, const libxl_osevent_hooks *hooks, void *user) {}
void libxl_event_register_callbacks(libxl_ctx *ctx, const libxl_event_hooks *hooks, void *user) {}
