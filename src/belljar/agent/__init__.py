"""The guest agent, which travels into the guest as one file (see bundle.py). The host shares its wire and its tar code."""
