"""What a guest is started by: its kernel and the ramdisk."""
