"""Doors for other people's frameworks: each adapter is one file, stands over `belljar.api` alone, and imports its framework
only when that asks for it. Nothing of ours imports an adapter.

    nemo_gym.py        a sandbox provider of NeMo Gym, found by its entry point
    harbor.py          an environment of Harbor, given by `--env MODULE:CLASS`
    mini_swe_agent.py  an environment of mini-swe-agent, given as `environment_class`
    openenv.py         a container provider of OpenEnv

`sandbox.py` is what they share. Dask, Parsl and submitit take a class or a command of their users': examples/executor has one for each.
"""
