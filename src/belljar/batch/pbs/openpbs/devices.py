"""Which devices OpenPBS gave a job: its hook for control groups puts the UUIDs of GPUs, or of their slices, into one variable."""


def given(env: dict[str, str]) -> dict[str, list[str]]:
    """A number there is a user's own: `qsub -V` hands it on."""
    names = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.startswith(("GPU-", "MIG-"))]
    return {"gpu": names} if names else {}
