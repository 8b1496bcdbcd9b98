"""What a user network of QEMU's may do, and how it is kept to that."""
