"""The error tree: what went wrong (message), what to do next (hint), and whether to try again (retry).

BelljarError
├── UsageError              the asker must change something        -> cause REFUSED
├── ImageError              the image cannot be used               -> cause IMAGE_FAULT
├── HostError               this host cannot                       -> cause NODE_FAULT
├── RecordsLost            the database of leases does not answer; no fault of the node
├── HypervisorError         QEMU did not do its part               -> cause BOOT_FAILED or NODE_FAULT
└── GuestError              the guest did not do its part          -> cause BOOT_FAILED or GUEST_LOST
"""

from belljar.errors.base import *
from belljar.errors.host import *
from belljar.errors.usage import *
