"""Of a batch job alone, on this host: its checkpoints and output, its announced end, how its process leaves, the hooks around it."""
