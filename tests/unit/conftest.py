"""Property tests have no time limit of their own: on a loaded host an example may take long without being wrong."""

from hypothesis import settings

settings.register_profile("runtime", deadline=None)
settings.load_profile("runtime")
