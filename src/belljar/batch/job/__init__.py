"""One job: what its surroundings mean, which machine it gets, how it is answered. Knows no batch system."""
