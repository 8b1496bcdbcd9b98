"""Which devices HTCondor gave a job: https://htcondor.readthedocs.io/en/latest/users-manual/env-of-job.html"""

NONE = "10000"  # ENVIRONMENT_VALUE_FOR_UnAssignedGPUs, of every job without one where a node has some


def given(env: dict[str, str]) -> dict[str, list[str]]:
    """GPUs: `CUDA0,CUDA1` by number, or `GPU-c4a646d7` by the name that condor_gpu_discovery has for it."""
    names = [name.strip().removeprefix("CUDA") for name in env.get("_CONDOR_AssignedGPUs", "").split(",")]
    return {"gpu": names} if any(names) and names != [NONE] else {}
