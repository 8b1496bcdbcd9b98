"""The error tree: what went wrong (message), what to do next (hint), and may one try again (retry).

    BelljarError
    ├── UsageError              the asker must change something        -> cause REFUSED
    ├── ImageError              the image cannot be used               -> cause IMAGE_FAULT
    ├── HostError               this host cannot                       -> cause NODE_FAULT
    ├── SystemSilent            the batch system did not tell what had to be asked; nobody's fault but its own
    ├── ServerSilent            a file server does not answer; nobody's fault but its own
    ├── HypervisorError         QEMU did not do its part               -> cause BOOT_FAILED or NODE_FAULT
    └── GuestError              the guest did not do its part          -> cause BOOT_FAILED or GUEST_LOST

The branches are in two modules beside this one, and all classes are names here. Every class carries a hint; an instance may
sharpen it.
"""

from belljar.errors.base import *
from belljar.errors.host import *
from belljar.errors.usage import *
