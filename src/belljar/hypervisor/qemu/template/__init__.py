"""Templates of QEMU's: their folders, how they are made, the memory their clones map."""
