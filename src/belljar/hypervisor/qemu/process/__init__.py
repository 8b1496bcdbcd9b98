"""QEMU as a process: how it is started, what it is handed, its monitor, its last words."""
