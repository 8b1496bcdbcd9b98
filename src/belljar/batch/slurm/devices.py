"""Which devices Slurm gave a job: https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/prolog_epilog.html"""

from belljar.errors import HostError

HINT = "gres.conf has to name each GPU (`File=`, or AutoDetect)."


def given(env: dict[str, str]) -> dict[str, list[str]]:
    """GPUs, by their numbers in gres.conf. Raises HostError where Slurm counts some and names none."""
    names = [name for name in env.get("SLURM_JOB_GPUS", "").split(",") if name]
    if not names and env.get("SLURM_GPUS_ON_NODE", "0") != "0":
        raise HostError("Slurm gave the job GPUs and does not tell which: no SLURM_JOB_GPUS", hint=HINT)
    return {"gpu": names} if names else {}
