"""The guest agent: one file that travels into the guest. The host shares its wire codec and its tar code."""
