"""How a program of ours is started: which descriptors it has, and under which limits."""

import os
import resource

from belljar.hypervisor.qemu.process.launch import spawn


def test_a_descriptor_above_the_limit_on_open_files_is_left_behind() -> None:
    """A caller opens it, then lowers the limit: a shell, a batch system's daemon. glibc would not close it in the child."""
    reader, writer = os.pipe()
    high = 3000
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.dup2(reader, high, inheritable=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (high, limits[1]))
    try:
        pid = spawn(["/bin/sh", "-c", f"[ ! -e /proc/self/fd/{high} ] && echo up"], (), writer)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(high)
        os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert os.read(reader, 100) == b"up\n"
    os.close(reader)
