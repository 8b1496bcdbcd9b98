"""How the agent starts a payload."""
