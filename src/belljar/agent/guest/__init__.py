"""What the agent does to the system it runs in: identity, accounts, mounts, shares, network, control groups."""
