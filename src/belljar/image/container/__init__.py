"""Container images as machines: fetched by skopeo, unpacked by umoci, written to an ext4 disk, started by a kernel of the store's.

sources    what is asked for -> an OCI layout with one image in it
layout     what such a folder holds, and one more layer for it
disk       the layout, with the kernel's modules as its last layer -> an image of the store
"""
