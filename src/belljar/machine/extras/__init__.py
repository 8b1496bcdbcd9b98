"""What a machine gets beside its image: disks, shares, network, metadata."""
