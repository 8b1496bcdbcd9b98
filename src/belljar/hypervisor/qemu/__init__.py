"""QEMU: `driver` is the Hypervisor; `cmdline` says what a domain is made of, `process` runs it, `qmp` talks to it,
`domain` is one of them while it lives, `template` keeps booted guests, `proof` finds out whether KVM tells the truth."""
