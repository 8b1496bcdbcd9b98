"""HTCondor."""
