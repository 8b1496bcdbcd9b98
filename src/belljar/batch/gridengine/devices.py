"""Which devices Grid Engine gave a job: the ids of its RSMAP complexes, of Univa's and Altair's."""

BEGINNING = "SGE_HGR_"


def given(env: dict[str, str]) -> dict[str, list[str]]:
    """By the complex's name: `SGE_HGR_gpu=0 1`."""
    return {
        name[len(BEGINNING) :].lower(): ids.split() for name, ids in env.items() if name.startswith(BEGINNING) and ids
    }
